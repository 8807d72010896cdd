"""
Legal schedules of one process's life, written beside any contract.

A schedule is not LIFO: dW is delayed at will, stages and domains interleave, actions stay in flight
while others run, and epochs, aborts, checkpoints and restarts follow one another. Only the oracle
is asked while one is written, so that a contract under test has no say in what is legal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve, field, frozen

from qeffect import Checkpoint, Contract, TapeRef, Ticket
from qeffect.configuration import Configuration
from qeffect.engine.stage import RELATIONS

from .oracle import seat
from .performing import perform
from .processes import Process
from .proposals import ACTIONS
from .timeline import Step, schedule_text, timeline_text
from .walk import Walker
from .world import Call, World

__all__ = ["Action", "Rehearsal", "Schedule"]

#: A transition and its arguments, as the kernel's composed function takes them.
Action = tuple[str, tuple[Any, ...]]


@frozen
class Schedule:
    """
    Calls to make one after another, each legal.

    Args:
        process: What the process is configured with.
        calls: The calls; a restore says whether it goes to a fresh contract.
    """

    process: Process
    calls: tuple[Call, ...] = field(repr=False)

    def __str__(self) -> str:
        steps = [Step(call, "", _slot(call)) for call in self.calls]
        stages = [c.stage for c in self.process.stages for _ in range(c.slots)]
        return (
            f"Schedule over {self.process}:\n{schedule_text(steps)}\n\n"
            f"{timeline_text(steps, stages)}"
        )

    def replay(self, make: Callable[[], Contract] | None = None) -> Contract:
        """
        Make every call; return the contract that the last one went to.

        Args:
            make: What makes a contract, for the start and for every restart in a new process; by
                default the process's own.

        Raises:
            Refused: A call was refused.
        """
        make = make or self.process.contract
        contract = make()
        for call in self.calls:
            contract, _ = perform(call, contract, make)
        return contract

    def lives(self) -> tuple[tuple[Action, ...], ...]:
        """
        Return the transitions that the calls come to, those of each contract apart.

        A restart in a new process begins another life, which is a legal schedule of its own.

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
        if isinstance(value, Ticket) and value.action == "refresh":
            return None
        if value is not None:
            return int(getattr(value, "slot", value))
    return None


class Rehearsal(Walker):
    """
    Carries calls out in the world alone: the oracle says what a contract would return.

    Args:
        process: What the process is configured with.

    Attributes:
        calls: The calls so far, every slot spelled out.
    """

    def __init__(self, process: Process) -> None:
        super().__init__(World(process, incarnation=1))
        self.process = process
        self.calls: list[Call] = []
        self.serial = 0
        self.incarnations = self.world.incarnation
        self.start()

    @property
    def schedule(self) -> Schedule:
        """The calls so far."""
        return Schedule(self.process, tuple(self.calls))

    def call(self, call: Call) -> Any:
        """Let a legal call happen, and return what a contract would."""
        call = self._spelled_out(call)
        result = self._result(call)
        self.calls.append(call)
        self.happened(call, result)
        return result

    def _spelled_out(self, call: Call) -> Call:
        if call.transition not in ("reserve", "check_forward"):
            return call
        chosen, _ = seat(self.world, call.arguments["key"], call.arguments["slot"])
        assert chosen is not None  # the call is legal
        return evolve(call, arguments={**call.arguments, "slot": chosen.index})

    def _result(self, call: Call) -> Any:
        world, given = self.world, call.arguments
        phase, _, kind = call.transition.partition("_")
        if phase == "check" and kind:
            self.serial += 1
            ref = given.get("ref")
            where = given["stage"] if kind == "refresh" else ref.slot if ref else given["slot"]
            return Ticket(
                ACTIONS[kind], given.get("key"), where, self.serial, world.incarnation, ref
            )
        if call.transition == "reserve":
            return world.ref(world.slots[given["slot"]])
        if call.transition == "commit_forward":
            slot = world.slots[given["ticket"].slot]
            return TapeRef(slot.index, slot.releases, world.incarnation)
        if call.transition == "checkpoint":
            relations = tuple(name for name in RELATIONS if world.uses(name))
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
            return Checkpoint(world.epoch, configuration)
        if call.transition == "restore" and given["fresh"]:
            self.serial = 0
        return None
