"""
Tokens from a file, cut into windows, in an order that a position and a seed say entirely.

A token file is one array of NumPy's own format (`.npy`, uint16 or uint32), mapped into memory and
never read whole. Window `n` is `sequence` tokens and the one behind them, so that inputs and
targets are one apart; the last token of a window is the first of the next. A pass goes through
every window once, in an order of its own: a keyed permutation that is computed and never stored, so
that a loader goes on anywhere, in any process, from `position` and `seed` alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

__all__ = ["DataError", "Loader", "Tokens", "shuffled"]

_TYPES = (np.dtype(np.uint16), np.dtype(np.uint32))
_ROUNDS = 4
_CHUNK = 1 << 24
#: How every NumPy array file begins.
_MAGIC = b"\x93NUMPY"


class DataError(ValueError):
    """A token file that cannot be used; one line that names the file, what was found and why."""


def save(path: Path, tokens: np.ndarray[Any, Any]) -> None:
    """Write tokens as a file that `Tokens.open` reads, in the smallest type that holds them."""
    small = not tokens.size or int(tokens.max()) < 1 << 16
    with path.open("wb") as file:
        np.save(file, tokens.astype(np.uint16 if small else np.uint32))


@attrs.frozen(eq=False)
class Tokens:
    """
    A token file.

    Args:
        path: The file.
        values: Its tokens, mapped.
    """

    path: Path
    values: np.ndarray[Any, Any]

    @classmethod
    def open(cls, path: Path, *, vocabulary: int, sequence: int) -> Tokens:
        """
        Map a token file, and look at every token once.

        Args:
            path: The file.
            vocabulary: How many tokens the model knows.
            sequence: Tokens of a window.

        Raises:
            DataError: It is not there, not a token file, has no whole window, or a token that the
                model does not know.
        """
        try:
            values = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise DataError(
                f"{path}: there is no such file; make one with qeffect runtime corpus, or name "
                "another"
            ) from None
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"{path}: expected a NumPy array (.npy) of uint16 or uint32, found "
                f"{_found(path, error)}; make one with qeffect runtime corpus, or name another"
            ) from None
        if values.dtype not in _TYPES or values.ndim != 1:
            found = (
                f"{values.ndim} dimensions of {values.dtype}" if hasattr(values, "dtype") else "?"
            )
            raise DataError(f"{path}: expected one dimension of uint16 or uint32, found {found}")
        if len(values) < sequence + 1:
            raise DataError(
                f"{path}: expected at least {sequence + 1} tokens, a window of {sequence} and one "
                f"behind it; found {len(values)}"
            )
        for start in range(0, len(values), _CHUNK):
            part = values[start : start + _CHUNK]
            if (most := int(part.max())) >= vocabulary:
                at = start + int(part.argmax())
                raise DataError(
                    f"{path}: expected tokens below the vocabulary of {vocabulary}, found {most} "
                    f"at place {at}; set [model] vocabulary, or encode with the same tokenizer"
                )
        return cls(path, values)

    def windows(self, sequence: int) -> int:
        """How many windows there are."""
        return (len(self.values) - 1) // sequence

    def window(self, sequence: int, index: int) -> Tensor:
        """One window and the token behind it, as int64."""
        start = index * sequence
        part = self.values[start : start + sequence + 1]
        return torch.from_numpy(part.astype(np.int64))

    def facts(self) -> dict[str, Any]:
        """What identifies the file, for a checkpoint: its length and a hash of its ends."""
        ends = self.values[:4096].tobytes() + self.values[-4096:].tobytes()
        return {"tokens": len(self.values), "sha256_of_ends": hashlib.sha256(ends).hexdigest()}


def shuffled(index: int, count: int, key: int) -> int:
    """
    Where the keyed permutation of `range(count)` takes an index; nothing is stored.

    A Feistel network over the next power of four, walked until it falls into the range.

    >>> sorted(shuffled(n, 10, key=7) for n in range(10)) == list(range(10))
    True
    >>> [shuffled(n, 10, key=7) for n in range(10)] == list(range(10))
    False
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    found = index
    while True:
        left, right = found >> half, found & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mixed(right, key, turn) & mask)
        found = left << half | right
        if found < count:
            return found


def _mixed(value: int, key: int, turn: int) -> int:
    """A fixed mixing of 64 bits (the finalizer of SplitMix64)."""
    most = (1 << 64) - 1
    z = (value * 0x9E3779B97F4A7C15 + key * 0xD1342543DE82EF95 + turn + 1) & most
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & most
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & most
    return z ^ (z >> 31)


@attrs.define(kw_only=True)
class Loader:
    """
    Windows in the order of training.

    Args:
        tokens: The file.
        sequence: Tokens of a window.
        seed: What the order of each pass is drawn from.
        shuffle: Whether a pass has an order of its own; otherwise it is the file's.
        position: The first window of step `step`, passes counted through.
        step: A step, by the epochs of the contract.
    """

    tokens: Tokens
    sequence: int
    seed: int = 0
    shuffle: bool = True
    position: int = 0
    step: int = 0

    def place(self, at: int) -> int:
        """Which window of the file is the `at`-th of training."""
        count = self.tokens.windows(self.sequence)
        turn, index = divmod(at, count)
        return shuffled(index, count, (self.seed << 20) + turn) if self.shuffle else index

    def windows(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """
        Inputs and targets of windows that follow each other in training.

        Args:
            first: The first one, passes counted through.
            count: How many: the batch of a microbatch.

        Returns:
            Two int64 tensors, each `(sequence, count)`.
        """
        found = [self.tokens.window(self.sequence, self.place(first + n)) for n in range(count)]
        both = torch.stack(found, dim=1)
        return both[:-1].contiguous(), both[1:].contiguous()

    def state(self, position: int) -> dict[str, Any]:
        """What a checkpoint keeps of the data at a position, as JSON."""
        return {
            **self.tokens.facts(),
            "sequence": self.sequence,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "position": position,
        }

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """
        Begin a step where `state` of another loader said.

        Raises:
            DataError: That one had another file, other windows or another order.
        """
        own = self.state(int(state["position"]))
        for name in own:
            if state.get(name) != own[name]:
                raise DataError(
                    f"{self.tokens.path}: expected {name} {state.get(name)}, as the checkpoint "
                    f"was written with, found {own[name]}; the windows to come would be others"
                )
        self.position, self.step = own["position"], step


def _found(path: Path, error: Exception) -> str:
    """Say what a file is that NumPy cannot read; NumPy's own words advise its callers."""
    if isinstance(error, OSError) and error.strerror:
        return f"a file that cannot be read ({error.strerror})"
    try:
        with path.open("rb") as file:
            begins = file.read(len(_MAGIC))
    except OSError as unreadable:
        return f"a file that cannot be read ({unreadable.strerror})"
    if not begins:
        return "an empty file"
    return "a damaged array" if begins == _MAGIC else "a file of another format"
