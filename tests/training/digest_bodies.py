"""What the ranks run in the tests of digests."""

from __future__ import annotations

from typing import Any

import torch

from qeffect.gpu_runtime.training.step_runner import StepRunner
from tests.ranks import recorded

from .language_bodies import trained


def in_turn(cases: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    """Run the command several times in turn, in the same process."""
    return [flipped(**case) for case in cases]


def flipped(
    argv: list[str], *, step: int = -1, weight: str = "", rank: int = 0
) -> tuple[int, str, str]:
    """
    `qeffect runtime train` in which one bit of a weight flips before a step.

    Args:
        argv: The file and the options.
        step: The step.
        weight: The end of the weight's name.
        rank: The rank whose weight it is.
    """
    take = StepRunner.step

    def spoiling(self: StepRunner) -> None:
        if self.worker.runtime.epoch == step and self.worker.member.rank == rank:
            named = self.worker.optimizer.named
            (found,) = (one for name, one in named.items() if name.endswith(weight))
            found.data.view(-1).view(torch.int16)[7] ^= 1 << 6
            torch.autograd.graph.increment_version(found)
        take(self)

    StepRunner.step = spoiling  # type: ignore[method-assign]
    try:
        return trained(*argv)
    finally:
        StepRunner.step = take  # type: ignore[method-assign]


def launched(cases: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    """The same as `in_turn`, in a process where a step can be one launch."""
    recorded.install()
    return in_turn(cases)
