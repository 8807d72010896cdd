"""What the ranks of these tests run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qeffect.gpu_runtime.evidence.comparison import digests
from qeffect.gpu_runtime.parallel.compare import guarded
from qeffect.gpu_runtime.parallel.model import Job
from qeffect.gpu_runtime.parallel.world import Limits, Worker, join
from qeffect.gpu_runtime.training.checkpoint import Checkpoints
from qeffect.gpu_runtime.training.state import Persistent, by_layer

LIMITS = Limits(start=60.0, message=20.0, commit=20.0, grace=2.0)


def must(job: Job) -> dict[str, Any]:
    """What numbers mean in a job, whatever its mapping: what a step takes, and of which model."""
    c = job.config
    return {
        "layers": job.layers * job.num_stages,
        "hidden": c.hidden,
        "ffn": c.ffn,
        "heads": c.heads,
        "sequence": c.sequence,
        "batch": c.batch,
        "microbatches": job.microbatches * job.dp,
        "seed": job.seed,
    }


def named(worker: Worker, job: Job) -> Persistent:
    """The tensors of a rank by the model's names."""
    place = worker.member.rank % worker.pp
    naming = by_layer(job.layers)
    return Persistent.of(worker.runtime, worker.optimizer, naming, worker.replica, place)


def bits(worker: Worker, job: Job) -> dict[str, str]:
    """A digest of each."""
    held = named(worker, job).tensors
    return dict(zip(held, digests(list(held.values())), strict=True))


def train(
    job: Job,
    folder: str,
    until: int,
    *,
    save_at: tuple[int, ...] = (),
    resume: bool = False,
    replicas: Any = "same",
    asynchronous: bool = False,
) -> dict[str, Any]:
    """
    Train to an epoch, saving after some and going on from the latest where asked.

    Returns:
        Where it began and ended, the losses of each step, and every persistent tensor as digests
        at the beginning and at the end.
    """
    member = join("cpu", LIMITS)
    worker = guarded(member, job, "reference", limits=LIMITS)
    checkpoints = Checkpoints(folder, asynchronous=asynchronous)
    naming = by_layer(job.layers)
    free: Mapping[str, Any] = {}
    if resume:
        path = checkpoints.latest()
        assert path is not None
        free = checkpoints.load(path, worker, naming, must(job), replicas=replicas)
    began, first = worker.runtime.epoch, bits(worker, job)
    saved = {}
    while worker.runtime.epoch < until:
        worker.step()
        epoch = worker.runtime.epoch
        if epoch in save_at:
            saved[epoch] = bits(worker, job)
            checkpoints.save(worker, naming, must(job), {"position": epoch * 7})
    checkpoints.wait()
    feed: Any = worker.feed
    said = {
        "began": began,
        "epoch": worker.runtime.epoch,
        "free": free,
        "changed": checkpoints.changed,
        "losses": {step: feed.losses_of(step) for step in range(began, until)},
        "first": first,
        "saved": saved,
        "last": bits(worker, job),
    }
    checkpoints.close()
    worker.close()
    return said


def train_saving(job: Job, folder: str, until: int, save_at: tuple[int, ...]) -> dict[str, Any]:
    """A run from the beginning."""
    return train(job, folder, until, save_at=save_at)


def train_on(job: Job, folder: str, until: int) -> dict[str, Any]:
    """A run from the latest checkpoint."""
    return train(job, folder, until, resume=True)
