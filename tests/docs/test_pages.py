"""
The pages are correct: numbers equal the reports', misses are listed, and links lead somewhere.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from qeffect.gpu_runtime.lab.commands.scale import CELLS
from qeffect.gpu_runtime.lab.reports import paths
from qeffect.gpu_runtime.lab.runner.rank_parts import bound_ms
from qeffect.gpu_runtime.lab.sides.table_rows import TableRow, table_rows
from qeffect.gpu_runtime.ranks.job import Job
from tests.docs import reading, readme_block, runtime_block, summary_block, trust_block
from tests.docs.bench_block import conditions, figures, missed
from tests.docs.blocks import (
    KERNEL_REPORTS,
    README,
    ROOT,
    RUNTIME_PAGE,
    RUNTIME_REPORTS,
    load,
    pages,
    rendered,
)
from tests.docs.device_block import _guards, _parts
from tests.docs.history import AGE
from tests.docs.kernel_block import agreements, proofs
from tests.docs.reading import dated, files
from tests.docs.remarks import CUT, IN_SHORT, REMARKS, bound, in_short, remark
from tests.docs.runtime_block import _bits, _typed, example_of


def text_of(page: Path) -> str:
    """A page as it is checked in."""
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_generated_blocks_are_current(page: Path) -> None:
    """Every generated number equals the report's; ages date from when the page was made."""
    assert AGE.sub("later", rendered(page)) == AGE.sub("later", text_of(page))


def test_the_readme_is_short() -> None:
    """A reader of the README reads all of it; long parts have their own pages."""
    assert text_of(README).count("\n") < 250
    assert [] == [line for line in set_lines(text_of(README)) if len(line) > 160]


def set_lines(text: str) -> list[str]:
    """The lines of a page that can be broken: not in tables or code."""
    found = re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines()
    return [line for line in found if not line.startswith("|")]


def test_a_long_line_is_seen() -> None:
    """A row of a table or a line of code may be longer."""
    assert ["short", "", "end"] == set_lines("short\n| a | b |\n```sh\nlong\n```\nend")[:3]


#: A number with a unit, a share or a count of what a report counts: only a report may say it.
MEASURED = re.compile(
    r"\d[\d.,]* ?(?:ns|µs|us|ms|s|min|B|kB|KiB|MB|MiB|GB|GiB|%|x|/s)(?![\w-])"
    r"|\d[\d.,]* (?:of|in) \d[\d.,]*"
    r"|\d[\d,]* (?:values|comparisons|obligations|mutants|states|checks|tensors|copies)\b"
)


def prose(text: str) -> str:
    """A page without its generated blocks, its code and its link targets."""
    for pattern in (r"<!-- begin: (\w+) -->.*?<!-- end: \1 -->", r"```.*?```", r"\]\([^)]*\)"):
        text = re.sub(pattern, " ", text, flags=re.DOTALL)
    return text


OTHERS = (ROOT / "qeffect" / "README.md", ROOT / "docs" / "limits.md")


@pytest.mark.parametrize(
    "page",
    [page for page in (*pages(), *OTHERS) if page not in trust_block.PAGES],
    ids=str,
)
def test_no_measurement_stands_outside_a_generated_block(page: Path) -> None:
    """Measurements stand only in blocks, which are rendered from reports and compared."""
    assert [] == MEASURED.findall(prose(text_of(page)))


def test_a_measurement_in_prose_is_found() -> None:
    """Times, shares and counts are found; versions, names and example sizes are not."""
    said = "took 36.6 ms, 1% behind, 16 of 32, 1,079,616 values, 1.4x and 24 µs"
    plain = "Python 3.11, `h2048-s256-m4`, PP=2, 64 tokens, TE 2.18 on Hopper, 16-byte writes"

    assert 6 == len(MEASURED.findall(said))
    assert [] == MEASURED.findall(plain)
    assert [] == MEASURED.findall(prose(f"<!-- begin: x -->{said}<!-- end: x -->"))


