"""Measure how long a rank's host has waited for other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["WaitClock"]


class WaitClock:
    """
    Adds up the times in which the host waits for other ranks: for messages, reductions and consent.

    On a GPU, streams wait for messages and reductions; the host waits only for consent.

    Attributes:
        seconds: The sum of all waits so far, in seconds.
        place: While the host waits: a pair of the action that waits and the awaited rank (-1 for
            all ranks). Otherwise None. Other threads may read this attribute.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.place: tuple[str, int] | None = None

    @contextmanager
    def waiting(self, action: str, peer: int = -1) -> Iterator[None]:
        """
        A context in which the host waits. Its time is added to `seconds`, even if the wait ends in
        an error.
        """
        began, self.place = time.perf_counter(), (action, peer)
        try:
            yield
        finally:
            self.place = None
            self.seconds += time.perf_counter() - began
