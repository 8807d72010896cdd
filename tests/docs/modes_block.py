"""The page of swept modes: each row (one combination of values) of each report, and why its bits or
its guard differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qeffect.gpu_runtime.lab.statistics.modes import changed
from tests.docs.blocks import ROOT, markdown
from tests.docs.reading import files

__all__ = ["BLOCKS", "EXPLAINED", "PAGE", "modes", "why"]

PAGE = ROOT / "docs" / "modes.md"
_FAILURES = "../tests/failures"

#: Reasons for rows that do not end in `same`: framework, words of the guard or framework, reason.
EXPLAINED = (
    (
        "torch",
        "schedule.message-order",
        f"deferred receives [swap tensors]({_FAILURES}/torch_deferred_receives.md)",
    ),
    (
        "torch",
        "reduction.missing",
        f"a split backward [reduces no gradient]({_FAILURES}/torch_replicas_not_reduced.md) "
        "over replicas",
    ),
    (
        "torch",
        "reduction.incomplete",
        "with inferred shapes the first backward already [reduces]"
        f"({_FAILURES}/torch_inferred_shapes_reduce_early.md) gradients",
    ),
    (
        "torch",
        "INTERNAL ASSERT FAILED",
        "the same [early reduction]"
        f"({_FAILURES}/torch_inferred_shapes_reduce_early.md) ends in an INTERNAL ASSERT",
    ),
    (
        "torchtitan",
        "ownership.work-not-queued",
        f"a split backward under a chunked loss [loses]({_FAILURES}/torchtitan_lost_gradient.md) "
        "the last norm's gradient",
    ),
    (
        "torchtitan",
        "non-empty donated buffers",
        "torch refuses a split backward of compiled layers",
    ),
    (
        "torchtitan",
        "can't steal_bwd_input",
        "torch refuses an evaluation under V-shaped schedules",
    ),
    (
        "torchtitan",
        "Trying to backward an extra time",
        "torch refuses a split backward of layers with selective recomputation",
    ),
    (
        "megatron",
        "schedule.message-order",
        "batched messages [swap tensors]"
        f"({_FAILURES}/megatron_batched_messages.md) between two ranks",
    ),
    (
        "megatron",
        "version.stale-cache",
        f"local graphs [keep stale FP8 weights]({_FAILURES}/megatron_stale_weights.md)",
    ),
    (
        "megatron",
        "does not support overlapping p2p communication",
        "Megatron-core refuses these options before the run",
    ),
    (
        "megatron",
        "must be enabled when enabling delay_wgrad_compute",
        "Megatron-core refuses delayed weight gradients without overlapped experts",
    ),
)


def why(framework: str, row: Mapping[str, Any]) -> str | None:
    """The reason for which a row (one combination of values) does not end in `same`: None without a
    known reason, empty if the row ends in `same`."""
    if row["end"] == "same":
        return ""
    if row["end"] not in ("found", "refused"):
        return None
    said = [*row["clauses"], row.get("said", "")]
    found = [
        reason
        for name, text, reason in EXPLAINED
        if name == framework and any(text in each for each in said)
    ]
    return "; ".join(found) or None


def modes() -> str:
    """A table for each report."""
    parts = []
    for name, report in files("modes"):
        derived, asked, where = report["derived"], report["configuration"], report["environment"]
        versions = ", ".join(f"{k} {v}" for k, v in asked["versions"].items())
        counts = ", ".join(f"{count} {end}" for end, count in derived["ends"].items())
        device = where["gpu"] or where["cpu"]
        parts.append(
            f"**{asked['framework']}** on {asked['device']} ([{name}](../gpu_runtime/lab/reports/"
            f"{name}); {versions}; {device}; commit `{where['commit'][:12]}`). The modes end as "
            f"follows: {counts}. For {derived['pairs_that_ran']} of {derived['pairs']} pairs of "
            "values, a mode with both values ran to the end. The plainest mode: "
            + ", ".join(f"{key}={values[0]}" for key, values in asked["factors"].items())
            + "."
        )
        rows = [
            (
                changed(row["row"], asked["factors"]),
                row["ranks"],
                row["end"],
                ", ".join(f"`{clause}`" for clause in row["clauses"]) or "-",
                why(asked["framework"], row) or "-",
            )
            for row in derived["rows"]
        ]
        mode = "mode (options that differ from the plainest mode)"
        header = (mode, "ranks", "end", "clause that the guard names", "reason")
        parts.append(markdown(header, rows))
    return "\n\n".join(parts)


#: The blocks of the page.
BLOCKS: Mapping[Path, Mapping[str, Callable[[], str]]] = {PAGE: {"modes": modes}}
