"""
Convert the fields of an event log's line into the arguments of a transition (contract call).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

from ..contract import Contract
from ..destinations import Destination
from ..engine.stage import TRANSITIONS
from ..keys import Cell, TapeKey, TapeRef
from ..refusals import Refused
from ..relations.constants import NEVER, NO_SLOT
from .fields import EVENT, MARKS, OPTIONAL
from .format import FIELDS

__all__ = ["Converters", "Plan", "spelling"]


class _Reused:
    """One object that represents the key or the reference of every line, because transitions do not
    keep it."""

    __slots__ = ("cell", "epoch", "generation", "incarnation", "slot", "stage")

    cell: Cell
    epoch: int
    generation: int
    incarnation: int
    slot: int
    stage: int


class _Incarnations(dict[str, int]):
    """Cache of parsed incarnations, by their text in the log; a log has only a few."""

    def __missing__(self, spelled: str) -> int:
        self[spelled] = number = int(spelled, 16)
        return number


@cache
def spelling(transition: str) -> Callable[[str], Any]:
    """Return a function that tests a transition's line for the recorder's usual spelling."""
    fields = "".join(
        f',"transition":"{transition}"'
        if name == "transition"
        else f',"{name}":{EVENT[name].spelled}'
        for name in FIELDS[transition]
        if name not in OPTIONAL
    )
    reports = [
        rf',"{name}":{EVENT[name].spelled}' for name in FIELDS[transition] if name in OPTIONAL
    ]
    # Without a weight after them, draws that were not reported have no field.
    alone = f',"draws":{EVENT["weight"].spelled}'
    last = f"(?:{alone}{'|' + ''.join(reports) if reports[1:] else ''})?" if reports else ""
    return re.compile(rf"\{{{fields[1:]}{last}\}}").fullmatch


#: How to apply a transition: the test of its line's spelling, its function, the positions to check
#: for membership, the positions to convert, and the position after its last argument.
Plan = tuple[
    Callable[[str], Any],
    Callable[..., Any],
    tuple[tuple[int, frozenset[int]], ...],
    tuple[tuple[int, Callable[[Any], Any]], ...],
    int,
]


def _unreported(function: Any, optional: int) -> Callable[..., Any]:
    """Return a copy of a transition function in which optional arguments default to `NEVER`."""
    parts = function.__code__, function.__globals__, function.__name__
    return FunctionType(*parts, (NEVER,) * optional, function.__closure__)


class Converters:
    """
    Converts the fields of a line into a transition's arguments, for one contract.

    Before a field is converted, a test of its spelling or ``check_event`` has checked its shape.
    """

    def __init__(self, contract: Contract) -> None:
        st = contract.memory
        self.contract = contract
        self.cells = frozenset(st.slot_of)
        self.buffers: dict[int, tuple[Destination, ...]] = {
            b: st.destination_of[cell] for cell, b in st.buffer_of.items()
        }
        self.incarnations = _Incarnations()
        self.begun: set[int] = {contract.incarnation}
        self._key, self._ref = _Reused(), _Reused()
        self.members: Mapping[str, frozenset[int]] = {
            "slot": frozenset(range(len(st.consumers))),
            "leader": frozenset(range(len(st.consumers))),
            "link": frozenset(range(len(st.domain_at))),
            "caller": frozenset(st.caller_at),
            "domain": frozenset(range(len(st.token))),
            "bucket": frozenset(range(len(st.stage_at))),
            "stage": frozenset(config.stage for config in contract.stages),
            **{name: field.choices for name, field in EVENT.items() if field.choices},
        }

    def plans(
        self, marks: Mapping[str, Callable[..., Any]], *, former: bool = False
    ) -> dict[str, Plan]:
        """
        Return, for each transition, how to convert and apply its lines.

        Args:
            marks: The functions that apply the lines about recorded steps, by the line's kind.
            former: Whether the log has an older format, in which the check of an update also
                commits the update.
        """
        converts: dict[str, Callable[[Any], Any]] = {
            "key": self.key,
            "ref": self.ref,
            "destination": self.destination,
            "queued": tuple,
            "filled": tuple,
            "covered": tuple,
            "incarnation": self.incarnations.__getitem__,
        }
        functions: dict[str, Callable[..., Any]] = dict(self.contract.transitions.functions)
        for name, parameters in TRANSITIONS.items():
            if optional := sum(parameter in OPTIONAL for parameter in parameters):
                functions[name] = _unreported(functions[name], optional)
        functions["restore"] = self.restore
        if former:
            functions["check_update"] = self.commit_epoch
        return {
            name: (
                spelling(name),
                functions[name],
                tuple(
                    (i, self.allowed(name, field))
                    for i, field in enumerate(FIELDS[name])
                    if field in self.members
                ),
                tuple(
                    (i, self.claiming_key if f == "key" and "ref" not in parameters else convert)
                    for i, f in enumerate(FIELDS[name])
                    if (convert := converts.get(f))
                ),
                2 + len(parameters),
            )
            for name, parameters in TRANSITIONS.items()
        } | {
            name: (spelling(name), marks[name], (), (), 2 + len(fields))
            for name, fields in MARKS.items()
        }

    def commit_epoch(self, st: Any, epoch: int, caller: int) -> int:
        """
        Check and commit an update; older log formats have one line for both and no ticket.

        Raises:
            Refused: The check refuses the update.
        """
        functions = self.contract.transitions.functions
        serial: int = functions["check_update"](st, epoch, caller)
        functions["commit_update"](st, epoch, serial)
        st.serial[0] = serial - 1
        return serial

    def restore(self, st: Any, epoch: int, incarnation: int) -> None:
        """
        Replay a restore, and require that its incarnation (random number of the contract's life) is
        new to the log.

        The contract's transition compares the new incarnation only with the current incarnation.
        Without the stricter check here, references of an earlier incarnation would become valid
        again.

        Raises:
            Refused: The contract refuses the restore, or the incarnation was used before
                (``log.incarnation``).
        """
        self.contract.transitions.functions["restore"](st, epoch, incarnation)
        if incarnation in self.begun:
            raise Refused("log.incarnation")
        self.begun.add(incarnation)

    def allowed(self, transition: str, field: str) -> frozenset[int]:
        """
        Return the values that a field may have. For the slot (set of buffers) of a call that claims
        a slot, NO_SLOT is allowed too.
        """
        claims = field == "slot" and transition in ("reserve", "check_forward")
        return self.members[field] | ({NO_SLOT} if claims else set())

    def key(self, raw: Any) -> Any:
        epoch, stage, microbatch, block, invocation = raw
        key = self._key
        key.epoch, key.stage, key.cell = epoch, stage, (stage, microbatch, block, invocation)
        return key

    def claiming_key(self, raw: Any) -> Any:
        """Convert the key (epoch, stage and microbatch) of a call that has no reference, and check
        that the key is configured."""
        key = self.key(raw)
        if key.cell not in self.cells:
            raise ValueError(raw)
        return key

    def ref(self, raw: Any) -> Any:
        slot, generation, incarnation = raw
        if slot not in self.members["slot"]:
            raise ValueError(raw)
        ref = self._ref
        ref.slot, ref.generation = slot, generation
        ref.incarnation = self.incarnations[incarnation]
        return ref

    def destination(self, raw: Any) -> tuple[Destination, ...]:
        if raw.__class__ is int:
            return self.buffers[raw]
        return tuple(Destination(**described) for described in raw)

    def arguments(self, event: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of a well-formed event in the form that the public API takes."""
        slow: dict[str, Callable[[Any], Any]] = {
            "key": lambda raw: TapeKey(*raw),
            "ref": lambda raw: TapeRef(raw[0], raw[1], int(raw[2], 16)),
            "destination": self.destination,
            "queued": tuple,
            "filled": tuple,
            "covered": tuple,
            "incarnation": lambda spelled: int(spelled, 16),
        }
        names = {**TRANSITIONS, **MARKS}[event["transition"]]
        return tuple(
            NEVER if name in OPTIONAL and name not in event else slow.get(name, int)(event[name])
            for name in names
        )

    def unknown(self, event: Mapping[str, Any]) -> tuple[str | None, str, str]:
        """
        Return why a well-formed event does not fit the header: the clause (or None), the field, and
        the allowed values.
        """
        slots = self.members["slot"]
        within = f"a slot from 0 to {len(slots) - 1}"
        for field, value in event.items():
            if field == "key" and tuple(value[1:]) not in self.cells:
                return "ownership.unknown-key", field, "a key that the header configures"
            if field == "ref" and value[0] not in slots:
                return "ownership.unknown-slot", field, within
            if field == "slot" and value not in self.allowed(event["transition"], field):
                return "ownership.unknown-slot", field, within
            if field == "leader" and value not in slots:
                return "ownership.unknown-slot", field, within
            if field in self.members and value not in self.members[field]:
                known = ", ".join(map(str, sorted(self.members[field])))
                return None, field, f"the header configures {known}"
        return None, "destination", f"the header configures {len(self.buffers)} buffers"
