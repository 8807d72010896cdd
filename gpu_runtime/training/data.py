"""
Windows of tokens from a file, in an order that depends only on position and seed.

A token file is one NumPy array (`.npy`, uint16 or uint32), which is mapped into memory. A window
has `sequence + 1` tokens: its first `sequence` tokens are the inputs, and its last `sequence`
tokens are the targets. A window's last token is the first token of the next window. A pass over the
file takes every window once. Each pass has its own order. The order is a keyed permutation that is
computed and never stored, so any process can continue from `position` and `seed` alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from qeffect.text import counted

from .corpus_digest import file_sha256

__all__ = ["DataError", "Loader", "Tokens", "shuffled"]

_TYPES = (np.dtype(np.uint16), np.dtype(np.uint32))
_ROUNDS = 4
_CHUNK = 1 << 24
#: The first bytes of every NumPy array file.
_MAGIC = b"\x93NUMPY"
#: The first bytes of every zip file; an archive of arrays (`.npz`) is one.
_ZIP = b"PK"


class DataError(ValueError):
    """
    A token file cannot be used. The message is one line with the file, the expected content and the
    found content.
    """


def save(path: Path, tokens: np.ndarray[Any, Any]) -> None:
    """
    Write a token file for `Tokens.open`. Its dtype is uint16 if this can hold every token, else
    uint32.
    """
    small = not tokens.size or int(tokens.max()) < 1 << 16
    with path.open("wb") as file:
        np.save(file, tokens.astype(np.uint16 if small else np.uint32))


@attrs.frozen(eq=False)
class Tokens:
    """
    A token file.

    Args:
        path: The file of tokens, such as `train.npy`.
        values: The file's tokens: a one-dimensional array of uint16 or uint32, mapped into memory.
    """

    path: Path
    values: np.ndarray[Any, Any]

    @classmethod
    def open(cls, path: Path, *, vocabulary: int, sequence: int) -> Tokens:
        """
        Map a token file into memory, and check that the vocabulary contains every token.

        Args:
            path: The file of tokens, such as `train.npy`.
            vocabulary: Number of tokens in the model's vocabulary.
            sequence: Number of input tokens of a window.

        Raises:
            DataError: The file is missing, is not a token file, is shorter than one window, or
                contains a token outside the vocabulary.
        """
        try:
            with path.open("rb") as file:  # NumPy would open an archive as something else
                archive = file.read(len(_ZIP)) == _ZIP
        except OSError:
            archive = False  # said below
        if archive:
            raise DataError(
                f"{path}: expected a NumPy array (.npy) of uint16 or uint32, found an archive of "
                "arrays (.npz); save its array with numpy.save, and name that file"
            )
        try:
            values = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise DataError(
                f"{path}: file not found; make one with qeffect runtime corpus, or name "
                "another file"
            ) from None
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"{path}: expected a NumPy array (.npy) of uint16 or uint32, found "
                f"{_found(path, error)}; make one with qeffect runtime corpus, or name another "
                "file"
            ) from None
        if values.dtype not in _TYPES or values.ndim != 1:
            raise DataError(
                f"{path}: expected 1 dimension of uint16 or uint32, found "
                f"{counted(values.ndim, 'dimension')} of {values.dtype}"
            )
        if len(values) < sequence + 1:
            raise DataError(
                f"{path}: expected at least {sequence + 1} tokens, for one window of {sequence} "
                f"and its last target, found {len(values)}"
            )
        for start in range(0, len(values), _CHUNK):
            part = values[start : start + _CHUNK]
            if (most := int(part.max())) >= vocabulary:
                at = start + int(part.argmax())
                raise DataError(
                    f"{path}: expected tokens below the vocabulary of {vocabulary}, found {most} "
                    f"at index {at}; set [model] vocabulary, or encode with the same tokenizer"
                )
        return cls(path, values)

    def windows(self, sequence: int) -> int:
        """Return the number of complete windows in the file."""
        return (len(self.values) - 1) // sequence

    def window(self, sequence: int, index: int) -> Tensor:
        """
        Return window `index` as an int64 tensor of shape `(sequence + 1,)`: the inputs, followed by
        the last target.
        """
        start = index * sequence
        part = self.values[start : start + sequence + 1]
        return torch.from_numpy(part.astype(np.int64))

    def facts(self) -> dict[str, Any]:
        """
        Return facts about the file that are quick to compute: its length, and a hash of its
        beginning and end.
        """
        ends = self.values[:4096].tobytes() + self.values[-4096:].tobytes()
        return {"tokens": len(self.values), "sha256_of_ends": hashlib.sha256(ends).hexdigest()}

    @cached_property
    def sha256(self) -> str:
        """
        Return the SHA-256 of the whole file. The hash is computed once, and cached on the disk if
        possible.

        Raises:
            DataError: The file cannot be read, or changed while it was read.
        """
        try:
            return file_sha256(self.path)
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or error}") from None


def shuffled(index: int, count: int, key: int) -> int:
    """
    Apply a keyed permutation of `range(count)` to an index. The permutation is computed, not
    stored.

    A Feistel network that permutes the numbers below the next power of four is applied until the
    result is in the range.

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
    """Mix 64 bits with the finalizer of SplitMix64."""
    most = (1 << 64) - 1
    z = (value * 0x9E3779B97F4A7C15 + key * 0xD1342543DE82EF95 + turn + 1) & most
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & most
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & most
    return z ^ (z >> 31)


