"""
One call at a time: a call from a second thread into the same contract is refused before it changes
anything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

__all__ = ["ConcurrentCallError", "exclusive_call"]

P = ParamSpec("P")
R = TypeVar("R")


class ConcurrentCallError(RuntimeError):
    """
    A call came while another call of the same contract was under way; the later call did nothing.

    Different threads may call, for example autograd's threads, but only one after another. With two
    calls at once, it is undefined which action comes first on the device. A lock would not define
    the order, so the caller must order its threads. A call by an observer or a finalizer, from
    within another call, raises this error too.

    Args:
        call: Name of the contract's method that was called.

    >>> print(ConcurrentCallError("commit"))
    commit while another call of this contract is under way; ...
    """

    def __init__(self, call: str) -> None:
        super().__init__(call)

    def __str__(self) -> str:
        return (
            f"{self.args[0]} while another call of this contract is under way; nothing was done. "
            "Let threads take turns: start each call after the previous call has returned"
        )


class _Entered(Protocol):
    _entered: bool | None


S = TypeVar("S", bound=_Entered)


def exclusive_call(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """
    Decorate a method so that no other call of its contract can overlap it.

    Python switches threads only at calls and loop iterations, and neither comes between reading and
    setting the flag. So a flag suffices, at a tenth of a lock's cost. The most frequent calls of a
    step contain a copy of these lines, because a decorator would cost a function call.
    """
    name = getattr(method, "__name__", "a call")

    @wraps(method)
    def entered(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._entered:
            raise ConcurrentCallError(name)
        self._entered = True
        try:
            return method(self, *args, **kwargs)
        finally:
            self._entered = False

    return entered
