"""
How much of a long task is done, and how long the rest will take.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Countdown", "duration"]


class Countdown:
    """
    Progress text: how many of a known number of things are done, and the estimated time left.

    >>> count = Countdown("random schedules", 500, clock=iter((0.0, 30.0)).__next__)
    >>> count(100)
    '100 of 500 random schedules, about 2 min left'

    Args:
        things: Noun for what is counted, in the plural.
        total: Number of things.
        clock: Returns the current time in seconds.
    """

    def __init__(
        self, things: str, total: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._things, self._total, self._clock = things, total, clock
        self._began = clock()

    def __call__(self, done: int) -> str:
        """
        Return, as text, how many things are done and how long the rest takes at the same rate.
        """
        said = f"{done:,} of {self._total:,} {self._things}"
        if not 0 < done < self._total:
            return said
        left = (self._clock() - self._began) / done * (self._total - done)
        return f"{said}, about {duration(left)} left"


def duration(seconds: float) -> str:
    """
    Return a waiting time as text in its two largest units.

    >>> duration(0.2), duration(61), duration(7500)
    ('1 s', '1 min 1 s', '2 h 5 min')
    """
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    large, small, units = (
        (*divmod(whole, 60), ("min", "s"))
        if whole < 3600
        else (*divmod(whole // 60, 60), ("h", "min"))
    )
    return f"{large} {units[0]}" + (f" {small} {units[1]}" if small else "")
