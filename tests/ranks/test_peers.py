"""Our modes in the comparison with Megatron-core (`report peers`), over two ranks on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from qeffect.gpu_runtime.lab.statistics.peers import has_owed_bits, verdict
from tests.ranks import table_bodies
from tests.ranks.ranks import launch


@pytest.mark.ci
def test_replays_have_natives_gradients_and_another_schedule_is_close(tmp_path: Path) -> None:
    """
    Interleaved bit for bit. ZB-V, whose stages lie on other ranks, may scale in its order; fp32
    gradients and groups of microbatches round otherwise.
    """
    (tmp_path / "kept").mkdir()
    (tmp_path / "said").mkdir()
    body = table_bodies.peers_of_ours
    said = launch(2, tmp_path / "said", body, str(tmp_path / "kept"))
    assert said.codes == [0, 0]
    for rank in range(2):
        native, il, zbv, *far, alone = said.words[rank]
        assert [row["side"] for row in (native, il, zbv)] == ["native", "replays", "replays"]
        assert [verdict(row) for row in (native, il)] == ["same bits", "same bits"]
        (against,) = il["gradients"]
        assert (against["compared"], against["different"], against["not_finite"]) == (53, 0, 0)
        (against,) = zbv["gradients"]
        assert against["compared"] == 53
        assert against["relative"] < 0.1
        assert verdict(zbv) in ("same bits", "close")
        assert native["loss"] > 0
        assert [(row["schedule"], row["main_grad"], row["group"]) for row in far] == [
            ("il", "bf16", 2),
            ("zbv", "bf16", 2),
            ("il", "fp32", None),
            ("zbv", "fp32", None),
            ("il", "fp32", 2),
            ("zbv", "fp32", 2),
        ]
        # Scales that move once per step change the gradients; a group hardly changes them more.
        one, two = (row["gradients"][0]["relative"] for row in (alone, far[0]))
        assert one > 0.01
        assert two == pytest.approx(one, rel=0.01)
        for row in far:
            (against,) = row["gradients"]
            assert against["different"] > 0
            assert against["relative"] < 0.1
            assert (verdict(row), has_owed_bits({**row, "verdict": verdict(row)})) == (
                "close",
                True,
            )
