"""What the arguments of one of Megatron-core's forward-backward loops declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import attrs

from qeffect.keys import Cell, cell_of
from qeffect.renamed import old_names
from qeffect.schedule.actions import Action, Kind, ScheduleError
from qeffect.schedule.check import check
from qeffect.schedule.findings import Finding
from qeffect.schedule.megatron import megatron_schedule
from qeffect.schedule.pairing import Work

from .megatron_library import Library
from .reports import LOGGER
from .works import Event

__all__ = ["LOOPS", "LoopPlan", "UnguardedScheduleError", "chunks_of", "plan_of", "unguarded"]

__getattr__ = old_names(__name__, {"Plan": "LoopPlan"})

#: The loops, by the name of the function.
LOOPS = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
_KINDS = {Kind.FORWARD: "F", Kind.BACKWARD: "dI"}


class UnguardedScheduleError(RuntimeError):
    """The guard cannot see the actions of this loop of Megatron-core."""


@attrs.frozen
class LoopPlan:
    """
    What a loop declares: its sizes, and the order of the rank's actions.

    Args:
        source: The loop's sizes, as text.
        rank: Rank in the pipeline.
        ranks: Number of ranks of the pipeline.
        chunks: Number of virtual stages of a rank.
        microbatches: Number of microbatches.
        row: The rank's actions in Megatron's own order; None if the order is longer than the limit
            of `qeffect check`.
        messages: Whether the loop exchanges exactly the row's messages.
        wrong: What is wrong with the order of all ranks; None if it is right.
    """

    source: str
    rank: int
    ranks: int
    chunks: int
    microbatches: int
    row: tuple[Action, ...] | None
    messages: bool
    wrong: Finding | None = attrs.field(default=None, eq=False)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The global stages of the rank, one for each virtual stage."""
        return tuple(chunk * self.ranks + self.rank for chunk in range(self.chunks))

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline."""
        return self.chunks * self.ranks

    @cached_property
    def events(self) -> Mapping[str, tuple[Event, ...]]:
        """The row's actions by kind: kind, stage and microbatch of each."""
        found: dict[str, list[Event]] = {}
        for action in self.row or ():
            kind = action.kind.value
            found.setdefault(kind, []).append((kind, action.stage, action.microbatch))
        return {kind: tuple(events) for kind, events in found.items()}

    @cached_property
    def backwards(self) -> tuple[Work, ...]:
        """The stages and microbatches of the row's backwards, in order."""
        return tuple((stage, microbatch) for _, stage, microbatch in self.events.get("B", ()))

    @cached_property
    def declared(self) -> Mapping[Any, list[tuple[str, Cell]]] | None:
        """The rank's F and dI, as a contract declares them."""
        if self.row is None:
            return None
        order = [
            (_KINDS[action.kind], cell_of(action.stage, action.microbatch, 0, 0))
            for action in self.row
            if action.kind in _KINDS
        ]
        return {0: order}


def chunks_of(given: Mapping[str, Any]) -> list[Any]:
    """Return the model chunks that a loop was given."""
    model = given["model"]
    return list(model) if isinstance(model, Sequence) else [model]


def unguarded(lib: Library, given: Mapping[str, Any], config: Any) -> str | None:
    """Return Megatron's name of a part of the loop that the guard cannot see; else None."""
    for option, runs in (
        ("overlap_moe_expert_parallel_comm", "combined_1f1b"),
        ("hybrid_context_parallel", "hybrid_context_parallel_forward_backward"),
        ("delay_wgrad_compute", "backward_dw"),
    ):
        if getattr(config, option, False):
            return f"{runs} ({option}=True)"
    communicator = given.get("p2p_communicator")
    plain = lib.p2p.P2PCommunicator
    if communicator is not None and getattr(type(communicator), "_communicate", None) is not (
        plain._communicate
    ):
        return f"exchanges of {type(communicator).__name__}"
    if "MultiModule" in type(given.get("pg_collection")).__name__:
        return "backward_step_multimodule (MultiModuleProcessGroupCollection)"
    return None


def plan_of(lib: Library, loop: str, given: Mapping[str, Any], config: Any) -> LoopPlan:
    """
    Return the plan of a loop, from the loop's arguments.

    Args:
        lib: Megatron-core.
        loop: Name of the loop, one of `LOOPS`.
        given: The loop's arguments.
        config: The model's configuration.

    Raises:
        ScheduleError: Megatron-core itself refuses the sizes.
    """
    microbatches, chunks = int(given["num_microbatches"]), len(chunks_of(given))
    if loop == LOOPS[0]:
        return _alone(microbatches)
    communicator = given.get("p2p_communicator")
    if communicator is None:
        group = lib.state.get_pipeline_model_parallel_group()
    else:
        group = communicator.pp_group
    size = getattr(config, "microbatch_group_size_per_vp_stage", None)
    plan = _piped(
        group.rank(),
        group.size(),
        chunks,
        microbatches,
        _manner(config),
        size if loop == LOOPS[2] else None,
    )
    if given.get("adjust_tensor_shapes_fn") is not None:  # an exchange may have several tensors
        return attrs.evolve(plan, messages=False, wrong=plan.wrong)
    return plan


def _manner(config: Any) -> str:
    if getattr(config, "use_ring_exchange_p2p", False):
        return "plain"  # each direction has a place of its own
    if getattr(config, "batch_p2p_comm", True):
        return "batched"
    if not getattr(config, "overlap_p2p_comm", False):
        return "plain"
    early = getattr(config, "overlap_p2p_comm_warmup_flush", False)
    return "prefetched" if early else "overlapped"


@cache
def _alone(microbatches: int) -> LoopPlan:
    row = [
        Action(kind, 0, microbatch)
        for microbatch in range(microbatches)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
    source = f"Megatron-core without pipelining, microbatches={microbatches}"
    return LoopPlan(source, 0, 1, 1, microbatches, tuple(row), messages=False)


@cache
def _piped(
    rank: int, ranks: int, chunks: int, microbatches: int, manner: str, group: int | None
) -> LoopPlan:
    source = f"Megatron-core pp={ranks} vpp={chunks} microbatches={microbatches} {manner}"
    try:
        table = megatron_schedule(
            pp=ranks, vpp=chunks, microbatches=microbatches, messages=manner, group=group
        )
    except ScheduleError as error:
        if "the limit" not in str(error):
            raise
        LOGGER.warning("%s; the order of actions and messages is not checked", error)
        return LoopPlan(source, rank, ranks, chunks, microbatches, None, messages=False)
    row = tuple(action for action in table.rows[rank] if action is not None)
    found = check(table).finding
    return LoopPlan(source, rank, ranks, chunks, microbatches, row, messages=True, wrong=found)
