"""What the ranks run in the tests of clipping."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from qeffect.gpu_runtime.backends.protocol import BackendError, parameters
from qeffect.gpu_runtime.lab.comparisons.native import rule_for
from qeffect.gpu_runtime.lab.sides.torch_pipeline import NativePipeline
from qeffect.gpu_runtime.ranks.consent import StoppedError
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.membership import Member, all_gather, join
from qeffect.gpu_runtime.ranks.pipeline import Pipeline
from qeffect.gpu_runtime.ranks.worker_assembly import build_worker
from qeffect.gpu_runtime.step.memory.digests import digests
from qeffect.gpu_runtime.step.memory.numerical_state import live_state
from qeffect.gpu_runtime.step.optimizer import Gradients
from qeffect.gpu_runtime.step.plan.order import Order
from tests.ranks.bodies import LIMITS, bits


class _Plain(NativePipeline):
    """Torch's pipeline, whose gradients are clipped by plain torch over all parameters."""

    member: Member
    job: Job
    max_norm: float | None
    groups: list[Any]
    spoiled: tuple[int, ...] = ()

    def follow(self, gradients: Gradients) -> None:
        """Sum over replicas, then clip by the norm of every rank's gradients."""
        if self.job.dp > 1:
            for named in gradients.values():
                for gradient in named.values():
                    dist.all_reduce(gradient, group=self.groups[self.member.rank % self.job.pp])
        whole: dict[int, dict[str, Tensor]] = {}
        said = all_gather(self.member, {i: dict(named) for i, named in gradients.items()})
        for rank in self.job.ranks(0):
            whole.update(said[rank])
        every = [g.double() for stage in sorted(whole) for g in whole[stage].values()]
        total = torch.nn.utils.get_total_norm(every)
        self.totals.append(float(total))
        if self.max_norm is not None:
            factor = (self.max_norm / (total + 1e-6)).clamp(max=1.0).float()
            for named in gradients.values():
                for gradient in named.values():
                    gradient.mul_(factor)

    def run(self, steps: int) -> None:
        """Run steps; leave out the update of spoiled steps."""
        self.totals: list[float] = []
        update = self.optimizer.step
        for step in range(steps):
            left_out = step in self.spoiled
            self.optimizer.step = (lambda _: None) if left_out else update  # type: ignore[assignment]
            self.step()


def _plain(member: Member, job: Job, max_norm: float | None, spoiled: tuple[int, ...]) -> _Plain:
    replica, place = divmod(member.rank, job.pp)
    pipes = [dist.new_group(job.ranks(r)) for r in range(job.dp)]
    order = Order.of_rank(job.table(), place)
    run = _Plain(
        job.cls_name,
        job.stages(
            order.stages,
            member.device,
            "reference",
            loss=False,
            fuse=rule_for(order, job.rule) == "main_grad",
        ),
        job.num_stages,
        order,
        job.microbatches,
        job.batch(member.device, replica),
        job.loss,
        pipes[replica],
        rule=job.rule,
    )
    run.member, run.job, run.max_norm, run.spoiled = member, job, max_norm, spoiled
    run.groups = [dist.new_group(list(range(p, job.world, job.pp))) for p in range(job.pp)]
    run.reduce = run.follow
    return run


def _bits(stages: Any, domain: Any, optimizer: Any) -> dict[str, str]:
    named = {f"{s.index}.{n}": t for s in stages for n, t in parameters(s).items()}
    named.update(live_state(domain))
    named.update(optimizer.state_tensors())
    return dict(zip(named, digests(list(named.values())), strict=True))


class _Spoiling(Pipeline):
    """A pipeline that writes a value into one gradient of some epochs, after all reductions."""

    epochs: tuple[int, ...] = ()
    value: float = math.nan

    def finalize(self) -> Gradients:
        gradients = super().finalize()
        if self.runtime.epoch in self.epochs:
            named = gradients[max(gradients)]
            next(iter(named.values())).view(-1)[3] = self.value
        return gradients


