"""
``qeffect replay``: does an event log keep the contract, event by event?
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .command import Outcome, Progress, UnusableError

__all__ = ["Replay"]


class Replay:
    """Replay an event log through the transition functions that guard the runtime."""

    name = "replay"
    help = "replay an event log through the contract"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("log", type=Path, metavar="LOG", help="a JSON Lines event log")

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Replay and report."""
        from ..log.replayer import LogError, replay

        try:
            report = replay(args.log)
        except LogError as error:
            raise UnusableError(str(error)) from error
        return Outcome(report.verdict, report.asdict(), (report.summary(),))
