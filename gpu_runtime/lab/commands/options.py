"""
What several report commands share: options, checks of options, and the start of ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from qeffect.cli.command import Progress
from qeffect.report import UnusableError

from ..reports.report import add_report_options, require_place
from ..runner.device import require_device
from ..runner.starts import RankStarts
from ..sides import megatron

__all__ = [
    "add_rank_options",
    "rank_starts",
    "require_limit",
    "require_megatron",
    "require_rounds",
]

_ROUNDS = (
    ("--rounds", "timed rounds per side; a side is one of the compared pipelines"),
    ("--steps", "steps per round for sides that replay graphs"),
    ("--native-steps", "steps per round for sides without graphs"),
)


def add_rank_options(
    parser: argparse.ArgumentParser, *, rounds: int, given: bool = False, profiles: bool = True
) -> None:
    """
    Declare options for rounds, steps, device, profile, `--out` and `--commit`.

    Args:
        parser: The command's parser.
        rounds: Default number of rounds.
        given: If true, an option that the user did not give is None instead of its default.
        profiles: Whether to declare `--no-profile`.
    """
    for (option, text), usual in zip(_ROUNDS, (rounds, 10, 3), strict=True):
        parser.add_argument(
            option,
            type=int,
            default=None if given else usual,
            metavar="N",
            help=f"{text} (default {usual})",
        )
    if profiles:
        parser.add_argument(
            "--no-profile",
            action="store_true",
            default=None if given else False,
            help="do not start the ranks a second time under the profiler; the report then lacks "
            "kernel times and copy counts",
        )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default=None if given else "cuda",
        help="device (default cuda)",
    )
    add_report_options(parser)


def require_rounds(args: argparse.Namespace, *others: int) -> None:
    """
    Require that the numbers given by options are positive.

    Raises:
        UnusableError: `--pp`, `--rounds`, `--steps`, `--native-steps` or another number is below 1.
    """
    ranks = getattr(args, "pp", 1)
    if ranks < 1:
        raise UnusableError(f"--pp must be at least 1, not {ranks}")
    if (least := min(args.rounds, args.steps, args.native_steps, *others)) < 1:
        names = ["--rounds", "--steps", "--native-steps"] + ["--microbatches"] * bool(others)
        raise UnusableError(
            f"{', '.join(names[:-1])} and {names[-1]} must be at least 1, found {least}"
        )


def require_limit(args: argparse.Namespace) -> None:
    """
    Require a positive `--limit`.

    Raises:
        UnusableError: `--limit` is not positive.
    """
    if args.limit <= 0:
        raise UnusableError(f"--limit must be positive, found {args.limit:g}")


def require_megatron(modes: Sequence[str], device: str, option: str, instead: str) -> None:
    """
    Refuse modes of Megatron-core where they cannot run.

    Args:
        modes: The requested modes of Megatron-core; may be empty.
        device: `cuda` or `cpu`.
        option: The option that names the modes.
        instead: Advice for the error message: what the user can do without Megatron-core.

    Raises:
        UnusableError: The device is a CPU, or Megatron-core is not installed.
    """
    if not modes:
        return
    if device == "cpu":
        raise UnusableError(f"{option} {modes[0]} needs --device cuda; on a CPU, {instead}")
    if importlib.util.find_spec("megatron") is None:
        raise UnusableError(
            f"{option} {modes[0]} needs Megatron-core, which is not installed: pip install "
            f"--no-deps {megatron.VERSION}; or {instead}"
        )


@contextmanager
def rank_starts(
    args: argparse.Namespace, progress: Progress
) -> Iterator[tuple[RankStarts, Progress]]:
    """
    A context that yields the `--pp` ranks and a function that shows progress. Under torchrun, the
    ranks are the processes that torchrun started. Without torchrun, the ranks are new processes on
    this machine.

    Raises:
        UnusableError: `--out` cannot be written, or the ranks cannot run here.
        BackendError: torchrun's environment variables are malformed.
    """
    require_place(args.out)
    if args.device == "cuda":
        require_device("--device cpu runs the reference backend")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    with tempfile.TemporaryDirectory(prefix="qeffect-ranks-") as folder:
        starts = RankStarts.here(args.pp, args.device, Path(folder))
        yield starts, progress if starts.speaks else Progress(enabled=False)
