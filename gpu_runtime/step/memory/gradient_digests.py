"""
Digests of gradients, computed on their device. The host does not wait, and a graph can contain the
computation.

A tensor's bits are split into words. A digest is the sum, modulo 2**64, of a hash of each word and
the word's index. Integer sums do not depend on the order of addition, so equal bits give equal
digests on every device. For a fixed index, different words have different hashes, so a change in a
single word always changes the digest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .word_hash import FIRST, LOW, PLACE, SECOND, SHIFT

__all__ = ["GradientDigests", "digest", "spelled"]

#: Words that are hashed at a time; bounds the memory that a digest needs.
_WORDS = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GradientDigests:
    """
    The digest of each gradient of one rank.

    Args:
        names: The stage and the name of each gradient.
        device: Where the gradients are.

    Attributes:
        values: The latest digests, in the order of the names. Each `take` overwrites them.
        obstacle: Why a digest needs several passes over its gradient; empty if one pass is enough.
    """

    def __init__(self, names: Sequence[tuple[int, str]], device: torch.device) -> None:
        self.names = tuple(names)
        self.values = torch.zeros(len(self.names), dtype=torch.int64, device=device)
        self.obstacle, self._add = prepared(device)

    def take(
        self, gradients: Mapping[int, Mapping[str, Tensor]], further: Sequence[Tensor] = ()
    ) -> None:
        """
        Queue the digests of a step's gradients on the current stream.

        Args:
            gradients: The gradients by stage and name, without the tensors in `further`.
            further: The tensors of the last entries of `names`, in order. `gradients` contains the
                earlier entries.
        """
        named = self.names[: len(self.names) - len(further)]
        every = [*(gradients[stage][name] for stage, name in named), *further]
        if every and self._add is None:
            self.values.copy_(torch.stack([*map(digest, every)]))
        elif self._add is not None:
            self.values.zero_()
            for tensor, value in zip(every, self.values.unbind(), strict=True):
                self._add(_words(tensor), value)


@functools.cache
def prepared(device: torch.device) -> tuple[str, Callable[[Tensor, Tensor], None] | None]:
    """
    Compile the kernel for a device, and compare the kernel's results with the results of `digest`.

    Returns:
        A pair. The first element is the reason why the kernel cannot be used; empty if it can be
        used. The second element is a function that adds the digest of words to a number; None if
        the kernel cannot be used.
    """
    if device.type != "cuda":
        return f"{device} has no kernels", None
    try:
        from .gradient_digests_kernel import add_digest

        drawn = torch.Generator().manual_seed(0)
        for dtype, size in ((torch.bfloat16, 40_004), (torch.bfloat16, 5), (torch.float32, 7)):
            tensor = torch.randn(size, generator=drawn).to(device, dtype)
            total = torch.zeros((), dtype=torch.int64, device=device)
            add_digest(_words(tensor), total)
            if int(total) != int(digest(tensor)):
                problem = f"the kernel's digest of {size} elements of {dtype} differs from torch's"
                return problem, None
    except Exception as error:  # a compiler can fail in any way; torch gives the same digests
        return f"{type(error).__name__}: {error}".splitlines()[0], None
    return "", add_digest


def digest(tensor: Tensor) -> Tensor:
    """
    Return the digest of a tensor's bits as an int64 scalar on the tensor's device.

    Args:
        tensor: Any tensor of real numbers; its shape does not change the digest.
    """
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=tensor.device)
        total += _mixed(part ^ (place * PLACE)).sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """
    View the bits as integers: of eight bytes each if the number of bytes is a multiple of eight,
    else one per element.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() * flat.element_size() % 8:
        return flat.view(_INTEGERS[flat.element_size()])
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def _mixed(words: Tensor) -> Tensor:
    """Hash eight-byte words with MurmurHash3's finalizer, which is one to one."""
    words = (words ^ ((words >> SHIFT) & LOW)) * FIRST
    words = (words ^ ((words >> SHIFT) & LOW)) * SECOND
    return words ^ ((words >> SHIFT) & LOW)


def spelled(value: int) -> str:
    """
    Return a digest as 16 hexadecimal digits.

    >>> spelled(-1), spelled(10)
    ('ffffffffffffffff', '000000000000000a')
    """
    return f"{value % 2**64:016x}"
