"""
The oracle: it decides whether a call is legal after the calls so far, and which clauses it breaks.

The oracle is written from the paper alone. It reads the shadow of the process (a record of all
calls so far, `qeffect.verification.walks.shadow`) and never the contract. Its answer lists the
clauses that the call would break, in the normative order of the relations. A legal call breaks no
clause. If a call is illegal, a contract must refuse it by the first clause of the list.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from qeffect import TapeKey, TapeRef, Ticket
from qeffect.keys import Cell

from ..calls import Call
from .entities import Slot, Stage
from .shadow import Group, Shadow

__all__ = ["broken", "refusal", "seat", "violations"]

Findings = Iterator[str]

#: The relation that checks a clause, if the clause's id names another relation.
_CHECKED_BY = {
    "persistence.device-work": "completion",
    "persistence.reduction-in-flight": "reduction",
    "version.left-out": "epoch",
    "arena.left-out": "epoch",
}


def violations(shadow: Shadow, call: Call) -> list[str]:
    """
    Return the clauses that a call would break now, in normative order.

    >>> from qeffect.verification.walks.processes import PROCESSES
    >>> shadow = Shadow(PROCESSES[0], incarnation=1)
    >>> violations(shadow, Call("finalize", {"stage": 0, "link": 0}))[:2]
    ['order.incomplete', 'arena.incomplete']
    """
    return list(broken(shadow, call))


def broken(shadow: Shadow, call: Call) -> Findings:
    """Yield the clauses of `violations` one by one."""
    omitted = shadow.process.omit
    for clause in _RULES[call.transition](shadow, **call.arguments):
        if not omitted or _CHECKED_BY.get(clause, clause.partition(".")[0]) not in omitted:
            yield clause


def refusal(shadow: Shadow, call: Call) -> tuple[str, str] | None:
    """Return the transition and the clause that refuse a call; None for a legal call."""
    clause = next(broken(shadow, call), None)
    if clause is None:
        return None
    if call.arguments.get("group"):
        alone = Call(call.transition, {**call.arguments, "group": ()})
        if next(broken(shadow, alone), None) != clause:
            return "group_wgrad", clause
    return call.transition, clause


# Rules that several calls share


def _known(shadow: Shadow, key: TapeKey) -> bool:
    return key.cell in shadow.cells


def _empty(slot: Slot) -> bool:
    """Return whether a slot has no tape and no running transfer."""
    return slot.tape is None and not slot.moving


def seat(shadow: Shadow, key: TapeKey, slot: int | None) -> tuple[Slot | None, list[str]]:
    """Return the slot (set of buffers) that a forward or reservation takes, and the clauses that
    this breaks."""
    own = shadow.slot_of(key.cell)
    if slot is None:
        free = shadow.free(key.stage)
        claimed = own is not None and own.tape is not None and own.tape.claimed
        if claimed and own is not None and own.flight is None:
            place = own
        elif free:
            place = free[0]
        else:
            used_up = [s for s in shadow.slots if s.stage == key.stage and _empty(s)]
            if not used_up and own is None:
                return None, ["ownership.pool-exhausted"]
            place = used_up[0] if used_up else own  # type: ignore[assignment]
    else:
        place = shadow.slots[slot]
    return place, []


def _taken(shadow: Shadow, key: TapeKey, place: Slot, reserved_is_fine: bool) -> Findings:
    """Violations if a forward or a reservation of a key takes a slot (set of buffers)."""
    tape = place.tape
    if place.stage != key.stage:
        yield "ownership.foreign-slot"
    if reserved_is_fine and place.flight is not None:
        yield "ownership.in-flight"
    mine = reserved_is_fine and tape is not None and tape.claimed and tape.key == key
    if tape is not None and not mine:
        yield "ownership.slot-busy"
    if tape is None and shadow.slot_of(key.cell) is not None:
        yield "ownership.key-live"
    if shadow.forwarded.get(key.cell) == key.epoch:
        yield "ownership.repeated-forward"
    if key.cell in shadow.skipped and key.epoch == shadow.epoch:
        yield "ownership.skipped"
    if place.releases == shadow.process.generation_max:
        yield "ownership.generation-exhausted"
    if place.moving:
        yield "ownership.transfer-in-flight"
    config = shadow.configs[key.stage]
    needs = [*["in"] * config.receives_input, *["copy"] * config.copies_input]
    if reserved_is_fine and needs:
        if not mine or tape is None or not tape.arrived.issuperset(needs):
            yield "ownership.receive-missing"


def _at(stage: int, key: TapeKey) -> Cell:
    """Return the cell (stage and microbatch) of the same microbatch in another stage."""
    return (stage, *key.cell[1:])


def _fed(shadow: Shadow, key: TapeKey) -> Findings:
    """A violation if the stage that feeds this one has no tape with the output that F reads."""
    source = shadow.source(key.stage)
    if source is not None:
        slot = shadow.slot_of(_at(source, key))
        if slot is None or slot.tape is None or slot.tape.claimed:
            yield "ownership.input-not-made"


def _fed_back(shadow: Shadow, key: TapeKey) -> Findings:
    """A violation if the stage that this one feeds has not made the gradient that dI uses."""
    target = shadow.configs[key.stage].feeds
    if target is not None:
        if _at(target, key) not in shadow.backward or shadow.stages[target].spoiled:
            yield "ownership.gradient-not-made"


def _read_first(shadow: Shadow, key: TapeKey, gradient: bool) -> Findings:
    """A violation if a message between stages of the process arrives before its read began."""
    stage = shadow.configs[key.stage].feeds if gradient else shadow.source(key.stage)
    if stage is None:
        return
    cell, what = _at(stage, key), "grad" if gradient else "out"
    slot = shadow.slot_of(cell)
    if slot is None or slot.tape is None:
        # If the tape is done, its gradient was read; the tape of an output is never done so early.
        over = gradient and cell in shadow.backward and not shadow.stages[stage].spoiled
    else:
        begun = what not in slot.tape.waits or what in slot.moving
        over = begun and not slot.tape.claimed
        over = over and not (gradient and shadow.stages[stage].spoiled)
    if not over:
        yield "ownership.receive-before-read"


def _reference(shadow: Shadow, key: TapeKey, ref: TapeRef) -> Findings:
    """Violations because a key and a reference do not match a live tape."""
    slot = shadow.slots[ref.slot]
    if ref.incarnation != shadow.incarnation:
        yield "ownership.foreign-incarnation"
    if slot.tape is None or slot.releases != ref.generation:
        yield "ownership.stale-reference"
    if slot.tape is None or slot.tape.key != key:
        yield "ownership.wrong-key"
    if slot.flight is not None:
        yield "ownership.in-flight"


def _transfer(shadow: Shadow, key: TapeKey, ref: TapeRef, what: str) -> Findings:
    """Violations because of the key and reference that end a transfer."""
    slot = shadow.slots[ref.slot]
    lost = slot.tape is None and what in slot.moving and slot.mover is not None
    if not lost or slot.mover is None or slot.mover[1] != ref.generation:
        yield from _reference(shadow, key, ref)
        return
    if ref.incarnation != shadow.incarnation:
        yield "ownership.foreign-incarnation"
    if slot.mover[0] != key:
        yield "ownership.wrong-key"


def _end(shadow: Shadow, key: TapeKey, ref: TapeRef, link: int) -> Findings:
    """Violations because of the link on which a transfer ends."""
    if _known(shadow, key) and shadow.links[link].domain != shadow.domain_of(key.stage):
        yield "completion.wrong-stream"
    yield from _forgets(shadow, shadow.slots[ref.slot], link)


def _forgets(shadow: Shadow, slot: Slot, link: int) -> Findings:
    """
    A violation if the end of a transfer, or a copy, replaces the record of an earlier end or copy
    for which no graph stream has waited.
    """
    on, at = slot.ended
    if on != link and shadow.links[on].joined < at:
        yield "completion.two-ends"


def _filled(shadow: Shadow, stage: int, slot: Slot | None, link: int) -> Findings:
    """Violations because of the stream that fills a slot."""
    if shadow.links[link].domain != shadow.domain_of(stage):
        yield "completion.wrong-stream"
    if slot is not None and shadow.links[link].waited < slot.vacated:
        yield "completion.slot-not-awaited"


def _seen(shadow: Shadow, slot: Slot | None) -> Findings:
    """A violation if the graph stream has not waited for the slot's latest transfer."""
    if slot is not None and shadow.links[slot.ended[0]].joined < slot.ended[1]:
        yield "completion.transfer-to-graph"


