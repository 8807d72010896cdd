"""
The oracle: from what happened so far, is a call legal, and if not, what is wrong with it?

It reads the history that `qeffect.verification.walks.world` tells and asks nothing of the contract.
An answer is the list of clauses that the call would break, in the normative order of the relations;
a legal call breaks none, and a contract must name the first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from qeffect import TapeKey, TapeRef, Ticket

from .world import Call, Slot, World

__all__ = ["broken", "seat", "violations"]

Findings = Iterator[str]

#: The relation that checks a clause, where the clause's id names another.
_CHECKED_BY = {
    "persistence.device-work": "completion",
    "persistence.reduction-in-flight": "reduction",
    "version.left-out": "epoch",
}


def violations(world: World, call: Call) -> list[str]:
    """
    Return the clauses that a call would break now, the one to be named first.

    >>> from qeffect.verification.walks.processes import PROCESSES
    >>> world = World(PROCESSES[0], incarnation=1)
    >>> violations(world, Call("finalize", {"stage": 0, "link": 0}))[:2]
    ['order.incomplete', 'arena.incomplete']
    """
    return list(broken(world, call))


def broken(world: World, call: Call) -> Findings:
    """Yield what `violations` returns, one by one."""
    omitted = world.process.omit
    for clause in _RULES[call.transition](world, **call.arguments):
        if not omitted or _CHECKED_BY.get(clause, clause.partition(".")[0]) not in omitted:
            yield clause


# What several calls have in common


def _known(world: World, key: TapeKey) -> bool:
    return key.cell in world.cells


def _empty(slot: Slot) -> bool:
    """No tape is in the slot and nothing moves through it."""
    return slot.tape is None and not slot.moving


def seat(world: World, key: TapeKey, slot: int | None) -> tuple[Slot | None, list[str]]:
    """Return the slot that a forward or a reservation takes, and what is wrong with it."""
    own = world.slot_of(key.cell)
    if slot is None:
        free = world.free(key.stage)
        claimed = own is not None and own.tape is not None and own.tape.claimed
        if claimed and own is not None and own.flight is None:
            place = own
        elif free:
            place = free[0]
        else:
            used_up = [s for s in world.slots if s.stage == key.stage and _empty(s)]
            if not used_up and own is None:
                return None, ["ownership.pool-exhausted"]
            place = used_up[0] if used_up else own  # type: ignore[assignment]
    else:
        place = world.slots[slot]
    return place, []


def _taken(world: World, key: TapeKey, place: Slot, reserved_is_fine: bool) -> Findings:
    """What is wrong with a key in a slot, whoever asks."""
    tape = place.tape
    if place.stage != key.stage:
        yield "ownership.foreign-slot"
    if reserved_is_fine and place.flight is not None:
        yield "ownership.in-flight"
    mine = reserved_is_fine and tape is not None and tape.claimed and tape.key == key
    if tape is not None and not mine:
        yield "ownership.slot-busy"
    if tape is None and world.slot_of(key.cell) is not None:
        yield "ownership.key-live"
    if world.forwarded.get(key.cell) == key.epoch:
        yield "ownership.repeated-forward"
    if place.releases == world.process.generation_max:
        yield "ownership.generation-exhausted"
    if place.moving:
        yield "ownership.transfer-in-flight"
    if reserved_is_fine and world.configs[key.stage].receives_input:
        if not mine or tape is None or "in" not in tape.arrived:
            yield "ownership.receive-missing"


def _reference(world: World, key: TapeKey, ref: TapeRef) -> Findings:
    """What is wrong with a key and a reference."""
    slot = world.slots[ref.slot]
    if ref.incarnation != world.incarnation:
        yield "ownership.foreign-incarnation"
    if slot.tape is None or slot.releases != ref.generation:
        yield "ownership.stale-reference"
    if slot.tape is None or slot.tape.key != key:
        yield "ownership.wrong-key"
    if slot.flight is not None:
        yield "ownership.in-flight"


def _transfer(world: World, key: TapeKey, ref: TapeRef, what: str) -> Findings:
    """What is wrong with a key and a reference at the end of a transfer."""
    slot = world.slots[ref.slot]
    lost = slot.tape is None and what in slot.moving and slot.mover is not None
    if not lost or slot.mover is None or slot.mover[1] != ref.generation:
        yield from _reference(world, key, ref)
        return
    if ref.incarnation != world.incarnation:
        yield "ownership.foreign-incarnation"
    if slot.mover[0] != key:
        yield "ownership.wrong-key"


def _end(world: World, key: TapeKey, ref: TapeRef, link: int) -> Findings:
    """What is wrong with the link on which an end is told."""
    on, at = world.slots[ref.slot].ended
    if _known(world, key) and world.links[link].domain != world.domain_of(key.stage):
        yield "completion.wrong-stream"
    if on != link and world.links[on].joined < at:
        yield "completion.two-ends"


def _filled(world: World, stage: int, slot: Slot | None, link: int) -> Findings:
    """What is wrong with a stream that fills a slot."""
    if world.links[link].domain != world.domain_of(stage):
        yield "completion.wrong-stream"
    if slot is not None and world.links[link].waited < slot.vacated:
        yield "completion.slot-not-awaited"


def _seen(world: World, slot: Slot | None) -> Findings:
    """Whether the graph stream has waited for the slot's latest transfer."""
    if slot is not None and world.links[slot.ended[0]].joined < slot.ended[1]:
        yield "completion.transfer-to-graph"


