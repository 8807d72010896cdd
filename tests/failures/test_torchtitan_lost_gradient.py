"""
Under zero-bubble schedules TorchTitan loses the gradient of its last norm.

The bug report contains the reproducer, which needs only torch and two CPU processes. `report modes`
over TorchTitan found the fault; `tests/ranks/test_guard_evidence.py` shows what the guard reports.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch_release import NEEDS_DEFERRED

from .reproducers import require_observed


@NEEDS_DEFERRED
@pytest.mark.ci
def test_the_reproducer_prints_what_the_text_says(tmp_path: Path) -> None:
    require_observed("torchtitan_lost_gradient.md", tmp_path)
