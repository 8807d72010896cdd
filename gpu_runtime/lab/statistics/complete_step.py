"""
Derive the paper's tables of the complete step from trials: our numbers beside the paper's, and
goals.

A trial is one start of all ranks; its step time is the median of its rounds. A ratio divides two
times of one trial; the tables give the median of the ratio over trials. A trial runs either two or
four ranks, so two and four ranks are compared by medians over trials. As in the paper, the first
three trials of a model on a number of ranks are the initial set, and the other trials are the
replication. If both sets are shown, their times, speedups and break-even steps are never pooled.
Memory figures are the maximum over all trials.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from . import paper
from .summary import (
    Raw,
    busiest_ms,
    exact_median,
    extremes,
    goal_row,
    largest,
    median,
    ratio,
    step_ms,
)

__all__ = ["INITIAL", "break_even_steps", "derive_tables"]

INITIAL = 3
"""Number of trials in the initial set."""

KEY = ("cell", "microbatches", "model", "pp", "vpp", "schedule", "side")
"""
Fields that identify a measurement: rows of two trials with equal fields are the same measurement.
"""


class _Pair(NamedTuple):
    """
    A row of the report (a workload under one schedule, run by one side) with the native, eager and
    copied rows of its trial, and the trial's number.

    Trials are numbered separately for each model and number of ranks, so that a failed row does not
    shift the numbers.
    """

    own: Raw
    native: Raw | None
    eager: Raw | None
    copied: Raw | None
    trial: int


def break_even_steps(own: Raw, native: Raw) -> float | None:
    """
    Number of steps after which a guarded row of the report has caught up with native, including
    set-up and first step.

    The result is 1 if the row is never behind, and None if the row never catches up.

    Args:
        own: A row (measurements of one side) with `construction_s`, `first_step_s`, and the
            `step_ms` of its rounds.
        native: The native row of the same trial.
    """
    ours, theirs = step_ms(own), step_ms(native)
    if ours >= theirs:
        return None
    behind = 1e3 * (setup_s(own) - setup_s(native))
    return 1.0 if behind <= 0 else round(1 + behind / (theirs - ours), 2)


def setup_s(row: Raw) -> float:
    """Seconds until the end of the first step, including capture, on the slowest rank."""
    return float(row["construction_s"] + row["first_step_s"])


def derive_tables(raw: Raw) -> dict[str, Any]:
    """
    Summarize every measured row over its trials, and derive the paper's tables from these rows.

    Returns:
        `rows` (one for each measurement); `complete`, `attribution`, `resources`, `weak` and
        `mapping`, with the paper's numbers where the paper prints some; `targets` and `errors`.
    """
    groups: dict[tuple[Any, ...], list[_Pair]] = {}
    errors = []
    before: Counter[tuple[Any, ...]] = Counter()
    for trial in raw["trials"]:
        good = [row for row in trial["rows"] if row["error"] is None]
        errors += [
            {**_name(row), "error": row["error"]}
            for row in trial["rows"]
            if row["error"] is not None
        ]
        native = {
            (row["cell"], row["microbatches"], row["model"], row["pp"]): row
            for row in good
            if row["side"] == "native"
        }
        eager = {tuple(row[k] for k in KEY[:-1]): row for row in good if row["side"] == "eager"}
        copied = {_model(row): row for row in good if row["side"] == "copied"}
        for row in good:
            base = native.get((row["cell"], row["microbatches"], row["model"], row["pp"]))
            called = eager.get(tuple(row[k] for k in KEY[:-1]))
            number = before[_ranks(row)]
            groups.setdefault(tuple(row[k] for k in KEY), []).append(
                _Pair(row, base, called, copied.get(_model(row)), number)
            )
        before.update({_ranks(row) for row in trial["rows"]})
    rows = [_row(pairs) for pairs in groups.values()]
    found: dict[str, Any] = {
        "trials": len(raw["trials"]),
        "rows": rows,
        "complete": _complete(rows),
        "attribution": _attribution(rows),
        "resources": _resources(rows),
        "weak": _weak(rows),
        "mapping": _mapping(rows),
        "errors": errors,
    }
    found["targets"] = _targets(found)
    return found


def _name(row: Raw) -> dict[str, Any]:
    return {key: row[key] for key in KEY}


def _ranks(row: Raw) -> tuple[Any, ...]:
    """
    Model, number of ranks and stages per rank; trials are numbered separately for each combination.
    """
    return row["model"], row["pp"], row["vpp"]


def _model(row: Raw) -> tuple[Any, ...]:
    """The fields that are equal in all schedules and sides of a cell (a workload)."""
    return row["cell"], row["microbatches"], *_ranks(row)


def _paired(pairs: Sequence[_Pair]) -> list[tuple[Raw, Raw]]:
    """Each row together with the native row of the same trial."""
    return [(p.own, p.native) for p in pairs if p.native is not None and p.native is not p.own]


def _set(pairs: Sequence[_Pair]) -> dict[str, float | None]:
    """
    Time, speedup and break-even step of a set of trials; the break-even step is None if a trial
    never breaks even.
    """
    paired = _paired(pairs)
    even = [break_even_steps(own, native) for own, native in paired]
    reached = [steps for steps in even if steps is not None]
    return {
        "ms": median(step_ms(pair.own) for pair in pairs),
        "native_over_this": median(step_ms(native) / step_ms(own) for own, native in paired),
        "break_even_steps": median(reached) if len(reached) == len(even) else None,
    }


def _row(pairs: Sequence[_Pair]) -> dict[str, Any]:
    """Summarize one measurement over its trials."""
    first = pairs[0].own
    steps = [step_ms(pair.own) for pair in pairs]
    step = exact_median(steps)
    paired, whole = _paired(pairs), _set(pairs)
    sets = {
        "initial": [pair for pair in pairs if pair.trial < INITIAL],
        "replication": [pair for pair in pairs if pair.trial >= INITIAL],
    }
    facts = first["facts"]
    found = {
        **_name(first),
        "trials": len(pairs),
        "step_ms": extremes(steps),
        "single_ms": median(exact_median(p.own["single_ms"]) for p in pairs),
        "host_ms": median(exact_median(p.own["host_ms"]) for p in pairs),
        **{f"{name}_{key}": v for name, own in sets.items() for key, v in _set(own).items()},
        "tokens_per_s": round(1e3 * first["tokens"] / step),
        "setup_s": median(setup_s(p.own) for p in pairs),
        "native_over_this": whole["native_over_this"],
        "copied_over_this": median(
            step_ms(p.copied) / step_ms(p.own) for p in pairs if p.copied is not None
        ),
        "break_even_steps": whole["break_even_steps"],
        "never_even": sum(break_even_steps(own, native) is None for own, native in paired),
        "peak_bytes": max(_most(p.own, "allocated_peak") for p in pairs),
        "above_native_bytes": largest(
            max(_differences(own, native, "allocated_peak")) for own, native in paired
        ),
        "grown_bytes": max(_most(p.own, "grown") for p in pairs),
        "capture_s": median(
            max(fact["warmup_s"] + fact["capture_s"] for fact in p.own["facts"])
            for p in pairs
            if "capture_s" in p.own["facts"][0]
        ),
        "built_bytes": max(_most(p.own, "built") for p in pairs),
        # Reserved bytes minus those of eager calls under the same schedule.
        "captured_bytes": largest(
            max(_differences(p.own, p.eager, "reserved"))
            for p in pairs
            if p.eager is not None and p.own["side"] == "replays"
        ),
        **{
            name: [fact[name] for fact in facts] if name in facts[0] else None
            for name in ("graphs", "slots", "arena_bytes", "handoffs", "replays")
        },
        **{
            name: [rank[name] for rank in first["planned"]]
            for name in ("peak_live", "peak_deferred", "delayed")
        },
        "copies": largest(
            max(rank["per_step"] for rank in p.own["copies"]) for p in pairs if p.own.get("copies")
        ),
        "copied_bytes": largest(
            max(rank["bytes_per_step"] for rank in p.own["copies"])
            for p in pairs
            if p.own.get("copies")
        ),
        "busiest_ms": None,
        "over_busiest": None,
        "compared_with": None,
    }
    busy = [(step_ms(p.own), ms) for p in pairs if (ms := busiest_ms(p.own)) is not None]
    if busy:
        found["busiest_ms"] = median(ms for _, ms in busy)
        found["over_busiest"] = median(step / ms for step, ms in busy)
    if compared := [p.own["compared"] for p in pairs if p.own["compared"] is not None]:
        found["compared_with"] = compared[0]["with"]
        found["values"] = sum(one["values"] for one in compared)
        found["different"] = sum(one["different"] for one in compared)
    return found


def _most(row: Raw, what: str) -> int:
    return max(int(rank[what]) for rank in row["memory"])


def _differences(own: Raw, native: Raw, what: str) -> list[int]:
    return [a[what] - b[what] for a, b in zip(own["memory"], native["memory"], strict=True)]


def _of(rows: Sequence[Raw], **wanted: Any) -> list[Raw]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _one(rows: Sequence[Raw], **wanted: Any) -> Raw | None:
    found = _of(rows, **wanted)
    return found[0] if found else None


def _complete(rows: Sequence[Raw]) -> list[dict[str, Any]]:
    """The paper's table of the complete step: both sets of trials, ours beside the paper's."""
    found = []
    for cell, sets in paper.COMPLETE.items():
        language = _of(rows, cell=cell, model="language", pp=2, vpp=2)
        native = _one(language, side="native")
        for schedule in ("il", "zbv"):
            own = _one(language, side="replays", schedule=schedule)
            if native is None or own is None:
                continue
            for kind, theirs in sets.items():
                if own[f"{kind}_ms"] is None:
                    continue
                found.append(
                    {
                        "cell": cell,
                        "schedule": schedule,
                        "set": kind,
                        "native_ms": native[f"{kind}_ms"],
                        "ms": own[f"{kind}_ms"],
                        "speedup": own[f"{kind}_native_over_this"],
                        "paper_native_ms": theirs["native"],
                        "paper_ms": theirs[schedule],
                        "paper_speedup": paper.SPEEDUP[cell][kind][schedule],
                        "break_even_steps": own[f"{kind}_break_even_steps"],
                        "paper_break_even_steps": (
                            paper.BREAK_EVEN[kind][schedule] if cell == paper.LARGE else None
                        ),
                        "above_native_bytes": own["above_native_bytes"],
                        "paper_above_native_gb": paper.ABOVE_NATIVE_GB[cell][schedule],
                    }
                )
    return found


_FIVE = {
    "native": ("native", "il"),
    "eager": ("eager", "il"),
    "copied": ("copied", "il"),
    "direct": ("per_microbatch", "il"),
    "accumulate": ("replays", "il"),
    "zbv": ("replays", "zbv"),
    "one launch": ("one launch", "il"),
    "one launch, zbv": ("one launch", "zbv"),
}
"""Side and schedule of each configuration: the paper's five, and three of ours."""


