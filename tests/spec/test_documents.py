"""The written contract and the fault table agree with their data."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from qeffect import spec
from qeffect.engine.stage import OPTIONAL, RELATIONS
from qeffect.spec.__main__ import main
from qeffect.spec.clauses import CLAUSES, PARTS, SCHEDULE_CLAUSES
from qeffect.spec.document import DOCUMENTS, contract, fault_rows, link
from qeffect.spec.promises import CHANGES, LEGAL, MEMORY, STEPS, WORLD
from tests.docs.links import inlined, unlinked

FOLDER = Path(spec.__file__).parent
PAPER_TITLE = (
    "Explicit State and Resource Contracts for Low-Precision Pipeline Parallel Training under "
    "Captured Graphs"
)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_checked_in_document_is_current(name: str) -> None:
    """A checked-in document equals what its data render."""
    assert DOCUMENTS[name]() == (FOLDER / name).read_text(encoding="utf-8")


def test_the_page_has_the_links_of_the_contract() -> None:
    """Some have their target at the page's end, and each such link has one."""
    page = (FOLDER / "contract.md").read_text(encoding="utf-8")
    labels = re.findall(r"\[(`[^`\]]+`)\](?![(:])", page)
    ends = re.findall(r"^\[(`[^`\]]+`)\]: \S+$", page, re.MULTILINE)

    assert inlined(page).rstrip() == contract().rstrip()
    assert set(labels) == set(ends)
    assert len(ends) == len({end.lower() for end in ends}) > 50


def test_check_passes_on_current_documents_and_writes_nothing(tmp_path: Path) -> None:
    """Written documents are current, and a check of them finds nothing."""
    assert main(["--folder", str(tmp_path)]) == 0
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

    assert main(["--folder", str(tmp_path), "--check"]) == 0
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_check_fails_on_a_stale_document(name: str, tmp_path: Path) -> None:
    """An edited or missing document exits with 1 and is left as it is."""
    main(["--folder", str(tmp_path)])
    (tmp_path / name).write_text("edited", encoding="utf-8")

    assert main(["--folder", str(tmp_path), "--check"]) == 1
    assert (tmp_path / name).read_text(encoding="utf-8") == "edited"

    (tmp_path / name).unlink()

    assert main(["--folder", str(tmp_path), "--check"]) == 1
    assert not (tmp_path / name).exists()


def test_every_clause_is_found_by_its_id() -> None:
    """The index leads to each clause's section."""
    text = contract()
    for clause in (*CLAUSES.values(), *SCHEDULE_CLAUSES.values()):
        heading = f"{clause.number} {clause.title}"
        assert text.count(f"`{clause.id}` [{clause.number}]({link(heading)})") == 1
        assert f"### {heading}\n" in text


def test_only_calls_with_a_clauses_argument_are_named_for_it() -> None:
    """An evaluation has no key, so a clause that it shares names the two calls that have one."""
    calls = "`check_forward` or `check_dgrad`"
    expected = f"After a refusal of {calls}, look at the argument `key.epoch`."
    assert f"`check_forward`, `check_evaluation`, `check_dgrad`. {expected}" in unlinked(contract())


def test_a_promise_and_a_clause_of_one_name_are_linked() -> None:
    """Each says which of the two it is, and leads to the other."""
    text = unlinked(contract())
    promises = {p.name for register in (MEMORY, WORLD, STEPS, CHANGES, LEGAL) for p in register}
    both = promises & CLAUSES.keys()
    assert "order.token" in both
    for name in both:
        (clause,) = re.findall(rf"^`{re.escape(name)}` .*$", text, re.MULTILINE)
        assert f"This is the clause; [a promise](#promise-{name})" in clause
        rows = re.findall(rf"^- `{re.escape(name)}`.*$", text, re.MULTILINE)
        assert rows
        assert all("(the promise; [the clause](#" in row for row in rows)


def test_every_clause_stands_in_the_contract_once() -> None:
    """The normative text has each clause's heading and id exactly once."""
    text = contract()
    for clause in (*CLAUSES.values(), *SCHEDULE_CLAUSES.values()):
        assert text.count(f"### {clause.number} {clause.title}\n") == 1
        assert text.count(f"\n`{clause.id}` (") == 1


def test_parts_stand_in_the_order_in_which_guards_run() -> None:
    """The text's parts are the stage's relations in the normative order, then the event log."""
    relations = [name for name in RELATIONS if name != "tickets"]

    assert [*relations, "log"] == [part.name for part in PARTS]


def test_the_text_names_the_parts_that_may_be_left_out() -> None:
    """The chapter on parts lists exactly the optional relations."""
    sentence = re.search(r"leaves the part out:\s+([^.]*) are optional", contract())
    assert sentence is not None

    assert set(OPTIONAL) == set(re.findall(r"[a-z]+", sentence[1])) - {"and"}


def test_chapters_are_numbered_through() -> None:
    """Headings count from 0, and no chapter is without a number."""
    headings = re.findall(r"^## (.*)$", contract(), re.MULTILINE)

    assert [f"{n}" for n in range(len(headings))] == [h.partition(".")[0] for h in headings]


@pytest.mark.parametrize("document", [FOLDER / "contract.md", FOLDER.parents[1] / "README.md"])
def test_the_paper_is_cited(document: Path) -> None:
    """Title and authors of the paper stand in the contract and in the README."""
    text = " ".join(document.read_text(encoding="utf-8").split())

    assert PAPER_TITLE in text
    assert "Genlang Chen and Junyi Zhu" in text


def test_differences_name_a_place_in_the_paper_and_a_reason() -> None:
    """Each row says what the paper says and where, what is so here, and why."""
    _, _, chapter = contract().partition(". Where it differs from the paper\n")
    rows = [r for r in chapter.split("\n## ")[0].splitlines() if r.startswith("| ")][1:]

    assert len(rows) >= 15
    for row in rows:
        theirs, ours, why = (cell.strip() for cell in row.strip("|").split("|"))
        assert ours
        assert why.endswith(".")
        place = r"\((Algorithm 1|[IV]+(-[A-F])?(, [IV]+-[A-F])*)\)|abstract"
        assert re.search(place, theirs), theirs


def test_the_specification_imports_no_other_layer() -> None:
    """Importing every module of the folder brings in none of the layers above it, nor torch."""
    program = (
        "import pkgutil, sys, spec\n"
        "for m in pkgutil.walk_packages(spec.__path__, 'spec.'):\n"
        "    m.name.endswith('__main__') or __import__(m.name)\n"
        "layers = ('qeffect', 'verification', 'gpu_runtime', 'torch')\n"
        "print([m for m in layers if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"


def test_the_fault_table_is_seven_injections_in_six_families() -> None:
    """The table's rows are the paper's, and each names a clause and a transition that checks it."""
    rows = fault_rows()

    assert len(rows) == len({row["id"] for row in rows}) == 7
    assert len({row["family"] for row in rows}) == 6
    for row in rows:
        assert row["transition"] in CLAUSES[row["clause"]].transitions
