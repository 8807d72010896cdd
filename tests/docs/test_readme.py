"""
The README is true: its code runs and says what it says, its numbers are the reports'.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import attrs
import pytest

from qeffect.gpu_runtime.bench.tables import Asked, asked
from qeffect.gpu_runtime.parallel.alone import bound_ms
from qeffect.gpu_runtime.parallel.model import Job
from qeffect.gpu_runtime.parallel.scale import CELLS
from tests.docs.bench_block import conditions, figures, missed
from tests.docs.blocks import (
    KERNEL_REPORTS,
    README,
    ROOT,
    RUNTIME_REPORTS,
    _agreements,
    load,
    proofs,
    rendered,
)
from tests.docs.remarks import CUT, REMARKS, remark
from tests.docs.runtime_block import (
    _bits,
    _guards,
    _parts,
    _typed,
    example_of,
    files,
    reports,
)


def python_blocks() -> list[str]:
    """Every Python block of the README, in order."""
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def said_by(code: str) -> str:
    """Run a block; return what it printed as one line."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    return " ".join(out.getvalue().split())


def comments_of(code: str) -> str:
    """What a block's comments say its last print prints."""
    after = code[code.rindex("print(") :].splitlines()[1:]
    return " ".join(line.removeprefix("#").strip() for line in after)


def test_first_check_is_six_lines() -> None:
    """The first block is a check of at most six lines, and refuses what it says it refuses."""
    block = python_blocks()[0]

    code = [line for line in block.splitlines() if line.strip() and not line.startswith("#")]

    assert len(code) <= 6
    assert said_by(block) == comments_of(block)


def test_the_embedding_ends_in_the_refusal_that_it_names() -> None:
    """The embedding runs a whole epoch and ends in the refusal that its comment names."""
    block = python_blocks()[1]

    assert "ownership.stale-reference" == said_by(block)


def test_generated_blocks_are_current() -> None:
    """Every generated number is the one in its report."""
    text = README.read_text(encoding="utf-8")

    assert rendered(text) == text


#: A number with a unit, a share or a count of what a report counts: only a report may say it.
MEASURED = re.compile(
    r"\d[\d.,]* ?(?:ns|µs|us|ms|s|min|B|kB|KiB|MB|MiB|GB|GiB|%|x|/s)(?![\w-])"
    r"|\d[\d.,]* (?:of|in) \d[\d.,]*"
    r"|\d[\d,]* (?:values|comparisons|obligations|mutants|states|checks|tensors|copies)\b"
)


def prose(text: str) -> str:
    """The README without its generated blocks, its code and what its links lead to."""
    for pattern in (r"<!-- begin: (\w+) -->.*?<!-- end: \1 -->", r"```.*?```", r"\]\([^)]*\)"):
        text = re.sub(pattern, " ", text, flags=re.DOTALL)
    return text


def test_no_measurement_stands_outside_a_generated_block() -> None:
    """What was measured is in a block, which is rendered from reports and compared with them."""
    assert [] == MEASURED.findall(prose(README.read_text(encoding="utf-8")))


def test_a_measurement_in_prose_is_found() -> None:
    """Times, shares and counts are seen; versions, names and sizes of an example are not."""
    said = "took 36.6 ms, 1% behind, 16 of 32, 1,079,616 values, 1.4x and 24 µs"
    plain = "Python 3.11, `h2048-s256-m4`, PP=2, 64 tokens, TE 2.18 on Hopper, 16-byte writes"

    assert 6 == len(MEASURED.findall(said))
    assert [] == MEASURED.findall(plain)
    assert [] == MEASURED.findall(prose(f"<!-- begin: x -->{said}<!-- end: x -->"))


def test_every_report_is_named_with_its_own_commit() -> None:
    """Reports of one section may be of several commits; each is beside its report."""
    text = README.read_text(encoding="utf-8")
    rows = {line.split("]")[0][3:]: line for line in text.splitlines() if line.startswith("| [")}

    for path in sorted(RUNTIME_REPORTS.glob("*.json")):
        data = load(path)
        if "environment" in data:
            assert f"`{data['environment']['commit'][:12]}`" in rows[path.name]


def test_a_goal_that_is_missed_by_rounding_is_missed() -> None:
    """The run of the proofs' report is held against the goal as it is, not as it is spelled."""
    bench, proofs = (load(KERNEL_REPORTS / name) for name in ("bench.json", "proofs.json"))

    for seconds, misses in ((9.99, False), (10.0, False), (10.004, True), (10.169, True)):
        rows = figures(bench, {**proofs, "seconds": seconds})
        (row,) = (row for row in rows if row.name.endswith("run of the proofs' report"))
        assert row.misses is misses
        assert row.cells()[1].startswith("**") is misses
        count = sum(cells[1].startswith("**") for cells in (row.cells() for row in rows))
        assert missed(rows, bench).startswith(f"{count} of ")


def test_a_report_that_was_cut_short_says_so() -> None:
    """A remark stands for each that did not reach its end, and for no other."""
    short = {
        (path.name, report["environment"]["commit"][:12])
        for path in RUNTIME_REPORTS.glob("*.json")
        if not (report := load(path)).get("complete", True)
    }
    assert short == set(CUT)
    assert all("ended at a time limit" in said for said in CUT.values())