def _attribution(rows: Sequence[Raw]) -> list[dict[str, Any]]:
    """
    The separate effects of action interface, graph capture and gradient destination, in the paper's
    large cell.
    """
    own = {
        name: _one(
            rows, cell=paper.LARGE, model="language", pp=2, vpp=2, side=side, schedule=schedule
        )
        for name, (side, schedule) in _FIVE.items()
    }
    found = []
    for name, row in own.items():
        if row is None:
            continue
        theirs = paper.ATTRIBUTION.get(name)
        found.append(
            {
                "configuration": name,
                "ms": row["step_ms"]["median"],
                "native_over_this": row["native_over_this"],
                "copied_over_this": row["copied_over_this"],
                "break_even_steps": row["break_even_steps"],
                "above_native_bytes": row["above_native_bytes"],
                "copies": row["copies"],
                "handoffs": row["handoffs"],
                "replays": row["replays"],
                "graphs": row["graphs"],
                "capture_s": row["capture_s"],
                "captured_bytes": row["captured_bytes"],
                "delayed": row["delayed"],
                "paper_ms": theirs,
                "paper_native_over_this": (
                    None if theirs is None else ratio(paper.ATTRIBUTION["native"], theirs)
                ),
                "paper_copies": paper.COPIES.get(name),
            }
        )
    return found


