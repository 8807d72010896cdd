"""
A command run once per rank, as torchrun would start it, under a time limit.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

__all__ = ["RankExits", "last_words", "run_ranks"]

_TAIL = 16
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")


def last_words(text: str, lines: int = _TAIL) -> list[str]:
    """
    The last lines of a process's output, without the folders of the machine.

    Earlier lines that name an error come first: the first error is what went wrong.

    >>> last_words("a\\n\\n  File \\"/usr/lib/x.py\\", line 3\\n")
    ['a', 'File "x.py", line 3']
    >>> last_words("OSError: full\\nduring this:\\nb\\nValueError: c", lines=2)
    ['OSError: full', 'b', 'ValueError: c']
    """
    said = [line.strip() for line in text.splitlines() if line.strip()]
    hidden = list(dict.fromkeys(filter(_ERROR.match, said[:-lines])))
    shown = hidden[:_TAIL] + said[-lines:]
    return [re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", line)[:300] for line in shown]


@attrs.frozen
class RankExits:
    """
    How the processes of all ranks ended.

    Args:
        codes: Exit code per rank; None for a process that was killed at the time limit.
        words: The last lines of the first rank that failed, or of rank 0.
        seconds: Duration of the run.
    """

    codes: list[int | None]
    words: list[str]
    seconds: float

    @property
    def error(self) -> str | None:
        """What went wrong, in one line; None without a failure."""
        if all(code == 0 for code in self.codes):
            return None
        if None in self.codes:
            return f"did not end within {self.seconds:.0f} s"
        # A traceback ends with the error and may begin with its cause; torch warns after it.
        errors = list(filter(_ERROR.match, self.words))
        said = errors or self.words or ["said nothing"]
        same = not errors or errors[0] == errors[-1]
        return said[-1] if same else f"{said[-1]} (first: {errors[0]})"


def run_ranks(
    command: Sequence[str], world: int, limit: float, folder: Path, name: str
) -> RankExits:
    """
    Run a command once per rank under torchrun's environment variables, until all end.

    Three seconds after a rank fails the others are killed, and all are killed at the limit. Only
    processes that were started here are killed.

    Args:
        command: The command line.
        world: Number of ranks.
        limit: Time limit in seconds.
        folder: Folder of the ranks' output files.
        name: Beginning of the names of these files.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.monotonic()
    ranks: list[subprocess.Popen[bytes]] = []
    paths = [folder / f"{name}.{rank}.txt" for rank in range(world)]
    for rank, path in enumerate(paths):
        place = {
            "OMP_NUM_THREADS": "1",  # as torchrun sets it
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        with path.open("wb") as out:
            ranks.append(
                subprocess.Popen(
                    [*command],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=place,
                    start_new_session=True,
                )
            )
    until = began + limit
    while time.monotonic() < until and any(rank.poll() is None for rank in ranks):
        if any(rank.poll() not in (None, 0) for rank in ranks):
            until = min(until, time.monotonic() + 3.0)
        time.sleep(0.05)
    failed = [n for n, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
    codes: list[int | None] = []
    for process in ranks:
        code = process.poll()
        if code is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # A rank that was killed because another had failed is not the one that failed.
        codes.append(code if code is not None else (None if not failed else -signal.SIGKILL))
    told = paths[failed[0] if failed else 0].read_text(encoding="utf-8", errors="replace")
    return RankExits(codes, last_words(told), time.monotonic() - began)
