"""The status file beside the checkpoints: whether a run ended, what ended it, whether to resume."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["STATUS", "write_status"]

STATUS = "status.json"
"""Name of the file."""


def write_status(folder: Path, facts: Mapping[str, Any]) -> str:
    """
    Replace the status file in one step: a reader finds the old facts or the new ones.

    Args:
        folder: The folder of the checkpoints.
        facts: Plain data.

    Returns:
        Why it could not be written, in words; empty if it was.
    """
    hidden = folder / f".{STATUS}"
    try:
        with hidden.open("w", encoding="utf-8") as file:
            json.dump(facts, file)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(folder / STATUS)
    except OSError as error:
        with suppress(OSError):
            hidden.unlink()
        return f"{folder / STATUS} cannot be written: {error.strerror or error}"
    return ""
