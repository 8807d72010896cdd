"""The report of kills: which process is killed at which moment, and what is compared at the end."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from qeffect.cli import main
from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.lab.commands import kills
from qeffect.gpu_runtime.lab.commands.kills import compare_runs, drawn_kills
from qeffect.gpu_runtime.lab.runner.killed_rank import PLACES, Kill, arm
from qeffect.gpu_runtime.lab.statistics.kills import derive_kills
from tests.runtime.report_samples import kills_report


@pytest.mark.parametrize(("count", "runs"), [(20, 1), (20, 4), (3, 3), (60, 2)])
@pytest.mark.parametrize("seed", range(5))
def test_kills_are_dealt_and_begin_with_one_that_leaves_a_checkpoint(
    count: int, runs: int, seed: int
) -> None:
    """Twenty kills have every place, and the launcher's; the same seed draws the same."""
    dealt = drawn_kills(count, runs, seed)
    assert dealt == drawn_kills(count, runs, seed)
    every = [one for run in dealt for one in run]
    assert (len(every), len(dealt)) == (count, runs)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    for run in dealt:
        assert not run[0].place.startswith(("start", "resume"))
        assert run[0].steps == 2
    assert all(one.rank in ({0, 1} if PLACES[one.place] is None else {0}) for one in every)
    if (count, runs) == (20, 1):
        assert {one.place for one in every} == set(PLACES)
        assert sum(one.launcher for one in every) >= 3
    if count == 60:
        assert set(Counter((one.place, one.launcher) for one in every).values()) >= {3}


def test_an_unknown_place_is_refused(tmp_path: Path) -> None:
    """A start must not pass for a killed one."""
    with pytest.raises(ValueError, match="unknown place 'nowhere'; expected one of start, before"):
        arm(Kill("nowhere", 0, str(tmp_path)))


def test_a_tensor_that_differs_in_two_runs_counts_once() -> None:
    """Distinct names first; comparisons are counted beside them."""
    derived = derive_kills(kills_report()["raw"])
    assert (derived["tensors"], derived["tensors_differ"]) == (9, 2)
    assert (derived["losses"], derived["losses_differ"], derived["compared"]) == (7, 1, 40)
    assert derived["places"] == {"launcher, in: save": 1, "save": 1}
    assert derived["longest_end_s"] == 2.5


def logged(folder: Path, *losses: float, again: tuple[int, float] | None = None) -> Path:
    """A folder with a log of losses; a step may have another loss when it ran again."""
    folder.mkdir()
    lines = [{"step": n, "loss": loss} for n, loss in enumerate(losses)]
    lines.append({"step": len(losses) - 1, "held_out_loss": 2.0})
    if again is not None:
        lines.append({"step": again[0], "loss": again[1]})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_what_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit of a tensor, a tensor that one run lacks, a loss of a step that ran again."""
    one = {"model.a": torch.ones(3), "optim.b": torch.zeros(2)}
    held: dict[str, dict[str, Any]] = {
        "whole": one,
        "same": {name: tensor.clone() for name, tensor in one.items()},
        "other": {"model.a": torch.tensor([1.0, 1.0, 1.0000001]), "optim.c": torch.zeros(2)},
    }
    monkeypatch.setattr(kills, "_tensors", lambda path: held[path.parent.parent.name])
    whole = logged(tmp_path / "whole", 3.0, 2.0)
    same = compare_runs(whole, logged(tmp_path / "same", 3.0, 2.0, again=(1, 2.0)), 2)
    assert same == {
        "tensors": 2, "tensors_differ": [], "losses": 2, "losses_differ": [], "held_out": 1,
        "held_out_differ": [], "compared": 2 + 3 + 1,
    }  # fmt: skip
    found = compare_runs(whole, logged(tmp_path / "other", 3.0, 2.0, again=(1, 2.5)), 2)
    assert found["tensors_differ"] == ["model.a", "optim.b", "optim.c"]
    assert (found["losses_differ"], found["tensors"]) == ([1], 3)
    with pytest.raises(BackendError, match="expected the losses of 3 steps, found 2"):
        compare_runs(whole, same_folder := tmp_path / "same", 3)
    assert same_folder.exists()


def reported(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Run the report; its exit code and the report."""
    out = tmp_path / "kills.json"
    given = ["--out", str(out), "--commit", "0" * 40, "--quiet"]
    code = main(["runtime", "report", "kills", *words, *given])
    return code, json.loads(out.read_text())


@pytest.mark.slow(minutes=2)
def test_three_kills_change_nothing(tmp_path: Path) -> None:
    """Of a rank and of the launcher; every tensor, moment and random state is compared."""
    code, report = reported(tmp_path, "--kills", "3", "--seed", "1")
    assert code == 0
    assert report["complete"]
    derived = report["derived"]
    assert (derived["kills"], derived["tensors_differ"], derived["losses_differ"]) == (3, 0, 0)
    assert derived["tensors"] > 200
    assert (derived["losses"], derived["held_out"]) == (18, 9)


@pytest.mark.nightly
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    """In every place, two runs at a time."""
    code, report = reported(tmp_path, "--at-once", "2")
    assert code == 0
    assert len(report["raw"]["kills"]) == 20
    assert report["derived"]["tensors_differ"] == report["derived"]["losses_differ"] == 0
