"""What the README says of the paper's tables, from a report that is no measurement."""

from __future__ import annotations

from tests.docs.tables_block import tables
from tests.runtime.report_samples import tables_report


def test_every_table_shows_ours_beside_the_papers() -> None:
    """One paragraph, each table that has rows, and the goals that were missed."""
    text = "\n\n".join(tables([("t.json", tables_report())], lambda _: "a machine"))
    assert "(t.json; 5 fresh starts of all ranks; a machine)" in text
    assert (
        "| h4096-s256-m8 | il | initial | 102.00 / 10.00 | 10.20x | 89.469 / 47.329 | 1.89x |"
    ) in text
    assert (
        "| copied | 25.00 | 4.12x | 1.00x | 10.6 | +0.00 | 72 | 20 | 2 | 52 | 54.13, 1.75x |"
        in text
    )
    assert "| 2 | 5.00 (35.12) | 102,400 | 20 (12) |" in text
    assert "| 0, 3 (2) | 0.75 (0.05) |" in text
    assert (
        "| language | replays, il to replays, izb | 10.00 | 5.00 | 2.00x | 100.0% (68.5%) |" in text
    )
    assert "0 of 160 tensors" in text
    assert "2 of 5 goals of these tables are met; the others:" in text


def test_without_a_report_nothing_is_said() -> None:
    """The block stays as it is."""
    assert tables([], lambda _: "") == []
