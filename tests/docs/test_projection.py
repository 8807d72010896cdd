"""The page of simulated steps equals what the simulator makes from the checked-in report."""

from __future__ import annotations

import pytest

from qeffect.gpu_runtime.lab.statistics.projection import CLASSES, Links
from tests.docs.blocks import RUNTIME_REPORTS, load
from tests.docs.projection import CELLS, HEADER, PAGE, RANKS, REPORT, page, row


def _rows() -> list[tuple[str, ...]]:
    lines = [n for n in PAGE.read_text(encoding="utf-8").splitlines() if n.startswith("| h")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


@pytest.mark.parametrize("schedule", CLASSES)
@pytest.mark.parametrize("cell", CELLS)
def test_the_page_is_of_the_report(cell: str, schedule: str) -> None:
    """Checked for the fewest ranks; all take minutes: `python -m tests.docs.projection`."""
    report = load(RUNTIME_REPORTS / REPORT)
    assert row(report, cell, schedule, RANKS[0]) in _rows()


def test_the_page_is_written_by_its_program() -> None:
    """The text around its rows, with the report's commit; every row occurs once."""
    rows = _rows()
    assert PAGE.read_text(encoding="utf-8") == page(load(RUNTIME_REPORTS / REPORT), rows)
    places = [(name, schedule, ranks) for name, schedule, ranks, *_ in rows]
    assert len(places) == len(set(places)) == len(RANKS) * len(CELLS) * len(CLASSES)
    assert all(len(line) == len(HEADER) for line in rows)


def test_a_message_costs_more_between_hosts() -> None:
    """Sixteen ranks on two hosts: neighbours on one host, and neighbours on two hosts."""
    links = Links(slower=10.0)
    found = links.of(16, 10**6)
    assert found[0, 1] == pytest.approx(0.02)
    assert found[7, 8] == found[8, 7] == pytest.approx(10 * (0.02 + 0.04))
    assert found[15, 0] == found[7, 8]
    assert len(found) == 32
