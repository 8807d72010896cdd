"""
Derive the figures of `report peers`: speed relative to native and Megatron, and which gradients are
right.

A finite gradient can still be wrong. After steps that change no weight, each mode's gradients are
compared bit for bit with those of its own framework without graphs, and with native's. Megatron's
arithmetic differs from native's (its activation is rounded before it is quantized), so for Megatron
the distance from native is reported. The distance is also reported for fp32 gradients, since
native's are bf16, and for weight gradients in groups, whose scales move once per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from . import paper
from .summary import Raw, busiest_ms, extremes, goal_row, median, ratio, rounded, step_ms

__all__ = ["FAR", "combine_distances", "derive_peers", "has_owed_bits", "verdict"]

FAR: Final = 0.25
"""
The distance, relative to the norm of native's gradients, above which gradients count as wrong.
Megatron's rounding and head change the gradients by about a sixth (`from_native` in
`reports/peers.json`); leaving out or repeating one microbatch of eight changes the gradients by a
third.
"""
EAGER = "megatron none"
GRAPHS = ("megatron transformer_engine", "megatron local", "megatron full_iteration")

_WITHIN = {**dict.fromkeys(GRAPHS, EAGER), "replays": "native", "one launch": "replays"}
"""For each mode, the side whose bits must be equal under the same schedule."""


def combine_distances(ranks: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """
    The distance between two sets of gradients, over all ranks.

    Args:
        ranks: For each rank and tensor: `apart` (the squared distance), `own` and `theirs` (squared
            norms), `product` (the scalar product), `same` (1 if all bits are equal), `odd` (count
            of numbers that are not finite).

    Returns:
        `compared` and `different` tensors, `not_finite` numbers, `relative` (distance divided by
        the norm of theirs) and `cosine` over all tensors, and `worst`, the tensor with the largest
        relative distance. The last three are None if a number is not finite.
    """
    tensors = {
        f"rank {n}: {name}": sums for n, rank in enumerate(ranks) for name, sums in rank.items()
    }
    odd = int(sum(sums["odd"] for sums in tensors.values()))
    found: dict[str, Any] = {
        "compared": len(tensors),
        "different": int(sum(1 - sums["same"] for sums in tensors.values())),
        "not_finite": odd,
        "relative": None,
        "cosine": None,
        "worst": None,
    }
    if odd or not tensors:
        return found
    total = {
        key: sum(sums[key] for sums in tensors.values())
        for key in ("apart", "own", "theirs", "product")
    }
    found["relative"] = ratio(total["apart"] ** 0.5, total["theirs"] ** 0.5, 6)
    found["cosine"] = ratio(total["product"], (total["own"] * total["theirs"]) ** 0.5, 6)
    apart = {
        name: relative
        for name, sums in tensors.items()
        if (relative := ratio(sums["apart"] ** 0.5, sums["theirs"] ** 0.5, 6)) is not None
    }
    if apart:
        name = max(apart, key=apart.__getitem__)
        found["worst"] = [name, apart[name]]
    return found


def verdict(row: Raw) -> str:
    """
    Whether a mode's gradients are right.

    `failed`; `not compared`; `same bits` (equal to its own framework without graphs or, for our
    modes, to native); `close`; or `wrong` (not finite, or farther than `FAR` from one of the
    references).
    """
    if row["error"] is not None:
        return "failed"
    compared = {one["with"]: one for one in row["gradients"]}
    if not compared:
        return "not compared"
    if any(one["not_finite"] or one["relative"] is None for one in compared.values()):
        return "wrong"
    if any(one["relative"] > FAR for one in compared.values()):
        return "wrong"
    within = compared.get(_WITHIN.get(row["side"], "native"))
    return "same bits" if within is not None and within["different"] == 0 else "close"


def has_owed_bits(row: Raw) -> bool:
    """
    Whether a row of our pipeline or torch's has the gradients it must have. A row is right if its
    bits equal the bits of its reference. Some rows cannot have equal bits: under a schedule with
    other scales, with fp32 gradients, or with weight gradients in groups. A row of this kind is
    right if its gradients are close to native's.

    Args:
        row: A derived row of our pipeline or torch's.
    """
    another = row["side"] == "replays" and row["schedule"] != "il"
    another = another or row["main_grad"] != "bf16" or row["group"] is not None
    return row["verdict"] in (("same bits", "close") if another else ("same bits",))


def derive_peers(raw: Raw) -> dict[str, Any]:
    """
    Derive the figures of each cell's sides (frameworks in one mode) relative to native and
    Megatron, which modes work, and goals.

    Returns:
        `rows`, `capability` and `targets`.
    """
    rows: list[dict[str, Any]] = []
    for cell, main_grad in dict.fromkeys((row["cell"], row["main_grad"]) for row in raw["rows"]):
        held = [row for row in raw["rows"] if row["cell"] == cell]
        own = [row for row in held if row["main_grad"] == main_grad]
        base = {row["side"]: step_ms(row) for row in held if _is_base(row, main_grad)}
        graphs = [
            row for row in own if row["side"] in GRAPHS and verdict(row) in ("same bits", "close")
        ]
        best = min(graphs, key=step_ms, default=None)
        rows += [_row(row, base, best) for row in own]
    return {"rows": rows, "capability": _capability(rows, raw), "targets": _targets(rows)}


def _is_base(row: Raw, main_grad: str) -> bool:
    """
    Whether rows with this data type of gradients are compared with this row (one side in one cell):
    a row of native, or of Megatron eager with the same data type.
    """
    own = row["main_grad"] == main_grad and row["side"] == EAGER
    return row["error"] is None and (own or row["side"] == "native")


def _row(row: Raw, base: Mapping[str, float], best: Raw | None) -> dict[str, Any]:
    found = {
        "cell": row["cell"],
        "side": row["side"],
        "schedule": row["schedule"],
        "main_grad": row["main_grad"],
        "group": row["group"],
        "verdict": verdict(row),
        "error": row["error"],
    }
    if row["error"] is not None:
        return found
    step = step_ms(row)
    busiest = busiest_ms(row)
    named = {one["with"]: one for one in row["gradients"]}
    return {
        **found,
        "step_ms": extremes(row["step_ms"]),
        "single_ms": median(row["single_ms"]),
        "native_over_this": ratio(base.get("native"), step),
        "megatron_eager_over_this": ratio(base.get(EAGER), step),
        "best_graphs_over_this": None if best is None else ratio(step_ms(best), step),
        "best_graphs": None if best is None else best["side"],
        "busiest_ms": rounded(busiest),
        "over_busiest": None if busiest is None else ratio(step, busiest),
        "construction_s": rounded(row["construction_s"]),
        "peak_bytes": max(row["peak_bytes"]),
        "loss": row["loss"],
        "from_native": named["native"]["relative"] if "native" in named else None,
        "differ": {name: [one["different"], one["compared"]] for name, one in named.items()},
    }


_PATHS: tuple[tuple[str, str, str, str, str], ...] = (
    ("native", "none", "full", "native eager", "completes; the reference"),
    (EAGER, "none", "full", "Megatron eager", "completes; the base of its graphs"),
    (GRAPHS[0], "a layer and microbatch", "full", "Megatron TE graphs",
     "loss matches eager; 1.751 to 2.191x within Megatron"),
    (GRAPHS[1], "a layer and microbatch", "full", "Megatron local graphs",
     "fails at output-view deallocation"),
    (GRAPHS[2], "the whole iteration", "full", "Megatron full iteration",
     "fails on a second-step static-input copy"),
    ("megatron delayed dW", "none", "delayed dW asked for", "Megatron delayed dW",
     "rejected before training; requires MoE overlap"),
    ("replays", "a slot's F, dI and dW", "split, by the schedule", "ours, replays",
     "zero mismatches (captured Interleaved and ZB-V)"),
    ("one launch", "a rank's whole step", "split, by the schedule", "ours, one launch", "-"),
)  # fmt: skip
"""For each path: side, content of a graph, how backward runs, name, and the paper's observation."""


