"""
Prepare the folder of a run's event logs, and move the logs of earlier processes to subfolders. The
event log of a rank records every accepted call of the rank's contract.

A run that resumes, or that a launcher restarts, begins new event logs with the same names. The
existing logs show what happened before the previous process ended. Therefore these event logs and
their rank logs are moved to `before-0001`, `before-0002` and so on. A rank moves only its own
files, because ranks on two hosts may each have their own folder with this path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..ranks.membership import Member, agree_on, all_gather

__all__ = ["set_aside"]

_BEFORE = re.compile(r"before-([0-9]{4,})")


def set_aside(folder: Path, member: Member, where: str, *, one: bool = False) -> Path:
    """
    Create the folder, and move the logs of the previous process. Every rank must call this
    function.

    Args:
        folder: The folder of the event logs.
        member: This rank.
        where: The training file's field that names the folder, for messages.
        one: Whether to keep only the newest folder of moved logs. If False, all folders are kept.

    Returns:
        The path of this rank's event log.

    Raises:
        BackendError: A rank cannot write to the folder; every rank raises this error.
    """
    own = re.compile(rf"rank{member.rank}(\.[^.]+\.ranks)?(\.[0-9]{{5,}})?\.jsonl")
    found: list[Path] = []
    last, problem = 0, ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = _files(folder, own)
        last = max((number for number, _ in _befores(folder)), default=0)
    except OSError as error:
        problem = _said(where, folder, error)
    agree_on(member, problem)
    said = all_gather(member, (last, bool(found)))
    if any(has for _, has in said):
        into = folder / f"before-{max(number for number, _ in said) + 1:04d}"
        try:
            for path in found:
                into.mkdir(exist_ok=True)
                path.rename(into / path.name)
        except OSError as error:
            problem = _said(where, folder, error)
        agree_on(member, problem)
        if one:
            _forget(folder, into, own)
    return folder / f"rank{member.rank}.jsonl"


def _said(where: str, folder: Path, error: OSError) -> str:
    return f"{where}: {error.filename or folder}: {error.strerror or error}"


def _files(folder: Path, named: re.Pattern[str]) -> list[Path]:
    return sorted(p for p in folder.iterdir() if named.fullmatch(p.name) and p.is_file())


def _befores(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the folders of earlier logs, with their numbers."""
    for path in folder.iterdir():
        if (found := _BEFORE.fullmatch(path.name)) is not None and path.is_dir():
            yield int(found[1]), path


def _forget(folder: Path, newest: Path, own: re.Pattern[str]) -> None:
    """Remove this rank's files from all folders of earlier logs except the newest."""
    with suppress(OSError):
        for _, path in [*_befores(folder)]:
            if path != newest:
                for file in _files(path, own):
                    file.unlink()
                with suppress(OSError):  # another rank's files are still there
                    path.rmdir()
