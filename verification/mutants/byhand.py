"""
Legal schedules written by hand, for situations that random schedules rarely reach.

Before each call, the oracle of the random walks checks that the call is legal.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, Final

from qeffect.engine.stage import TRANSITIONS
from qeffect.keys import TapeKey, TapeRef
from qeffect.stage_config import StageConfig
from qeffect.tickets import Ticket

from ..calls import Action, Call
from ..process import Process
from ..walks.oracle import violations
from ..walks.proposals import Plan, committed, landed, prepared
from ..walks.schedules import Schedule, ScheduleWalk
from ..walks.shadow import Shadow

__all__ = ["by_hand", "telling"]

#: Reports of a commit about effects that a backend may or may not report, with random values.
_NOISE: Final = {
    "filled": ("another",),
    "fill_epoch": 7,
    "updates": 9,
    "scales": 7,
    "draws": 7,
    "weight": 7,
    "parts": 9,
}
#: The flag of a stage that enables each of these reports.
_REPORTED: Final = {
    "filled": "reports_fills",
    "fill_epoch": "reports_fills",
    "updates": "reports_updates",
    "scales": "carried_scales",
    "weight": "reports_weights",
    "parts": "reports_weights",
}


def by_hand(process: Process) -> Iterator[Schedule]:
    """
    Yield the hand-written schedules that fit a process's configuration.

    Args:
        process: The configuration of the process.

    Raises:
        AssertionError: A call is not legal; the message has the oracle's findings.
    """
    for config in process.stages:
        own = _links(Shadow(process, incarnation=1), config.stage)
        if "version" not in process.omit:
            yield _made(process, partial(_refreshed_anew, stage=config.stage))
            yield _made(process, partial(_refresh_failed, stage=config.stage))
        fed = config.receives_input or config.copies_input
        if config.sends_output and len(own) > 1 and not fed:
            yield _made(process, partial(_read_elsewhere, stage=config.stage))
        if _passes_on(config) and len(own) > 1 and config.microbatches > 1:
            yield _made(process, partial(_ended_elsewhere, stage=config.stage))
        if config.copies_input and config.sends_output and config.microbatches > 1:
            yield _made(process, partial(_copied, stage=config.stage))
        if config.feeds is not None and config.receives_gradient:
            for plan in (
                _message_after_message,
                _message_before_wgrad,
                _messages_of_lost_tapes,
                _source_lost,
            ):
                yield _made(process, partial(plan, stage=config.stage))
        elif config.feeds is not None:
            yield _made(process, partial(_target_reused, stage=config.stage))
        if _groups(process, config):
            for plan in (_one_product, _one_product_spoiled, _one_product_failed):
                yield _made(process, partial(plan, stage=config.stage))
    shared = any(len(it.stages) > 1 for it in Shadow(process, incarnation=1).reductions.values())
    if shared or any(config.tied for config in process.stages):
        yield _made(process, _reduced_together)
    if len(process.callers) > 1 and process.reductions and "completion" not in process.omit:
        yield _made(process, _weights_read_by_another)
        yield _made(process, _weights_read_after_restore)
        yield _made(process, _evaluation_awaited_by_another)


def _made(process: Process, plan: Callable[[Shadow], Plan]) -> Schedule:
    walk = ScheduleWalk(process)
    walk.run(_judged(walk.shadow, plan(walk.shadow)))
    return walk.schedule


def _judged(shadow: Shadow, plan: Plan) -> Plan:
    """
    Make the calls of a plan. Before each call, make the calls that it needs to be legal; raise an
    error if the call is illegal even then.
    """
    result = None
    while True:
        try:
            call = plan.send(result)
        except StopIteration:
            return
        yield from prepared(shadow, call)
        wrong = violations(shadow, call)
        if wrong:
            raise AssertionError(f"expected a legal call, but {call} breaks {', '.join(wrong)}")
        result = yield call


def _links(shadow: Shadow, stage: int) -> list[int]:
    domain = shadow.domain_of(stage)
    return [index for index, link in enumerate(shadow.links) if link.domain == domain]


def _refreshed_anew(shadow: Shadow, stage: int) -> Plan:
    """A cache that is invalidated before its first forward is refreshed once more."""
    link = _links(shadow, stage)[0]
    refresh = Call("check_refresh", {"stage": stage, "link": link})
    yield committed(shadow, (yield refresh))
    yield Call("invalidate", {"stage": stage})
    yield committed(shadow, (yield refresh))


def _refresh_failed(shadow: Shadow, stage: int) -> Plan:
    """A refresh fails and leaves its cache half filled."""
    link = _links(shadow, stage)[0]
    ticket = yield Call("check_refresh", {"stage": stage, "link": link})
    yield Call("abort_refresh", {"ticket": ticket})


def _read_elsewhere(shadow: Shadow, stage: int) -> Plan:
    """An output is read on one link; dI comes on another link and need not wait for the read."""
    key = TapeKey(shadow.epoch, *shadow.configs[stage].cells()[0])
    ours, theirs = _links(shadow, stage)[:2]
    refresh = shadow.uses("version")
    forward = {"key": key, "slot": None, "token": None, "link": ours, "refresh": refresh}
    ticket = yield Call("check_forward", forward)
    ref = yield committed(shadow, ticket)
    read = {"key": key, "ref": ref, "gradient": False, "link": theirs}
    yield Call("read", read)
    yield Call("finish_read", read)
    dgrad = {"key": key, "ref": ref, "token": None, "link": ours}
    yield committed(shadow, (yield Call("check_dgrad", dgrad)))


def _passes_on(config: StageConfig) -> bool:
    """Return whether a stage is between two others, so that each microbatch has all four messages:
    input, output and their gradients."""
    sends = config.sends_output and config.sends_gradient
    return sends and config.receives_input and config.receives_gradient


def _ended_elsewhere(shadow: Shadow, stage: int) -> Plan:
    """
    Transfers through a slot end on one link; an action, or the end of another transfer, is on
    another link.

    For the first tape, the read of the output ends before the receive of the gradient; for the
    second tape, after it.
    """
    ours, theirs = _links(shadow, stage)[:2]
    for number, cell in enumerate(shadow.configs[stage].cells()[:2]):
        key = TapeKey(shadow.epoch, *cell)
        ref = yield Call("reserve", {"key": key, "slot": None, "link": theirs})
        given = {"key": key, "ref": ref, "gradient": False}
        yield Call("post_receive", {**given, "link": theirs})
        yield Call("finish_receive", {**given, "link": theirs})
        yield from _forward(shadow, key, ours)
        gradient = {**given, "gradient": True}
        yield Call("post_receive", {**gradient, "link": theirs})
        yield Call("read", {**given, "link": theirs})
        received = Call("finish_receive", {**gradient, "link": theirs})
        if number == 0:
            yield Call("finish_read", {**given, "link": theirs})
            yield received
        else:
            yield received
            yield Call("finish_read", {**given, "link": ours})
        yield Call("bind", {"key": key, "destination": None})
        yield Call("wait", {"link": ours})
        yield from _backward(shadow, key, ref, ours)
        yield Call("read", {**gradient, "link": ours})
        yield Call("finish_read", {**gradient, "link": ours})


def _copied(shadow: Shadow, stage: int) -> Plan:
    """
    Inputs are copied into one slot first on one link, then on the link where the last read ended.

    Since the second copy is enqueued on the stream where the read ended, no wait is needed between
    them.
    """
    ours, theirs = (_links(shadow, stage) * 2)[:2]
    for cell, link in zip(shadow.configs[stage].cells()[:2], (theirs, ours), strict=True):
        key = TapeKey(shadow.epoch, *cell)
        ref = yield Call("reserve", {"key": key, "slot": None, "link": link})
        yield from _forward(shadow, key, ours)
        read = {"key": key, "ref": ref, "gradient": False, "link": ours}
        yield Call("read", read)
        yield Call("bind", {"key": key, "destination": None})
        yield from _backward(shadow, key, ref, ours)
        yield Call("finish_read", read)


def _keys(shadow: Shadow, stage: int) -> list[TapeKey]:
    return [TapeKey(shadow.epoch, *cell) for cell in shadow.configs[stage].cells()]


def _received(shadow: Shadow, key: TapeKey, ref: TapeRef, *, gradient: bool = False) -> Plan:
    """End a receive; first post it, if it is not posted yet."""
    link = _links(shadow, key.stage)[0]
    given = {"key": key, "ref": ref, "gradient": gradient, "link": link}
    if ("back" if gradient else "in") not in shadow.slots[ref.slot].moving:
        yield Call("post_receive", given)
    yield Call("finish_receive", given)


def _taken(shadow: Shadow, key: TapeKey) -> Generator[Call, Any, TapeRef]:
    """Receive the input of a key (epoch, stage and microbatch), run its F and begin the read of its
    output."""
    link = _links(shadow, key.stage)[0]
    ref: TapeRef = yield Call("reserve", {"key": key, "slot": None, "link": link})
    yield from _received(shadow, key, ref)
    yield from _forward(shadow, key, link)
    if shadow.configs[key.stage].sends_output:
        yield Call("read", {"key": key, "ref": ref, "gradient": False, "link": link})
    return ref


def _target_reused(shadow: Shadow, stage: int) -> Plan:
    """
    When dI of the source stage uses a gradient, the target stage's slot (set of buffers) already
    holds its next microbatch.
    """
    target = shadow.configs[stage].feeds
    assert target is not None
    ours, theirs = _keys(shadow, stage), _keys(shadow, target)
    link, refs = _links(shadow, stage)[0], []
    for key in ours[:2]:
        refs.append((yield from _forward(shadow, key, link)))
    taken = yield from _forward(shadow, theirs[0], link)
    yield Call("bind", {"key": theirs[0], "destination": None})
    yield from _backward(shadow, theirs[0], taken, link)
    yield from _forward(shadow, theirs[1], link)
    yield Call("bind", {"key": ours[0], "destination": None})
    yield from _backward(shadow, ours[0], refs[0], link)


def _message_after_message(shadow: Shadow, stage: int) -> Plan:
    """
    When a gradient arrives at the source stage, the target stage's slot (set of buffers) already
    holds its next microbatch.
    """
    target = shadow.configs[stage].feeds
    assert target is not None
    (first, second), (one, two) = _keys(shadow, stage)[:2], _keys(shadow, target)[:2]
    link = _links(shadow, target)[0]
    ref = yield from _taken(shadow, first)
    early = {"key": first, "ref": ref, "gradient": True, "link": _links(shadow, stage)[0]}
    yield Call("post_receive", early)
    taken = yield from _taken(shadow, one)
    yield from _received(shadow, one, taken, gradient=True)
    yield Call("bind", {"key": one, "destination": None})
    ticket = yield Call("check_dgrad", {"key": one, "ref": taken, "token": None, "link": link})
    yield committed(shadow, ticket)
    read = {"key": one, "ref": taken, "gradient": True, "link": link}
    yield Call("read", read)
    writes = {"destination": None, "first": None, "first_of_tied": None}
    yield committed(
        shadow, (yield Call("check_wgrad", {"key": one, "ref": taken, **writes, "link": link}))
    )
    yield Call("finish_read", read)
    yield from _taken(shadow, second)
    yield from _taken(shadow, two)
    yield Call("finish_receive", early)


def _message_before_wgrad(shadow: Shadow, stage: int) -> Plan:
    """A gradient is read and then arrives at the source stage before the target stage's dW runs."""
    target = shadow.configs[stage].feeds
    assert target is not None
    first, one = _keys(shadow, stage)[0], _keys(shadow, target)[0]
    link = _links(shadow, target)[0]
    ref = yield from _taken(shadow, first)
    taken = yield from _taken(shadow, one)
    yield from _received(shadow, one, taken, gradient=True)
    yield Call("bind", {"key": one, "destination": None})
    ticket = yield Call("check_dgrad", {"key": one, "ref": taken, "token": None, "link": link})
    yield committed(shadow, ticket)
    read = {"key": one, "ref": taken, "gradient": True, "link": link}
    yield Call("read", read)
    yield Call("finish_read", read)
    yield from _received(shadow, first, ref, gradient=True)


