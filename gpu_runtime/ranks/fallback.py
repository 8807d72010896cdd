"""
Change from one launch per step to guarded replays (a graph per action), if a rank cannot capture
the step.
"""

from __future__ import annotations

from .consent import StoppedError
from .one_launch import OneLaunch

__all__ = ["capture_failed", "fall_back"]


def capture_failed(whole: OneLaunch, stopped: StoppedError) -> bool:
    """
    Whether the ranks stopped only because a rank could not capture the step, so all ranks can
    continue.
    """
    cause = stopped.cause
    return whole.steps == 1 and cause.kind == "raised" and cause.recoverable


def fall_back(whole: OneLaunch | None, stopped: StoppedError) -> str | None:
    """
    Change from the launch to guarded replays (a graph per action, checked before each replay), if a
    rank could not capture the step.

    Args:
        whole: The `OneLaunch` that should have captured the step; None if the ranks already use
            replays.
        stopped: The error with which the step ended on every rank.

    Returns:
        The reason why the step could not be captured. None if the step ended for another reason;
        then nothing was changed.
    """
    if whole is None or not capture_failed(whole, stopped):
        return None
    whole.give_up(stopped)
    return f"the step could not be captured: {stopped.cause.text}"
