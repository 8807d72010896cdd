"""
The resources that a schedule needs: live tapes, deferred weight gradients, slots, captured graphs
and gradient memory.

The plan compares two ways to provision graphs and memory (paper, Section IV, "Static binding and
resource cost"). The paper captures three graphs (F, dI, dW) for every microbatch of every local
stage, `3 * M * L` in all. Every matrix then has one gradient destination for every microbatch, `M *
sum(W)` bytes in all. The contract's checks allow slots (sets of buffers) to be reused. Each stage
then needs only as many slots as it has live tapes at once, and the graphs of these slots. Every
matrix then needs only one destination: the first weight gradient of a step overwrites the
destination, and the later weight gradients accumulate into it.

A tape (what a forward leaves for its backward) is live from its forward until its last reader is
done. The readers are the tape's weight gradient and, if the table shows messages, the sends of the
output and of the input gradient. A send ends at its wait in the table (torch 2.15); in a table
without waits for sends, a send ends at once. The default tables of torch 2.15 wait for every
gradient send at the end of the row, which keeps the tapes of all microbatches live.
`max_outstanding_sends` reduces the number of live tapes. torch's own
`analyze_pipeline_activation_liveness` ignores sends: it counts only the tapes that computations
keep live, `StagePlan.peak_live - StagePlan.held_by_sends`.

QEffect's own runtime keeps a tape live for longer (`runtime_slots`), from the receive of its input.
If two successive stages are on the same rank without a message between them, each stage reads the
results of the other stage directly. Each stage is then a reader of the other stage's tape.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from .actions import SEND_WAITS, SENDS, Kind, Schedule, ScheduleError
from .slots import assign, assign_walked, own_readers

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp16": 2, "fp32": 4})
GRAPHS_PER_TAPE = 3


@attrs.frozen
class Layers:
    """
    The layers of one stage, from which the size of the matrix gradients follows.

    A transformer layer with fused QKV has four matrices: QKV `3h x h`, projection `h x h`, FC1
    `ffn x h` and FC2 `h x ffn`.

    >>> Layers(hidden=4096, ffn=11008).bytes_per_stage
    314572800

    Args:
        hidden: The hidden size h.
        ffn: The feed-forward size.
        per_stage: Number of transformer layers in each stage.
        dtype: The data type of the gradients: bf16, fp16 or fp32.
    """

    hidden: int
    ffn: int
    per_stage: int = 1
    dtype: str = "bf16"

    def __attrs_post_init__(self) -> None:
        """
        Check the dimensions.

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
        """Number of elements of each matrix of one layer."""
        h, ffn = self.hidden, self.ffn
        return {"qkv": 3 * h * h, "proj": h * h, "fc1": ffn * h, "fc2": h * ffn}

    @property
    def bytes_per_stage(self) -> int:
        """Bytes of one gradient for each matrix of a stage."""
        return sum(self.matrices.values()) * self.per_stage * DTYPE_BYTES[self.dtype]


@attrs.frozen
class StagePlan:
    """
    The resources that one stage needs.

    Args:
        stage: The stage.
        forwards: Number of forwards per step.
        peak_live: Peak number of live tapes (what a forward leaves for its backward). A tape is
            live from its forward until its last reader ran.
        peak_deferred: Peak number of deferred weight gradients: those whose dI has run and whose dW
            has not run yet.
        held_by_sends: Number of tapes by which sends raise `peak_live`, because a tape stays live
            until its sends have read its buffers.
    """

    stage: int
    forwards: int
    peak_live: int
    peak_deferred: int
    held_by_sends: int


@attrs.frozen
class Provision:
    """
    The cost of one way to provision a rank.

    Args:
        graphs: Number of captured graphs.
        tapes: Number of tapes (what a forward leaves for its backward) that have their own storage.
        arena_bytes: Bytes of all gradient destinations; `None` without layer sizes.
    """

    graphs: int
    tapes: int
    arena_bytes: int | None


@attrs.frozen
class RankPlan:
    """
    The resources that one rank needs.

    Args:
        rank: The rank.
        stages: The plans of the rank's stages.
        peak_live: Peak number of live tapes over all stages of the rank.
        peak_deferred: Peak number of deferred weight gradients over all stages of the rank.
        delayed: Number of weight gradients that do not directly follow their own input gradient.
        slots: Number of slots (sets of buffers) to provide. This is the sum of the stages' peaks of
            live tapes, because a slot's graphs belong to one stage.
        paper: Cost of the paper's way, with one tape and one destination per microbatch.
        live_slots: Cost with one tape per slot, one cache refresh per stage and accumulating
            destinations.
        outstanding_sends: Peak number of sends that are posted and not yet awaited; `None` if the
            table does not say when sends end.
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
    The resources that a schedule needs.

    Args:
        source: The schedule's source.
        num_microbatches: Number of microbatches per step.
        ranks: The resources that each rank needs.
        layers: The layer sizes of each stage; `None` if they were not given.
    """

    source: str
    num_microbatches: int
    ranks: tuple[RankPlan, ...]
    layers: Layers | None

    @property
    def slots(self) -> dict[int, int]:
        """Number of slots of each stage."""
        return {stage.stage: stage.peak_live for rank in self.ranks for stage in rank.stages}

    def record(self) -> dict[str, Any]:
        """The plan as plain data, for JSON."""
        return attrs.asdict(self)


def plan(schedule: Schedule, layers: Layers | None = None) -> Plan:
    """
    Plan a schedule's tapes, graphs and gradient memory.

    Args:
        schedule: A schedule without findings of `check_ranks`.
        layers: The layer sizes of each stage; without them the byte counts are `None`.
    """
    return Plan(
        source=schedule.source,
        num_microbatches=schedule.num_microbatches,
        ranks=tuple(_plan_rank(schedule, rank, layers) for rank in range(schedule.num_ranks)),
        layers=layers,
    )


def runtime_slots(schedule: Schedule) -> dict[int, int] | None:
    """
    Return the number of slots of each stage in QEffect's own runtime, which reuses slots.

    A tape takes its slot at the receive of its input or, without a receive, at its forward. The
    slot becomes free after the tape's weight gradient and sends. If the next stage is on the same
    rank, its forward must also have run. If the previous stage is on the same rank, its dI must
    also have run.

    Args:
        schedule: A table that `qeffect.schedule.grouping.group_wgrads` returned.

    Returns:
        The number of slots of each stage; `None` if the runtime cannot run the table, because ranks
        or messages are missing.
    """
    several = len(set(schedule.stage_to_rank.values())) > 1
    if not schedule.complete or (several and not schedule.has_comms):
        return None
    found: dict[int, int] = {}
    for atoms in schedule.atoms:
        steps = [(atom.kind, atom.stage, atom.microbatch) for atom in atoms]
        found.update(assign_walked(steps, awaits_sends=schedule.awaits_sends).num_slots)
    return dict(sorted(found.items()))


def _outstanding(schedule: Schedule, rank: int) -> int | None:
    """Return a rank's peak number of unawaited sends; `None` if the table never awaits a send."""
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
