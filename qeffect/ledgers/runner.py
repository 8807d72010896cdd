"""
The runner: one memory, the transitions over it, and what is said of those that are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define

from ..arguments import UNUSABLE, Arguments
from ..engine.memory import Memory
from ..engine.stage import Transitions
from ..explain import explain
from ..refusals import Refused

__all__ = ["Observer", "Runner"]

#: Called after every accepted transition with its name, its arguments and what it returned.
Observer = Callable[[str, tuple[Any, ...], Any], None]


@define(slots=True)
class Runner:
    """
    Runs transitions over one memory; every part of a contract runs its own through it.

    Args:
        memory: The contract's memory.
        transitions: The composed transitions that run over it.
        arguments: The names that a caller may use.
        observer: Called after every accepted transition; None costs nothing.
    """

    memory: Memory
    transitions: Transitions
    arguments: Arguments
    observer: Observer | None = None

    def run(self, transition: str, *arguments: Any) -> Any:
        """
        Run a transition, tell the observer, and return what it returned.

        Raises:
            Refused: A guard refused; what was found and expected is filled in.
            TypeError, ValueError: An argument was never configured.
        """
        try:
            result = self.transitions.functions[transition](self.memory, *arguments)
        except Refused as refused:
            raise explain(refused, transition, self.memory, arguments) from None
        except UNUSABLE as error:
            raise self.arguments.unusable(error, transition, arguments) from None
        if self.observer is not None:
            self.observer(transition, arguments, result)
        return result
