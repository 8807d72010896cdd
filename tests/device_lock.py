"""
A lock of the devices among the workers of one run: most tests share it, some hold it alone.

Tests that compare how fast two devices are need devices that nobody else uses.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["LOCK", "held"]

LOCK = Path(tempfile.gettempdir()) / (
    f"qeffect-devices-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
)
"""The lock's file; xdist gives all workers of a run the same name."""


@contextmanager
def held(*, alone: bool, file: Path = LOCK) -> Iterator[None]:
    """Hold the devices, together with other tests or alone; waits until that is possible."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
