"""
Derive figures that compare training runs: equal bits, non-inferiority, and time to reach a loss.

Two runs have the same order if their schedule, seed and head are equal. A native and a guarded run
of the same order must have the same losses. Another schedule leads to other FP8 scales, so runs of
different schedules are compared by held-out perplexity over seeds. The paper's criterion is a
margin of 5 %: a schedule's perplexity is at most 1.05 times the base schedule's. The variation
between runs is shown too. The comparison has three figures: the ratio of geometric means, the
spread over the seeds of each side, and (with two or more seeds) the upper end of the ratio's
one-sided 95 % interval. The interval comes from the differences of logarithms of runs with the same
seed (Student's t).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...training.figures import mean, perplexity, rounded
from .summary import Raw, exact_median

__all__ = [
    "BASE",
    "MARGIN",
    "derive_curves",
    "quantile",
    "seconds_at",
    "seconds_to_loss",
    "smoothed_losses",
    "upper_bound",
]

MARGIN = 1.05
"""The largest ratio of perplexities that still counts as not worse."""
BASE = "il"
"""The schedule with which other schedules are compared."""
_LEVEL = 0.95
_ENDS = 10
"""
Number of steps per mean loss: at the beginning and end of a run, and to decide when a loss is
reached.
"""


def derive_curves(raw: Raw) -> dict[str, Any]:
    """
    Derive figures of each run, of runs with the same order, of schedules over seeds, and times to
    reach equal losses.
    """
    runs = raw["runs"]
    return {
        "runs": [_run(run) for run in runs],
        "same_order": [*_same_order(runs)],
        "non_inferiority": [*_non_inferiority(runs)],
        "to_loss": [*_to_loss(runs)],
    }


def name(run: Raw) -> str:
    """The name of a run."""
    return f"{run['side']}:{run['schedule']}:{run['seed']}:{run['head']}"


def _run(run: Raw) -> dict[str, Any]:
    losses, clock = run["losses"], run["clock"]
    first, last = mean(losses[:_ENDS]), mean(losses[-_ENDS:])
    each = [
        (end - begun) / (step - before) * 1e3
        for (before, begun), (step, end) in zip([[0, 0.0], *clock], clock, strict=False)
    ]
    held_out = run["held_out"][-1][1] if run["held_out"] else None
    median = exact_median(each)
    return {
        "run": name(run),
        "steps": len(losses),
        "finite": None not in losses and all(loss is not None for _, loss in run["held_out"]),
        "first_ten": rounded(first),
        "last_ten": rounded(last),
        "last_over_first": None if not first or last is None else rounded(last / first),
        "held_out_loss": rounded(held_out),
        "perplexity": None if held_out is None else rounded(perplexity(held_out)),
        "moved_by_evaluation": run["moved"],
        "step_ms": rounded(median),
        "tokens_per_s": round(run["tokens_a_step"] / median * 1e3),
        "seconds": rounded(clock[-1][1]),
        "build_s": rounded(run["build_s"]),
        "evaluate_s": rounded(run["evaluate_s"]),
        "peak_bytes": run["peak_bytes"],
    }


def _same_order(runs: Sequence[Raw]) -> Iterator[dict[str, Any]]:
    """
    For each order that a native and a guarded run share, the differences over their common steps.
    """
    for ours, theirs in _beside_native(runs):
        if ours["schedule"] != theirs["schedule"]:
            continue
        steps = min(len(ours["losses"]), len(theirs["losses"]))
        held = dict(map(tuple, theirs["held_out"]))
        pairs = [(loss, held[step]) for step, loss in ours["held_out"] if step in held]
        both = zip(ours["losses"][:steps], theirs["losses"][:steps], strict=True)
        whole = len(ours["losses"]) == len(theirs["losses"])
        yield {
            "run": name(ours),
            "native": name(theirs),
            "steps": steps,
            "losses_differ": sum(a != b for a, b in both),
            "held_out": len(pairs),
            "held_out_differ": sum(a != b for a, b in pairs),
            "tensors": ours["tensors"] if whole else None,
            "state_differs": ours["state"] != theirs["state"] if whole else None,
        }


def _beside_native(runs: Sequence[Raw]) -> Iterator[tuple[Raw, Raw]]:
    """
    Pairs of runs with the same seed and head: a run of this runtime (side `guarded` or `launched`),
    and a native run.
    """
    for theirs in runs:
        for ours in runs:
            beside = theirs["side"] == "native" != ours["side"]
            if beside and _alike(ours, theirs, "seed", "head"):
                yield ours, theirs


def _alike(a: Raw, b: Raw, *fields: str) -> bool:
    return all(a[field] == b[field] for field in fields)


def _non_inferiority(runs: Sequence[Raw]) -> Iterator[dict[str, Any]]:
    """
    Compare every other schedule with the schedule `BASE` of the same side (native or guarded) and
    head, over the seeds that both schedules have.
    """
    groups: dict[tuple[str, str, str], dict[int, Raw]] = {}
    for run in runs:
        key = run["side"], run["head"], run["schedule"]
        groups.setdefault(key, {})[run["seed"]] = run
    for (side, head, schedule), own in groups.items():
        base = groups.get((side, head, BASE), {})
        seeds = sorted(own.keys() & base.keys())
        if schedule == BASE or not seeds:
            continue
        every = [{step for step, _ in g[seed]["held_out"]} for g in (own, base) for seed in seeds]
        if not (common := set.intersection(*every)):
            continue
        step = max(common)
        found = [
            [dict(map(tuple, group[seed]["held_out"]))[step] for group in (own, base)]
            for seed in seeds
        ]
        yield {
            "side": side,
            "head": head,
            "schedule": schedule,
            "against": BASE,
            "step": step,
            "seeds": seeds,
            "margin": MARGIN,
            **_judged(found),
        }


def _judged(pairs: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """Judge a schedule by its held-out losses and those of the base schedule, paired by seed."""
    known = [(own, base) for own, base in pairs if own is not None and base is not None]
    if len(known) < len(pairs):
        nothing = dict.fromkeys(("perplexities", "ratio", "upper", "spread", "spread_against"))
        return {**nothing, "within": False, "shown": False}
    apart = [own - base for own, base in known]
    ratio = perplexity(statistics.fmean(apart))
    upper = None if len(apart) < 2 else perplexity(upper_bound(apart))
    own, base = zip(*known, strict=True)
    return {
        "perplexities": [[rounded(perplexity(a)), rounded(perplexity(b))] for a, b in known],
        "ratio": rounded(ratio),
        "upper": rounded(upper),
        "spread": rounded(perplexity(max(own) - min(own))) if len(own) > 1 else None,
        "spread_against": rounded(perplexity(max(base) - min(base))) if len(base) > 1 else None,
        "within": ratio is not None and ratio <= MARGIN,
        "shown": upper is not None and upper <= MARGIN,
    }


def upper_bound(values: Sequence[float]) -> float:
    """
    The upper end of the one-sided 95 % interval of a mean, by Student's t.

    Args:
        values: Two or more values, assumed independent and normal.

    >>> round(upper_bound([0.01, 0.03]), 6)
    0.083138
    """
    wide = quantile(_LEVEL, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) + wide


def quantile(level: float, freedom: int) -> float:
    """
    A quantile of Student's t, by bisection of its distribution.

    Args:
        level: From one half to less than 1.
        freedom: Number of degrees of freedom, at least 1.

    >>> [round(quantile(0.95, n), 3) for n in (1, 2, 3, 4, 10)]
    [6.314, 2.92, 2.353, 2.132, 1.812]
    """
    low, high = 0.0, 1.0
    while _below(high, freedom) < level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def _below(t: float, freedom: int) -> float:
    """
    The distribution function of Student's t at `t`, after Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for n in range(1 + odd, freedom, 2):
        total += term
        term *= n / (n + 1) * cosine**2
    inside = (angle + sine * total) * 2 / math.pi if odd else sine * total
    return (1 + inside) / 2