def test_the_rows_that_cut_tables_lack_are_those_of_their_remark() -> None:
    """Of each trial, by what it was asked for."""
    report = load(RUNTIME_REPORTS / "tables.json")
    said = remark("tables.json", report)
    lacks = []
    for of, trial in zip(report["configuration"]["merged"], report["raw"]["trials"], strict=True):
        wanted = asked(of["parts"], of["cells"], of["pp"], microbatches=of["microbatches"])
        there = {
            Asked(*(row[field.name] for field in attrs.fields(Asked))) for row in trial["rows"]
        }
        lacks.append(
            [(a.model, a.microbatches, a.schedule, a.side) for a in wanted if a not in there]
        )
    assert lacks == [
        [],
        [("language", 32, "zbv", "replays")],
        [("layers", 8, "1f1b", "one launch")]
        + [("layers", 8, "izb", side) for side in ("replays", "one launch")],
    ]
    assert "they lack 32 microbatches, and of the layers alone over four ranks one launch" in said


def test_a_bound_is_that_of_its_reports_times() -> None:
    """Of graphs alone, and of those in order where a report has them."""
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
    """Another machine than the goals', another commit than the proofs'; and nothing otherwise."""
    text = conditions(
        {"environment": {"cpu": cpu, "commit": commit}}, {"environment": {"commit": "1" * 40}}
    )

    assert said == [each for each in ("another machine", "another commit") if each in text]
    assert bool(text) is bool(said)


def test_open_paths_are_not_called_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as a path is taken by none and not named, the proofs do not say that none is."""
    report = load(KERNEL_REPORTS / "proofs.json")
    row = {"kind": "witness", "verdict": "unsat"}
    for unnamed, vacuous in (([], False), ([row] * 3, True)):
        now = {**report, "open": unnamed}
        monkeypatch.setattr("tests.docs.blocks.load", lambda _, now=now: now)
        assert ("Nothing is vacuous" in proofs()) is not vacuous
        assert ("3 are open" in proofs()) is vacuous
        taken = report["witnesses"] - report["covered"] - len(unnamed)
        assert f"{taken} are taken from some state" in proofs()


def test_one_row_of_bits_for_each_report() -> None:
    """With the commit and the mismatches of its own, which are counted from three comparisons."""
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
    """Every median lies within its range; what matters is on which side of zero the range is."""
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
    """A later report of a cell does not hide what an earlier one found."""
    text = README.read_text(encoding="utf-8")

    for name, report in files("bench"):
        for cell in report["derived"]["cells"]:
            row = f"| {cell['cell']} | {name} | "
            assert (row in text) is (cell["guards"] is not None or "host" in cell), row


def test_parts_and_rest_are_the_whole() -> None:
    """The rows of the table of parts add up to its last one, which the goal judges."""
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


def test_a_goal_of_the_runtime_that_is_missed_is_listed() -> None:
    """Every one, of every report, by its name, its cell and its column."""
    text = README.read_text(encoding="utf-8")

    for kind in ("bench", "sweep"):
        for report in reports(kind):
            for goal in report["derived"]["targets"]:
                row = f"| {goal['goal']} | {goal['cell']} | `{goal['column']}` |"
                assert (row in text) is not goal["met"], row


@pytest.mark.parametrize(
    "name", ["README.md", "qeffect/schedule/README.md", "gpu_runtime/README.md"]
)
def test_linked_files_and_headings_exist(name: str) -> None:
    """Every relative link and picture leads somewhere, to a heading where it names one."""
    page = ROOT / name
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        path, _, heading = link.partition("#")
        if "://" not in link:
            found = (page.parent / path).resolve() if path else page
            assert found.exists(), link
            assert not heading or heading in headings(found), link
    assert links


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def test_what_a_second_solver_was_told_is_said() -> None:
    """Goals are counted by the hypotheses that proved them; one without an answer is named."""
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
        "2 seeds of Z3 agree on the 9 obligations of all relations; cvc5 agrees on all 9 of them "
        "(7 from few lemmas, 2 from every lemma)."
    ) == _agreements([z3, all_of_them])
    assert _agreements([z3, some]).endswith(
        "cvc5 agrees on 8 of them (8 from few lemmas), and on 1 it gave no answer in 10 s "
        "(`a.claim` at read)."
    )


def test_the_file_of_a_run_is_found_by_what_the_report_was_asked() -> None:
    """Whatever it was called then; another configuration is none of the examples'."""
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


def test_a_goal_stands_beside_every_figure_over_its_bound() -> None:
    """Of its own cell, and in bold where it is missed."""
    text, counted = README.read_text(encoding="utf-8"), 0
    for _, report in files("scale"):
        for row in report["derived"]["timed"]:
            if (over := row["over_bound"]) is None:
                continue
            goal = {"h2048-s256-m4": "1.08x", "h4096-s256-m8": "1.04x"}[row["cell"]]
            said = f"{over:.2f}x"
            bold = f"**{said}**" if over > float(goal[:-1]) else said
            place = f"| {row['cell']} | {row['schedule']} | {row['side']} | "
            lines = [line for line in text.splitlines() if line.startswith(place)]
            assert any(f"| {bold} (goal {goal}) |" in line for line in lines), place
            counted += 1
    assert counted


def test_a_remark_is_of_a_report_of_one_commit() -> None:
    """A report that is made again says it no more."""
    for (name, commit), said in REMARKS.items():
        for made_at, told in ((commit + "0" * 28, True), ("f" * 40, False)):
            report = {"environment": {"commit": made_at}}
            assert remark(name, report) == (f" {said}" if told else "")


@pytest.mark.parametrize(
    ("program", "kind", "argv", "said"),
    [
        ((), "bench", "bench --out F --commit C", "qeffect runtime bench --out F"),
        ((), "scale", "runtime scale --pp 2", "qeffect runtime scale --pp 2"),
        ((), "restarts", "--out F", "python -m qeffect.gpu_runtime.training.restarts --out F"),
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
    """As it was typed, but for the commit; reports of before say less."""
    environment = {"argv": argv.split(), **({"program": [*program]} if program else {})}
    assert said == _typed({"kind": kind, "environment": environment})
