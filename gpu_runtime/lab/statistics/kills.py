"""
Derive figures of killed runs: how many values were compared with the undisturbed run, and how many
differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

__all__ = ["derive_kills"]


def derive_kills(raw: Mapping[str, Any]) -> dict[str, Any]:
    """
    The number of kills by place; the number of distinct tensors and losses, and how many of these
    values differ in any run.

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