def _update(
    world: World, stage: int, token: int | None, action: tuple[str, Any] | None
) -> Findings:
    """What is wrong with another update of a stage's scaling state."""
    domain = world.domain(stage)
    if domain.running:
        yield "order.in-flight"
    if domain.poisoned:
        yield "order.poisoned"
    if token is not None and token != domain.updates:
        yield "order.token"
    declared = world.process.declared.get(world.configs[stage].domain)
    if declared and action is not None:
        if declared[domain.of_epoch : domain.of_epoch + 1] != (action,):
            yield "order.reordered"


def _replay(world: World, stage: int, link: int) -> Findings:
    """What is wrong with a replay on a domain's graph stream."""
    if world.links[link].domain != world.domain_of(stage):
        yield "completion.wrong-stream"
    if world.links[link].joined < world.links[link].submitted:
        yield "completion.caller-to-graph"


def _after_update(world: World, stage: int) -> Findings:
    """Whether the weights can be read: the stream waited for the latest update, or the host did."""
    if world.updated is None:
        return
    caller, at = world.updated
    domain = world.domain_of(stage)
    own = [link for link in world.links if (link.domain, link.caller) == (domain, caller)]
    if world.domains[domain].drained < at and not any(link.joined > at for link in own):
        yield "completion.update-to-graph"


def _reader(world: World, link: int) -> Findings:
    """Whether another stream waited for gradients of the epoch already."""
    if world.reader not in (None, world.links[link].caller):
        yield "completion.wrong-consumer"


def _in_order(world: World, slot: int, kind: str) -> Findings:
    pool = world.pools[world.slots[slot].pool]
    if not pool.keeps_order(world.ranks[slot, kind]):
        yield "capture.out-of-order"


def _waits(world: World, ref: TapeRef) -> set[str]:
    tape = world.slots[ref.slot].tape
    return set() if tape is None else tape.waits


# One rule for each transition


def _reserve(world: World, key: TapeKey, slot: int | None, link: int) -> Findings:
    if not _known(world, key):
        yield "ownership.unknown-key"
        return
    if slot is not None and not 0 <= slot < len(world.slots):
        yield "ownership.unknown-slot"
        return
    place, wrong = _place_to_reserve(world, key, slot)
    yield from wrong
    if place is not None:
        yield from _taken(world, key, place, False)
    if key.epoch != world.epoch:
        yield "version.wrong-epoch"
    yield from _filled(world, key.stage, place, link)


