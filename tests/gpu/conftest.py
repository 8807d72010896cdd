"""
Fixtures for the tests that need a device: each such test is marked ``gpu``, and fails without a
device.

Run these tests with ``pytest -m gpu tests/gpu``; any other run deselects them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qeffect.gpu_runtime.backends.determinism import DETERMINISTIC
from qeffect.gpu_runtime.lab.comparisons.recording import Recording
from tests.device_lock import held

from .helpers import native_final

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder ``gpu``; warnings of Transformer Engine do not fail a test."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True, scope="session")
def device() -> Iterator[None]:
    """Fail without a device or Transformer Engine; force deterministic algorithms."""
    if not torch.cuda.device_count():
        pytest.fail(
            "expected a CUDA device, found none; `pytest -m 'not gpu'` runs the other tests"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.fail("Transformer Engine is not installed: pip install 'qeffect[gpu]'")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in DETERMINISTIC.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def devices(request: pytest.FixtureRequest) -> Iterator[None]:
    """
    Share the devices with other workers; a test marked ``alone`` holds the devices exclusively.
    """
    with held(alone=request.node.get_closest_marker("alone") is not None):
        yield


@pytest.fixture(scope="session")
def undisturbed(device: None) -> Recording:
    """The state after an undisturbed native run."""
    return native_final()