def _messages_of_lost_tapes(shadow: Shadow, stage: int) -> Plan:
    """Receives of dropped tapes end, although the received messages were never read."""
    target = shadow.configs[stage].feeds
    assert target is not None
    one = _keys(shadow, target)[0]
    link = _links(shadow, target)[0]
    taken = yield Call("reserve", {"key": one, "slot": None, "link": link})
    given = {"key": one, "ref": taken, "gradient": False, "link": link}
    yield Call("post_receive", given)
    yield Call("drop", {"key": one, "ref": taken})
    yield Call("finish_receive", given)
    first = _keys(shadow, stage)[0]
    ref = yield from _taken(shadow, first)
    back = {"key": first, "ref": ref, "gradient": True, "link": _links(shadow, stage)[0]}
    yield Call("post_receive", back)
    yield Call("drop", {"key": first, "ref": ref})
    yield Call("finish_receive", back)


def _source_lost(shadow: Shadow, stage: int) -> Plan:
    """A gradient from another process arrives at the target, although the source lost its tape."""
    target = shadow.configs[stage].feeds
    assert target is not None
    first, one = _keys(shadow, stage)[0], _keys(shadow, target)[0]
    ref = yield from _taken(shadow, first)
    taken = yield from _taken(shadow, one)
    yield Call("drop", {"key": first, "ref": ref})
    yield from _received(shadow, one, taken, gradient=True)


