"""
Derive step times of grouped weight gradients, relative to steps without groups whose scales move at
every action.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .summary import Raw, exact_median, extremes, goal_row, median, ratio, step_ms

__all__ = ["GOALS", "derive_groups"]

GOALS: Mapping[tuple[str, str], float] = {
    ("h4096-s256-m8", "bf16"): 0.85,
    ("h4096-s256-m8", "fp32"): 0.65,
    ("h2048-s256-m4", "bf16"): 0.95,
    ("h2048-s256-m4", "fp32"): 0.85,
    ("h4096-s1024-m8", "fp32"): 0.85,
}
"""
Goal by cell and data type of accumulated gradients: in the better schedule, the step time divided
by the step time without groups (rows `today`) is at most this value.
"""

_SET, _SUM = ("cell", "schedule", "dtype"), ("cell", "dtype", "group")


def derive_groups(raw: Raw) -> dict[str, Any]:
    """
    Derive time and memory of every row (one cell, schedule and group size). For each group size,
    also derive the ratio of its time to the time of the rows `today` (no groups).

    Returns:
        `products`: for one layer's matrices, the time of joining plus one product, divided by the
        time of one product for each microbatch; `rows`; `sets`, one for each cell, schedule and
        data type; `digests`, one for each cell, data type and group; `targets`; and `errors`. In a
        set, `today_ms` covers the rounds of both rows `today`, `over_today` has the ratio of
        medians for each group, and `best` is the group with the smallest ratio. In an entry of
        `digests`, `alike` is None if fewer than two schedules have a digest.
    """
    rows = [row for row in raw["rows"] if row["error"] is None]
    sets = [_set(name, own) for name, own in _by(rows, _SET)]
    grouped = [row for row in rows if not _is_today(row)]
    return {
        "products": [_product(one) for one in raw["products"]],
        "rows": [_row(row) for row in rows],
        "sets": sets,
        "digests": [_digests(name, own) for name, own in _by(grouped, _SUM)],
        "targets": list(_targets(sets)),
        "errors": [
            {name: row[name] for name in (*_SET, "scales", "group", "error")}
            for row in raw["rows"]
            if row["error"] is not None
        ],
    }


def _product(row: Raw) -> dict[str, Any]:
    each, join, one = (row["ms"][part] for part in ("each", "join", "one"))
    return {
        **{name: row[name] for name in ("cell", "dtype", "microbatches")},
        "each_ms": each,
        "joined_ms": join + one,
        "over_each": ratio(join + one, each),
        "apart_over_each": ratio(row["apart"]["one"], row["apart"]["each"]),
        "same_bits": row["same_bits"],
        "of": row["matrices"],
    }


def _by(rows: Iterable[Raw], names: Sequence[str]) -> list[tuple[dict[str, Any], list[Raw]]]:
    """Group rows by the values of some fields; the groups are ordered by their first rows."""
    found: dict[tuple[Any, ...], list[Raw]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return [(dict(zip(names, key, strict=True)), own) for key, own in found.items()]


def _is_today(row: Raw) -> bool:
    return bool(row["scales"] == "action")


def _row(row: Raw) -> dict[str, Any]:
    facts = row["facts"]
    slots = {stage: slots for fact in facts for stage, slots in fact["slots_of"].items()}
    return {
        **{name: row[name] for name in (*_SET, "scales", "group")},
        "step_ms": extremes(row["step_ms"]),
        "peak_bytes": max(row["peak_bytes"]),
        "arena_bytes": max(fact["arena_bytes"] for fact in facts),
        "slots": dict(sorted(slots.items(), key=lambda one: int(one[0]))),
        "capture_s": median(fact["capture_s"] for fact in facts if "capture_s" in fact),
    }


def _set(name: Raw, rows: Sequence[Raw]) -> dict[str, Any]:
    today = [ms for row in rows if _is_today(row) for ms in row["step_ms"]]
    over = {
        str(row["group"]): ratio(step_ms(row), exact_median(today))
        for row in rows
        if not _is_today(row) and today
    }
    best = min(over.items(), key=lambda one: one[1], default=None)  # type: ignore[arg-type,return-value]
    return {
        **name,
        "today_ms": extremes(today) if today else None,
        "today_medians": [median(row["step_ms"]) for row in rows if _is_today(row)],
        "over_today": over,
        "best": None if best is None else {"group": int(best[0]), "over_today": best[1]},
    }


def _digests(name: Raw, rows: Sequence[Raw]) -> dict[str, Any]:
    found = {row["schedule"]: row["digest"] for row in rows if row["digest"] is not None}
    alike = len(set(found.values())) == 1 if len(found) > 1 else None
    return {**name, "schedules": sorted(found), "alike": alike}


def _targets(sets: Sequence[Raw]) -> Iterable[dict[str, Any]]:
    for (cell, dtype), value in GOALS.items():
        own = [
            one
            for one in sets
            if (one["cell"], one["dtype"]) == (cell, dtype) and one["best"] is not None
        ]
        if not own:
            continue
        better = min(own, key=lambda one: one["best"]["over_today"])
        yield goal_row(
            f"step time over today's, {dtype} destinations",
            cell,
            f"{better['schedule']}, group {better['best']['group']}",
            "at most",
            value,
            better["best"]["over_today"],
        )
