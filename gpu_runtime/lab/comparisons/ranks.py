"""
Compare a guarded pipeline bit by bit with torch's own pipeline over native full backwards.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ...backends.protocol import StageBackend, parameters
from ...ranks.channels import transport_of
from ...ranks.job import Batches, Job
from ...ranks.membership import Limits, Member, all_gather
from ...ranks.pipeline import Passage, Pipeline
from ...ranks.ties import Tie
from ...ranks.worker_assembly import build_worker
from ...runtime import Mode, Runtime
from ...step.clipping import EPSILON, square_sums
from ...step.memory.digests import digests
from ...step.memory.numerical_state import live_state
from ...step.optimizer import Gradients, Optimizer
from ...step.plan.order import Order
from ..sides.torch_pipeline import Batch, NativePipeline
from .native import record_step, rule_for
from .recording import Comparison, Recording, compare

__all__ = [
    "CATEGORIES",
    "PipelineComparison",
    "RecordingPipeline",
    "compare_pipelines",
    "live_tensors",
    "native_pipeline",
    "tensor_digests",
    "totals_of_ranks",
    "train_natively",
]

CATEGORIES = (
    "outputs",
    "input gradients",
    "parameter gradients",
    "parameters",
    "AdamW state",
    "amax histories",
    "scales",
    "caches",
)


def totals_of_ranks(ranks: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """The totals over all ranks, with an entry for every category."""
    return {
        name: (
            sum(r.get(name, (0, 0))[0] for r in ranks),
            sum(r.get(name, (0, 0))[1] for r in ranks),
        )
        for name in (*CATEGORIES, "losses")
    }


@attrs.frozen
class PipelineComparison:
    """
    The result of a comparison on one rank.

    Args:
        comparison: The result of the comparison, by category.
        losses: The guarded losses of this rank, by step and microbatch.
        native_losses: The losses of torch's pipeline, by step and microbatch.
        slots: Number of slots (sets of buffers for one microbatch's tape) of each stage of this
            rank.
    """

    comparison: Comparison
    losses: list[list[float]]
    native_losses: list[list[float]]
    slots: list[int]

    def totals(self) -> dict[str, tuple[int, int]]:
        """Numbers of compared and of differing values, by category and for the losses."""
        found = {c.category: (c.compared, c.mismatched) for c in self.comparison.categories}
        differ = sum(
            a != b
            for x, y in zip(self.losses, self.native_losses, strict=True)
            for a, b in zip(x, y, strict=True)
        )
        return {**found, "losses": (sum(map(len, self.native_losses)), differ)}

    @property
    def same(self) -> bool:
        """Whether all values are equal, including losses."""
        return not self.comparison.mismatched and self.losses == self.native_losses


class RecordingPipeline(Pipeline):
    """
    A pipeline that records its outputs, gradients and state; `recording` is set before its first
    step.
    """

    recording: Recording | None = None

    @contextmanager
    def unlogged_walks(self, run: Runtime) -> Iterator[None]:
        """The same context as `Pipeline.unlogged_walks`, in which nothing is recorded either."""
        recording, self.recording = self.recording, None
        try:
            with super().unlogged_walks(run):
                yield
        finally:
            self.recording = recording

    def forward(self, p: Passage) -> None:
        """Run F, then record its outputs and the state after F."""
        super().forward(p)
        if self.recording is not None:
            outputs = () if p.last else self._slot(p).outputs
            self._note(p, f"F{self.drawn(p)}", "outputs", outputs)

    def dgrad(self, p: Passage) -> None:
        """Run dI, then record its input gradients and the state after dI."""
        super().dgrad(p)
        if self.recording is not None:
            self._note(p, f"I{self.drawn(p)}", "input gradients", self._slot(p).dgrads)

    def step(self, optimizer: Optimizer) -> Gradients:
        """Run one step, then record the state after the step."""
        number = self.runtime.epoch
        gradients = super().step(optimizer)
        self.runtime.handoff.synchronize()  # what follows is read on another stream
        stages = list(self.runtime.stages.values())
        record_step(self.recording, number, stages, gradients, optimizer=optimizer)
        return gradients

    def finalize(self) -> Gradients:
        """Finalize, and record gradients before the update."""
        gradients = super().finalize()
        self.runtime.handoff.synchronize()
        stages = list(self.runtime.stages.values())
        record_step(self.recording, self.runtime.epoch, stages, gradients, before_update=True)
        return gradients

    def _slot(self, p: Passage) -> Any:
        return self.runtime.memories[p.stage.index].table[p.ref.slot]

    def _note(self, p: Passage, action: str, category: Any, found: Any) -> None:
        assert self.recording is not None
        where = f"step {p.key.epoch} {p.stage.index}{action}"
        self.recording.add_all(category, where, {str(n): t for n, t in enumerate(found)})
        self.recording.add_state(where, live_state(self.runtime.domain))


def train_natively(
    member: Member, job: Job, steps: int, backend: str, recording: Recording | None
) -> NativePipeline:
    """Train a job natively under torch's schedule class; every rank calls this function."""
    run = native_pipeline(member, job, backend, recording)
    for step in range(steps):
        job.prepare(step, run.optimizer)
        run.step()
    return run


def native_pipeline(
    member: Member,
    job: Job,
    backend: str,
    recording: Recording | None = None,
    *,
    batch: Batch | None = None,
    optimizer: Callable[[list[StageBackend]], Optimizer] | None = None,
    look: Callable[[Gradients], None] = lambda _: None,
) -> NativePipeline:
    """
    A job's native pipeline before its first step; every rank calls this function.

    Native stages keep all activations, also if the job's own stages recompute some. The pipeline's
    process groups last as long as the process.

    Args:
        member: This process.
        job: The pipeline and its model: schedule, mapping to ranks and dimensions.
        backend: `reference` or `transformer-engine`.
        recording: Recording that receives the results, or None to record nothing.
        batch: The data; None for the job's data.
        optimizer: Function that makes the optimizer; None for the job's optimizer.
        look: Function that is called with the gradients of every step, before the update.
    """
    replica, place = divmod(member.rank, job.pp)
    groups = [
        dist.new_group(job.ranks(r), backend=transport_of(member.device)) for r in range(job.dp)
    ]
    order = Order.of_rank(job.table(), place)
    fuse = rule_for(order, job.rule) == "main_grad"
    after = _after(member, job, place)
    shared = _amax_over(member, job, place) if job.amax == "replicas" and job.dp > 1 else None

    def reduce(gradients: Gradients) -> Tensor | None:
        if shared is not None:
            shared(live_state(run.domain))
        scale = None if after is None else after(gradients)
        look(gradients)
        return scale

    keeping = attrs.evolve(job, recompute=())
    run = NativePipeline(
        job.cls_name,
        keeping.stages(
            order.stages, member.device, backend, loss=False, fuse=fuse, replica=replica
        ),
        job.num_stages,
        order,
        job.microbatches,
        batch or job.batch(member.device, replica),
        job.loss,
        groups[replica],
        rule=job.rule,
        walks=job.walks,
        recording=recording,
        reduce=reduce,
        optimizer=optimizer or job.optimizer,
    )
    run.calibrate(
        lambda: None if shared is None else shared(live_state(run.domain)),
        lambda converged: all(all_gather(member, converged)),
    )
    return run


def compare_pipelines(
    member: Member,
    job: Job,
    steps: int,
    backend: str = "reference",
    *,
    mode: Mode = "eager",
    limits: Limits | None = None,
    event_log: str | os.PathLike[str] | BinaryIO | bool | None = None,
) -> PipelineComparison:
    """
    Run a job on both sides, native and guarded, and compare every bit; every rank calls this
    function.

    Args:
        member: This process.
        job: The pipeline and its model: schedule, mapping to ranks and dimensions.
        steps: Number of optimizer steps.
        backend: `reference` or `transformer-engine`.
        mode: How the guarded side's steps run: ``eager`` or ``replays``.
        limits: Timeouts in seconds.
        event_log: File of the guarded side's event log.
    """
    theirs, ours = Recording("torch's pipeline, native"), Recording("guarded pipeline")
    oracle = train_natively(member, job, steps, backend, theirs)
    worker = build_worker(
        member,
        job,
        backend,
        mode=mode,
        limits=limits,
        event_log=event_log,
        pipeline=RecordingPipeline,
    )
    assert isinstance(worker.pipeline, RecordingPipeline)
    worker.pipeline.recording = ours
    for step in range(steps):
        job.prepare(step, worker.optimizer)
        worker.step()
    feed = worker.feed
    assert isinstance(feed, Batches)
    worker.close()
    # A rank with one stage, at an end of the pipeline, has no outputs or no input gradients.
    held = [name for name in CATEGORIES if theirs.values.get(name) or ours.values.get(name)]
    return PipelineComparison(
        compare(theirs, ours, categories=held),
        [feed.losses_of(step) for step in range(steps)],
        oracle.losses,
        [own.slots for own in worker.runtime.contract.stages],
    )


def _after(member: Member, job: Job, place: int) -> Callable[[Gradients], Tensor | None] | None:
    """
    Return a function that does to all gradients what native training does: sum over replicas, add
    tied copies, and clip.
    """
    sums = [_sum_over(member, job, place)] if job.dp > 1 else []
    sums += [_sum_of_copies(member, job, tie) for tie in job.ties]
    limit = job.clipping.max_norm
    ranks = job.ranks(member.rank // job.pp)
    second = [place for tie in job.ties for place in tie.copies[1:]]

    def after(gradients: Gradients) -> Tensor | None:
        for reduce in sums:
            reduce(gradients)
        return None if limit is None else clip(gradients, limit)

    def clip(gradients: Gradients, limit: float) -> Tensor:
        own = {part: float(squares) for part, squares in square_sums(gradients, second).items()}
        said = all_gather(member, own)
        parts = {part: squares for rank in ranks for part, squares in said[rank].items()}
        norm = math.sqrt(sum(parts[part] for part in sorted(parts)))
        wanted = torch.tensor(limit, dtype=torch.float64) / (norm + EPSILON)
        return wanted.clamp(max=1.0).float().to(member.device)

    return after if sums or limit is not None else None


def _sum_over(member: Member, job: Job, place: int) -> Callable[[Gradients], None]:
    """Return a function that sums gradients over replicas, tensor by tensor, after all actions."""
    group = _replicas_of(member, job, place)

    def reduce(gradients: Gradients) -> None:
        for named in gradients.values():
            for gradient in named.values():
                dist.all_reduce(gradient, group=group)

    return reduce


def _amax_over(member: Member, job: Job, place: int) -> Callable[[Mapping[str, Tensor]], None]:
    """
    Return a function that takes the replicas' largest amax and smallest scale, tensor by tensor.
    """
    group = _replicas_of(member, job, place)

    def share(state: Mapping[str, Tensor]) -> None:
        for name, tensor in state.items():
            least = name.endswith("scale")
            dist.all_reduce(tensor, dist.ReduceOp.MIN if least else dist.ReduceOp.MAX, group=group)

    return share


def _replicas_of(member: Member, job: Job, place: int) -> Any:
    groups = [
        dist.new_group(list(range(p, job.world, job.pp)), backend=transport_of(member.device))
        for p in range(job.pp)
    ]
    return groups[place]


def _sum_of_copies(member: Member, job: Job, tie: Tie) -> Callable[[Gradients], None]:
    """
    Return a function that adds the two gradients of a tied weight, in the order of the weight's
    copies.
    """
    home = job.table().stage_to_rank
    places = [home[stage] for stage, _ in tie.copies]
    own = None
    for replica in range(job.dp if places[0] != places[1] else 0):
        ranks = [job.ranks(replica)[place] for place in places]
        group = dist.new_group(ranks, backend=transport_of(member.device))
        own = group if member.rank in ranks else own

    def reduce(gradients: Gradients) -> None:
        mine = [gradients[stage][name] for stage, name in tie.copies if stage in gradients]
        if not mine:
            return
        both = mine
        if len(mine) == 1:
            both = [torch.empty_like(mine[0]) for _ in range(2)]
            dist.all_gather(both, mine[0], group=own)
            if places[0] > places[1]:  # a group's ranks are in the world's order
                both.reverse()
        total = both[0] + both[1]
        for gradient in mine:
            gradient.copy_(total)

    return reduce


def live_tensors(stages: Mapping[int, StageBackend], optimizer: Optimizer) -> dict[str, Tensor]:
    """
    Every tensor that a step changes, without a copy: parameters, numerical state, AdamW's state.
    """
    named: dict[str, Tensor] = {
        f"{index}.{name}": parameter.detach()
        for index, stage in stages.items()
        for name, parameter in parameters(stage).items()
    }
    named.update(live_state(next(iter(stages.values())).domain))
    named.update(optimizer.state_tensors())
    return named


def tensor_digests(stages: Mapping[int, StageBackend], optimizer: Optimizer) -> dict[str, str]:
    """Digests of every tensor that a step changes."""
    held = live_tensors(stages, optimizer)
    return {name: digests([tensor.cpu()])[0] for name, tensor in held.items()}