def _update(
    shadow: Shadow, stage: int, token: int | None, action: tuple[str, Any] | None
) -> Findings:
    """Violations because of one more update of a stage's scaling state."""
    domain = shadow.domain(stage)
    if domain.running:
        yield "order.in-flight"
    if domain.poisoned:
        yield "order.poisoned"
    if token is not None and token != domain.updates:
        yield "order.token"
    declared = shadow.process.declared.get(shadow.configs[stage].domain)
    if declared and action is not None:
        if declared[domain.of_walk : domain.of_walk + 1] != (action,):
            yield "order.reordered"


def _replay(shadow: Shadow, stage: int, link: int) -> Findings:
    """Violations because of a replay on a domain's graph stream."""
    if shadow.links[link].domain != shadow.domain_of(stage):
        yield "completion.wrong-stream"
    if shadow.links[link].joined < shadow.links[link].submitted:
        yield "completion.caller-to-graph"


def _after_update(shadow: Shadow, stage: int) -> Findings:
    """A violation if neither the graph stream nor the host has waited for the latest update."""
    if shadow.awaits_update(shadow.domain_of(stage)):
        yield "completion.update-to-graph"


def _reader(shadow: Shadow, link: int) -> Findings:
    """A violation if another stream has already waited for the gradients of the epoch."""
    if shadow.reader not in (None, shadow.links[link].caller):
        yield "completion.wrong-consumer"


def _in_order(shadow: Shadow, slot: int, kind: str) -> Findings:
    pool = shadow.pools[shadow.slots[slot].pool]
    if not pool.keeps_order(shadow.ranks[slot, kind]):
        yield "capture.out-of-order"


