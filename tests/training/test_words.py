"""
What a run prints about itself: losses that are not finite, logs that end, and the checkpoint from
which a run resumed.
"""

from __future__ import annotations

import errno
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from qeffect.cli import main
from qeffect.cli.command import Exit
from qeffect.gpu_runtime.ranks.consent import Cause
from qeffect.gpu_runtime.ranks.processes import stopped_outcome
from qeffect.gpu_runtime.training.data import Loader, Tokens
from qeffect.gpu_runtime.training.figures import derive_train
from qeffect.gpu_runtime.training.metrics import Log
from qeffect.report import UnusableError
from qeffect.text import counted
from tests.ranks.ranks import launch

from . import language_bodies as bodies
from .helpers import CONFIG, language, noise, text


def strictly(body: str) -> Any:
    """Read JSON, and refuse the constants that the JSON standard lacks, such as NaN."""

    def refuse(word: str) -> Any:
        raise ValueError(word)

    return json.loads(body, parse_constant=refuse)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Runs of one process, one after the other: exit code and words of each."""
    folder = tmp_path_factory.mktemp("runs")
    text(folder)
    log = CONFIG + 'log = "{}"\n'
    kept = log.format("{}.jsonl") + '[checkpoint]\nfolder = "{}"\n'
    longer = kept.format("kept", "kept").replace("rate = 0.02", "rate = 0.01\nweight_decay = 0.5")
    made = {
        "nan": log.format("nan.jsonl").replace("rate = 0.02", "rate = 1e9\nweight_decay = 1e9"),
        "full": log.format("/dev/full"),
        "kept": kept.format("kept", "kept"),
        "longer": longer.replace("steps = 3", "steps = 5"),
        "again": longer.replace("steps = 3", "steps = 6"),
        "edited": kept.format("edited", "kept").replace("train.npy", "edited.npy"),
    }
    values = np.load(folder / "train.npy")
    values[len(values) // 2] ^= 1
    np.save(folder / "edited.npy", values)
    for name, body in made.items():
        (folder / f"{name}.toml").write_text(body)

    def case(name: str, *options: str) -> list[str]:
        return [str(folder / f"{name}.toml"), *options]

    cases = {
        "nan": case("nan", "--json", "--out", str(folder / "nan.json"), "--commit", "0" * 40),
        "nan in words": case("nan"),
        "full": case("full"),
        "kept": case("kept", "--json", "--quiet"),
        "past": case("kept", "--resume", "--out", str(folder / "no.json"), "--commit", "0" * 40),
        "edited": case("edited", "--resume", "--json", "--quiet"),
        "longer": case("longer", "--resume", "--adopt"),
        "again": case("again", "--resume", "--quiet"),
    }
    (folder / "said").mkdir()
    said = launch(1, folder / "said", bodies.in_turn, list(cases.values()))
    return folder, dict(zip(cases, said.words[0], strict=True))


def test_a_run_that_diverges_is_reported(runs: tuple[Path, dict[str, Any]]) -> None:
    """Null in every JSON, in words on the terminal; the report is there."""
    folder, said = runs
    code, out, err = said["nan"]
    assert code == 1, err
    losses = strictly(out)["losses"]
    assert None in losses
    assert strictly((folder / "nan.json").read_text())["derived"]["runs"][0]["last_loss"] is None
    logged = [strictly(line) for line in (folder / "nan.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in logged if "loss" in line][: len(losses)] == losses
    assert f"step {losses.index(None)}  NOT FINITE: the loss is" in err
    odd = counted(losses.count(None), "step")
    assert f"NOT FINITE: the loss of {odd}; first in step " in said["nan in words"][1]


def test_a_log_that_cannot_be_written_ends(runs: tuple[Path, dict[str, Any]]) -> None:
    """The failure is reported once, training continues, and the last lines of output repeat the
    report."""
    code, out, err = runs[1]["full"]
    assert code == 0, err
    assert "in the last" in out
    assert "the log is incomplete: [run] log: /dev/full: No space left" in out
    assert err.count("NOT LOGGED from here on") == 1


def test_a_run_with_no_step_left_says_so(runs: tuple[Path, dict[str, Any]]) -> None:
    """Exit code 0, a line, and a report of 0 steps."""
    folder, said = runs
    code, out, err = said["past"]
    assert code == 0, err
    assert "nothing to train: the checkpoint already has 3 steps, [run] steps is 3" in out
    (run,) = json.loads((folder / "no.json").read_text())["derived"]["runs"]
    assert (run["steps"], run["first_loss"], run["last_loss"]) == (0, None, None)


def test_a_corpus_changed_in_its_middle_is_refused(runs: tuple[Path, dict[str, Any]]) -> None:
    """As many tokens, the same ends, another file: one line, and exit code 2."""
    code, out, err = runs[1]["edited"]
    assert code == 2
    (line,) = err.splitlines() or [out]
    assert "edited.npy: expected sha256 " in line
    assert "training would continue with different windows" in line


def test_what_differs_from_the_checkpoint_is_told(runs: tuple[Path, dict[str, Any]]) -> None:
    """Each field with both values in a line, and in the log; the rate keeps its curve."""
    folder, said = runs
    code, _, err = said["longer"]
    assert code == 0, err
    told = [
        line.split(": ", 1)[1]
        for line in err.splitlines()
        if line.startswith("compared with step-")
    ]
    changed = [
        "[optimizer] rate was 0.02, is 0.01",
        "[optimizer] weight_decay was 0.01, is 0.5",
        "[run] steps was 3, is 5",
    ]
    assert told == changed
    assert said["again"][0] == 0
    logged = [json.loads(line) for line in (folder / "kept.jsonl").read_text().splitlines()]
    notes = [line["changed"] for line in logged if "changed" in line]
    assert notes == [[], changed, ["[run] steps was 5, is 6"]]
    # The curve of 3 steps is at its end; one of 5 or 6 steps would not be.
    at_end = torch.tensor(1e-4).item()  # a rate is a number of float32
    rates = [line["rate"] for line in logged if line.get("step", 0) > 2 and "loss" in line]
    assert rates == [at_end] * 3


@pytest.mark.parametrize("kind", ["refused", "dropped", "disagreed", "diverged"])
def test_a_violation_is_1(kind: str) -> None:
    """What the contract or its ranks found wrong."""
    outcome = stopped_outcome(Cause(kind, 0, None, None, None, "why", True), "what")
    assert (outcome.exit, outcome.verdict) == (Exit.VIOLATION, "refused")


@pytest.mark.parametrize("kind", ["raised", "gone", "late", "ended", "lost"])
def test_what_is_no_violation_is_2(kind: str) -> None:
    """A signal, a full disk, a number that overflows, a process that ended."""
    outcome = stopped_outcome(Cause(kind, 1, None, None, None, "why", True), "what")
    assert (outcome.exit, outcome.verdict) == (Exit.UNUSABLE, "unusable")
    assert outcome.record()["cause"]["rank"] == 1
    assert "why" in outcome.text[1]


def test_a_log_keeps_every_note(tmp_path: Path) -> None:
    """What must not be missed does not go where lines are dropped."""
    shown: list[str] = []
    noted: list[str] = []
    log = Log(tmp_path / "log", None, shown.append, noted.append)
    log({"step": 1, "not_saved": "why"})
    log({"step": 2, "loss": math.inf, "rate": 1.0, "tokens_per_s": 1.0, "step_ms": 1.0})
    log._end(OSError(errno.ENOSPC, "full"))
    log({"step": 3})
    log.close()
    assert [line.split(":")[0] for line in noted] == [
        "step 1  NOT SAVED",
        "step 2  NOT FINITE",
        "NOT LOGGED from here on",
    ]
    assert len(shown) == 1
    assert [strictly(line)["step"] for line in (tmp_path / "log").read_text().splitlines()] == [
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("left", "stays"),
    [
        ('{"step": 1}\n{"step": 2, "lo', '{"step": 1}\n'),
        ('{"step"', ""),
        ('{"step": 1, "digests": [["' + "0" * 200_000, ""),
        ('{"step": 1}', '{"step": 1}\n'),
        ('{"step": 1}\n', '{"step": 1}\n'),
        ('{"a note": "of mine"}\nand more', '{"a note": "of mine"}\nand more\n'),
        ("", ""),
    ],
)
def test_a_line_that_a_killed_run_left_unfinished_is_removed(
    tmp_path: Path, left: str, stays: str
) -> None:
    """The next run appends behind a whole line; what no run wrote is not touched."""
    path = tmp_path / "log.jsonl"
    path.write_text(left)
    log = Log(path, None, lambda _: None)
    log({"step": 3})
    log.close()
    assert path.read_text() == stays + '{"step": 3}\n'


@pytest.mark.parametrize(
    "content", [b"\x93NUMPY\x01\x00v", b"[model]\nlayers = 2\n", b"PK\x03\x04"]
)
def test_only_a_log_is_appended_to(tmp_path: Path, content: bytes) -> None:
    """A token file, a training file or weights under the name of the log stay as they are."""
    path = tmp_path / "train.npy"
    path.write_bytes(content)
    with pytest.raises(
        UnusableError, match=r"train\.npy: expected a new file, or a log of JSON lines"
    ):
        Log(path, None, lambda _: None)
    assert path.read_bytes() == content


STEP: dict[str, Any] = {
    "step": 7,
    "loss": 2.5,
    "rate": 0.003,
    "tokens": 99,
    "tokens_per_s": 12345.6,
    "step_ms": 20.04,
    "seconds_left": 3723.4,
    "memory_bytes": 5,
}


def test_the_terminal_shows_a_step_in_one_line() -> None:
    """Norm and skipped updates too, if the run has a norm."""
    shown: list[str] = []
    log = Log(None, None, shown.append)
    log(STEP)
    log({**STEP, "norm": 1.23456, "skipped": False, "skipped_updates": 2})
    assert shown == [
        "step 7  loss 2.5000  rate 0.003  12,346 tokens/s  20.0 ms  1:02:03 left",
        "step 7  loss 2.5000  rate 0.003  norm 1.23  12,346 tokens/s  20.0 ms  2 skipped  "
        "1:02:03 left",
    ]
    assert all(len(line) < 100 for line in shown)


def test_tensorboard_has_what_the_terminal_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number of the line, at its step."""
    written: dict[str, tuple[float, int]] = {}

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path / "board")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written[name] = value, step

        def close(self) -> None:
            written["closed"] = 1, 7

    module = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = Log(None, tmp_path / "board", lambda _: None)
    line = {**STEP, "norm": 1.5, "skipped": False, "skipped_updates": 2}
    log(line)
    log.close()
    assert written == {
        **{name: (line[name], 7) for name in line if name not in ("step", "skipped")},
        "closed": (1, 7),
    }


