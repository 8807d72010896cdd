"""
A trial of a recorded step: its transitions run one by one over a copy of the contract's state.

The comparison of `qeffect.steps` accepts a step only if the state equals the recorded start, except
for counters that have risen. Other starts may be acceptable too: for example, the caller waited
once more, or another tape used a slot before. In that case a trial runs every guard of every
action. The trial takes about as long as the actions' own checks and commits.
"""

from __future__ import annotations

from typing import Any, Final

from ..arguments import UNUSABLE
from ..refusals import Refused
from ..steps import RecordedStep, StepState
from ..steps.counters import translated_event
from .pool import Pool

__all__ = ["attempt"]

#: Transitions that take up a slot, and those after which a slot may be free again.
_TAKES: Final = frozenset({"reserve", "check_forward"})
_FREES: Final = {
    "commit_wgrad": 0,
    "ungroup_wgrad": 1,
    "commit_dgrad": 0,
    "finish_read": 1,
    "finish_receive": 1,
}


def attempt(step: RecordedStep, found: StepState) -> StepState | str | None:
    """
    Run a step's transitions over a copy of a state, with the recorded slots and evidence.

    Args:
        step: A step that a contract of the same incarnation recorded.
        found: The contract's state now; it is not changed.

    Returns:
        The state after the step, without counts; the clause that refuses one of the transitions;
        or None if an argument cannot be used in this state.
    """
    amounts, memory = step.moved_by(found.memory), found.memory.copy()
    pool = Pool(memory, dict.fromkeys(found.free, ()))
    for stage, slots in found.free.items():
        pool.free[stage].update(dict.fromkeys(slots))
    pool.reserved.update(found.reserved)
    try:
        for event in step.events:
            transition, given = translated_event(found.memory, event, amounts)
            step.transitions.functions[transition](memory, *given)
            _follow(pool, transition, given)
    except Refused as refused:
        return refused.clause
    except (*UNUSABLE, ValueError):
        return None
    free = {stage: tuple(own) for stage, own in pool.free.items()}
    return StepState(memory, free, pool.reserved, None)


def _follow(pool: Pool, transition: str, given: tuple[Any, ...]) -> None:
    """Update the free and reserved slots, as the calls of a contract do."""
    if transition in _TAKES:
        key, slot = given[:2]
        if transition == "reserve":
            pool.reserve(key, slot)
        elif not pool.free[key.stage].take(slot):
            pool.reserved.pop(key.cell, None)
    elif transition in _FREES:
        place = given[_FREES[transition]]
        pool.reclaim(place if isinstance(place, int) else place.slot)
