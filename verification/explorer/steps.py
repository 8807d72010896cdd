"""
Steps: moves with concrete arguments, read from a state, in the form that composed functions take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

from qeffect.engine.stage import TRANSITIONS

from .moves import EVIDENCE, Move, Rel, Value

__all__ = ["Key", "Ref", "Step", "step_of"]

#: Reads one entry of a state, by column and index.
Read = Callable[[str, int], int]


@frozen
class Key:
    """A key (epoch, stage, microbatch) in the explorer, where cells are small numbers."""

    epoch: int
    stage: int
    cell: int

    def __str__(self) -> str:
        return f"e{self.epoch}.s{self.stage}.c{self.cell}"


@frozen
class Ref:
    """A reference to a tape in the explorer, where slot, generation and incarnation are small
    numbers."""

    slot: int
    generation: int
    incarnation: int

    def __str__(self) -> str:
        return f"slot {self.slot} generation {self.generation} incarnation {self.incarnation}"


@frozen(eq=False)
class Step:
    """
    One move (a call that the explorer tries) with its arguments read from a state.

    Args:
        move: The move, whose arguments may depend on the state.
        arguments: Arguments of the first transition, in the form that the composed function takes.
        place: The slot, stage or epoch argument of the second transition, which redeems the ticket.
        evidence: The evidence that the second transition gets.
    """

    move: Move
    arguments: tuple[Any, ...]
    place: int = -1
    evidence: tuple[int, ...] = ()

    def __str__(self) -> str:
        names = TRANSITIONS[self.move.steps[0]]
        told = [f"{n} {a}" for n, a in zip(names, self.arguments, strict=True)]
        named = [p for p in TRANSITIONS[self.move.steps[-1]] if p in EVIDENCE]
        told += [f"{name} {value}" for name, value in zip(named, self.evidence, strict=False)]
        return f"{self.move.label}({', '.join(told)})"


def step_of(move: Move, stage_of: Sequence[int], read: Read) -> Step:
    """
    Return a move (a call that the explorer tries) with its arguments read from a state.

    Args:
        move: The move, whose arguments may depend on the state.
        stage_of: Stage of each cell (a stage and a microbatch).
        read: Function that reads an entry of the state.
    """
    values = {name: _value(value, read) for name, value in move.arguments.items()}
    arguments = tuple(_argument(p, values, stage_of) for p in TRANSITIONS[move.steps[0]])
    if len(move.steps) == 1:
        return Step(move, arguments)
    names = ("ref.slot", "slot", "stage", "epoch")
    place = next((values[name] for name in names if name in values), -1)
    evidence = tuple(values[p] for p in TRANSITIONS[move.steps[1]] if p in EVIDENCE)
    return Step(move, arguments, place, evidence)


def _value(value: Value, read: Read) -> int:
    return read(value.column, value.index) + value.offset if isinstance(value, Rel) else value


def _argument(parameter: str, values: dict[str, int], stage_of: Sequence[int]) -> Any:
    if parameter == "key":
        cell = values["key.cell"]
        return Key(values["key.epoch"], stage_of[cell], cell)
    if parameter == "ref":
        return Ref(values["ref.slot"], values["ref.generation"], values["ref.incarnation"])
    return values[parameter]
