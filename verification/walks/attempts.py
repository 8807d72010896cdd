"""
Calls that a random caller attempts although most of them are illegal: a call with at most one wrong
argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from attrs import evolve

from qeffect import Checkpoint, Destination, TapeKey, TapeRef, Ticket
from qeffect.engine.stage import TRANSITIONS

from ..calls import Call
from ..coverage import Target
from .oracle import broken, refusal
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
from .shadow import Shadow

__all__ = ["aimed", "attempt"]

#: Number of calls tried, number of refused calls made, and the distribution of choices.
_TRIALS = 32
_AT_ONCE = 6
_STRIDE = 0x9E3779B97F4A7C15
_TRANSFERS = ("post_receive", "finish_receive", "read", "finish_read")
_STRANGER = Destination("stranger", None, (1,), "bfloat16", "cuda:1", 64, 2)


def attempt(
    shadow: Shadow,
    pick: Pick,
    checkpoints: Sequence[Checkpoint],
    incarnation: int,
    transition: str,
) -> Call | None:
    """
    Return a legal or illegal call of a transition; None if the state has no tape, ticket or so on
    that the call needs.

    Args:
        shadow: The record of all calls so far.
        pick: Function that makes random choices.
        checkpoints: Checkpoints that were taken.
        incarnation: An unused incarnation, for a restore.
        transition: The transition to call.
    """
    if transition == "restore":
        return _restores(shadow, pick, checkpoints, incarnation)
    return _ATTEMPTS[transition](shadow, pick)


def aimed(
    shadow: Shadow,
    pick: Pick,
    checkpoints: Sequence[Checkpoint],
    incarnation: int,
    targets: Sequence[Target],
) -> list[Call]:
    """
    Return calls that some of the given guards refuse now; the list is empty if a few tries find no
    such call.

    If all calls were purely random, rare clauses would almost never refuse.

    Args:
        shadow: The record of all calls so far.
        pick: Function that makes random choices.
        checkpoints: Checkpoints that were taken.
        incarnation: An unused incarnation, for a restore.
        targets: Guards to reach, as (transition, clause).
    """
    found: dict[Target, Call] = {}
    wanted = frozenset(targets)
    seed = pick(1 << 32)
    for trial in range(_TRIALS):
        choose = chooser((seed + trial) * _STRIDE % (1 << 64))
        transition, _ = targets[choose(len(targets))]
        call = attempt(shadow, choose, checkpoints, incarnation, transition)
        if call is None:
            continue
        guard = refusal(shadow, call)
        if guard in wanted and guard not in found:
            found[guard] = call
            if len(found) == _AT_ONCE:
                break
    return list(found.values())


def _twisted(call: Call, twists: Sequence[tuple[str, Any]], pick: Pick) -> Call:
    """Return the call with at most one argument replaced by one of the given wrong values."""
    chosen = pick(len(twists) + 1)
    if chosen == 0:
        return call
    name, value = twists[chosen - 1]
    given = value() if callable(value) else value
    return Call(call.transition, {**call.arguments, name: given})


def _any_key(shadow: Shadow, pick: Pick) -> TapeKey:
    return TapeKey(shadow.epoch, *shadow.cells[pick(len(shadow.cells))])


def _wrong_keys(shadow: Shadow, key: TapeKey) -> list[tuple[str, Any]]:
    wrong = [("key", lambda: evolve(key, microbatch=99))]
    if shadow.uses("version"):
        wrong.append(("key", lambda: evolve(key, epoch=key.epoch + 1)))
        if key.epoch:
            wrong.append(("key", lambda: evolve(key, epoch=key.epoch - 1)))
    return wrong


def _slots(shadow: Shadow) -> list[tuple[str, Any]]:
    return [("slot", index) for index in range(len(shadow.slots) + 1)]


def _links(shadow: Shadow) -> list[tuple[str, Any]]:
    return [("link", index) for index in range(len(shadow.links))]


def _reserve(shadow: Shadow, pick: Pick) -> Call:
    key = _any_key(shadow, pick)
    link = a_link(shadow, key.stage, pick)
    call = Call("reserve", {"key": key, "slot": None, "link": link})
    return _twisted(call, [*_wrong_keys(shadow, key), *_slots(shadow), *_links(shadow)], pick)


def _skip(shadow: Shadow, pick: Pick) -> Call:
    key = _any_key(shadow, pick)
    return _twisted(Call("skip", {"key": key}), _wrong_keys(shadow, key), pick)


def _bind(shadow: Shadow, pick: Pick) -> Call:
    key = _any_key(shadow, pick)
    twists = [*_wrong_keys(shadow, key), ("destination", (_STRANGER,))]
    return _twisted(Call("bind", {"key": key, "destination": None}), twists, pick)


def _any_stage(shadow: Shadow, pick: Pick) -> int:
    return list(shadow.stages)[pick(len(shadow.stages))]


def _refresh(shadow: Shadow, pick: Pick) -> Call:
    stage = _any_stage(shadow, pick)
    call = Call("check_refresh", {"stage": stage, "link": a_link(shadow, stage, pick)})
    return _twisted(call, _links(shadow), pick)


def _evaluation(shadow: Shadow, pick: Pick) -> Call:
    stage = _any_stage(shadow, pick)
    given = {"stage": stage, "cached": bool(pick(2)), "link": a_link(shadow, stage, pick)}
    return _twisted(Call("check_evaluation", given), _links(shadow), pick)


def _forward(shadow: Shadow, pick: Pick) -> Call:
    key = _any_key(shadow, pick)
    stage, updates = shadow.stages[key.stage], shadow.domain(key.stage).updates
    stale = shadow.uses("version") and stage.cached != shadow.epoch
    free = shadow.free(key.stage)
    slot = free[0].index if free and shares_pool(shadow, key.stage) else None
    call = Call(
        "check_forward",
        {
            "key": key,
            "slot": slot,
            "token": None,
            "link": a_link(shadow, key.stage, pick),
            "refresh": stale,
        },
    )
    twists = [
        ("refresh", not stale),
        ("token", updates + 1),
        ("token", updates - 1),
        *_wrong_keys(shadow, key),
        *_slots(shadow),
        *_links(shadow),
    ]
    return _twisted(call, twists if shadow.uses("version") else twists[1:], pick)


def _anykey_of(shadow: Shadow, pick: Pick) -> tuple[TapeKey, TapeRef] | None:
    """Return the key (epoch, stage and microbatch) and the reference of a tape that is or was
    live."""
    live = [(key_of(slot), shadow.ref(slot)) for slot in shadow.live()]
    tapes = live + shadow.old_refs[-4:] if pick(4) == 3 else live or shadow.old_refs[-4:]
    return tapes[pick(len(tapes))] if tapes else None


def _wrong_refs(shadow: Shadow, key: TapeKey, ref: TapeRef) -> list[tuple[str, Any]]:
    others = [key_of(slot) for slot in shadow.live() if key_of(slot) != key]
    return [
        ("ref", lambda: evolve(ref, generation=ref.generation + 1)),
        ("ref", lambda: evolve(ref, incarnation=ref.incarnation ^ 1)),
        *(("ref", partial(evolve, ref, slot=index)) for index in range(len(shadow.slots) + 1)),
        *(("key", other) for other in others[:2]),
        *_wrong_keys(shadow, key)[1:],
    ]


def _visit(transition: str) -> Callable[[Shadow, Pick], Call | None]:
    def propose(shadow: Shadow, pick: Pick) -> Call | None:
        tape = _anykey_of(shadow, pick)
        if tape is None:
            return None
        key, ref = tape
        arguments: dict[str, Any] = {"key": key, "ref": ref}
        twists = _wrong_refs(shadow, key, ref)
        if transition in _TRANSFERS:
            arguments["gradient"] = bool(pick(2))
        if transition == "check_dgrad":
            arguments["token"] = None
            updates = shadow.domain(key.stage).updates
            twists += [("token", updates + 1), ("token", updates - 1)]
        if transition == "check_wgrad":
            arguments |= {"destination": None, "first": None, "first_of_tied": None}
            twists += [("destination", (_STRANGER,)), ("first", True), ("first", False)]
            twists += [("first_of_tied", True), ("first_of_tied", False)]
            twists.append(("key", lambda: evolve(key, microbatch=99)))
            others = [(key_of(slot), shadow.ref(slot)) for slot in shadow.live()]
            twists += [("group", (one,)) for one in others]
            twists += [("group", (one, one)) for one in others]
            twists.append(("group", ((evolve(key, microbatch=99), ref),)))
            twists.append(("group", ((key, evolve(ref, slot=len(shadow.slots))),)))
        if transition in ("check_dgrad", "check_wgrad", *_TRANSFERS):
            arguments["link"] = a_link(shadow, key.stage, pick)
            twists += _links(shadow)
        return _twisted(Call(transition, arguments), twists, pick)

    return propose


def _grouping(shadow: Shadow, pick: Pick) -> Call | None:
    """Propose that a dW in flight takes a tape (computes the gradient of a further microbatch) that
    it must not take."""
    tape = _anykey_of(shadow, pick)
    flights = [flight for flight in shadow.flights.values() if flight.slot is not None]
    if tape is None or not flights:
        return None
    key, ref = tape
    writing = [flight for flight in flights if flight.ticket.action == "dW"]
    flight = (writing or flights)[pick(len(writing or flights))]
    arguments = {
        "key": key,
        "ref": ref,
        "leader": flight.slot,
        "ticket": flight.ticket.serial,
        "link": a_link(shadow, key.stage, pick),
        "destination": None,
    }
    twists = [
        *_configured(shadow, _wrong_refs(shadow, key, ref)),
        *_links(shadow),
        ("destination", (_STRANGER,)),
        ("ticket", 0),
        ("ticket", flight.ticket.serial + 1),
        *(("leader", index) for index in range(len(shadow.slots))),
        *(("ticket", other.ticket.serial) for other in flights),
    ]
    call = Call("group_wgrad", arguments)
    return _if_wrong(shadow, _twisted(call, twists, pick) if pick(2) else call)


def _ungrouping(shadow: Shadow, pick: Pick) -> Call | None:
    """Propose that a tape leaves a group that it must not leave."""
    tape = _anykey_of(shadow, pick)
    if tape is None:
        return None
    key, ref = tape
    covered = shadow.configs[key.stage].matrices
    call = Call("ungroup_wgrad", {"key": key, "ref": ref, "covered": covered})
    wrong = _configured(shadow, _wrong_refs(shadow, key, ref))
    return _if_wrong(shadow, _twisted(call, [*wrong, ("covered", ("x",))], pick))


def _configured(shadow: Shadow, twists: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Leave out nonexistent slots, which only the public API refuses."""
    made = [(name, value() if callable(value) else value) for name, value in twists]
    return [one for one in made if one[0] != "ref" or one[1].slot < len(shadow.slots)]


