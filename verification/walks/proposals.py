"""
The legal next calls among which a random caller chooses: calls that advance the epoch, supporting
calls, failures, and restarts.

``pick`` makes every choice as a number below a bound. Zero is always the simplest choice, so that a
failing schedule shrinks to a simple schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Any

from attrs import evolve

from qeffect import Checkpoint, TapeKey, Ticket

from ..calls import Call
from .entities import Slot
from .oracle import broken, seat, violations
from .shadow import Shadow

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
    "landed",
    "link_of",
    "prepared",
    "progress",
    "reader_of",
    "recover",
    "reports",
    "shares_pool",
    "support",
]

#: Walks of an epoch after which no further walk is proposed.
_WALKS = 1

#: A choice below a bound; zero is the simplest.
Pick = Callable[[int], int]
#: A generator of calls; each call is made before the next is drawn, and its result is sent in.
Plan = Generator[Call, Any, None]

#: By clause, the call that a caller can make first so that the clause does not refuse.
_REMEDIES: dict[str, Callable[[Shadow, Call], Call]] = {
    "completion.caller-to-graph": lambda shadow, call: Call("join", {"link": _link(call)}),
    "completion.graph-to-caller": lambda shadow, call: Call("wait", {"link": _link(call)}),
    "completion.slot-not-awaited": lambda shadow, call: Call("wait", {"link": _link(call)}),
    "completion.update-to-graph": lambda shadow, call: _join_update(shadow, call),
    "completion.transfer-to-graph": lambda shadow, call: _join_end(shadow, call),
    "completion.two-ends": lambda shadow, call: _join_end(shadow, call),
    "completion.weights-in-use": lambda shadow, call: _end_a_read(shadow, call.arguments["caller"]),
    "completion.gradients-in-use": lambda shadow, call: _end_gradients_read(shadow),
    "completion.evaluation-not-awaited": lambda shadow, call: _wait_evaluation(shadow),
    "arena.unbound": lambda shadow, call: Call(
        "bind", {"key": call.arguments["key"], "destination": None}
    ),
}


def _link(call: Call) -> Any:
    return call.arguments["link"]


def _join_end(shadow: Shadow, call: Call) -> Call:
    """Return a join of the graph stream with the latest transfer through the slot of a call."""
    given = call.arguments
    if "ref" in given:
        place: Slot | None = shadow.slots[given["ref"].slot]
    else:
        place, _ = seat(shadow, given["key"], given["slot"])
    assert place is not None
    return Call("join", {"link": place.ended[0]})


def _end_a_read(shadow: Shadow, caller: Hashable) -> Call:
    """Return a call that ends a read of weights on the stream of a caller."""
    stage = min(shadow.readers)
    link = link_of(shadow, stage, caller)
    return Call("finish_weights_read", {"stage": stage, "link": link})


def _end_gradients_read(shadow: Shadow) -> Call:
    """Return a call that ends a read of gradients on the stream that reads gradients."""
    stage = min(shadow.gradients_readers)
    return Call("finish_gradients_read", {"stage": stage, "link": _readers_link(shadow, stage)})


def _wait_evaluation(shadow: Shadow) -> Call:
    """Return a call by which the stream of the update waits for an evaluation."""
    links = enumerate(shadow.links)
    own = (i for i, link in links if link.caller == shadow.reader)
    late = (i for i in own if _before_evaluation(shadow, i))
    return Call("wait", {"link": next(late)})


def _before_evaluation(shadow: Shadow, index: int) -> bool:
    """Return whether a link's caller must still wait for the domain's latest evaluation."""
    link = shadow.links[index]
    return link.waited < shadow.domains[link.domain].evaluated


def _join_update(shadow: Shadow, call: Call) -> Call:
    """Return a join by which the graph stream of a call waits for the optimizer's update."""
    assert shadow.updated is not None
    given = call.arguments
    stage = given["key"].stage if "key" in given else given["stage"]
    return Call("join", {"link": link_of(shadow, stage, shadow.updated[0])})


def link_of(shadow: Shadow, stage: int, caller: Hashable) -> int:
    """Return the link of a caller to a stage's domain."""
    domain = shadow.domain_of(stage)
    links = enumerate(shadow.links)
    return next(i for i, link in links if (link.domain, link.caller) == (domain, caller))


def chooser(number: int) -> Pick:
    """
    Return a function that derives choices from a number; the number zero always chooses zero.

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


def a_link(shadow: Shadow, stage: int, pick: Pick = _first) -> int:
    """Return one of the links to a stage's domain."""
    domain = shadow.domain_of(stage)
    own = [index for index, link in enumerate(shadow.links) if link.domain == domain]
    return own[pick(len(own))]


