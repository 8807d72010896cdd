"""
`qeffect runtime times` on a device: replays of captured matrix products over several microbatches.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.training.data import save
from qeffect.schedule.durations import read_durations

pytestmark = pytest.mark.gpu

RUN = """
[model]
vocabulary = 256
layers = 4
hidden = 128
ffn = 256
heads = 2
sequence = 128
scales = "epoch"
head = "bf16"
[parallel]
pp = 2
schedule = "zbv"
microbatches = 4
mode = "one launch"
[data]
train = "train.npy"
[run]
device = "cuda"
"""


def test_products_of_captured_slots_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process measures all four stages' parts, and proposes one of the groups."""
    monkeypatch.chdir(tmp_path)
    save(Path("train.npy"), np.arange(4096, dtype=np.uint16) % 251)
    Path("run.toml").write_text(RUN)
    code = main(["runtime", "times", "run.toml", "--out", "d.json", "--json", "--quiet"])
    said = capsys.readouterr()
    assert code == 0, said.err
    found = json.loads(said.out)
    assert [one["group"] for one in found["groups"]] == [1, 2, 4]
    assert found["fastest_group"] in (1, 2, 4)
    durations = read_durations(Path("d.json"))
    for stage in range(4):
        one, two, four = (durations.product(stage, group) for group in (1, 2, 4))
        assert one is None  # the time of one microbatch is W
        assert two is not None
        assert four is not None
        assert 0 < two
        assert 0 < four < 4 * two
