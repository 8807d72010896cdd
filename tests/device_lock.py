"""
A lock on the devices for the workers of one test run: most tests share the lock, some hold it
exclusively.

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
"""The file of the lock; xdist gives all workers of a run the same name."""


@contextmanager
def held(*, alone: bool, file: Path = LOCK) -> Iterator[None]:
    """Hold the devices, shared with other tests or exclusively; wait until this is possible."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