def _waits(shadow: Shadow, ref: TapeRef) -> set[str]:
    tape = shadow.slots[ref.slot].tape
    return set() if tape is None else tape.waits


def _unusable(shadow: Shadow, during: bool = False) -> Findings:
    """Violations by the use of weights that an update is writing or may have left half-updated."""
    if during and shadow.update is not None:
        yield "epoch.in-flight"
    if shadow.half_updated:
        yield "epoch.half-updated"


# One rule for each transition


def _reserve(shadow: Shadow, key: TapeKey, slot: int | None, link: int) -> Findings:
    if not _known(shadow, key):
        yield "ownership.unknown-key"
        return
    if slot is not None and not 0 <= slot < len(shadow.slots):
        yield "ownership.unknown-slot"
        return
    place, wrong = _place_to_reserve(shadow, key, slot)
    yield from wrong
    if place is not None:
        yield from _taken(shadow, key, place, False)
    if key.epoch != shadow.epoch:
        yield "version.wrong-epoch"
    yield from _filled(shadow, key.stage, place, link)
    if place is not None and shadow.configs[key.stage].copies_input:
        yield from _forgets(shadow, place, link)
    yield from _unusable(shadow)


def _place_to_reserve(
    shadow: Shadow, key: TapeKey, slot: int | None
) -> tuple[Slot | None, list[str]]:
    own = shadow.slot_of(key.cell)
    free = [s for s in shadow.slots if s.stage == key.stage and _empty(s)]
    if slot is None and own is not None and free:
        return (shadow.free(key.stage) or free)[0], []
    return seat(shadow, key, slot)


def _skip(shadow: Shadow, key: TapeKey) -> Findings:
    """A key may be left out only before the walk runs, and every destination keeps a writer."""
    if not _known(shadow, key):
        yield "ownership.unknown-key"
        return
    if shadow.forwarded:
        yield "ownership.walk-begun"
    if shadow.slot_of(key.cell) is not None:
        yield "ownership.key-live"
    if key.cell in shadow.skipped and key.epoch == shadow.epoch:
        yield "ownership.skipped"
    if key.epoch != shadow.epoch:
        yield "version.wrong-epoch"
    if shadow.process.declared.get(shadow.configs[key.stage].domain):
        yield "order.declared"
    own = shadow.buffers(key.cell)[0]
    if key.cell == next(cell for cell in shadow.cells if shadow.buffers(cell)[0] == own):
        yield "epoch.sole-writer"


def _bind(shadow: Shadow, key: TapeKey, destination: Any) -> Findings:
    if not _known(shadow, key):
        yield "ownership.unknown-key"
        return
    if key.epoch != shadow.epoch:
        yield "version.wrong-epoch"
    if shadow.stages[key.stage].spoiled:
        yield "arena.spoiled"
    if key.cell in shadow.bound:
        yield "arena.duplicate-bind"
    if destination is not None:
        yield "arena.mismatch"
    yield from _unusable(shadow, during=True)


def _has_cache(shadow: Shadow) -> Findings:
    if not shadow.uses("version"):
        yield "version.left-out"


def _check_refresh(shadow: Shadow, stage: int, link: int) -> Findings:
    it, domain = shadow.stages[stage], shadow.domain(stage)
    yield from _has_cache(shadow)
    if it.filling is not None:
        yield "version.in-flight"
    if it.cached == shadow.epoch:
        yield "version.already-fresh"
    if it.forwards and shadow.uses("order"):
        yield "version.late-refresh"
    if domain.refreshed not in (None, stage):
        yield "version.refresh-interrupted"
    yield from _update(shadow, stage, None, None)
    pool = shadow.refresh_pool(stage)
    if pool is not None and not pool.keeps_order(shadow.ranks[stage, "refresh"]):
        yield "capture.out-of-order"
    yield from _replay(shadow, stage, link)
    yield from _after_update(shadow, stage)
    yield from _unusable(shadow, during=True)


def _check_forward(
    shadow: Shadow, key: TapeKey, slot: int | None, token: int | None, link: int, refresh: bool
) -> Findings:
    if not _known(shadow, key):
        yield "ownership.unknown-key"
        return
    if slot is not None and not 0 <= slot < len(shadow.slots):
        yield "ownership.unknown-slot"
        return
    stage = shadow.stages[key.stage]
    place, wrong = seat(shadow, key, slot)
    yield from wrong
    if place is not None:
        yield from _taken(shadow, key, place, True)
    yield from _fed(shadow, key)
    if key.epoch != shadow.epoch:
        yield "version.wrong-epoch"
    if refresh and stage.filling is not None:
        yield "version.in-flight"
    if not refresh and stage.cached != key.epoch:
        yield "version.stale-cache"
    if refresh and stage.cached == key.epoch:
        yield "version.already-fresh"
    if refresh and stage.forwards and shadow.uses("order"):
        yield "version.late-refresh"
    if shadow.domain(key.stage).refreshed not in (None, key.stage):
        yield "version.refresh-interrupted"
    yield from _update(shadow, key.stage, token, ("F", key.cell))
    if place is not None:
        yield from _in_order(shadow, place.index, "F")
    yield from _replay(shadow, key.stage, link)
    yield from _after_update(shadow, key.stage)
    yield from _seen(shadow, place)
    yield from _unusable(shadow)


