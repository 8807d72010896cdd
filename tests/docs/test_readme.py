"""
The README is true: its code runs and says what it says, its numbers are the reports'.
"""

from __future__ import annotations

import contextlib
import io
import re

from tests.docs.bench_block import figures, missed
from tests.docs.blocks import KERNEL_REPORTS, README, ROOT, RUNTIME_REPORTS, load, rendered
from tests.docs.runtime_block import reports


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
        assert (row.name in missed(rows, bench)) is misses


def test_a_goal_of_the_runtime_that_is_missed_is_listed() -> None:
    """Every one, of every report, by its name, its cell and its column."""
    text = README.read_text(encoding="utf-8")

    for kind in ("bench", "sweep"):
        for report in reports(kind):
            for goal in report["derived"]["targets"]:
                row = f"| {goal['goal']} | {goal['cell']} | `{goal['column']}` |"
                assert (row in text) is not goal["met"], row


def test_linked_files_exist() -> None:
    """Every relative link and picture leads somewhere."""
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8"))

    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]

    assert [] == missing
    assert len(links) >= 5
