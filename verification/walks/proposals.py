"""
What a random caller does next that is legal: further the epoch, help, fail, restart.

Every choice is a number below some bound, asked of ``pick``; zero is always the simplest, so that
a failing schedule shrinks to the plain one in which it still fails.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Any

from attrs import evolve

from qeffect import Checkpoint, TapeKey, Ticket

from .oracle import broken, seat, violations
from .world import Call, Slot, World

__all__ = [
    "ACTIONS",
    "NAMES",
    "Pick",
    "Plan",
    "a_link",
    "chooser",
    "committed",
    "damage",
    "evidence",
    "key_of",
    "link_of",
    "prepared",
    "progress",
    "reader_of",
    "recover",
    "reports",
    "shares_pool",
    "support",
]

#: A choice below a bound; zero is the simplest.
Pick = Callable[[int], int]
#: A generator of calls; each is made before the next is asked for, and its result sent in.
Plan = Generator[Call, Any, None]

#: What a caller can put right just before a call, by the clause that would refuse it.
_REMEDIES: dict[str, Callable[[World, Call], Call]] = {
    "completion.caller-to-graph": lambda world, call: Call("join", {"link": _link(call)}),
    "completion.graph-to-caller": lambda world, call: Call("wait", {"link": _link(call)}),
    "completion.slot-not-awaited": lambda world, call: Call("wait", {"link": _link(call)}),
    "completion.update-to-graph": lambda world, call: _join_update(world, call),
    "completion.transfer-to-graph": lambda world, call: _join_end(world, call),
    "completion.two-ends": lambda world, call: _join_end(world, call),
    "arena.unbound": lambda world, call: Call(
        "bind", {"key": call.arguments["key"], "destination": None}
    ),
}


def _link(call: Call) -> Any:
    return call.arguments["link"]


def _join_end(world: World, call: Call) -> Call:
    """Let the graph stream wait for the latest end of the slot that a call is about."""
    given = call.arguments
    if "ref" in given:
        place: Slot | None = world.slots[given["ref"].slot]
    else:
        place, _ = seat(world, given["key"], given["slot"])
    assert place is not None
    return Call("join", {"link": place.ended[0]})


def _join_update(world: World, call: Call) -> Call:
    """Let the graph stream that a call is for wait for the optimizer's latest update."""
    assert world.updated is not None
    given = call.arguments
    stage = given["key"].stage if "key" in given else given["stage"]
    return Call("join", {"link": link_of(world, stage, world.updated[0])})


def link_of(world: World, stage: int, caller: Hashable) -> int:
    """Return the link of a caller to a stage's domain."""
    domain = world.domain_of(stage)
    links = enumerate(world.links)
    return next(i for i, link in links if (link.domain, link.caller) == (domain, caller))


def chooser(number: int) -> Pick:
    """
    Return choices read off a number, the least significant first; zero chooses zero for ever.

    >>> pick = chooser(7)
    >>> pick(2), pick(4), pick(100)
    (1, 3, 0)
    """
    rest = number

    def pick(bound: int) -> int:
        nonlocal rest
        rest, choice = divmod(rest, bound)
        return choice

    return pick


def _first(bound: int) -> int:
    return 0


def a_link(world: World, stage: int, pick: Pick = _first) -> int:
    """Return one of the links to a stage's domain."""
    domain = world.domain_of(stage)
    own = [index for index, link in enumerate(world.links) if link.domain == domain]
    return own[pick(len(own))]


def reader_of(world: World, bucket: int | str) -> int:
    """Return the link of the stream that reads a bucket's gradients, or may be named as it."""
    return _readers_link(world, world.reductions[bucket].stages[0])


def _readers_link(world: World, stage: int) -> int:
    """Return the link of the stream that reads the gradients, or may be named as it."""
    return a_link(world, stage) if world.reader is None else link_of(world, stage, world.reader)


def evidence(world: World, ticket: Ticket) -> tuple[str, ...]:
    """Return the whole evidence of an action."""
    if ticket.action in ("dI", "dW") and ticket.key is not None:
        return world.configs[ticket.key.stage].matrices
    return ()


def reports(world: World, ticket: Ticket) -> dict[str, Any]:
    """Return what an action that did what was asked for reports, where its backend does."""
    flight = world.flights.get(ticket.serial)
    if flight is None:
        return {}
    config = world.configs[flight.stage]
    told: dict[str, Any] = {}
    if config.reports_fills and flight.filling:
        told["filled"] = dict.fromkeys(config.matrices, world.epoch)
    if config.reports_updates and ticket.action in ("F", "dI"):
        told["updates"] = 1
    if config.tape_scales == "carried" and ticket.action == "dI" and flight.slot is not None:
        told["scales"] = world.slots[flight.slot].scaled_at
    return told


#: What the transitions call each action.
NAMES = {"F": "forward", "dI": "dgrad", "dW": "wgrad", "refresh": "refresh"}
#: The action of each of those names.
ACTIONS = {name: action for action, name in NAMES.items()}


