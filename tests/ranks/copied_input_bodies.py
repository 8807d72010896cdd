"""What the ranks run in the tests of a data feed with its own stream."""

from __future__ import annotations

from typing import Any

import pytest

from qeffect.gpu_runtime.ranks.consent import StoppedError
from qeffect.gpu_runtime.ranks.job import Batches, Job
from qeffect.gpu_runtime.ranks.membership import join
from qeffect.gpu_runtime.ranks.worker import Worker
from qeffect.gpu_runtime.runtime import RuntimeConfig
from qeffect.gpu_runtime.step.actions import GuardedActions
from tests.ranks.bodies import LIMITS, bits


def made(member: Any, job: Job, feeder: str | None, every: int) -> Worker:
    """
    A worker whose feed copies data on the stream of the caller `loader`, or on the graph stream.
    """
    return Worker(
        member,
        job.table(),
        job.pp,
        lambda indices: job.stages(indices, member.device, "reference"),
        lambda replica: Batches(job.batch(member.device, replica), member.device),
        RuntimeConfig(callers=("main", "loader"), feeder=feeder),
        limits=LIMITS,
        replay_every=every,
    )


def trained(job: Job, steps: int, every: int = 0) -> dict[str, Any]:
    """
    Run steps with and without a separate feed stream; return the bits, and the stages that copy.
    """
    member = join("cpu", LIMITS)
    found, copies = [], []
    for feeder in ("loader", None):
        worker = made(member, job, feeder, every)
        for _ in range(steps):
            worker.step()
        found.append(bits(worker))
        copies.append([c.stage for c in worker.runtime.contract.stages if c.copies_input])
        worker.close()
    return {"same": found[0] == found[1], "of": len(found[0]), "copies": copies}


def without(job: Job, left_out: str) -> str:
    """
    Run a step in which the feed does not declare one of its waits; return the clause that refuses
    the step.
    """
    worker = made(join("cpu", LIMITS), job, "loader", 0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GuardedActions, left_out, lambda *_: None)
        try:
            worker.step()
        except StoppedError as stopped:
            return str(stopped.cause.clause)
    return ""