def reader_of(shadow: Shadow, bucket: int | str) -> int:
    """
    Return the link of the stream that reads a bucket's gradients; any link if no stream reads them
    yet.
    """
    return _readers_link(shadow, shadow.reductions[bucket].stages[0])


def _readers_link(shadow: Shadow, stage: int) -> int:
    """Return the link of the stream that reads gradients; any link if no stream reads them yet."""
    return a_link(shadow, stage) if shadow.reader is None else link_of(shadow, stage, shadow.reader)


def evidence(shadow: Shadow, ticket: Ticket) -> tuple[str, ...]:
    """Return the complete evidence of an action."""
    if ticket.action in ("dI", "dW") and ticket.key is not None:
        return shadow.configs[ticket.key.stage].matrices
    return ()


def reports(shadow: Shadow, ticket: Ticket) -> dict[str, Any]:
    """Return what a successful action reports, if its backend reports."""
    flight = shadow.flights.get(ticket.serial)
    if flight is None:
        return {}
    config = shadow.configs[flight.stage]
    told: dict[str, Any] = {}
    if config.reports_fills and flight.filling:
        told["filled"] = dict.fromkeys(config.matrices, shadow.epoch)
    if config.reports_updates and ticket.action in ("F", "dI", "evaluation"):
        told["updates"] = int(ticket.action != "evaluation" and config.scales == "action")
    if config.tape_scales == "carried" and ticket.action == "dI" and flight.slot is not None:
        told["scales"] = shadow.slots[flight.slot].scaled_at
    if config.reports_draws and ticket.action == "F":
        told["draws"] = max(shadow.domain(flight.stage).drawn, default=-1) + 2
    if config.recomputes_draws and ticket.action == "dI" and flight.slot is not None:
        told["draws"] = shadow.slots[flight.slot].drawn_at
    if config.weights_sum is not None and ticket.action == "dI":
        told["weight"] = _weight(shadow, ticket, flight.stage)
    return told


def _weight(shadow: Shadow, ticket: Ticket, index: int) -> tuple[int, int]:
    """
    Return the gradient weight of a microbatch: one share, or all remaining shares for the last dI
    of a walk (a pass over the microbatches).

    Some dI get one part too many. If this happens to the last dI, the epoch's weights are wrong.
    """
    stage = shadow.stages[index]
    config = stage.config
    assert config.weights_sum is not None
    above, below = config.weights_sum
    cells = config.cells()
    parts = above * len(cells)  # of the sum of all weights
    left = parts - sum(given for given, _ in stage.weights)
    left_out = sum(cell[0] == index for cell in shadow.skipped)
    last = stage.dgrads + left_out == len(cells) - 1
    odd = ticket.serial % (4 if last else 13) == 0
    given = left if last else min(left, 1)
    share = len(cells) * below // (config.blocks * config.invocations)
    return max(given, 0) + odd, share


#: The name of each action in the transitions.
NAMES = {
    "F": "forward",
    "dI": "dgrad",
    "dW": "wgrad",
    "refresh": "refresh",
    "evaluation": "evaluation",
    "update": "update",
}
#: The action of each such name.
ACTIONS = {name: action for action, name in NAMES.items()}


def committed(shadow: Shadow, ticket: Ticket) -> Call:
    """Return the commit of a successful action."""
    name = f"commit_{NAMES[ticket.action]}"
    whole = evidence(shadow, ticket)
    return Call(name, {"ticket": ticket, "evidence": whole, **reports(shadow, ticket)})


def landing(shadow: Shadow, ticket: Ticket) -> Call:
    """Return the next call to end a successful action: its commit, or a call needed before it."""
    gathered = shadow.gathered() if ticket.action == "update" else []
    if not gathered:
        return committed(shadow, ticket)
    told = {"updates": 1} if gathered[0].reports_updates else {}
    return Call("move_scales", {"stage": gathered[0].stage, **told})


def landed(shadow: Shadow, ticket: Ticket) -> Plan:
    """Yield the calls that end a successful action."""
    while (call := landing(shadow, ticket)).transition == "move_scales":
        yield call
    yield call


def _abort(ticket: Ticket) -> Call:
    return Call(f"abort_{NAMES[ticket.action]}", {"ticket": ticket})