def committed(world: World, ticket: Ticket) -> Call:
    """Return the commit of an action that did what was asked for."""
    name = f"commit_{NAMES[ticket.action]}"
    whole = evidence(world, ticket)
    return Call(name, {"ticket": ticket, "evidence": whole, **reports(world, ticket)})


def _abort(ticket: Ticket) -> Call:
    return Call(f"abort_{NAMES[ticket.action]}", {"ticket": ticket})


def shares_pool(world: World, stage: int) -> bool:
    """Whether a stage's slots share capture memory, so that it matters which one is used."""
    return world.configs[stage].pool is not None


def key_of(slot: Slot) -> TapeKey:
    """Return the key of the tape in a slot."""
    assert slot.tape is not None
    return slot.tape.key


# Progress: the calls that bring an epoch to its end


def _forwards(world: World) -> Iterator[Call]:
    for stage, it in world.stages.items():
        keys = [
            TapeKey(world.epoch, *cell)
            for cell in it.config.cells()
            if world.forwarded.get(cell) != world.epoch
        ]
        for key in keys[:2]:
            if it.config.receives_input and world.slot_of(key.cell) is None:
                link = a_link(world, stage)
                yield Call("reserve", {"key": key, "slot": None, "link": link})
            apart = world.slot_of(key.cell) is not None or not shares_pool(world, stage)
            for slot in [None] if apart else [free.index for free in world.free(stage)]:
                yield Call(
                    "check_forward",
                    {
                        "key": key,
                        "slot": slot,
                        "token": None,
                        "link": a_link(world, stage),
                        "refresh": world.uses("version") and it.cached != world.epoch,
                    },
                )


def _visits(world: World) -> Iterator[Call]:
    for slot in world.live():
        key, ref = key_of(slot), world.ref(slot)
        tape = {"key": key, "ref": ref}
        link = a_link(world, key.stage)
        yield Call("check_dgrad", {**tape, "token": None, "link": link})
        writes = {"destination": None, "first": None, "first_of_tied": None}
        yield Call("check_wgrad", {**tape, **writes, "link": link})
        for gradient in (False, True):
            for name in ("read", "finish_read", "post_receive", "finish_receive"):
                yield Call(name, {**tape, "gradient": gradient, "link": link})
    for slot in world.slots:
        if slot.tape is None and slot.moving and slot.mover is not None:
            key, generation = slot.mover
            ref = evolve(world.ref(slot), generation=generation)
            link = a_link(world, key.stage)
            for what in sorted(slot.moving):
                name = "finish_receive" if what in ("in", "back") else "finish_read"
                gradient = what in ("back", "grad")
                yield Call(name, {"key": key, "ref": ref, "gradient": gradient, "link": link})


def _closings(world: World) -> Iterator[Call]:
    for stage in world.stages:
        yield Call("finalize", {"stage": stage, "link": _readers_link(world, stage)})
    for bucket, it in world.reductions.items():
        link = a_link(world, it.stages[0])
        if not it.done:
            yield Call("start_reduction", {"bucket": bucket, "link": link})
        yield Call("finish_reduction", {"bucket": bucket, "link": reader_of(world, bucket)})
    updater = world.process.callers[0] if world.reader is None else world.reader
    yield Call("commit_epoch", {"epoch": world.epoch, "caller": updater})


def _possible(world: World, call: Call) -> bool:
    """Whether a call is legal, or becomes so once the caller has waited and bound."""
    for clause in broken(world, call):
        remedy = _REMEDIES.get(clause)
        if remedy is None:
            return False
        if clause == "arena.unbound" and violations(world, remedy(world, call)):
            return False
    return True


def progress(world: World, pick: Pick) -> Plan | None:
    """Return a plan that furthers the epoch, or None where nothing legal does."""
    calls = [
        call
        for source in (_forwards, _visits, _closings)
        for call in source(world)
        if _possible(world, call)
    ]
    landings = [committed(world, flight.ticket) for flight in world.flights.values()]
    choices = landings + calls
    if not choices:
        return None
    choice = choices[pick(len(choices))]
    for _ in range(2):
        if choice.transition == "finish_read":
            choice = choices[pick(len(choices))]  # a late reader outlives its stage's last dW
    return _carry_out(world, _spelled_out(world, choice, pick), pick)


def _spelled_out(world: World, call: Call, pick: Pick) -> Call:
    """The same call, said in another of the ways in which it can be."""
    given = dict(call.arguments)
    if "link" in given:
        given["link"] = _another_link(world, call, pick)
    if "token" in given and pick(2):
        given["token"] = world.domain(given["key"].stage).updates
    if call.transition == "check_forward" and given["slot"] is None and pick(4) == 3:
        key = given["key"]
        free = world.free(key.stage)
        own = world.slot_of(key.cell)
        given["slot"] = free[pick(len(free))].index if own is None else own.index
    if "first" in given and pick(4) == 3:
        buffer, shared = world.buffers(given["key"].cell)
        given["first"] = buffer not in world.written
        if pick(2):
            given["first_of_tied"] = shared not in world.written
    return Call(call.transition, given)