def _resources(rows: Sequence[Raw]) -> list[dict[str, Any]]:
    """Figures of ZB-V by number of microbatches, with the large cell's layers."""
    large = paper.LARGE.rsplit("-", 1)[0]
    points = [
        row
        for row in _of(rows, model="language", pp=2, vpp=2, side="replays", schedule="zbv")
        if row["cell"].startswith(large)
    ]
    return [
        {
            "microbatches": row["microbatches"],
            "ms": row["step_ms"]["median"],
            "tokens_per_s": row["tokens_per_s"],
            "graphs": row["graphs"],
            "slots": row["slots"],
            "arena_bytes": row["arena_bytes"],
            "peak_bytes": row["peak_bytes"],
            "grown_bytes": row["grown_bytes"],
            "capture_s": row["capture_s"],
            "peak_live": row["peak_live"],
            "peak_deferred": row["peak_deferred"],
            "delayed": row["delayed"],
            "paper": paper.RESOURCES.get(row["microbatches"]),
            "paper_tokens_per_s": paper.TOKENS_PER_S.get(row["microbatches"]),
        }
        for row in sorted(points, key=lambda row: int(row["microbatches"]))
    ]


def _right(rows: Iterable[Raw]) -> list[Raw]:
    """Rows in which no tensor differs; a row that was not compared is included."""
    return [row for row in rows if not row.get("different")]


def _fastest(rows: Iterable[Raw]) -> Raw | None:
    return min(_right(rows), key=lambda row: float(row["step_ms"]["median"]), default=None)


def _guarded(rows: Sequence[Raw], **wanted: Any) -> list[Raw]:
    return [row for row in _of(rows, **wanted) if row["side"] in ("replays", "one launch")]


