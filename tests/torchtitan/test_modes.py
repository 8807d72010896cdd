"""`report modes` over TorchTitan's real trainer, on CPUs over gloo (`make torchtitan`)."""

from __future__ import annotations

from typing import Any

import pytest

from qeffect.gpu_runtime.lab.comparisons.modes import FRAMEWORKS, Place, run_rows
from qeffect.gpu_runtime.lab.statistics.modes import derive_modes

pytestmark = pytest.mark.torchtitan


def test_rows_that_differ_from_the_plainest_have_its_bits() -> None:
    """Another cut, recomputation and evaluation between change no bit, and the guard is silent."""
    modes = FRAMEWORKS["torchtitan"]({}, "cpu")
    plain = {name: values[0] for name, values in modes.factors.items()}
    others: list[dict[str, Any]] = [
        {"schedule": "ZBVZeroBubble", "recompute": "full"},
        {"schedule": "Interleaved1F1B", "validate": True},
    ]
    rows = [
        {"kind": kind, "row": {**plain, **row}, "numbers": "the same"}
        for kind, row in (("reference", {}), *(("cover", row) for row in others))
    ]
    said = run_rows(Place(limit_s=120.0), "torchtitan", rows)

    assert ["same", "same"] == [row["end"] for row in derive_modes({"rows": said})["rows"]]
    losses = said[0]["plain"]["losses"]
    assert len(losses) == 3
    assert losses[0] != losses[2]
    assert said[0]["plain"]["bits"]["gradients"] == said[1]["plain"]["bits"]["gradients"]
