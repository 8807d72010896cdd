"""Errors for waits for other ranks, and a wait with a timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .bounded import bounded

__all__ = ["LostError", "UnansweredError", "within"]

T = TypeVar("T")


class LostError(RuntimeError):
    """
    A transfer did not complete: a connection broke, or the deadline passed.

    Args:
        action: The action that needed the transfer.
        peer: The rank at the other end; -1 for a collective.
        late: Whether the deadline passed.
        library: The library's error message.
    """

    def __init__(self, action: str, peer: int, late: bool, library: str) -> None:
        super().__init__(action, peer, late, library)
        self.action, self.peer, self.late, self.library = action, peer, late, library

    def __str__(self) -> str:
        other = "all ranks" if self.peer < 0 else f"rank {self.peer}"
        how = "did not end before the deadline" if self.late else "lost its connection"
        return f"{self.action} with {other} {how}"


class UnansweredError(LostError):
    """The other ranks, or their common store, did not answer before a wait's deadline."""

    def __str__(self) -> str:
        return self.library


def within(
    call: Callable[[], T],
    seconds: float,
    *,
    rank: int,
    what: str,
    action: str,
    peer: int = -1,
    step: int | None = None,
) -> T:
    """
    Return the result of a call, or raise an error if the call does not return in time.

    The call runs in a separate thread (`bounded`), with the default device and stream. Python
    handles SIGTERM during this wait; during a direct call of a library it would not.

    Args:
        call: Function that waits for a device, or for a library that has no timeout.
        seconds: Timeout in seconds.
        rank: This rank.
        what: What the call waits for, for the error's text.
        action: What this rank is doing, for the error's text.
        peer: The rank to wait for; -1 for all ranks, or for no rank.
        step: The step; None outside of steps.

    Raises:
        UnansweredError: The call did not return in time; the text contains `rank`, `step` and
            `what`.
        BaseException: Any error that the call raises.

    >>> within(lambda: 3, 1.0, rank=0, what="a number", action="start")
    3
    """
    try:
        return bounded(call, seconds)
    except TimeoutError:
        at = "" if step is None else f", step {step}"
        raise UnansweredError(
            action, peer, True, f"rank {rank}{at}, {action}: waited {seconds:g} s for {what}"
        ) from None