def _if_wrong(shadow: Shadow, call: Call) -> Call | None:
    """Return the call if it is illegal, otherwise None: legal calls go through the public API."""
    return None if next(broken(shadow, call), None) is None else call


def _ticketed(transition: str) -> Callable[[Shadow, Pick], Call | None]:
    end, _, kind = transition.partition("_")
    action = ACTIONS[kind]

    def propose(shadow: Shadow, pick: Pick) -> Call | None:
        """Propose a used, forged or foreign ticket, or the right ticket with wrong evidence."""
        flights = shadow.tickets()
        spent = [t for t in shadow.old_tickets if t.action == action]
        wrong: list[Ticket] = []
        for ticket in flights:
            if ticket.action != action:
                stage = _any_stage(shadow, pick)
                places = {"refresh": stage, "evaluation": stage, "update": shadow.epoch}
                place = places.get(kind, pick(len(shadow.slots)))
                if not {*places} & {action, ticket.action}:
                    place = ticket.slot
                wrong.append(evolve(ticket, action=action, slot=place))
                continue
            wrong.append(evolve(ticket, serial=ticket.serial + 1))
            wrong.append(evolve(ticket, incarnation=ticket.incarnation ^ 1))
            if action == "update":
                wrong.append(evolve(ticket, slot=ticket.slot + 1))
            elif action not in ("refresh", "evaluation"):
                wrong.append(evolve(ticket, slot=(ticket.slot + 1) % len(shadow.slots)))
        tickets = spent[-3:] + wrong
        mine = [t for t in flights if t.action == action]
        if end == "commit" and action != "update" and mine and pick(2):
            whole, told = evidence(shadow, mine[0]), reports(shadow, mine[0])
            wrong_told = _wrong_reports(shadow, mine[0], told)
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
        if transition == "commit_update" and mine and shadow.gathered() and pick(2):
            return Call(transition, {"ticket": mine[0], "evidence": ()})
        if not tickets:
            return None
        ticket = tickets[pick(len(tickets))]
        if end == "abort":
            return Call(transition, {"ticket": ticket})
        return Call(transition, {"ticket": ticket, "evidence": evidence(shadow, ticket)})

    return propose


