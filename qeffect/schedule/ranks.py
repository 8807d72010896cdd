"""
Everything that can be said about a schedule without the kernel, in time linear in its actions.

The findings come in an order in which the first one is the cause and later ones may be its
consequences: wrong places, repeated and missing actions, order on a rank, messages, deadlock,
message order, reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from qeffect.schedule.actions import Schedule
from qeffect.schedule.findings import Finding
from qeffect.schedule.index import Index, index_of
from qeffect.schedule.messages import check_inputs, check_message_order, check_messages
from qeffect.schedule.simulate import check_deadlock, simulate
from qeffect.schedule.structure import (
    check_missing,
    check_order,
    check_places,
    check_reductions,
    check_repeats,
    check_sharding,
)


def _check_deadlock(index: Index) -> Iterator[Finding]:
    if index.schedule.complete:
        yield from check_deadlock(simulate(index))


_PHASES: tuple[tuple[Callable[[Index], Iterator[Finding]], ...], ...] = (
    (check_places,),
    (check_repeats,),
    (check_missing,),
    (check_order,),
    (check_messages,),
    (check_inputs,),
    (_check_deadlock,),
    (check_message_order,),
    (check_reductions, check_sharding),
)


def check_ranks(schedule: Schedule) -> tuple[Finding, ...]:
    """
    Check a schedule rank by rank and across ranks.

    Args:
        schedule: The schedule.

    Returns:
        The findings, causes before consequences and then by step and rank; none if it is fine.
    """
    index = index_of(schedule)
    found: list[Finding] = []
    for phase in _PHASES:
        found.extend(sorted((f for check in phase for f in check(index)), key=_by_place))
    return tuple(found)


def _by_place(finding: Finding) -> tuple[bool, int, int]:
    step = finding.step
    return step is None, step or 0, -1 if finding.rank is None else finding.rank
