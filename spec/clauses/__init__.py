"""
The contract's clauses, by stable id, each with the likely cause and the remedy of a refusal.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from . import (
    arena,
    capture,
    completion,
    epoch,
    log,
    order,
    ownership,
    persistence,
    reduction,
    schedule,
    version,
)
from .model import Clause, Part

__all__ = [
    "CLAUSES",
    "DEVICE",
    "INTERFACE",
    "PARTS",
    "SCHEDULE",
    "SCHEDULE_CLAUSES",
    "Clause",
    "Part",
]

#: The parts in the normative order: guards of a transition run in this order, so that a refusal
#: has one name. The last part is about event logs.
PARTS: Final[tuple[Part, ...]] = (
    ownership.PART,
    version.PART,
    order.PART,
    arena.PART,
    capture.PART,
    completion.PART,
    reduction.PART,
    epoch.PART,
    persistence.PART,
    log.PART,
)

#: Every clause that can refuse a call or an event log, by its id, in the normative order.
CLAUSES: Final[Mapping[str, Clause]] = MappingProxyType(
    {clause.id: clause for part in PARTS for clause in part.clauses}
)

#: The part about schedules: its clauses are checked on a table, before any contract call.
SCHEDULE: Final[Part] = schedule.PART

#: Every clause that can refuse a schedule, by its id.
SCHEDULE_CLAUSES: Final[Mapping[str, Clause]] = MappingProxyType(
    {clause.id: clause for clause in SCHEDULE.clauses}
)

#: Clauses that the public calls, or a contract with parts left out, raise before a guard runs,
#: because the state that guards read does not contain what these clauses check.
INTERFACE: Final = frozenset(
    {
        "ownership.unknown-key",
        "ownership.unknown-slot",
        "epoch.device-count",
        "epoch.device-order",
        "epoch.uncounted",
        "persistence.configuration",
        "version.left-out",
        "arena.left-out",
    }
)

#: The interface clauses that compare a device's counts, for contracts made with ``counted=True``. A
#: record of counts that is separate from the transitions raises these clauses, and no event log
#: contains the counts.
DEVICE: Final = frozenset({"epoch.uncounted", "epoch.device-count", "epoch.device-order"})
