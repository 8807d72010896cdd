"""
``qeffect faults``: inject the paper's faults and show where each is refused.
"""

from __future__ import annotations

import argparse
from typing import Any

from .command import Outcome, Progress

__all__ = ["Faults"]


class Faults:
    """Reproduce the fault table."""

    name = "faults"
    help = "inject the fault table's seven violations and show where each is refused"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """It takes none of its own."""

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Run every injection through the public API."""
        from ..faults import run

        report = run()
        data = report.asdict()
        return Outcome(report.verdict, data, _table(data["rows"]))


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = ("injection", "detected_at", "clause", "result", "preserved")
    cells = [columns] + [tuple(str(row[c]) for c in columns) for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    refused = sum(bool(row["refused"]) for row in rows)
    families = len({row["family"] for row in rows})
    return [
        lines[0],
        "-" * len(lines[0]),
        *(line.rstrip() for line in lines[1:]),
        f"{refused} of {len(rows)} injections in {families} families refused at their first "
        "invalid operation.",
    ]
