"""
Under zero-bubble schedules TorchTitan loses the gradient of its last norm.

The text for upstream has the reproducer, which torch alone runs on two CPU processes. The sweep of
TorchTitan's modes found it; `tests/ranks/test_guard_evidence.py` shows what the guard says.
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
