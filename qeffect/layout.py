"""
Gradient destinations: what the arena's ledger compares, and the check that none overlap
(paper, III-D).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from attrs import Attribute, field, frozen

from .keys import Cell
from .refusals import Refused

if TYPE_CHECKING:
    from .config import StageConfig

__all__ = ["Destination", "placements", "require_layout"]


def _shape(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(shape)


def _not_negative(destination: Any, attribute: Attribute[int], value: Any) -> None:
    if not isinstance(value, int) or value < 0:
        raise ValueError(
            f"{attribute.name} of the destination of {destination.matrix!r} must be a non-negative "
            f"integer, got {value!r}"
        )


@frozen
class Destination:
    """
    One buffer that receives a matrix gradient.

    The kernel compares destinations for equality and their ranges for overlap, nothing else.

    Args:
        matrix: Name of the weight matrix.
        microbatch: Microbatch whose gradient it receives; None for one accumulating buffer.
        shape: Shape of the gradient, in elements.
        dtype: Name of the element type, for example ``float32``.
        device: Name of the device, for example ``cuda:0``.
        address: First byte; what ``data_ptr`` returns.
        nbytes: Length in bytes; zero for a symbolic destination, which overlaps nothing.

    Raises:
        ValueError: An address or a length is not a number of bytes.

    >>> qkv = Destination("qkv", shape=(12, 4), dtype="float32", device="cuda:0", nbytes=192)
    >>> qkv.microbatch is None  # one buffer, into which every microbatch accumulates
    True
    """

    matrix: str
    microbatch: int | None = None
    shape: tuple[int, ...] = field(default=(), converter=_shape)
    dtype: str = ""
    device: str = ""
    address: int = field(default=0, validator=_not_negative)
    nbytes: int = field(default=0, validator=_not_negative)


def require_layout(config: StageConfig) -> None:
    """
    Refuse destinations that do not give every matrix of every microbatch exactly one buffer.

    Raises:
        Refused: ``arena.duplicate-destination``, ``arena.missing-destination`` or
            ``arena.unknown-matrix``.
        ValueError: Accumulating and per-microbatch destinations are mixed.
    """
    modes = {d.microbatch is None for d in config.destinations}
    if len(modes) > 1:
        raise ValueError(
            f"stage {config.stage} mixes accumulating and per-microbatch destinations; use one kind"
        )
    counts = Counter((d.matrix, d.microbatch) for d in config.destinations)
    for (matrix, microbatch), count in counts.items():
        if matrix not in config.matrices:
            raise _refused(
                "arena.unknown-matrix", f"{matrix!r}", f"one of {', '.join(config.matrices)}"
            )
        if count > 1 or (microbatch is not None and (matrix, None) in counts):
            raise _refused(
                "arena.duplicate-destination",
                f"{count} destinations for {matrix!r} microbatch {microbatch}",
                "exactly one",
            )
    for matrix in config.matrices:
        for microbatch in range(config.microbatches):
            if not {(matrix, microbatch), (matrix, None)} & counts.keys():
                raise _refused(
                    "arena.missing-destination",
                    f"no destination for {matrix!r} microbatch {microbatch}",
                    "exactly one",
                )


def require_disjoint(destinations: Iterable[Destination]) -> None:
    """
    Refuse destinations whose bytes overlap on one device.

    Raises:
        Refused: ``arena.overlapping-destinations``, naming both.
    """
    ranged = sorted((d for d in destinations if d.nbytes), key=lambda d: (d.device, d.address))
    for before, after in pairwise(ranged):
        if before.device == after.device and before.address + before.nbytes > after.address:
            raise _refused(
                "arena.overlapping-destinations",
                f"{after.matrix!r} microbatch {after.microbatch} at {after.address:#x}",
                f"an address at or after {before.address + before.nbytes:#x}, the end of "
                f"{before.matrix!r} microbatch {before.microbatch}",
            )


def placements(
    stages: Sequence[StageConfig],
) -> tuple[dict[Cell, tuple[Destination, ...]], dict[Cell, int], int]:
    """
    Return each cell's destinations, the index of the buffer they are, and how many buffers.

    A buffer is a set of destinations that are written together: one per stage when they
    accumulate, one per microbatch when every microbatch has its own. The blocks and invocations
    of a microbatch share it; the first of them to write overwrites.
    """
    destination_of: dict[Cell, tuple[Destination, ...]] = {}
    buffer_of: dict[Cell, int] = {}
    buffers: dict[Any, int] = {}
    for config in stages:
        if config.destinations:
            require_layout(config)
        given = config.destinations or tuple(Destination(matrix) for matrix in config.matrices)
        for cell in config.cells():
            own = tuple(
                d
                for d in sorted(given, key=lambda d: d.matrix)
                if d.microbatch is None or d.microbatch == cell[1]
            )
            destination_of[cell] = own
            name = (config.stage, own)
            buffer_of[cell] = buffers.setdefault(name, len(buffers))
    require_disjoint(d for config in stages for d in config.destinations)
    return destination_of, buffer_of, len(buffers)


def _refused(clause: str, presented: str, expected: str) -> Refused:
    refused = Refused(clause)
    refused.transition, refused.presented, refused.expected = "configure", presented, expected
    return refused
