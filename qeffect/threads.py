"""
One call at a time: two threads inside one contract are found at once, before either does harm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

__all__ = ["ConcurrentCallError", "alone"]

P = ParamSpec("P")
R = TypeVar("R")


class ConcurrentCallError(RuntimeError):
    """
    A call came while another one of the same contract was under way; it has done nothing.

    Calls may come from any thread, one after another, as those of autograd's own threads do. Two
    at once leave open which action comes first on the device, so that no lock could mend it: the
    caller orders its threads. A call from within a call, by an observer or a finalizer, is the
    same error.

    Args:
        call: Name of the call.

    >>> print(ConcurrentCallError("commit"))
    commit while another call of this contract is under way; ...
    """

    def __init__(self, call: str) -> None:
        super().__init__(call)

    def __str__(self) -> str:
        return (
            f"{self.args[0]} while another call of this contract is under way; nothing was done: "
            "let threads take turns, each call after the last has returned"
        )


class _Entered(Protocol):
    _entered: bool


S = TypeVar("S", bound=_Entered)


def alone(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """
    Decorate a method that no other may overlap.

    The interpreter changes threads where a function is called or a loop turns, and between the
    look at the flag and its setting there is neither. A flag so costs a tenth of what a lock does;
    the calls of a step spell it out, since a decorator would cost a call.
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