def _check_evaluation(shadow: Shadow, stage: int, cached: bool, link: int) -> Findings:
    it, domain = shadow.stages[stage], shadow.domain(stage)
    if cached and it.cached != shadow.epoch:
        yield "version.stale-cache"
    if domain.refreshed is not None:
        yield "version.refresh-interrupted"
    yield from _update(shadow, stage, None, None)
    yield from _replay(shadow, stage, link)
    yield from _after_update(shadow, stage)
    if it.evaluating is not None or shadow.update is not None:
        yield "epoch.in-flight"
    if shadow.half_updated:
        yield "epoch.half-updated"


def _check_dgrad(
    shadow: Shadow, key: TapeKey, ref: TapeRef, token: int | None, link: int
) -> Findings:
    if not 0 <= ref.slot < len(shadow.slots):
        yield "ownership.unknown-slot"
        return
    yield from _reference(shadow, key, ref)
    waits = _waits(shadow, ref)
    if "F" in waits:
        yield "ownership.not-forwarded"
    if "dI" not in waits:
        yield "ownership.duplicate-dgrad"
    if not _known(shadow, key):
        return
    receives = shadow.configs[key.stage].receives_gradient
    tape = shadow.slots[ref.slot].tape
    if "back" in shadow.slots[ref.slot].moving:
        yield "ownership.transfer-in-flight"
    if receives and (tape is None or "back" not in tape.arrived):
        yield "ownership.receive-missing"
    yield from _fed_back(shadow, key)
    if key.epoch != shadow.epoch:
        yield "version.wrong-epoch"
    if shadow.stages[key.stage].cached != key.epoch:
        yield "version.stale-cache"
    if shadow.domain(key.stage).refreshed is not None:
        yield "version.refresh-interrupted"
    yield from _update(shadow, key.stage, token, ("dI", key.cell))
    if shadow.configs[key.stage].tape_scales == "live":
        if shadow.slots[ref.slot].scaled_at != shadow.domain(key.stage).rolled_at:
            yield "order.scales-moved"
    if key.cell not in shadow.bound:
        yield "arena.unbound"
    yield from _in_order(shadow, ref.slot, "dI")
    yield from _replay(shadow, key.stage, link)
    if shadow.links[link].waited < shadow.slots[ref.slot].wrote:
        yield "completion.graph-to-caller"
    if receives:
        yield from _seen(shadow, shadow.slots[ref.slot])
    yield from _unusable(shadow)


def _check_wgrad(
    shadow: Shadow,
    key: TapeKey,
    ref: TapeRef,
    destination: Any,
    first: bool | None,
    first_of_tied: bool | None,
    link: int,
    group: Group = (),
) -> Findings:
    if not 0 <= ref.slot < len(shadow.slots):
        yield "ownership.unknown-slot"
        return
    if not _known(shadow, key):
        yield "ownership.unknown-key"
        return
    for other, tape in group:
        if not _known(shadow, other):
            yield "ownership.unknown-key"
            return
        if not 0 <= tape.slot < len(shadow.slots):
            yield "ownership.unknown-slot"
            return
    yield from _reference(shadow, key, ref)
    waits = _waits(shadow, ref)
    if "F" in waits:
        yield "ownership.not-forwarded"
    if "dI" in waits:
        yield "ownership.wgrad-before-dgrad"
    if "dW" not in waits or "group" in shadow.slots[ref.slot].moving:
        yield "ownership.duplicate-wgrad"
    if key.epoch != shadow.epoch:
        yield "version.wrong-epoch"
    if shadow.stages[key.stage].spoiled:
        yield "arena.spoiled"
    if destination is not None:
        yield "arena.mismatch"
    buffers = shadow.buffers(key.cell)
    if any(written in buffers for written, _ in shadow.writing):
        yield "arena.in-flight"
    if buffers[0] == buffers[1] and first_of_tied is None:
        first_of_tied = first
    told = [*zip(buffers, (first, first_of_tied), strict=True)]
    if any(overwrites is True and buffer in shadow.written for buffer, overwrites in told):
        yield "arena.overwrite"
    if any(overwrites is False and buffer not in shadow.written for buffer, overwrites in told):
        yield "arena.stale-accumulation"
    yield from _in_order(shadow, ref.slot, "dW")
    yield from _replay(shadow, key.stage, link)
    yield from _unusable(shadow)
    taken: set[int] = set()
    for other, tape in group:
        yield from _ready(shadow, other, tape)
        if tape.slot == ref.slot:
            yield "ownership.in-flight"
        if tape.slot in taken:
            yield "ownership.duplicate-wgrad"
        if other.stage != key.stage:
            yield "ownership.unknown-ticket"
        taken.add(tape.slot)
        yield from _one_product(shadow, other, tape, ref.slot, {*buffers}, None, link)


def _ready(shadow: Shadow, key: TapeKey, ref: TapeRef) -> Findings:
    """Violations if a tape that another tape's dW takes waits for more than dW."""
    if not shadow.uses("arena"):
        yield "arena.left-out"
    yield from _reference(shadow, key, ref)
    waits = _waits(shadow, ref)
    if "dI" in waits and "F" not in waits:
        yield "ownership.wgrad-before-dgrad"
    if "F" in waits or "dW" not in waits or "group" in shadow.slots[ref.slot].moving:
        yield "ownership.duplicate-wgrad"


