"""
Identify the run of each checkpoint, so that a resumed run continues only its own checkpoints.

A run's identity is drawn at random at the first start, or given in the training file. The manifest
of every checkpoint contains the identity, and a resumed run keeps it. A manifest also lists adopted
runs: other runs whose checkpoints this run has continued.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from ...backends.protocol import BackendError
from .files import run_of, runs_in

__all__ = ["identity_of"]


def identity_of(
    folder: Path, newest: Path | None, name: str = "", *, adopt: bool = False
) -> tuple[list[str], str]:
    """
    Return the identity of a run that begins or resumes in a folder, followed by the identities of
    the runs that it adopted.

    Args:
        folder: The folder of checkpoints.
        newest: The checkpoint to resume from; None for a run that begins.
        name: The identity in the training file; empty if the file has no identity.
        adopt: Whether to accept a checkpoint of another run, and a folder with checkpoints of
            several runs.

    Returns:
        The identities, and a warning, which may be empty.

    Raises:
        BackendError: `adopt` is False, and the newest checkpoint does not belong to the run in the
            training file, or the folder has checkpoints of several runs.
    """
    fresh = name or secrets.token_hex(8)
    if newest is None:
        return [fresh], ""
    own = run_of(newest)
    others = [run for run in runs_in(folder) if run not in own]
    if not adopt:
        remedy = "name another folder, or continue this checkpoint with --adopt"
        if own and name and own[0] != name:
            raise BackendError(
                f"{newest} belongs to run {own[0]}, but [checkpoint] run is {name}; {remedy}"
            )
        if others:
            whose = f"run {own[0]}" if own else "a run without identity"
            raise BackendError(
                f"{folder} has checkpoints of two runs: {newest.name} belongs to {whose}, others "
                f"to run {others[0]}; move the checkpoints of one run away, or continue "
                f"{newest.name} with --adopt"
            )
    warning = "" if own else f"{newest} has no run identity; an earlier version saved it"
    first = name or (own[0] if own else fresh)
    return [first, *(run for run in [*own, *others] if run != first)], warning
