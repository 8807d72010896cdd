"""
The report of scales that move once per step: its runs, and its figures, computed a second time.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.lab.reports import load
from qeffect.gpu_runtime.lab.statistics.scales import derive_scales
from tests.runtime.report_samples import scales_report
from tests.training.helpers import SMALL, text

FILE = (
    SMALL.format(vocabulary=128, layers=1)
    + """[parallel]
schedule = "1f1b"
microbatches = 2
[data]
train = "train.npy"
held_out = "train.npy"
[run]
steps = 3
evaluate_windows = 2
"""
)


def ends(report: dict[str, Any]) -> dict[tuple[str, int], tuple[float, float]]:
    """Mean of the last 50 losses and the last held-out loss of each run, by plain Python."""
    found = {}
    for run in report["raw"]["runs"]:
        last = run["losses"][max(len(run["losses"]) - 50, 0) :]
        found[run["scales"], run["seed"]] = math.fsum(last) / len(last), run["held_out"][-1][1]
    return found


@pytest.mark.parametrize(
    "report", [scales_report(), *load(kind="scales")], ids=lambda one: one["environment"]["date"]
)
def test_the_figures_computed_once_more(report: dict[str, Any]) -> None:
    """Of the sample, and of every report of this kind."""
    derived, own = report["derived"], ends(report)
    for run in derived["runs"]:
        loss, held_out = own[run["scales"], run["seed"]]
        assert math.isclose(run["loss"], loss)
        assert run["held_out"] == held_out
    seeds = sorted({seed for _, seed in own})
    assert [pair["seed"] for pair in derived["differences"]] == seeds
    for place, name in ((0, "mean_difference"), (1, "mean_held_out_difference")):
        apart = [own["epoch", seed][place] - own["action", seed][place] for seed in seeds]
        assert math.isclose(derived[name], sum(apart) / len(apart), abs_tol=1e-12)


def test_a_loss_that_is_not_finite_gives_no_figure() -> None:
    """Nor does a seed of one recipe alone."""
    raw = scales_report()["raw"]
    raw["runs"][0]["losses"][-1] = None
    found = derive_scales({"runs": raw["runs"][:3]})
    assert found["runs"][0]["loss"] is None
    assert [pair["loss"] for pair in found["differences"]] == [None]
    assert found["mean_difference"] is None
    assert found["mean_held_out_difference"] == 0.0


@pytest.mark.nightly
def test_both_recipes_begin_with_the_same_weights(tmp_path: Path) -> None:
    """Two seeds of three steps: the losses are near each other, and not the same."""
    text(tmp_path)
    file, out = tmp_path / "run.toml", tmp_path / "scales.json"
    file.write_text(FILE)
    words = ["runtime", "report", "scales", str(file), "--seeds", "3", "4", "--out", str(out)]
    # In a process of its own: a run joins the ranks of its process for good.
    done = subprocess.run(
        [sys.executable, "-m", "qeffect", *words, "--quiet"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads(out.read_text())["raw"]["runs"]
    named = [(run["scales"], run["seed"]) for run in runs]
    assert named == [("action", 3), ("epoch", 3), ("action", 4), ("epoch", 4)]
    for default, epoch in (runs[:2], runs[2:]):
        assert default["losses"] != epoch["losses"]
        assert all(
            math.isclose(a, b, rel_tol=0.02)
            for a, b in zip(default["losses"], epoch["losses"], strict=True)
        )
    assert runs[0]["losses"] != runs[2]["losses"]


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        (["-1"], "--seeds: expected numbers from 0 to 999999999, found -1"),
        (["1", "1"], "--seeds: expected each seed once, found 1 1"),
    ],
)
def test_seeds_that_are_refused(
    seeds: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is trained."""
    words = ["runtime", "report", "scales", "none.toml", "--out", str(tmp_path / "a.json")]
    assert main([*words, "--seeds", *seeds]) == 2
    assert said in capsys.readouterr().err
