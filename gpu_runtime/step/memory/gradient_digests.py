"""
Digests of gradients, computed where the gradients are: no host waits, and a graph can hold them.

A digest is the sum modulo 2**64 of a hash of each word, mixed with the word's place. Integer sums
do not depend on their order, so equal bits give equal digests on every device. For a given place
the hash is one to one: a change in one word always changes the digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["GradientDigests", "digest", "spelled"]

#: Words that are hashed at a time; bounds the memory that a digest needs.
_WORDS = 1 << 22
#: Odd factors as signed integers: the golden ratio's, and those of MurmurHash3's finalizer.
_PLACE = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xFF51AFD7ED558CCD - 2**64
_SECOND = 0xC4CEB9FE1A85EC53 - 2**64
_SHIFT = 33
_LOW = (1 << (64 - _SHIFT)) - 1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GradientDigests:
    """
    The digest of each gradient of one rank.

    Args:
        names: Stage and name of each gradient.
        device: Where the gradients are.

    Attributes:
        values: The latest digests, in the order of the names; overwritten by each `take`.
    """

    def __init__(self, names: Sequence[tuple[int, str]], device: torch.device) -> None:
        self.names = tuple(names)
        self.values = torch.zeros(len(self.names), dtype=torch.int64, device=device)

    def take(self, gradients: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Queue the digests of a step's gradients on the current stream."""
        if self.names:
            found = [digest(gradients[stage][name]) for stage, name in self.names]
            self.values.copy_(torch.stack(found))


def digest(tensor: Tensor) -> Tensor:
    """
    Return the digest of a tensor's bits as an int64 scalar on the tensor's device.

    Args:
        tensor: Any tensor of real numbers; its shape does not count.
    """
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=tensor.device)
        total += _mixed(part ^ (place * _PLACE)).sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """The bits as integers: of eight bytes each if the bytes divide by eight, else by element."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() * flat.element_size() % 8:
        return flat.view(_INTEGERS[flat.element_size()])
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def _mixed(words: Tensor) -> Tensor:
    """MurmurHash3's finalizer, which is one to one."""
    words = (words ^ ((words >> _SHIFT) & _LOW)) * _FIRST
    words = (words ^ ((words >> _SHIFT) & _LOW)) * _SECOND
    return words ^ ((words >> _SHIFT) & _LOW)


def spelled(value: int) -> str:
    """
    Return a digest as text.

    >>> spelled(-1), spelled(10)
    ('ffffffffffffffff', '000000000000000a')
    """
    return f"{value % 2**64:016x}"