def _one_product(
    shadow: Shadow,
    key: TapeKey,
    ref: TapeRef,
    leader: int,
    written: set[Hashable],
    destination: Any,
    link: int,
) -> Findings:
    """Violations if a tape cannot be in one dW product with the tape in the leader's slot."""
    place, first = shadow.slots[ref.slot], shadow.slots[leader]
    if place.scaled_at != first.scaled_at:
        yield "order.unequal-scales"
    if shadow.stages[key.stage].spoiled:
        yield "arena.spoiled"
    if destination is not None:
        yield "arena.mismatch"
    if shadow.buffers(key.cell)[0] not in written:
        yield "arena.other-destination"
    yield from _in_order(shadow, ref.slot, "dW")
    if place.pool == first.pool and shadow.ranks[ref.slot, "dW"] <= shadow.ranks[leader, "dW"]:
        yield "capture.out-of-order"
    yield from _replay(shadow, key.stage, link)


def _group_wgrad(
    shadow: Shadow,
    key: TapeKey,
    ref: TapeRef,
    leader: int,
    ticket: int,
    link: int,
    destination: Any,
) -> Findings:
    yield from _ready(shadow, key, ref)
    flight = shadow.flights.get(ticket)
    own = flight is not None and flight.ticket.action == "dW" and flight.slot == leader
    if flight is None or not own or flight.stage != key.stage:
        yield "ownership.unknown-ticket"
    written = {buffer for buffer, serial in shadow.writing if serial == ticket}
    yield from _one_product(shadow, key, ref, leader, written, destination, link)


def _ungroup_wgrad(shadow: Shadow, key: TapeKey, ref: TapeRef, covered: Any) -> Findings:
    """Violations if a tape leaves the group of tapes that one dW computes together. A lost tape
    leaves too, which frees its slot."""
    if not shadow.uses("arena"):
        yield "arena.left-out"
    yield from _transfer(shadow, key, ref, "group")
    slot = shadow.slots[ref.slot]
    if "group" not in slot.moving:
        yield "ownership.not-grouped"
    if slot.tape is not None and covered != shadow.configs[key.stage].matrices:
        yield "ownership.matrix-coverage"
    if slot.tape is not None and shadow.stages[key.stage].spoiled:
        yield "arena.spoiled"
    if any(buffer == shadow.buffers(key.cell)[0] for buffer, _ in shadow.writing):
        yield "arena.in-flight"


def _ticket(shadow: Shadow, ticket: Ticket) -> Findings:
    flight = shadow.flights.get(ticket.serial)
    if ticket.incarnation != shadow.incarnation:
        yield "ownership.unknown-ticket"
    elif ticket.action == "refresh" and not shadow.uses("version"):
        yield "version.left-out"
    elif (
        flight is None or flight.ticket.action != ticket.action or flight.ticket.slot != ticket.slot
    ):
        family = {"refresh": "version", "evaluation": "epoch"}.get(ticket.action, "ownership")
        yield f"{family}.unknown-ticket"


def _commit(
    shadow: Shadow,
    ticket: Ticket,
    evidence: Any = (),
    filled: Any = None,
    updates: Any = None,
    scales: Any = None,
    draws: Any = None,
    weight: Any = None,
) -> Findings:
    yield from _ticket(shadow, ticket)
    if ticket.action in ("dI", "dW") and ticket.key is not None:
        if tuple(sorted(evidence)) != shadow.configs[ticket.key.stage].matrices:
            wrong = {"dI": "work-not-queued", "dW": "matrix-coverage"}
            yield f"ownership.{wrong[ticket.action]}"
    flight = shadow.flights.get(ticket.serial)
    if flight is None or flight.ticket.action != ticket.action:
        return
    config = shadow.configs[flight.stage]
    if config.reports_fills and ticket.action in ("F", "refresh", "evaluation"):
        pairs = list(filled.items() if isinstance(filled, dict) else filled or ())
        if not flight.filling:
            yield from ["version.fill-unasked"] * bool(pairs)
        else:
            if tuple(sorted(name for name, _ in pairs)) != config.matrices:
                yield "version.fill-missing"
            if not pairs or any(epoch != shadow.epoch for _, epoch in pairs):
                yield "version.wrong-fill"
    moves = int(config.scales == "action")
    asked = {"F": moves, "dI": moves, "evaluation": 0}
    if config.reports_updates and updates != asked.get(ticket.action, updates):
        yield "order.scaling-updates"
    if config.tape_scales == "carried" and ticket.action == "dI" and flight.slot is not None:
        if scales != shadow.slots[flight.slot].scaled_at:
            yield "order.wrong-scales"
    if config.reports_draws and ticket.action == "F":
        earlier = shadow.domain(flight.stage).drawn
        if draws is None or draws < 0 or any(draws <= one for one in earlier):
            yield "order.draws-again"
    if config.recomputes_draws and ticket.action == "dI" and flight.slot is not None:
        if draws != shadow.slots[flight.slot].drawn_at:
            yield "order.wrong-draws"
    if config.weights_sum is not None and ticket.action == "dI":
        earlier_weights = shadow.stages[flight.stage].weights
        if weight is None or any(below != weight[1] for _, below in earlier_weights):
            yield "epoch.other-parts"


