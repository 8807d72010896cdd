"""
Which run each checkpoint belongs to: a resumed run continues only its own checkpoints.

A run's identity is drawn at random at its first start, or named by its training file. Every
manifest has the identity, and a resumed run keeps it. A manifest also lists the adopted runs, whose
checkpoints the run continued.
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
    Return the identity of a run that begins or resumes in a folder, then the runs that it adopted.

    Args:
        folder: The folder of checkpoints.
        newest: The checkpoint to resume from; None for a run that begins.
        name: The identity that the training file names; empty if it names none.
        adopt: Accept another run's checkpoint, and a folder that also has checkpoints of other
            runs.

    Returns:
        The identities, and a warning; the warning may be empty.

    Raises:
        BackendError: The newest checkpoint belongs to another run than the file names, or the
            folder has checkpoints of several runs, and `adopt` is not given.
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
