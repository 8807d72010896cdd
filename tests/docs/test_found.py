"""The README's table of defects in other software agrees with the texts written for upstream."""

from __future__ import annotations

import pytest

from qeffect.cli import main
from qeffect.spec.clauses import CLAUSES, SCHEDULE_CLAUSES
from tests.docs.blocks import ROOT
from tests.docs.code import blocks
from tests.docs.found_block import FOUND, FOUND_TEXTS, Found, found

by_text = pytest.mark.parametrize("row", FOUND, ids=lambda row: str(row.text))


@by_text
def test_a_row_says_what_its_text_says(row: Found) -> None:
    """The text has the clause, issues and reproducer; the guard's page names the clause."""
    text = (FOUND_TEXTS / row.text).read_text()

    assert row.clause in {**CLAUSES, **SCHEDULE_CLAUSES}
    assert f"`{row.clause}`" in text
    assert blocks(f"tests/failures/{row.text}", "python")
    for part in ("### Expected", "### Observed", "### Cause", "### Versions", "has not been sent"):
        assert part in text
    assert all(f"#{name.partition('#')[2]}" in text for name in row.upstream)
    part = row.clause.partition(".")[0]
    page = (ROOT / row.page).read_text()
    assert row.clause in page or f"`{part}.*`" in page


def test_every_text_for_upstream_has_a_row() -> None:
    texts = {path.name for path in FOUND_TEXTS.glob("*.md")}

    assert texts == {row.text for row in FOUND}
    assert len(found().splitlines()) == 2 + len(FOUND)


@by_text
def test_the_command_refuses(row: Found, capsys: pytest.CaptureFixture[str]) -> None:
    """The command in the text is refused with the clause of the row."""
    if row.command is None:
        return
    (block,) = blocks(f"tests/failures/{row.text}", "console")
    (line,) = [line for line in block.text.splitlines() if line.startswith("$ ")]
    if "--torch" in line:  # tests/failures/test_torch_deferred_receives.py runs it
        assert line.startswith(f"$ {row.command}")
        return

    assert line.startswith(f"$ {row.command}")
    assert 1 == main(line.removeprefix("$ qeffect ").split())
    assert row.clause in capsys.readouterr().out