def test_every_report_is_named_with_its_own_commit() -> None:
    """Reports of one section may have several commits; each stands beside its report."""
    text = section("The reports")
    rows = {line.split("]")[0][3:]: line for line in text.splitlines() if line.startswith("| [")}

    for path in sorted(RUNTIME_REPORTS.glob("*.json")):
        data = load(path)
        if "environment" in data:
            assert f"`{data['environment']['commit'][:12]}`" in rows[path.name]


def test_a_goal_that_is_missed_by_rounding_is_missed() -> None:
    """The proofs' time is compared with the goal before rounding."""
    bench, proofs = (load(KERNEL_REPORTS / name) for name in ("bench.json", "proofs.json"))

    for seconds, misses in ((9.99, False), (10.0, False), (10.004, True), (10.169, True)):
        rows = figures(bench, {**proofs, "seconds": seconds})
        (row,) = (row for row in rows if row.name.endswith("run of the proofs' report"))
        assert row.misses is misses
        assert row.cells()[1].startswith("**") is misses
        count = sum(cells[1].startswith("**") for cells in (row.cells() for row in rows))
        assert missed(rows, bench).startswith(f"{count} of ")


def test_a_report_that_was_cut_short_says_so() -> None:
    """Each incomplete report has a caveat about its missing parts; no complete report has such a
    caveat."""
    short = {
        (path.name, report["environment"]["commit"][:12])
        for path in RUNTIME_REPORTS.glob("*.json")
        if not (report := load(path)).get("complete", True)
    }
    assert short == set(CUT)
    ends = ("ended at a time limit", "ended with an error", "were removed")
    assert all(any(end in " ".join(said.split()) for end in ends) for said in CUT.values())


def test_the_rows_that_cut_tables_lack_are_those_of_their_remark() -> None:
    """The caveat names the requested rows that each trial lacks."""
    report = load(RUNTIME_REPORTS / "tables_four.json")
    said = remark("tables_four.json", report)
    lacks = []
    for of, trial in zip(report["configuration"]["merged"], report["raw"]["trials"], strict=True):
        wanted = table_rows(of["parts"], of["cells"], of["pp"], microbatches=of["microbatches"])
        there = {
            TableRow(*(row[field.name] for field in attrs.fields(TableRow)))
            for row in trial["rows"]
        }
        lacks.append(
            [(a.model, a.microbatches, a.schedule, a.side) for a in wanted if a not in there]
        )
    if not said:
        assert not any(lacks)
        return
    assert lacks == [
        [],
        [("language", 32, "zbv", "replays")],
        [("layers", 8, "1f1b", "one launch")]
        + [("layers", 8, "izb", side) for side in ("replays", "one launch")],
    ]
    assert "start over two ranks lacks the measurement with 32 microbatches" in said
    assert "one launch under 1f1b, and replays and one launch under izb" in said


def test_a_bound_is_that_of_its_reports_times() -> None:
    """Computed from graphs alone, and from graphs in order if a report has such times."""
    counted = 0
    for _, report in files("scale"):
        for row in report["raw"]["timed"]:
            if row["side"] != "one launch":
                continue
            config, microbatches = CELLS[row["cell"]]
            job = Job(
                schedule=row["schedule"],
                pp=report["configuration"]["pp"],
                microbatches=microbatches,
                config=config,
            )
            message = row.get("message_ms", 0.0)
            bound = bound_ms(job, row["alone_ms"], row["update_ms"], message)
            assert bound == pytest.approx(row["bound_ms"])
            counted += 1
            if own := row.get("in_order"):
                bound = bound_ms(job, own["times_ms"], own["update_ms"], message)
                assert bound == pytest.approx(own["bound_ms"])
    assert counted


@pytest.mark.parametrize(
    ("cpu", "commit", "said"),
    [
        ("AMD EPYC", "1" * 40, []),
        ("another", "1" * 40, ["another machine"]),
        ("AMD EPYC", "2" * 40, ["another commit"]),
        ("another", "2" * 40, ["another machine", "another commit"]),
    ],
)
def test_other_conditions_of_the_bench_are_said(cpu: str, commit: str, said: list[str]) -> None:
    """The page notes a machine other than the goals', or a commit other than the proofs'."""
    text = conditions(
        {"environment": {"cpu": cpu, "commit": commit}}, {"environment": {"commit": "1" * 40}}
    )

    assert said == [each for each in ("another machine", "another commit") if each in text]
    assert bool(text) is bool(said)