def _to_loss(runs: Sequence[Raw]) -> Iterator[dict[str, Any]]:
    """
    For a native and a guarded run of one seed and head, the times at which both reach the same
    losses.
    """
    for ours, theirs in _beside_native(runs):
        both = ours, theirs
        means = [smoothed_losses(run["losses"]) for run in both]
        if not all(means):
            continue
        rows = []
        for level in _levels(means):
            at = [
                seconds_to_loss(run["clock"], mean, level)
                for run, mean in zip(both, means, strict=True)
            ]
            if None in at:
                continue
            s, native_s = (seconds for seconds in at if seconds is not None)
            whole = (theirs["build_s"] + native_s) / (ours["build_s"] + s)
            rows.append(
                {
                    "loss": level,
                    "seconds": rounded(s),
                    "native_seconds": rounded(native_s),
                    "native_over_this": rounded(native_s / s),
                    "with_building": rounded(whole),
                }
            )
        if rows:
            yield {"run": name(ours), "native": name(theirs), "levels": rows}


def smoothed_losses(losses: Sequence[float | None]) -> dict[int, float]:
    """
    The mean of the last ten losses, by number of steps done; left out where one of the ten losses
    is not finite.

    >>> smoothed_losses([3.0] * 10 + [2.0])
    {10: 3.0, 11: 2.9}
    """
    found = {n: mean(losses[n - _ENDS : n]) for n in range(_ENDS, len(losses) + 1)}
    return {n: mean for n, mean in found.items() if mean is not None}


def _levels(means: Sequence[Mapping[int, float]]) -> list[float]:
    """
    The losses for which times are compared: whole numbers below the highest initial loss of the
    runs, and the lowest multiple of 0.1 that all runs reach.
    """
    top = max(next(iter(mean.values())) for mean in means)
    least = math.ceil(max(min(mean.values()) for mean in means) * 10) / 10
    whole = [float(n) for n in range(math.floor(top), math.floor(least), -1)]
    return [level for level in whole if level > least] + [least]


def seconds_to_loss(
    clock: Sequence[Sequence[float]], mean: Mapping[int, float], level: float
) -> float | None:
    """
    Seconds of training until the smoothed loss is at most a level; None if this never happens.

    Args:
        clock: For each block of steps, the steps done and the seconds at its end. All steps of a
            block are taken as equally long.
        mean: Smoothed losses by step, the result of `smoothed_losses`.
        level: The loss to reach.

    >>> seconds_to_loss([[10, 1.0], [20, 3.0]], {10: 3.0, 15: 2.0}, 2.0)
    2.0
    """
    step = next((n for n, value in mean.items() if value <= level), None)
    return None if step is None else seconds_at(clock, step)


def seconds_at(clock: Sequence[Sequence[float]], step: int) -> float:
    """
    Seconds of training until a number of steps is done, within the clock's range.

    >>> seconds_at([[10, 1.0], [20, 3.0]], 15)
    2.0
    """
    before, begun = 0.0, 0.0
    (last, end), *_ = clock
    for last, end in clock:
        if step <= last:
            break
        before, begun = last, end
    return begun + (end - begun) * (step - before) / (last - before)
