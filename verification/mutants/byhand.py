"""
Legal schedules written by hand: what random walks through a process's life hardly ever come to.

The oracle of the walks judges every call of them before it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from qeffect.engine.stage import TRANSITIONS
from qeffect.keys import TapeKey
from qeffect.verification.walks.oracle import violations
from qeffect.verification.walks.processes import Process
from qeffect.verification.walks.proposals import Plan, committed, prepared
from qeffect.verification.walks.rehearsal import Action, Rehearsal, Schedule
from qeffect.verification.walks.world import Call, World

__all__ = ["by_hand", "telling"]

#: What a commit tells of effects that a backend may report or not, told at random.
_NOISE: Final = {"filled": ("another",), "fill_epoch": 7, "updates": 9, "scales": 7}
#: The flag of a stage by which it reports each of those.
_REPORTED: Final = {
    "filled": "reports_fills",
    "fill_epoch": "reports_fills",
    "updates": "reports_updates",
}


def by_hand(process: Process) -> Iterator[Schedule]:
    """
    Yield the schedules that a process can run.

    Args:
        process: What they run on.

    Raises:
        AssertionError: A call is not legal; the oracle's findings are told.
    """
    for config in process.stages:
        own = _links(World(process, incarnation=1), config.stage)
        if "version" not in process.omit:
            yield _made(process, partial(_refreshed_anew, stage=config.stage))
        if config.sends_output and len(own) > 1 and not config.receives_input:
            yield _made(process, partial(_read_elsewhere, stage=config.stage))


def _made(process: Process, plan: Callable[[World], Plan]) -> Schedule:
    rehearsal = Rehearsal(process)
    rehearsal.run(_judged(rehearsal.world, plan(rehearsal.world)))
    return rehearsal.schedule


def _judged(world: World, plan: Plan) -> Plan:
    """Make the calls of a plan, each after what puts it right; nothing may be wrong then."""
    result = None
    while True:
        try:
            call = plan.send(result)
        except StopIteration:
            return
        yield from prepared(world, call)
        wrong = violations(world, call)
        if wrong:
            raise AssertionError(f"{call} is not legal: {', '.join(wrong)}")
        result = yield call


def _links(world: World, stage: int) -> list[int]:
    domain = world.domain_of(stage)
    return [index for index, link in enumerate(world.links) if link.domain == domain]


def _refreshed_anew(world: World, stage: int) -> Plan:
    """A cache that is invalidated before its first forward is refreshed once more."""
    link = _links(world, stage)[0]
    refresh = Call("check_refresh", {"stage": stage, "link": link})
    yield committed(world, (yield refresh))
    yield Call("invalidate", {"stage": stage})
    yield committed(world, (yield refresh))


def _read_elsewhere(world: World, stage: int) -> Plan:
    """An output is read on one link; dI comes from another, and needs no word of the read."""
    key = TapeKey(world.epoch, *world.configs[stage].cells()[0])
    ours, theirs = _links(world, stage)[:2]
    refresh = world.uses("version")
    forward = {"key": key, "slot": None, "token": None, "link": ours, "refresh": refresh}
    ticket = yield Call("check_forward", forward)
    ref = yield committed(world, ticket)
    read = {"key": key, "ref": ref, "gradient": False, "link": theirs}
    yield Call("read", read)
    yield Call("finish_read", read)
    dgrad = {"key": key, "ref": ref, "token": None, "link": ours}
    yield committed(world, (yield Call("check_dgrad", dgrad)))


def telling(process: Process, actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """
    Return a legal schedule with other evidence where nothing is reported.

    What a stage that is not configured to report tells all the same is not looked at.

    Args:
        process: What the schedule runs on.
        actions: The schedule.
    """
    memory = process.contract().memory
    changed = []
    for name, given in actions:
        named = dict(zip(TRANSITIONS[name], given, strict=True))
        if "ticket" in named and name.startswith("commit_"):
            stage = named["stage"] if "stage" in named else memory.slot_stage[named["slot"]]
            for told in _NOISE.keys() & named.keys():
                flag = _REPORTED.get(told, "carried_scales")
                if not getattr(memory, flag)[stage]:
                    named[told] = _NOISE[told]
        changed.append((name, tuple(named.values())))
    return tuple(changed)
