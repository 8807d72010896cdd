"""
Event logs in several files: each file ends in a closing line, and the next file continues the log.

The first line of each later file is a header with the additional field ``continues``. This field
contains the number of the file, the number of events before the file, and the digest of the last
line before the file. It also contains the contract's state at that point, and the recorded steps
that a later line may repeat. So a file can be replayed alone; its initial state is then taken on
trust.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from ..engine.concrete_memory import Memory
from ..engine.stage import STATE
from ..text import shown

__all__ = [
    "CONTINUES",
    "Rotation",
    "check_continues",
    "columns_of",
    "differing",
    "load_columns",
]

CONTINUES: Final = "continues"
"""The header field that only the second and later files of a log have."""
_FIELDS: Final = ("part", "events", "after", "state", "steps")
_KEPT: Final = ("began", "state", "events")
#: No number of a state is as large: generations and incarnations have 64 bits.
_MOST: Final = 1 << 64


@frozen
class Rotation(os.PathLike[str]):
    """
    How an event log is split into several files.

    Args:
        path: Path of the first file. The path of file n also has n, in five digits, before the
            suffix.
        steps: Committed steps per file.
        keep: Number of files to keep, including the file being written; 0 keeps all.
    """

    path: Path
    steps: int
    keep: int = 0

    def __fspath__(self) -> str:
        return str(self.path)

    def part(self, number: int) -> Path:
        """
        Return the path of a file of the log.

        >>> Rotation(Path("rank0.jsonl"), 100).part(2).name
        'rank0.00002.jsonl'
        """
        if not number:
            return self.path
        return self.path.with_name(f"{self.path.stem}.{number:05d}{self.path.suffix}")

    def clear(self) -> None:
        """Remove the second and later files that an older log left at this path."""
        stem, suffix = re.escape(self.path.stem), re.escape(self.path.suffix)
        named = re.compile(rf"{stem}\.[0-9]{{5,}}{suffix}")
        for path in self.path.parent.iterdir():
            if named.fullmatch(path.name):
                path.unlink()

    def forget(self, newest: int) -> None:
        """Remove the files that are too old to keep, now that the file `newest` has begun."""
        if self.keep and newest >= self.keep:
            with suppress(FileNotFoundError):
                self.part(newest - self.keep).unlink()


def columns_of(memory: Memory, since: Mapping[str, list[Any]] | None = None) -> dict[str, Any]:
    """
    Return a memory's state as plain data, with one list per column (array of the state).

    Args:
        memory: The memory of a contract.
        since: An earlier result of this function. If given, only columns that differ from it are
            returned.
    """
    found = {}
    for name in memory._names:
        if name in STATE:
            column = getattr(memory, name)
            entries = [*(column.values() if isinstance(column, dict) else column)]
            if since is None or since.get(name) != entries:
                found[name] = entries
    return found


def load_columns(memory: Memory, columns: Mapping[str, Any], *, every: bool) -> None:
    """
    Write a state into a memory.

    Args:
        memory: The memory of a contract; its columns are overwritten.
        columns: The state, as `columns_of` returns it.
        every: If True, `columns` must have every column (array) of the state. If False, the
            memory's other columns stay unchanged.

    Raises:
        ValueError: A column is missing or unknown, has the wrong length, or has an entry of the
            wrong kind.
    """
    known = [name for name in memory._names if name in STATE]
    if odd := [name for name in columns if name not in known]:
        raise ValueError(f"{shown(odd[0])} is not a column of the state")
    if every and (lacking := [name for name in known if name not in columns]):
        raise ValueError(f"the column {lacking[0]} is missing")
    cells = {*memory.slot_of}
    for name, given in columns.items():
        column = getattr(memory, name)
        if type(given) is not list or len(given) != len(column):
            raise ValueError(f"{name}: expected {len(column)} entries, found {shown(given)}")
        entries = [tuple(entry) if type(entry) is list else entry for entry in given]
        for entry in entries:
            if not _fits(memory, STATE[name].values, entry, cells):
                raise ValueError(f"{name}: {shown(entry)} is not a {STATE[name].values}")
        if isinstance(column, dict):
            column.update(zip(column, entries, strict=True))
        else:
            column[:] = entries


def _fits(memory: Memory, sort: str, entry: Any, cells: set[Any]) -> bool:
    """Return whether an entry is a valid value for the given sort of column (array of the
    state)."""
    if sort == "cell":
        return entry is None or entry in cells
    if type(entry) is not int or not -_MOST < entry < _MOST:
        return False
    if sort == "stage":
        return entry == -1 or entry in memory.slot_stage
    members = {
        "slot": len(memory.slot_stage),
        "domain": len(memory.token),
        "link": len(memory.domain_at),
        "caller": max(memory.caller_at, default=0) + 1,
        "bucket": len(memory.stage_at),
    }
    return -1 <= entry < members.get(sort, _MOST)


def differing(one: Memory, other: Memory) -> str:
    """Return the name of the first column (array) in which two states differ; empty if they are
    equal."""
    for name in one._names:
        if name in STATE and getattr(one, name) != getattr(other, name):
            return name
    return ""


def check_continues(value: Any) -> None:
    """
    Check the shape of the header field ``continues``.

    Raises:
        ValueError: An entry of the field is missing, unknown or of the wrong type.
    """
    _require_fields(value, _FIELDS)
    for name, least in (("part", 1), ("events", 0)):
        if type(value[name]) is not int or value[name] < least:
            raise ValueError(f"{name}: expected a number of at least {least}")
    if type(value["after"]) is not str or not re.fullmatch("[0-9a-f]{16}", value["after"]):
        raise ValueError("after: expected a digest of 16 hexadecimal digits")
    if type(value["state"]) is not dict or type(value["steps"]) is not list:
        raise ValueError("expected an object as state, and a list of steps")
    for step in value["steps"]:
        _require_fields(step, _KEPT)
        if type(step["began"]) is not int or type(step["state"]) is not dict:
            raise ValueError("expected steps with a number and a state")
        if type(step["events"]) is not list or any(type(e) is not dict for e in step["events"]):
            raise ValueError("expected steps with a list of events")


def _require_fields(value: Any, names: tuple[str, ...]) -> None:
    if type(value) is not dict or tuple(value) != names:
        raise ValueError(f"expected the fields {', '.join(names)}")
