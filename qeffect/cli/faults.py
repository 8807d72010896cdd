"""
``qeffect faults``: inject the paper's faults and show where the contract refuses each.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from typing import Any

from .command import Outcome, Progress

__all__ = ["Faults"]

#: Columns of the widest line, and of the narrowest terminal that the table is fitted to.
_WIDEST, _NARROWEST = 100, 40


class Faults:
    """Reproduce the fault table."""

    name = "faults"
    help = "inject the seven violations of the fault table and show where each is refused"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare no options."""

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Inject every fault through the public API, and report the refusals."""
        from ..faults import run

        report = run()
        data = report.asdict()
        return Outcome(report.verdict, data, _table(data["rows"]))


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines for each injection, at most 100 columns and at most the terminal wide."""
    width = min(shutil.get_terminal_size((_WIDEST, 0)).columns, _WIDEST)
    lines: list[str] = []
    for row in rows:
        lines += _wrapped(f"{row['injection']}: {row['result']}", width, "")
        lines += _wrapped(f"refused by  {row['clause']}, at {row['detected_at']}", width, "  ")
        lines += _wrapped(f"preserved   {row['preserved']}", width, "  ")
    refused = sum(bool(row["refused"]) for row in rows)
    families = len({row["family"] for row in rows})
    total = (
        f"{refused} of {len(rows)} injections ({families} kinds of fault) refused at their first "
        "invalid operation."
    )
    return [*lines, *_wrapped(total, width, "")]


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    hanging = indent + " " * (12 if indent else 2)
    return textwrap.wrap(
        text,
        max(width, _NARROWEST),
        initial_indent=indent,
        subsequent_indent=hanging,
        break_on_hyphens=False,
        break_long_words=False,
    )
