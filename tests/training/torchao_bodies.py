"""What the ranks run in the tests of a model with TorchAO's head."""

from __future__ import annotations

from typing import Any

from qeffect.gpu_runtime.lab.comparisons.ranks import compare_pipelines
from qeffect.gpu_runtime.ranks.membership import join
from qeffect.gpu_runtime.ranks.worker_assembly import build_worker
from qeffect.gpu_runtime.training.language_model import LanguageJob
from tests.ranks.bodies import LIMITS


def against_native(jobs: list[LanguageJob], steps: int) -> list[dict[str, Any]]:
    """Compare each job with torch's pipeline, whose head is the library's own module."""
    member = join("cpu", LIMITS)
    said = []
    for job in jobs:
        result = compare_pipelines(member, job, steps, limits=LIMITS)
        worker = build_worker(member, job, "reference", limits=LIMITS)
        said.append(
            {
                "same": result.same,
                "totals": result.totals(),
                "losses": result.losses,
                "state": [
                    name
                    for stage in worker.runtime.stages.values()
                    for name in (*stage.numerical_state(), *stage.cached_weights())
                    if name.startswith("head")
                ],
            }
        )
        worker.close()
    return said
