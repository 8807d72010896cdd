"""
Small processes for random schedules. Together they use every configuration option of every
relation.
"""

from __future__ import annotations

from typing import Any

from qeffect import Bucket, Destination, StageConfig

from ..process import Process

__all__ = ["PROCESSES"]


def _stage(stage: int = 0, **options: Any) -> StageConfig:
    settings: dict[str, Any] = {"microbatches": 3, "slots": 2, "matrices": ("w0", "w1")}
    return StageConfig(stage, **{**settings, **options})


def _apart(stage: int, microbatches: int) -> tuple[Destination, ...]:
    """Return one gradient destination per microbatch and matrix."""
    return tuple(
        Destination(
            name, m, (4, 4), "float32", "cuda:0", 4096 * (stage + 1) + 128 * m + 64 * at, 64
        )
        for m in range(microbatches)
        for at, name in enumerate(("w0", "w1"))
    )


_WHOLE = tuple(
    Destination(name, None, (4, 4), "float32", "cuda:0", 4096 + 64 * at, 64)
    for at, name in enumerate(("w0", "w1"))
)
_REPORTS = {"reports_fills": True, "reports_updates": True}
_SENDS = {"sends_output": True, "sends_gradient": True}

#: Captured slot by slot: F, dI, dW of slot 0, then of slot 1; two live tapes then exclude others.
_BY_SLOT = tuple((0, slot, kind) for slot in range(2) for kind in ("F", "dI", "dW"))

_DECLARED = (
    ("F", (0, 0, 0, 0)),
    ("F", (0, 1, 0, 0)),
    ("dI", (0, 1, 0, 0)),
    ("dI", (0, 0, 0, 0)),
)

