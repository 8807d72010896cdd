"""
The block about long runs of the suite: time, machine, commit and result of each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tests.docs.blocks import load, markdown
from tests.record import RECORDS

HEADER = (
    *("run", "date", "commit", "hardware", "Python", "torch"),
    *("passed", "failed", "skipped", "minutes", "end"),
)

#: How a run ended, by pytest's exit status.
ENDS = {0: "whole", 1: "whole", 2: "cut off"}


def machine(hardware: Mapping[str, Any]) -> str:
    """A machine by its processor, its cores and its GPUs."""
    processor = f"{hardware['processor']}, {hardware['cores']} cores"
    return ", ".join((processor, *hardware["gpus"]))


def _different(words: Iterable[str]) -> str:
    """Join the different words, each once."""
    return " and ".join(dict.fromkeys(words))


def row(name: str, record: Mapping[str, Any]) -> tuple[object, ...]:
    """One record as a row of the table. Errors count as failed."""
    counts = record["counts"]
    parts = [record, *record.get("later_parts", ())]
    machines = _different(machine(part["hardware"]) for part in parts)
    return (
        f"{name} (`-m {record['markers']!r}`, {record['profile']})",
        record["date"],
        f"`{record['commit'][:12]}`",
        machines + (f" ({len(parts)} parts)" if len(parts) > 1 else ""),
        _different(part["versions"]["python"] for part in parts),
        _different(part["versions"].get("torch", "none") for part in parts),
        counts["passed"] + counts["xfailed"],
        counts["failed"] + counts["errors"] + counts["xpassed"],
        counts["skipped"],
        f"{record['seconds'] / 60:.0f}",
        ENDS.get(record["exit_status"], f"status {record['exit_status']}"),
    )


def records() -> str:
    """The kept records, the newest first."""
    kept = [(file.stem, load(file)) for file in RECORDS.glob("*.json")]
    if not kept:
        return "No run is recorded yet."
    kept.sort(key=lambda pair: (pair[1]["began"], pair[0]), reverse=True)
    return markdown(HEADER, [row(name, record) for name, record in kept])


BLOCKS: Mapping[str, Callable[[], str]] = {"records": records}
