"""
Run independent parts of the proofs in parallel processes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from attrs import frozen

__all__ = ["Part", "Result", "run_parallel"]

#: Seconds between two lines of progress from another process, and between two looks for lines.
_SECONDS: Final = 0.2

#: A part: takes a function for progress lines and returns its result.
Part = Callable[[Callable[[str], None]], Any]


@frozen
class Result:
    """
    The result of one of the functions that `run_parallel` runs.

    Args:
        found: The value that the function returned.
        seconds: Wall-clock time in seconds.
        cpu: Processor time in seconds.
    """

    found: Any
    seconds: float
    cpu: float


def run_parallel(parts: Mapping[str, Part], tell: Callable[[str], None]) -> dict[str, Result]:
    """
    Run some parts and return their results by name.

    The last part runs in this process. The other parts run in forked processes, one for each
    further core; if there are fewer cores than parts, some parts run one after another. All parts
    run in this process if the system cannot fork or has one core.

    Args:
        parts: The functions to run, by name.
        tell: Function that is called with a progress line from time to time.

    Raises:
        RuntimeError: A part's process ended without a result.
    """
    if sys.platform != "linux" or _cores() < 2:
        return {name: _timed(part, tell) for name, part in parts.items()}
    *others, last = parts
    count = min(len(others), _cores() - 1)
    context = multiprocessing.get_context("fork")
    processes = []
    #: The parts of each process that have not ended. (The result of wait has a wider type than its
    #: argument.)
    pipes: dict[Any, list[str]] = {}
    found: dict[str, Result] = {}

    def listen(timeout: float | None) -> None:
        for pipe in wait(list(pipes), timeout):
            message = _received(pipe)
            if isinstance(message, str):
                tell(message)
            elif isinstance(message, Result):
                found[pipes[pipe].pop(0)] = message
                if not pipes[pipe]:
                    del pipes[pipe]
            else:
                raise message or RuntimeError(
                    f"proofs: the process of these parts ended without their results: "
                    f"{', '.join(pipes[pipe])}"
                )

    listen_seldom = _seldom(partial(listen, 0))

    def tell_and_listen(line: str) -> None:
        tell(line)
        listen_seldom()

    try:
        for names in (others[n::count] for n in range(count)):
            ours, theirs = context.Pipe(duplex=False)
            own = [parts[name] for name in names]
            process = context.Process(target=_child, args=(own, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = names
        found[last] = _timed(parts[last], tell_and_listen)
        while pipes:
            listen(None)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return {name: found[name] for name in parts}


def _seldom(call: Callable[..., None]) -> Callable[..., None]:
    """Wrap a function so that a call is skipped if the previous call was too recent."""
    called = float("-inf")

    def seldom(*args: Any) -> None:
        nonlocal called
        if time.monotonic() - called >= _SECONDS:
            call(*args)
            called = time.monotonic()

    return seldom


def _received(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _timed(part: Part, tell: Callable[[str], None]) -> Result:
    began, cpu = time.perf_counter(), time.process_time()
    found = part(tell)
    return Result(found, time.perf_counter() - began, time.process_time() - cpu)


def _child(parts: Sequence[Part], pipe: Connection) -> None:
    tell = _seldom(pipe.send)  # a full pipe would stop the part
    try:
        # A long result waits until the first process reads it, so all results come last.
        for result in [_timed(part, tell) for part in parts]:
            pipe.send(result)
    except Exception as error:
        pipe.send(error)
    pipe.close()