#: The first is the simplest; failing schedules shrink to it.
PROCESSES: tuple[Process, ...] = (
    Process("one stage", [_stage(microbatches=2)]),
    Process(
        "two chunks in one domain",
        [_stage(0, reduces=True), _stage(1, microbatches=2, slots=1)],
    ),
    Process(
        "two domains, two callers",
        [
            _stage(0, domain="a", microbatches=2, reduces=True),
            _stage(1, domain="b", microbatches=2, **_SENDS),
        ],
        callers=("main", "side"),
        generation_max=3,
    ),
    Process(
        "messages, two callers",
        [
            _stage(
                0, microbatches=2, slots=1, receives_input=True, receives_gradient=True, **_SENDS
            ),
            _stage(1, domain=1, microbatches=2, receives_gradient=True, sends_output=True),
        ],
        callers=("main", "wire"),
    ),
    Process(
        "a gradient over the wire",
        [_stage(microbatches=2, slots=2, receives_gradient=True)],
        callers=("main", "wire"),
    ),
    Process(
        "inputs copied by a loader",
        [_stage(0, slots=1, microbatches=4, copies_input=True, **_SENDS)],
        callers=("main", "loader"),
    ),
    Process(
        "chunks that feed each other",
        [
            _stage(0, slots=2, microbatches=2, feeds=1),
            _stage(1, slots=1, microbatches=2, feeds=2),
            _stage(2, slots=2, microbatches=2),
        ],
    ),
    Process(
        "chunks that exchange messages",
        [
            _stage(0, microbatches=2, sends_output=True, receives_gradient=True, feeds=1),
            _stage(1, domain=1, microbatches=2, receives_input=True, sends_gradient=True),
        ],
        callers=("main", "wire"),
    ),
    Process(
        "a chunk that sends to the next",
        [
            _stage(0, microbatches=2, sends_output=True, feeds=1),
            _stage(1, microbatches=2, receives_input=True),
        ],
        callers=("main", "wire"),
    ),
    Process(
        "messages in a shared pool",
        [_stage(microbatches=2, pool="p", receives_gradient=True, **_SENDS)],
        capture_order=_BY_SLOT,
    ),
    Process(
        "readers and reductions",
        [_stage(reduces=True, **_SENDS), _stage(1, domain=1, microbatches=1, reduces=True)],
    ),
    Process(
        "a gradient arena",
        [_stage(destinations=_apart(0, 3)), _stage(1, domain=1, slots=1, reduces=True)],
        generation_max=4,
    ),
    Process("bound accumulation", [_stage(destinations=_WHOLE, microbatches=4, slots=4)]),
    Process(
        "shared pools",
        [
            _stage(0, domain="a", pool="a", **_SENDS),
            _stage(1, domain="b", pool="b", microbatches=2, reduces=True),
        ],
        generation_max=4,
    ),
    Process(
        "a pool captured by slot",
        [_stage(pool="p"), _stage(1, domain=1, microbatches=1, slots=1)],
        capture_order=(*_BY_SLOT, (1, 0, "F"), (1, 0, "dI"), (1, 0, "dW")),
    ),
    Process(
        "refreshes in a shared pool",
        [
            _stage(0, pool="p", refresh_pool="p", microbatches=2),
            _stage(1, slots=1, pool="p", refresh_pool="p", microbatches=2),
            _stage(2, slots=1, refresh_pool="p", microbatches=1),
        ],
        capture_order=(
            (0, "refresh"),
            *((0, slot, "F") for slot in (0, 1)),
            (1, "refresh"),
            (1, 0, "F"),
            *((*slot, kind) for kind in ("dI", "dW") for slot in ((1, 0), (0, 0), (0, 1))),
            *((2, 0, kind) for kind in ("F", "dI", "dW")),
            (2, "refresh"),
        ),
    ),
    Process(
        "a declared order",
        [_stage(microbatches=2), _stage(1, domain=1, microbatches=2, reduces=True)],
        declared={0: _DECLARED},
    ),
    Process(
        "few generations",
        [_stage(microbatches=2), _stage(1, domain=1, microbatches=1, slots=1)],
        generation_max=1,
    ),
    Process("stages 3 and 7", [_stage(7, microbatches=2), _stage(3, blocks=2, slots=3, domain=1)]),
    Process(
        "buckets in a declared order",
        [
            _stage(
                0,
                microbatches=1,
                reduces=True,
                buckets=(Bucket("tied", ("w0",)), Bucket("first", ("w1",))),
            ),
            _stage(
                1,
                microbatches=1,
                slots=1,
                reduces=True,
                buckets=(Bucket("tied", ("w1",)), Bucket("last", ("w0",))),
            ),
        ],
        callers=("main", "communication"),
        reductions=("last", "tied", "first"),
    ),
    Process(
        "a tied weight",
        [
            _stage(0, microbatches=2, slots=2, tied=("w0",), buffers={"w0": "table"}),
            _stage(1, microbatches=2, slots=1, tied=("w1",), buffers={"w1": "table"}),
        ],
    ),
    Process("two invocations", [_stage(microbatches=2, invocations=2, slots=4, reduces=True)]),
    Process(
        "no matrices",
        [_stage(matrices=(), microbatches=2), _stage(1, domain=1, microbatches=1, reduces=True)],
        declared={1: (("F", (1, 0, 0, 0)), ("dI", (1, 0, 0, 0)))},
    ),
    Process(
        "reports, carried scales",
        [
            _stage(microbatches=2, tape_scales="carried", **_REPORTS),
            _stage(1, microbatches=1, slots=1, tape_scales="carried", **_REPORTS),
        ],
    ),
    Process(
        "reports, live scales",
        [_stage(microbatches=2, slots=2, tape_scales="live", **_REPORTS)],
    ),
    Process(
        "reports, draws",
        [
            _stage(microbatches=2, slots=2, reports_draws=True, recomputes_draws=True),
            _stage(1, microbatches=1, slots=1, reports_draws=True),
        ],
    ),
    Process(
        "reports, weights",
        [
            _stage(microbatches=3, slots=2, weights_sum=(1, 2)),
            _stage(1, microbatches=1, slots=1, invocations=2, weights_sum=(1, 1)),
        ],
    ),
    Process(
        "scales of an epoch",
        [
            _stage(microbatches=2, tape_scales="live", scales="epoch", **_REPORTS),
            _stage(1, microbatches=1, slots=1, scales="epoch", reports_updates=True),
            _stage(2, domain=1, microbatches=1, slots=1, scales="epoch"),
            _stage(3, domain=2, microbatches=1, slots=1),
        ],
    ),
    Process(
        "scales of an epoch, carried",
        [_stage(microbatches=2, tape_scales="carried", scales="epoch", **_REPORTS)],
    ),
    Process(
        "grouped dW",
        [
            _stage(slots=3, scales="epoch"),
            _stage(1, domain=1, microbatches=2, scales="epoch", **_SENDS),
        ],
        callers=("main", "side"),
    ),
    Process(
        "one destination for each dW",
        [_stage(slots=3, scales="epoch", destinations=_apart(0, 3))],
    ),
    Process("without version", [_stage(0), _stage(1, microbatches=2)], omit={"version"}),
    Process("without order", [_stage(0, pool="p"), _stage(1, reduces=True)], omit={"order"}),
    Process("without arena", [_stage(0), _stage(1, microbatches=1)], omit={"arena"}),
    Process("without capture", [_stage(reduces=True, **_SENDS)], omit={"capture"}),
    Process("without completion", [_stage(0), _stage(1, microbatches=1)], omit={"completion"}),
    Process("without reduction", [_stage(**_SENDS)], omit={"reduction"}),
    Process(
        "bare ownership",
        [_stage(**_SENDS)],
        omit={"version", "order", "arena", "capture", "completion", "reduction"},
    ),
)
