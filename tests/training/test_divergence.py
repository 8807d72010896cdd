"""A run that diverges ends with a cause and exit code 1, and its good checkpoints stay."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from qeffect.gpu_runtime.ranks.causes import Cause
from qeffect.gpu_runtime.step.clipping import Norm
from qeffect.gpu_runtime.training.checkpoint.files import checkpoint_folders
from qeffect.gpu_runtime.training.divergence import DivergedError, UpdateWatch
from tests.ranks.ranks import launch

from . import divergence_bodies as bodies
from .helpers import CONFIG, text

NAN, INF = math.nan, math.inf
RUN = CONFIG.replace("steps = 3", 'steps = 8\nlook_every = {look}\nlog = "{name}.jsonl"')
KEPT = '[checkpoint]\nfolder = "{name}"\nevery = 2\nkeep = {keep}\n'
SKIPS = "skip_nonfinite = true\nstop_after_skips = {}\n[run]"


def run(folder: Path, name: str, *, look: int = 0, keep: int = 1, kept: bool = False) -> str:
    """The text of a run's file."""
    body = RUN.format(look=look, name=name)
    return body + KEPT.format(name=name, keep=keep) if kept else body


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Runs of one process, one after the other: exit code and words of each."""
    folder = tmp_path_factory.mktemp("diverged")
    text(folder)
    hidden = (3, "layers.0.fc1.weight", INF)
    late = {str(step): NAN for step in range(2, 8)}
    bodies_of: dict[str, tuple[str, dict[str, Any]]] = {
        "saved": (run(folder, "saved", kept=True), {"weight": hidden}),
        "looked": (run(folder, "looked", look=3), {"weight": hidden}),
        "off": (run(folder, "off"), {"weight": hidden}),
        "last": (run(folder, "last", look=100), {"weight": (7, "layers.0.fc2.weight", INF)}),
        "nan": (run(folder, "nan"), {"gradient": {"2": NAN}}),
        "skips": (
            run(folder, "skips", kept=True).replace("[run]", SKIPS.format(3)),
            {"gradient": {"1": NAN, **{str(step): NAN for step in range(4, 8)}}},
        ),
        "for ever": (
            run(folder, "for_ever", look=1, kept=True).replace("[run]", SKIPS.format(0)),
            {"gradient": late},
        ),
        "unseen": (run(folder, "unseen", keep=9, kept=True), {"weight": hidden, "before": True}),
        "resumed": (run(folder, "unseen", keep=9, kept=True), {}),
        "huge": (
            run(folder, "huge").replace("[run]", "clip_norm = 1.0\n[run]"),
            {"gradient": {"4": 1e30}},
        ),
        "huge, by default": (run(folder, "default"), {"gradient": {"4": 1e30}}),
        "milestones": (
            run(folder, "milestones", kept=True).replace("every = 2", "every = 1\nkeep_every = 3"),
            {},
        ),
    }
    cases = []
    for name, (body, mishap) in bodies_of.items():
        path = folder / f"{name}.toml"
        path.write_text(body)
        options = ["--resume"] if name == "resumed" else []
        options += ["--steps", "6"] if name == "unseen" else []
        cases.append({"argv": [str(path), "--json", *options], **mishap})
    (folder / "said").mkdir()
    said = launch(1, folder / "said", bodies.in_turn, cases)
    return folder, dict(zip(bodies_of, said.words[0], strict=True))


def outcome(runs: tuple[Path, dict[str, Any]], name: str, code: int) -> dict[str, Any]:
    """What a run says in JSON, with this exit code."""
    found, out, err = runs[1][name]
    assert found == code, out + err
    read: dict[str, Any] = json.loads(out)
    return read


def kept(folder: Path, name: str) -> list[int]:
    """The checkpoints of a run, by step."""
    return sorted(number for number, _ in checkpoint_folders(folder / name))


def test_a_weight_that_is_not_finite_is_not_saved(runs: tuple[Path, dict[str, Any]]) -> None:
    """The losses hide it; the checkpoint before stays, and the run ends there."""
    found = outcome(runs, "saved", 1)
    assert (found["verdict"], found["step"], found["rank"]) == ("refused", 3, 0)
    assert len(found["losses"]) == 4
    assert None not in found["losses"]
    cause = found["cause"]
    assert (cause["kind"], cause["action"], cause["stage"]) == ("diverged", "save", 0)
    assert cause["text"].startswith(
        "rank 0, step 3, save: model.layers.0.fc1.weight of stage 0 is not finite in 1 of 2,048 "
    ), cause["text"]
    assert kept(runs[0], "saved") == [2]


def test_a_look_finds_a_weight_that_is_not_finite(runs: tuple[Path, dict[str, Any]]) -> None:
    """Every third step, without a checkpoint; and after the last step."""
    cause = outcome(runs, "looked", 1)["cause"]
    assert cause["text"].startswith("rank 0, step 5, look: model.layers.0.fc1.weight of stage 0 is")
    last = outcome(runs, "last", 1)
    assert last["cause"]["text"].startswith("rank 0, step 7, look: model.layers.0.fc2.weight")
    assert len(last["losses"]) == 8
    assert len(outcome(runs, "off", 0)["losses"]) == 8


def test_a_loss_that_is_not_finite_ends_the_run(runs: tuple[Path, dict[str, Any]]) -> None:
    """At its step, with what was measured until then."""
    found = outcome(runs, "nan", 1)
    assert found["cause"]["text"] == "rank 0, step 3, loss: the loss is not finite"
    assert found["losses"][3:] == [None]
    assert "step 3  NOT FINITE: the loss is nan" in runs[1]["nan"][2]


def test_skipped_updates_in_a_row_end_the_run(runs: tuple[Path, dict[str, Any]]) -> None:
    """Three are too many, one is not; the terminal says the first."""
    found = outcome(runs, "skips", 1)
    assert found["cause"]["text"] == (
        "rank 0, step 6, update: the norm of the gradients is not finite in stage 0, and the "
        "updates of steps 4 to 6 were skipped; [optimizer] stop_after_skips is 3"
    )
    assert (found["skipped"], len(found["losses"])) == (4, 7)
    assert runs[1]["skips"][2].count("SKIPPED: the norm of the gradients is nan") == 1
    assert "step 1  SKIPPED" in runs[1]["skips"][2]
    assert kept(runs[0], "skips") == [6]


def test_skips_may_go_on_for_ever(runs: tuple[Path, dict[str, Any]]) -> None:
    """With 0; a state that skipped is finite, and saved."""
    found = outcome(runs, "for ever", 0)
    assert (found["skipped"], len(found["losses"])) == (6, 8)
    assert kept(runs[0], "for_ever") == [8]


def test_a_checkpoint_of_before_is_looked_at(runs: tuple[Path, dict[str, Any]]) -> None:
    """If an earlier release saved a weight that is not finite, the resume reports it."""
    assert kept(runs[0], "unseen") == [2, 4, 6]
    assert outcome(runs, "unseen", 0)["losses"]
    cause = outcome(runs, "resumed", 1)["cause"]
    assert cause["text"].startswith("rank 0, step 5, load: model.layers.0.fc1.weight of stage 0 is")
    assert "the checkpoint has no hash of the whole file" in runs[1]["resumed"][2]


def test_saturated_and_all_zero_gradients_are_reported(
    runs: tuple[Path, dict[str, Any]],
) -> None:
    """One gradient of 1e30 is clipped, its scale makes the next ones zero; the log says both."""
    found = outcome(runs, "huge", 0)
    assert None not in found["losses"]
    body = (runs[0] / "huge.jsonl").read_text()
    lines = [line for line in map(json.loads, body.splitlines()) if "loss" in line]
    assert [line["step"] for line in lines if "saturated" in line] == [4]
    assert lines[4]["saturation"] > 1e28
    assert lines[4]["saturated"].endswith("backward.scale[0]")
    assert 10 < lines[4]["norm"] < 1e4
    assert all(0 <= line["saturation"] < 256 for line in lines if line["step"] != 4)
    (zero,) = (line for line in lines if "zero_stages" in line)
    assert (zero["step"], zero["norm"], zero["zero_stages"], zero["skipped"]) == (5, 0, [0], False)
    err = runs[1]["huge"][2]
    assert err.count("step 4  SATURATED: a gradient was ") == err.count("SATURATED") == 1
    assert (
        err.count("step 5  ALL ZERO: every gradient is zero in stage 0\n") == err.count("ZERO") == 1
    )


def test_a_run_without_a_norm_reports_them_too(runs: tuple[Path, dict[str, Any]]) -> None:
    """With the defaults of a training file; the log has no norm then."""
    outcome(runs, "huge, by default", 0)
    body = (runs[0] / "default.jsonl").read_text()
    lines = [line for line in map(json.loads, body.splitlines()) if "loss" in line]
    assert not any("norm" in line for line in lines)
    assert [line["step"] for line in lines if "saturated" in line] == [4]
    assert [(n["step"], n["zero_stages"]) for n in lines if "zero_stages" in n] == [(5, [0])]
    err = runs[1]["huge, by default"][2]
    assert err.count("step 4  SATURATED: a gradient was ") == 1
    assert err.count("step 5  ALL ZERO: every gradient is zero in stage 0\n") == 1


def test_milestones_stay(runs: tuple[Path, dict[str, Any]]) -> None:
    """Every third checkpoint, beside the newest one."""
    outcome(runs, "milestones", 0)
    assert kept(runs[0], "milestones") == [3, 6, 8]


def test_every_rank_ends_with_one_cause(tmp_path: Path) -> None:
    """The weight is on the second rank; the words are on the first. So it is for a save."""
    text(tmp_path)
    weight = {"weight": (2, "fc1.weight", INF), "rank": 1}
    cases = []
    for name, saves in (("two", False), ("saved", True)):
        body = run(tmp_path, name, look=2, kept=saves).replace("[parallel]", "[parallel]\npp = 2")
        path = tmp_path / f"{name}.toml"
        path.write_text(body.replace("keep = 1", "keep = 1\nasynchronous = true"))
        cases.append({"argv": [str(path)], **weight})
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.in_turn, cases)
    assert said.codes == [0, 0]
    assert [[code for code, *_ in said.words[rank]] for rank in range(2)] == [[1, 1], [1, 1]]
    assert kept(tmp_path, "saved") == [2]
    assert "rank 1, step 3, save: model.layers.1.fc1.weight" in said.words[0][1][1]
    assert f"The newest checkpoint is {tmp_path / 'saved' / 'step-00000002'}" in said.words[0][1][1]
    out = said.words[0][0][1]
    assert (
        "Every rank stopped: rank 1, step 3, look: model.layers.1.fc1.weight of stage 1 is not"
        in out
    )
    assert "There is no checkpoint to continue from" in out
    assert not said.words[1][0][1]


@pytest.mark.ci
def test_a_run_of_launches_ends_too(tmp_path: Path) -> None:
    """A step later, since the host is behind; with a look the host waits."""
    text(tmp_path)
    launches = run(tmp_path, "launches", look=3).replace("[parallel]", "[parallel]\npp = 2")
    launches = launches.replace("[parallel]", '[parallel]\nmode = "one launch"')
    cases: list[dict[str, Any]] = []
    late = {"gradient": {str(step): NAN for step in range(4, 8)}}
    for name, body, mishap in (
        ("look", launches, {"weight": (5, "layers.0.fc1.weight", INF), "rank": 1}),
        ("skips", launches.replace("[run]", SKIPS.format(2)), late),
        ("loss", launches, late),
        ("huge", launches.replace("[run]", "clip_norm = 1.0\n[run]"), {"gradient": {"4": 1e30}}),
        ("default", launches, {"gradient": {"4": 1e30}}),
    ):
        path = tmp_path / f"{name}.toml"
        path.write_text(body)
        cases.append({"argv": [str(path), "--json"], **mishap})
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.launched, cases)
    assert said.codes == [0, 0]
    found = []
    for n, (code, out, err) in enumerate(said.words[0]):
        assert code == said.words[1][n][0] == int(n < 3), out + err
        found.append(json.loads(out))
    look, skips, loss = (one["cause"]["text"] for one in found[:3])
    assert all(one["launches"] > 2 for one in found)
    assert look.startswith("rank 1, step 5, look: model.layers.1.fc1.weight of stage 1 is not")
    assert "not finite in stage 0, and the updates of steps 4 to 5 were skipped" in skips
    assert loss == "rank 1, step 5, loss: the loss is not finite"
    for *_, err in said.words[0][3:5]:
        assert "step 4  SATURATED: a gradient was " in err
        assert "step 5  ALL ZERO: every gradient is zero in stages 0, 1\n" in err


def test_the_price_of_a_look_is_printed(tmp_path: Path) -> None:
    """As ratios of times of one run, each above 0."""
    text(tmp_path)
    path = tmp_path / "priced.toml"
    path.write_text(run(tmp_path, "priced", look=50))
    (tmp_path / "said").mkdir()
    found = launch(1, tmp_path / "said", bodies.priced, str(path)).words[0]
    names = ["look / step", "look / sums of a save", "look / 50 steps"]
    names += ["scales / step", "zeros / step"]
    assert list(found) == names
    assert all(ratio > 0 for ratio in found.values())
    assert found["look / 50 steps"] == pytest.approx(found["look / step"] / 50)


class TestWatch:
    """Losses and skips, step by step."""

    SKIPPED = Norm(INF, 1.0, True)

    def test_counts_in_a_row(self) -> None:
        """An update between two skips begins the count again."""
        watch = UpdateWatch(2)
        for step, norm in enumerate([self.SKIPPED, None, self.SKIPPED]):
            watch.take(step, [[1.0]], norm)
        with pytest.raises(DivergedError, match="steps 2 to 3 were skipped") as ended:
            watch.take(3, [[1.0]], self.SKIPPED)
        assert (watch.skipped, watch.first, ended.value.step) == (3, 0, 3)
        assert isinstance(ended.value.cause, Cause)

    def test_names_the_rank_of_the_loss(self) -> None:
        """A skipped update's loss may be anything; another one's ends the run."""
        watch = UpdateWatch(0)
        for step in range(50):
            watch.take(step, [[0.0], [NAN]], self.SKIPPED)
        with pytest.raises(DivergedError, match=r"^rank 1, step 50, loss: "):
            watch.take(50, [[0.0], [INF]], Norm(1.0, 1.0, False))