def _weighs(stage: Stage) -> bool:
    """Return whether the weights of a stage's gradients add up to the declared sum."""
    config = stage.config
    if config.weights_sum is None:
        return True
    wanted = Fraction(*config.weights_sum) * config.blocks * config.invocations
    return sum(Fraction(*weight) for weight in stage.weights) == wanted


def _read(shadow: Shadow, key: TapeKey, ref: TapeRef, gradient: bool, link: int) -> Findings:
    if not 0 <= ref.slot < len(shadow.slots):
        yield "ownership.unknown-slot"
        return
    yield from _reference(shadow, key, ref)
    waits = _waits(shadow, ref)
    what = "grad" if gradient else "out"
    if what not in waits:
        yield "ownership.no-such-reader"
    if gradient and "dI" in waits:
        yield "ownership.read-before-dgrad"
    if what in shadow.slots[ref.slot].moving:
        yield "ownership.read-duplicate"
    if _known(shadow, key) and shadow.links[link].domain != shadow.domain_of(key.stage):
        yield "completion.wrong-stream"
    if shadow.links[link].waited < shadow.slots[ref.slot].wrote:
        yield "completion.graph-to-caller"


def _finish_read(shadow: Shadow, key: TapeKey, ref: TapeRef, gradient: bool, link: int) -> Findings:
    if not 0 <= ref.slot < len(shadow.slots):
        yield "ownership.unknown-slot"
        return
    what = "grad" if gradient else "out"
    yield from _transfer(shadow, key, ref, what)
    begun = what in shadow.slots[ref.slot].moving
    if what not in _waits(shadow, ref) and not begun:
        yield "ownership.no-such-reader"
    if not begun:
        yield "ownership.read-not-begun"
    yield from _end(shadow, key, ref, link)


def _post_receive(
    shadow: Shadow, key: TapeKey, ref: TapeRef, gradient: bool, link: int
) -> Findings:
    if not 0 <= ref.slot < len(shadow.slots):
        yield "ownership.unknown-slot"
        return
    yield from _reference(shadow, key, ref)
    slot = shadow.slots[ref.slot]
    if not _known(shadow, key) or slot.tape is None:
        return
    config = shadow.configs[key.stage]
    if not (config.receives_gradient if gradient else config.receives_input):
        yield "ownership.no-such-receive"
    if gradient and slot.tape.claimed:
        yield "ownership.not-forwarded"
    if ("back" if gradient else "in") in slot.moving | slot.tape.arrived:
        yield "ownership.receive-duplicate"
    yield from _filled(shadow, key.stage, slot, link)


def _finish_receive(
    shadow: Shadow, key: TapeKey, ref: TapeRef, gradient: bool, link: int
) -> Findings:
    if not 0 <= ref.slot < len(shadow.slots):
        yield "ownership.unknown-slot"
        return
    what = "back" if gradient else "in"
    yield from _transfer(shadow, key, ref, what)
    if what not in shadow.slots[ref.slot].moving:
        yield "ownership.receive-not-posted"
    if shadow.slots[ref.slot].tape is not None and _known(shadow, key):
        yield from _read_first(shadow, key, gradient)
    yield from _end(shadow, key, ref, link)


def _drop(shadow: Shadow, key: TapeKey, ref: TapeRef) -> Findings:
    if not 0 <= ref.slot < len(shadow.slots):
        yield "ownership.unknown-slot"
        return
    yield from _reference(shadow, key, ref)


def _purge(shadow: Shadow, epoch: int) -> Findings:
    for slot in shadow.live():
        if slot.tape is not None and slot.tape.key.epoch == epoch:
            wrong = list(_drop(shadow, slot.tape.key, shadow.ref(slot)))
            yield from wrong
            if wrong:
                return


def _invalidate(shadow: Shadow, stage: int) -> Findings:
    yield from _has_cache(shadow)
    if shadow.stages[stage].filling is not None:
        yield "version.in-flight"


def _always(shadow: Shadow, **arguments: Any) -> Findings:
    return iter(())


def _finalize(shadow: Shadow, stage: int, link: int) -> Findings:
    it, whole = shadow.stages[stage], len(shadow.configs[stage].cells())
    other = shadow.sharer(stage)
    sharer, lacks = shadow.stages[other], len(shadow.configs[other].cells())
    if shadow.domain(stage).poisoned:
        yield "order.poisoned"
    left_out = sum(cell[0] == stage for cell in shadow.skipped)
    if it.forwards + left_out < whole or it.dgrads < whole:
        yield "order.incomplete"
    if it.spoiled or sharer.spoiled:
        yield "arena.spoiled"
    if it.wgrads < whole or sharer.wgrads < lacks:
        yield "arena.incomplete"
    if shadow.links[link].domain != shadow.domain_of(stage):
        yield "completion.wrong-stream"
    if shadow.links[link].waited < max(it.wrote, sharer.wrote):
        yield "completion.graph-to-caller"
    yield from _reader(shadow, link)
    if it.spoiled:
        yield "epoch.spoiled"
    if it.wgrads < whole:
        yield "epoch.incomplete"
    if it.final:
        yield "epoch.already-final"


