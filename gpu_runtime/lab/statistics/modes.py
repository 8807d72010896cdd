"""
Derive the figures of `report modes`: which rows ran, whose bits differ, and what the guard
reported.

A row's bits are compared with those of its reference. A row *agrees* if its bits are equal and the
guard is silent, or if its bits differ and the guard reports a clause. In a *false alarm*, the bits
are equal but the guard reports a clause; in a *silent difference*, the bits differ but the guard is
silent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["ENDS", "WRONG", "changed", "derive_modes", "numbers_of", "row_text"]

ENDS = ("same", "found", "false alarm", "silent difference", "guard changes bits",
        "refused", "no reference")  # fmt: skip
"""
The possible results (ends) of a row; `refused` means that the framework raised an exception, or
that the row did not end.
"""


WRONG = ("false alarm", "silent difference", "guard changes bits", "no reference")
"""The results of rows that need a fix or an explanation."""


def changed(row: Mapping[str, Any], factors: Mapping[str, Sequence[Any]]) -> str:
    """The values of a row that differ from the plainest value of their factor, in words. A row is
    one value of each factor."""
    found = {name: value for name, value in row.items() if value != factors.get(name, [None])[0]}
    return row_text(found) or "the plainest mode"


def numbers_of(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """
    The row's values of the factors that change numbers even in a correct run, as text. Rows with
    equal values share a reference run, and this text names the reference.
    """
    return row_text({name: row[name] for name in names})


def row_text(row: Mapping[str, Any]) -> str:
    """A row (one value of each factor) in words: `schedule=GPipe, walks=2`."""
    return ", ".join(f"{name}={value}" for name, value in row.items())


def derive_modes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """
    The result (`end`) of each row (one value of each factor), and the number of rows with each
    result.

    `pairs` counts the pairs of values of two factors that the chosen rows contain. `pairs_that_ran`
    counts such pairs only in rows that ran to the end.
    """
    rows = [_row(one, raw["rows"]) for one in raw["rows"] if one["kind"] != "reference"]
    covered = [one for one in raw["rows"] if one["kind"] == "cover"]
    every = {pair for one in covered for pair in _pairs(one["row"])}
    ran = {pair for one in covered if "failed" not in one for pair in _pairs(one["row"])}
    ends = Counter(row["end"] for row in rows)
    return {
        "rows": rows,
        "references": sum(one["kind"] == "reference" for one in raw["rows"]),
        "ends": {end: ends[end] for end in ENDS if ends[end]},
        "pairs": len(every),
        "pairs_that_ran": len(ran),
    }


def _pairs(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    values = [f"{name}={value}" for name, value in row.items()]
    for index, one in enumerate(values):
        for other in values[index + 1 :]:
            yield one, other


def _row(one: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = {"kind": one["kind"], "row": one["row"], "ranks": one["ranks"]}
    if "failed" in one:
        end = "guard changes bits" if one["guarded"] else "refused"
        return {**found, "end": end, "said": one["failed"], "clauses": [], "differs": []}
    reference = next(
        (
            each
            for each in rows
            if each["kind"] == "reference"
            and each["numbers"] == one["numbers"]
            and "failed" not in each
        ),
        None,
    )
    if reference is None:
        return {**found, "end": "no reference", "clauses": [], "differs": []}
    differs = _differs(one["plain"]["bits"], reference["plain"]["bits"])
    clauses = sorted({violation[0] for violation in one["violations"]})
    if _differs(one["guarded"]["bits"], one["plain"]["bits"]):
        end = "guard changes bits"
    elif differs:
        end = "found" if clauses else "silent difference"
    else:
        end = "false alarm" if clauses else "same"
    ours, theirs = one["plain"]["losses"], reference["plain"]["losses"]
    apart = max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0)
    return {**found, "end": end, "clauses": clauses, "differs": differs, "losses_apart": apart}


def _differs(
    own: Mapping[str, Sequence[str]], other: Mapping[str, Sequence[str]]
) -> list[list[Any]]:
    """
    The quantities that differ, each with the first step in which it differs. Quantities that only
    one side has are left out.
    """
    found: list[list[Any]] = []
    for what in own.keys() & other.keys():
        steps = [
            n
            for n, pair in enumerate(zip(own[what], other[what], strict=True))
            if len(set(pair)) > 1
        ]
        if steps:
            found.append([what, steps[0]])
    return sorted(found)