@pytest.mark.ci
def test_tensorboards_own_reader_reads_what_was_logged(tmp_path: Path) -> None:
    """A real event file, written by the real package: every number of both steps."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = Log(None, tmp_path / "board", lambda _: None)
    lines = [
        {**STEP, "norm": 1.5, "skipped_updates": 0},
        {**STEP, "step": 8, "loss": 0.25, "norm": 0.0, "skipped_updates": 2},
    ]
    for line in lines:
        log(line)
    log.close()
    read = accumulator.EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    found = {
        name: [(one.step, one.value) for one in read.Scalars(name)]
        for name in read.Tags()["scalars"]
    }
    assert found == {
        name: [(line["step"], pytest.approx(line[name])) for line in lines]
        for name in lines[0]
        if name != "step"
    }


def test_a_perplexity_that_no_float_holds() -> None:
    """Null, as what is not finite is."""
    run = {
        "how": "train", "schedule": "zbv", "losses": [1.0, None], "native_losses": None,
        "held_out": [[2, 800.0]], "seconds": 1.0, "native_seconds": None, "tokens_a_step": 1,
        "compared": None, "differ": None,
    }  # fmt: skip
    (found,) = derive_train({"runs": [run]})["runs"]
    assert (found["held_out_loss"], found["perplexity"]) == (800.0, None)
    assert (found["first_loss"], found["last_loss"]) == (1.0, None)


def test_every_held_out_window_counts_once(tmp_path: Path) -> None:
    """Windows that fill no whole microbatch weigh as others do: the mean of them one by one."""
    job = language(noise(tmp_path), schedule="1f1b", pp=1, microbatches=2)
    batch = attrs.evolve(job, config=attrs.evolve(job.config, batch=4))
    (tmp_path / "apart").mkdir()
    tokens = Tokens.open(noise(tmp_path / "apart", count=16 * 6 + 1), vocabulary=64, sequence=16)
    held_out = Loader(tokens=tokens, sequence=16, shuffle=False)
    (tmp_path / "said").mkdir()
    said = launch(1, tmp_path / "said", bodies.held_out, [job, batch], held_out)
    one_by_one, by_four = said.words[0]
    assert len({round(loss, 6) for loss in one_by_one[:-1]}) == 6
    assert by_four[-1] == pytest.approx(one_by_one[-1], rel=1e-5)


def test_bytes_have_no_vocabulary_to_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused, not left out silently."""
    argv = ["--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--vocabulary", "1024"]
    assert main(["runtime", "corpus", *argv]) == 2
    assert "--vocabulary 1024 given, but" in capsys.readouterr().err
