"""
Exact sets of packed states, kept sorted; a set needs memory only for the states themselves.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .packing import Words

__all__ = ["KeyCollisionError", "StateSet", "distinct"]

_SALTS: Final = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB)

Keys = NDArray[np.uint64]


class KeyCollisionError(Exception):
    """Two different states have the same sort key (hash); explore again with another salt."""


def _keys(words: Words, salt: int) -> Keys:
    """
    Return the sort keys of states: a state that is packed into one 64-bit integer is its own key;
    otherwise the key is a hash of all its integers.

    Two states with the same hash are never merged: every use compares the words, and raises an
    error if different states have the same key.
    """
    keys: Keys = words[0].view(np.uint64)
    for place, word in enumerate(words[1:], start=1):
        factor = pow(_SALTS[salt], place, 1 << 64)  # odd, and different for each word
        mixed = word.view(np.uint64) * np.uint64(factor)
        keys = keys ^ mixed ^ (mixed >> np.uint64(29))
    return keys


def _same(one: Words, other: Words) -> Any:
    equal = one[0] == other[0]
    for a, b in zip(one[1:], other[1:], strict=True):
        equal &= a == b
    return equal


def distinct(words: Words, salt: int = 0) -> Words:
    """
    Return each state once, sorted by key.

    Raises:
        KeyCollisionError: Two different states have the same key.
    """
    if len(words) == 1:
        keys = np.sort(words[0].view(np.uint64))
        keep = np.empty(len(keys), bool)
        keep[:1] = True
        np.not_equal(keys[1:], keys[:-1], out=keep[1:])
        return keys[keep].view(np.int64)[np.newaxis]
    if not words.shape[1]:
        return words
    keys = _keys(words, salt)
    order = np.argsort(keys)
    keys, words = keys[order], words[:, order]
    again = keys[1:] == keys[:-1]
    if not _same(words[:, 1:], words[:, :-1])[again].all():
        raise KeyCollisionError
    return np.ascontiguousarray(words[:, np.concatenate(([True], ~again))])


class StateSet:
    """
    A growing set of packed states.

    Args:
        num_words: Number of words (64-bit integers) per state.
        salt: Number that selects the hash function for states with several words.
    """

    def __init__(self, num_words: int, salt: int = 0) -> None:
        self.salt = salt
        self.words: Words = np.empty((num_words, 0), np.int64)
        self._keys: Keys = _keys(self.words, salt)

    def __len__(self) -> int:
        return int(self.words.shape[1])

    def missing(self, words: Words) -> Words:
        """
        Return the given states that are not in the set; they must be distinct and sorted.

        Raises:
            KeyCollisionError: Two different states have the same key.
        """
        if not len(self):
            return words
        keys = _keys(words, self.salt)
        at = np.searchsorted(self._keys, keys)
        at[at == len(self)] = 0
        found = self._keys[at] == keys
        if len(words) > 1 and not _same(self.words[:, at[found]], words[:, found]).all():
            raise KeyCollisionError
        return np.ascontiguousarray(words[:, ~found])

    def add(self, words: Words) -> None:
        """Add distinct sorted states that are not in the set yet."""
        keys = _keys(words, self.salt)
        at = np.searchsorted(self._keys, keys) + np.arange(len(keys))
        total = len(self) + len(keys)
        old = np.ones(total, bool)
        old[at] = False
        merged = np.empty((len(words), total), np.int64)
        merged[:, at] = words
        merged[:, old] = self.words
        self.words = merged
        self._keys = _keys(merged, self.salt)
