"""
The normal form of a state: states that no guard can ever distinguish have the same normal form.

Counters of stream work and ticket numbers (one ticket per action in flight) only grow, and a freed
slot still names its last tape. So without a normal form, nearly every path would end in a different
state. Each rule replaces values by other values that lead to the same future refusals; a test runs
states and their normal forms side by side. To check the rules, `plain.normal_form` implements them
a second time, for one state at a time.

The rules look only at the entries that a move changed, since the state before the move was in
normal form.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from qeffect.engine.stage import STATE
from qeffect.relations.constants import DGRAD_BIT, NEVER, RESERVED, WGRAD_BIT

from .drafts import Draft
from .packing import TICKETS, ranges
from .program import Value, select
from .scopes import Scope, configuration, sizes

__all__ = ["VACATES", "Quotient"]

#: A tape that still waits for one of these has a replay, or is dropped, before its slot is free.
VACATES: Final = RESERVED | DGRAD_BIT | WGRAD_BIT
#: Sets of more than ``_FEW`` numbers need wider integers. No set holds more than ``_MOST`` numbers.
_FEW, _MOST = 12, 60


def _count(marks: Value) -> Value:
    if isinstance(marks, int):
        return marks.bit_count()
    return np.bitwise_count(marks).astype(np.int8)


class Quotient:
    """
    Brings drafts of states into normal form.

    Args:
        scope: The scope to explore.
        kept: The columns (arrays of the contract's memory) that make up a state.

    Raises:
        ValueError: The scope can have more stream work or tickets at a time than a bit set holds.
    """

    def __init__(self, scope: Scope, kept: frozenset[str]) -> None:
        self.scope = scope
        self.kept = kept
        self.n = sizes(scope)
        config: dict[str, Any] = configuration(scope)
        self.tickets = [
            (name, index)
            for name in TICKETS
            if name in kept
            for index in range(self.n[STATE[name].index])
        ]
        self.domain_of = at = config["domain_of"]
        drops = "vacated" in kept and "drop" in scope.transitions
        self.marked = {
            d: [
                (column, s)
                for column in ("produced", "vacated")
                if column in kept
                for s, g in enumerate(config["slot_stage"])
                if at[g] == d
            ]
            + [("landed", g) for g, dd in enumerate(at) if dd == d and "landed" in kept]
            + ([("replays", d)] if drops else [])
            for d in range(self.n["domain"])
        }
        self.receives = [config["receives"][stage] for stage in config["slot_stage"]]
        self.waits = {
            d: [("waited", k) for k, dd in enumerate(config["domain_at"]) if dd == d]
            for d in range(self.n["domain"])
        }

        bounds = ranges(scope)
        counted = [c for c in ("replays", "serial") if c in kept]
        most = max((bounds[column][1] for column in counted), default=0)
        if most > _MOST:
            raise ValueError(
                f"scope {scope.name}: up to {most} numbered events at a time, more "
                f"than the maximum of {_MOST}"
            )
        self._set: type[np.signedinteger[Any]] = np.int16 if most <= _FEW else np.int64

    def _bit(self, value: Value) -> Value:
        """Return the bit set that contains one number."""
        if isinstance(value, int):
            return 1 << value
        return np.left_shift(self._set(1), value, dtype=self._set)

    def _upto(self, value: Value) -> Value:
        """Return the bit set of all numbers from 0 to the given number."""
        if isinstance(value, int):
            return (2 << value) - 1
        return np.left_shift(self._set(2), value, dtype=self._set) - self._set(1)

    def _rank(self, marks: Value, value: Value) -> Value:
        """Return how many numbers up to the given value are in a bit set."""
        return _count(marks & self._upto(value))

    def normalise(self, draft: Draft) -> None:
        """Bring a draft into normal form, in place."""
        changed = draft.changed
        touched = {column for column, _ in changed}
        if touched & {"consumers", "produced", "moving", "vacated"}:
            self._free_slots(draft)
            touched = {column for column, _ in changed}
        if "serial" in touched or touched & set(TICKETS):
            self._tickets(draft)
        if touched & {"ended_at", "ended_on", "joined", "submitted"} and "ended_at" in self.kept:
            self._ends(draft)
        if touched & {"submitted", "joined"}:
            self._joins(draft)
        if touched & {"produced", "landed", "vacated", "waited", "replays"}:
            self._ranks(draft)
        if touched & {"named", "consumer", "weight_epoch"} and "named" in self.kept:
            self._consumer(draft)
        if touched & {"updater", "unawaited", "unseen", "optimizing"} and "updater" in self.kept:
            self._updater(draft)
        if touched & {"unwaited", "final", "weight_epoch"} and "unwaited" in self.kept:
            self._unwaited(draft)
        if touched & {"cursor", "tenants"} and "cursor" in self.kept:
            self._empty_pools(draft)
        if "incarnation" in touched:
            changed["incarnation", 0] = 0
        if self.scope.fresh_keys and touched & {"slot_of", "forwarded"}:
            self._fresh_keys(draft)

    def _free_slots(self, draft: Draft) -> None:
        changed = draft.changed
        for slot in range(self.n["slot"]):
            mask = draft.entry("consumers", slot)
            free = mask == 0
            if ("consumers", slot) in changed or ("moving", slot) in changed:
                empty = free & (draft.entry("moving", slot) == 0)
                changed["cell_at", slot] = select(empty, -1, draft.entry("cell_at", slot))
                changed["epoch_at", slot] = select(empty, NEVER, draft.entry("epoch_at", slot))
            if (
                "vacated" in self.kept
                and not self.receives[slot]
                and (("consumers", slot) in changed or ("vacated", slot) in changed)
            ):
                anew = (mask & VACATES) != 0
                changed["vacated", slot] = select(anew, 0, draft.entry("vacated", slot))
            if "produced" in self.kept and (
                ("consumers", slot) in changed or ("produced", slot) in changed
            ):
                idle = free | (mask == RESERVED)
                changed["produced", slot] = select(idle, 0, draft.entry("produced", slot))

    def _tickets(self, draft: Draft) -> None:
        tickets = {key: draft.entry(*key) for key in self.tickets}
        flying: Value = 0
        for ticket in tickets.values():
            flying = flying | self._bit(ticket)
        flying = flying & ~1
        for key, ticket in tickets.items():
            if not (isinstance(ticket, int) and ticket == 0):
                draft.changed[key] = select(ticket == 0, 0, self._rank(flying, ticket))
        draft.changed["serial", 0] = _count(flying)

    def _ends(self, draft: Draft) -> None:
        for slot in range(self.n["slot"]):
            at, on = draft.entry("ended_at", slot), draft.entry("ended_on", slot)
            waits: Value = False
            for link in range(self.n["link"]):
                waits = waits | ((on == link) & (draft.entry("joined", link) < at))
            draft.changed["ended_at", slot] = select(waits, 1, 0)
            draft.changed["ended_on", slot] = select(waits, on, 0)

    def _joins(self, draft: Draft) -> None:
        for link in range(self.n["link"]):
            if ("submitted", link) in draft.changed or ("joined", link) in draft.changed:
                ahead = draft.entry("submitted", link) - draft.entry("joined", link)
                sign = select(ahead > 0, 1, select(ahead < 0, -1, 0))
                draft.changed["submitted", link] = sign
                draft.changed["joined", link] = 0

    def _ranks(self, draft: Draft) -> None:
        for domain, marked in self.marked.items():
            waits = self.waits[domain]
            keys = {*marked, *waits, ("replays", domain)}
            if not any(key in draft.changed for key in keys):
                continue
            marks: Value = 0
            for key in marked:
                marks = marks | self._bit(draft.entry(*key))
            awaited = draft.entry(*waits[0])
            for key in waits[1:]:
                other = draft.entry(*key)
                awaited = select(other < awaited, other, awaited)
            marks = marks & ~self._upto(awaited)
            for key in keys:
                draft.changed[key] = self._rank(marks, draft.entry(*key))

    def _consumer(self, draft: Draft) -> None:
        named = draft.entry("named", 0)
        past = named != draft.entry("weight_epoch", 0)
        draft.changed["named", 0] = select(past, NEVER, named)
        draft.changed["consumer", 0] = select(past, 0, draft.entry("consumer", 0))

    def _updater(self, draft: Draft) -> None:
        # At its end, an update in flight is unawaited again.
        waits: Value = draft.entry("optimizing", 0) != 0 if "optimizing" in self.kept else False
        for domain in range(self.n["domain"]):
            waits = waits | (draft.entry("unawaited", domain) != 0)
        for link in range(self.n["link"] if "unseen" in self.kept else 0):
            waits = waits | (draft.entry("unseen", link) != 0)
        draft.changed["updater", 0] = select(waits, draft.entry("updater", 0), 0)

    def _unwaited(self, draft: Draft) -> None:
        # Until a stage of the domain is final, a finalize computes the mark again before an update.
        for domain in range(self.n["domain"]):
            final: Value = False
            for stage, at in enumerate(self.domain_of):
                if at == domain:
                    now = draft.entry("weight_epoch", stage)
                    final = final | (draft.entry("final", stage) == now)
            mark = draft.entry("unwaited", domain)
            draft.changed["unwaited", domain] = select(final, mark, 0)

    def _empty_pools(self, draft: Draft) -> None:
        for pool in range(self.n["pool"]):
            if ("cursor", pool) in draft.changed or ("tenants", pool) in draft.changed:
                empty = draft.entry("tenants", pool) == 0
                draft.changed["cursor", pool] = select(empty, 0, draft.entry("cursor", pool))

    def _fresh_keys(self, draft: Draft) -> None:
        changed = draft.changed
        for cell in range(self.n["cell"]):
            if ("slot_of", cell) in changed or ("forwarded", cell) in changed:
                gone = draft.entry("slot_of", cell) == -1
                changed["forwarded", cell] = select(gone, NEVER, draft.entry("forwarded", cell))
        for slot in range(self.n["slot"]):
            epoch = draft.entry("epoch_at", slot)
            if ("epoch_at", slot) in changed and np.any(epoch > 0):
                for cell in range(self.n["cell"]):
                    self._renamed(draft, slot, cell, epoch)

    def _renamed(self, draft: Draft, slot: int, cell: int, epoch: Value) -> None:
        """
        Set the epoch of a slot's cell to 0. This is sound because a correct kernel accepts only
        fresh keys.
        """
        mark = draft.entry("forwarded", cell)
        here = (draft.entry("slot_of", cell) == slot) & (mark != NEVER) & (epoch != 0)
        again = select(mark == epoch, 0, NEVER)
        draft.changed["forwarded", cell] = select(here, again, mark)
        current = draft.entry("epoch_at", slot)
        draft.changed["epoch_at", slot] = select(here, 0, current)
