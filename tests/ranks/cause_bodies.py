"""What the ranks run in the tests of causes."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import attrs

from qeffect.gpu_runtime.ranks.consent import Consent, DisagreementError, StoppedError
from qeffect.gpu_runtime.ranks.double_run import DoubleRun
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.membership import Limits, join
from qeffect.gpu_runtime.ranks.one_launch import OneLaunch
from qeffect.gpu_runtime.ranks.worker_assembly import build_worker
from tests.ranks import bodies, double_bodies, recorded

LIMITS = Limits(start=60.0, message=20.0, commit=20.0, grace=1.0)


def ended_before_it_disagrees(job: Job) -> dict[str, Any]:
    """Rank 0 exchanges two sends; the launcher ends rank 0 when it finds that messages differ."""
    member = join("cpu", LIMITS)
    worker = build_worker(member, job, "reference", limits=LIMITS, tagged=False)
    if member.rank == 0:
        bodies.exchanged("0SEND_F0", "0SEND_F1")(worker)
        agree = Consent.agree

        def end(*given: Any) -> list[float]:
            try:
                return agree(*given)
            except DisagreementError:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(LIMITS.commit)
                raise

        Consent.agree = end  # type: ignore[method-assign,assignment]
    return bodies._step(worker)


def killed_before_it_differs(job: Job, epoch: int) -> dict[str, Any]:
    """
    The two runs of one launch differ on rank 1, which is killed once its host has read the votes.
    """
    recorded.install()
    worker = double_bodies.made(job, 1, "one launch")
    runner = OneLaunch(worker)
    victim = worker.member.rank == 1

    def between() -> None:
        double = worker.double
        if victim and double is not None and worker.runtime.epoch == epoch:
            recorded.STREAM.submit(lambda: double_bodies.flip(double.first.values, 5, 0))

    tell = DoubleRun.require_told_equal

    def die(self: DoubleRun, words: Any) -> None:
        if any(words.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        tell(self, words)

    if victim:
        DoubleRun.require_told_equal = die  # type: ignore[method-assign]
    runner.between = between
    while True:
        try:
            runner.step()
        except StoppedError as stopped:
            return attrs.asdict(stopped.cause)
