"""
Device counts: a device's own counts of the actions that it ran, compared with committed actions.

The captured graph of each F, dI, dW and refresh also adds one to a counter of its stage and kind of
action. The graph then folds the action's mark (a number) into a digest of its state domain (stages
whose FP8 scales are updated together). The counters show actions that were skipped or ran twice.
The digest depends on the order of the actions. It shows swapped actions, a dW that added where it
should have overwritten, and a dW that wrote to another destination. The contract computes the same
numbers from the committed actions, and refuses a commit if the device's numbers differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from attrs import Attribute, field, frozen

from .destinations import Destination
from .relations.constants import ADDS, JOINS, OPENS, OVERWRITES
from .text import shown

__all__ = [
    "COUNTED",
    "MULTIPLIER",
    "WAYS",
    "DeviceCounts",
    "advance",
    "fold",
    "located",
    "mark",
    "ways_of",
    "wrap",
]

#: Kinds of action, in the order of a stage's counters.
COUNTED: Final = ("refresh", "F", "dI", "dW")

#: A digest is multiplied by this factor before the next mark is added; odd, so that no information
#: is lost.
MULTIPLIER: Final = 6364136223846793005

_HALF: Final = 1 << 63
_MASK: Final = (1 << 64) - 1


#: How a dW writes its destinations: each way needs its own captured graph.
WAYS: Final = (OVERWRITES, ADDS, JOINS, OPENS)


#: Marks of one destination are below this power of two.
_MARKS: Final = 40


def mark(action: str, place: int, writes: int = OVERWRITES, destination: int = 0) -> int:
    """
    Return an action's mark: a number unique to these arguments, if ``place`` is below 2**37.

    Args:
        action: One of `COUNTED`.
        place: For an F, dI or dW: the index of its slot (set of buffers). For a refresh: the stage.
        writes: How a dW writes its destinations, one of `WAYS`. ``OVERWRITES`` and ``ADDS`` hold
            for all destinations. ``JOINS`` overwrites its stage's own destinations and adds to
            those shared with another stage; ``OPENS`` adds to its own destinations and overwrites
            the shared destinations. Other actions keep the default.
        destination: Number of a dW's memory location, from `located`; 0 for other actions.

    >>> mark("refresh", 0), mark("dW", 0), mark("F", 1), mark("dW", 0, writes=ADDS)
    (1, 4, 9, 5)
    """
    at = COUNTED.index(action) + ways_of(action).index(writes)
    return 1 + (len(COUNTED) + len(WAYS) - 1) * place + at + (destination << _MARKS)


def located(destinations: Iterable[Sequence[Destination]]) -> list[int]:
    """
    Return, for each dW, the number of the memory location that it writes. Locations are numbered
    from 0, in the order of their first occurrence.

    Args:
        destinations: The destinations of each dW. Destinations without an address have no known
            location: all such destinations of one matrix and device share a number.

    >>> own, other = Destination("w", address=64), Destination("w", 1, address=128)
    >>> located([(own,), (other,), (own,)])
    [0, 1, 0]
    >>> located([(Destination("w", 0),), (Destination("w", 1),)])
    [0, 0]
    """
    numbers: dict[tuple[tuple[str, str, int], ...], int] = {}
    return [
        numbers.setdefault(tuple((d.matrix, d.device, d.address) for d in each), len(numbers))
        for each in destinations
    ]


def ways_of(action: str) -> tuple[int, ...]:
    """Return the ways in which an action can write (see `mark`); only dW has more than one."""
    return WAYS if action == "dW" else WAYS[:1]


def fold(digest: int, number: int) -> int:
    """
    Return ``digest * MULTIPLIER + number`` as a signed 64-bit integer that wraps around.

    >>> fold(0, 5), fold(fold(0, 1), 2) == fold(fold(0, 2), 1)
    (5, False)
    """
    return wrap(digest * MULTIPLIER + number)


def wrap(number: int) -> int:
    """
    Return an integer modulo 2**64, as a signed 64-bit integer.

    >>> wrap(1 << 63), wrap(-1)
    (-9223372036854775808, -1)
    """
    return ((number + _HALF) & _MASK) - _HALF


def advance(before: Sequence[int], after: Sequence[int]) -> tuple[list[int], list[int]]:
    """
    Return the factors and terms of the affine map that a step applies to digest and counters.

    A digest is folded once for each action, so a step is an affine map of the digest modulo 2**64.
    Steps that run the same actions in the same order have the same map.

    Args:
        before: Digest and counters before a step.
        after: Digest and counters after the step.

    >>> advance([0, 0, 2], [7, 1, 2])[1]
    [7, 1, 0]
    """
    actions = sum(after[1:]) - sum(before[1:])
    factors = [pow(MULTIPLIER, actions, 1 << 64), *[1] * (len(before) - 1)]
    terms = [wrap(b - a * f) for a, b, f in zip(before, after, factors, strict=True)]
    return [wrap(factor) for factor in factors], terms


def _whole(counts: Any, attribute: Attribute[Any], value: Any) -> None:
    """Require plain ``int`` values; other number types are rejected, even if equal to an int."""
    numbers = (value,) if attribute.name == "digest" else tuple(value)
    if {*map(type, numbers)} == {int}:
        return
    if any(number.__class__ is not int for number in numbers):
        raise TypeError(f"{attribute.name} must be plain integers, got {shown(value)}")


def _are_counters(value: Any) -> bool:
    """Whether the value is a dict of counter tuples by stage; a fast check for every step."""
    if type(value) is not dict or {*map(type, rows := value.values())} != {tuple}:
        return False
    return {*map(len, rows)} == {len(COUNTED)} and {*map(type, chain(value, *rows))} == {int}


def _stages(counts: Any, attribute: Attribute[Any], value: Any) -> None:
    if _are_counters(value):
        return
    if not isinstance(value, Mapping):
        raise TypeError(f"{attribute.name} must map stages to counters, got {shown(value)}")
    for stage, numbers in value.items():
        if not isinstance(numbers, Sequence):
            raise TypeError(f"stage {stage} must have a sequence of counters, got {shown(numbers)}")
        if len(numbers) != len(COUNTED):
            raise ValueError(
                f"stage {stage} has {len(numbers)} counters; expected {', '.join(COUNTED)}"
            )
        _whole(counts, attribute, (stage, *numbers))


@frozen
class DeviceCounts:
    """
    The counts of the device of one state domain (stages whose FP8 scales are updated together),
    since the contract's start or last restore.

    Args:
        digest: One number that combines the marks (numbers) of all actions in the order in which
            the actions ran.
        stages: For each stage of the domain, its counters in the order of `COUNTED`.

    Raises:
        TypeError: A number is not a plain ``int``.
        ValueError: The number of a stage's counters differs from the number of action kinds.

    >>> DeviceCounts(digest=fold(0, mark("F", 0)), stages={0: (0, 1, 0, 0)}).stages[0]
    (0, 1, 0, 0)
    """

    digest: int = field(validator=_whole)
    stages: Mapping[int, tuple[int, ...]] = field(validator=_stages)
