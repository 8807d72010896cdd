"""
Time a side (a program that a measurement compares, such as this runtime or native) over ranks,
round by round: steps back to back, and single steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from ...ranks.membership import Member, all_gather
from .step_seconds import back_to_back_s, single_step_s

__all__ = ["AGREEING", "MOST", "WARMUP", "RoundPlan", "agree", "meet_idle", "time_side"]

WARMUP = 3
"""Number of steps of a side before its first round, or before its first step under the profiler."""
AGREEING, WITHIN, MOST = 3, 0.03, 9
"""
Number of last rounds whose times must agree, the tolerance of these times as a fraction, and the
maximum number of rounds.
"""


@attrs.frozen
class RoundPlan:
    """
    The rounds and steps with which a side (such as this runtime or native) is timed.

    Args:
        rounds: Number of rounds, each of some steps back to back and one single step.
        steps: Steps per round, back to back.
        settles: Whether rounds are added until the last `AGREEING` rounds agree, up to `MOST`
            rounds in total. The speed of a host-bound side, such as native, varies with the host.
            If `rounds` is below `AGREEING`, no round is added.
    """

    rounds: int
    steps: int
    settles: bool = False

    def goes_on(self, slowest: Sequence[float]) -> bool:
        """
        Whether another round is due.

        Args:
            slowest: Time of each round so far, on the slowest rank.
        """
        if len(slowest) < self.rounds:
            return True
        return self.waits and not agree(slowest[-AGREEING:]) and len(slowest) < MOST

    @property
    def counted(self) -> int:
        """Number of rounds at the end that count; earlier rounds are ignored."""
        return AGREEING if self.waits else self.rounds

    @property
    def waits(self) -> bool:
        """Whether rounds may be added."""
        return self.settles and self.rounds >= AGREEING


def agree(times: Sequence[float]) -> bool:
    """
    Whether all times exceed the shortest time by at most the fraction `WITHIN`.

    >>> agree([100.0, 102.9, 101.0]), agree([100.0, 103.1, 101.0])
    (True, False)
    """
    return max(times) <= (1 + WITHIN) * min(times)


def meet_idle(member: Member) -> None:
    """Wait until every rank's device is idle."""
    member.synchronize()
    dist.barrier()


def time_side(
    member: Member,
    step: Callable[[], object],
    plan: RoundPlan,
    *,
    construction_s: float,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """
    Time a side (such as this runtime or native) round by round, and keep the time of the slowest
    rank. Every rank calls this function.

    Args:
        member: This rank.
        step: Function that runs one step.
        plan: How many rounds are timed, and of how many steps each.
        construction_s: Seconds that this rank took to build the side.
        facts: Further results of this rank.

    Returns:
        Milliseconds by round (`step_ms`, `single_ms`, `host_ms`); by rank the peak of reserved
        bytes (`peak_bytes`) and `facts`; and `busy_ms`, empty until a profile is added. If rounds
        may be added, only the last `AGREEING` rounds count; `earlier_ms` has the step times of the
        earlier rounds, and `settled` tells whether the last rounds agree.
    """
    for _ in range(WARMUP):
        step()
    back: list[float] = []
    singles, hosts = [], []
    slowest: list[float] = []
    while plan.goes_on(slowest):
        meet_idle(member)
        back.append(1e3 * back_to_back_s(step, member.synchronize, plan.steps) / plan.steps)
        meet_idle(member)
        enqueued, ended = single_step_s(step, member.synchronize)
        hosts.append(1e3 * enqueued)
        singles.append(1e3 * ended)
        slowest.append(max(all_gather(member, back[-1])))
    on_device = member.device.type == "cuda"
    peak = torch.cuda.max_memory_reserved(member.device) if on_device else 0
    meet_idle(member)
    ranks = all_gather(member, (back, singles, hosts, construction_s, peak, facts))
    found: dict[str, Any] = {
        name: [max(rank[at][n] for rank in ranks) for n in range(-plan.counted, 0)]
        for at, name in enumerate(("step_ms", "single_ms", "host_ms"))
    }
    if plan.waits:
        found["earlier_ms"] = slowest[: -plan.counted]
        found["settled"] = agree(slowest[-AGREEING:])
    found["construction_s"] = max(rank[3] for rank in ranks)
    found["peak_bytes"] = [rank[4] for rank in ranks]
    found["facts"] = [rank[5] for rank in ranks]
    found["busy_ms"] = []
    return found