def _groups(process: Process, config: StageConfig) -> bool:
    """Return whether one dW of a stage can take two tapes (compute the gradients of two
    microbatches)."""
    apart = any(one.microbatch is not None for one in config.destinations)
    fed = config.receives_input or config.receives_gradient or config.copies_input
    room = min(config.microbatches, config.slots) > 1 and "arena" not in process.omit
    return config.scales == "epoch" and room and not apart and not fed


def _taken_together(
    shadow: Shadow, stage: int
) -> Generator[Call, Any, tuple[Ticket, list[tuple[TapeKey, TapeRef]]]]:
    """Check one dW for all tapes (data of one F each) that fit in a stage's slots; return its
    ticket and the tapes."""
    link, tapes = _links(shadow, stage)[0], []
    for key in _keys(shadow, stage)[: shadow.configs[stage].slots]:
        tapes.append((key, (yield from _forward(shadow, key, link))))
    for key, ref in tapes:
        dgrad = {"key": key, "ref": ref, "token": None, "link": link}
        yield committed(shadow, (yield Call("check_dgrad", dgrad)))
    (key, ref), *group = tapes
    writes = {"destination": None, "first": None, "first_of_tied": None}
    given = {"key": key, "ref": ref, **writes, "link": link, "group": tuple(group)}
    ticket = yield Call("check_wgrad", given)
    return ticket, tapes