def _place_to_reserve(
    world: World, key: TapeKey, slot: int | None
) -> tuple[Slot | None, list[str]]:
    own = world.slot_of(key.cell)
    free = [s for s in world.slots if s.stage == key.stage and _empty(s)]
    if slot is None and own is not None and free:
        return (world.free(key.stage) or free)[0], []
    return seat(world, key, slot)


def _bind(world: World, key: TapeKey, destination: Any) -> Findings:
    if not _known(world, key):
        yield "ownership.unknown-key"
        return
    if key.epoch != world.epoch:
        yield "version.wrong-epoch"
    if world.stages[key.stage].spoiled:
        yield "arena.spoiled"
    if key.cell in world.bound:
        yield "arena.duplicate-bind"
    if destination is not None:
        yield "arena.mismatch"


def _has_cache(world: World) -> Findings:
    if not world.uses("version"):
        yield "version.left-out"


def _check_refresh(world: World, stage: int, link: int) -> Findings:
    it, domain = world.stages[stage], world.domain(stage)
    yield from _has_cache(world)
    if it.filling is not None:
        yield "version.in-flight"
    if it.cached == world.epoch:
        yield "version.already-fresh"
    if it.forwards and world.uses("order"):
        yield "version.late-refresh"
    if domain.refreshed not in (None, stage):
        yield "version.refresh-interrupted"
    yield from _update(world, stage, None, None)
    yield from _replay(world, stage, link)
    yield from _after_update(world, stage)


def _check_forward(
    world: World, key: TapeKey, slot: int | None, token: int | None, link: int, refresh: bool
) -> Findings:
    if not _known(world, key):
        yield "ownership.unknown-key"
        return
    if slot is not None and not 0 <= slot < len(world.slots):
        yield "ownership.unknown-slot"
        return
    stage = world.stages[key.stage]
    place, wrong = seat(world, key, slot)
    yield from wrong
    if place is not None:
        yield from _taken(world, key, place, True)
    if key.epoch != world.epoch:
        yield "version.wrong-epoch"
    if refresh and stage.filling is not None:
        yield "version.in-flight"
    if not refresh and stage.cached != key.epoch:
        yield "version.stale-cache"
    if refresh and stage.cached == key.epoch:
        yield "version.already-fresh"
    if refresh and stage.forwards and world.uses("order"):
        yield "version.late-refresh"
    if world.domain(key.stage).refreshed not in (None, key.stage):
        yield "version.refresh-interrupted"
    yield from _update(world, key.stage, token, ("F", key.cell))
    if place is not None:
        yield from _in_order(world, place.index, "F")
    yield from _replay(world, key.stage, link)
    yield from _after_update(world, key.stage)
    yield from _seen(world, place)


def _check_dgrad(
    world: World, key: TapeKey, ref: TapeRef, token: int | None, link: int
) -> Findings:
    if not 0 <= ref.slot < len(world.slots):
        yield "ownership.unknown-slot"
        return
    yield from _reference(world, key, ref)
    waits = _waits(world, ref)
    if "F" in waits:
        yield "ownership.not-forwarded"
    if "dI" not in waits:
        yield "ownership.duplicate-dgrad"
    if not _known(world, key):
        return
    receives = world.configs[key.stage].receives_gradient
    tape = world.slots[ref.slot].tape
    if "back" in world.slots[ref.slot].moving:
        yield "ownership.transfer-in-flight"
    if receives and (tape is None or "back" not in tape.arrived):
        yield "ownership.receive-missing"
    if key.epoch != world.epoch:
        yield "version.wrong-epoch"
    if world.stages[key.stage].cached != key.epoch:
        yield "version.stale-cache"
    if world.domain(key.stage).refreshed is not None:
        yield "version.refresh-interrupted"
    yield from _update(world, key.stage, token, ("dI", key.cell))
    if world.configs[key.stage].tape_scales == "live":
        if world.slots[ref.slot].scaled_at != world.domain(key.stage).rolled_at:
            yield "order.scales-moved"
    if key.cell not in world.bound:
        yield "arena.unbound"
    yield from _in_order(world, ref.slot, "dI")
    yield from _replay(world, key.stage, link)
    if world.links[link].waited < world.slots[ref.slot].wrote:
        yield "completion.graph-to-caller"
    if receives:
        yield from _seen(world, world.slots[ref.slot])


