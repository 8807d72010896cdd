"""
What a schedule needs: live tapes, deferred weight gradients, slots, captured graphs and gradient
memory.

Two ways to provision are compared (paper, Section IV, "Static binding and resource cost"). The
paper captures one F, dI and dW graph for every microbatch of every local stage, `3 * M * L`, and
gives every matrix one destination for every microbatch, `M * sum(W)`. With generation-checked
slots the same schedule needs graphs for as many slots as its stages have tapes live at once, and
one destination for every matrix: the first weight gradient of a step overwrites it and the others
accumulate.

A tape is live from its forward until everybody is done with it: its weight gradient, and where the
table shows messages, the sends that read its output and its input gradient. A send is done where
the table awaits it (torch 2.15), and at once in a table that awaits none. The default tables of
torch 2.15 await every send of a gradient at the end of the row, which keeps the tapes of all
microbatches live; `max_outstanding_sends` is what brings them down. torch's own
`analyze_pipeline_activation_liveness` leaves sends out: it counts the tapes that computations keep,
`StagePlan.peak_live - StagePlan.held_by_sends`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from .actions import SEND_WAITS, SENDS, Kind, Schedule, ScheduleError
from .slots import assign, own_readers

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp16": 2, "fp32": 4})
GRAPHS_PER_TAPE = 3


@attrs.frozen
class Layers:
    """
    The layers of one stage, as far as their matrix gradients go.

    A transformer layer with fused QKV has four matrices: QKV `3h x h`, projection `h x h`, FC1
    `ffn x h` and FC2 `h x ffn`.

    >>> Layers(hidden=4096, ffn=11008).bytes_per_stage
    314572800

    Args:
        hidden: The hidden size h.
        ffn: The feed-forward size.
        per_stage: Transformer layers in each stage.
        dtype: The gradients' type: bf16, fp16 or fp32.
    """

    hidden: int
    ffn: int
    per_stage: int = 1
    dtype: str = "bf16"

    def __attrs_post_init__(self) -> None:
        """
        Refuse what has no size.

        Raises:
            ScheduleError: A dimension is below one, or the type is unknown.
        """
        sizes = {"hidden": self.hidden, "ffn": self.ffn, "layers": self.per_stage}
        for name, size in sizes.items():
            if size < 1:
                raise ScheduleError(f"{name} must be at least 1, not {size}")
        if self.dtype not in DTYPE_BYTES:
            raise ScheduleError(
                f"dtype: expected one of {', '.join(DTYPE_BYTES)}, found {self.dtype!r}"
            )

    @property
    def matrices(self) -> dict[str, int]:
        """The elements of each matrix of one layer."""
        h, ffn = self.hidden, self.ffn
        return {"qkv": 3 * h * h, "proj": h * h, "fc1": ffn * h, "fc2": h * ffn}

    @property
    def bytes_per_stage(self) -> int:
        """Bytes of one gradient of every matrix of a stage."""
        return sum(self.matrices.values()) * self.per_stage * DTYPE_BYTES[self.dtype]


@attrs.frozen
class StagePlan:
    """
    What one stage needs.

    Args:
        stage: The stage.
        forwards: Its forwards in one step.
        peak_live: Tapes live at once: forwards whose last consumer is still to come.
        peak_deferred: Weight gradients deferred at once: dI that ran and whose dW is to come.
        held_by_sends: How many of `peak_live` there are only because sends read a tape longer than
            its weight gradient.
    """

    stage: int
    forwards: int
    peak_live: int
    peak_deferred: int
    held_by_sends: int


@attrs.frozen
class Provision:
    """
    What one way to provision costs a rank.

    Args:
        graphs: Graphs captured.
        tapes: Tapes with storage of their own.
        arena_bytes: Bytes of gradient destinations; `None` without layer dimensions.
    """

    graphs: int
    tapes: int
    arena_bytes: int | None


@attrs.frozen
class RankPlan:
    """
    What one rank needs.

    Args:
        rank: The rank.
        stages: Its stages.
        peak_live: Tapes live at once over all its stages.
        peak_deferred: Weight gradients deferred at once over all its stages.
        delayed: Weight gradients that do not directly follow their own input gradient.
        slots: Slots to provide: the sum of its stages' peaks, since a slot's graphs belong to one
            stage.
        paper: One tape and one destination for every microbatch.
        live_slots: A tape for every slot, one cache refresh for every stage, accumulating
            destinations.
        outstanding_sends: The most sends posted and not awaited at once; `None` where the table
            does not say when sends end.
    """

    rank: int
    stages: tuple[StagePlan, ...]
    peak_live: int
    peak_deferred: int
    delayed: int
    slots: int
    paper: Provision
    live_slots: Provision
    outstanding_sends: int | None


@attrs.frozen
class Plan:
    """
    What a schedule needs.

    Args:
        source: The schedule's source.
        num_microbatches: Its microbatches.
        ranks: What each rank needs.
        layers: The dimensions that were given.
    """

    source: str
    num_microbatches: int
    ranks: tuple[RankPlan, ...]
    layers: Layers | None

    @property
    def slots(self) -> dict[int, int]:
        """Slots to provide for each stage."""
        return {stage.stage: stage.peak_live for rank in self.ranks for stage in rank.stages}

    def record(self) -> dict[str, Any]:
        """The plan as plain data, for JSON."""
        return attrs.asdict(self)


def plan(schedule: Schedule, layers: Layers | None = None) -> Plan:
    """
    Plan a schedule's tapes, graphs and gradient memory.

    Args:
        schedule: The schedule, free of findings of `check_ranks`.
        layers: The layers of each stage; without them there are no byte counts.
    """
    return Plan(
        source=schedule.source,
        num_microbatches=schedule.num_microbatches,
        ranks=tuple(_plan_rank(schedule, rank, layers) for rank in range(schedule.num_ranks)),
        layers=layers,
    )


def _outstanding(schedule: Schedule, rank: int) -> int | None:
    """The most sends of a rank that are posted and not awaited; `None` where no waits are shown."""
    if not schedule.awaits_sends:
        return None
    posted = most = 0
    for atom in schedule.atoms[rank]:
        posted += (atom.kind in SENDS) - (atom.kind in SEND_WAITS)
        most = max(most, posted)
    return most


def _plan_rank(schedule: Schedule, rank: int, layers: Layers | None) -> RankPlan:
    local = schedule.stages_of(rank)
    ends = SEND_WAITS if schedule.awaits_sends else SENDS
    steps = [(atom.kind, atom.stage, atom.microbatch) for atom in schedule.atoms[rank]]
    made = assign(steps, own_readers(steps, {Kind.WGRAD, *ends}))
    computing = assign(steps, own_readers(steps)).peaks
    deferred: Counter[int] = Counter()
    peak_deferred: dict[int, int] = defaultdict(int)
    forwards: dict[int, int] = defaultdict(int)
    most_deferred = delayed = 0
    previous: tuple[Kind, int, int] | None = None
    for atom in schedule.atoms[rank]:
        stage = atom.stage
        if atom.kind is Kind.FORWARD:
            forwards[stage] += 1
        elif atom.kind is Kind.DGRAD:
            deferred[stage] += 1
            peak_deferred[stage] = max(peak_deferred[stage], deferred[stage])
            most_deferred = max(most_deferred, deferred.total())
        elif atom.kind is Kind.WGRAD:
            delayed += previous != (Kind.DGRAD, stage, atom.microbatch)
            deferred[stage] -= 1
        else:
            continue
        previous = (atom.kind, stage, atom.microbatch)
    slots = sum(made.peaks.get(stage, 0) for stage in local)
    tapes = schedule.num_microbatches * len(local)
    one = None if layers is None else layers.bytes_per_stage * len(local)
    return RankPlan(
        rank=rank,
        stages=tuple(
            StagePlan(
                stage,
                forwards[stage],
                made.peaks.get(stage, 0),
                peak_deferred[stage],
                made.peaks.get(stage, 0) - computing.get(stage, 0),
            )
            for stage in local
        ),
        peak_live=made.peak,
        peak_deferred=most_deferred,
        delayed=delayed,
        slots=slots,
        paper=Provision(
            graphs=GRAPHS_PER_TAPE * tapes,
            tapes=tapes,
            arena_bytes=None if one is None else schedule.num_microbatches * one,
        ),
        live_slots=Provision(
            graphs=GRAPHS_PER_TAPE * slots + len(local),
            tapes=slots,
            arena_bytes=one,
        ),
        outstanding_sends=_outstanding(schedule, rank),
    )
