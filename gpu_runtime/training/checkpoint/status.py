"""
The status of a run: whether the run has ended, why it ended, and whether to resume it. The status
is written to a file in the folder of checkpoints. If the run was stopped, the last line of output
also contains it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from .files import newest_name

__all__ = ["STATUS", "facts_of_run", "next_start", "write_status"]

STATUS = "status.json"
"""Name of the status file."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def facts_of_run(
    folder: Path | None,
    state: str,
    *,
    run: str | None,
    steps: int,
    step: int | None = None,
    mismatches: int = 0,
    by: str = "",
    cause: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """
    Return the status of a run, as plain data.

    Args:
        folder: The folder of checkpoints; None if the run has none.
        state: ``"running"`` or ``"ended"``.
        run: The run's identity; None if it is not known yet.
        steps: Number of steps of the whole run.
        step: Number of steps taken; None if the run ended before its first step.
        mismatches: Number of steps that ran twice with two different results.
        by: The reason for the end of the run as a single word, such as `refused` or `SIGINT`.
        cause: The reason for the end of the run, as a sentence.
        resume: Whether the run may be resumed automatically, without the decision of a person.
    """
    return {
        "state": state,
        "run": run,
        "ended_by": by or None,
        "cause": cause,
        "resume": resume,
        "step": step,
        "steps": steps,
        "mismatches": mismatches,
        "checkpoint": None if folder is None else newest_name(folder),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def next_start(facts: Mapping[str, Any], folder: Path | None) -> str:
    """
    Describe whether a stopped run may be resumed, and from which checkpoint.

    Args:
        facts: The run's status, from `facts_of_run`.
        folder: The folder of checkpoints; None if the run has none.
    """
    newest = facts["checkpoint"]
    if not facts["resume"]:
        kept = "there is no checkpoint" if newest is None else f"the newest checkpoint is {newest}"
        return f"Remove the cause before you resume; {kept}"
    if folder is None:
        return "Start it again; nothing was saved, because [checkpoint] folder is empty"
    if newest is None:
        return "Start it again, with or without --resume; nothing was saved yet"
    return f"Resume it with --resume; the newest checkpoint is {newest}"


def write_status(folder: Path, facts: Mapping[str, Any]) -> str:
    """
    Replace the status file atomically. A reader finds either the old facts or the new facts.

    If the disk is full, there is no space for a second file. Then the new facts overwrite the old
    facts in place.

    Args:
        folder: The folder of the checkpoints.
        facts: The status, as plain data.

    Returns:
        The reason why the file could not be written; empty if the file was written.
    """
    hidden, text = folder / f".{STATUS}", json.dumps(facts).encode()
    try:
        with hidden.open("wb") as file:
            _put(file, text)
        hidden.replace(folder / STATUS)
    except OSError as error:
        with suppress(OSError):
            hidden.unlink()
        if error.errno in _FULL:
            with suppress(OSError), (folder / STATUS).open("r+b") as file:
                _put(file, text)
                return ""
        return f"{folder / STATUS} cannot be written: {error.strerror or error}"
    return ""


def _put(file: BinaryIO, text: bytes) -> None:
    file.write(text)
    file.truncate()
    file.flush()
    os.fsync(file.fileno())
