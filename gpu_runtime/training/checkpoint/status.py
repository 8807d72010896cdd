"""The status file beside the checkpoints: whether a run ended, what ended it, whether to resume."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["STATUS", "write_status"]

STATUS = "status.json"
"""Name of the file."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_status(folder: Path, facts: Mapping[str, Any]) -> str:
    """
    Replace the status file in one step: a reader finds the old facts or the new ones.

    On a full disk there is no room for a second file: the new facts are then written over the old
    ones, in the space that the file has.

    Args:
        folder: The folder of the checkpoints.
        facts: Plain data.

    Returns:
        Why it could not be written, in words; empty if it was.
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
