"""
Packing: encode a state as a few 64-bit integers, in mixed radix, without loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from qeffect.engine.stage import STATE
from qeffect.relations.constants import GROUP_BIT, RESERVED

from .scopes import Scope, configuration, sizes

__all__ = ["TICKETS", "OutOfRangeError", "PackedField", "Packing", "Words", "ranges"]

#: Columns that hold tickets in flight, or 0.
TICKETS: Final = ("held", "busy", "refreshing", "filling", "writing", "optimizing", "evaluating")

#: Packed states: one row for each word, one column for each state.
Words = NDArray[np.int64]

_LIMIT: Final = 1 << 63
# Greatest entries; a move may present an entry that is one larger.
_BYTE, _SHORT = (1 << 7) - 2, (1 << 15) - 2


class OutOfRangeError(ArithmeticError):
    """A transition produced a value outside its column's range; values are never truncated."""


def ranges(scope: Scope) -> dict[str, tuple[int, int]]:
    """
    Return the smallest and largest value that each column (array of the state) can have in normal
    form.

    If a bound is too tight, the exploration stops with an error; it never merges two states.
    """
    n, config = sizes(scope), configuration(scope)
    epoch = (-1, 0) if scope.fresh_keys else (-1, scope.epochs - 1)
    now = (-1, scope.epochs)
    marks = 2 * n["slot"] + n["stage"] + ("drop" in scope.transitions)
    updates = 2 * sum(scope.cells)
    tapes = sum(scope.slots) * scope.generation_max
    draws = sum(scope.cells) * scope.epochs * scope.walks if scope.draws else -1
    parts = max(scope.cells) if scope.weights else 0
    most = max(scope.cells) if "order" not in scope.omit else tapes
    ticket = (0, n["slot"] + n["stage"] + 1 if scope.tickets else 0)
    bounds = {
        "consumers": (0, RESERVED),
        "generation": (0, scope.generation_max),
        "cell_at": (-1, n["cell"] - 1),
        "epoch_at": epoch,
        "slot_of": (-1, n["slot"] - 1),
        "forwarded": epoch,
        "skipped": epoch if scope.skips else (-1, -1),
        "skips": (0, n["cell"] if scope.skips else 0),
        "cache_epoch": now,
        "refreshed": (-1, n["stage"] - 1),
        "weight_epoch": (0, scope.epochs),
        "walk": (0, scope.walks - 1),
        "wgrads": (0, most),
        "spoiled": now,
        "final": epoch,
        "token": (0, updates * scope.epochs * scope.walks),
        "position": (0, updates),
        "scaled_at": (0, updates * scope.epochs * scope.walks),
        "rolled_at": (0, updates * scope.epochs * scope.walks),
        "drawn_at": (-1, draws),
        "drawn": (-1, draws),
        "parts": (0, parts),
        "unweighed": (-2 * parts, parts),
        "forwards": (0, most * scope.walks),
        "dgrads": (0, most),
        "bound": epoch,
        "opened": epoch,
        "cursor": (0, max(config["wgrad_rank"])),
        "tenants": (0, n["slot"] if scope.shared_pool else 1),
        "joined": (0, 0),
        "submitted": (0, 1),
        "waited": (0, marks),
        "replays": (0, marks),
        "vacated": (0, marks),
        "ended_on": (0, n["link"] - 1),
        "ended_at": (0, 1 if scope.readers or scope.receives else 0),
        "moving": (0, scope.readers | scope.receives | (GROUP_BIT if scope.groups else 0)),
        "arrived": (0, scope.receives),
        "produced": (0, marks),
        "landed": (0, marks),
        "named": now,
        "consumer": (0, n["caller"] - 1),
        "updater": (0, n["caller"] - 1),
        "reduced": epoch,
        "started": (0, n["bucket"]),
        "serial": ticket,
        "incarnation": (0, 0),
    }
    for name, column in STATE.items():
        if name in TICKETS:
            bounds[name] = ticket
        elif column.values == "flag":
            bounds[name] = (0, 1)
    return bounds


@frozen
class PackedField:
    """
    The position, in a packed state, of one entry of a column (an array of the state).

    Args:
        word: Index of the integer that holds the entry.
        weight: Factor of the entry's code in that integer.
        low: Smallest value of the entry.
        size: Number of possible values.
        gap: For a mask, the distance from the value RESERVED to its code; masks between the other
            masks and RESERVED do not occur.
    """

    word: int
    weight: int
    low: int
    size: int
    gap: int = 0