def _weak(rows: Sequence[Raw]) -> list[dict[str, Any]]:
    """
    Weak scaling: the rate per rank over four ranks, divided by the rate per rank over two ranks,
    with one layer per stage.
    """
    found = []
    layers = _of(rows, model="layers", vpp=2)
    for cell in dict.fromkeys(row["cell"] for row in layers):
        both = [_guarded(layers, cell=cell, pp=pp) for pp in (2, 4)]
        sides = dict.fromkeys((row["side"], row["schedule"]) for row in both[0])
        pairs: list[tuple[str, Raw | None, Raw | None]] = [
            (
                f"{side}, {schedule}",
                _one(both[0], side=side, schedule=schedule),
                _one(both[1], side=side, schedule=schedule),
            )
            for side, schedule in sides
        ]
        pairs.append(("fastest", _fastest(both[0]), _fastest(both[1])))
        for name, two, four in pairs:
            if two is not None and four is not None:
                a, b = two["step_ms"]["median"], four["step_ms"]["median"]
                found.append(
                    {
                        "cell": cell,
                        "side": name,
                        "pp2_ms": a,
                        "pp4_ms": b,
                        "rate": ratio(a, b),
                    }
                )
    return found


def _mapping(rows: Sequence[Raw]) -> list[dict[str, Any]]:
    """Compare the same four-layer model over two ranks and over four ranks."""
    found = []
    for model in ("language", "layers"):
        # The paper's model has embedding and head.
        theirs = paper.MAPPING if model == "language" else {}
        two = _guarded(rows, cell=paper.LARGE, model=model, pp=2, vpp=2)
        four = _guarded(rows, cell=paper.LARGE, model=model, pp=4, vpp=1)
        pairs = [
            (
                f"{side}, il to 1f1b",
                _one(two, side=side, schedule="il"),
                _one(four, side=side, schedule="1f1b"),
            )
            for side in ("replays", "one launch")
        ]
        pairs.append(("fastest", _fastest(two), _fastest(four)))
        for name, before, after in pairs:
            if before is None or after is None:
                continue
            a, b = before["step_ms"]["median"], after["step_ms"]["median"]
            found.append(
                {
                    "model": model,
                    "side": name,
                    "pp2": f"{before['side']}, {before['schedule']}",
                    "pp4": f"{after['side']}, {after['schedule']}",
                    "pp2_ms": a,
                    "pp4_ms": b,
                    "speedup": ratio(a, b),
                    "efficiency": ratio(a, 2 * b),
                    "paper_speedup": theirs.get("speedup"),
                    "paper_efficiency": theirs.get("efficiency"),
                }
            )
    return found


_GOALS: tuple[tuple[str, str, float, str], ...] = (
    ("native / this", "at least", 9.0, paper.SMALL),
    ("native / this", "at least", 6.5, paper.LARGE),
    ("over the busiest rank's kernels", "at most", 1.25, paper.SMALL),
    ("over the busiest rank's kernels", "at most", 1.12, paper.LARGE),
    ("rate of four ranks over two", "at least", 0.85, paper.SMALL),
    ("rate of four ranks over two", "at least", 0.92, paper.LARGE),
    ("efficiency of four ranks", "at least", 0.85, paper.LARGE),
)
"""The goals: quantity, bound, value and cell of each goal."""


def _targets(found: Raw) -> list[dict[str, Any]]:
    """Every goal that was measured, whether met or missed."""
    best: dict[str, Callable[[str], Iterable[tuple[str, float | None]]]] = {
        "native / this": lambda cell: _language(found, cell, "native_over_this", max),
        "over the busiest rank's kernels": lambda cell: _language(found, cell, "over_busiest", min),
        "rate of four ranks over two": lambda cell: [
            (row["side"], row["rate"])
            for row in found["weak"]
            if row["cell"] == cell and row["side"] == "fastest"
        ],
        "efficiency of four ranks": lambda cell: [
            (f"{row['model']}, {row['pp2']} to {row['pp4']}", row["efficiency"])
            for row in found["mapping"]
            if row["side"] == "fastest"
        ],
    }
    found_goals = []
    for goal, bound, value, cell in _GOALS:
        for side, measured in best[goal](cell):
            if measured is None:
                continue
            found_goals.append(goal_row(goal, cell, side, bound, value, measured))
    return found_goals


def _language(
    found: Raw, cell: str, what: str, choose: Callable[..., Raw]
) -> list[tuple[str, float | None]]:
    """
    The best guarded side of the language model over two ranks; sides whose tensors differ are left
    out.
    """
    own = [
        row
        for row in _right(_guarded(found["rows"], cell=cell, model="language", pp=2, vpp=2))
        if row[what] is not None
    ]
    if not own:
        return []
    row = choose(own, key=lambda row: float(row[what]))
    return [(f"{row['side']}, {row['schedule']}", row[what])]
