"""
``qeffect replay``: does an event log keep the contract, event by event? And do those of all ranks
of a pipeline fit together?
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .command import Outcome, Progress, UnusableError

__all__ = ["Replay"]


class Replay:
    """Replay an event log through the transition functions that guard the runtime."""

    name = "replay"
    help = "replay an event log through the contract, or those of all ranks together"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument(
            "log",
            type=Path,
            nargs="+",
            metavar="LOG",
            help="a JSON Lines event log; with several, the logs of all ranks of one pipeline",
        )

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Replay and report."""
        from ..log.joint import JointReport, replay_together
        from ..log.replayer import LogError, ReplayReport, replay

        report: ReplayReport | JointReport
        try:
            report = replay(args.log[0]) if len(args.log) == 1 else replay_together(args.log)
        except LogError as error:
            raise UnusableError(str(error)) from error
        return Outcome(report.verdict, report.asdict(), (report.summary(),))
