"""
Grouped dW: one dW computes the weight gradients of several tapes. This module keeps the further
tapes of each such dW, from its check to its commit or abort.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..keys import TapeKey, TapeRef
from ..text import shown
from .pool import Pool
from .runner import FAILURES, Runner

__all__ = ["Groups", "Members"]

#: The other tapes of a grouped dW: their keys and references.
Members = tuple[tuple[TapeKey, TapeRef], ...]

#: Accepted transitions that the observer has yet to hear of: their names and arguments.
_Events = list[tuple[str, tuple[Any, ...]]]


class Groups:
    """
    The groups of all dW in flight; `Contract.check_wgrad` documents the refusals of this class.

    The observer is called only after all transitions of a call have run, because it may raise.

    Args:
        runner: Runs the transitions.
        pool: The free slots (sets of buffers); a slot returns there when the dW of its tape has
            ended.

    Attributes:
        open: For each ticket number of a dW in flight, the other tapes of the dW's group.
    """

    __slots__ = ("_pool", "_runner", "open")

    def __init__(self, runner: Runner, pool: Pool) -> None:
        self._runner = runner
        self._pool = pool
        self.open: dict[int, Members] = {}

    def rehearse(self, check: tuple[Any, ...], members: Members) -> None:
        """
        Check a dW, and add the other tapes of its group, on a copy of the memory.

        If a guard refuses one of these tapes, the contract's own memory is unchanged.

        Args:
            check: The arguments of the dW's check.
            members: The other tapes of the dW's group.

        Raises:
            Refused: A guard refused the dW or another tape of the group.
        """
        copied = self._runner.memory.copy()
        functions = self._runner.transitions.functions
        serial = functions["check_wgrad"](copied, *check)
        for key, ref in members:
            arguments = self._arguments(check, serial, key, ref)
            try:
                functions["group_wgrad"](copied, *arguments)
            except FAILURES as error:
                raise self._runner.failure(error, "group_wgrad", arguments, copied) from None

    def take(self, check: tuple[Any, ...], serial: int, members: Members) -> _Events:
        """Add the other tapes of the group to the dW that was just checked."""
        self.open[serial] = members
        events: _Events = []
        for key, ref in members:
            arguments = self._arguments(check, serial, key, ref)
            self._run("group_wgrad", arguments, events)
        return events

    def commit(self, serial: int, covered: Any) -> _Events:
        """Commit the dW of each other tape in the group, after the group's dW has committed."""
        events: _Events = []
        for key, ref in self.open.pop(serial, ()):
            if self._runner.memory.spoiled[key.stage] == key.epoch:
                self._drop(key, ref, events)
            self._end(key, ref, covered, events)
        return events

    def abort(self, serial: int) -> _Events:
        """Abort each other tape in the group, after the group's dW has failed."""
        events: _Events = []
        for key, ref in self.open.pop(serial, ()):
            self._drop(key, ref, events)
            self._end(key, ref, self._runner.memory.matrices[key.stage], events)
        return events

    def tell(self, events: _Events) -> None:
        """Tell the observer of accepted transitions."""
        for name, arguments in events:
            self._runner.tell(name, arguments, None)

    def _drop(self, key: TapeKey, ref: TapeRef, events: _Events) -> None:
        """Abort a member's tape, unless the tape was dropped before."""
        if self._runner.memory.generation[ref.slot] == ref.generation:
            self._run("drop", (key, ref), events)

    def _end(self, key: TapeKey, ref: TapeRef, covered: Any, events: _Events) -> None:
        """End the dW of a member's tape; its slot is then free unless a reader holds the slot."""
        self._run("ungroup_wgrad", (key, ref, covered), events)
        self._pool.reclaim(ref.slot)

    def _run(self, name: str, arguments: tuple[Any, ...], events: _Events) -> None:
        self._runner.apply(name, *arguments)
        events.append((name, arguments))

    def _arguments(
        self, check: tuple[Any, ...], serial: int, key: TapeKey, ref: TapeRef
    ) -> tuple[Any, ...]:
        _, leader, link, _, _ = check
        destination = self._runner.memory.destination_of[key.cell]
        return key, ref, leader.slot, serial, link, destination

    def members(self, group: Iterable[Any]) -> Members:
        """
        Return the other tapes of a grouped dW, as checked (key, reference) pairs.

        Raises:
            Refused: ``ownership.unknown-key`` or ``ownership.unknown-slot``.
            TypeError: The group is not a collection of pairs of key and reference.
        """
        if isinstance(group, str) or not isinstance(group, Iterable):
            raise TypeError(f"check_wgrad: group must be a collection of pairs, got {shown(group)}")
        members = tuple(group)
        for pair in members:
            if not isinstance(pair, tuple) or [*map(type, pair)] != [TapeKey, TapeRef]:
                raise TypeError(
                    "check_wgrad: each member of group must be a pair (key, ref), the key and the "
                    f"reference of a tape, got {shown(pair)}"
                )
            self._runner.arguments.key("group_wgrad", pair[0])
            self._runner.arguments.tape("group_wgrad", *pair)
        return members