def test_open_paths_are_not_called_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a path is open, the page does not claim that all paths are covered."""
    report = load(KERNEL_REPORTS / "proofs.json")
    row = {"kind": "witness", "verdict": "unsat"}
    for unnamed, vacuous in (([], False), ([row] * 3, True)):
        now = {**report, "open": unnamed}
        monkeypatch.setattr("tests.docs.kernel_block.load", lambda _, now=now: now)
        assert ("The proofs cover calls that can happen" in proofs()) is not vacuous
        assert ("For 3 more, the code of that commit gives no reason" in proofs()) is vacuous
        taken = report["witnesses"] - report["covered"] - len(unnamed)
        assert f"{taken:,} are taken from some state" in proofs()


def test_one_row_of_bits_for_each_report() -> None:
    """With its commit, and with mismatches counted from three comparisons."""
    (name, report), *_ = files("compare")
    wrong = {**report["derived"]["native_again"], "mismatched": 7}
    other = {**report, "derived": {**report["derived"], "native_again": wrong}}
    rows = "\n".join(_bits([(name, report), ("other.json", other)])).splitlines()
    fine, found = (row for row in rows if row.startswith("| ["))

    assert report["environment"]["commit"][:12] in fine
    assert "| 0 |" in fine
    assert "| control 7 |" in found


@pytest.mark.parametrize(
    ("least", "most", "noise"), [(-1.0, 2.0, True), (0.5, 2.0, False), (-2.0, -0.5, False)]
)
def test_a_difference_is_noise_where_its_range_includes_zero(
    least: float, most: float, noise: bool
) -> None:
    """A difference counts only if its whole range lies on one side of zero."""
    each = {"median": (least + most) / 2, "min": least, "max": most}
    said = _guards(
        {
            "host_ms_on": {"median": 1.0},
            "host_ms_off": {"median": 1.0},
            "actions": 26,
            "host_us_of_a_guard": each,
        }
    )[-1]

    assert said.endswith(", noise") is noise


def test_every_report_that_measured_a_guard_has_a_row() -> None:
    """A later report of a cell does not hide an earlier report's row."""
    text = text_of(RUNTIME_PAGE)

    for name, report in files("bench"):
        for cell in report["derived"]["cells"]:
            row = f"| {cell['cell']} | {name} | "
            assert (row in text) is (cell["guards"] is not None or "host" in cell), row


def test_parts_and_rest_are_the_whole() -> None:
    """The rows of the table of parts add up to its last row, which the goal judges."""
    tables = [
        table
        for name, report in files("bench")
        for cell in report["derived"]["cells"]
        for table in list(_parts(cell, name))[1:]
    ]
    for table in tables:
        found = re.findall(r"\| \**(-?\d+\.\d)\** \|$", table, re.MULTILINE)
        *parts, whole = map(float, found)
        assert len(parts) == table.count("\n") - 2
        assert abs(whole - sum(parts)) <= 0.05 * len(found)
    assert tables


SECTIONS: Mapping[str, tuple[str, ...]] = {
    "A step on one device": ("bench", "sweep"),
    "A pipeline over ranks": ("scale",),
    "The paper's tables": ("tables",),
    "Peers": ("peers",),
}
"""By kinds of reports with goals: the section of the runtime's page that tells of them."""


def section(heading: str) -> str:
    """A section of the runtime's page, with all its subsections."""
    _, _, after = text_of(RUNTIME_PAGE).partition(f"\n## {heading}\n")
    assert after, heading
    return after.partition("\n## ")[0]