def _check_wgrad(
    world: World,
    key: TapeKey,
    ref: TapeRef,
    destination: Any,
    first: bool | None,
    first_of_tied: bool | None,
    link: int,
) -> Findings:
    if not 0 <= ref.slot < len(world.slots):
        yield "ownership.unknown-slot"
        return
    if not _known(world, key):
        yield "ownership.unknown-key"
        return
    yield from _reference(world, key, ref)
    waits = _waits(world, ref)
    if "F" in waits:
        yield "ownership.not-forwarded"
    if "dI" in waits:
        yield "ownership.wgrad-before-dgrad"
    if "dW" not in waits:
        yield "ownership.duplicate-wgrad"
    if key.epoch != world.epoch:
        yield "version.wrong-epoch"
    if world.stages[key.stage].spoiled:
        yield "arena.spoiled"
    if destination is not None:
        yield "arena.mismatch"
    buffers = world.buffers(key.cell)
    if any(written in buffers for written, _ in world.writing):
        yield "arena.in-flight"
    if buffers[0] == buffers[1] and first_of_tied is None:
        first_of_tied = first
    told = [*zip(buffers, (first, first_of_tied), strict=True)]
    if any(overwrites is True and buffer in world.written for buffer, overwrites in told):
        yield "arena.overwrite"
    if any(overwrites is False and buffer not in world.written for buffer, overwrites in told):
        yield "arena.stale-accumulation"
    yield from _in_order(world, ref.slot, "dW")
    yield from _replay(world, key.stage, link)


def _ticket(world: World, ticket: Ticket) -> Findings:
    flight = world.flights.get(ticket.serial)
    if ticket.incarnation != world.incarnation:
        yield "ownership.unknown-ticket"
    elif ticket.action == "refresh" and not world.uses("version"):
        yield "version.left-out"
    elif (
        flight is None or flight.ticket.action != ticket.action or flight.ticket.slot != ticket.slot
    ):
        family = "version" if ticket.action == "refresh" else "ownership"
        yield f"{family}.unknown-ticket"


def _commit(
    world: World,
    ticket: Ticket,
    evidence: Any = (),
    filled: Any = None,
    updates: Any = None,
    scales: Any = None,
) -> Findings:
    yield from _ticket(world, ticket)
    if ticket.action in ("dI", "dW") and ticket.key is not None:
        if tuple(sorted(evidence)) != world.configs[ticket.key.stage].matrices:
            wrong = {"dI": "work-not-queued", "dW": "matrix-coverage"}
            yield f"ownership.{wrong[ticket.action]}"
    flight = world.flights.get(ticket.serial)
    if flight is None or flight.ticket.action != ticket.action:
        return
    config = world.configs[flight.stage]
    if config.reports_fills and ticket.action in ("F", "refresh"):
        pairs = list(filled.items() if isinstance(filled, dict) else filled or ())
        if not flight.filling:
            yield from ["version.fill-unasked"] * bool(pairs)
        else:
            if tuple(sorted(name for name, _ in pairs)) != config.matrices:
                yield "version.fill-missing"
            if not pairs or any(epoch != world.epoch for _, epoch in pairs):
                yield "version.wrong-fill"
    if config.reports_updates and ticket.action in ("F", "dI") and updates != 1:
        yield "order.scaling-updates"
    if config.tape_scales == "carried" and ticket.action == "dI" and flight.slot is not None:
        if scales != world.slots[flight.slot].scaled_at:
            yield "order.wrong-scales"


def _read(world: World, key: TapeKey, ref: TapeRef, gradient: bool, link: int) -> Findings:
    if not 0 <= ref.slot < len(world.slots):
        yield "ownership.unknown-slot"
        return
    yield from _reference(world, key, ref)
    waits = _waits(world, ref)
    what = "grad" if gradient else "out"
    if what not in waits:
        yield "ownership.no-such-reader"
    if gradient and "dI" in waits:
        yield "ownership.read-before-dgrad"
    if what in world.slots[ref.slot].moving:
        yield "ownership.read-duplicate"
    if _known(world, key) and world.links[link].domain != world.domain_of(key.stage):
        yield "completion.wrong-stream"
    if world.links[link].waited < world.slots[ref.slot].wrote:
        yield "completion.graph-to-caller"


