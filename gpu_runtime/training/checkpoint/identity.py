"""
Whose checkpoints a folder has: a run that resumes continues its own.

A run draws its identity at its first start, or takes the identity that its file names. Every
manifest has it, and a resume carries it on. A manifest also lists the runs that its run adopted.
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
    Return the identity of a run that begins or resumes in a folder, then those that it adopted.

    Args:
        folder: The folder of checkpoints.
        newest: The checkpoint to resume from; None for a run that begins.
        name: The identity that the run's file names; empty without one.
        adopt: Continue also from another run's checkpoint, and beside another run's.

    Returns:
        The identities, and a warning; empty without one.

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
                f"{newest} is of run {own[0]}, [checkpoint] run names {name}; {remedy}"
            )
        if others:
            whose = f"run {own[0]}" if own else "a run without identity"
            raise BackendError(
                f"{folder} has checkpoints of two runs: {newest.name} is of {whose}, others are of "
                f"run {others[0]}; move those of one run away, or continue {newest.name} with "
                "--adopt"
            )
    warning = "" if own else f"{newest} has no run identity; an earlier version saved it"
    first = name or (own[0] if own else fresh)
    return [first, *(run for run in [*own, *others] if run != first)], warning