def shares_pool(shadow: Shadow, stage: int) -> bool:
    """Return whether a stage's slots share capture memory, so that the choice of slot matters."""
    return shadow.configs[stage].pool is not None


def key_of(slot: Slot) -> TapeKey:
    """Return the key (epoch, stage and microbatch) of the tape in a slot."""
    assert slot.tape is not None
    return slot.tape.key


# Progress: the calls that bring an epoch to its end


def _forwards(shadow: Shadow) -> Iterator[Call]:
    for stage, it in shadow.stages.items():
        keys = [
            TapeKey(shadow.epoch, *cell)
            for cell in it.config.cells()
            if shadow.forwarded.get(cell) != shadow.epoch and cell not in shadow.skipped
        ]
        for key in keys[:2]:
            reserves = it.config.receives_input or it.config.copies_input
            if reserves and shadow.slot_of(key.cell) is None:
                link = a_link(shadow, stage)
                yield Call("reserve", {"key": key, "slot": None, "link": link})
            apart = shadow.slot_of(key.cell) is not None or not shares_pool(shadow, stage)
            for slot in [None] if apart else [free.index for free in shadow.free(stage)]:
                yield Call(
                    "check_forward",
                    {
                        "key": key,
                        "slot": slot,
                        "token": None,
                        "link": a_link(shadow, stage),
                        "refresh": shadow.uses("version") and it.cached != shadow.epoch,
                    },
                )


def _visits(shadow: Shadow) -> Iterator[Call]:
    for slot in shadow.live():
        key, ref = key_of(slot), shadow.ref(slot)
        tape = {"key": key, "ref": ref}
        link = a_link(shadow, key.stage)
        yield Call("check_dgrad", {**tape, "token": None, "link": link})
        writes = {"destination": None, "first": None, "first_of_tied": None}
        yield Call("check_wgrad", {**tape, **writes, "link": link})
        for gradient in (False, True):
            for name in ("read", "finish_read", "post_receive", "finish_receive"):
                yield Call(name, {**tape, "gradient": gradient, "link": link})
    for slot in shadow.slots:
        if slot.tape is None and slot.moving and slot.mover is not None:
            key, generation = slot.mover
            ref = evolve(shadow.ref(slot), generation=generation)
            link = a_link(shadow, key.stage)
            for what in sorted(slot.moving - {"group"}):
                name = "finish_receive" if what in ("in", "back") else "finish_read"
                gradient = what in ("back", "grad")
                yield Call(name, {"key": key, "ref": ref, "gradient": gradient, "link": link})


def _closings(shadow: Shadow) -> Iterator[Call]:
    for stage in shadow.stages:
        yield Call("finalize", {"stage": stage, "link": _readers_link(shadow, stage)})
    for bucket, it in shadow.reductions.items():
        link = a_link(shadow, it.stages[0])
        if not it.done:
            yield Call("start_reduction", {"bucket": bucket, "link": link})
        yield Call("finish_reduction", {"bucket": bucket, "link": reader_of(shadow, bucket)})
    updater = shadow.process.callers[0] if shadow.reader is None else shadow.reader
    yield Call("check_update", {"epoch": shadow.epoch, "caller": updater})
    if shadow.walks < _WALKS:
        yield Call("next_walk", {"epoch": shadow.epoch})


def _possible(shadow: Shadow, call: Call) -> bool:
    """Return whether a call is legal, or becomes legal after waits and binds."""
    for clause in broken(shadow, call):
        remedy = _REMEDIES.get(clause)
        if remedy is None:
            return False
        if clause == "arena.unbound" and violations(shadow, remedy(shadow, call)):
            return False
    return True


def progress(shadow: Shadow, pick: Pick) -> Plan | None:
    """Return a plan that advances the epoch, or None if no legal call does."""
    calls = [
        call
        for source in (_forwards, _visits, _closings)
        for call in source(shadow)
        if _possible(shadow, call)
    ]
    landings = [landing(shadow, ticket) for ticket in shadow.tickets()]
    choices = landings + calls
    if not choices:
        return None
    choice = choices[pick(len(choices))]
    for _ in range(2):
        if choice.transition == "finish_read" or _may_take_more(shadow, choice):
            choice = choices[pick(len(choices))]  # a late reader outlives its stage's last dW
    return _carry_out(shadow, _spelled_out(shadow, choice, pick), pick)


