"""
The small processes that mutants run in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from qeffect.destinations import Destination
from qeffect.stage_config import Bucket, StageConfig

from ..process import Process

__all__ = ["MUTANT_PROCESSES"]


def _placed(microbatches: int, base: int) -> tuple[Destination, ...]:
    """Return one gradient destination per microbatch."""
    return tuple(
        Destination("w", m, (2, 2), "float32", "cuda:0", base + 16 * m, 16)
        for m in range(microbatches)
    )


#: A stage whose backend reports cache fills and scaling updates.
_REPORTS: Final[Mapping[str, Any]] = {"reports_fills": True, "reports_updates": True}

#: The processes that mutants run in. Together they use every relation and every option that a guard
#: reads.
MUTANT_PROCESSES: Final = (
    Process("one stage", (StageConfig(0, 2, 2, matrices=("w",)),)),
    Process(
        "two stages, one domain",
        (
            StageConfig(0, 2, 2, matrices=("w", "v"), sends_output=True, reduces=True),
            StageConfig(1, 1, 1, matrices=("w",), sends_gradient=True),
        ),
        epoch=3,
    ),
    Process(
        "two domains",
        (
            StageConfig(
                0,
                2,
                2,
                domain="a",
                matrices=("w",),
                destinations=_placed(2, base=0),
                tape_scales="carried",
                **_REPORTS,
            ),
            StageConfig(
                1,
                1,
                2,
                domain="b",
                matrices=("u",),
                sends_output=True,
                reduces=True,
                tape_scales="live",
                **_REPORTS,
            ),
        ),
        callers=("main", "side"),
    ),
    Process(
        "buckets",
        (
            StageConfig(
                0,
                1,
                1,
                matrices=("w", "v"),
                reduces=True,
                buckets=(Bucket("tied", ("w",)), Bucket("own", ("v",))),
            ),
            StageConfig(1, 1, 1, matrices=("w",), reduces=True, buckets=(Bucket("tied", ("w",)),)),
        ),
        callers=("main", "side"),
        reductions=("own", "tied"),
    ),
    Process(
        "tied",
        tuple(
            StageConfig(s, 1, 1, matrices=("w", "v"), tied=("w",), buffers={"w": "table"})
            for s in (0, 1)
        ),
    ),
    Process(
        "declared order",
        (StageConfig(0, 2, 2, matrices=("w",)),),
        declared={
            0: (
                ("F", (0, 0, 0, 0)),
                ("F", (0, 1, 0, 0)),
                ("dI", (0, 1, 0, 0)),
                ("dI", (0, 0, 0, 0)),
            )
        },
    ),
    Process(
        "shared pool",
        (StageConfig(0, 3, 2, matrices=("w",), pool="p", sends_gradient=True),),
        capture_order=(
            (0, 0, "F"),
            (0, 0, "dI"),
            (0, 1, "F"),
            (0, 1, "dI"),
            (0, 0, "dW"),
            (0, 1, "dW"),
        ),
    ),
    Process(
        "shared pool, slot by slot",
        (StageConfig(0, 2, 2, matrices=("w",), pool="p"),),
        capture_order=tuple((0, s, kind) for s in (0, 1) for kind in ("F", "dI", "dW")),
    ),
    Process(
        "refreshes in a shared pool",
        (
            StageConfig(0, 1, 1, matrices=("w",), pool="p", refresh_pool="p"),
            StageConfig(1, 1, 1, matrices=("w",), pool="p", refresh_pool="p"),
            StageConfig(2, 1, 1, matrices=("w",), pool="p"),
        ),
        capture_order=(
            (0, "refresh"),
            (0, 0, "F"),
            (1, "refresh"),
            (1, 0, "F"),
            (2, 0, "F"),
            *((stage, 0, kind) for kind in ("dI", "dW") for stage in (2, 1, 0)),
        ),
    ),
    Process(
        "messages",
        (
            StageConfig(
                0,
                2,
                1,
                matrices=("w",),
                sends_output=True,
                sends_gradient=True,
                receives_input=True,
                receives_gradient=True,
            ),
            StageConfig(1, 2, 1, domain=1, matrices=("w",), receives_gradient=True, pool="q"),
        ),
        callers=("main", "wire"),
    ),
    Process(
        "copies",
        (
            StageConfig(0, 2, 1, matrices=("w",), sends_output=True, copies_input=True),
            StageConfig(1, 1, 1, domain=1, matrices=("w",)),
        ),
        callers=("main", "loader"),
    ),
    Process(
        "chunks",
        (
            StageConfig(0, 2, 2, matrices=("w",), feeds=1),
            StageConfig(1, 2, 1, matrices=("w",)),
        ),
    ),
    Process(
        "chunks by messages",
        (
            StageConfig(
                0,
                2,
                2,
                matrices=("w",),
                sends_output=True,
                receives_input=True,
                receives_gradient=True,
                feeds=1,
            ),
            StageConfig(
                1,
                2,
                1,
                domain=1,
                matrices=("w",),
                sends_gradient=True,
                receives_input=True,
                receives_gradient=True,
            ),
        ),
    ),
    Process("generations run out", (StageConfig(0, 1, 1, matrices=("w",)),), generation_max=2),
    Process(
        "draws",
        (
            StageConfig(0, 2, 2, matrices=("w",), reports_draws=True, recomputes_draws=True),
            StageConfig(1, 1, 1, matrices=("w",), reports_draws=True),
            StageConfig(2, 1, 1, matrices=("w",)),
        ),
    ),
    Process(
        "weights",
        (
            StageConfig(0, 2, 2, matrices=("w",), weights_sum=(1, 1)),
            StageConfig(1, 1, 1, matrices=("w",), weights_sum=(1, 2)),
            StageConfig(2, 1, 1, matrices=("w",)),
        ),
    ),
    Process("live scales", (StageConfig(0, 2, 2, matrices=("w",), tape_scales="live"),)),
    Process(
        "scales of an epoch",
        (
            StageConfig(
                0, 2, 2, matrices=("w",), scales="epoch", tape_scales="live", reports_updates=True
            ),
            StageConfig(1, 1, 1, domain=1, matrices=("w",), scales="epoch"),
            StageConfig(2, 1, 1, domain=2, matrices=("w",)),
        ),
    ),
    Process(
        "grouped dW",
        (
            StageConfig(0, 3, 3, matrices=("w",), pool="p", scales="epoch", sends_gradient=True),
            StageConfig(
                1, 2, 2, domain=1, matrices=("w",), scales="epoch", destinations=_placed(2, base=0)
            ),
        ),
    ),
    # The consumer's second slot is often free. If an input has no tape, no other guard refuses it.
    Process(
        "chunks by messages, a spare slot",
        (
            StageConfig(
                0,
                2,
                2,
                matrices=("w",),
                sends_output=True,
                receives_input=True,
                receives_gradient=True,
                feeds=1,
            ),
            StageConfig(
                1,
                2,
                2,
                domain=1,
                matrices=("w",),
                sends_gradient=True,
                receives_input=True,
                receives_gradient=True,
            ),
        ),
    ),
)