def _start_reduction(shadow: Shadow, bucket: int | str, link: int) -> Findings:
    it, stages = shadow.reductions[bucket], shadow.writers(bucket)
    declared = shadow.process.reductions
    if any(stage.spoiled for stage in stages):
        yield "reduction.spoiled"
    if any(stage.wgrads < len(stage.config.cells()) for stage in stages):
        yield "reduction.incomplete"
    if it.running:
        yield "reduction.in-flight"
    if it.done:
        yield "reduction.duplicate"
    if declared and declared[len(shadow.begun) :][:1] != (bucket,):
        yield "reduction.out-of-order"
    if shadow.links[link].domain != shadow.domain_of(it.stages[0]):
        yield "completion.wrong-stream"
    if any(shadow.links[link].waited < stage.wrote for stage in stages):
        yield "completion.graph-to-caller"


def _finish_reduction(shadow: Shadow, bucket: int | str, link: int) -> Findings:
    yield from _fail_reduction(shadow, bucket)
    if shadow.links[link].domain != shadow.domain_of(shadow.reductions[bucket].stages[0]):
        yield "completion.wrong-stream"
    yield from _reader(shadow, link)


def _fail_reduction(shadow: Shadow, bucket: int | str) -> Findings:
    if not shadow.reductions[bucket].running:
        yield "reduction.not-started"


def _start_weights_read(shadow: Shadow, stage: int, link: int) -> Findings:
    it = shadow.links[link]
    if it.domain != shadow.domain_of(stage):
        yield "completion.wrong-stream"
    if stage in shadow.readers:
        yield "completion.second-reader"
    if shadow.updated is not None and it.caller != shadow.updated[0] and not it.saw_update:
        yield "completion.update-to-reader"
    yield from _unusable(shadow, during=True)


def _finish_weights_read(shadow: Shadow, stage: int, link: int) -> Findings:
    if shadow.links[link].domain != shadow.domain_of(stage):
        yield "completion.wrong-stream"
    if stage not in shadow.readers:
        yield "completion.not-reading"
    yield from _reader(shadow, link)


def _start_gradients_read(shadow: Shadow, stage: int, link: int) -> Findings:
    it = shadow.links[link]
    if shadow.update is not None:
        yield "epoch.in-flight"
    if shadow.half_updated:
        yield "epoch.half-updated"
    if not shadow.stages[stage].final:
        yield "epoch.not-final"
    if it.domain != shadow.domain_of(stage):
        yield "completion.wrong-stream"
    if stage in shadow.gradients_readers:
        yield "completion.second-reader"
    if it.caller != shadow.reader:
        yield "completion.wrong-consumer"
    if not all(reduction.done for reduction in shadow.reductions.values()):
        yield "reduction.missing"


def _finish_gradients_read(shadow: Shadow, stage: int, link: int) -> Findings:
    if shadow.links[link].domain != shadow.domain_of(stage):
        yield "completion.wrong-stream"
    if stage not in shadow.gradients_readers:
        yield "completion.not-reading"
    yield from _reader(shadow, link)


def _next_walk(shadow: Shadow, epoch: int) -> Findings:
    stages = shadow.stages.values()
    if shadow.live():
        yield "ownership.live-tape"
    if shadow.update is not None or any(stage.evaluating is not None for stage in stages):
        yield "epoch.in-flight"
    if shadow.half_updated:
        yield "epoch.half-updated"
    if epoch != shadow.epoch:
        yield "epoch.wrong-epoch"
    if epoch != shadow.epoch or not all(stage.final for stage in stages):
        yield "epoch.not-final"
    if shadow.gradients_readers:
        yield "completion.gradients-in-use"
    if shadow.begun:
        yield "reduction.begun"


def _check_update(shadow: Shadow, epoch: int, caller: Hashable) -> Findings:
    stages = shadow.stages.values()
    if shadow.live():
        yield "ownership.live-tape"
    if any(stage.filling is not None for stage in stages):
        yield "version.in-flight"
    if shadow.update is not None or any(stage.evaluating is not None for stage in stages):
        yield "epoch.in-flight"
    if shadow.half_updated:
        yield "epoch.half-updated"
    if epoch != shadow.epoch:
        yield "epoch.wrong-epoch"
    if epoch != shadow.epoch or not all(stage.final for stage in stages):
        yield "epoch.not-final"
    if not all(map(_weighs, stages)):
        yield "epoch.wrong-weights"
    if caller != shadow.reader:
        yield "completion.update-stream"
    if shadow.readers:
        yield "completion.weights-in-use"
    if shadow.gradients_readers:
        yield "completion.gradients-in-use"
    mine = [link for link in shadow.links if link.caller == shadow.reader]
    if any(link.waited < shadow.domains[link.domain].evaluated for link in mine):
        yield "completion.evaluation-not-awaited"
    if any(reduction.running for reduction in shadow.reductions.values()):
        yield "reduction.in-flight"
    if not all(reduction.done for reduction in shadow.reductions.values()):
        yield "reduction.missing"