def missed_rows(text: str) -> list[str]:
    """The rows of all tables of missed goals."""
    found = re.findall(r"^\| goal \| cell .*\n\| --- .*\n((?:\|.*\n?)+)", text, re.MULTILINE)
    return [row for table in found for row in table.splitlines()]


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_goal_of_the_runtime_that_is_missed_is_listed(heading: str) -> None:
    """Exactly the missed goals of every report, by name, cell and column."""
    kinds, latest = SECTIONS[heading], {}
    alone = "bench" in kinds  # a goal of one device counts once, as the last report found it
    for name, report in dated(*kinds):
        for goal in report["derived"]["targets"]:
            column = f"`{goal['column']}`" if alone else goal["column"]
            latest["" if alone else name, goal["goal"], goal["cell"], column] = goal["met"]
    wanted = sorted(place[1:] for place, met in latest.items() if not met)
    rows = [tuple(row.strip("| ").split(" | ")[:3]) for row in missed_rows(section(heading))]

    assert sorted(rows) == wanted
    assert latest


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_goal_that_is_missed_has_its_reason(heading: str) -> None:
    """In brackets after the reason's title, in the section of its table."""
    text = prose(section(heading))
    reasons = re.findall(r"^- \*[^*]+\*.{,80}?\(([^)]+)\)", text, re.MULTILINE | re.DOTALL)
    told = {" ".join(name.split()) for names in reasons for name in names.split(";")}
    names = {row.split(" | ")[0].removeprefix("| ") for row in missed_rows(section(heading))}
    assert names <= told


def test_the_readme_counts_what_the_page_lists() -> None:
    """The README's count of missed goals is the number of rows in the tables of missed goals."""
    (count,) = re.findall(r"are met and ([\d,]+) are missed", text_of(README))
    assert int(count.replace(",", "")) == len(missed_rows(text_of(RUNTIME_PAGE)))


def test_what_a_second_solver_was_told_is_said() -> None:
    """Goals are counted by the lemmas that proved them; unanswered goals are named."""
    z3 = {"solver": "z3", "unsat": 9, "goals": 9, "open": []}
    all_of_them = {
        "solver": "cvc5",
        "unsat": 9,
        "open": [],
        "attempts": {"few lemmas": 7, "every lemma": 2},
    }
    row = {"name": "a.claim", "transition": "read", "verdict": "unknown", "seconds": 10.01}
    some = {"solver": "cvc5", "unsat": 8, "open": [row], "attempts": {"few lemmas": 8}}

    assert (
        "2 seeds of Z3 prove all 9 obligations with all relations; the solver cvc5 proves all 9 "
        "(7 with few lemmas, 2 with every lemma)."
    ) == agreements([z3, all_of_them])
    assert agreements([z3, some]).endswith(
        "cvc5 proves 8 (8 with few lemmas) and gave no answer on 1 within 10 s (`a.claim` at read)."
    )


def test_the_file_of_a_run_is_found_by_what_the_report_was_asked() -> None:
    """By its fields, not its file name; another configuration matches no example."""
    for name, wanted in (
        ("curves.json", "h200_history.toml"),
        ("curves_short.json", "h200_short.toml"),
    ):
        report = load(RUNTIME_REPORTS / name)
        assert wanted == example_of(report)
        asked = report["configuration"]
        other = {**asked, "model": {**asked["model"], "hidden": 64}}
        assert example_of({**report, "configuration": other}) is None
    assert example_of(load(RUNTIME_REPORTS / "scale.json")) is None


def test_a_goal_stands_beside_every_launch_over_its_bound() -> None:
    """The goal of its cell, in bold if missed; replays have a bound but no such goal."""
    text, counted = section("A pipeline over ranks"), 0
    for _, report in files("scale"):
        for row in report["derived"]["timed"]:
            if (over := row["over_bound"]) is None:
                continue
            goal = {"h2048-s256-m4": "1.08x", "h4096-s256-m8": "1.04x"}[row["cell"]]
            said = f"{over:.2f}x"
            bold = f"**{said}**" if over > float(goal[:-1]) else said
            cell = f"| {bold} (goal {goal}) |" if row["side"] == "one launch" else f"| {said} |"
            place = f"| {row['cell']} | {row['schedule']} | {row['side']} | "
            lines = [line for line in text.splitlines() if line.startswith(place)]
            assert any(cell in line for line in lines), place
            counted += 1
    assert counted


