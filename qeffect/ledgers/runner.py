"""
The runner: runs transitions (calls that check and change the contract's state) over a contract's
memory, and builds the exceptions for refused transitions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define

from ..arguments import UNUSABLE, Arguments
from ..engine.concrete_memory import Memory
from ..engine.stage import Transitions
from ..explain import explain
from ..refusals import Refused

__all__ = ["FAILURES", "Observer", "Runner"]

#: Exceptions of a transition that did not run: a refusal, or an argument that is not configured.
FAILURES = (Refused, *UNUSABLE)

#: Called after every accepted transition with its name, its arguments and what it returned.
Observer = Callable[[str, tuple[Any, ...], Any], None]


@define(slots=True)
class Runner:
    """
    Runs the transitions of every part of a contract over one memory.

    Args:
        memory: The contract's memory.
        transitions: The composed transitions that run over it.
        arguments: Checks of the stages, slots, links and keys that a caller passes.
        observer: Called after every accepted transition; None for no observer.
    """

    memory: Memory
    transitions: Transitions
    arguments: Arguments
    observer: Observer | None = None

    def run(self, transition: str, *arguments: Any) -> Any:
        """
        Run a transition, call the observer, and return the transition's result.

        Raises:
            Refused: A guard refused; what was found and expected is filled in.
            TypeError, ValueError: An argument was never configured.
        """
        result = self.apply(transition, *arguments)
        self.tell(transition, arguments, result)
        return result

    def apply(self, transition: str, *arguments: Any) -> Any:
        """
        Run a transition without calling the observer, and return its result.

        After `apply`, a ledger updates its own state, and only then calls `tell`: the observer may
        raise, but the transition has already happened.

        Raises:
            Refused: A guard refused; what was found and expected is filled in.
            TypeError, ValueError: An argument was never configured.
        """
        try:
            return self.transitions.functions[transition](self.memory, *arguments)
        except FAILURES as error:
            raise self.failure(error, transition, arguments) from None

    def tell(self, transition: str, arguments: tuple[Any, ...], result: Any) -> None:
        """Call the observer with an accepted transition; its exceptions reach the caller."""
        if self.observer is not None:
            self.observer(transition, arguments, result)

    def failure(
        self,
        error: Exception,
        transition: str,
        arguments: tuple[Any, ...],
        memory: Memory | None = None,
    ) -> Exception:
        """
        Return the exception for a transition that did not run.

        A refusal that already names its transition is returned unchanged.

        Args:
            error: The exception that the transition raised, of a type in `FAILURES`.
            transition: Name of the transition (contract call).
            arguments: The transition's arguments; None for an argument that the contract chooses
                itself.
            memory: The memory that the transition would have changed; by default the contract's.
        """
        if isinstance(error, Refused):
            if error.transition:
                return error
            return explain(error, transition, self.memory if memory is None else memory, arguments)
        return self.arguments.unusable(error, transition, arguments)

    def on_link(self, transition: str) -> Callable[[int], None]:
        """
        Return a function that runs a transition whose only argument is a link (pair of streams).

        Every F, dI and dW calls the returned function. So all look-ups are made once, in advance,
        because they would cost measurable time.
        """
        function, memory = self.transitions.functions[transition], self.memory
        num_links = self.arguments.num_links

        def run(link: int) -> None:
            if link.__class__ is not int or not 0 <= link < num_links:
                self.arguments.link(transition, link)
            try:
                function(memory, link)
            except FAILURES as error:
                raise self.failure(error, transition, (link,)) from None
            if self.observer is not None:
                self.observer(transition, (link,), None)

        return run
