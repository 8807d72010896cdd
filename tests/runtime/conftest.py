"""
Fixtures of the runtime's tests: torch uses one thread, because results on a CPU depend on the
thread count.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from qeffect.gpu_runtime.lab.comparisons.recording import Recording

from .injection import native_final


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Pin torch to one thread for every runtime test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def undisturbed(one_thread: None) -> Recording:
    """The state after an undisturbed native run of the training that faults are injected into."""
    return native_final()
