"""How long a rank's host has waited for other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["WaitClock"]


class WaitClock:
    """
    Adds up the host's waits for other ranks: messages, sums and consent.

    On a GPU, streams wait for messages and sums; the host then waits for consent alone.

    Attributes:
        seconds: The sum so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which the host waits, also if the wait ends in an error."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began
