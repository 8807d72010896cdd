"""
The part of ``qeffect bench`` that times the verification package: explorer, proofs, mutants and
random schedules.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

__all__ = ["measure"]

#: Scopes walked for their rates, of ``explorer.large_scopes``.
SCOPES = {
    "pool_batch": "pool-4-4-3",
    "stage_batch": "stage-medium",
    "five_million_states": "pool-4-5-4",
}

#: The transitions that check and commit each action.
ACTIONS = {"F": "forward", "dI": "dgrad", "dW": "wgrad"}


def measure(progress: Callable[[str], None]) -> dict[str, Any]:
    """
    Measure the speed of the explorer, the proofs, the mutants and the random schedules.

    Returns:
        The measurements; rates are per second. A rate of ``accepted`` counts only accepted
        transitions; a rate of ``attempted`` also counts refused transitions.
    """
    from . import mutants, prices
    from .explorer import large_scopes, run
    from .proofs import prove
    from .walks import machine

    data: dict[str, Any] = {}
    for name, scope in SCOPES.items():
        progress(f"Measuring: exploration, {name}")
        report = run(large_scopes()[scope], witnesses=False)
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
    progress("Measuring: the price of each clause")
    data["clause_prices"] = prices.clauses()
    progress("Measuring: random schedules")
    random = machine.run(300, 0).asdict()
    data["random_actions_per_s"] = random["actions_per_second"]
    progress("Measuring: proofs")
    gc.collect()
    began, cpu = time.perf_counter(), time.process_time()
    proofs = list(prove.unbounded())
    data["proofs_s"] = time.perf_counter() - began
    data["proofs_cpu_s"] = time.process_time() - cpu
    data["proofs_obligations"] = len(proofs)
    data["proofs_solver_s"] = sum(proof.seconds for proof in proofs)
    data["proofs_worst_s"] = max(proof.seconds for proof in proofs)
    gc.collect()
    sweep = mutants.run(progress)
    data["mutants"] = sweep.mutants
    data["mutant_s"] = sweep.seconds / sweep.mutants
    data["mutant_slowest_s"] = max(verdict.seconds for verdict in sweep.verdicts)
    data["guards_and_updates_by_action"] = _sites()
    return data


def _sites() -> dict[str, dict[str, int]]:
    """Count the guards and the state updates in the check and the commit of each action."""
    from .mutants import sites

    return {
        action: {
            kind + "s": sum(
                site.kind == kind and site.transition in (f"check_{name}", f"commit_{name}")
                for site in sites()
            )
            for kind in ("guard", "update")
        }
        for action, name in ACTIONS.items()
    }
