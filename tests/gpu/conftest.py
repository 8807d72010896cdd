"""
Tests that need a device are left out of a run without one: deselected, and counted as that.
"""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is marked `gpu` where no CUDA device is."""
    if torch.cuda.is_available():
        return
    without = [item for item in items if item.get_closest_marker("gpu") is not None]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item.get_closest_marker("gpu") is None]
