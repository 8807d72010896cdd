"""The instructions of DeepSpeed's pipeline engine, and the schedule table that they form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs

from qeffect.keys import Cell, cell_of
from qeffect.schedule.actions import Kind, ScheduleError
from qeffect.schedule.check import check
from qeffect.schedule.deepspeed import INSTRUCTIONS, deepspeed_schedule
from qeffect.schedule.findings import Finding

__all__ = ["GRADIENTS", "TIED", "GuardedMap", "Stream", "name_of", "stream_of"]

#: Names of the two reductions: of gradients over replicas, of tied weights' gradients over stages.
GRADIENTS, TIED = "gradients", "tied"


def name_of(cls: type) -> str:
    """
    Return the name of a DeepSpeed instruction from its class. For a subclass, return the name of
    DeepSpeed's own class.
    """
    return next((base.__name__ for base in cls.__mro__ if base.__name__ in INSTRUCTIONS), "")


@attrs.frozen
class Stream:
    """
    What a rank's sequence of instructions declares.

    Args:
        source: Name of the schedule, with its number of stages and microbatches.
        stages: The stages of the rank; the stage of phase 0 comes first.
        num_stages: Number of stages of the pipeline.
        microbatches: Number of microbatches.
        slots: Number of buffers of a stage.
        order: The order of the rank's F and dI, in the form that a contract takes; None if the
            table is wrong.
        names: Names of the rank's instructions.
        buckets: Names of the gradient reductions that the rank runs.
        wrong: The first finding of `qeffect check` in the table; None if there is no finding.
    """

    source: str
    stages: tuple[int, ...]
    num_stages: int
    microbatches: int
    slots: int
    order: Mapping[Any, list[tuple[str, Cell]]] | None
    names: frozenset[str]
    buckets: tuple[str, ...]
    wrong: Finding | None = None


def stream_of(engine: Any) -> Stream:
    """
    Read the instructions of all ranks from the engine's own schedule, and return what they declare
    for this rank.

    Raises:
        ScheduleError: The schedule's class cannot be read, or the rank never updates its weights.
    """
    schedule = engine._train_schedule()
    ranks, rank, microbatches = engine.num_stages, engine.stage_id, engine.micro_batches
    table = deepspeed_schedule(type(schedule), stages=ranks, microbatches=microbatches)
    names = frozenset(name_of(type(each)) for step in schedule.steps() for each in step)
    if "OptimizerStep" not in names:
        raise ScheduleError(
            f"{table.source}: rank {rank} has no OptimizerStep; a guarded train_batch must "
            "end with one"
        )
    folded = table.num_stages > ranks
    buffers = schedule.num_pipe_buffers()
    found = check(table).finding
    kinds = {Kind.FORWARD: "F", Kind.DGRAD: "dI"}
    order = [
        (kinds[atom.kind], cell_of(atom.stage, atom.microbatch, 0, 0))
        for atom in table.atoms[rank]
        if atom.kind in kinds
    ]
    return Stream(
        table.source,
        (rank, table.num_stages - 1 - rank) if folded else (rank,),
        table.num_stages,
        microbatches,
        buffers // 2 if folded else buffers,
        None if found else {0: order},
        names,
        tuple(_buckets(engine, names)),
        found,
    )


def _buckets(engine: Any, names: frozenset[str]) -> Iterator[str]:
    if "ReduceGrads" in names:
        yield GRADIENTS
    tied = getattr(engine.module, "get_tied_weights_and_groups", tuple)
    if "ReduceTiedGrads" in names and tied():
        yield TIED


class GuardedMap(Mapping[type, Callable[..., Any]]):
    """
    The engine's map from instructions to methods, with a guard around each method.

    Methods are looked up in the engine's own map at each instruction. Therefore a method that is
    replaced later is guarded too.

    Args:
        engine: The engine.
        before: The engine's own map from before the guard; None if the engine used the map of its
            class.
        run: Function that is called with an instruction's name, its method, the engine and its
            arguments.
    """

    def __init__(self, engine: Any, before: Any, run: Callable[..., Any]) -> None:
        self._class, self._before, self._run = type(engine), before, run

    def _methods(self) -> Mapping[type, Callable[..., Any]]:
        methods: Mapping[type, Callable[..., Any]]
        methods = self._class._INSTRUCTION_MAP if self._before is None else self._before
        return methods

    def __getitem__(self, cls: type) -> Callable[..., Any]:
        return partial(self._run, name_of(cls), self._methods()[cls])

    def __iter__(self) -> Iterator[type]:
        return iter(self._methods())

    def __len__(self) -> int:
        return len(self._methods())
