"""
Run functions in fresh processes, which answer through a pipe and die with this process.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["ChildError", "ChildProcess", "answer", "first_line"]


class ChildError(RuntimeError):
    """A child process failed, ended, or gave no answer in time."""


class ChildProcess:
    """
    A function in a fresh process.

    The function sends answers: `("done", value)`, or `("failed", message)`.

    Args:
        serve: The function that the process calls, with one end of the pipe and the arguments.
        arguments: Arguments that can be pickled.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, value: Any) -> None:
        """
        Send a value to the process.

        Raises:
            ChildError: The process has ended.
        """
        try:
            self._pipe.send(value)
        except OSError as error:
            raise ChildError(f"the child process has ended: {error}") from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """
        Wait for the next answer.

        Args:
            timeout_s: Seconds to wait, after which the process is ended; None for no limit.

        Raises:
            ChildError: The function failed, the process ended, or the time limit passed.
        """
        try:
            if not self._pipe.poll(timeout_s):
                self.end()
                raise ChildError(f"no answer within {timeout_s:g} s; the process was ended")
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(timeout=5)
            raise ChildError(
                f"the process ended with exit code {self._process.exitcode}"
            ) from error
        if kind == "failed":
            raise ChildError(value)
        return value

    @property
    def alive(self) -> bool:
        """Whether the process is still running."""
        return self._process.is_alive()

    def end(self) -> None:
        """End the process: first by closing its pipe, then by force."""
        self._pipe.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(timeout=10)


def answer(pipe: Connection, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """
    Call a function, and send its value or the first line of its error through the pipe.
    """
    said: tuple[str, Any]
    try:
        said = ("done", function(*arguments, **options))
    except Exception as error:
        traceback.print_exc()
        said = ("failed", first_line(error))
    pipe.send(said)


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message, at most 300 characters."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
