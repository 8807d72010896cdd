"""
Run a command once per rank, as torchrun would start it, under a time limit.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from ...ranks.processes import rank_variables, store_here

__all__ = ["RankExits", "last_words", "run_ranks"]

_TAIL = 16
_REACTION_S = 3.0
_POLL_S = 0.2
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")


def last_words(text: str, lines: int = _TAIL) -> list[str]:
    """
    The last lines of a process's output, with the machine's folders cut off from paths.

    Earlier lines that name an error are returned first, because the first error is usually the
    cause.

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
        words: The last lines of the first rank that failed, or of the first rank if no rank failed.
        seconds: Duration of the run.
        pids: Process id per rank.
    """

    codes: list[int | None]
    words: list[str]
    seconds: float
    pids: list[int] = attrs.field(factory=list)

    @property
    def error(self) -> str | None:
        """The failure in one line; None if all ranks succeeded."""
        if all(code == 0 for code in self.codes):
            return None
        if None in self.codes:
            return f"did not end within {self.seconds:.0f} s"
        # A traceback ends with the error and may begin with its cause; torch warns after it.
        errors = list(filter(_ERROR.match, self.words))
        said = errors or self.words or ["failed without output"]
        same = not errors or errors[0] == errors[-1]
        return said[-1] if same else f"{said[-1]} (first: {errors[0]})"


def run_ranks(
    command: Sequence[str],
    world: int,
    limit: float,
    folder: Path,
    name: str,
    *,
    own: int | None = None,
    environ: Mapping[str, str] | None = None,
    watch: Callable[[], None] = lambda: None,
) -> RankExits:
    """
    Run a command once per rank under torchrun's environment variables, until all processes end.

    Three seconds after a rank fails, the other ranks are killed. All ranks are killed at the time
    limit, or when this call is interrupted. Only processes that were started here are killed.

    Args:
        command: The program and its arguments, the same for every rank.
        world: Number of ranks.
        limit: Time limit in seconds; infinity for no limit.
        folder: Folder of the ranks' output files.
        name: Beginning of the names of these files.
        own: The only rank to start here, if torchrun started this process as that rank; None to
            start all ranks, which connect through a store in this process.
        environ: Environment variables that every rank gets in addition to torchrun's.
        watch: Function to call about five times per second.
    """
    began = time.monotonic()
    store = None
    places: dict[int, dict[str, str]] = {}
    if own is None:
        store = store_here()
        places = {rank: rank_variables(rank, world, store.port) for rank in range(world)}
    else:
        places[own] = {}
    paths = [folder / f"{name}.{rank}.txt" for rank in places]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for path, place in zip(paths, places.values(), strict=True):
            with path.open("wb") as out:
                ranks.append(
                    subprocess.Popen(
                        [*command],
                        stdin=subprocess.PIPE,  # ends with this process, however it ends
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        env={"OMP_NUM_THREADS": "1", **os.environ, **place, **(environ or {})},
                        start_new_session=True,
                    )
                )
        codes = _ended(ranks, began + limit, watch)
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
        del store
    failed = [n for n, process in enumerate(ranks) if codes[n] not in (None, 0)]
    # Ranks without an exit code were killed by this function, after another rank failed.
    found = [-signal.SIGKILL if code is None and failed else code for code in codes]
    told = paths[failed[0] if failed else 0].read_text(encoding="utf-8", errors="replace")
    seconds = time.monotonic() - began
    return RankExits(found, last_words(told), seconds, [process.pid for process in ranks])


def _ended(
    ranks: Sequence[subprocess.Popen[bytes]], until: float, watch: Callable[[], None]
) -> list[int | None]:
    """
    Wait for the ranks; return the exit code of each, or None if the rank still runs at the limit.
    """
    while time.monotonic() < until and any(rank.poll() is None for rank in ranks):
        if any(rank.poll() not in (None, 0) for rank in ranks):
            until = min(until, time.monotonic() + _REACTION_S)
        watch()
        time.sleep(_POLL_S)
    return [rank.poll() for rank in ranks]
