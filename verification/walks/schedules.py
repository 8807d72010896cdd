"""
Random legal schedules of one process, made without a contract.

A schedule is not last-in-first-out: dW is delayed arbitrarily, stages and domains interleave,
actions stay in flight while others run, and epochs, aborts, checkpoints and restarts follow each
other. Only the oracle decides which calls are legal, so that a contract under test has no influence
on the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve, field, frozen

from qeffect import Checkpoint, Contract, TapeRef, Ticket
from qeffect.configuration import Configuration
from qeffect.engine.stage import RELATIONS

from ..caller import ProcessCaller
from ..calls import Action, Call
from ..process import Process
from .oracle import seat
from .proposals import ACTIONS
from .shadow import Shadow
from .timeline import CallRecord, schedule_text, timeline_text
from .walk import RandomWalk

__all__ = ["Schedule", "ScheduleWalk"]


@frozen
class Schedule:
    """
    A sequence of calls that are all legal.

    Args:
        process: The configuration of the process that makes the calls.
        calls: The calls in order; a restore says whether it goes to a new contract.
    """

    process: Process
    calls: tuple[Call, ...] = field(repr=False)

    def __str__(self) -> str:
        steps = [CallRecord(call, "", _slot(call)) for call in self.calls]
        stages = [c.stage for c in self.process.stages for _ in range(c.slots)]
        return (
            f"Schedule over {self.process}:\n{schedule_text(steps)}\n\n"
            f"{timeline_text(steps, stages)}"
        )

    def replay(self, make: Callable[[], Contract] | None = None) -> ProcessCaller:
        """
        Make every call on a contract; return the caller that made them.

        Args:
            make: Function that makes the contract at the start and at every restart in a new
                process; by default `process.contract`.

        Raises:
            Refused: A call was refused.
        """
        caller = ProcessCaller(self.process, make)
        for call in self.calls:
            caller.call(call)
        return caller

    def lives(self) -> tuple[tuple[Action, ...], ...]:
        """
        Return the transitions that the calls run, as one sequence per contract.

        A restart in a new process begins another sequence, which is itself a legal schedule.

        Raises:
            Refused: A call was refused.
        """
        lives: list[list[Action]] = []

        def make() -> Contract:
            life: list[Action] = []
            lives.append(life)
            return self.process.contract(lambda name, given, _: life.append((name, given)))

        self.replay(make)
        return tuple(tuple(life) for life in lives)


def _slot(call: Call) -> int | None:
    for name in ("slot", "ref", "ticket"):
        value = call.arguments.get(name)
        if isinstance(value, Ticket) and value.action in ("refresh", "evaluation", "update"):
            return None
        if value is not None:
            return int(getattr(value, "slot", value))
    return None


class ScheduleWalk(RandomWalk):
    """
    A random walk (a sequence of random calls) without a contract: it computes from the shadow, a
    record of the calls, what a contract would return.

    Args:
        process: The configuration of the process that makes the calls.

    Attributes:
        calls: The calls so far, each with its slot (set of buffers).
    """

    def __init__(self, process: Process) -> None:
        super().__init__(Shadow(process, incarnation=1))
        self.process = process
        self.calls: list[Call] = []
        self.serial = 0
        self.incarnations = self.shadow.incarnation
        self.start()

    @property
    def schedule(self) -> Schedule:
        """The calls so far."""
        return Schedule(self.process, tuple(self.calls))

    def call(self, call: Call) -> Any:
        """Record a legal call, and return what a contract would return."""
        call = self._spelled_out(call)
        result = self._result(call)
        self.calls.append(call)
        self.happened(call, result)
        return result

    def _spelled_out(self, call: Call) -> Call:
        if call.transition not in ("reserve", "check_forward"):
            return call
        chosen, _ = seat(self.shadow, call.arguments["key"], call.arguments["slot"])
        assert chosen is not None  # the call is legal
        return evolve(call, arguments={**call.arguments, "slot": chosen.index})

    def _result(self, call: Call) -> Any:
        shadow, given = self.shadow, call.arguments
        phase, _, kind = call.transition.partition("_")
        if phase == "check" and kind:
            self.serial += 1
            ref = given.get("ref")
            place = {"refresh": "stage", "evaluation": "stage", "update": "epoch"}.get(kind, "slot")
            where = ref.slot if ref else given[place]
            return Ticket(
                ACTIONS[kind], given.get("key"), where, self.serial, shadow.incarnation, ref
            )
        if call.transition == "reserve":
            return shadow.ref(shadow.slots[given["slot"]])
        if call.transition == "commit_forward":
            slot = shadow.slots[given["ticket"].slot]
            return TapeRef(slot.index, slot.releases, shadow.incarnation)
        if call.transition == "checkpoint":
            relations = tuple(name for name in RELATIONS if shadow.uses(name))
            process = self.process
            configuration = Configuration(
                process.stages,
                relations,
                process.callers,
                process.capture_order,
                tuple(process.declared.items()),
                process.generation_max,
                process.reductions,
            )
            return Checkpoint(shadow.epoch, configuration)
        if call.transition == "restore" and given["fresh"]:
            self.serial = 0
        return None
