"""
What a random caller attempts: any call at all, most of them with one thing wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from attrs import evolve

from qeffect import Checkpoint, Destination, TapeKey, TapeRef, Ticket
from qeffect.engine.stage import TRANSITIONS

from ..targets import Target
from .oracle import broken
from .proposals import (
    ACTIONS,
    Pick,
    a_link,
    chooser,
    evidence,
    key_of,
    reader_of,
    reports,
    shares_pool,
)
from .world import Call, World

__all__ = ["aimed", "attempt"]

#: How many calls are tried, how many that are refused are made, and how choices are spread.
_TRIALS = 32
_AT_ONCE = 6
_STRIDE = 0x9E3779B97F4A7C15
_TRANSFERS = ("post_receive", "finish_receive", "read", "finish_read")
_STRANGER = Destination("stranger", None, (1,), "bfloat16", "cuda:1", 64, 2)


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
    targets: Sequence[Target],
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
    found: dict[Target, Call] = {}
    wanted = frozenset(targets)
    seed = pick(1 << 32)
    for trial in range(_TRIALS):
        choose = chooser((seed + trial) * _STRIDE % (1 << 64))
        transition, _ = targets[choose(len(targets))]
        call = attempt(world, choose, checkpoints, incarnation, transition)
        if call is None:
            continue
        guard = (transition, next(broken(world, call), ""))
        if guard in wanted and guard not in found:
            found[guard] = call
            if len(found) == _AT_ONCE:
                break
    return list(found.values())


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
    link = a_link(world, key.stage, pick)
    call = Call("reserve", {"key": key, "slot": None, "link": link})
    return _twisted(call, [*_wrong_keys(world, key), *_slots(world), *_links(world)], pick)


def _bind(world: World, pick: Pick) -> Call:
    key = _any_key(world, pick)
    twists = [*_wrong_keys(world, key), ("destination", (_STRANGER,))]
    return _twisted(Call("bind", {"key": key, "destination": None}), twists, pick)


def _any_stage(world: World, pick: Pick) -> int:
    return list(world.stages)[pick(len(world.stages))]


def _refresh(world: World, pick: Pick) -> Call:
    stage = _any_stage(world, pick)
    call = Call("check_refresh", {"stage": stage, "link": a_link(world, stage, pick)})
    return _twisted(call, _links(world), pick)


def _forward(world: World, pick: Pick) -> Call:
    key = _any_key(world, pick)
    stage, updates = world.stages[key.stage], world.domain(key.stage).updates
    stale = world.uses("version") and stage.cached != world.epoch
    free = world.free(key.stage)
    slot = free[0].index if free and shares_pool(world, key.stage) else None
    call = Call(
        "check_forward",
        {
            "key": key,
            "slot": slot,
            "token": None,
            "link": a_link(world, key.stage, pick),
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


def _anykey_of(world: World, pick: Pick) -> tuple[TapeKey, TapeRef] | None:
    """A tape that is live, or was."""
    live = [(key_of(slot), world.ref(slot)) for slot in world.live()]
    tapes = live + world.old_refs[-4:] if pick(4) == 3 else live or world.old_refs[-4:]
    return tapes[pick(len(tapes))] if tapes else None


def _wrong_refs(world: World, key: TapeKey, ref: TapeRef) -> list[tuple[str, Any]]:
    others = [key_of(slot) for slot in world.live() if key_of(slot) != key]
    return [
        ("ref", lambda: evolve(ref, generation=ref.generation + 1)),
        ("ref", lambda: evolve(ref, incarnation=ref.incarnation ^ 1)),
        *(("ref", partial(evolve, ref, slot=index)) for index in range(len(world.slots) + 1)),
        *(("key", other) for other in others[:2]),
        *_wrong_keys(world, key)[1:],
    ]


def _visit(transition: str) -> Callable[[World, Pick], Call | None]:
    def propose(world: World, pick: Pick) -> Call | None:
        tape = _anykey_of(world, pick)
        if tape is None:
            return None
        key, ref = tape
        arguments: dict[str, Any] = {"key": key, "ref": ref}
        twists = _wrong_refs(world, key, ref)
        if transition in _TRANSFERS:
            arguments["gradient"] = bool(pick(2))
        if transition == "check_dgrad":
            arguments["token"] = None
            updates = world.domain(key.stage).updates
            twists += [("token", updates + 1), ("token", updates - 1)]
        if transition == "check_wgrad":
            arguments |= {"destination": None, "first": None, "first_of_tied": None}
            twists += [("destination", (_STRANGER,)), ("first", True), ("first", False)]
            twists += [("first_of_tied", True), ("first_of_tied", False)]
            twists.append(("key", lambda: evolve(key, microbatch=99)))
        if transition in ("check_dgrad", "check_wgrad", *_TRANSFERS):
            arguments["link"] = a_link(world, key.stage, pick)
            twists += _links(world)
        return _twisted(Call(transition, arguments), twists, pick)

    return propose


def _ticketed(transition: str) -> Callable[[World, Pick], Call | None]:
    end, _, kind = transition.partition("_")
    action = ACTIONS[kind]

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
        mine = [t for t in flights if t.action == action]
        if end == "commit" and mine and pick(2):
            whole, told = evidence(world, mine[0]), reports(world, mine[0])
            wrong_told = _wrong_reports(world, mine[0], told)
            right = Call(transition, {"ticket": mine[0], "evidence": whole, **told})
            if wrong_told and (pick(2) or action not in ("dI", "dW")):
                name, value = wrong_told[pick(len(wrong_told))]
                return Call(transition, {**right.arguments, name: value})
            if action in ("dI", "dW"):
                partial = [
                    ("evidence", whole[1:]),
                    ("evidence", (*whole, "x")),
                    ("evidence", whole * 2),
                ]
                call = Call(transition, {**right.arguments, "evidence": ("x",)})
                return _twisted(call, partial, pick)
        if not tickets:
            return None
        ticket = tickets[pick(len(tickets))]
        if end == "abort":
            return Call(transition, {"ticket": ticket})
        return Call(transition, {"ticket": ticket, "evidence": evidence(world, ticket)})

    return propose


def _wrong_reports(world: World, ticket: Ticket, told: dict[str, Any]) -> list[tuple[str, Any]]:
    """What an action in flight must not report, where its backend reports."""
    flight = world.flights[ticket.serial]
    config = world.configs[flight.stage]
    now = dict.fromkeys(config.matrices, world.epoch)
    wrong: list[tuple[str, Any]] = []
    if config.reports_fills and flight.filling:
        later = dict.fromkeys(now, world.epoch + 1)
        wrong += [("filled", None), ("filled", {**now, "x": world.epoch}), ("filled", later)]
        wrong.append(("filled", [*now.items(), *now.items()]))
    elif config.reports_fills and ticket.action == "F":
        wrong.append(("filled", now))
    if "updates" in told:
        wrong += [("updates", value) for value in (None, 0, 2)]
    if "scales" in told:
        wrong += [("scales", value) for value in (None, told["scales"] + 1)]
    return wrong


def _of_stage(transition: str) -> Callable[[World, Pick], Call]:
    def propose(world: World, pick: Pick) -> Call:
        return Call(transition, {"stage": _any_stage(world, pick)})

    return propose


def _of_bucket(transition: str) -> Callable[[World, Pick], Call | None]:
    def propose(world: World, pick: Pick) -> Call | None:
        buckets = [*world.reductions]
        if not buckets:
            return None
        bucket = buckets[pick(len(buckets))]
        if "link" not in TRANSITIONS[transition]:
            return Call(transition, {"bucket": bucket})
        link = a_link(world, world.reductions[bucket].stages[0], pick)
        if transition == "finish_reduction" and pick(2):
            link = reader_of(world, bucket)
        return _twisted(Call(transition, {"bucket": bucket, "link": link}), _links(world), pick)

    return propose


def _finalize(world: World, pick: Pick) -> Call:
    stage = _any_stage(world, pick)
    call = Call("finalize", {"stage": stage, "link": a_link(world, stage, pick)})
    return _twisted(call, _links(world), pick)


def _ofa_link(transition: str) -> Callable[[World, Pick], Call]:
    return lambda world, pick: Call(transition, {"link": pick(len(world.links))})


def _restores(
    world: World, pick: Pick, checkpoints: Sequence[Checkpoint], incarnation: int
) -> Call:
    checkpoint = checkpoints[pick(len(checkpoints))]
    saved = checkpoint.configuration
    another = evolve(saved, stages=(*saved.stages, saved.stages[0]))
    other = evolve(checkpoint, configuration=another)
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
        "commit_epoch",
        {
            "epoch": world.epoch + (pick(8) == 7),
            "caller": world.process.callers[pick(len(world.process.callers))],
        },
    ),
    "checkpoint": lambda world, pick: Call("checkpoint"),
    "purge": lambda world, pick: Call("purge", {"epoch": world.epoch}),
    **{name: _ofa_link(name) for name in ("join", "wait")},
    **{name: _visit(name) for name in TRANSITIONS if TRANSITIONS[name][:2] == ("key", "ref")},
    **{name: _ticketed(name) for name in TRANSITIONS if "ticket" in TRANSITIONS[name]},
    **{name: _of_stage(name) for name in TRANSITIONS if TRANSITIONS[name] == ("stage",)},
    **{name: _of_bucket(name) for name in TRANSITIONS if TRANSITIONS[name][:1] == ("bucket",)},
}
