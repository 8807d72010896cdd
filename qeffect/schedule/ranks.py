"""
All checks of a schedule that do not run the contract, in time linear in the schedule's actions.

The first finding is the cause, and later findings may be its consequences. The checks run in this
order: actions on a wrong rank; repeated and missing actions; order on a rank; messages, and waits
for sends; deadlock; message order; reductions, and waits for reductions; outstanding sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .actions import Schedule
from .findings import Finding
from .index import Index, index_of
from .messages import check_inputs, check_message_order, check_messages
from .rendezvous import check_rendezvous
from .simulate import check_deadlock, simulate
from .structure import (
    check_missing,
    check_order,
    check_places,
    check_reductions,
    check_repeats,
    check_sharding,
)
from .transport import Transport
from .waits import check_outstanding, check_reduction_waits, check_send_waits


def _check_deadlock(index: Index) -> Iterator[Finding]:
    if not index.schedule.complete:
        return
    found = list(check_deadlock(simulate(index)))
    yield from found or check_rendezvous(index)


_PHASES: tuple[tuple[Callable[[Index], Iterator[Finding]], ...], ...] = (
    (check_places,),
    (check_repeats,),
    (check_missing,),
    (check_order,),
    (check_messages,),
    (check_send_waits,),
    (check_inputs,),
    (_check_deadlock,),
    (check_message_order,),
    (check_reductions, check_sharding),
    (check_reduction_waits,),
    (check_outstanding,),
)


def check_ranks(schedule: Schedule, transport: Transport | None = None) -> tuple[Finding, ...]:
    """
    Check a schedule rank by rank and across ranks.

    Args:
        schedule: The schedule.
        transport: How the runtime carries messages; by default as torch does.

    Returns:
        The findings, with causes before consequences, and otherwise by step and rank; empty if the
        schedule passes all checks.
    """
    index = index_of(schedule, transport)
    found: list[Finding] = []
    for phase in _PHASES:
        found.extend(sorted((f for check in phase for f in check(index)), key=_by_place))
    return tuple(found)


def _by_place(finding: Finding) -> tuple[bool, int, int]:
    step = finding.step
    return step is None, step or 0, -1 if finding.rank is None else finding.rank
