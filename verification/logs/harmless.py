"""
Proofs that an accepted edit of a log is harmless: the contract allows what the edited log records.

The proofs run the composed transitions of both logs on separate memories, line by line, and compare
whole states. They never use the replayer, so an edit that the replayer merely overlooks has no
proof. Equal states have equal futures, since a transition reads only its state and its arguments.
"""

from __future__ import annotations

import dis
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from attrs import frozen

from qeffect import Contract, Refused
from qeffect.engine.concrete_memory import Memory, Snapshot
from qeffect.engine.stage import TRANSITIONS
from qeffect.log.format import MARKS, rebuild
from qeffect.log.reader import Converters
from qeffect.steps.counters import Event, moved_between, translated_event

from .edits import Edit

__all__ = ["LASTING", "REASONS", "History", "history", "proof", "unread"]

#: Every kind of proof.
REASONS: Final[Mapping[str, str]] = {
    "name": "the edited header describes a contract with the same state, which contains no names",
    "same call": "the changed field gives the same argument",
    "unread": "the transition never reads the argument, since the relation that reads it is left "
    "out",
    "same effect": "the original and the edited line are both legal and lead to the same state",
    "needless": "the line is a submit, join or wait, and the log leads to the same states "
    "without it",
    "undone": "the next restore leads to the same state, except for entries that are written "
    "before they are read again, and no effect before the restore outlives it",
}
#: Transitions whose effect a restore does not undo.
LASTING: Final = frozenset({"commit_update", "checkpoint"})
_SYNCHRONIZE: Final = frozenset({"submit", "join", "wait"})


@frozen
class History:
    """
    The result of running a log's events by the composed transitions alone.

    Args:
        contract: The contract that the header describes, after the last event.
        events: The events of the log.
        arguments: The transition's arguments for each event.
        states: The state before the first event, and the state after each event.
    """

    contract: Contract
    events: Sequence[Mapping[str, Any]]
    arguments: Sequence[tuple[Any, ...]]
    states: Sequence[Snapshot]


class _Unreadable:
    """An entry of a column (an array of the state) that may only be overwritten; reading it raises
    an error."""

    def _read(self, *_: Any) -> Any:
        raise TypeError("an entry that must be written first was read")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _read
    __bool__ = __int__ = __index__ = __iter__ = __add__ = __sub__ = __and__ = __or__ = _read


