"""
Group the files of rotated event logs by log, and sort them, oldest first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .checker import LogError
from .player import MAX_LINE
from .rotation import CONTINUES

__all__ = ["series_of"]


def series_of(paths: Sequence[Path]) -> list[tuple[Path, ...]]:
    """
    Group files by the log that they belong to.

    Files whose headers are equal, except for the field ``continues``, belong to one log. A file
    that cannot be read as an event log is returned as a log of its own; its replay then reports the
    error.

    Args:
        paths: Files of event logs, in any order.

    Returns:
        For each log its files, oldest first. The logs are in the order of their first given path.

    Raises:
        LogError: A log has two files with the same number.
    """
    found: dict[str, dict[int, Path]] = {}
    for path in paths:
        name, part = _place(path)
        if not part and 0 in found.get(name, {}):
            name = f"{name} {len(found)}"
        files = found.setdefault(name, {})
        if part in files:
            raise LogError(f"{files[part]} and {path} are both file {part} of one log")
        files[part] = path
    return [tuple(files[part] for part in sorted(files)) for files in found.values()]


def _place(path: Path) -> tuple[str, int]:
    """Return a string that identifies a file's log, and the file's number in that log."""
    try:
        with path.open("rb") as file:
            header: Any = json.loads(file.readline(MAX_LINE))
        continues = header.pop(CONTINUES, None)
        del header["digest"]
        part = 0 if continues is None else continues["part"]
        if type(part) is not int or header["incarnation"] is None:
            return f"{path}", 0
        return json.dumps(header), part
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{path}", 0
