"""
Digests of gradients in a run's log: functions that prepare digests for a gather over ranks, and
that read digests from the log.

The log's line `gradients` lists, by rank, the stage and the name of each gradient. The line of each
later step has the entry `digests`: by rank, the digests in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qeffect.report import UnusableError

from ..step.memory.gradient_digests import spelled

__all__ = ["DIGESTS", "MATRICES", "Place", "first_difference", "joined", "padded", "read_digests"]

DIGESTS, MATRICES = "digests", "gradients"

Place = tuple[int, int, str]
"""Rank, stage and name of a gradient."""


def padded(digests: Sequence[Sequence[int]], count: int) -> list[float]:
    """
    Convert the digests of some steps to numbers for a gather over ranks. Each 64-bit digest becomes
    two numbers, because a float64 holds only 53 bits.

    Args:
        digests: The digests of each step.
        count: Number of digests per step on the rank with the most digests; missing digests become
            0.

    >>> padded([[2**32 + 5]], 2)
    [1.0, 5.0, 0.0, 0.0]
    """
    found: list[float] = []
    for own in digests:
        halves = [float(half) for one in own for half in divmod(one % 2**64, 2**32)]
        found += halves + [0.0] * (2 * count - len(halves))
    return found


def joined(halves: Sequence[float]) -> list[str]:
    """
    Convert the numbers from `padded` back to digests, as text.

    >>> joined([1.0, 5.0])
    ['0000000100000005']
    """
    pairs = zip(halves[::2], halves[1::2], strict=True)
    return [spelled((int(high) << 32) + int(low)) for high, low in pairs]


def read_digests(path: Path) -> dict[int, dict[Place, str]]:
    """
    Return the digests in a run's log, by step. For a restarted step these are the digests of its
    last run.

    Raises:
        UnusableError: The log cannot be read, or has no digests.
    """
    found: dict[int, dict[Place, str]] = {}
    places: list[list[Place]] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise UnusableError(f"{path}: {said}") from None
    lines = text.split("\n")
    for number, said in enumerate(lines[:-1], 1):  # a killed run leaves its last line unfinished
        try:
            line = json.loads(said)
            if MATRICES in line:
                places = [
                    [(rank, int(stage), str(name)) for stage, name in own]
                    for rank, own in enumerate(line[MATRICES])
                ]
            elif DIGESTS in line:
                found[int(line["step"])] = _by_place(places, line)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise UnusableError(
                f"{path}: line {number}: expected a line of the file that [run] log names, found "
                f"{said[:40]!r}"
            ) from error
    if not found:
        raise UnusableError(
            f"{path}: expected digests of gradients, found none; train with [guard] digests = true"
        )
    return found


def _by_place(
    places: Sequence[Sequence[Place]], line: Mapping[str, Any]
) -> dict[tuple[int, int, str], str]:
    return {
        place: str(digest)
        for own, digests in zip(places, line[DIGESTS], strict=True)
        for place, digest in zip(own, digests, strict=True)
    }


def first_difference(
    first: Mapping[int, Mapping[Place, str]], second: Mapping[int, Mapping[Place, str]]
) -> tuple[int, list[Place], int]:
    """
    Return the first step in which two runs differ, the gradients that differ, and the number of
    compared steps. If all common steps are equal, the step is -1 and the list of gradients is
    empty.

    Raises:
        UnusableError: The runs have no step in common, or their ranks have different gradients.
    """
    common = sorted(first.keys() & second.keys())
    if not common:
        raise UnusableError(
            f"the runs have no step in common: the first has steps {min(first)} to {max(first)}, "
            f"the second {min(second)} to {max(second)}"
        )
    for compared, step in enumerate(common, 1):
        one, other = first[step], second[step]
        if one.keys() != other.keys():
            rank, stage, name = min(one.keys() ^ other.keys())
            raise UnusableError(
                f"step {step}: only one of the runs has {name} of stage {stage} on rank {rank}; "
                "give two runs of the same model with the same mapping onto ranks"
            )
        if found := [place for place in one if one[place] != other[place]]:
            return step, found, compared
    return -1, [], len(common)