def _capability(rows: Sequence[Raw], raw: Raw) -> list[dict[str, Any]]:
    """The paper's capability table, from these runs; a mode that was not run has no row."""
    found = []
    for side, holds, backward, name, theirs in _PATHS:
        own = [row for row in rows if row["side"] == side]
        said = raw["refusals"].get(side)
        if not own and said is None:
            continue
        found.append(
            {
                "path": name,
                "graph": holds,
                "backward": backward,
                "observed": said if said is not None else _observed(own),
                "paper": theirs,
            }
        )
    return found


def _grouped(row: Raw) -> str:
    return "" if row["group"] is None else f", group of {row['group']}"


def _observed(rows: Sequence[Raw]) -> str:
    parts = []
    for row in rows:
        name = f"{row['cell']}, {row['schedule']}, {row['main_grad']}{_grouped(row)}"
        if row["error"] is not None:
            parts.append(f"{name}: failed, {row['error']}")
            continue
        speed = row["native_over_this"]
        words = f"{name}: {row['verdict']}"
        parts.append(words if speed is None else f"{words}, {speed:.2f}x native")
    return "; ".join(parts)


_BEST = "Megatron's best graph mode / this"
_GOALS: tuple[tuple[str, str, str, float, str, str], ...] = (
    (_BEST, "best_graphs_over_this", "at least", 3.6, paper.SMALL, "bf16"),
    (_BEST, "best_graphs_over_this", "at least", 3.0, paper.LARGE, "bf16"),
    (f"{_BEST}, fp32", "best_graphs_over_this", "at least", 1.3, paper.LARGE, "fp32"),
    (f"{_BEST}, fp32", "best_graphs_over_this", "at least", 1.5, paper.SMALL, "fp32"),
    (f"{_BEST}, fp32", "best_graphs_over_this", "at least", 1.15, "h4096-s1024-m8", "fp32"),
    (f"{_BEST}, fp32", "best_graphs_over_this", "at least", 1.15, "h4096-s4096-m8", "fp32"),
    ("native / this", "native_over_this", "at least", 9.0, paper.SMALL, "bf16"),
    ("native / this", "native_over_this", "at least", 6.5, paper.LARGE, "bf16"),
    ("over the busiest rank's kernels", "over_busiest", "at most", 1.25, paper.SMALL, "bf16"),
    ("over the busiest rank's kernels", "over_busiest", "at most", 1.12, paper.LARGE, "bf16"),
)
"""
The goals: quantity, its key in a row, bound, value, cell and data type of gradients of each goal.
"""


def _targets(rows: Sequence[Raw]) -> list[dict[str, Any]]:
    """The goals, each judged by our best side among those with correct gradients."""
    found = []
    for goal, key, bound, value, cell, main_grad in _GOALS:
        own = [
            row
            for row in rows
            if row["cell"] == cell
            and row["main_grad"] == main_grad
            and row["side"] in ("replays", "one launch")
            and row["verdict"] in ("same bits", "close")
            and row[key] is not None
        ]
        if not own:
            continue
        choose = max if bound == "at least" else min
        row = choose(own, key=lambda row, key=key: float(row[key]))  # type: ignore[misc]
        column = f"{row['side']}, {row['schedule']}{_grouped(row)}"
        found.append(goal_row(goal, cell, column, bound, value, row[key]))
    return found
