"""
Derive TFLOP/s of whole models from the times of their steps.

The number of operations includes the matrix products of the layers and of the head: two operations
for each multiply and add, once forward and twice backward. Half of attention's products count,
because a token attends only to tokens before it. The number of operations excludes norms,
activations, the embedding's lookup, the loss, the optimizer, and recomputation.
"""

from __future__ import annotations

from typing import Any

from .peers import EAGER, GRAPHS
from .summary import Raw, busiest_ms, extremes, median, ratio, rounded, step_ms
from .traces import times_by_kind

__all__ = ["FP8_TFLOPS", "LOSS_WITHIN", "derive_models", "step_flops"]

LOSS_WITHIN = 0.001
"""
Largest relative difference between Megatron's loss of the initial weights and native's with which
both frameworks count as running the same model.
"""

FP8_TFLOPS = 1979
"""
Dense FP8 peak of an H100 (SXM) or H200 in TFLOP/s. bf16 products are compared with this peak too.
"""


def step_flops(shape: Raw) -> int:
    """
    Floating-point operations of one step of a model.

    Args:
        shape: `hidden`, `ffn`, `heads`, `kv_heads`, `layers`, `vocabulary`, `sequence` and
            `microbatches` of one sequence each.

    >>> step_flops({"hidden": 2, "ffn": 3, "heads": 1, "kv_heads": 1, "layers": 1,
    ...             "vocabulary": 5, "sequence": 1, "microbatches": 1})
    276
    """
    hidden, ffn, sequence = shape["hidden"], shape["ffn"], shape["sequence"]
    kv_width = hidden // shape["heads"] * shape["kv_heads"]
    layer = (hidden + 2 * kv_width) * hidden + hidden * hidden + 3 * ffn * hidden
    products = 2 * (shape["layers"] * layer + shape["vocabulary"] * hidden)
    # Scores and weighted values: two products of `sequence` by `hidden` a token, half of each.
    attention = shape["layers"] * 2 * sequence * hidden
    tokens = sequence * shape["microbatches"]
    return int(3 * tokens * (products + attention))


def _fastest_megatron(raw: Raw) -> dict[str, float]:
    """Milliseconds per step of the fastest Megatron mode whose loss is right, by cell (model,
    sequence length and microbatches)."""
    good = [row for row in raw["rows"] if row["error"] is None]
    native = {row["cell"]: row.get("loss") for row in good if row["side"] == "native"}
    found: dict[str, float] = {}
    for row in good:
        cell = row["cell"]
        if row["side"] not in (EAGER, *GRAPHS) or native.get(cell) is None:
            continue
        if abs(row["loss"] - native[cell]) <= LOSS_WITHIN * native[cell]:
            found[cell] = min(step_ms(row), found.get(cell, step_ms(row)))
    return found


def _kinds(row: Raw) -> dict[str, float] | None:
    """The time of each kind of work on the GPU that is busiest if messages are not counted."""
    ranks = [times_by_kind(by_name) for by_name in row.get("work_ms", ())]
    return max(
        ranks,
        key=lambda kinds: sum(kinds.values()) - kinds.get("messages", 0.0),
        default=None,
    )


def derive_models(raw: Raw) -> dict[str, Any]:
    """
    Derive the rate of every row (one model under one schedule), its time relative to native's and
    Megatron's, and its memory.

    Returns:
        `rows` and `errors`. A row has TFLOP/s per GPU, the share of the FP8 peak, tokens per second
        and peak bytes. It also has the part of a step in which the busiest GPU runs neither kernels
        nor copies (messages left out), and whether the last rounds agree (None if no rounds may be
        added). Under native's schedule, a row has the number of tensors that differ from native's
        weights, moments and scales. `kinds` is the busiest GPU's time by kind of work, in
        milliseconds per step (None if nothing was profiled). Rows of native and of Megatron also
        have the loss of the initial weights. `recompute` is present, and true, if dI recomputed the
        activations of layers. `megatron_over_this` is the time of Megatron's fastest mode whose
        loss is native's (within `LOSS_WITHIN`), divided by the row's time. A row of several
        replicas has `one_replica_over_this`: the time of the same row with one replica, divided by
        the row's time. Its tokens are the tokens of all replicas, and it has no ratios to native
        and Megatron.
    """
    rows, errors = [], []
    theirs = _fastest_megatron(raw)
    native: dict[str, Raw] = {}
    alone: dict[tuple[object, ...], float] = {}
    for row in raw["rows"]:
        name = {key: row[key] for key in ("cell", "side", "schedule")}
        if row.get("recompute"):
            name["recompute"] = True
        if row["error"] is not None:
            errors.append({**name, "error": row["error"]})
            continue
        if row["side"] == "native":
            native[row["cell"]] = row
        shape, step, replicas = row["shape"], step_ms(row), row.get("replicas", 1)
        if replicas == 1:
            alone[tuple(name.values())] = step
        ranks = len(row["peak_bytes"]) / replicas
        rates = extremes([step_flops(shape) / (ms * 1e9) / ranks for ms in row["step_ms"]])
        base, busiest = native.get(row["cell"]) if replicas == 1 else None, busiest_ms(row)
        rows.append(
            {
                **name,
                "replicas": replicas,
                "cut": row["cut"],
                "step_ms": extremes(row["step_ms"]),
                "settled": row.get("settled"),
                "tflops": rates,
                "share": rounded(rates["median"] / FP8_TFLOPS),
                "tokens_per_s": round(
                    1e3 * replicas * shape["sequence"] * shape["microbatches"] / step
                ),
                "native_over_this": None if base is None else ratio(step_ms(base), step),
                "megatron_over_this": (
                    ratio(theirs.get(row["cell"]), step) if replicas == 1 else None
                ),
                "one_replica_over_this": (
                    ratio(alone.get(tuple(name.values())), step) if replicas > 1 else None
                ),
                "loss": row.get("loss"),
                "idle": None if busiest is None else rounded(1 - busiest / step),
                "kinds": _kinds(row),
                "peak_bytes": max(row["peak_bytes"]),
                "capture_s": median(
                    fact["capture_s"] for fact in row["facts"] if "capture_s" in fact
                ),
                "compared": row["compared"][0],
                "different": row["compared"][1],
            }
        )
    return {"rows": rows, "errors": errors}
