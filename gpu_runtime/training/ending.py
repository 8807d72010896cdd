"""
How a run ends before its last step: SIGTERM, SIGUSR1 or `[run] max_seconds`.

Each rank notes that it is asked. The ranks exchange these notes with their consent to a step, so
all ranks end after the same step. Then they save, and the run ends with exit code 0.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from qeffect.launched import START

from ..ranks.worker import Worker

__all__ = ["REASONS", "EndRequest"]

REASONS = ("steps", "max_seconds", "SIGUSR1", "SIGTERM")
"""What ends a run, by the number that ranks exchange; the largest wins."""
_SIGNALS = {signal.SIGUSR1: 2, signal.SIGTERM: 3}
#: A signal within these seconds of the first is the same request: a cluster's manager signals the
#: ranks, and so does the launcher.
_SAME_S = 2.0
#: A step that SIGTERM finds and that then runs so long waits for a rank that has died. torchrun
#: kills all ranks 30 s after its SIGTERM.
_STUCK_S = 15.0


class EndRequest:
    """
    Whether this rank is asked to end the run; a context in which signals ask.

    Args:
        worker: The rank's worker; a signal that comes again ends its step at once.
        seconds: Seconds after which the run ends; 0 for no limit.
        began: When the seconds began, by `time.monotonic`.
    """

    def __init__(self, worker: Worker, seconds: float, began: float) -> None:
        self.worker, self.seconds, self.began = worker, seconds, began
        self.asked = 0
        self._first: dict[int, float] = {}
        self._former: dict[int, Any] = {}
        self._timer: threading.Timer | None = None

    def __enter__(self) -> EndRequest:
        if threading.current_thread() is threading.main_thread():
            START.disarm()
            for number in _SIGNALS:
                self._former[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, signal.SIG_DFL if former is None else former)
        self._former.clear()
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> int:
        """Return the number of the reason in `REASONS`; 0 if nothing asks."""
        if self.seconds and time.monotonic() - self.began >= self.seconds:
            self.asked = max(self.asked, 1)
        return self.asked

    def _take(self, number: int, _: object) -> None:
        now = time.monotonic()
        first = self._first.setdefault(number, now)
        if first == now:
            self.asked = max(self.asked, _SIGNALS[signal.Signals(number)])
            if number == signal.SIGTERM and self.worker.member.world > 1:
                self._timer = threading.Timer(_STUCK_S, self._stuck_at(self.worker.runtime.epoch))
                self._timer.daemon = True
                self._timer.start()
        elif now - first >= _SAME_S:
            self.worker.terminate()

    def _stuck_at(self, epoch: int) -> Callable[[], None]:
        def end() -> None:
            if self.worker.in_step and self.worker.runtime.epoch == epoch:
                os.kill(os.getpid(), signal.SIGTERM)

        return end
