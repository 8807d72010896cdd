"""
Calls to try in a state: plausible calls, and variants of these with one argument changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import evolve

from qeffect.engine.stage import TRANSITIONS
from qeffect.keys import TapeKey, TapeRef
from qeffect.relations.constants import (
    ADDS,
    BACK_BIT,
    DGRAD_BIT,
    GRAD_BIT,
    IN_BIT,
    JOINS,
    NEVER,
    NO_SLOT,
    OPENS,
    OUT_BIT,
    OVERWRITES,
    WGRAD_BIT,
)

from ..calls import Action
from ..concrete_run import ConcreteRun

__all__ = ["candidates", "moved", "share"]


def candidates(run: ConcreteRun) -> Iterator[Action]:
    """Yield the plausible calls in a state, and variants of these with one argument changed."""
    for transition, base in _plausible(run):
        names = TRANSITIONS[transition]
        yield transition, tuple(base[name] for name in names)
        for name in names:
            for value in _others(run, base, name):
                changed = {**base, name: value}
                yield transition, tuple(changed[n] for n in names)


def _plausible(run: ConcreteRun) -> Iterator[tuple[str, dict[str, Any]]]:
    st = run.laid.memory
    for config in run.process.stages:
        stage = config.stage
        domain = st.domain_of[stage]
        link = list(st.domain_at).index(domain)
        own = list(run.laid.slots[stage])
        free = next((slot for slot in own if st.consumers[slot] == 0), own[0])
        epoch = st.weight_epoch[stage]
        stale = int(st.cache_epoch[stage] != epoch)
        for cell in config.cells():
            key = TapeKey(epoch, *cell)
            slot = st.slot_of[cell] if st.slot_of[cell] != NO_SLOT else free
            given = {"key": key, "slot": slot, "token": st.token[domain], "link": link}
            yield "reserve", given
            yield "check_forward", {**given, "refresh": stale}
            yield "skip", given
            yield "bind", {"key": key, "destination": st.destination_of[cell]}
        at = {"stage": stage, "link": link}
        yield "check_refresh", at
        yield "finalize", at
        ticket = {"stage": stage, "ticket": st.refreshing[stage]}
        yield "commit_refresh", {**ticket, "filled": st.matrices[stage], "fill_epoch": epoch}
        yield "abort_refresh", ticket
        for cached in (0, 1):
            yield "check_evaluation", {**at, "cached": cached}
        ticket = {"stage": stage, "ticket": st.evaluating[stage]}
        yield "commit_evaluation", {**ticket, "fill_epoch": NEVER, "updates": 0}
        yield "abort_evaluation", ticket
        yield "invalidate", {"stage": stage}
        yield "start_weights_read", at
        reader = st.consumer[0] if st.named[0] == epoch else 0
        pairs = [*zip(st.caller_at, st.domain_at, strict=True)]
        yield "finish_weights_read", {"stage": stage, "link": pairs.index((reader, domain))}
        reading = {"stage": stage, "link": pairs.index((reader, domain))}
        yield "start_gradients_read", reading
        yield "finish_gradients_read", reading
        yield "move_scales", {"stage": stage, "updates": 1}
        for named in {max(epoch - 1, 0), epoch}:
            yield "fail", {"stage": stage, "epoch": named}
        for slot in own:
            yield from _of_slot(run, slot, link)
    epoch = st.weight_epoch[run.process.stages[0].stage]
    yield "next_walk", {"epoch": epoch}
    yield "check_update", {"epoch": epoch, "caller": st.consumer[0]}
    for name in ("commit_update", "abort_update"):
        yield name, {"epoch": epoch, "ticket": st.optimizing[0]}
    yield "checkpoint", {}
    yield "restore", {"epoch": epoch, "incarnation": st.incarnation[0] + 1}
    for link in range(len(st.submitted)):
        for name in ("submit", "join", "wait"):
            yield name, {"link": link}
    for bucket, stage in enumerate(st.stage_at):
        reader = st.consumer[0] if st.named[0] == st.weight_epoch[stage] else 0
        pairs = [*zip(st.caller_at, st.domain_at, strict=True)]
        link = pairs.index((reader, st.domain_of[stage]))
        for name in ("start_reduction", "finish_reduction", "fail_reduction"):
            yield name, {"bucket": bucket, "link": link}
    for domain in range(len(st.token)):
        yield "drain", {"domain": domain}


def moved(st: Any, stage: int) -> int:
    """Return how many times one F or dI of a stage updates the scales."""
    return 1 - int(st.epoch_scales[st.domain_of[stage]])


def share(st: Any, stage: int) -> tuple[int, int]:
    """
    Return the gradient weight for the next dI. The total weight has as many equal shares as the
    stage has microbatches; the next dI gets one share, or zero if no share is left.
    """
    parts = st.parts[stage] or st.cells[stage]
    left = st.unweighed[stage] if st.parts[stage] else parts
    return max(min(left, 1), 0), parts


def _of_slot(run: ConcreteRun, slot: int, link: int) -> Iterator[tuple[str, dict[str, Any]]]:
    st = run.laid.memory
    stage = st.slot_stage[slot]
    ticket = {"slot": slot, "ticket": st.held[slot]}
    matrices = st.matrices[stage]
    for name in ("abort_forward", "abort_dgrad", "abort_wgrad"):
        yield name, ticket
    fills = st.filling[stage] != 0 and st.filling[stage] == st.held[slot]
    fill = {"filled": matrices, "fill_epoch": st.weight_epoch[stage] if fills else NEVER}
    yield (
        "commit_forward",
        {
            **ticket,
            **fill,
            "updates": moved(st, stage),
            "draws": st.drawn[st.domain_of[stage]] + 1,
        },
    )
    scales = {"scales": st.scaled_at[slot], "draws": st.drawn_at[slot]}
    scales["updates"] = moved(st, stage)
    weight, parts = share(st, stage)
    weighed = {"weight": weight, "parts": parts}
    yield "commit_dgrad", {**ticket, "queued": matrices, **scales, **weighed}
    yield "commit_wgrad", {**ticket, "covered": matrices}
    cell = st.cell_at[slot]
    if cell is None:
        return
    key = TapeKey(st.epoch_at[slot], *cell)
    ref = TapeRef(slot, st.generation[slot], st.incarnation[0])
    named = {"key": key, "ref": ref, "link": link}
    yield "drop", named
    yield "check_dgrad", {**named, "token": st.token[st.domain_of[stage]]}
    own = st.opened[st.buffer_of[cell]] == key.epoch
    joined = st.opened[st.shared_of[st.buffer_of[cell]]] == key.epoch
    first = ADDS if own else JOINS if joined else OVERWRITES  # no sharer: both are this stage
    destination = st.destination_of[cell]
    yield "check_wgrad", {**named, "destination": destination, "first": first}
    leaders = [other for other in run.laid.slots[stage] if st.held[other] != 0]
    for leader in leaders or [slot]:
        given = {**named, "leader": leader, "ticket": st.held[leader]}
        yield "group_wgrad", {**given, "destination": destination}
    yield "ungroup_wgrad", {**named, "covered": matrices}
    for bit in (OUT_BIT, GRAD_BIT):
        yield "read", {**named, "bit": bit}
        yield "finish_read", {**named, "bit": bit}
    for message in (IN_BIT, BACK_BIT):
        yield "post_receive", {**named, "message": message}
        yield "finish_receive", {**named, "message": message}
    if st.consumers[slot] == 0 and st.moving[slot] != 0:  # of an aborted tape
        ended = {**named, "ref": evolve(ref, generation=ref.generation - 1)}
        for bit in (OUT_BIT, GRAD_BIT):
            yield "finish_read", {**ended, "bit": bit}
        for message in (IN_BIT, BACK_BIT):
            yield "finish_receive", {**ended, "message": message}
        yield "ungroup_wgrad", {**ended, "covered": matrices}


def _others(run: ConcreteRun, base: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Yield other values of an argument."""
    st, value = run.laid.memory, base[name]
    if name == "slot":
        none = () if "ticket" in base else (NO_SLOT,)  # the answer of a choice that found no slot
        yield from (slot for slot in (*none, *range(len(st.consumers))) if slot != value)
    elif name == "key":
        yield TapeKey(value.epoch + 1, *value.cell)
        if value.epoch:
            yield TapeKey(value.epoch - 1, *value.cell)
        cells = (cell for config in run.process.stages for cell in config.cells())
        yield from (TapeKey(value.epoch, *cell) for cell in cells if cell != value.cell)
    elif name == "ref":
        yield evolve(value, generation=value.generation + 1)
        if value.generation:
            yield evolve(value, generation=value.generation - 1)
        yield evolve(value, incarnation=value.incarnation - 1)
        others = (slot for slot in range(len(st.consumers)) if slot != value.slot)
        yield from (evolve(value, slot=slot, generation=st.generation[slot]) for slot in others)
    elif name == "leader":
        yield from (slot for slot in range(len(st.consumers)) if slot != value)
    elif name == "token":
        yield value + 1
        yield value - 1
    elif name == "ticket":
        flying = {*st.held, *st.refreshing, *st.evaluating, *st.optimizing}
        yield from {0, st.serial[0], st.serial[0] + 1, *flying} - {value}
    elif name == "bucket":
        yield from (bucket for bucket in range(len(st.stage_at)) if bucket != value)
    elif name == "caller":
        yield from (caller for caller in sorted(set(st.caller_at)) if caller != value)
    elif name == "link":
        yield from (link for link in range(len(st.submitted)) if link != value)
    elif name in ("refresh", "cached"):
        yield 1 - value
    elif name == "first":
        yield from (other for other in (ADDS, OVERWRITES, JOINS, OPENS) if other != value)
    elif name == "bit":
        yield from (
            bit
            for bit in (
                DGRAD_BIT,
                WGRAD_BIT,
                OUT_BIT,
                GRAD_BIT,
                DGRAD_BIT | OUT_BIT,
                OUT_BIT | GRAD_BIT,
            )
            if bit != value
        )
    elif name == "message":
        yield from (one for one in (IN_BIT, BACK_BIT, OUT_BIT, IN_BIT | BACK_BIT) if one != value)
    elif name in ("destination", "queued", "covered", "filled"):
        yield (*value, "another")
    elif name in ("updates", "scales", "draws"):
        yield value + 1
        if name == "draws" and value > 0:
            yield value - 1
        yield NEVER
    elif name == "weight":
        yield value + 1
    elif name == "parts":
        yield from (value + 1, 0, NEVER)
    elif name == "fill_epoch":
        yield value + 1
        if value != NEVER:
            yield NEVER
    elif name == "epoch":
        yield value + 1
        if value:
            yield value - 1
    elif name == "incarnation":
        yield value - 1
