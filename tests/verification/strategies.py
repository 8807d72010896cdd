"""
Hypothesis strategies: random legal schedules of one process's life, and illegal ones.

A schedule is drawn as a process and a list of numbers, each of which says what to do next; it
shrinks by losing numbers and by their falling, towards the fewest and plainest calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen
from hypothesis import reject
from hypothesis import strategies as st

from qeffect.verification.targets import CLAUSE_IDS, TARGETS
from qeffect.verification.walks.attempts import aimed
from qeffect.verification.walks.machine import numbers, processes
from qeffect.verification.walks.oracle import violations
from qeffect.verification.walks.processes import Process
from qeffect.verification.walks.proposals import chooser
from qeffect.verification.walks.rehearsal import Rehearsal, Schedule
from qeffect.verification.walks.world import Call

__all__ = ["Illegal", "illegal_schedules", "legal_schedules"]


@frozen
class Illegal:
    """
    A legal schedule and one call more, which breaks exactly one clause.

    Args:
        schedule: What happens before.
        call: The illegal call.
        clause: The clause that must refuse it.
    """

    schedule: Schedule
    call: Call
    clause: str

    def __str__(self) -> str:
        return f"{self.schedule}\n\nthen {self.call}, to be refused by {self.clause}"


def rehearse(process: Process, steps: Sequence[int]) -> Rehearsal:
    """The rehearsal of the schedule that a process and some numbers name."""
    rehearsal = Rehearsal(process)
    for number in steps:
        rehearsal.step(number)
    return rehearsal


@st.composite
def legal_schedules(
    draw: st.DrawFn, process: st.SearchStrategy[Process] | None = None, longest: int = 120
) -> Schedule:
    """
    Random legal schedules.

    Args:
        process: Where to draw the process from; by default one of every shape.
        longest: The most steps; a step is a call or a few that belong together.
    """
    chosen = draw(processes() if process is None else process)
    return rehearse(chosen, draw(numbers(longest))).schedule


@st.composite
def illegal_schedules(
    draw: st.DrawFn, process: st.SearchStrategy[Process] | None = None, longest: int = 60
) -> Illegal:
    """
    Random legal schedules that end in a call which breaks exactly one clause.

    Args:
        process: Where to draw the process from; by default one of every shape.
        longest: The most steps before the illegal call.
    """
    chosen = draw(processes() if process is None else process)
    rehearsal = rehearse(chosen, draw(numbers(longest)))
    wanted = draw(st.sampled_from(CLAUSE_IDS))
    pick = chooser(draw(st.integers(0, (1 << 40) - 1)))
    for targets in ([target for target in TARGETS if target[1] == wanted], TARGETS):
        for call in aimed(rehearsal.world, pick, rehearsal.checkpoints, rehearsal.fresh(), targets):
            wrong = set(violations(rehearsal.world, call))
            if len(wrong) == 1:
                return Illegal(rehearsal.schedule, call, wrong.pop())
    reject()