def clipped(
    jobs: list[Job],
    steps: int,
    max_norm: float | None,
    spoil: tuple[int, int, float] | None = None,
) -> list[dict[str, Any]]:
    """
    Train every job guarded with one norm over all ranks, and natively with plain torch's clipping.

    Args:
        jobs: What to train, in turn.
        steps: Optimizer steps.
        max_norm: The limit of the norm.
        spoil: A rank, an epoch, and the value that is written into one reduced gradient of this
            rank.
    """
    member = join("cpu", LIMITS)
    found = []
    for job in jobs:
        skips = spoil is not None
        oracle = _plain(member, job, max_norm, () if spoil is None else (spoil[1],))
        oracle.run(steps)
        worker = build_worker(
            member, job, "reference", limits=LIMITS, pipeline=_Spoiling,
            clip_norm=max_norm, skip_nonfinite=skips,
        )  # fmt: skip
        assert isinstance(worker.pipeline, _Spoiling)
        if spoil is not None and member.rank == spoil[0]:
            worker.pipeline.epochs, worker.pipeline.value = (spoil[1],), spoil[2]
        norms, moved = [], []
        for _ in range(steps):
            before = bits(worker)
            worker.step()
            assert worker.norm is not None
            norms.append([repr(worker.norm.total), worker.norm.factor, worker.norm.skipped])
            kept = live_state(worker.runtime.domain)
            after = {n: d for n, d in bits(worker).items() if n not in kept}
            moved.append(sum(before.get(n, d) != d for n, d in after.items()))
        ours = bits(worker)
        theirs = _bits(oracle.stages, oracle.domain, oracle.optimizer)
        steps_of = {float(v) for n, v in worker.optimizer.state_tensors().items() if ".step" in n}
        found.append(
            {
                "differ": [n for n in theirs if theirs[n] != ours[n]],
                "of": len(theirs),
                "epoch": worker.runtime.epoch,
                "norms": norms,
                "theirs": oracle.totals,
                "moved": moved,
                "counted": sorted(steps_of),
                "losses": worker.feed.losses_of(steps - 1),
                "native losses": oracle.losses[-1],
            }
        )
        worker.close()
    return found


def mapped(jobs: list[Job], steps: int) -> list[list[str]]:
    """The norms of each step under each job; the jobs place the same stages on other ranks."""
    member = join("cpu", LIMITS)
    found = []
    for job in jobs:
        worker = build_worker(member, job, "reference", limits=LIMITS, skip_nonfinite=True)
        norms = []
        for _ in range(steps):
            worker.step()
            assert worker.norm is not None
            norms.append(repr(worker.norm.total))
        worker.close()
        found.append(norms)
    return found


def diverged(job: Job) -> dict[str, Any]:
    """Let the second replica's reduced gradients be finite but differ from the first replica's."""
    member = join("cpu", LIMITS)
    worker = build_worker(
        member, job, "reference", limits=LIMITS, pipeline=_Spoiling, skip_nonfinite=True
    )
    assert isinstance(worker.pipeline, _Spoiling)
    if member.rank == member.world - 1:
        worker.pipeline.epochs, worker.pipeline.value = (0,), 3.0
    before = bits(worker)
    try:
        worker.step()
    except StoppedError as stopped:
        kept = live_state(worker.runtime.domain)
        moved = [n for n, d in bits(worker).items() if n not in kept and before[n] != d]
        return {"cause": attrs.asdict(stopped.cause), "moved": moved}
    return {"cause": None, "moved": []}


def unlike(job: Job) -> str:
    """Give one rank another norm limit than the other ranks."""
    member = join("cpu", LIMITS)
    try:
        build_worker(member, job, "reference", limits=LIMITS, clip_norm=1.0 + member.rank)
    except BackendError as error:
        return str(error)
    return "accepted"