def _finish_read(world: World, key: TapeKey, ref: TapeRef, gradient: bool, link: int) -> Findings:
    if not 0 <= ref.slot < len(world.slots):
        yield "ownership.unknown-slot"
        return
    what = "grad" if gradient else "out"
    yield from _transfer(world, key, ref, what)
    begun = what in world.slots[ref.slot].moving
    if what not in _waits(world, ref) and not begun:
        yield "ownership.no-such-reader"
    if not begun:
        yield "ownership.read-not-begun"
    yield from _end(world, key, ref, link)


def _post_receive(world: World, key: TapeKey, ref: TapeRef, gradient: bool, link: int) -> Findings:
    if not 0 <= ref.slot < len(world.slots):
        yield "ownership.unknown-slot"
        return
    yield from _reference(world, key, ref)
    slot = world.slots[ref.slot]
    if not _known(world, key) or slot.tape is None:
        return
    config = world.configs[key.stage]
    if not (config.receives_gradient if gradient else config.receives_input):
        yield "ownership.no-such-receive"
    if gradient and slot.tape.claimed:
        yield "ownership.not-forwarded"
    if ("back" if gradient else "in") in slot.moving | slot.tape.arrived:
        yield "ownership.receive-duplicate"
    yield from _filled(world, key.stage, slot, link)


def _finish_receive(
    world: World, key: TapeKey, ref: TapeRef, gradient: bool, link: int
) -> Findings:
    if not 0 <= ref.slot < len(world.slots):
        yield "ownership.unknown-slot"
        return
    what = "back" if gradient else "in"
    yield from _transfer(world, key, ref, what)
    if what not in world.slots[ref.slot].moving:
        yield "ownership.receive-not-posted"
    yield from _end(world, key, ref, link)


def _drop(world: World, key: TapeKey, ref: TapeRef) -> Findings:
    if not 0 <= ref.slot < len(world.slots):
        yield "ownership.unknown-slot"
        return
    yield from _reference(world, key, ref)


def _purge(world: World, epoch: int) -> Findings:
    for slot in world.live():
        if slot.tape is not None and slot.tape.key.epoch == epoch:
            wrong = list(_drop(world, slot.tape.key, world.ref(slot)))
            yield from wrong
            if wrong:
                return


def _invalidate(world: World, stage: int) -> Findings:
    yield from _has_cache(world)
    if world.stages[stage].filling is not None:
        yield "version.in-flight"


def _always(world: World, **arguments: Any) -> Findings:
    return iter(())


def _finalize(world: World, stage: int, link: int) -> Findings:
    it, whole = world.stages[stage], len(world.configs[stage].cells())
    other = world.sharer(stage)
    sharer, lacks = world.stages[other], len(world.configs[other].cells())
    if world.domain(stage).poisoned:
        yield "order.poisoned"
    if it.forwards < whole or it.dgrads < whole:
        yield "order.incomplete"
    if it.spoiled or sharer.spoiled:
        yield "arena.spoiled"
    if it.wgrads < whole or sharer.wgrads < lacks:
        yield "arena.incomplete"
    if world.links[link].domain != world.domain_of(stage):
        yield "completion.wrong-stream"
    if world.links[link].waited < max(it.wrote, sharer.wrote):
        yield "completion.graph-to-caller"
    yield from _reader(world, link)
    if it.spoiled:
        yield "epoch.spoiled"
    if it.wgrads < whole:
        yield "epoch.incomplete"
    if it.final:
        yield "epoch.already-final"


