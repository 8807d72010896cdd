"""
``qeffect runtime bisect``: find the first step whose gradients differ between two runs, and these
gradients.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qeffect.cli.command import Outcome, Progress
from qeffect.text import counted

from .digest_log import first_difference, read_digests

__all__ = ["add_bisect_arguments", "run_bisect"]

_SHOWN = 20


def add_bisect_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bisect`."""
    for name in ("first", "second"):
        parser.add_argument(
            name,
            type=Path,
            metavar="LOG",
            help=f"log of the {name} run, which was trained with [guard] digests = true",
        )


def run_bisect(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Compare the digests of two logs, step by step.

    Raises:
        UnusableError: A log has no digests, or the runs cannot be compared.
    """
    first, second = read_digests(args.first), read_digests(args.second)
    step, differ, compared = first_difference(first, second)
    facts: dict[str, Any] = {"compared": compared, "step": None, "gradients": []}
    if not differ:
        return Outcome("accepted", facts, [f"Equal: every gradient in {counted(compared, 'step')}"])
    facts.update(
        step=step,
        gradients=[{"rank": r, "stage": stage, "name": name} for r, stage, name in differ],
    )
    every = len(first[step])
    lines = [
        f"Step {step} is the first that differs, in {len(differ)} of {counted(every, 'gradient')}:"
    ]
    lines += [f"  rank {rank}, stage {stage}: {name}" for rank, stage, name in differ[:_SHOWN]]
    if len(differ) > _SHOWN:
        lines.append(f"  and {len(differ) - _SHOWN} more; --json lists all")
    return Outcome("refused", facts, lines)
