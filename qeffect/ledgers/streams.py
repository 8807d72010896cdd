"""
The streams of a contract: work that callers enqueued, and waits between streams.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from ..text import shown
from .runner import FAILURES, Runner

__all__ = ["Streams"]


class Streams:
    """
    The links between caller streams and the graph streams of state domains (stages whose FP8 scales
    are updated together).

    Args:
        runner: Runs the transitions.
        callers: Names of the caller streams.
        domains: For each state domain's name, its index.
        links: For each (caller, domain name), the index of the link between the two streams.

    Attributes:
        enter: Record that a link's caller enqueued work and that its graph stream waits for it.
        join: Record that the graph stream of a link waits for its caller.
        wait: Record that the caller of a link waits for its graph stream.
    """

    __slots__ = (
        "_domains",
        "_links",
        "_links_of",
        "_memory",
        "_runner",
        "_submit",
        "callers",
        "enter",
        "join",
        "wait",
    )

    enter: Callable[[int], None]
    join: Callable[[int], None]
    wait: Callable[[int], None]

    def __init__(
        self,
        runner: Runner,
        callers: tuple[Hashable, ...],
        domains: Mapping[Hashable, int],
        links: Mapping[tuple[Hashable, Hashable], int],
    ) -> None:
        self._runner = runner
        self.callers = callers
        self._domains = domains
        self._links = links
        self._links_of = {
            caller: tuple(link for (name, _), link in links.items() if name == caller)
            for caller in callers
        }
        # `submit` of a configured link cannot fail.
        self._submit, self._memory = runner.transitions.submit, runner.memory
        self.join, self.wait = runner.on_link("join"), runner.on_link("wait")
        self.enter = self._entering()

    def link(self, caller: Hashable, domain: Hashable) -> int:
        """
        Return the index of a link.

        Raises:
            ValueError: No caller or no domain has that name.
        """
        try:
            return self._links[caller, domain]
        except (KeyError, TypeError):
            raise ValueError(
                f"no link of caller {shown(caller)} and domain {shown(domain)}; expected one of "
                f"{list(self._links)}"
            ) from None

    def caller(self, call: str, caller: Hashable | None) -> int:
        """
        Return the index of a caller, by default of the first caller.

        Raises:
            ValueError: No caller has that name.
        """
        try:
            return 0 if caller is None else self.callers.index(caller)
        except ValueError:
            raise ValueError(
                f"{call}: no caller {shown(caller)}; expected one of {list(self.callers)}"
            ) from None

    def submit(self, caller: Hashable) -> None:
        """Record that a caller enqueued work, on each of its links."""
        try:
            own = self._links_of[caller]
        except (KeyError, TypeError):
            raise ValueError(
                f"submit: no caller {shown(caller)}; expected one of {list(self.callers)}"
            ) from None
        for link in own:
            self._submit(self._memory, link)
        if self._runner.observer is not None:
            for link in own:
                self._runner.observer("submit", (link,), None)

    def _entering(self) -> Callable[[int], None]:
        """
        Return a function that calls `submit` for a link's caller and `join` for the link.

        Every F, dI and dW calls the function, so its look-ups are bound once.
        """
        runner, memory = self._runner, self._memory
        submit, join = self._submit, runner.transitions.join
        own = [self._links_of[caller] for caller, _ in self._links]
        num_links = len(own)

        def enter(link: int) -> None:
            if link.__class__ is not int or not 0 <= link < num_links:
                runner.arguments.link("join", link)
            try:
                for each in own[link]:
                    submit(memory, each)
                join(memory, link)
            except FAILURES as error:
                raise runner.failure(error, "join", (link,)) from None
            if runner.observer is not None:
                for each in own[link]:
                    runner.observer("submit", (each,), None)
                runner.observer("join", (link,), None)

        return enter

    def drain(self) -> None:
        """Record that the host has seen the device work of every domain finish."""
        for domain in self._domains.values():
            self._runner.apply("drain", domain)
        for domain in self._domains.values():
            self._runner.tell("drain", (domain,), None)
