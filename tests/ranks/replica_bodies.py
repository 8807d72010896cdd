"""What the ranks run in the tests of replicas."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from qeffect.gpu_runtime.ranks.consent import StoppedError, action_name
from qeffect.gpu_runtime.ranks.job import Batches, Job
from qeffect.gpu_runtime.ranks.membership import all_gather, join
from qeffect.gpu_runtime.ranks.pipeline import Pipeline
from qeffect.gpu_runtime.ranks.replicas import Replicas
from qeffect.gpu_runtime.ranks.worker import Worker
from qeffect.gpu_runtime.runtime import RuntimeConfig
from qeffect.gpu_runtime.step.optimizer import Gradients, Optimizer
from tests.ranks.bodies import LIMITS, bits, once_more, parameters_of


class _Counting(Pipeline):
    """
    A pipeline that records in how many calls each bucket was reduced, and the reduced gradients.
    """

    def note(self) -> None:
        """Before the first step."""
        self.calls: dict[str, list[int]] = {}
        replicas: Any = self.runtime.reducer
        begin = Replicas.__call__

        def started(bucket: Any, gradients: Any) -> Any:
            found = begin(replicas, bucket, gradients)
            self.calls.setdefault(str(bucket), []).append(len(found.works))
            return found

        self.runtime.reducer = started


def _made(job: Job, dtype: torch.dtype, **options: Any) -> Worker:
    member = join("cpu", LIMITS)
    master = None if dtype == torch.bfloat16 else dtype

    def optimizer(stages: Any) -> Optimizer:
        return Optimizer(stages, master_dtype=master)

    return Worker(
        member,
        job.table(),
        job.pp,
        lambda indices: job.stages(indices, member.device, "reference"),
        lambda replica: Batches(job.batch(member.device, replica), member.device),
        RuntimeConfig(
            rule=job.rule,
            provisioning=job.provisioning,
            dtype=dtype,
            weights_sum=(1, job.dp),  # also where a mean divides once more
        ),
        limits=LIMITS,
        optimizer=optimizer,
        **options,
    )


def _options(name: str) -> dict[str, Any]:
    return {"together": name != "one by one", "mean": name == "mean"}


def together(job: Job, steps: int, dtype: str) -> dict[str, Any]:
    """
    Train a job whose gradients are reduced in one call, and one by one; return the calls, and what
    differs.
    """
    found, calls = [], []
    for name in ("together", "one by one"):
        worker = _made(job, getattr(torch, dtype), pipeline=_Counting, **_options(name))
        assert isinstance(worker.pipeline, _Counting)
        worker.pipeline.note()
        for _ in range(steps):
            worker.step()
        found.append(bits(worker))
        calls.append(worker.pipeline.calls)
        replica, place = worker.replica, worker.member.rank % job.pp
        member = worker.member
        worker.close()
    own = {n: found[0][n] for n in worker.optimizer.state_tensors()}
    peers = [word for where, word in all_gather(member, (place, own)) if where == place]
    return {
        "differ": [n for n in found[0] if found[0][n] != found[1][n]],
        "of": len(found[0]),
        "calls": calls,
        "replica": replica,
        "peers": all(peer == peers[0] for peer in peers),
    }


class _Once(Pipeline):
    """A pipeline that keeps a copy of the gradients of its first step."""

    kept: dict[str, torch.Tensor]

    def finalize(self) -> Gradients:
        found = super().finalize()
        self.kept = {f"{s}.{n}": g.clone() for s, named in found.items() for n, g in named.items()}
        return found


def meant(job: Job, dtype: str) -> dict[str, Any]:
    """The first step's gradients as a sum and as a mean."""
    kept = []
    for mean in (False, True):
        worker = _made(job, getattr(torch, dtype), pipeline=_Once, mean=mean)
        worker.step()
        assert isinstance(worker.pipeline, _Once)
        kept.append(worker.pipeline.kept)
        worker.close()
    halves = {n: g / job.dp for n, g in kept[0].items()}
    return {
        "differ": [n for n in halves if not torch.equal(halves[n], kept[1][n])],
        "of": len(halves),
        "sum": max(float(g.abs().max()) for g in kept[0].values()),
    }


def disturbed(job: Job, victim: int, change: tuple[str, ...]) -> dict[str, Any]:
    """
    Run a step in which one rank starts reductions in a wrong way, and run the step again.

    Args:
        job: What to train.
        victim: The rank.
        change: `early`, with an action and the action before which it is placed; `behind`, with an
            action and the action after which it is placed; or `twice`, with one action.
    """
    worker = _made(job, torch.bfloat16)
    worker.step()
    program = list(worker.pipeline.program)
    if worker.member.rank == victim:
        how, *names = change
        entries = worker.pipeline.program
        at = [next(n for n, e in enumerate(program) if action_name(e.atom) == x) for x in names]
        if how in ("early", "behind"):
            entries.insert(at[1], entries.pop(at[0]))
        else:
            entries.insert(at[0], entries[at[0]])

    def mend() -> None:
        worker.pipeline.program[:] = program

    said = once_more(worker, mend)
    said["epoch"] = worker.runtime.epoch
    worker.close()
    return said


def unreduced(job: Job, victim: int) -> dict[str, Any]:
    """
    Let the hook of one rank never fire, so that the rank reaches its commit without any reduction.
    """
    worker = _made(job, torch.bfloat16)
    worker.step()
    if worker.member.rank == victim:
        runtime: Any = worker.runtime
        runtime._reductions.start_of = lambda *_: None
        runtime._reductions.end = lambda *_: None
    before = parameters_of(worker)
    try:
        worker.step()
    except StoppedError as stopped:
        moved = [n for n, d in parameters_of(worker).items() if before[n] != d]
        return {"cause": attrs.asdict(stopped.cause), "moved": moved}
    return {"cause": None, "moved": []}
