"""
Independent parts of the proofs, run in parallel processes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from attrs import frozen

__all__ = ["Part", "Result", "run_parallel"]

#: A part: takes a function for progress lines and returns its result.
Part = Callable[[Callable[[str], None]], Any]


@frozen
class Result:
    """
    The result of one part.

    Args:
        found: What the part returned.
        seconds: Wall-clock time.
        cpu: Processor time in seconds.
    """

    found: Any
    seconds: float
    cpu: float


def run_parallel(parts: Mapping[str, Part], tell: Callable[[str], None]) -> dict[str, Result]:
    """
    Run some parts and return their results by name.

    All parts except the last run in forked processes if the system can fork and has more than one
    core, otherwise one after another. The last part runs in this process.

    Args:
        parts: The parts, by name.
        tell: Called with a progress line from time to time.

    Raises:
        RuntimeError: A part's process ended without a result.
    """
    if sys.platform != "linux" or _cores() < 2:
        return {name: _timed(part, tell) for name, part in parts.items()}
    *others, last = parts
    context = multiprocessing.get_context("fork")
    processes = []
    pipes: dict[Any, str] = {}  # the type of the result of wait is wider than that of its argument
    found: dict[str, Result] = {}

    def listen(timeout: float | None) -> None:
        for pipe in wait(list(pipes), timeout):
            message = _received(pipe)
            if isinstance(message, str):
                tell(message)
            elif isinstance(message, Result):
                found[pipes.pop(pipe)] = message
            else:
                raise message or RuntimeError(
                    f"part {pipes[pipe]} of the proofs: its process ended without a result"
                )

    def tell_and_listen(line: str) -> None:
        tell(line)
        listen(0)

    try:
        for name in others:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(parts[name], theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = name
        found[last] = _timed(parts[last], tell_and_listen)
        while pipes:
            listen(None)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return {name: found[name] for name in parts}


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


def _child(part: Part, pipe: Connection) -> None:
    try:
        pipe.send(_timed(part, pipe.send))
    except Exception as error:
        pipe.send(error)
    pipe.close()
