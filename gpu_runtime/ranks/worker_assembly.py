"""
Build one rank's pipeline from the description of a job.
"""

from __future__ import annotations

import os
from functools import partial
from typing import BinaryIO

from qeffect.destination_registry import DestinationRegistry

from ..runtime import Mode, RuntimeConfig
from .job import Batches, Job
from .membership import Limits, Member
from .pipeline import Pipeline
from .worker import Worker

__all__ = ["build_worker"]


def build_worker(
    member: Member,
    job: Job,
    backend: str,
    *,
    mode: Mode = "eager",
    limits: Limits | None = None,
    event_log: str | os.PathLike[str] | BinaryIO | bool | None = None,
    tagged: bool = True,
    pipeline: type[Pipeline] = Pipeline,
    repeat: bool = False,
    clip_norm: float | None = None,
    skip_nonfinite: bool = False,
    registry: DestinationRegistry | None = None,
    gradient_digests: bool = False,
    zero_stages: bool = False,
    replay_every: int = 0,
) -> Worker:
    """
    Build this rank's guarded pipeline of a job, ready for its first step. Every rank must call this
    function.

    Args:
        member: This process.
        job: The schedule, the mapping and the model.
        backend: ``reference`` or ``transformer-engine``.
        mode: How a step runs.
        limits: Timeouts in seconds.
        event_log: Where to write this rank's event log: a path, a binary file, or True to keep the
            log in memory. None writes no log.
        tagged: Whether messages carry tags, if the transport has tags.
        pipeline: The pipeline's class, for example a subclass that records the actions that it
            runs.
        repeat: Whether every step gets the data of the first step.
        clip_norm: Upper limit of the norm over the gradients of all ranks; None takes the job's
            limit.
        skip_nonfinite: Whether every rank skips an update if the norm is not finite. The job's
            option `skip_nonfinite` has the same effect.
        registry: Records the gradient destinations (the memory that dW writes) of all runtimes in
            this process. Destinations of two runtimes must not overlap.
        gradient_digests: Whether to compute the digest of each gradient in every step.
        zero_stages: Whether to record in every step which stages have only zero gradients.
        replay_every: With N above 0, every N-th step runs twice, and the gradients of both runs are
            compared. With 0 no step runs twice.

    Raises:
        ScheduleError: The table is refused.
        BackendError: The ranks, stages or options do not fit each other (the errors of `Worker`).
        Refused: One rank declares a weight as tied, but another rank that holds a copy does not.
    """
    optimizer = partial(job.optimizer, capturable=True) if mode == "one launch" else job.optimizer
    config = RuntimeConfig(
        rule=job.rule,
        provisioning=job.provisioning,
        mode=mode,
        amax=job.amax,
        walks=job.walks,
        group=job.wgrad_group,
    )
    worker = Worker(
        member,
        job.table(),
        job.pp,
        lambda indices: job.stages(indices, member.device, backend, replica=member.rank // job.pp),
        lambda replica: Batches(job.batch(member.device, replica), member.device, repeat=repeat),
        config,
        limits=limits,
        optimizer=optimizer,
        event_log=event_log,
        tagged=tagged,
        pipeline=pipeline,
        clip_norm=job.clipping.max_norm if clip_norm is None else clip_norm,
        skip_nonfinite=skip_nonfinite or job.clipping.skip_nonfinite,
        ties=job.ties,
        registry=registry,
        gradient_digests=gradient_digests,
        zero_stages=zero_stages,
        replay_every=replay_every,
    )
    worker.heed_termination()
    return worker
