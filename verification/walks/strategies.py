"""
Hypothesis strategies: random legal schedules of one process's life, and illegal ones.

A schedule is not LIFO: dW is delayed at will, stages and domains interleave, actions stay in flight
while others run, and epochs, aborts, checkpoints and restarts follow one another. It is drawn as a
process and a list of numbers, each of which says what to do next; it shrinks by losing numbers and
by their falling, towards the fewest and plainest calls. Only the oracle is asked while drawing, so
that a contract under test has no say in what is legal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve, field, frozen
from hypothesis import reject
from hypothesis import strategies as st

from qeffect import Checkpoint, Contract, TapeRef, Ticket
from qeffect.configuration import Configuration
from qeffect.engine.stage import RELATIONS
from qeffect.verification.targets import CLAUSE_IDS, TARGETS
from qeffect.verification.walks.attempts import aimed
from qeffect.verification.walks.oracle import seat, violations
from qeffect.verification.walks.processes import PROCESSES, Process
from qeffect.verification.walks.proposals import chooser
from qeffect.verification.walks.timeline import Step, schedule_text, timeline_text
from qeffect.verification.walks.walk import Walker
from qeffect.verification.walks.world import Call, World

__all__ = [
    "Illegal",
    "Rehearsal",
    "Schedule",
    "illegal_schedules",
    "legal_schedules",
    "numbers",
    "processes",
    "rehearse",
]

_ACTIONS = {"forward": "F", "dgrad": "dI", "wgrad": "dW", "refresh": "refresh"}


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

    def replay(self, contract: Contract | None = None) -> Contract:
        """
        Make every call; return the contract that the last one went to.

        Raises:
            Refused: A call was refused.
        """
        current = self.process.contract() if contract is None else contract
        for call in self.calls:
            current = make_call(self.process, current, call)
        return current


@frozen
class Illegal:
    """
    A legal schedule and one call more, which breaks exactly one clause.

    Args:
        schedule: What happens before.
        call: The illegal call.
        clause: The clause that must refuse it.
    """

    schedule: Schedule
    call: Call
    clause: str

    def __str__(self) -> str:
        return f"{self.schedule}\n\nthen {self.call}, to be refused by {self.clause}"


def make_call(process: Process, contract: Contract, call: Call) -> Contract:
    """Make a call on a contract; return the contract that the next call goes to."""
    name, arguments = call.transition, dict(call.arguments)
    if "ticket" in arguments:
        name = name.partition("_")[0]
    if name == "restore" and arguments.pop("fresh"):
        contract = process.contract()
    getattr(contract, name)(**arguments)
    return contract


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
        super().__init__(World(process, incarnation=0))
        self.process = process
        self.calls: list[Call] = []
        self.serial = 0
        self.start()

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
                _ACTIONS[kind], given.get("key"), where, self.serial, world.incarnation, ref
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
            )
            return Checkpoint(world.epoch, configuration)
        if call.transition == "restore" and given["fresh"]:
            self.serial = 0
        return None


def rehearse(process: Process, steps: Sequence[int]) -> Rehearsal:
    """Return the rehearsal of the schedule that a process and some numbers name."""
    rehearsal = Rehearsal(process)
    for number in steps:
        rehearsal.step(number)
    return rehearsal


def processes() -> st.SearchStrategy[Process]:
    """Processes of every shape that `PROCESSES` has; the first is the simplest."""
    return st.sampled_from(PROCESSES)


def numbers(longest: int = 120) -> st.SearchStrategy[list[int]]:
    """Numbers to walk by; long lists are as likely as short ones, and shrink to short ones."""
    # A list of exactly one size would shrink by its numbers alone, so none is that long at least.
    shortest = tuple(longest * quarter // 4 for quarter in range(4))
    return st.sampled_from(shortest).flatmap(
        lambda least: st.lists(st.integers(0, (1 << 64) - 1), min_size=least, max_size=longest)
    )


@st.composite
def legal_schedules(
    draw: st.DrawFn, process: st.SearchStrategy[Process] | None = None, longest: int = 120
) -> Schedule:
    """
    Random legal schedules.

    Args:
        process: Where to draw the process from; by default one of every shape.
        longest: The most steps; a step is a call or a few that belong together.
    """
    chosen = draw(processes() if process is None else process)
    return Schedule(chosen, tuple(rehearse(chosen, draw(numbers(longest))).calls))


@st.composite
def illegal_schedules(
    draw: st.DrawFn, process: st.SearchStrategy[Process] | None = None, longest: int = 60
) -> Illegal:
    """
    Random legal schedules that end in a call which breaks exactly one clause.

    Args:
        process: Where to draw the process from; by default one of every shape.
        longest: The most steps before the illegal call.
    """
    chosen = draw(processes() if process is None else process)
    rehearsal = rehearse(chosen, draw(numbers(longest)))
    wanted = draw(st.sampled_from(CLAUSE_IDS))
    pick = chooser(draw(st.integers(0, (1 << 40) - 1)))
    for targets in ([target for target in TARGETS if target[1] == wanted], TARGETS):
        for call in aimed(rehearsal.world, pick, rehearsal.checkpoints, rehearsal.fresh(), targets):
            wrong = set(violations(rehearsal.world, call))
            if len(wrong) == 1:
                return Illegal(Schedule(chosen, tuple(rehearsal.calls)), call, wrong.pop())
    reject()
