"""
Change from one launch per step to guarded replays, if a rank cannot capture the step.
"""

from __future__ import annotations

from .consent import StoppedError
from .one_launch import OneLaunch

__all__ = ["capture_failed", "fall_back"]


def capture_failed(whole: OneLaunch, stopped: StoppedError) -> bool:
    """
    Whether the ranks stopped because a rank could not capture the step, and all ranks survived.
    """
    cause = stopped.cause
    return whole.steps == 1 and cause.kind == "raised" and cause.recoverable


def fall_back(whole: OneLaunch | None, stopped: StoppedError) -> str | None:
    """
    Change from the launch to guarded replays, if a rank could not capture the step.

    Args:
        whole: The `OneLaunch` that should have captured the step; None if replays already run
            instead.
        stopped: The error with which the step ended on every rank.

    Returns:
        The reason why the step could not be captured. None if the step ended for another reason;
        nothing has changed then.
    """
    if whole is None or not capture_failed(whole, stopped):
        return None
    whole.give_up(stopped)
    return f"the step could not be captured: {stopped.cause.text}"