def _spelled_out(shadow: Shadow, call: Call, pick: Pick) -> Call:
    """Return the same call, with some optional arguments given explicitly at random."""
    given = dict(call.arguments)
    if "link" in given:
        given["link"] = _another_link(shadow, call, pick)
    if "token" in given and pick(2):
        given["token"] = shadow.domain(given["key"].stage).updates
    if call.transition == "check_forward" and given["slot"] is None and pick(4) == 3:
        key = given["key"]
        free = shadow.free(key.stage)
        own = shadow.slot_of(key.cell)
        given["slot"] = free[pick(len(free))].index if own is None else own.index
    if "first" in given and pick(4) == 3:
        buffer, shared = shadow.buffers(given["key"].cell)
        given["first"] = buffer not in shadow.written
        if pick(2):
            given["first_of_tied"] = shared not in shadow.written
    return _grouped(shadow, Call(call.transition, given), pick)


def _may_take_more(shadow: Shadow, call: Call) -> bool:
    """Return whether a call is a dW that could take more tapes if it came later."""
    if call.transition != "check_wgrad":
        return False
    return shadow.configs[call.arguments["key"].stage].scales == "epoch"


def _grouped(shadow: Shadow, call: Call, pick: Pick) -> Call:
    """Let a dW also take other tapes (compute the gradients of other microbatches) that fit in its
    product; return other calls unchanged."""
    if call.transition != "check_wgrad":
        return call
    for slot in shadow.live():
        group = (*call.arguments.get("group", ()), (key_of(slot), shadow.ref(slot)))
        larger = Call(call.transition, {**call.arguments, "group": group})
        if _possible(shadow, larger) and pick(2):
            call = larger
    return call


def _another_link(shadow: Shadow, call: Call, pick: Pick) -> int:
    """Return a link for the call: that of the gradients' reader if known, else a random one."""
    given = call.arguments
    if "bucket" in given:
        stages = shadow.reductions[given["bucket"]].stages
    else:
        stages = (given["key"].stage if "key" in given else given["stage"],)
    if call.transition in ("finalize", "finish_reduction") and shadow.reader is not None:
        return link_of(shadow, stages[0], shadow.reader)
    return a_link(shadow, stages[0], pick)


def _carry_out(shadow: Shadow, call: Call, pick: Pick) -> Plan:
    if call.arguments.get("refresh") and pick(2):
        stage, link = call.arguments["key"].stage, call.arguments["link"]
        refresh = Call("check_refresh", {"stage": stage, "link": link})
        if _possible(shadow, refresh):
            yield from prepared(shadow, refresh)
            ticket = yield refresh
            if pick(4) == 3:
                return
            yield committed(shadow, ticket)
            call.arguments["refresh"] = False
    yield from prepared(shadow, call)
    ticket = yield call
    if call.transition == "start_reduction":
        left = pick(8)
        if left % 2:
            yield Call("drain")
        if left == 7:
            yield Call("fail_reduction", {"bucket": call.arguments["bucket"]})
    if call.transition.startswith("check_"):
        left = pick(64)
        if left == 63:
            yield _abort(ticket)
        elif left < (32 if call.transition == "check_wgrad" else 48):
            yield from landed(shadow, ticket)
        elif left > 54 and _may_take_more(shadow, call):
            stage, epoch = call.arguments["key"].stage, max(shadow.epoch - left % 2, 0)
            yield Call("fail", {"stage": stage, "epoch": epoch})


def prepared(shadow: Shadow, call: Call) -> Plan:
    """Yield the calls, such as waits and binds, that must come before a call to make it legal."""
    while wrong := [clause for clause in violations(shadow, call) if clause in _REMEDIES]:
        yield _REMEDIES[wrong[0]](shadow, call)


# Support: legal calls beside the actions


def support(shadow: Shadow, pick: Pick) -> Plan | None:
    """Return a plan of legal calls, such as reads, that neither complete nor spoil work."""
    calls = [
        *(Call("submit", {"caller": caller}) for caller in shadow.process.callers),
        *(
            Call(name, {"link": link})
            for name in ("join", "wait")
            for link in range(len(shadow.links))
        ),
        Call("drain"),
        Call("checkpoint"),
        *_weights_reads(shadow, pick),
        *_gradients_reads(shadow),
        *_evaluations(shadow),
        *_reservations(shadow),
        *_skips(shadow),
        *_binds(shadow),
        *_reads(shadow),
    ]
    legal = [call for call in calls if next(broken(shadow, call), None) is None]
    if not legal:
        return None
    chosen = legal[pick(len(legal))]
    return _evaluated(shadow, chosen, pick) if "cached" in chosen.arguments else _one(chosen)