def _wrong_reports(shadow: Shadow, ticket: Ticket, told: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return wrong reports for an action in flight, if its stage is configured to report."""
    flight = shadow.flights[ticket.serial]
    config = shadow.configs[flight.stage]
    now = dict.fromkeys(config.matrices, shadow.epoch)
    wrong: list[tuple[str, Any]] = []
    if config.reports_fills and flight.filling:
        later = dict.fromkeys(now, shadow.epoch + 1)
        wrong += [("filled", None), ("filled", {**now, "x": shadow.epoch}), ("filled", later)]
        wrong.append(("filled", [*now.items(), *now.items()]))
    elif config.reports_fills and ticket.action in ("F", "evaluation"):
        wrong.append(("filled", now))
    if "updates" in told:
        wrong += [("updates", value) for value in (None, 1 - told["updates"], 2)]
    if "scales" in told:
        wrong += [("scales", value) for value in (None, told["scales"] + 1)]
    if "draws" in told and ticket.action == "F":
        earlier = shadow.domain(flight.stage).drawn
        wrong += [("draws", value) for value in (None, *([max(earlier)] if earlier else []))]
    elif "draws" in told:
        wrong += [("draws", value) for value in (None, told["draws"] + 1)]
    if "weight" in told:
        above, below = told["weight"]
        other = [(above, below + 1)] if shadow.stages[flight.stage].weights else []
        wrong += [("weight", value) for value in (None, *other)]
    return wrong


def _of_stage(transition: str) -> Callable[[Shadow, Pick], Call]:
    def propose(shadow: Shadow, pick: Pick) -> Call:
        return Call(transition, {"stage": _any_stage(shadow, pick)})

    return propose


def _of_bucket(transition: str) -> Callable[[Shadow, Pick], Call | None]:
    def propose(shadow: Shadow, pick: Pick) -> Call | None:
        buckets = [*shadow.reductions]
        if not buckets:
            return None
        bucket = buckets[pick(len(buckets))]
        if "link" not in TRANSITIONS[transition]:
            return Call(transition, {"bucket": bucket})
        link = a_link(shadow, shadow.reductions[bucket].stages[0], pick)
        if transition == "finish_reduction" and pick(2):
            link = reader_of(shadow, bucket)
        return _twisted(Call(transition, {"bucket": bucket, "link": link}), _links(shadow), pick)

    return propose


def _finalize(shadow: Shadow, pick: Pick) -> Call:
    stage = _any_stage(shadow, pick)
    call = Call("finalize", {"stage": stage, "link": a_link(shadow, stage, pick)})
    return _twisted(call, _links(shadow), pick)


def _movement(shadow: Shadow, pick: Pick) -> Call:
    stage = _any_stage(shadow, pick)
    told = 1 if shadow.configs[stage].reports_updates else None
    call = Call("move_scales", {"stage": stage, "updates": told})
    return _twisted(call, [("updates", value) for value in (None, 0, 2)], pick)


def _reader(transition: str) -> Callable[[Shadow, Pick], Call | None]:
    def propose(shadow: Shadow, pick: Pick) -> Call | None:
        if not shadow.uses("completion"):
            return None
        stage = _any_stage(shadow, pick)
        call = Call(transition, {"stage": stage, "link": a_link(shadow, stage, pick)})
        return _twisted(call, _links(shadow), pick)

    return propose


def _ofa_link(transition: str) -> Callable[[Shadow, Pick], Call]:
    return lambda shadow, pick: Call(transition, {"link": pick(len(shadow.links))})


def _restores(
    shadow: Shadow, pick: Pick, checkpoints: Sequence[Checkpoint], incarnation: int
) -> Call:
    checkpoint = checkpoints[pick(len(checkpoints))]
    saved = checkpoint.configuration
    another = evolve(saved, stages=(*saved.stages, saved.stages[0]))
    other = evolve(checkpoint, configuration=another)
    call = Call("restore", {"checkpoint": checkpoint, "incarnation": incarnation, "fresh": False})
    return _twisted(call, [("checkpoint", other), ("incarnation", shadow.incarnation)], pick)


_ATTEMPTS: dict[str, Callable[[Shadow, Pick], Call | None]] = {
    "reserve": _reserve,
    "skip": _skip,
    "bind": _bind,
    "check_refresh": _refresh,
    "check_forward": _forward,
    "check_evaluation": _evaluation,
    "submit": lambda shadow, pick: Call(
        "submit", {"caller": shadow.process.callers[pick(len(shadow.process.callers))]}
    ),
    "drain": lambda shadow, pick: Call("drain"),
    "finalize": _finalize,
    **{
        name: _reader(name)
        for name in (
            "start_weights_read",
            "finish_weights_read",
            "start_gradients_read",
            "finish_gradients_read",
        )
    },
    "next_walk": lambda shadow, pick: Call("next_walk", {"epoch": shadow.epoch + (pick(8) == 7)}),
    "check_update": lambda shadow, pick: Call(
        "check_update",
        {
            "epoch": shadow.epoch + (pick(8) == 7),
            "caller": shadow.process.callers[pick(len(shadow.process.callers))],
        },
    ),
    "move_scales": _movement,
    "fail": lambda shadow, pick: Call(
        "fail", {"stage": _any_stage(shadow, pick), "epoch": shadow.epoch + 1 + pick(2)}
    ),
    "checkpoint": lambda shadow, pick: Call("checkpoint"),
    "purge": lambda shadow, pick: Call("purge", {"epoch": shadow.epoch}),
    **{name: _ofa_link(name) for name in ("join", "wait")},
    **{name: _visit(name) for name in TRANSITIONS if TRANSITIONS[name][:2] == ("key", "ref")},
    **{name: _ticketed(name) for name in TRANSITIONS if "ticket" in TRANSITIONS[name]},
    **{name: _of_stage(name) for name in TRANSITIONS if TRANSITIONS[name] == ("stage",)},
    **{name: _of_bucket(name) for name in TRANSITIONS if TRANSITIONS[name][:1] == ("bucket",)},
    "group_wgrad": _grouping,
    "ungroup_wgrad": _ungrouping,
}