@attrs.define(kw_only=True)
class Loader:
    """
    Gives windows of tokens in the order of training.

    The windows of all passes are numbered from 0; this number is a window's position in training.

    Args:
        tokens: The token file from which windows are taken.
        sequence: Number of input tokens of a window.
        seed: Seed of the order of every pass.
        shuffle: Whether each pass has its own order; otherwise every pass has the file's order.
        position: Position in training of the first window of step `step`.
        step: Number of the optimizer step that begins at `position`. The contract calls a step an
            epoch and gives it the same number.
    """

    tokens: Tokens
    sequence: int
    seed: int = 0
    shuffle: bool = True
    position: int = 0
    step: int = 0

    def place(self, at: int) -> int:
        """Return the file's index of the window at position `at` of training."""
        count = self.tokens.windows(self.sequence)
        turn, index = divmod(at, count)
        return shuffled(index, count, (self.seed << 20) + turn) if self.shuffle else index

    def windows(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """
        Return inputs and targets of consecutive windows of training.

        Args:
            first: Position in training of the first window.
            count: Number of windows.

        Returns:
            Inputs and targets: two int64 tensors of shape `(sequence, count)`.
        """
        found = [self.tokens.window(self.sequence, self.place(first + n)) for n in range(count)]
        both = torch.stack(found, dim=1)
        return both[:-1].contiguous(), both[1:].contiguous()

    def state(self, position: int) -> dict[str, Any]:
        """Return the state of the data at a position, as plain data for a checkpoint."""
        return {
            **self.tokens.facts(),
            "sha256": self.tokens.sha256,
            "sequence": self.sequence,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "position": position,
        }

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """
        Continue from the `state` of another loader.

        Args:
            state: The other loader's state. If it comes from an earlier version without `sha256` of
                the whole file, only the other facts are compared.
            step: The step that begins at this position.

        Raises:
            DataError: The other loader had a different file, window length or order of windows.
        """
        own = self.state(int(state["position"]))
        for name in own:
            if name == "sha256" and name not in state:
                continue
            if state.get(name) != own[name]:
                raise DataError(
                    f"{self.tokens.path}: expected {name} {state.get(name)} as in the checkpoint, "
                    f"found {own[name]}; training would continue with different windows: restore "
                    "the file and the settings of the saved run, or start a new run"
                )
        self.position, self.step = own["position"], step


def _found(path: Path, error: Exception) -> str:
    """Describe a file that NumPy cannot read, because NumPy's own message would mislead a user."""
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
