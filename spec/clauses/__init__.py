"""
The contract's clauses: every promise, by its stable id, with its cause and remedy when broken.
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
#: has one name. The last is of event logs.
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

#: Every clause that a call or an event log is refused by, by its id, in the normative order.
CLAUSES: Final[Mapping[str, Clause]] = MappingProxyType(
    {clause.id: clause for part in PARTS for clause in part.clauses}
)

#: The part about schedules: its clauses are found in a table before anything is called.
SCHEDULE: Final[Part] = schedule.PART

#: Every clause that a schedule is refused by, by its id.
SCHEDULE_CLAUSES: Final[Mapping[str, Clause]] = MappingProxyType(
    {clause.id: clause for clause in SCHEDULE.clauses}
)

#: Clauses that the programming interface or the composition raises before a guard runs: what they
#: are about is not in the state that guards read.
INTERFACE: Final = frozenset(
    {
        "ownership.unknown-key",
        "ownership.unknown-slot",
        "epoch.device-count",
        "epoch.device-order",
        "epoch.uncounted",
        "persistence.configuration",
        "version.left-out",
    }
)

#: Those of them that compare what a device counted, for contracts that are made to: a ledger beside
#: the transitions raises them, and no event log has what they compare.
DEVICE: Final = frozenset({"epoch.uncounted", "epoch.device-count", "epoch.device-order"})
