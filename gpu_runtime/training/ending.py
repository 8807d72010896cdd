"""
End a run before its last step, on SIGTERM, on SIGUSR1, or after `[run] max_seconds`.

Each rank records requests to end the run. When the ranks agree on the update at the end of each
step, they also exchange these requests. Therefore all ranks end after the same step. Then the ranks
save a checkpoint, and the run ends with exit code 0.

A step cannot end if a rank has died or hangs. The main thread then waits inside gloo, where Python
runs no signal handler. Therefore a signal also wakes a second thread. If the step does not end in
time, the second thread publishes why the rank stops, and reports the cause. Then it ends the
process with exit code 2, before the launcher kills the process.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from qeffect.launched import START

from ..ranks.bounded import bounded
from ..ranks.causes import Cause
from ..ranks.channels import UnansweredError
from ..ranks.consent import TerminatedError
from ..ranks.worker import Worker

__all__ = ["GRACE_S", "REASONS", "EndRequest", "worst_end_s"]

REASONS = ("steps", "max_seconds", "SIGUSR1", "SIGTERM")
"""Reasons to end a run; ranks exchange indices into this tuple, and the largest index wins."""
_SIGNALS = {signal.SIGUSR1: 2, signal.SIGTERM: 3}
#: A signal within these seconds of the first is the same request: both a cluster's manager and the
#: launcher signal the ranks.
_SAME_S = 2.0

GRACE_S: Final = 30.0
"""
Seconds from torchrun's SIGTERM to its SIGKILL; the defaults of Slurm and Kubernetes are the same.
"""
#: Seconds after SIGTERM from which a running step counts as waiting for a rank that died or hangs.
_STUCK_S = 10.0
#: If the step ended within `_STUCK_S`, seconds until the next step is checked in the same way.
_NEXT_S = 5.0
#: Seconds that an evaluation or a save may run after SIGTERM under torchrun.
_LATEST_S = 16.0
#: Timeout of publishing why this rank stops.
_PUBLISH_S = 2.0
#: Seconds that the main thread has, once woken, to begin to stop.
_BACK_S = 2.0
#: Timeout of choosing the cause.
_DECIDE_S = 5.0
#: Timeout of writing the status file.
_TELL_S = 2.0
#: Seconds that a silent rank stays alive after the status is written; meanwhile one rank prints.
_LAST_WORD_S = 3.0
#: Seconds that the main thread has to begin to stop after a second signal; the stop has twice as
#: long.
_AT_ONCE_S = 0.5


def worst_end_s() -> float:
    """
    Return the longest time in seconds from SIGTERM to the end of the process. It takes this long if
    the key-value store does not answer, through which ranks publish why they stop.
    """
    stuck = _STUCK_S + _NEXT_S + _PUBLISH_S + _BACK_S
    return max(stuck, _LATEST_S + _PUBLISH_S) + _DECIDE_S + _TELL_S + _LAST_WORD_S


class EndRequest:
    """
    Records requests to end the run. Inside this context, SIGTERM and SIGUSR1 count as requests.

    Args:
        worker: The rank's worker. A second signal ends the worker's step at once.
        seconds: Seconds after which the run ends; 0 for no limit.
        began: Time of `time.monotonic` from which `seconds` count.
        tell: Function that prints the cause if the main thread cannot do so, and returns whether
            this rank printed the cause. The function runs in another thread.

    Attributes:
        doing: The current operation of the rank: ``step``, ``evaluation`` or ``checkpoint``.
    """

    def __init__(
        self,
        worker: Worker,
        seconds: float,
        began: float,
        tell: Callable[[Cause], bool] = lambda _: True,
    ) -> None:
        self.worker, self.seconds, self.began = worker, seconds, began
        self.doing = "step"
        self.asked = 0
        self._tell = tell
        self._first: dict[int, float] = {}
        self._former: dict[int, Any] = {}
        self._over = self._raises = False
        self._again_by = ""  # the signal that came again
        self._end = threading.Lock()  # of the thread that ends the process or this context
        self._own = 0  # signals that the thread sends to the main thread
        self._plans: list[tuple[float, Callable[[], None]]] = []
        self._wakes: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> EndRequest:
        if threading.current_thread() is not threading.main_thread():
            return self
        START.disarm()
        self._wakes = os.pipe()
        os.set_blocking(self._wakes[1], False)
        # The thread inherits the mask: signals are for the other threads to take.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._thread = threading.Thread(target=self._watch, name="qeffect-end", daemon=True)
        self._thread.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(self._wakes[1], warn_on_full_buffer=False)
        for number in _SIGNALS:
            self._former[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        if self._wakes is None or self._thread is None:
            return
        with self._end:  # not while the thread ends the process
            self._over = True
        signal.set_wakeup_fd(-1)
        os.write(self._wakes[1], b"\0")
        self._thread.join()
        for end in self._wakes:
            os.close(end)
        self._wakes = None
        for number, former in self._former.items():
            signal.signal(number, signal.SIG_DFL if former is None else former)
        self._former.clear()

    def look(self) -> int:
        """Return the reason to end the run, as an index into `REASONS`; 0 without a request."""
        if self.seconds and time.monotonic() - self.began >= self.seconds:
            self.asked = max(self.asked, 1)
        return self.asked

    # The main thread

    def _take(self, number: int, _: object) -> None:
        """
        Handle a signal in Python; if the main thread waits in a library, this handler runs only
        after the wait.
        """
        self.asked = max(self.asked, _SIGNALS[signal.Signals(number)])
        if self._raises:
            self._raises = False
            self.worker.terminate()

    # The thread

    def _watch(self) -> None:
        assert self._wakes is not None
        poll = select.poll()
        poll.register(self._wakes[0], select.POLLIN)
        while not self._over:
            due = min((moment for moment, _ in self._plans), default=None)
            left = None if due is None else max(due - time.monotonic(), 0.0) * 1e3
            if poll.poll(left):
                for number in os.read(self._wakes[0], 64):
                    self._hear(number)
            now = time.monotonic()
            ripe = [plan for plan in self._plans if plan[0] <= now]
            self._plans = [plan for plan in self._plans if plan[0] > now]
            for _, act in ripe:
                with self._end:
                    if not self._over:
                        act()

    def _hear(self, number: int) -> None:
        """Record a signal, which is either the first signal or a repeated signal."""
        if number == signal.SIGTERM and self._own:
            self._own -= 1
            return
        if number not in _SIGNALS:
            return
        now = time.monotonic()
        first = self._first.setdefault(number, now)
        if first == now:
            self.asked = max(self.asked, _SIGNALS[signal.Signals(number)])
            if number == signal.SIGTERM and self.worker.member.world > 1:
                self._bound(now)
        elif now - first >= _SAME_S and not self._again_by:
            self._again_by = signal.Signals(number).name
            self._again(now)

    def _bound(self, now: float) -> None:
        """
        After a first SIGTERM, set a deadline so that the process ends before the launcher's
        SIGKILL.
        """
        self.worker.stop_until(now + _LATEST_S + _PUBLISH_S + _DECIDE_S)
        self._plans.append((now + _STUCK_S, partial(self._end_stuck, self._place())))
        if "TORCHELASTIC_RUN_ID" in os.environ:
            self._plans.append((now + _LATEST_S, self._end_late))

    def _again(self, now: float) -> None:
        """
        After a repeated signal, stop the main thread, or end the process if the main thread does
        not react.
        """
        if not self.worker.consent.claimed:
            self.worker.stop_until(now + 2 * _AT_ONCE_S)
            self._wake_main()
        self._plans = [(now + _AT_ONCE_S, self._end_at_once)]

    def _place(self) -> tuple[int, str]:
        """Return the current step and operation; the value changes with each step."""
        return self.worker.runtime.epoch, self.doing

    def _end_stuck(self, place: tuple[int, str]) -> None:
        """
        End a step that is still running some time after SIGTERM; an evaluation or a save may
        continue.

        If the step has ended, but other ranks had not received SIGTERM yet, another step follows. A
        rank may hang in that step, so the check is repeated.
        """
        if self.worker.consent.claimed:
            return
        if self._place() != place or self.doing != "step":
            again = partial(self._end_stuck, self._place())
            self._plans.append((time.monotonic() + _NEXT_S, again))
            return
        self._publish()
        if not self.worker.in_step:
            self._end_aside()
            return
        self._wake_main()
        self._plans = [(time.monotonic() + _BACK_S, self._end_aside)]

    def _end_late(self) -> None:
        """End the process if it is still running some time after torchrun's SIGTERM."""
        if not self.worker.consent.claimed:
            self._publish()
            self._end_aside()

    def _end_aside(self) -> None:
        """Print the cause and end the process, unless the main thread has begun to do so."""
        worker = self.worker
        if worker.consent.claim("aside"):
            said = worker.runtime.epoch, self.doing
            self._leave(worker.consent.cause_aside(self._error(), *said, seconds=_DECIDE_S))

    def _end_at_once(self) -> None:
        """
        End the process after a second signal, with this rank's own cause, without waiting for other
        ranks.
        """
        if self.worker.consent.claim("aside"):
            rank, (step, doing) = self.worker.member.rank, self._place()
            ended = f"a second {self._again_by} ended the rank while it {self._busy()}"
            text = f"rank {rank}, step {step}, {doing}: {ended}"
            self._publish(_AT_ONCE_S)
            self._leave(Cause("ended", rank, None, doing, None, text, False, step))
        # The main thread tells the cause; it does not get long.
        self._plans = [(time.monotonic() + 4 * _AT_ONCE_S, partial(os._exit, 2))]

    def _busy(self) -> str:
        """
        Describe what the main thread does: the wait, or the line of code if it is not in a named
        wait.
        """
        if self.worker.waits.place is not None:
            return f"waited at {self.worker.waits.place[0]}"
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return f"ran {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"

    def _leave(self, cause: Cause) -> None:
        said = True
        with suppress(Exception):  # the process ends in any case
            said = bounded(partial(self._tell, cause), _TELL_S)
        if not said and not self._again_by:
            time.sleep(_LAST_WORD_S)
        os._exit(2)

    def _publish(self, seconds: float = _PUBLISH_S) -> None:
        epoch, doing = self._place()
        self.worker.consent.publish(self._error(), epoch, doing, seconds=seconds)

    def _error(self) -> Exception:
        """
        Return the error with which this rank stops; it names the wait that SIGTERM interrupts, if
        the main thread waits.
        """
        now = time.monotonic()
        seconds = now - self._first.get(signal.SIGTERM, now)
        action, peer = self.worker.waits.place or (self.doing, -1)
        if self._again_by or (self.worker.waits.place is None and self.worker.in_step):
            return TerminatedError("the launcher ended the rank with SIGTERM")
        other = "" if peer < 0 else f" with rank {peer}"
        text = f"{action}{other} did not end within {seconds:.0f} s of SIGTERM"
        return UnansweredError(action, peer, True, text)

    def _wake_main(self) -> None:
        """Make the main thread raise an error as soon as it runs Python code again."""
        self._raises = True
        self._own += 1
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