def _start_reduction(world: World, bucket: int | str, link: int) -> Findings:
    it, stages = world.reductions[bucket], world.writers(bucket)
    declared = world.process.reductions
    if any(stage.spoiled for stage in stages):
        yield "reduction.spoiled"
    if any(stage.wgrads < len(stage.config.cells()) for stage in stages):
        yield "reduction.incomplete"
    if it.running:
        yield "reduction.in-flight"
    if it.done:
        yield "reduction.duplicate"
    if declared and declared[len(world.begun) :][:1] != (bucket,):
        yield "reduction.out-of-order"
    if world.links[link].domain != world.domain_of(it.stages[0]):
        yield "completion.wrong-stream"
    if any(world.links[link].waited < stage.wrote for stage in stages):
        yield "completion.graph-to-caller"


def _finish_reduction(world: World, bucket: int | str, link: int) -> Findings:
    yield from _fail_reduction(world, bucket)
    if world.links[link].domain != world.domain_of(world.reductions[bucket].stages[0]):
        yield "completion.wrong-stream"
    yield from _reader(world, link)


def _fail_reduction(world: World, bucket: int | str) -> Findings:
    if not world.reductions[bucket].running:
        yield "reduction.not-started"


def _commit_epoch(world: World, epoch: int, caller: Hashable) -> Findings:
    stages = world.stages.values()
    if world.live():
        yield "ownership.live-tape"
    if any(stage.filling is not None for stage in stages):
        yield "version.in-flight"
    if any(domain.running for domain in world.domains):
        yield "order.in-flight"
    if epoch != world.epoch:
        yield "epoch.wrong-epoch"
    if epoch != world.epoch or not all(stage.final for stage in stages):
        yield "epoch.not-final"
    if caller != world.reader:
        yield "completion.update-stream"
    if any(reduction.running for reduction in world.reductions.values()):
        yield "reduction.in-flight"
    if not all(reduction.done for reduction in world.reductions.values()):
        yield "reduction.missing"


def _checkpoint(world: World) -> Findings:
    stages = world.stages.values()
    if world.live():
        yield "persistence.live-tape"
    if world.uses("version"):
        if any(stage.filling is not None for stage in stages):
            yield "persistence.action-in-flight"
        if any(domain.refreshed is not None for domain in world.domains):
            yield "persistence.mid-epoch"
    if world.uses("order"):
        if any(domain.running for domain in world.domains):
            yield "persistence.action-in-flight"
        if any(domain.poisoned for domain in world.domains):
            yield "order.poisoned"
    if any(domain.device for domain in world.domains):
        yield "persistence.device-work"
    if any(reduction.running for reduction in world.reductions.values()):
        yield "persistence.reduction-in-flight"
    if any(stage.wgrads or (stage.forwards and world.uses("order")) for stage in stages):
        yield "persistence.mid-epoch"


def _restore(world: World, checkpoint: Any, incarnation: int, fresh: bool) -> Findings:
    if [c.stage for c in checkpoint.stages] != [c.stage for c in world.process.stages]:
        yield "persistence.configuration"
    if not fresh:
        if any(slot.flight is not None for slot in world.slots):
            yield "ownership.in-flight"
        if any(stage.filling is not None for stage in world.stages.values()):
            yield "version.in-flight"
        if any(domain.running for domain in world.domains):
            yield "order.in-flight"
        if any(domain.device for domain in world.domains):
            yield "persistence.device-work"
        if any(reduction.running for reduction in world.reductions.values()):
            yield "reduction.in-flight"
        if incarnation == world.incarnation:
            yield "persistence.same-incarnation"


_RULES: Mapping[str, Callable[..., Findings]] = {
    "reserve": _reserve,
    "bind": _bind,
    "check_refresh": _check_refresh,
    "check_forward": _check_forward,
    "check_dgrad": _check_dgrad,
    "check_wgrad": _check_wgrad,
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
    "commit_epoch": _commit_epoch,
    "checkpoint": _checkpoint,
    "restore": _restore,
    **dict.fromkeys(("commit_refresh", "commit_forward", "commit_dgrad", "commit_wgrad"), _commit),
    **dict.fromkeys(("abort_refresh", "abort_forward", "abort_dgrad", "abort_wgrad"), _ticket),
}
