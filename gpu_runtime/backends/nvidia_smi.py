"""
Queries about a device through nvidia-smi. They change nothing on the device.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

from .devices import visible_id

__all__ = ["IDENTITY", "STATE", "parse", "query"]

#: Fields that change while a device works: clocks (MHz), power (W), temperature (C), power state.
STATE = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "temperature.gpu", "pstate")
#: Fields that identify a device: name, driver version, memory (MiB).
IDENTITY = ("name", "driver_version", "memory.total")


def query(fields: Sequence[str]) -> dict[str, Any] | None:
    """
    Query properties (fields) of the first visible device from nvidia-smi.

    Returns:
        The values by field. Numeric values are numbers, all others are text. None if nvidia-smi is
        missing.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            [*command, f"--id={visible_id()}"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse(fields, done.stdout)


def parse(fields: Sequence[str], line: str) -> dict[str, Any]:
    """
    Parse one line of nvidia-smi's CSV answer.

    >>> parse(("clocks.sm", "pstate"), "1980, P0")
    {'clocks.sm': 1980.0, 'pstate': 'P0'}
    """
    values = [value.strip() for value in line.strip().splitlines()[0].split(",")]
    return {field: _number(value) for field, value in zip(fields, values, strict=True)}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
