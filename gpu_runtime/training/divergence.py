"""
Detect that a run has diverged: a loss, a weight, an optimizer moment or a scale is not finite, or
too many updates in a row were skipped.

Every rank decides from data that all ranks have exchanged. Therefore all ranks end at the same step
and with the same cause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from qeffect.text import counted

from ..ranks.causes import Cause
from ..step.clipping import Norm
from .look import NonFinite

__all__ = ["DIVERGED", "DivergedError", "UpdateWatch", "diverged"]

DIVERGED = "diverged"
"""The kind of cause that a diverged run reports."""


class DivergedError(RuntimeError):
    """
    The run has diverged. Every rank raises this error with the same `cause`, after the same `step`.
    """

    def __init__(self, cause: Cause, step: int) -> None:
        super().__init__(cause.text)
        self.cause, self.step = cause, step


def diverged(said: Sequence[Sequence[NonFinite]], step: int, action: str) -> DivergedError | None:
    """
    Return an error that names the first tensor that is not finite; None if every tensor is finite.

    Args:
        said: By rank, the tensors that are not finite.
        step: Number of the last step before the check.
        action: The reason for the check: `look` (a periodic check), `save` or `load`.
    """
    every = [(rank, one) for rank, found in enumerate(said) for one in found]
    if not every:
        return None
    rank, first = every[0]
    text = str(first)
    if len(every) > 1:
        text += f"; also not finite: {counted(len(every) - 1, 'other tensor')}"
    return _error(rank, step, action, text, first.stage)


def _error(rank: int, step: int, action: str, text: str, stage: int | None = None) -> DivergedError:
    whole = f"rank {rank}, step {step}, {action}: {text}"
    return DivergedError(Cause(DIVERGED, rank, stage, action, None, whole, False), step)


def _of(norm: Norm) -> str:
    """Name the first stage with gradients that are not finite, if known."""
    return f" in stage {norm.nonfinite_stages[0]}" if norm.nonfinite_stages else ""


@attrs.define
class UpdateWatch:
    """
    Watches the losses and skipped updates of a run, step by step.

    Args:
        stop_after: Number of consecutive skipped updates after which the run ends; 0 never ends the
            run.

    Attributes:
        skipped: Number of skipped updates.
        first: The step of the first skipped update; None if no update was skipped.
    """

    stop_after: int
    skipped: int = attrs.field(default=0, init=False)
    first: int | None = attrs.field(default=None, init=False)
    _in_row: int = attrs.field(default=0, init=False)

    def take(self, step: int, shares: Sequence[Sequence[float]], norm: Norm | None) -> None:
        """
        Record the result of a step.

        Args:
            step: The number of the step.
            shares: By rank, the shares of the step's loss.
            norm: The norm of the step's gradients; None if it was not computed.

        Raises:
            DivergedError: The loss is not finite and the update was not skipped, or `stop_after`
                updates in a row were skipped.
        """
        if norm is not None and norm.skipped:
            self.skipped += 1
            self._in_row += 1
            self.first = step if self.first is None else self.first
            if self._in_row == self.stop_after:
                raise _error(
                    0,
                    step,
                    "update",
                    f"the norm of the gradients is not finite{_of(norm)}, and the updates of steps "
                    f"{step - self._in_row + 1} to {step} were skipped; [optimizer] "
                    f"stop_after_skips is {self.stop_after}",
                )
            return
        self._in_row = 0
        for rank, own in enumerate(shares):
            if not all(map(math.isfinite, own)):
                raise _error(rank, step, "loss", "the loss is not finite")
