"""
Hypothesis strategies: random legal schedules of one process's life, and illegal ones.

A schedule is drawn as a process and a list of numbers; each number chooses the next step.
Hypothesis shrinks it by deleting and lowering numbers, towards the fewest and simplest calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen
from hypothesis import reject
from hypothesis import strategies as st

from qeffect.verification.calls import Call
from qeffect.verification.coverage import CLAUSE_IDS, TARGETS
from qeffect.verification.process import Process
from qeffect.verification.walks.attempts import aimed
from qeffect.verification.walks.machine import numbers, processes
from qeffect.verification.walks.oracle import violations
from qeffect.verification.walks.proposals import chooser
from qeffect.verification.walks.schedules import Schedule, ScheduleWalk

__all__ = ["Illegal", "illegal_schedules", "legal_schedules"]


@frozen
class Illegal:
    """
    A legal schedule and one more call, which breaks exactly one clause.

    Args:
        schedule: The legal calls before.
        call: The illegal call.
        clause: The clause that must refuse it.
    """

    schedule: Schedule
    call: Call
    clause: str

    def __str__(self) -> str:
        return f"{self.schedule}\n\nthen {self.call}, to be refused by {self.clause}"


def walked(process: Process, steps: Sequence[int]) -> ScheduleWalk:
    """Return the random walk (sequence of calls) that some numbers choose, after its last step."""
    walk = ScheduleWalk(process)
    for number in steps:
        walk.step(number)
    return walk


@st.composite
def legal_schedules(
    draw: st.DrawFn, process: st.SearchStrategy[Process] | None = None, longest: int = 120
) -> Schedule:
    """
    Random legal schedules.

    Args:
        process: Strategy for the process; by default processes of every shape.
        longest: Maximum number of steps; a step is one call or a few calls that belong together.
    """
    chosen = draw(processes() if process is None else process)
    return walked(chosen, draw(numbers(longest))).schedule


@st.composite
def illegal_schedules(
    draw: st.DrawFn, process: st.SearchStrategy[Process] | None = None, longest: int = 60
) -> Illegal:
    """
    Random legal schedules that end in a call which breaks exactly one clause.

    Args:
        process: Strategy for the process; by default processes of every shape.
        longest: Maximum number of steps before the illegal call.
    """
    chosen = draw(processes() if process is None else process)
    walk = walked(chosen, draw(numbers(longest)))
    wanted = draw(st.sampled_from(CLAUSE_IDS))
    pick = chooser(draw(st.integers(0, (1 << 40) - 1)))
    for targets in ([target for target in TARGETS if target[1] == wanted], TARGETS):
        for call in aimed(walk.shadow, pick, walk.checkpoints, walk.fresh(), targets):
            wrong = set(violations(walk.shadow, call))
            if len(wrong) == 1:
                return Illegal(walk.schedule, call, wrong.pop())
    reject()