def test_ratios_over_a_native_behind_the_profiler_are_bounds() -> None:
    """In both reports that were timed so, in their own tables; and in no other report's."""
    text = (ROOT / "gpu_runtime/lab/reports/README.md").read_text()
    sections = dict(
        zip(("scale.json", "scale_four.json"), text.split("\n### scale")[1:3], strict=True)
    )
    for name, section in sections.items():
        report = load(RUNTIME_REPORTS / name)
        cells = [row.split(" | ")[6] for row in section.splitlines() if " | one launch | " in row]
        signs = {cell.partition(" ")[0] == "≤" for cell in cells}
        assert signs == {name == "scale_four.json"}
        assert bound(name, report) == ("≤ " if name == "scale_four.json" else "")


def test_a_remark_is_of_a_report_of_one_commit() -> None:
    """A caveat does not apply to a new run of the report."""
    for (name, commit), said in REMARKS.items():
        for made_at, told in ((commit + "0" * 28, True), ("f" * 40, False)):
            report = {"environment": {"commit": made_at}}
            assert remark(name, report) == (f" {said}" if told else "")
            assert in_short(name, report) == (
                f" ({IN_SHORT[name]})" if told and name in IN_SHORT else ""
            )
    assert IN_SHORT.keys() <= {name for name, _ in REMARKS}


@pytest.mark.parametrize(
    ("program", "kind", "argv", "said"),
    [
        ((), "bench", "bench --out F --commit C", "qeffect runtime bench --out F"),
        ((), "scale", "runtime scale --pp 2", "qeffect runtime scale --pp 2"),
        ((), "restarts", "--out F", "qeffect runtime report restarts --out F"),
        (
            ("torchrun", "-m", "qeffect"),
            "scale",
            "runtime scale",
            "torchrun -m qeffect runtime scale",
        ),
    ],
)
def test_the_command_line_of_a_report(
    program: tuple[str, ...], kind: str, argv: str, said: str
) -> None:
    """As typed, without the commit; older reports record less."""
    environment = {"argv": argv.split(), **({"program": [*program]} if program else {})}
    assert said == _typed({"kind": kind, "environment": environment})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of reports in place of the checked-in ones."""
    for module in (reading, runtime_block):
        monkeypatch.setattr(module, "RUNTIME_REPORTS", tmp_path)
    return tmp_path


def test_without_reports_nothing_is_said_of_the_runtime(folder: Path) -> None:
    """No block fails, and the summary is empty."""
    assert summary_block.short() == readme_block.runtime() == ""
    made = {name: make() for name, make in runtime_block.BLOCKS.items()}
    assert {name for name, said in made.items() if said} <= {"reports"}


KINDS = sorted({load(path)["kind"] for path in paths()})


@pytest.mark.parametrize("kind", KINDS)
def test_reports_of_one_kind_are_told_without_the_others(folder: Path, kind: str) -> None:
    """Missing reports are left out; the page has the rest, and the summary most of it."""
    names = [name for name, _ in files_of(kind)]
    for name in names:
        (folder / name).write_bytes((RUNTIME_REPORTS / name).read_bytes())
    page = "\n".join(make() for make in runtime_block.BLOCKS.values())
    assert names
    assert all(f"[{name}]({name})" in page for name in names)
    if kind in summary_block.COMPARED:
        said = summary_block.short()
        # Native accumulates in bf16, so bits are not compared where gradients are fp32. Three runs
        # have no native.
        without = {"models_fp32.json", "models_one_gpu_fp32.json"}
        without |= {"models_izb.json", "models_8b_8192_izb.json", "models_8b_kinds.json"}
        assert all((f"| [{name}]({name}) | " in said) == (name not in without) for name in names)


def test_a_listed_command_line_can_be_typed_again() -> None:
    """A shell splits it into the original words, including words with blanks."""
    argv = ["runtime", "scale", "--compared", "hidden 512", "--commit", "abc", "--out", "a.json"]
    typed = _typed({"kind": "scale", "environment": {"argv": argv}})
    assert shlex.split(typed) == ["qeffect", *argv[:4], *argv[6:]]


def files_of(kind: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The checked-in reports of a kind, even if a test replaces their folder."""
    found = [(path.name, load(path)) for path in paths()]
    return [(name, report) for name, report in found if report["kind"] == kind]
