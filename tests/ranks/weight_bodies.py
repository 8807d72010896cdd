"""What the ranks run in the tests of loss weights."""

from __future__ import annotations

from typing import Any

import attrs

from qeffect.gpu_runtime.backends.ends import LossShare, mean_cross_entropy
from qeffect.gpu_runtime.ranks.consent import StoppedError
from qeffect.gpu_runtime.ranks.job import Job, mean_squared_error
from qeffect.gpu_runtime.ranks.membership import join
from qeffect.gpu_runtime.ranks.worker_assembly import build_worker
from qeffect.gpu_runtime.training.language_model import LanguageJob

from .bodies import LIMITS, parameters_of


@attrs.frozen
class Divided(Job):
    """A job whose loss is divided by a given number."""

    parts: int = 1

    @property
    def loss(self) -> LossShare:
        """The mean squared error of a microbatch, divided by that number."""
        return LossShare(mean_squared_error, self.parts)


@attrs.frozen
class DividedLanguage(LanguageJob):
    """A language model whose loss is divided by a given number."""

    parts: int = 1

    @property
    def loss(self) -> LossShare:
        """The mean negative log likelihood of a microbatch, divided by that number."""
        return LossShare(mean_cross_entropy, self.parts)


def stepped(jobs: list[Job]) -> list[dict[str, Any]]:
    """Run a step of each job; return how the step ended, and which tensors of the state changed."""
    member = join("cpu", LIMITS)
    said = []
    for job in jobs:
        worker = build_worker(member, job, "reference", limits=LIMITS)
        before = parameters_of(worker)
        clause = ""
        try:
            worker.step()
        except StoppedError as stopped:
            clause = stopped.cause.clause or stopped.cause.text
        after = parameters_of(worker)
        said.append(
            {
                "clause": clause,
                "epoch": worker.runtime.epoch,
                "sums": [
                    None if config.weights_sum is None else list(config.weights_sum)
                    for config in worker.runtime.contract.stages
                ],
                "moved": before != after,
            }
        )
        worker.close()
    return said
