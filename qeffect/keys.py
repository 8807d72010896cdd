"""
Names of a tape (the data that one forward leaves for its backward). The key says which forward made
the tape; the reference says which slot (set of buffers) holds the tape.
"""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen

from .text import shown

__all__ = ["Cell", "TapeKey", "TapeRef", "Unfrozen", "cell_of", "reference", "spell"]

#: A key without its epoch: (stage, microbatch, block, invocation).
Cell = tuple[int, int, int, int]

#: One object per cell, so that look-ups in the memory compare by identity.
_cells: dict[Cell, Cell] = {}


def cell_of(stage: int, microbatch: int, block: int, invocation: int) -> Cell:
    """
    Return a cell (a key without its epoch); equal cells are always the same object.

    Raises:
        TypeError: A field is not a plain ``int``.

    >>> cell_of(0, 1, 0, 0) is TapeKey(epoch=7, stage=0, microbatch=1).cell
    True
    """
    cell = (stage, microbatch, block, invocation)
    for part in cell:
        if part.__class__ is not int:
            raise TypeError(f"a cell must consist of integers, got {shown(cell)}")
    return _cells.setdefault(cell, cell)


def spell(epoch: int, cell: Cell) -> str:
    """
    Return a key in words, as refusals and the replay of logs print it.

    >>> spell(3, (1, 0, 0, 2))
    'microbatch 0 of stage 1 in epoch 3, invocation 2'
    """
    stage, microbatch, block, invocation = cell
    text = f"microbatch {microbatch} of stage {stage} in epoch {epoch}"
    if block:
        text += f", block {block}"
    return f"{text}, invocation {invocation}" if invocation else text


def _index(key: Any, attribute: Attribute[Any], value: Any) -> None:
    """Require a non-negative integer; a runtime makes a key for each tape of each step."""
    if value.__class__ is not int or value < 0:
        _integer(key, attribute, value)
        raise ValueError(f"'{attribute.name}' must be >= 0: {shown(value)}")


def _integer(name: Any, attribute: Attribute[Any], value: Any) -> None:
    """
    Require a plain integer; a member of a subclass is rejected.

    ``True`` and an enumeration's member equal an integer, but are other objects. Each cell is one
    object for the whole process, and such a member would then be part of every later key.
    """
    if value.__class__ is not int:
        raise TypeError(
            f"'{attribute.name}' must be an int, got {shown(value)} ({value.__class__.__name__})"
        )


@frozen(eq=True, order=True, cache_hash=True)
class TapeKey:
    """
    The logical name of one stage execution (paper, III-A).

    A key says nothing about memory: one slot holds the tapes of many keys, one after another. Each
    key has at most one forward per walk (one pass over all microbatches).

    Args:
        epoch: Weight epoch (number of optimizer steps so far): the version of the weights that the
            execution must use.
        stage: Global stage index of the pipeline.
        microbatch: Microbatch index within the optimizer step.
        block: Index of the sub-layer block; 0 unless each block of the stage has a tape of its own.
        invocation: Number of the block's invocation, from 0.

    Raises:
        TypeError: A field is not a plain ``int``; a bool or a NumPy integer is rejected.
        ValueError: A field is negative.

    >>> TapeKey(epoch=3, stage=1, microbatch=0).cell
    (1, 0, 0, 0)
    >>> print(TapeKey(3, 1, 0))
    microbatch 0 of stage 1 in epoch 3
    """

    epoch: int = field(validator=_index)
    stage: int = field(validator=_index)
    microbatch: int = field(validator=_index)
    block: int = field(default=0, validator=_index)
    invocation: int = field(default=0, validator=_index)
    cell: Cell = field(init=False, repr=False, eq=False, order=False)

    def __attrs_post_init__(self) -> None:
        cell = (self.stage, self.microbatch, self.block, self.invocation)
        object.__setattr__(self, "cell", _cells.setdefault(cell, cell))

    def __str__(self) -> str:
        return spell(self.epoch, self.cell)


class Unfrozen:
    """A reference under construction, still mutable; `TapeRef` has the same attributes."""

    __slots__ = ("__weakref__", "generation", "incarnation", "slot")


@frozen
class TapeRef(Unfrozen):
    """
    The physical place of a tape (what one F leaves for its dI and dW): its slot, the slot's
    generation, and the issuer (paper, III-A).

    Args:
        slot: Index of the slot (set of buffers).
        generation: The slot's generation when the tape took the slot. The generation rises at every
            release, so a reference to an earlier tape of the slot never matches again.
        incarnation: Random 64-bit number drawn by the contract that issued the reference. This
            number is logged, but never saved in a checkpoint. After a restart generations begin
            again at zero, so only the incarnation distinguishes an old reference from a new one.

    Raises:
        TypeError: A field is not a plain ``int``.

    >>> print(TapeRef(slot=2, generation=5, incarnation=0x1f))
    slot 2 generation 5 incarnation 000000000000001f
    """

    slot: int = field(validator=_integer)
    generation: int = field(validator=_integer)
    incarnation: int = field(default=0, validator=_integer)

    def __str__(self) -> str:
        return f"slot {self.slot} generation {self.generation} incarnation {self.incarnation:016x}"


def reference(slot: int, generation: int, incarnation: int) -> TapeRef:
    """
    Return ``TapeRef(slot, generation, incarnation)``, in less than half of the constructor's time.

    Every forward makes a reference, and setting attributes of a frozen class is slow. So the
    reference is made as an object of an unfrozen class with the same layout, and frozen when
    complete. The commit of F contains a copy of these lines, to avoid a function call.

    >>> reference(2, 5, 0x1F) == TapeRef(slot=2, generation=5, incarnation=0x1F)
    True
    """
    made: Any = Unfrozen()
    made.slot = slot
    made.generation = generation
    made.incarnation = incarnation
    made.__class__ = TapeRef
    ref: TapeRef = made
    return ref
