"""
Two faults of torch's pipeline under DistributedDataParallel: one reduction is missing, another
comes too early.

The bug reports for torch contain the reproducers, which need only torch and two CPU processes.
`tests/ranks/test_guard_replicas.py` shows what the guard reports.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch_release import NEEDS_DEFERRED

from .reproducers import require_observed


@NEEDS_DEFERRED
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("torch_replicas_not_reduced.md", marks=pytest.mark.ci),
        pytest.param("torch_inferred_shapes_reduce_early.md", marks=pytest.mark.ci),
    ],
)
def test_the_reproducer_prints_what_the_text_says(tmp_path: Path, name: str) -> None:
    require_observed(name, tmp_path)
