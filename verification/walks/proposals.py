"""
What a random caller may ask next: calls that further the epoch, and calls with one thing wrong.

Every choice is a number below some bound, asked of ``pick``; zero is always the simplest, so that
a failing schedule shrinks to the plain one in which it still fails.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

from attrs import evolve

from qeffect import Checkpoint, Destination, TapeKey, TapeRef, Ticket
from qeffect.stage import TRANSITIONS
from verification.walks.oracle import violations
from verification.walks.world import Call, Slot, World

__all__ = [
    "Pick",
    "Plan",
    "aimed",
    "attempt",
    "chooser",
    "damage",
    "progress",
    "recover",
    "support",
]

#: A choice below a bound; zero is the simplest.
Pick = Callable[[int], int]
#: A generator of calls; each is made before the next is asked for, and its result sent in.
Plan = Generator[Call, Any, None]

#: What a caller can put right just before a call, by the clause that would refuse it.
_REMEDIES: dict[str, Callable[[Call], Call]] = {
    "completion.caller-to-graph": lambda call: Call("join", {"link": call.arguments["link"]}),
    "completion.graph-to-caller": lambda call: Call("wait", {"link": call.arguments["link"]}),
    "arena.unbound": lambda call: Call("bind", {"key": call.arguments["key"], "destination": None}),
}
#: How many calls are tried, how many that are refused are made, and how choices are spread.
_TRIALS = 32
_AT_ONCE = 6
_STRIDE = 0x9E3779B97F4A7C15
_STRANGER = Destination("stranger", None, (1,), "bfloat16", "cuda:1", 64, 2)


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


def _link(world: World, stage: int, pick: Pick = _first) -> int:
    domain = world.domain_of(stage)
    own = [index for index, link in enumerate(world.links) if link.domain == domain]
    return own[pick(len(own))]


def _evidence(world: World, ticket: Ticket) -> tuple[str, ...]:
    if ticket.action in ("dI", "dW") and ticket.key is not None:
        return world.configs[ticket.key.stage].matrices
    return ()


_NAMES = {"F": "forward", "dI": "dgrad", "dW": "wgrad", "refresh": "refresh"}


def _commit(world: World, ticket: Ticket) -> Call:
    name = f"commit_{_NAMES[ticket.action]}"
    return Call(name, {"ticket": ticket, "evidence": _evidence(world, ticket)})


def _abort(ticket: Ticket) -> Call:
    return Call(f"abort_{_NAMES[ticket.action]}", {"ticket": ticket})


def _shares(world: World, stage: int) -> bool:
    return world.configs[stage].pool is not None


def _tape(slot: Slot) -> TapeKey:
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
            apart = world.slot_of(key.cell) is not None or not _shares(world, stage)
            for slot in [None] if apart else [free.index for free in world.free(stage)]:
                yield Call(
                    "check_forward",
                    {
                        "key": key,
                        "slot": slot,
                        "token": None,
                        "link": _link(world, stage),
                        "refresh": world.uses("version") and it.cached != world.epoch,
                    },
                )


def _visits(world: World) -> Iterator[Call]:
    for slot in world.live():
        key, ref = _tape(slot), world.ref(slot)
        tape = {"key": key, "ref": ref}
        link = _link(world, key.stage)
        yield Call("check_dgrad", {**tape, "token": None, "link": link})
        yield Call("check_wgrad", {**tape, "destination": None, "first": None, "link": link})
        for gradient in (False, True):
            yield Call("finish_read", {**tape, "gradient": gradient})


def _closings(world: World) -> Iterator[Call]:
    for stage in world.stages:
        yield Call("finalize", {"stage": stage, "link": _link(world, stage)})
        if world.stages[stage].owes_reduction:
            yield Call("start_reduction", {"stage": stage})
        if world.stages[stage].reducing:
            yield Call("finish_reduction", {"stage": stage})
    yield Call("commit_epoch", {"epoch": world.epoch})


def _possible(world: World, call: Call) -> bool:
    """Whether a call is legal, or becomes so once the caller has waited and bound."""
    wrong = set(violations(world, call))
    if not wrong <= _REMEDIES.keys():
        return False
    return "arena.unbound" not in wrong or not violations(world, _REMEDIES["arena.unbound"](call))


def progress(world: World, pick: Pick) -> Plan | None:
    """Return a plan that furthers the epoch, or None where nothing legal does."""
    calls = [
        call
        for source in (_forwards, _visits, _closings)
        for call in source(world)
        if _possible(world, call)
    ]
    landings = [_commit(world, flight.ticket) for flight in world.flights.values()]
    choices = landings + calls
    if not choices:
        return None
    return _carry_out(world, _spelled_out(world, choices[pick(len(choices))], pick), pick)


def _spelled_out(world: World, call: Call, pick: Pick) -> Call:
    """The same call, said in another of the ways in which it can be."""
    given = dict(call.arguments)
    if "link" in given:
        stage = given["key"].stage if "key" in given else given["stage"]
        given["link"] = _link(world, stage, pick)
    if "token" in given and pick(2):
        given["token"] = world.domain(given["key"].stage).updates
    if call.transition == "check_forward" and given["slot"] is None and pick(4) == 3:
        key = given["key"]
        free = world.free(key.stage)
        own = world.slot_of(key.cell)
        given["slot"] = free[pick(len(free))].index if own is None else own.index
    if "first" in given and pick(4) == 3:
        given["first"] = world.buffer(given["key"].cell) not in world.written
    return Call(call.transition, given)


def _carry_out(world: World, call: Call, pick: Pick) -> Plan:
    if call.arguments.get("refresh") and pick(2):
        stage, link = call.arguments["key"].stage, call.arguments["link"]
        refresh = Call("check_refresh", {"stage": stage, "link": link})
        if _possible(world, refresh):
            yield from _prepared(world, refresh)
            ticket = yield refresh
            if pick(4) == 3:
                return
            yield _commit(world, ticket)
            call.arguments["refresh"] = False
    yield from _prepared(world, call)
    ticket = yield call
    if call.transition.startswith("check_"):
        left = pick(64)
        if left == 63:
            yield _abort(ticket)
        elif left < 48:
            yield _commit(world, ticket)


def _prepared(world: World, call: Call) -> Plan:
    while wrong := [clause for clause in violations(world, call) if clause in _REMEDIES]:
        yield _REMEDIES[wrong[0]](call)


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
    legal = [call for call in calls if not violations(world, call)]
    return _one(legal[pick(len(legal))]) if legal else None


def _reservations(world: World) -> Iterator[Call]:
    for it in world.stages.values():
        for cell in it.config.cells():
            if world.forwarded.get(cell) != world.epoch:
                yield Call("reserve", {"key": TapeKey(world.epoch, *cell), "slot": None})
                break


def _binds(world: World) -> Iterator[Call]:
    for cell in world.cells:
        if cell not in world.bound:
            yield Call("bind", {"key": TapeKey(world.epoch, *cell), "destination": None})
            return


def _reads(world: World) -> Iterator[Call]:
    for slot in world.live():
        key = _tape(slot)
        for gradient in (False, True):
            yield Call(
                "read",
                {
                    "key": key,
                    "ref": world.ref(slot),
                    "gradient": gradient,
                    "link": _link(world, key.stage),
                },
            )


def _one(call: Call) -> Plan:
    yield call


# Damage: failures that are legal, and what a process does afterwards


def damage(world: World, pick: Pick) -> Plan | None:
    """Return a plan by which something fails."""
    calls = [
        *(_abort(flight.ticket) for flight in world.flights.values()),
        *(Call("drop", {"key": _tape(slot), "ref": world.ref(slot)}) for slot in world.live()),
        *(Call("fail_reduction", {"stage": stage}) for stage in world.stages),
        Call("purge", {"epoch": world.epoch}),
        *(Call("invalidate", {"stage": stage}) for stage in world.stages),
    ]
    legal = [call for call in calls if not violations(world, call)]
    return _one(legal[pick(len(legal))]) if legal else None


def recover(world: World, pick: Pick, checkpoints: Sequence[Checkpoint], incarnation: int) -> Plan:
    """Plan a restart: everything in flight ends, and a checkpoint is restored."""
    fresh = bool(pick(2))
    checkpoint = checkpoints[pick(len(checkpoints))]
    if not fresh:
        for flight in list(world.flights.values()):
            yield _abort(flight.ticket) if pick(2) else _commit(world, flight.ticket)
        for stage, it in world.stages.items():
            if it.reducing:
                yield Call("finish_reduction", {"stage": stage})
        yield Call("drain")
    yield Call("restore", {"checkpoint": checkpoint, "incarnation": incarnation, "fresh": fresh})


# Attempts: any call at all, most of them with one thing wrong


def attempt(
    world: World,
    pick: Pick,
    checkpoints: Sequence[Checkpoint],
    incarnation: int,
    transition: str,
) -> Call | None:
    """
    Return a call of a transition, right or wrong; None where there is nothing to call it on.

    Args:
        world: What happened so far.
        pick: Choices.
        checkpoints: Checkpoints that were taken.
        incarnation: A fresh one, for a restore.
        transition: Which transition to ask for.
    """
    if transition == "restore":
        return _restores(world, pick, checkpoints, incarnation)
    return _ATTEMPTS[transition](world, pick)


def aimed(
    world: World,
    pick: Pick,
    checkpoints: Sequence[Checkpoint],
    incarnation: int,
    targets: Sequence[tuple[str, str]],
) -> list[Call]:
    """
    Return calls that some of the given guards refuse now; a few tries may find none.

    Drawn blindly, rare clauses would almost never be met.

    Args:
        world: What happened so far.
        pick: Choices.
        checkpoints: Checkpoints that were taken.
        incarnation: A fresh one, for a restore.
        targets: Guards to meet, as (transition, clause).
    """
    found: dict[tuple[str, str], Call] = {}
    seed = pick(1 << 32)
    for trial in range(_TRIALS):
        choose = chooser((seed + trial) * _STRIDE % (1 << 64))
        transition, _ = targets[choose(len(targets))]
        call = attempt(world, choose, checkpoints, incarnation, transition)
        wrong = [] if call is None else violations(world, call)
        if call is not None and wrong and (transition, wrong[0]) in targets:
            found.setdefault((transition, wrong[0]), call)
    return list(found.values())[:_AT_ONCE]


def _twisted(call: Call, twists: Sequence[tuple[str, Any]], pick: Pick) -> Call:
    """Return the call with at most one argument replaced; a function makes its value."""
    chosen = pick(len(twists) + 1)
    if chosen == 0:
        return call
    name, value = twists[chosen - 1]
    given = value() if callable(value) else value
    return Call(call.transition, {**call.arguments, name: given})


def _any_key(world: World, pick: Pick) -> TapeKey:
    return TapeKey(world.epoch, *world.cells[pick(len(world.cells))])


def _wrong_keys(world: World, key: TapeKey) -> list[tuple[str, Any]]:
    wrong = [("key", lambda: evolve(key, microbatch=99))]
    if world.uses("version"):
        wrong.append(("key", lambda: evolve(key, epoch=key.epoch + 1)))
        if key.epoch:
            wrong.append(("key", lambda: evolve(key, epoch=key.epoch - 1)))
    return wrong


def _slots(world: World) -> list[tuple[str, Any]]:
    return [("slot", index) for index in range(len(world.slots) + 1)]


def _links(world: World) -> list[tuple[str, Any]]:
    return [("link", index) for index in range(len(world.links))]


def _reserve(world: World, pick: Pick) -> Call:
    key = _any_key(world, pick)
    call = Call("reserve", {"key": key, "slot": None})
    return _twisted(call, [*_wrong_keys(world, key), *_slots(world)], pick)


def _bind(world: World, pick: Pick) -> Call:
    key = _any_key(world, pick)
    twists = [*_wrong_keys(world, key), ("destination", (_STRANGER,))]
    return _twisted(Call("bind", {"key": key, "destination": None}), twists, pick)


def _any_stage(world: World, pick: Pick) -> int:
    return list(world.stages)[pick(len(world.stages))]


def _refresh(world: World, pick: Pick) -> Call | None:
    if not world.uses("version"):
        return None
    stage = _any_stage(world, pick)
    call = Call("check_refresh", {"stage": stage, "link": _link(world, stage, pick)})
    return _twisted(call, _links(world), pick)


def _forward(world: World, pick: Pick) -> Call:
    key = _any_key(world, pick)
    stage, updates = world.stages[key.stage], world.domain(key.stage).updates
    stale = world.uses("version") and stage.cached != world.epoch
    free = world.free(key.stage)
    slot = free[0].index if free and _shares(world, key.stage) else None
    call = Call(
        "check_forward",
        {
            "key": key,
            "slot": slot,
            "token": None,
            "link": _link(world, key.stage, pick),
            "refresh": stale,
        },
    )
    twists = [
        ("refresh", not stale),
        ("token", updates + 1),
        ("token", updates - 1),
        *_wrong_keys(world, key),
        *_slots(world),
        *_links(world),
    ]
    return _twisted(call, twists if world.uses("version") else twists[1:], pick)


def _any_tape(world: World, pick: Pick) -> tuple[TapeKey, TapeRef] | None:
    """A tape that is live, or was."""
    live = [(_tape(slot), world.ref(slot)) for slot in world.live()]
    tapes = live + world.old_refs[-4:] if pick(4) == 3 else live or world.old_refs[-4:]
    return tapes[pick(len(tapes))] if tapes else None


def _wrong_refs(world: World, key: TapeKey, ref: TapeRef) -> list[tuple[str, Any]]:
    others = [_tape(slot) for slot in world.live() if _tape(slot) != key]
    return [
        ("ref", lambda: evolve(ref, generation=ref.generation + 1)),
        ("ref", lambda: evolve(ref, incarnation=ref.incarnation ^ 1)),
        *(("ref", partial(evolve, ref, slot=index)) for index in range(len(world.slots) + 1)),
        *(("key", other) for other in others[:2]),
        *_wrong_keys(world, key)[1:],
    ]


def _visit(transition: str) -> Callable[[World, Pick], Call | None]:
    def propose(world: World, pick: Pick) -> Call | None:
        tape = _any_tape(world, pick)
        if tape is None:
            return None
        key, ref = tape
        arguments: dict[str, Any] = {"key": key, "ref": ref}
        twists = _wrong_refs(world, key, ref)
        if transition in ("read", "finish_read"):
            arguments["gradient"] = bool(pick(2))
        if transition == "check_dgrad":
            arguments["token"] = None
            updates = world.domain(key.stage).updates
            twists += [("token", updates + 1), ("token", updates - 1)]
        if transition == "check_wgrad":
            arguments |= {"destination": None, "first": None}
            twists += [("destination", (_STRANGER,)), ("first", True), ("first", False)]
            twists.append(("key", lambda: evolve(key, microbatch=99)))
        if transition in ("check_dgrad", "check_wgrad", "read"):
            arguments["link"] = _link(world, key.stage, pick)
            twists += _links(world)
        return _twisted(Call(transition, arguments), twists, pick)

    return propose


def _ticketed(transition: str) -> Callable[[World, Pick], Call | None]:
    end, _, kind = transition.partition("_")
    action = {name: action for action, name in _NAMES.items()}[kind]

    def propose(world: World, pick: Pick) -> Call | None:
        """A ticket of another check, a spent or a forged one; or the right one, wrong evidence."""
        flights = [f.ticket for f in world.flights.values()]
        spent = [t for t in world.old_tickets if t.action == action]
        wrong: list[Ticket] = []
        for ticket in flights:
            if ticket.action != action:
                place = _any_stage(world, pick) if kind == "refresh" else pick(len(world.slots))
                place = place if "refresh" in (action, ticket.action) else ticket.slot
                wrong.append(evolve(ticket, action=action, slot=place))
                continue
            wrong.append(evolve(ticket, serial=ticket.serial + 1))
            wrong.append(evolve(ticket, incarnation=ticket.incarnation ^ 1))
            if action != "refresh":
                wrong.append(evolve(ticket, slot=(ticket.slot + 1) % len(world.slots)))
        tickets = spent[-3:] + wrong
        if kind == "refresh" and not world.uses("version"):
            return None
        mine = [t for t in flights if t.action == action]
        if end == "commit" and action in ("dI", "dW") and mine and pick(2):
            whole = _evidence(world, mine[0])
            partial = [
                ("evidence", whole[1:]),
                ("evidence", (*whole, "x")),
                ("evidence", whole * 2),
            ]
            call = Call(transition, {"ticket": mine[0], "evidence": ("x",)})
            return _twisted(call, partial, pick)
        if not tickets:
            return None
        ticket = tickets[pick(len(tickets))]
        arguments = {"ticket": ticket}
        return Call(
            transition,
            {**arguments, "evidence": _evidence(world, ticket)} if end == "commit" else arguments,
        )

    return propose


def _of_stage(transition: str) -> Callable[[World, Pick], Call | None]:
    def propose(world: World, pick: Pick) -> Call | None:
        if transition.endswith("_reduction") and not world.uses("reduction"):
            return None
        return Call(transition, {"stage": _any_stage(world, pick)})

    return propose


def _finalize(world: World, pick: Pick) -> Call:
    stage = _any_stage(world, pick)
    call = Call("finalize", {"stage": stage, "link": _link(world, stage, pick)})
    return _twisted(call, _links(world), pick)


def _of_link(transition: str) -> Callable[[World, Pick], Call]:
    return lambda world, pick: Call(transition, {"link": pick(len(world.links))})


def _restores(
    world: World, pick: Pick, checkpoints: Sequence[Checkpoint], incarnation: int
) -> Call:
    checkpoint = checkpoints[pick(len(checkpoints))]
    other = evolve(checkpoint, stages=(*checkpoint.stages, checkpoint.stages[0]))
    call = Call("restore", {"checkpoint": checkpoint, "incarnation": incarnation, "fresh": False})
    return _twisted(call, [("checkpoint", other), ("incarnation", world.incarnation)], pick)


_ATTEMPTS: dict[str, Callable[[World, Pick], Call | None]] = {
    "reserve": _reserve,
    "bind": _bind,
    "check_refresh": _refresh,
    "check_forward": _forward,
    "submit": lambda world, pick: Call(
        "submit", {"caller": world.process.callers[pick(len(world.process.callers))]}
    ),
    "drain": lambda world, pick: Call("drain"),
    "finalize": _finalize,
    "commit_epoch": lambda world, pick: Call(
        "commit_epoch", {"epoch": world.epoch + (pick(8) == 7)}
    ),
    "checkpoint": lambda world, pick: Call("checkpoint"),
    "purge": lambda world, pick: Call("purge", {"epoch": world.epoch}),
    **{name: _of_link(name) for name in ("join", "wait")},
    **{name: _visit(name) for name in TRANSITIONS if TRANSITIONS[name][:2] == ("key", "ref")},
    **{name: _ticketed(name) for name in TRANSITIONS if "ticket" in TRANSITIONS[name]},
    **{name: _of_stage(name) for name in TRANSITIONS if TRANSITIONS[name] == ("stage",)},
}
