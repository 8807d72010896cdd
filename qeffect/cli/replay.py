"""
``qeffect replay``: does an event log keep the contract, event by event? And do those of all ranks
of a pipeline fit together?
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .command import Outcome, Progress, UnusableError

if TYPE_CHECKING:
    from ..log.joint import JointReport
    from ..log.replayer import ReplayReport

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
            help="event log in JSON Lines; several are the logs of all ranks of one pipeline",
        )

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Replay and report."""
        from ..log.joint import replay_together
        from ..log.replayer import LogError, replay

        report: ReplayReport | JointReport
        try:
            report = replay(args.log[0]) if len(args.log) == 1 else replay_together(args.log)
        except LogError as error:
            raise UnusableError(str(error)) from error
        if _truncated(report):
            data = {name: value for name, value in report.asdict().items() if name != "verdict"}
            said = report.summary().removeprefix("refused: ")
            said = f"the log is truncated: {said}"
            return Outcome("unusable", {**data, "error": said}, (f"unusable: {said}",))
        return Outcome(report.verdict, report.asdict(), (report.summary(),))


def _truncated(report: ReplayReport | JointReport) -> bool:
    """Whether a log merely ends too early; what it holds up to there kept the contract."""
    return report.clause == "log.closing" and report.expected == "a closing line"
