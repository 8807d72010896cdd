"""
Checks of a caller's arguments: stages, slots (sets of buffers), links (pairs of streams) and keys
must be configured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attrs import frozen

from .engine.stage import TRANSITIONS
from .keys import Cell, TapeKey, TapeRef
from .refusals import Refused
from .text import counted, shown, spelled, within

__all__ = ["UNUSABLE", "Arguments"]

#: Exceptions that Python raises if a transition gets a name that was never configured.
UNUSABLE = (KeyError, IndexError, TypeError, AttributeError)

_CLASSES = {"key": TapeKey, "ref": TapeRef}
_INTEGERS = frozenset({"slot", "stage", "link", "domain", "token", "epoch"})


@frozen
class Arguments:
    """
    The configured stages, slots, links and keys of a process; all others are rejected with clear
    errors.

    Frequent calls do not check in advance whether a stage, slot, link or key is configured. A wrong
    argument makes the call's guards fail before anything is written, and `unusable` then finds the
    argument. Only types and negative indices are checked in advance. An object of another type that
    equals an integer (such as ``True``) would pass every guard and be stored. Python would count a
    negative index from the end of a list.

    Args:
        cells: Every configured cell (a key without its epoch).
        slots: For each stage, the indices of its slots.
        num_links: Number of links (pairs of a caller's stream and a graph stream).
    """

    cells: Collection[Cell]
    slots: Mapping[int, tuple[int, ...]]
    num_links: int

    @property
    def num_slots(self) -> int:
        """Number of slots of all stages."""
        return sum(len(own) for own in self.slots.values())

    def integer(self, transition: str, name: str, value: Any) -> None:
        """
        Require a plain ``int``; a bool or a NumPy integer is rejected.

        Raises:
            TypeError: The value is not a plain ``int``.
        """
        if value.__class__ is not int:
            raise TypeError(
                f"{transition}: {name} must be an int, got {shown(value)} "
                f"({value.__class__.__name__})"
            )

    def stage(self, transition: str, stage: Any) -> None:
        """
        Require a configured stage.

        Raises:
            TypeError: The stage is not an ``int``.
            ValueError: The stage is not configured.
        """
        self.integer(transition, "stage", stage)
        if stage not in self.slots:
            raise ValueError(
                f"{transition}: stage {shown(stage)} is not configured; expected one of "
                f"{list(self.slots)}"
            )

    def link(self, transition: str, link: Any) -> None:
        """
        Require a configured link (pair of a caller's stream and a graph stream).

        Raises:
            TypeError: The link is not an ``int``.
            ValueError: The link is not configured.
        """
        self.integer(transition, "link", link)
        if not 0 <= link < self.num_links:
            raise ValueError(
                f"{transition}: link {shown(link)} is not configured; links are 0 to "
                f"{self.num_links - 1}"
            )

    def slot(self, transition: str, key: Any, slot: Any) -> None:
        """
        Require the index of a configured slot (set of buffers).

        Raises:
            TypeError: The slot is not an ``int``.
            Refused: ``ownership.unknown-slot``.
        """
        self.integer(transition, "slot", slot)
        if not 0 <= slot < self.num_slots:
            raise self._refused("ownership.unknown-slot", transition, key, slot)

    def tape(self, transition: str, key: Any, ref: Any) -> None:
        """
        Require a key, and a reference to a configured slot (set of buffers).

        Raises:
            TypeError: The key is not a `TapeKey` or the reference not a `TapeRef`.
            Refused: ``ownership.unknown-slot``.
        """
        self._class(transition, "key", key)
        self._class(transition, "ref", ref)
        self.slot(transition, key, ref.slot)

    def key(self, transition: str, key: Any) -> None:
        """
        Require a configured key.

        Raises:
            TypeError: The value is not a `TapeKey`.
            Refused: ``ownership.unknown-key``.
        """
        self._class(transition, "key", key)
        if key.cell not in self.cells:
            raise self._refused("ownership.unknown-key", transition, key, None)

    def tape_key(self, call: str, key: Any) -> None:
        """
        Require a `TapeKey`; its stage or microbatch may be unknown to this process.

        Raises:
            TypeError: The value is not a `TapeKey`.
        """
        self._class(call, "key", key)

    def of_process(self, call: str, key: Any) -> None:
        """
        Require a configured key, for calls that only read and therefore never raise `Refused`.

        Raises:
            TypeError: The value is not a `TapeKey`.
            ValueError: The key is not configured.
        """
        self._class(call, "key", key)
        if key.cell not in self.cells:
            raise ValueError(
                f"{call}: {spelled(key)} is not configured; expected a key of "
                f"{self._configured(key)}"
            )

    def ticket(self, transition: str, ticket: Any, incarnation: int) -> Exception:
        """
        Return the exception for a ticket (an action's reservation) that this contract cannot have
        issued.

        Args:
            transition: ``commit`` or ``abort``.
            ticket: The ticket that the caller passed.
            incarnation: The random number of the contract's current life, since construction or the
                last restore.
        """
        missing = [n for n in ("action", "slot", "serial", "incarnation") if not hasattr(ticket, n)]
        if missing:
            return TypeError(f"{transition}: expected a Ticket, got {shown(ticket)}")
        refused = Refused("ownership.unknown-ticket")
        refused.transition = transition
        of = ticket.incarnation
        refused.found = (
            f"ticket {shown(ticket.serial)} of {within(str(ticket.action))} in slot "
            f"{shown(ticket.slot)}, issued by incarnation "
            f"{format(of, '016x') if of.__class__ is int else shown(of)}"
        )
        refused.expected = (
            "a ticket of F, dI, dW, refresh, evaluation or update issued by incarnation "
            f"{incarnation:016x}"
        )
        return refused

    def unusable(self, error: Exception, transition: str, arguments: tuple[Any, ...]) -> Exception:
        """
        Return the exception for a transition that could not run.

        Args:
            error: The exception that Python raised; returned if no argument is at fault.
            transition: Name of the transition (contract call).
            arguments: The transition's arguments; None for an argument that the contract chooses
                itself.
        """
        given = dict(zip(TRANSITIONS[transition], arguments, strict=True))
        try:
            for name, value in given.items():
                if name in _CLASSES:
                    self._class(transition, name, value)
                elif name in _INTEGERS and value is not None:
                    self.integer(transition, name, value)
            if "key" in given:
                self.key(transition, given["key"])
            if "ref" in given:
                self.tape(transition, given["key"], given["ref"])
            if given.get("slot") is not None and "ticket" not in given:
                self.slot(transition, given.get("key"), given["slot"])
            if "stage" in given:
                self.stage(transition, given["stage"])
            if "link" in given:
                self.link(transition, given["link"])
        except Refused as refused:
            return refused
        except (TypeError, ValueError) as wrong:
            return wrong
        return error

    def _class(self, transition: str, name: str, value: Any) -> None:
        wanted = _CLASSES[name]
        if value.__class__ is not wanted:
            raise TypeError(f"{transition}: {name} must be a {wanted.__name__}, got {shown(value)}")

    def _refused(self, clause: str, transition: str, key: Any, slot: Any) -> Refused:
        refused = Refused(clause)
        refused.transition = transition
        if clause == "ownership.unknown-key":
            refused.found = spelled(key)
            refused.expected = f"a key of {self._configured(key)}"
        else:
            refused.found = f"slot {shown(slot)}" + (
                f" for {spelled(key)}" if key is not None else ""
            )
            refused.expected = f"a slot from 0 to {self.num_slots - 1}"
        return refused

    def _configured(self, key: TapeKey) -> str:
        """Describe the configured keys of the key's stage; if that is unknown, list the stages."""
        own = [cell for cell in self.cells if cell[0] == key.stage]
        if not own:
            return f"one of the stages {list(self.slots)}"
        m, b, i = (max(cell[part] for cell in own) + 1 for part in (1, 2, 3))
        counts = counted(m, "microbatch"), counted(b, "block"), counted(i, "invocation")
        return f"stage {shown(key.stage)}: {', '.join(counts)}"
