"""
The verification layer's part of ``qeffect bench``: explorer, proofs and random schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["measure"]

#: Scopes walked for their rates, of ``explorer.large_scopes``, and whether by the batch reading.
#: The plain reading is measured on right arguments, the batch reading on wrong ones as well.
SCOPES = {
    "pool_plain": ("pool-4-4-2-right", False),
    "stage_plain": ("stage-small-right", False),
    "pool_batch": ("pool-4-4-3", True),
    "stage_batch": ("stage-medium", True),
    "five_million_states": ("pool-4-5-4", True),
}


def measure(progress: Callable[[str], None]) -> dict[str, Any]:
    """
    Measure every reading but the concrete one.

    Returns:
        Rates a second. ``accepted`` counts moves that led to a state, ``attempted`` those that
        were refused as well: both are transitions run.
    """
    from verification import machine, prove
    from verification.explorer import large_scopes, run

    data: dict[str, Any] = {}
    for name, (scope, batch) in SCOPES.items():
        progress(f"Measuring. exploration, {name}")
        report = run(large_scopes()[scope], batch=batch, witnesses=False)
        data[f"explore_{name}"] = {
            "scope": report.scope,
            "states": report.states,
            "accepted": report.transitions,
            "refused": report.refused,
            "seconds": report.seconds,
            "cpu_seconds": report.cpu_seconds,
            "accepted_per_s": report.rate,
            "accepted_per_cpu_s": report.cpu_rate,
            "attempted_per_s": report.attempted_rate,
            "peak_rss_mb": report.peak_rss_mb,
        }
    progress("Measuring. random schedules")
    random = machine.run(300, 0).asdict()
    data["random_actions_per_s"] = random["actions_per_second"]
    progress("Measuring. proofs")
    proofs = prove.run().asdict()
    data["proofs_s"] = proofs["seconds"]
    data["proofs_obligations"] = len(proofs["obligations"])
    data["proofs_worst_s"] = max(o["seconds"] for o in proofs["obligations"])
    return data