def _evaluations(shadow: Shadow) -> Iterator[Call]:
    for stage in shadow.stages:
        for cached in (False, True):
            given = {"stage": stage, "cached": cached, "link": a_link(shadow, stage)}
            yield Call("check_evaluation", given)


def _evaluated(shadow: Shadow, call: Call, pick: Pick) -> Plan:
    """Run an evaluation; most evaluations end before the next call."""
    ticket = yield call
    if pick(4):
        yield committed(shadow, ticket)


def _weights_reads(shadow: Shadow, pick: Pick) -> Iterator[Call]:
    if not shadow.uses("completion"):
        return  # without completion, no reads are counted
    for stage in shadow.stages:
        link = a_link(shadow, stage, pick)
        yield Call("start_weights_read", {"stage": stage, "link": link})
        link = _readers_link(shadow, stage)
        yield Call("finish_weights_read", {"stage": stage, "link": link})


def _gradients_reads(shadow: Shadow) -> Iterator[Call]:
    if not shadow.uses("completion"):
        return  # without completion, no reads are counted
    for stage in shadow.stages:
        given = {"stage": stage, "link": _readers_link(shadow, stage)}
        yield Call("start_gradients_read", given)
        yield Call("finish_gradients_read", given)


def _skips(shadow: Shadow) -> Iterator[Call]:
    """Yield calls that leave the last microbatch of a stage out of a walk (a pass over the
    microbatches) that has not begun."""
    if not shadow.forwarded:
        for it in shadow.stages.values():
            cells = [cell for cell in it.config.cells() if cell not in shadow.skipped]
            yield Call("skip", {"key": TapeKey(shadow.epoch, *cells[-1])})


def _reservations(shadow: Shadow) -> Iterator[Call]:
    for it in shadow.stages.values():
        for cell in it.config.cells():
            if shadow.forwarded.get(cell) != shadow.epoch and cell not in shadow.skipped:
                key, link = TapeKey(shadow.epoch, *cell), a_link(shadow, cell[0])
                yield Call("reserve", {"key": key, "slot": None, "link": link})
                break


def _binds(shadow: Shadow) -> Iterator[Call]:
    # Cells of live tapes come first, so that dI is not blocked for long.
    for cell in sorted(shadow.cells, key=lambda cell: shadow.slot_of(cell) is None):
        if cell not in shadow.bound:
            yield Call("bind", {"key": TapeKey(shadow.epoch, *cell), "destination": None})
            return


def _reads(shadow: Shadow) -> Iterator[Call]:
    for slot in shadow.live():
        key = key_of(slot)
        for gradient in (False, True):
            yield Call(
                "read",
                {
                    "key": key,
                    "ref": shadow.ref(slot),
                    "gradient": gradient,
                    "link": a_link(shadow, key.stage),
                },
            )


def _one(call: Call) -> Plan:
    yield call


# Damage: failures that are legal, and what a process does afterwards


def damage(shadow: Shadow, pick: Pick) -> Plan | None:
    """Return a plan in which something fails."""
    calls = [
        *(_abort(ticket) for ticket in shadow.tickets()),
        *(Call("drop", {"key": key_of(slot), "ref": shadow.ref(slot)}) for slot in shadow.live()),
        *(Call("fail_reduction", {"bucket": bucket}) for bucket in shadow.reductions),
        Call("purge", {"epoch": shadow.epoch}),
        *(
            Call("fail", {"stage": stage, "epoch": epoch})
            for stage in shadow.stages
            for epoch in range(max(shadow.epoch - 1, 0), shadow.epoch + 1)
        ),
        *(Call("invalidate", {"stage": stage}) for stage in shadow.stages),
    ]
    legal = [call for call in calls if next(broken(shadow, call), None) is None]
    return _one(legal[pick(len(legal))]) if legal else None


def recover(
    shadow: Shadow, pick: Pick, checkpoints: Sequence[Checkpoint], incarnation: int
) -> Plan:
    """Yield the calls of a restart: end everything in flight, then restore a checkpoint."""
    fresh = bool(pick(2))
    checkpoint = checkpoints[pick(len(checkpoints))]
    if not fresh:
        for ticket in shadow.tickets():
            if pick(2):
                yield _abort(ticket)
            else:
                yield from landed(shadow, ticket)
        for bucket, it in shadow.reductions.items():
            if it.running:
                yield Call("fail_reduction", {"bucket": bucket})
        yield Call("drain")
    yield Call("restore", {"checkpoint": checkpoint, "incarnation": incarnation, "fresh": fresh})