def _one_product(shadow: Shadow, stage: int) -> Plan:
    """One dW takes several tapes (computes the gradients of several microbatches); the last tape's
    input gradient is read until after the dW."""
    ticket, tapes = yield from _taken_together(shadow, stage)
    key, ref = tapes[-1]
    read = {"key": key, "ref": ref, "gradient": True, "link": _links(shadow, stage)[0]}
    reads = shadow.configs[stage].sends_gradient
    if reads:
        yield Call("read", read)
    yield committed(shadow, ticket)
    if reads:
        yield Call("finish_read", read)


def _one_product_spoiled(shadow: Shadow, stage: int) -> Plan:
    """A tape is dropped while a dW takes it together with others; then the dW succeeds."""
    ticket, tapes = yield from _taken_together(shadow, stage)
    key, ref = tapes[-1]
    yield Call("drop", {"key": key, "ref": ref})
    yield committed(shadow, ticket)


def _one_product_failed(shadow: Shadow, stage: int) -> Plan:
    """A dW that takes several tapes (computes the gradients of several microbatches) fails."""
    ticket, _ = yield from _taken_together(shadow, stage)
    yield Call("abort_wgrad", {"ticket": ticket})


def _reduced_together(shadow: Shadow) -> Plan:
    """
    Stages share a gradient, and it is read before any stream has waited for the last stage's dW.
    """
    done = set()
    for stage, config in shadow.configs.items():
        link = _links(shadow, stage)[0]
        for cell in config.cells():
            key = TapeKey(shadow.epoch, *cell)
            ref = yield from _forward(shadow, key, link)
            yield from _backward(shadow, key, ref, link)
        done.add(stage)
        for bucket, it in shadow.reductions.items():
            if not it.running and done >= {*it.stages}:
                yield Call("start_reduction", {"bucket": bucket, "link": link})
    for stage in shadow.configs:
        yield Call("finalize", {"stage": stage, "link": _links(shadow, stage)[0]})


def _evaluation_awaited_by_another(shadow: Shadow) -> Plan:
    """
    After an evaluation, another stream waits for the graph stream first, then the stream that runs
    the update waits.
    """
    yield from _finalized(shadow)
    ours, theirs = _links(shadow, 0)[:2]
    given = {"stage": 0, "cached": False, "link": ours}
    ticket = yield Call("check_evaluation", given)
    yield committed(shadow, ticket)
    yield Call("wait", {"link": theirs})
    yield from _update(shadow)