def _end_update(shadow: Shadow, ticket: Ticket, evidence: Any = ()) -> Findings:
    mine = shadow.update
    if ticket.incarnation != shadow.incarnation:
        yield "ownership.unknown-ticket"
    elif mine is None or (ticket.serial, ticket.slot) != (mine.serial, mine.slot):
        yield "epoch.unknown-ticket"


def _commit_update(shadow: Shadow, ticket: Ticket, evidence: Any = ()) -> Findings:
    """Scales that are updated once per epoch must be updated before the weight update ends."""
    yield from _end_update(shadow, ticket)
    if any(domain.gathered for domain in shadow.domains):
        yield "order.scales-not-moved"


def _move_scales(shadow: Shadow, stage: int, updates: int | None = None) -> Findings:
    """Scales that are updated once per epoch may be updated only once, in the weight update."""
    if shadow.update is None:
        yield "order.moves-outside-update"
    if not shadow.domain(stage).gathered:
        yield "order.nothing-gathered"
    if shadow.configs[stage].reports_updates and updates != 1:
        yield "order.scaling-updates"


def _fail(shadow: Shadow, stage: int, epoch: int) -> Findings:
    if epoch > shadow.epoch:
        yield "epoch.not-begun"


def _checkpoint(shadow: Shadow) -> Findings:
    stages = shadow.stages.values()
    if shadow.live():
        yield "persistence.live-tape"
    if shadow.update is not None or any(stage.evaluating is not None for stage in stages):
        yield "persistence.action-in-flight"
    if shadow.uses("version"):
        if any(stage.filling is not None for stage in stages):
            yield "persistence.action-in-flight"
    if shadow.half_updated:
        yield "persistence.half-updated"
    if shadow.uses("version"):
        if any(domain.refreshed is not None for domain in shadow.domains):
            yield "persistence.mid-epoch"
    if shadow.uses("order"):
        if any(domain.running for domain in shadow.domains):
            yield "persistence.action-in-flight"
        if any(domain.poisoned for domain in shadow.domains):
            yield "order.poisoned"
    if any(domain.device for domain in shadow.domains):
        yield "persistence.device-work"
    if any(reduction.running for reduction in shadow.reductions.values()):
        yield "persistence.reduction-in-flight"
    begun = any(stage.wgrads or (stage.forwards and shadow.uses("order")) for stage in stages)
    if begun or shadow.walks:
        yield "persistence.mid-epoch"


def _restore(shadow: Shadow, checkpoint: Any, incarnation: int, fresh: bool) -> Findings:
    if [c.stage for c in checkpoint.stages] != [c.stage for c in shadow.process.stages]:
        yield "persistence.configuration"
    if not fresh:
        evaluates = any(stage.evaluating is not None for stage in shadow.stages.values())
        if shadow.update is not None or evaluates:
            yield "epoch.in-flight"
        if any(slot.flight is not None for slot in shadow.slots):
            yield "ownership.in-flight"
        if any(stage.filling is not None for stage in shadow.stages.values()):
            yield "version.in-flight"
        if any(domain.running for domain in shadow.domains):
            yield "order.in-flight"
        if any(domain.device for domain in shadow.domains):
            yield "persistence.device-work"
        if any(reduction.running for reduction in shadow.reductions.values()):
            yield "reduction.in-flight"
        if incarnation == shadow.incarnation:
            yield "persistence.same-incarnation"


_RULES: Mapping[str, Callable[..., Findings]] = {
    "reserve": _reserve,
    "skip": _skip,
    "bind": _bind,
    "check_refresh": _check_refresh,
    "check_forward": _check_forward,
    "check_evaluation": _check_evaluation,
    "commit_evaluation": _commit,
    "abort_evaluation": _ticket,
    "check_dgrad": _check_dgrad,
    "check_wgrad": _check_wgrad,
    "group_wgrad": _group_wgrad,
    "ungroup_wgrad": _ungroup_wgrad,
    "read": _read,
    "finish_read": _finish_read,
    "post_receive": _post_receive,
    "finish_receive": _finish_receive,
    "drop": _drop,
    "purge": _purge,
    "invalidate": _invalidate,
    "submit": _always,
    "join": _always,
    "wait": _always,
    "drain": _always,
    "finalize": _finalize,
    "start_reduction": _start_reduction,
    "finish_reduction": _finish_reduction,
    "fail_reduction": _fail_reduction,
    "start_weights_read": _start_weights_read,
    "finish_weights_read": _finish_weights_read,
    "start_gradients_read": _start_gradients_read,
    "finish_gradients_read": _finish_gradients_read,
    "next_walk": _next_walk,
    "check_update": _check_update,
    "move_scales": _move_scales,
    "commit_update": _commit_update,
    "abort_update": _end_update,
    "fail": _fail,
    "checkpoint": _checkpoint,
    "restore": _restore,
    **dict.fromkeys(("commit_refresh", "commit_forward", "commit_dgrad", "commit_wgrad"), _commit),
    **dict.fromkeys(("abort_refresh", "abort_forward", "abort_dgrad", "abort_wgrad"), _ticket),
}