class Packing:
    """
    Packs the states of a scope into as many 64-bit integers (words) as needed.

    Args:
        scope: The scope to explore.
        kept: The columns (arrays of the contract's memory) that make up a state.

    Attributes:
        layout: Number of entries of each kept column.
        fields: The position of each entry in the packed state.
        num_words: Number of words per state.
        entries: NumPy type of unpacked entries.

    Raises:
        ValueError: A column's values do not fit in two bytes.
    """

    def __init__(self, scope: Scope, kept: Iterable[str]) -> None:
        self.scope = scope
        n = sizes(scope)
        chosen = set(kept)
        self.layout = {name: n[STATE[name].index] for name in STATE if name in chosen}
        self.fields: dict[tuple[str, int], PackedField] = {}
        self._config = configuration(scope)
        for name, column in STATE.items():
            if name not in self.layout:  # read by predicates, written by no transition
                self._config[name] = [column.number] * n[column.index]
        bounds = ranges(scope)
        masks = max(self._config["owes"])
        word, weight, most = 0, 1, 0
        for name in self.layout:
            low, high = bounds[name]
            gap = RESERVED - masks - 1 if name == "consumers" else 0
            size = high - low + 1 - gap
            most = max(most, size - 1, high)
            for index in range(self.layout[name]):
                if weight * size > _LIMIT:
                    word, weight = word + 1, 1
                self.fields[name, index] = PackedField(word, weight, low, size, gap)
                weight *= size
        self.num_words = word + 1
        self.entries: type[np.signedinteger[Any]] = np.int8 if most <= _BYTE else np.int16
        if most > _SHORT:
            raise ValueError(f"scope {scope.name}: a column reaches {most:,}, more than {_SHORT:,}")

    def width(self, column: str) -> int:
        """Return the number of entries of a column."""
        if column in self.layout:
            return self.layout[column]
        return len(self._config[column])

    def constant(self, column: str, index: int) -> int:
        """Return an entry of a configuration column (an array that no transition changes)."""
        return self._config[column][index]

    def pack(self, columns: Mapping[str, Any]) -> tuple[int, ...]:
        """
        Pack one state into 64-bit integers (words).

        Raises:
            OutOfRangeError: A value is outside its column's range.
        """
        words = [0] * self.num_words
        for (name, index), where in self.fields.items():
            code = self._code(name, where, columns[name][index])
            words[where.word] += code * where.weight
        return tuple(words)

    def _code(self, name: str, where: PackedField, value: int) -> int:
        code: int = self._codes(where, value) - where.low
        if not 0 <= code < where.size:
            raise OutOfRangeError(
                f"scope {self.scope.name}: {name} reached {value}, outside its range"
            )
        return code

    def unpack(self, words: Words) -> dict[tuple[str, int], Any]:
        """
        Return every entry of many states as an array of type `entries`, or as a single number if
        the entry can have only one value.
        """
        found: dict[tuple[str, int], Any] = {}
        rest = [word.copy() for word in words]
        for key, where in self.fields.items():
            if where.size == 1:
                found[key] = where.low
                continue
            left = rest[where.word] // where.size
            code = (rest[where.word] - left * where.size).astype(self.entries)
            rest[where.word] = left
            if where.gap:
                code += (code == where.size - 1).view(np.int8) * np.int8(where.gap)
            found[key] = code + self.entries(where.low) if where.low else code
        return found

    def repack(self, columns: Mapping[tuple[str, int], Any], count: int) -> Words:
        """
        Pack many states into 64-bit integers (words), given every entry.

        Raises:
            OutOfRangeError: A value is outside its column's range.
        """
        words = np.zeros((self.num_words, count), np.int64)
        for key, where in self.fields.items():
            self._put(words, key, where.low, columns[key])
        return words

    def move(self, words: Words, key: tuple[str, int], before: Any, after: Any) -> None:
        """
        Change one entry of every packed state, in place.

        Raises:
            OutOfRangeError: A value is outside its column's range.
        """
        self._put(words, key, before, after)

    def _put(self, words: Words, key: tuple[str, int], before: Any, after: Any) -> None:
        where = self.fields[key]
        old, new = self._codes(where, before), self._codes(where, after)
        if isinstance(new, int):
            low = high = new
        else:
            low, high = int(new.min(initial=where.low)), int(new.max(initial=where.low))
        if low < where.low or high >= where.low + where.size:
            reached = low if low < where.low else high
            raise OutOfRangeError(
                f"scope {self.scope.name}: {key[0]} reached {reached}, outside its range"
            )
        step = new - old
        if isinstance(step, int):
            if step:
                words[where.word] += step * where.weight
        else:
            words[where.word] += step.astype(np.int64) * where.weight

    @staticmethod
    def _codes(where: PackedField, values: Any) -> Any:
        """Return the codes of values; an impossible mask gets a code above the valid codes."""
        if not where.gap:
            return values
        last = where.low + where.size - 1  # the code of RESERVED
        if isinstance(values, int):
            return last if values == RESERVED else values + (values >= last)
        reserved = values == RESERVED
        return values + (values >= last) - reserved.view(np.int8) * np.int8(where.gap + 1)
