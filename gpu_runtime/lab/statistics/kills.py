"""
Figures of killed runs: the values compared with the undisturbed run, and those that differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

__all__ = ["derive_kills"]


def derive_kills(raw: Mapping[str, Any]) -> dict[str, Any]:
    """
    Kills by place; the number of distinct tensors and losses, and how many of them differ in any
    run.

    A tensor that differs in two runs counts once. `compared` counts each comparison.
    """
    kills, runs = raw["kills"], raw["runs"]
    names = ("tensors", "losses", "held_out")
    found: dict[str, Any] = {
        "kills": len(kills),
        "places": dict(sorted(Counter(_place(one) for one in kills).items())),
        "runs": len(runs),
    }
    for name in names:
        found[name] = max((run[name] for run in runs), default=0)
        found[f"{name}_differ"] = len({one for run in runs for one in run[f"{name}_differ"]})
    found["compared"] = sum(run["compared"] for run in runs)
    found["longest_end_s"] = max((one["end_s"] for one in kills), default=0.0)
    return found


def _place(kill: Mapping[str, Any]) -> str:
    place = kill["place"].partition(",")[0]
    return f"launcher, in: {place}" if kill["launcher"] else str(place)
