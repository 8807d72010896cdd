"""
Report why torchrun ended a rank during its start, that is, before its first step.

If a rank dies, torchrun sends SIGTERM to the other ranks. During its start a rank imports
libraries, or waits inside them for the other ranks, and Python cannot run a signal handler then.
Therefore the signal wakes a thread, which finds out which ranks of this host have ended. The thread
is set up before anything else is imported (`qeffect.startup`), and ends at the first step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["ORPHANED", "PARENT", "START", "Start", "may_be_launcher", "trains"]

#: Seconds for which a surviving rank keeps running, so that other ranks do not take it for the dead
#: rank.
_STAY_S = 2.0
#: Seconds for which a rank whose connection broke looks for the process that has ended.
_SEEN_S = 1.0
#: What to do if a run ended before its file was read.
_AGAIN = "Start the run again, with --resume if it has checkpoints"
#: Name of a file beside torchrun's error file. A rank makes this file to say that it ends by itself
#: and reports the cause.
_SPOKEN = "qeffect.ended"


def trains(argv: Sequence[str]) -> bool:
    """
    Whether a command line begins a training run under torchrun.

    Args:
        argv: The arguments of a command line; ``train`` may be at any position.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and "train" in argv


class Start:
    """
    The start of a rank, from its first import to its first step.

    Attributes:
        place: What the rank is doing now; the reported cause repeats this text.
        tell: Called with the cause and its kind, on the rank that reports; returns a line that says
            whether to start the run again. None before the run's settings are known.
    """

    def __init__(self) -> None:
        self.place = "importing"
        self.tell: Callable[[str, str], str] | None = None
        self._wakes: tuple[int, int] | None = None
        self._spoke = False
        self._speaker: str | None = None
        self._choice = threading.Lock()

    def arm(self) -> None:
        """Handle SIGTERM from now on; call this in the main thread of a rank under torchrun."""
        if threading.current_thread() is not threading.main_thread() or self._spoke:
            return
        if self._wakes is None:
            self._wakes = os.pipe()
            os.set_blocking(self._wakes[1], False)
            # The thread inherits the mask: signals are for the other threads to take.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            threading.Thread(target=self._wait, name="qeffect-start", daemon=True).start()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(self._wakes[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._noted)

    def disarm(self) -> None:
        """Stop handling SIGTERM, because the start is over."""
        if signal.getsignal(signal.SIGTERM) == self._noted:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._wakes is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)

    def gone(self) -> tuple[int, str] | None:
        """
        Find out which rank of this host has ended, after a broken connection during the start.

        Returns:
            The first rank that ended, and how it ended, in words. None if no rank of this host has
            ended, if a rank that ended has reported a cause, or if this rank is not starting. If
            SIGTERM came first, the thread that the signal woke reports the cause and ends this
            process, so this call does not return.
        """
        if self._wakes is None or signal.getsignal(signal.SIGTERM) != self._noted:
            return None
        until = time.monotonic() + _SEEN_S
        while time.monotonic() < until:
            gone = _ranks()[1]
            if any(map(_has_spoken, gone)):
                return None
            if gone:  # a process closes its connections a moment before it has ended
                self._speak_here()
                return gone[0], _cause(int(os.environ["RANK"]), gone, self.place)[1]
            time.sleep(0.05)
        return None

    def leave(self) -> None:
        """Tell the host's other ranks that this rank reports its own end, so that they do not."""
        self._speak_here()
        self._spoke = True
        self.disarm()
        if (folder := _folder_of(int(os.environ.get("LOCAL_RANK", "0")))) is not None:
            with suppress(OSError):
                (folder / _SPOKEN).touch()

    def _speak_here(self) -> None:
        """Reserve the report for this thread; if the SIGTERM thread reports, wait for the end."""
        if not self._claim("caller"):
            time.sleep(_STAY_S + _SEEN_S)

    def _claim(self, speaker: str) -> bool:
        """Whether this speaker claimed first, and so reports alone why the process ends."""
        with self._choice:
            self._speaker = self._speaker or speaker
            return self._speaker == speaker

    def _noted(self, *_: object) -> None:
        """Python's signal handler; does nothing, since the signal has already woken the thread."""

    def _wait(self) -> None:
        """Wait for SIGTERM, report the cause, and end the process."""
        assert self._wakes is not None
        while signal.SIGTERM not in os.read(self._wakes[0], 64) or (
            signal.getsignal(signal.SIGTERM) != self._noted
        ):
            pass
        if not self._claim("signal"):
            return  # a broken connection told the main thread first
        here, gone = _ranks()
        spoken = [rank for rank in gone if _has_spoken(rank)]
        rank = int(os.environ["RANK"])
        if rank == min(here) and not spoken:
            kind, text = _cause(rank, gone, self.place)
            then = _AGAIN
            if self.tell is not None:
                with suppress(Exception):  # the cause is said in any case
                    then = self.tell(text, kind)
            line = f"Every rank stopped: {text}"
            if "--json" in sys.argv:
                said = json.dumps({"verdict": "unusable", "error": line})
                os.write(1, f"{said}\n".encode())
            os.write(2, f"qeffect: {line}\nqeffect: {then}\n".encode())
        time.sleep(_STAY_S)
        os._exit(2)


