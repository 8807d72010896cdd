"""
Helpers of the schedule tests: tables as lists of entry texts, which are edited and read again.
"""

from __future__ import annotations

from collections.abc import Callable

from qeffect.schedule.actions import Schedule
from qeffect.schedule.findings import Finding
from qeffect.schedule.infer import from_actions
from qeffect.schedule.ranks import check_ranks
from qeffect.schedule.tables import read_fixture

ZBV = "ScheduleZBVZeroBubble_pp2_vpp2_m4.compute.csv"
ZBV_COMMS = "ScheduleZBVZeroBubble_pp2_vpp2_m4.comms.csv"
LOOP = "ScheduleInterleaved1F1B_pp2_vpp2_m4.compute.csv"
LOOP_COMMS = "ScheduleInterleaved1F1B_pp2_vpp2_m4.comms.csv"

Rows = list[list[str]]


def rows_of(schedule: Schedule) -> Rows:
    """The schedule's entries as texts, idle entries empty."""
    return [["" if a is None else str(a) for a in row] for row in schedule.rows]


def edited(name: str, edit: Callable[[Rows], object]) -> Schedule:
    """A shipped table after an edit; all properties are inferred again from the edited table."""
    rows = rows_of(read_fixture(name))
    edit(rows)
    return from_actions(rows, source=f"edited {name}")


def findings_after(name: str, edit: Callable[[Rows], object]) -> tuple[Finding, ...]:
    """The findings in a shipped table after an edit; before the edit there must be none."""
    assert check_ranks(read_fixture(name)) == ()
    return check_ranks(edited(name, edit))


def move(row: list[str], entry: str, before: str) -> None:
    """Move an entry directly before another entry of the same rank."""
    row.remove(entry)
    row.insert(row.index(before), entry)
