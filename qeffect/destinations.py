"""
Gradient destinations, which the arena's ledger compares, and the check that they do not overlap
(paper, III-D).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from attrs import Attribute, field, frozen

from .refusals import refused
from .text import shown

__all__ = ["Destination", "require_disjoint"]


def _shape(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(shape)


def _counts(destination: Any, attribute: Attribute[Any], value: tuple[Any, ...]) -> None:
    for part in value:
        _not_negative(destination, attribute, part)


def _count_or_none(destination: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is not None:
        _not_negative(destination, attribute, value)


def _not_negative(destination: Any, attribute: Attribute[Any], value: Any) -> None:
    if value.__class__ is not int or value < 0:
        raise ValueError(
            f"{attribute.name} of the destination of {destination.matrix!r} must be a non-negative "
            f"integer, got {shown(value)}"
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
        address: Address of the first byte, as ``data_ptr`` returns it.
        nbytes: Length in bytes. Zero means an unknown length: only the first byte is compared. A
            destination with neither address nor length is symbolic and overlaps nothing.

    Raises:
        ValueError: A microbatch, a size, an address or a length is not a non-negative integer.

    >>> qkv = Destination("qkv", shape=(12, 4), dtype="float32", device="cuda:0", nbytes=192)
    >>> qkv.microbatch is None  # one buffer, into which every microbatch accumulates
    True
    """

    matrix: str
    microbatch: int | None = field(default=None, validator=_count_or_none)
    shape: tuple[int, ...] = field(default=(), converter=_shape, validator=_counts)
    dtype: str = ""
    device: str = ""
    address: int = field(default=0, validator=_not_negative)
    nbytes: int = field(default=0, validator=_not_negative)


def require_disjoint(destinations: Iterable[Destination]) -> None:
    """
    Refuse destinations whose bytes overlap on one device.

    A destination with an address but no length takes up its first byte, so two destinations at one
    address are always refused.

    Raises:
        Refused: ``arena.overlapping-destinations``, naming both destinations.
    """
    placed = (d for d in destinations if d.nbytes or d.address)
    ranged = sorted(placed, key=lambda d: (d.device, d.address))
    for before, after in pairwise(ranged):
        end = before.address + max(before.nbytes, 1)
        if before.device == after.device and end > after.address:
            raise refused(
                "arena.overlapping-destinations",
                "configure",
                f"{after.matrix!r} microbatch {after.microbatch} at {after.address:#x}",
                f"an address at or after {end:#x}, the end of "
                f"{before.matrix!r} microbatch {before.microbatch}",
            )
