"""
A job's pipeline on one rank, from the job's description.
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
    Build this rank's guarded pipeline of a job, ready for its first step; every rank calls it.

    Args:
        member: This process.
        job: The schedule, the mapping and the model.
        backend: ``reference`` or ``transformer-engine``.
        mode: How a step runs.
        limits: Timeouts in seconds.
        event_log: Where this rank's event log goes, as for `Runtime`.
        tagged: Whether messages are tagged where the transport knows tags.
        pipeline: The pipeline's class; a subclass may record what it runs.
        repeat: Give every step the data of the first.
        clip_norm: As for `Worker`; None takes the job's.
        skip_nonfinite: As for `Worker`; it is also on if the job sets it.
        registry: Gradient destinations of the process's other runtimes, as for `Runtime`.
        gradient_digests: As for `Worker`.
        zero_stages: As for `Worker`.
        replay_every: As for `Worker`.

    Raises:
        ScheduleError: The table is refused.
        BackendError: As for `Worker`.
        Refused: As for `Worker`.
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
