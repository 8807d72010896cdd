"""
Functions for commands that run on every rank. They connect the ranks, let one rank print, and
choose the exit code after a stop.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import distributed

from qeffect.cli.command import Outcome
from qeffect.launched import START
from qeffect.report import UnusableError
from qeffect.schedule.actions import ScheduleError

from ..backends.determinism import DETERMINISTIC
from ..backends.protocol import BackendError
from .attempt import UnreachableError
from .channels import LostError
from .consent import Cause
from .membership import Limits, Member, join, launcher_ranks

__all__ = [
    "join_ranks",
    "mute_unless_speaker",
    "process_count",
    "rank_variables",
    "report_once",
    "speaker_of",
    "stand_alone",
    "stopped_outcome",
    "store_here",
]

#: The store of a single rank that torchrun did not start.
_STORES: list[object] = []

#: Seconds that a failed rank waits before it ends, so that the speaking rank can print.
_LAST_WORD_S = 5.0
#: Kinds of causes whose rank cannot print.
_LOST = ("gone", "late")
#: Kinds of causes with exit code 1: violations of the contract, disagreements of ranks in a step,
#: different gradients of two runs of one step, and numbers that are not finite.
_VIOLATIONS = ("refused", "dropped", "disagreed", "differs", "diverged")


def join_ranks(device: str, limits: Limits, *, deterministic: bool) -> Member:
    """
    Connect to the other ranks. Call this function before Transformer Engine is imported.

    Args:
        device: ``cpu`` or ``cuda``. On ``cpu`` each rank runs one thread.
        limits: Timeouts in seconds.
        deterministic: Whether to request deterministic kernels from the libraries, unless
            environment variables already set this.

    Raises:
        BackendError: The ranks could not connect; `join` lists the reasons.
    """
    member = join(device, limits)
    if member.device.type == "cpu":
        torch.set_num_threads(1)
    if deterministic:
        for name, value in DETERMINISTIC.items():
            os.environ.setdefault(name, value)
    return member


def process_count() -> int | None:
    """
    Return the number of processes that the launcher started; None without a launcher.

    Raises:
        BackendError: The launcher's environment variables are malformed.
    """
    return launcher_ranks()[1]


def stand_alone() -> None:
    """
    Make this process the only rank: set the environment variables that torchrun would set.

    The store that the rank connects to is in this process until the process ends. A port that was
    only looked up could be taken by another process before the rank connects.
    """
    store = store_here()
    _STORES.append(store)
    os.environ.update(rank_variables(0, 1, store.port))


def store_here() -> Any:
    """Return a store in this process, at a free port, through which ranks of this host connect."""
    return distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )


def rank_variables(rank: int, world: int, port: int) -> dict[str, str]:
    """
    Return torchrun's environment variables for a rank of this host.

    Args:
        rank: The rank.
        world: How many ranks there are.
        port: Port of the ranks' store (`store_here`).
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def report_once(run: Callable[[], Outcome]) -> Outcome:
    """
    Run a command on this rank. One rank prints the result for all ranks.

    Rank 0 prints the result, or rank 1 if rank 0 was lost. A rank that lost its connections prints
    its own cause.

    Raises:
        UnusableError: The command cannot run; every rank raises this error.
    """
    try:
        outcome = run()
    except (LostError, UnreachableError) as error:
        START.leave()  # every rank that is cut off speaks for itself
        raise UnusableError(str(error)) from error
    except (BackendError, ScheduleError, UnusableError) as error:
        mute_unless_speaker(failed=True)
        raise UnusableError(str(error)) from error
    mute_unless_speaker(failed=outcome.exit != 0, speaker=speaker_of(outcome))
    return outcome


def speaker_of(outcome: Outcome) -> int:
    """
    Return the number of the rank that prints an outcome. If the outcome names a rank that lost its
    connections, that rank prints. Otherwise rank 0 prints, or rank 1 if rank 0 is lost.
    """
    cause = outcome.data.get("cause") or {}
    lost = cause.get("rank") == 0 and cause["kind"] in _LOST
    # A rank that cannot reach the store names itself, and no other rank knows.
    return cause["rank"] if cause.get("kind") == "lost" else int(lost)


def mute_unless_speaker(*, failed: bool, speaker: int = 0) -> None:
    """
    Silence every rank except the speaker, because all ranks would print the same lines.

    Args:
        failed: Whether this rank ends with an error. torchrun ends all ranks as soon as one rank
            fails, so a silent rank waits for the speaker.
        speaker: The rank that prints.
    """
    try:
        rank, world = launcher_ranks()
    except BackendError:  # the ranks are unknown: each prints its own finding
        return
    if failed:
        START.leave()
    if world is not None and rank != speaker:
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - until the end
        if failed:
            time.sleep(_LAST_WORD_S)


def stopped_outcome(cause: Cause, what: str) -> Outcome:
    """
    Return the outcome of a run that every rank stopped.

    Exit code 1 means a violation: the contract refused an action, ranks disagreed, a message was
    skipped, two runs of a step differ, or the training diverged. Exit code 2 means any other stop:
    a rank raised an error, ended, was terminated or was late, or a connection broke.

    Args:
        cause: Why the ranks stopped.
        what: Description of the run, in one line.
    """
    data = {
        "clause": cause.clause,
        "rank": cause.rank,
        "step": None,
        "action": cause.action,
        "cause": attrs.asdict(cause),
    }
    text = f"Every rank stopped: {cause.text}"
    if cause.kind in _VIOLATIONS:
        return Outcome("refused", data, [what, text])
    return Outcome("unusable", {"error": text, **data}, [what, text])
