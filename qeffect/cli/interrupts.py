"""
Ctrl-C prints one line on standard error, ends every child process, and ends this process with exit
code 130 within two seconds.

Without this module, a solver written in C catches SIGINT and loses it, a worker process answers
SIGINT with a traceback, and Python raises ``KeyboardInterrupt`` in whatever destructor runs at that
moment. So SIGINT is blocked in every thread, and one thread waits for it; child processes inherit
the blocked signal mask.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

from ..startup import unblock_interrupts

__all__ = ["INTERRUPTED", "INTERRUPTED_RUNS", "Interrupts", "descendants"]

#: The exit code after SIGINT, as in shells: 128 plus the signal's number.
INTERRUPTED: Final = 130
INTERRUPTED_RUNS: Final[list[Callable[[], str]]] = []
"""
Functions that return one line on whether an interrupted run can be resumed. After an interrupt the
line of the last function is printed.
"""
#: Seconds that the main thread has to unwind and to remove its unfinished files.
_GRACE_S: Final = 1.0
#: Wakes the main thread; by default a process ignores this signal.
_WAKE: Final = getattr(signal, "SIGURG", None)


class Interrupts:
    """
    Ends this process and its children on SIGINT; meant for a program that owns its process.

    Args:
        say: Function that reports the interrupt to the user. It is called once, from a thread
            other than the main thread.
    """

    def __init__(self, say: Callable[[], object]) -> None:
        self._say = say
        self._main = threading.main_thread()
        self._ending = threading.Event()
        self._last_word = threading.Lock()

    def run(self, work: Callable[[], int]) -> int:
        """
        Run a function and return its result; on SIGINT end the process with code 130 instead.

        If the shell made the process ignore SIGINT, as it does for background jobs of a script,
        SIGINT stays ignored.

        Args:
            work: The function to run. SIGINT raises ``KeyboardInterrupt`` inside it; the process
                ends with code 130 even if the function catches this exception.
        """
        if (
            _WAKE is None
            or threading.current_thread() is not self._main
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        ):
            unblock_interrupts()
            return work()
        signal.signal(_WAKE, self._raise)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        _keep_blocked()
        waiting = threading.Thread(target=self._wait, name="qeffect-interrupts", daemon=True)
        waiting.start()
        # An earlier thread may receive SIGINT, if it does not block the signal: pass it on.
        signal.signal(
            signal.SIGINT, lambda *_: signal.pthread_kill(waiting.ident or 0, signal.SIGINT)
        )
        try:
            return work()
        finally:
            if self._ending.is_set():
                self._end()

    @property
    def announced(self) -> bool:
        """Whether SIGINT has arrived; the process is then ending."""
        return self._ending.is_set()

    def last_word(self) -> bool:
        """
        Return whether the caller may print the last line: True for the first call, False for every
        later call.
        """
        return self._last_word.acquire(blocking=False)

    def _wait(self) -> None:
        """Announce the interrupt, end all children, and give the main thread time to unwind."""
        signal.sigwait({signal.SIGINT})
        self._ending.set()
        if self.last_word():
            self._say()
        _silence()
        _end_children()
        if self._main.ident is not None and _WAKE is not None:
            signal.pthread_kill(self._main.ident, _WAKE)
        time.sleep(_GRACE_S)
        self._end()

    def _raise(self, *_: Any) -> None:
        if self._ending.is_set():
            raise KeyboardInterrupt

    def _end(self) -> NoReturn:
        _end_children()
        os._exit(INTERRUPTED)


def _keep_blocked() -> None:
    """
    Keep multiprocessing from unblocking SIGINT in this thread when its first process starts.

    Multiprocessing blocks SIGINT and SIGTERM while it starts its resource tracker, then unblocks
    both even if they were blocked before. Worker processes would inherit the unblocked SIGINT and
    answer Ctrl-C with a traceback.
    """
    from multiprocessing import resource_tracker

    own = getattr(resource_tracker, "_IGNORED_SIGNALS", ())
    kept = tuple(number for number in own if number != signal.SIGINT)
    setattr(resource_tracker, "_IGNORED_SIGNALS", kept)  # noqa: B010 - not in the types


def _silence() -> None:
    """Discard standard error: what libraries print while the process ends does not help users."""
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.flush()
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _end_children() -> None:
    """Kill all descendants; stop all of them first, so that none reacts to the death of another."""
    found: dict[int, None] = {}
    for _ in range(4):  # until no stopped process can have started another one
        fresh = [process for process in descendants(os.getpid()) if process not in found]
        if not fresh:
            break
        for process in fresh:
            found[process] = None
            _send(process, signal.SIGSTOP)
    for process in found:
        _send(process, signal.SIGKILL)


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def descendants(ancestor: int) -> list[int]:
    """
    Return the process ids of all descendants of a process, parents before their children.

    Args:
        ancestor: A process id; the result does not contain it.
    """
    children: dict[int, list[int]] = {}
    for process, parent in _processes():
        children.setdefault(parent, []).append(process)
    found = list(children.get(ancestor, ()))
    for process in found:  # grows while it is walked
        found += children.get(process, ())
    return found


def _processes() -> Iterator[tuple[int, int]]:
    """Yield the process id and parent id of each process that the system lists."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            # The name stands in parentheses and may hold blanks and parentheses.
            state, parent = (
                (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:2]
            )
            if state not in "ZX":
                yield int(folder.name), int(parent)
    if not Path("/proc/self").exists():
        import multiprocessing

        for child in multiprocessing.active_children():
            if child.pid is not None:
                yield child.pid, os.getpid()
