"""
Gradient destinations: the buffers that gradients are written to, and the check that they do not
overlap (paper, III-D).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from attrs import Attribute, field, frozen

from .refusals import Refused, refused
from .text import shown

__all__ = ["Destination", "first_overlap", "overlap_refused", "require_disjoint"]


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

    The kernel only compares destinations for equality, and their address ranges for overlap.

    Args:
        matrix: Name of the weight matrix.
        microbatch: Microbatch whose gradient the buffer receives; None for one buffer in which all
            microbatches accumulate.
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
    overlap = first_overlap(destinations)
    if overlap is not None:
        raise overlap_refused(*overlap)


def first_overlap(destinations: Iterable[Destination]) -> tuple[Destination, Destination] | None:
    """Return the first two destinations, by address, whose bytes overlap on one device."""
    placed = (d for d in destinations if d.nbytes or d.address)
    for before, after in pairwise(sorted(placed, key=lambda d: (d.device, d.address))):
        if before.device == after.device and _end(before) > after.address:
            return before, after
    return None


def overlap_refused(before: Destination, after: Destination, whose: str = "") -> Refused:
    """
    Return the refusal for two destinations that overlap.

    Args:
        before: The destination that begins first.
        after: The other destination.
        whose: Text that names the other contract, which owns one of the two; empty if one contract
            owns both.
    """
    return refused(
        "arena.overlapping-destinations",
        "configure",
        f"{after.matrix!r} microbatch {after.microbatch} at {after.address:#x}",
        f"an address at or after {_end(before):#x}, the end of "
        f"{before.matrix!r} microbatch {before.microbatch}"
        + (f"; one of the two is {whose}" if whose else ""),
    )


def _end(destination: Destination) -> int:
    return destination.address + max(destination.nbytes, 1)
