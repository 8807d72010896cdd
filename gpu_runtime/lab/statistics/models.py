"""
TFLOP/s of whole models, from the times of their steps.

Counted are the products of the layers and of the head, two operations for each multiply and add,
once forward and twice backward; of attention, half, since a token attends to those before it.
Norms, activations, the embedding's lookup, the loss, the optimizer, and what is computed twice are
not counted.
"""

from __future__ import annotations

from typing import Any

from .summary import Raw, busiest_ms, extremes, median, ratio, rounded, step_ms

__all__ = ["FP8_TFLOPS", "derive_models", "step_flops"]

FP8_TFLOPS = 1979
"""Dense FP8 peak of an H100 (SXM) or H200 in TFLOP/s. A bf16 product counts against it too."""


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


def derive_models(raw: Raw) -> dict[str, Any]:
    """
    Every row with its rate, its time beside native's, and its memory.

    Returns:
        `rows`, with whether the last rounds agree (None where none may be added), TFLOP/s per GPU,
        share of the FP8 peak, tokens a second, the part of a step that the busiest GPU's kernels
        and copies do not cover (messages left out), bytes at the peak, and how many tensors of
        native's weights, moments and scales differ under native's schedule; and `errors`.
    """
    rows, errors = [], []
    native: dict[str, Raw] = {}
    for row in raw["rows"]:
        name = {key: row[key] for key in ("cell", "side", "schedule")}
        if row["error"] is not None:
            errors.append({**name, "error": row["error"]})
            continue
        if row["side"] == "native":
            native[row["cell"]] = row
        shape, step = row["shape"], step_ms(row)
        ranks = len(row["peak_bytes"])
        rates = extremes([step_flops(shape) / (ms * 1e9) / ranks for ms in row["step_ms"]])
        base, busiest = native.get(row["cell"]), busiest_ms(row)
        rows.append(
            {
                **name,
                "cut": row["cut"],
                "step_ms": extremes(row["step_ms"]),
                "settled": row.get("settled"),
                "tflops": rates,
                "share": rounded(rates["median"] / FP8_TFLOPS),
                "tokens_per_s": round(1e3 * shape["sequence"] * shape["microbatches"] / step),
                "native_over_this": None if base is None else ratio(step_ms(base), step),
                "idle": None if busiest is None else rounded(1 - busiest / step),
                "peak_bytes": max(row["peak_bytes"]),
                "capture_s": median(
                    fact["capture_s"] for fact in row["facts"] if "capture_s" in fact
                ),
                "compared": row["compared"][0],
                "different": row["compared"][1],
            }
        )
    return {"rows": rows, "errors": errors}
