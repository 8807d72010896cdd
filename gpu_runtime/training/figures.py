"""
Compute figures for a report from the raw numbers of a training run: loss, speed, and the difference
from a native run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["derive_train", "mean", "perplexity", "rounded"]

Raw = Mapping[str, Any]
_DIGITS = 6
_MOST = 700.0
"""From this loss on, the perplexity counts as too large for a float."""


def derive_train(raw: Raw) -> dict[str, Any]:
    """
    Compute each run's first and last losses, held-out perplexity and speed, and the differences
    between runs.

    Values that are not finite become None. The losses of a run without steps are also None.
    """
    return {"runs": [_run(run) for run in raw["runs"]]}


def _run(run: Raw) -> dict[str, Any]:
    losses, native = run["losses"], run["native_losses"]
    few = max(1, len(losses) // 20)
    held_out = run["held_out"][-1][1] if run["held_out"] else None
    perplexed = None if held_out is None else perplexity(held_out)
    seconds, theirs = run["seconds"], run["native_seconds"]
    return {
        "how": run["how"],
        "schedule": run["schedule"],
        "steps": len(losses),
        "first_loss": rounded(mean(losses[:1])),
        "last_loss": rounded(mean(losses[-few:])),
        "held_out_loss": rounded(held_out),
        "perplexity": rounded(perplexed),
        "tokens_per_s": round(len(losses) * run["tokens_a_step"] / seconds) if seconds else None,
        "native_over_this": round(theirs / seconds, _DIGITS) if seconds and theirs else None,
        "losses_differ": (
            None if native is None else sum(a != b for a, b in zip(losses, native, strict=True))
        ),
        "compared": run["compared"],
        "differ": run["differ"],
    }


def mean(losses: Sequence[float | None]) -> float | None:
    """Return the mean of the losses; None if there are no losses or a loss is not finite."""
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if known and len(known) == len(losses) else None


def rounded(value: float | None) -> float | None:
    """Round a number to the digits that reports use; None stays None."""
    return None if value is None else round(value, _DIGITS)


def perplexity(loss: float) -> float | None:
    """Return exp(loss); None if the result is too large for a float."""
    return math.exp(loss) if loss < _MOST else None
