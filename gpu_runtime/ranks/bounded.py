"""A timeout for functions that have no timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["bounded"]

T = TypeVar("T")


def bounded(call: Callable[[], T], seconds: float) -> T:
    """
    Return the result of a call, or stop waiting after a timeout.

    For example, a query of a store on an unreachable host may never return. The call runs in a
    daemon thread. If the call does not return, the thread is abandoned, and does not keep the
    process alive.

    Args:
        call: The function to call, without arguments.
        seconds: Timeout in seconds.

    Raises:
        TimeoutError: The call did not return in time.
        BaseException: Any error that the call raises.
    """
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # raised below
            failed.append(error)

    thread = threading.Thread(target=run, name="bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return found[0]