class _Steps:
    """The recorded steps of a log, by the sequence number of their first line."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.events: list[Event] = []
        self._began: tuple[int, Memory] | None = None
        self._kept: dict[int, tuple[Memory, list[Event]]] = {}

    def apply(self, event: Mapping[str, Any]) -> None:
        """Begin, keep or drop a recorded step, or run a kept step again with adjusted numbers."""
        memory, mark = self.contract.memory, event["transition"]
        if (self._began is None) is (mark in ("keep_step", "drop_step")):
            raise ValueError(mark)
        if mark == "begin_step":
            self._began, self.events = (event["seq"], memory.copy()), []
        elif mark == "repeat_step":
            start, events = self._kept[event["step"]]
            moved = moved_between(start, memory)
            for one in events:
                name, given = translated_event(memory, one, moved)
                self.contract.transitions.functions[name](memory, *given)
        else:
            assert self._began is not None
            if mark == "keep_step":
                self._kept[self._began[0]] = self._began[1], self.events
            self._began = None


def history(
    lines: Sequence[str], spoiled: tuple[int, Sequence[tuple[str, Any]]] = (-1, ())
) -> History | None:
    """
    Run a log's events, without its closing line. Return None if an event cannot run or is refused.

    Args:
        lines: A whole log; digests and sequence numbers are not checked.
        spoiled: A number of events, and the entries (each a column of the state and an index) that
            become unreadable after so many events.
    """
    header, *events = [json.loads(line) for line in lines[:-1]]
    try:
        contract = rebuild(header)
        converters = Converters(contract)
        arguments = []
        steps = _Steps(contract)
        states = [contract.snapshot()]
        for number, event in enumerate(events, 1):
            if converters.unknown(event)[1] != "destination":
                return None  # it names something that the header does not configure
            given = converters.arguments(event)
            name = event["transition"]
            if name in MARKS:
                steps.apply(event)
            else:
                result = contract.transitions.functions[name](contract.memory, *given)
                if result != event.get("result"):
                    return None
                steps.events.append((name, given))
            if number == spoiled[0]:
                for column, index in spoiled[1]:
                    getattr(contract.memory, column)[index] = _Unreadable()
            arguments.append(given)
            states.append(contract.snapshot())
    except (Refused, ValueError, KeyError, IndexError, TypeError):
        return None
    return History(contract, events, arguments, states)


@cache
def _own(lines: tuple[str, ...]) -> History:
    found = history(lines)
    if found is None:
        raise ValueError("expected a log that the contract accepts; the contract refuses this log")
    return found


def proof(lines: Sequence[str], edit: Edit) -> str | None:
    """
    Return why an edit of a valid log is harmless, as a key of ``REASONS``; None if no proof is
    found.

    Args:
        lines: The lines of the valid log.
        edit: A change of one field.
    """
    ours = _own(tuple(lines))
    theirs = history(edit.apply(lines))
    if theirs is None or edit.line == len(lines) or ours.states[-1] != theirs.states[-1]:
        return None
    at = edit.line - 1  # states[at] is the state after the edited line
    if ours.states[at] == theirs.states[at]:
        return "name" if at == 0 else _same_state(ours, theirs, at)
    if _undone(lines, ours, theirs, at):
        return "undone"
    return "needless" if _needless(lines, ours, theirs, at) else None


def _undone(lines: Sequence[str], ours: History, theirs: History, at: int) -> bool:
    """Return whether the next restore undoes every effect of the edit."""
    names = [event["transition"] for event in ours.events]
    if "restore" not in names[at:]:
        return False
    restored = names.index("restore", at) + 1
    first = max(at, 1)
    between = {e["transition"] for h in (ours, theirs) for e in h.events[first - 1 : restored]}
    if between & LASTING:
        return False
    left = _differing(ours.contract, ours.states[restored], theirs.states[restored])
    if not left:
        return True
    spoiled = history(lines, (restored, left))
    try:
        return spoiled is not None and spoiled.states[-1] == ours.states[-1]
    except TypeError:  # one of the changes is still there
        return False


def _differing(contract: Contract, one: Snapshot, other: Snapshot) -> list[tuple[str, Any]]:
    """Return the entries in which two states of a contract differ, as pairs of column and index."""
    differing: list[tuple[str, Any]] = []
    for column in one:
        keyed = isinstance(getattr(contract.memory, column), dict)
        for index, (entry, others) in enumerate(zip(one[column], other[column], strict=True)):
            if entry != others:
                differing.append((column, entry[0] if keyed else index))
    return differing


def _same_state(ours: History, theirs: History, at: int) -> str:
    """Return the reason, as a key of ``REASONS``, why two lines of a log lead to the same state."""
    name = ours.events[at - 1]["transition"]
    before, after = ours.arguments[at - 1], theirs.arguments[at - 1]
    if name == theirs.events[at - 1]["transition"]:
        names = {**TRANSITIONS, **MARKS}[name]
        changed = {
            parameter
            for parameter, old, new in zip(names, before, after, strict=True)
            if old != new
        }
        if not changed:
            return "same call"
        if name in TRANSITIONS and changed <= unread(ours.contract.transitions.functions[name]):
            return "unread"
    return "same effect"


def _needless(lines: Sequence[str], ours: History, theirs: History, at: int) -> bool:
    """Return whether the log leads to the same states without the edited line."""
    if at == 0 or not {h.events[at - 1]["transition"] for h in (ours, theirs)} <= _SYNCHRONIZE:
        return False
    again = next(n for n in range(at, len(ours.states)) if ours.states[n] == theirs.states[n])
    without = history([*lines[:at], *lines[at + 1 :]])
    return without is not None and without.states[again - 1] == ours.states[again]


def unread(function: Callable[..., Any]) -> frozenset[str]:
    """
    Return the parameters that a function's body never reads.

    >>> sorted(unread(lambda st, key, token: key))
    ['st', 'token']
    """
    code = function.__code__
    read: set[str] = set()
    for instruction in dis.get_instructions(function):
        value = instruction.argval
        read.update(value if isinstance(value, tuple) else (value,) if type(value) is str else ())
    return frozenset(code.co_varnames[: code.co_argcount]) - read
