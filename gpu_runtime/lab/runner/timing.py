"""
Rounds of a side over ranks: steps back to back, single steps, and steps under the profiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist

from ...ranks.membership import Member, all_gather
from ..statistics.traces import matrix_copies
from .profiler import profiled

__all__ = ["RoundPlan", "meet_idle", "time_side"]

WARMUP = 3
PROFILED = 2
"""Steps under the profiler, after the steps that are timed."""


@attrs.frozen
class RoundPlan:
    """
    How a side is timed.

    Args:
        rounds: Rounds, each of some steps back to back and one step by itself.
        steps: Steps per round, back to back.
        profile: Whether two more steps run under the profiler.
    """

    rounds: int
    steps: int
    profile: bool = True


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
    units: Collection[int] | None = None,
) -> dict[str, Any]:
    """
    Time a side round by round; the slowest rank counts. Every rank calls it.

    Args:
        member: This rank.
        step: One step.
        plan: Rounds and steps.
        construction_s: Seconds that building the side took on this rank.
        facts: What else this rank reports.
        units: Bytes of each matrix gradient, to count their copies under the profiler; None counts
            no copies.

    Returns:
        Milliseconds by round (`step_ms`, `single_ms`, `host_ms`); by rank the peak of reserved
        bytes (`peak_bytes`), `facts` and, under the profiler, `busy_ms` and `copies`.
    """
    for _ in range(WARMUP):
        step()
    back, singles, hosts = [], [], []
    for _ in range(plan.rounds):
        meet_idle(member)
        began = time.perf_counter()
        for _ in range(plan.steps):
            step()
        member.synchronize()
        back.append(1e3 * (time.perf_counter() - began) / plan.steps)
        meet_idle(member)
        began = time.perf_counter()
        step()
        hosts.append(1e3 * (time.perf_counter() - began))
        member.synchronize()
        singles.append(1e3 * (time.perf_counter() - began))
    on_device = member.device.type == "cuda"
    peak = torch.cuda.max_memory_reserved(member.device) if on_device else 0
    meet_idle(member)
    busy = copies = None
    if on_device and plan.profile:
        busy, trace = profiled(step, member.synchronize, PROFILED)
        copies = None if units is None else matrix_copies(trace, units)
    ranks = all_gather(member, (back, singles, hosts, construction_s, peak, facts, busy, copies))
    found: dict[str, Any] = {
        name: [max(rank[at][n] for rank in ranks) for n in range(plan.rounds)]
        for at, name in enumerate(("step_ms", "single_ms", "host_ms"))
    }
    found["construction_s"] = max(rank[3] for rank in ranks)
    found["peak_bytes"] = [rank[4] for rank in ranks]
    found["facts"] = [rank[5] for rank in ranks]
    found["busy_ms"] = [rank[6] for rank in ranks if rank[6] is not None]
    if units is not None:
        found["copies"] = [rank[7] for rank in ranks if rank[7] is not None]
    return found