def _cause(rank: int, gone: Sequence[int], place: str) -> tuple[str, str]:
    """Return the kind of a cause, and the cause in words."""
    if gone:
        first, *more = gone
        others = f", as have ranks {more}" if more else ""
        return "gone", (
            f"rank {first}, start: the process has ended{others} (rank {rank} was {place})"
        )
    return "ended", (
        f"rank {rank}, start: the launcher ended it with SIGTERM while it was {place}; no rank of "
        "this host had ended before"
    )


def _ranks() -> tuple[list[int], list[int]]:
    """Return torchrun's ranks on this host: those that still run, and those that have ended."""
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    every = range(rank - local, rank - local + int(os.environ["LOCAL_WORLD_SIZE"]))
    running = {rank}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            state, parent = (
                (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:2]
            )
            if int(parent) != os.getppid() or state in "ZX":
                continue
            for word in (folder / "environ").read_bytes().split(b"\0"):
                if word.startswith(b"RANK="):
                    running.add(int(word[5:]))
    here = sorted(running.intersection(every))
    return here, [one for one in every if one not in running] if Path("/proc/self").exists() else []


def _folder_of(local: int) -> Path | None:
    """Return the folder in which torchrun looks for the error of a rank of this host."""
    own = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return None if not own else Path(own).parent.with_name(str(local))


def _has_spoken(rank: int) -> bool:
    local = rank - int(os.environ["RANK"]) + int(os.environ["LOCAL_RANK"])
    folder = _folder_of(local)
    return folder is not None and (folder / _SPOKEN).exists()


START = Start()
"""The start of this process."""

PARENT = [os.getppid()]
"""
Process id of this process's parent at the first import. If this process later has another parent,
that first parent has ended.
"""


def may_be_launcher(pid: int, proc: Path = Path("/proc")) -> bool:
    """
    Whether a process may have started this rank, rather than adopted the rank as an orphan.

    torchrun's agent is a Python process. A wrapper script between agent and rank has the agent's
    environment variables. If the process cannot be inspected, the result is True, so that a running
    launcher never counts as ended.

    Args:
        pid: The parent of this process.
        proc: The folder of the proc file system, which describes processes.
    """
    place = proc / str(pid)
    try:
        words = (place / "cmdline").read_bytes() + (place / "comm").read_bytes()
    except OSError:
        return True
    if any(word in words.lower() for word in (b"python", b"torch", b"pt_")):
        return True
    try:
        if "python" in (place / "exe").readlink().name:
            return True
        environment = (place / "environ").read_bytes()
        return b"TORCHELASTIC_RUN_ID=" in environment or _maps_python(place / "maps")
    except PermissionError:  # another user's process, so no agent; or the system's first process
        return pid != 1 and place.stat().st_uid == os.getuid()
    except OSError:
        return True


def _maps_python(path: Path) -> bool:
    maps = path.read_bytes()
    return b"libpython" in maps or b"libtorch" in maps


ORPHANED = ["TORCHELASTIC_RUN_ID" in os.environ and not may_be_launcher(PARENT[0])]
"""
Whether this rank's launcher had ended before the first import; `PARENT` is then another process.
"""


def _forked() -> None:
    """Record a forked child's parent, because a forked child does not import this module again."""
    PARENT[:] = [os.getppid()]
    ORPHANED[:] = [False]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
