"""The table of what each backend reports, on the page of limits."""

from __future__ import annotations

import attrs

from qeffect.gpu_runtime.backends.protocol import Reports
from tests.docs.backends_block import BACKENDS, MANNERS, PAGE, ROWS, backends


def test_every_report_has_a_row() -> None:
    fields = {field.name for field in attrs.fields(Reports)}

    assert fields - set(MANNERS) == {field for field, _, _ in ROWS}
    assert set(MANNERS) <= fields


def test_the_rows_are_what_the_backends_declare() -> None:
    """The reference backend reports everything; a replay reports no position of its scales."""
    rows = dict(zip([row[:2] for row in ROWS], backends().splitlines()[2:], strict=True))
    cells = {what: [cell.strip() for cell in row.split("|")[3:-1]] for what, row in rows.items()}
    first = {field: cells[field, words] for field, words, scales in ROWS if scales == "action"}

    assert len(BACKENDS) == 2
    assert first["updates"] == ["reported", "as captured", "on trust", "on trust"]
    assert first["tape_scales"] == ["reported", "on trust", "on trust", "on trust"]
    assert first["draws"] == ["reported", "on trust", "reported", "reported"]
    assert first["recomputes"][2:] == ["nothing drawn", "nothing drawn"]
    assert "reported" not in next(cells[row[:2]] for row in ROWS if row[2] == "epoch")


def test_the_page_has_the_table_of_the_declarations() -> None:
    assert backends() in PAGE.read_text(encoding="utf-8")
