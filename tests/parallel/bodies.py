"""What the ranks of a test run."""

from __future__ import annotations

from typing import Any

from qeffect.gpu_runtime.parallel.compare import compared
from qeffect.gpu_runtime.parallel.model import Job
from qeffect.gpu_runtime.parallel.world import Limits, join

#: Nothing here takes a second where all is well.
LIMITS = Limits(start=60.0, message=20.0, commit=20.0, grace=1.0)


def exact(jobs: list[Job], steps: int) -> list[dict[str, Any]]:
    """Every job in turn, natively under torch's pipeline and guarded, compared bit for bit."""
    member = join("cpu", LIMITS)
    said = []
    for job in jobs:
        result = compared(member, job, steps, limits=LIMITS)
        found = result.comparison
        said.append(
            {
                "compared": {c.category: c.compared for c in found.categories},
                "differ": {c.category: c.mismatched for c in found.categories},
                "first": [c.first for c in found.categories if c.mismatched],
                "losses": result.losses,
                "native losses": result.native_losses,
                "slots": result.slots,
            }
        )
    return said