def _weights_read_by_another(shadow: Shadow) -> Plan:
    """
    In the next epoch, a stream that did not run the last optimizer step waits for a reader of
    weights. After it has waited for the update, this stream starts a reader itself.
    """
    ours, theirs = yield from _updated(shadow)
    yield Call("start_weights_read", {"stage": 0, "link": ours})
    yield Call("finish_weights_read", {"stage": 0, "link": theirs})
    yield Call("join", {"link": ours})
    yield Call("wait", {"link": theirs})
    yield Call("start_weights_read", {"stage": 0, "link": theirs})


def _weights_read_after_restore(shadow: Shadow) -> Plan:
    """After a restore, a stream that never waited for the last update reads weights."""
    _, theirs = yield from _updated(shadow)
    yield Call("drain")
    checkpoint = yield Call("checkpoint")
    given = {"checkpoint": checkpoint, "incarnation": shadow.incarnation + 1, "fresh": False}
    yield Call("restore", given)
    yield Call("start_weights_read", {"stage": 0, "link": theirs})


def _updated(shadow: Shadow) -> Generator[Call, Any, tuple[int, int]]:
    """Run a step on the first stream; return its link and another link of the same domain."""
    yield from _finalized(shadow)
    yield from _update(shadow)
    ours, theirs = _links(shadow, 0)[:2]
    return ours, theirs


def _finalized(shadow: Shadow) -> Plan:
    """Run a step on the first stream, up to its update."""
    order = [*shadow.reductions]
    for stage in shadow.configs:
        for key in _keys(shadow, stage):
            link = _links(shadow, stage)[0]
            ref = yield from _forward(shadow, key, link)
            yield from _backward(shadow, key, ref, link)
    while order:
        started = [Call("start_reduction", {"bucket": b, "link": 0}) for b in order]
        call = next(c for c in started if "reduction.out-of-order" not in violations(shadow, c))
        order.remove(call.arguments["bucket"])
        yield call
        yield Call("finish_reduction", {**call.arguments})
    for stage in shadow.configs:
        yield Call("finalize", {"stage": stage, "link": _links(shadow, stage)[0]})


def _update(shadow: Shadow) -> Plan:
    """Run the update of a step on the first stream."""
    caller = shadow.links[_links(shadow, 0)[0]].caller
    ticket = yield Call("check_update", {"epoch": shadow.epoch, "caller": caller})
    yield from landed(shadow, ticket)


def _forward(shadow: Shadow, key: TapeKey, link: int) -> Generator[Call, Any, TapeRef]:
    refresh = shadow.uses("version") and shadow.stages[key.stage].cached != shadow.epoch
    given = {"key": key, "slot": None, "token": None, "link": link, "refresh": refresh}
    ticket = yield Call("check_forward", given)
    ref: TapeRef = yield committed(shadow, ticket)
    return ref


def _backward(shadow: Shadow, key: TapeKey, ref: TapeRef, link: int) -> Plan:
    given = {"key": key, "ref": ref, "link": link}
    ticket = yield Call("check_dgrad", {**given, "token": None})
    yield committed(shadow, ticket)
    ticket = yield Call(
        "check_wgrad", {**given, "destination": None, "first": None, "first_of_tied": None}
    )
    yield committed(shadow, ticket)


def telling(process: Process, actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """
    Return a legal schedule with added evidence for effects that its stages do not report.

    The schedule stays legal, because the contract ignores reports of a stage that is not configured
    to report.

    Args:
        process: The process of the schedule.
        actions: The legal schedule.
    """
    memory = process.contract().memory
    changed = []
    for name, given in actions:
        named = dict(zip(TRANSITIONS[name], given, strict=True))
        reports = "ticket" in named or name == "move_scales"
        if reports and _NOISE.keys() & named.keys():
            stage = named["stage"] if "stage" in named else memory.slot_stage[named["slot"]]
            for told in _NOISE.keys() & named.keys():
                asked = "reports_draws" if name == "commit_forward" else "recomputes_draws"
                flag = _REPORTED.get(told, asked)
                if not getattr(memory, flag)[stage]:
                    named[told] = _NOISE[told]
        changed.append((name, tuple(named.values())))
    return tuple(changed)
