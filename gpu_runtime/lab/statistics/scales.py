"""
Derive figures that compare runs whose scales move at every action with runs whose scales move once
per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["LAST", "derive_scales"]

LAST = 50
"""Steps at the end of a run over which its training loss is averaged."""


def derive_scales(raw: Mapping[str, Any]) -> dict[str, Any]:
    """
    The final losses of each run and, for each seed, the difference between the two kinds of runs.

    A difference is the loss with scales that move once per step, minus the loss with scales that
    move at every action. A figure is None if a loss was not finite, or if a run of the pair is
    missing.
    """
    runs = [_end(run) for run in raw["runs"]]
    found = {(run["scales"], run["seed"]): run for run in runs}
    pairs = [
        {
            "seed": seed,
            **{
                name: _less(found["epoch", seed][name], found["action", seed][name])
                for name in ("loss", "held_out")
            },
        }
        for scales, seed in found
        if scales == "action" and ("epoch", seed) in found
    ]
    return {
        "runs": runs,
        "differences": pairs,
        "mean_difference": _mean([pair["loss"] for pair in pairs]),
        "mean_held_out_difference": _mean([pair["held_out"] for pair in pairs]),
    }


def _end(run: Mapping[str, Any]) -> dict[str, Any]:
    steps, held_out = run["held_out"][-1]
    return {
        "scales": run["scales"],
        "seed": run["seed"],
        "steps": steps,
        "loss": _mean(run["losses"][-LAST:]),
        "held_out": held_out,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return sum(known) / len(known)


def _less(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
