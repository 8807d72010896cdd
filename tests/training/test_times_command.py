"""`qeffect runtime times`: parts of a model are measured, and groups for one product compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from qeffect.cli import main
from qeffect.gpu_runtime.training import times_command
from qeffect.gpu_runtime.training.balance import Times
from qeffect.schedule.durations import read_durations

from .helpers import SMALL, text

RUN = (
    SMALL.format(vocabulary=128, layers=8).rstrip()
    + """
scales = "epoch"
[parallel]
pp = 2
schedule = "zbv"
microbatches = 4
cut = "measured"
[data]
train = "train.npy"
"""
)
PARTS = Times((0, 1, 0), (1, 1, 1), (2, 1, 1), {2: (0, 1.25, 1.5), 4: (0, 1.5, 1.5)})
"""One product of four microbatches takes 1.5 layers' dW instead of 4."""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of eight layers, whose parts take known times."""
    text(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = Path("run.toml")
    path.write_text(RUN)

    def given(*_: object, groups: Any, **__: object) -> Times:
        return attrs.evolve(PARTS, products={group: PARTS.products[group] for group in groups})

    monkeypatch.setattr(times_command, "measure_times", given)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    for name in times_command.DETERMINISTIC:
        monkeypatch.setenv(name, "0")
    return path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The outcome as JSON."""
    assert main(["runtime", "times", *words, "--json", "--quiet"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_fastest_group_is_proposed(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The stages are cut by the same times, and every power of two is compared."""
    found = told(capsys, str(run_file))
    assert found["cut"] == [2, 2, 3, 1]
    assert [one["group"] for one in found["groups"]] == [1, 2, 4]
    assert found["fastest_group"] == 4
    over = [one["over_group_1"] for one in found["groups"]]
    assert over == sorted(over, reverse=True)
    assert over[-1] < 0.9
    assert main(["runtime", "times", str(run_file), "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ms", "F", "dI", "dW", "dW", "of", "2", "dW", "of", "4"]
    assert lines[2].split() == ["layer", "1", "1", "1", "1.25", "1.5"]
    assert "fastest: group 4" in lines
    assert lines[-1] == "[model] wgrad_group is 1; set it to 4"


def test_a_file_with_the_fastest_group_stays(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is proposed that the file has already."""
    run_file.write_text(RUN.replace('"epoch"\n', '"epoch"\nwgrad_group = 4\n'))
    assert main(["runtime", "times", str(run_file), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "fastest: group 4" in out
    assert "set it to" not in out


def test_the_written_file_gives_the_same_step(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`qeffect plan` reads it, and simulates the same step for every group."""
    out = tmp_path / "durations.json"
    found = told(capsys, str(run_file), "--out", str(out))
    durations = read_durations(out)
    assert [durations.product(stage, 4) for stage in range(4)] == [3.0, 3.0, 4.5, 3.0]
    torch_class = ["--torch", "ScheduleZBVZeroBubble", "--pp", "2", "--vpp", "2", "--comms"]
    words = ["plan", *torch_class, "--durations", str(out), "--json", "--quiet"]
    assert main([*words, "--wgrad-group", "2", "--wgrad-group", "4"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["groups"] == found["groups"]
    assert planned["fastest_group"] == 4


def test_scales_that_move_at_every_action_allow_no_group(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The times of group 1 are measured, and the reason is said."""
    run_file.write_text(RUN.replace('scales = "epoch"', ""))
    found = told(capsys, str(run_file))
    assert ([one["group"] for one in found["groups"]], found["fastest_group"]) == ([1], None)
    assert main(["runtime", "times", str(run_file), "--quiet"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("only group 1 was measured: run.toml: [model] wgrad_group: expected")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--groups", "3"), "--groups: group: expected a divisor of the 4 microbatches of the"),
        (("--groups", "0"), "--groups: group: expected a divisor of the 4 microbatches of the"),
        (("--out", "nowhere/d.json"), "there is no folder nowhere"),
        (("--device", "cuda"), "expected a GPU that torch can use, found none; give --device cpu"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    words: tuple[str, ...],
    said: str,
    run_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is measured, with exit code 2."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delattr(times_command, "measure_times")
    assert main(["runtime", "times", str(run_file), "--quiet", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_group_that_the_file_does_not_allow_is_refused(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the user asks for it by name."""
    run_file.write_text(RUN.replace('scales = "epoch"', ""))
    assert main(["runtime", "times", str(run_file), "--quiet", "--groups", "2"]) == 2
    assert "[model] wgrad_group: expected scales = 'epoch'" in capsys.readouterr().err


def test_a_failed_measurement_is_one_line(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as memory that does not suffice for the slots of a group."""

    def fails(*_: object, **__: object) -> Times:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(times_command, "measure_times", fails)
    assert main(["runtime", "times", str(run_file), "--quiet"]) == 2
    assert capsys.readouterr().err == "qeffect: run.toml: cannot measure: out of memory\n"


def test_several_processes_are_refused(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process measures one device."""
    monkeypatch.setattr(times_command, "process_count", lambda: 2)
    assert main(["runtime", "times", str(run_file), "--quiet"]) == 2
    assert "start it without torchrun" in capsys.readouterr().err
