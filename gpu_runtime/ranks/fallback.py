"""
From one launch to guarded replays, when a rank cannot capture the step.
"""

from __future__ import annotations

from .consent import StoppedError
from .one_launch import OneLaunch

__all__ = ["capture_failed", "fall_back"]


def capture_failed(whole: OneLaunch, stopped: StoppedError) -> bool:
    """Whether all ranks survive, and stopped because one of them could not capture the step."""
    cause = stopped.cause
    return whole.steps == 1 and cause.kind == "raised" and cause.recoverable


def fall_back(whole: OneLaunch | None, stopped: StoppedError, notes: list[str]) -> None:
    """
    Restart the step with guarded replays, after a rank could not capture it.

    Args:
        whole: The launch that should have captured the step.
        stopped: How the step ended, on every rank.
        notes: The reason is added here.

    Raises:
        StoppedError: The step ended for another reason.
    """
    if whole is None or not capture_failed(whole, stopped):
        raise stopped
    whole.give_up(stopped)
    notes.append(f"guarded replays, as the step could not be captured: {stopped.cause.text}")
