"""
Measure the host's time for a step that is one launch, without the launch itself.

Run as `python -m tests.ranks.step_host`. One run alternates between steps whose actions are checked
one by one and steps that are committed in one call. Every number is a median in microseconds. No
GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch

from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.staged_feed import StagedFeed
from qeffect.gpu_runtime.step.optimizer import Optimizer
from tests.ranks.recurring import SMALL, Rank


def timed(call: Callable[[], object], times: int) -> float:
    """The median time of many calls, in microseconds."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - began))
    return round(median(found), 1)


def rehearse(rank: Rank) -> None:
    """A step whose actions are checked and committed one by one, without a recording."""
    rank.rehearsal._walk()
    rank.contract.check_commit(caller="main", guards_alone=True)
    rank.tell()


def measured(job: Job, number: int, times: int) -> dict[str, object]:
    """The host times of each kind of work in a step, on one rank."""
    one, each = (Rank(job, number, late=True) for _ in range(2))
    for _ in range(5):
        one.step()
        rehearse(each)
    assert one.rehearsal.recurs is not None
    step = one.rehearsal.recurs
    asked, told, rehearsed = [], [], []
    for _ in range(times):
        began = time.perf_counter()
        one.ask()
        between = time.perf_counter()
        one.tell()
        ended = time.perf_counter()
        rehearse(each)
        asked.append(1e6 * (between - began))
        told.append(1e6 * (ended - between))
        rehearsed.append(1e6 * (time.perf_counter() - ended))
    assert one.rehearsal.as_one is False
    assert one.rehearsal.steps[1] >= times
    staged = StagedFeed(one.pipeline.feed)
    staged.prepare(one.pipeline.passages.values(), 0)
    optimizer = Optimizer(list(one.runtime.stages.values()))
    parameters = {
        index: {name: torch.zeros_like(p) for name, p in targets}
        for index, targets in optimizer._targets.items()
    }
    optimizer.step(parameters)
    as_one = median(asked) + median(told)
    return {
        "schedule": job.schedule,
        "pp": job.pp,
        "rank": number,
        "microbatches": job.microbatches,
        "transitions": len(step.events),
        "entries_read": sum(map(len, step.reads.values())),
        "rehearsed": round(median(rehearsed), 1),
        "as_one": round(as_one, 1),
        "ratio": round(median(rehearsed) / as_one, 1),
        "before_launch": round(median(asked), 1),
        "of_it_beside": timed(one.rehearsal._beside, times),
        "of_it_check": timed(lambda: one.contract.check_step(step), times),
        "behind_launch": round(median(told), 1),
        "load": timed(lambda: staged.load(0), times),
        "optimizer_addresses": timed(optimizer.addresses, times),
    }


def main() -> None:
    """Print a line of JSON for each rank and schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args()
    for schedule in ("il", "izb", "zbv", "1f1b"):
        for pp in (1, 2, 4) if schedule == "il" else (2, 4):
            if args.microbatches % pp == 0:
                job = Job(schedule=schedule, pp=pp, microbatches=args.microbatches, config=SMALL)
                print(json.dumps(measured(job, 0, args.times)), flush=True)


if __name__ == "__main__":
    main()
