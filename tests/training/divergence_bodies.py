"""What the ranks run in the tests of runs that diverge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qeffect.gpu_runtime.lab.comparisons import look_price
from qeffect.gpu_runtime.ranks.job import Batches
from qeffect.gpu_runtime.training.checkpoint import checkpoints
from qeffect.gpu_runtime.training.data import Loader
from qeffect.gpu_runtime.training.step_runner import StepRunner
from tests.ranks import recorded

from .language_bodies import trained


def in_turn(cases: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    """Run the command several times in one process, each time with its own numerical fault."""
    return [mishap(**case) for case in cases]


def launched(cases: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    """The same as `in_turn`, in a process where a step can be one launch."""
    recorded.install()
    return in_turn(cases)


def priced(config: str) -> dict[str, float]:
    """The cost of a check for non-finite values."""
    return look_price.ratios(Path(config), rounds=1)


def mishap(
    argv: list[str],
    *,
    weight: tuple[int, str, float] | None = None,
    gradient: dict[str, float] | None = None,
    rank: int = 0,
    before: bool = False,
) -> tuple[int, str, str]:
    """
    Run `qeffect runtime train` with a wrong value in one step.

    Args:
        argv: The file and the options.
        weight: The step after which a weight's first value is changed, the end of the weight's
            name, and the new value.
        gradient: By step, the gradient of the loss of the first microbatch with respect to itself.
        rank: The rank whose weight it is.
        before: Whether saves are those of earlier releases, which do not check values and do not
            hash the whole corpus.
    """
    take, given, look = StepRunner.step, Batches.output_gradients, checkpoints.nonfinite
    state = Loader.state

    def spoiling(self: StepRunner) -> None:
        epoch, named = self.worker.runtime.epoch, self.worker.optimizer.named
        take(self)
        if weight and epoch == weight[0] and self.worker.member.rank == rank:
            recorded.STREAM.synchronize()  # a launch may still run
            (found,) = (one for name, one in named.items() if name.endswith(weight[1]))
            found.data.view(-1)[0] = weight[2]

    def other(self: Batches, stage: Any, step: int, microbatch: int) -> Any:
        value = (gradient or {}).get(str(step), 1.0) if microbatch == 0 else 1.0
        return (torch.full_like(given(self, stage, step, microbatch)[0], value),)

    StepRunner.step, Batches.output_gradients = spoiling, other  # type: ignore[method-assign]
    if before:
        checkpoints.nonfinite = lambda *_: []
        Loader.state = _ends_only(state)  # type: ignore[method-assign]
    try:
        return trained(*argv)
    finally:
        StepRunner.step, Batches.output_gradients = take, given  # type: ignore[method-assign]
        checkpoints.nonfinite = look
        Loader.state = state  # type: ignore[method-assign]


def _ends_only(state: Any) -> Any:
    def told(self: Loader, position: int) -> dict[str, Any]:
        return {k: v for k, v in state(self, position).items() if k != "sha256"}

    return told