def _another_link(world: World, call: Call, pick: Pick) -> int:
    """Return a link that the call may name: that of the gradients' reader, where it is known."""
    given = call.arguments
    if "bucket" in given:
        stages = world.reductions[given["bucket"]].stages
    else:
        stages = (given["key"].stage if "key" in given else given["stage"],)
    if call.transition in ("finalize", "finish_reduction") and world.reader is not None:
        return link_of(world, stages[0], world.reader)
    return a_link(world, stages[0], pick)


def _carry_out(world: World, call: Call, pick: Pick) -> Plan:
    if call.arguments.get("refresh") and pick(2):
        stage, link = call.arguments["key"].stage, call.arguments["link"]
        refresh = Call("check_refresh", {"stage": stage, "link": link})
        if _possible(world, refresh):
            yield from prepared(world, refresh)
            ticket = yield refresh
            if pick(4) == 3:
                return
            yield committed(world, ticket)
            call.arguments["refresh"] = False
    yield from prepared(world, call)
    ticket = yield call
    if call.transition == "start_reduction" and pick(2):
        yield Call("drain")
    if call.transition.startswith("check_"):
        left = pick(64)
        if left == 63:
            yield _abort(ticket)
        elif left < (32 if call.transition == "check_wgrad" else 48):
            yield committed(world, ticket)


def prepared(world: World, call: Call) -> Plan:
    """Plan what puts right all that a caller can put right before a call."""
    while wrong := [clause for clause in violations(world, call) if clause in _REMEDIES]:
        yield _REMEDIES[wrong[0]](world, call)


# Support: what a caller does beside the actions, always legal


def support(world: World, pick: Pick) -> Plan | None:
    """Return a plan that is legal and changes nothing about which work is whole."""
    calls = [
        *(Call("submit", {"caller": caller}) for caller in world.process.callers),
        *(
            Call(name, {"link": link})
            for name in ("join", "wait")
            for link in range(len(world.links))
        ),
        Call("drain"),
        Call("checkpoint"),
        *_reservations(world),
        *_binds(world),
        *_reads(world),
    ]
    legal = [call for call in calls if next(broken(world, call), None) is None]
    return _one(legal[pick(len(legal))]) if legal else None


def _reservations(world: World) -> Iterator[Call]:
    for it in world.stages.values():
        for cell in it.config.cells():
            if world.forwarded.get(cell) != world.epoch:
                key, link = TapeKey(world.epoch, *cell), a_link(world, cell[0])
                yield Call("reserve", {"key": key, "slot": None, "link": link})
                break


def _binds(world: World) -> Iterator[Call]:
    # Those of live tapes first, so that a dI that could be made waits for a while.
    for cell in sorted(world.cells, key=lambda cell: world.slot_of(cell) is None):
        if cell not in world.bound:
            yield Call("bind", {"key": TapeKey(world.epoch, *cell), "destination": None})
            return


def _reads(world: World) -> Iterator[Call]:
    for slot in world.live():
        key = key_of(slot)
        for gradient in (False, True):
            yield Call(
                "read",
                {
                    "key": key,
                    "ref": world.ref(slot),
                    "gradient": gradient,
                    "link": a_link(world, key.stage),
                },
            )


def _one(call: Call) -> Plan:
    yield call


# Damage: failures that are legal, and what a process does afterwards


def damage(world: World, pick: Pick) -> Plan | None:
    """Return a plan by which something fails."""
    calls = [
        *(_abort(flight.ticket) for flight in world.flights.values()),
        *(Call("drop", {"key": key_of(slot), "ref": world.ref(slot)}) for slot in world.live()),
        *(Call("fail_reduction", {"bucket": bucket}) for bucket in world.reductions),
        Call("purge", {"epoch": world.epoch}),
        *(Call("invalidate", {"stage": stage}) for stage in world.stages),
    ]
    legal = [call for call in calls if next(broken(world, call), None) is None]
    return _one(legal[pick(len(legal))]) if legal else None


def recover(world: World, pick: Pick, checkpoints: Sequence[Checkpoint], incarnation: int) -> Plan:
    """Plan a restart: everything in flight ends, and a checkpoint is restored."""
    fresh = bool(pick(2))
    checkpoint = checkpoints[pick(len(checkpoints))]
    if not fresh:
        for flight in list(world.flights.values()):
            yield _abort(flight.ticket) if pick(2) else committed(world, flight.ticket)
        for bucket, it in world.reductions.items():
            if it.running:
                yield Call("fail_reduction", {"bucket": bucket})
        yield Call("drain")
    yield Call("restore", {"checkpoint": checkpoint, "incarnation": incarnation, "fresh": fresh})
