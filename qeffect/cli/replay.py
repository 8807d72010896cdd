"""
``qeffect replay``: check that an event log keeps the contract, event by event. With the logs of all
ranks of a pipeline, also check that these logs match each other. Rank logs (the messages, commits
and stops of a rank) are replayed through the model of ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command import Outcome, Progress, UnusableError

if TYPE_CHECKING:
    from ..log.joint import JointReport
    from ..log.replayer import ReplayReport

__all__ = ["Replay"]


class Replay:
    """Replay an event log through the same transition functions that guard the runtime."""

    name = "replay"
    help = "check recorded events against the contract, from one log or from the logs of all ranks"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument(
            "log",
            type=Path,
            nargs="+",
            metavar="LOG",
            help="event log or rank log in JSON Lines. To replay the ranks of a job together, give "
            "the logs of all ranks. If a log has several files, give all its files",
        )

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Replay the logs and report the verdict."""
        from ..log.beside import compare_beside
        from ..log.joint import replay_together
        from ..log.rank_log import is_rank_log
        from ..log.replayer import LogError, replay
        from ..log.series import series_of

        report: ReplayReport | JointReport
        rank_logs = [path for path in args.log if is_rank_log(path)]
        logs = [path for path in args.log if path not in rank_logs]
        ranks = None
        try:
            if rank_logs:
                ranks = _replay_ranks(rank_logs)
                if not logs or ranks.clause is not None:
                    return Outcome(ranks.verdict, ranks.asdict(), (ranks.summary(),))
            series = series_of(logs)
            report = replay(*series[0]) if len(series) == 1 else replay_together(series)
        except LogError as error:
            raise UnusableError(str(error)) from error
        if ranks is not None and (report.clause is None or _truncated(report)):
            unlike = compare_beside(series, rank_logs)
            if unlike is not None:
                return Outcome(unlike.verdict, unlike.asdict(), (unlike.summary(),))
        if _truncated(report):
            data = {name: value for name, value in report.asdict().items() if name != "verdict"}
            said = report.summary().removeprefix("refused: ")
            said = f"the log is truncated: {said}"
            return Outcome("unusable", {**data, "error": said}, (f"unusable: {said}",))
        if ranks is None:
            return Outcome(report.verdict, report.asdict(), (report.summary(),))
        data = {**report.asdict(), "rank_logs": ranks.asdict()}
        return Outcome(report.verdict, data, (report.summary(), ranks.summary()))


def _replay_ranks(paths: Sequence[Path]) -> Any:
    """
    Replay rank logs through the model of ranks, which is in a package above the kernel.

    Raises:
        LogError: A file is not a rank log, or a rank's log is missing.
        UnusableError: The package with the model is not installed.
    """
    for entry in entry_points(group="qeffect.commands", name="ranks"):
        return entry.load().replay(paths)
    raise UnusableError(
        "rank logs need the model of ranks, which is not installed: pip install qeffect"
    )


def _truncated(report: ReplayReport | JointReport) -> bool:
    """Return whether the only violation is that a log ends too early."""
    return report.clause == "log.closing" and report.expected == "a closing line"
