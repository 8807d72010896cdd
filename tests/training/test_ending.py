"""A run that receives a request to end finishes its step, saves, and reports what ended it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qeffect.gpu_runtime.training import ending
from qeffect.gpu_runtime.training.checkpoint.status import STATUS, write_status
from tests.ranks.rank_logs import replayed_run
from tests.ranks.ranks import launch

from . import ending_bodies as bodies
from .helpers import CONFIG, text

SAVED = '[checkpoint]\nfolder = "kept"\n'
LOGGED = 'steps = 100000\nevent_logs = "logs"'
TWO = CONFIG.replace("[parallel]", "[parallel]\npp = 2").replace("steps = 3", "steps = 40")


def ended(folder: Path, body: str, ranks: int, *args: Any, cases: int = 1) -> list[dict[str, Any]]:
    """A run of the command, then resumed runs of it; each one's code and report."""
    text(folder)
    (folder / "run.toml").write_text(body)
    (folder / "said").mkdir()
    run = [str(folder / "run.toml"), "--json", "--quiet"]
    found = launch(
        ranks, folder / "said", bodies.signalled, [run, [*run, "--resume"]][:cases], *args
    )
    assert found.codes == [0] * ranks
    codes = [[code for code, *_ in found.words[rank]] for rank in range(ranks)]
    assert all(one == codes[0] for one in codes), codes
    return [{"exit": code, **json.loads(out or "{}")} for code, out, _ in found.words[0]]


def status(folder: Path) -> dict[str, Any]:
    """The status file."""
    found: dict[str, Any] = json.loads((folder / "kept" / STATUS).read_text())
    return found


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_one_signalled_rank_ends_all_after_one_step(tmp_path: Path, name: str) -> None:
    """The consent of the step carries the request; no other collective does."""
    (said,) = ended(tmp_path, TWO + SAVED, 2, {1: [(4, name)]})
    assert (said["exit"], said["steps"], said["ended_by"]) == (0, 5, name)
    assert len(said["losses"]) == 5
    told = status(tmp_path)
    assert (told["state"], told["ended_by"], told["resume"]) == ("ended", name, True)
    assert (told["checkpoint"], told["step"], told["steps"]) == ("step-00000005", 5, 40)
    assert told["run"]


def test_a_run_that_was_ended_resumes_to_the_undisturbed_end(tmp_path: Path) -> None:
    """The resumed run has the losses of a run that nothing ended."""
    body = TWO.replace("steps = 40", "steps = 6")
    first, then = ended(tmp_path, body + SAVED, 2, {0: [(2, "SIGTERM")]},
                        cases=2)  # fmt: skip
    assert (first["exit"], first["steps"], then["exit"]) == (0, 3, 0)
    assert (then["began"], then["steps"], then["ended_by"]) == (3, 6, "steps")
    told = status(tmp_path)
    assert (told["ended_by"], told["resume"], told["checkpoint"]) == (
        "steps",
        False,
        "step-00000006",
    )
    whole = tmp_path / "whole"
    whole.mkdir()
    (undisturbed,) = ended(whole, body, 2, {})
    assert first["losses"] + then["losses"] == undisturbed["losses"]


def test_launches_end_at_an_eighth_step(tmp_path: Path) -> None:
    """Their hosts exchange the request every eighth step, and wait for no launch between."""
    body = TWO.replace("pp = 2", 'pp = 2\nmode = "one launch"') + "log_every = 40\n"
    (said,) = ended(tmp_path, body + SAVED, 2, {1: [(4, "SIGTERM")]}, True)
    assert (said["exit"], said["steps"], said["ended_by"]) == (0, 8, "SIGTERM")
    assert said["launches"] == 7
    assert len(said["losses"]) == 8
    assert status(tmp_path)["checkpoint"] == "step-00000008"


def test_a_run_without_checkpoints_ends_too(tmp_path: Path) -> None:
    """Time is up before the first step ends; that step counts."""
    (said,) = ended(tmp_path, CONFIG + "max_seconds = 0.000001\n", 1, {})
    assert (said["exit"], said["steps"], said["ended_by"]) == (0, 1, "max_seconds")


def test_the_last_line_says_what_ended_the_run(tmp_path: Path) -> None:
    """And how to continue, or that nothing was saved."""
    text(tmp_path)
    runs = []
    for name, saves in (("saved", SAVED), ("lost", "")):
        (tmp_path / name).write_text(CONFIG + "max_seconds = 0.000001\n" + saves)
        runs.append([str(tmp_path / name), "--quiet"])
    (tmp_path / "said").mkdir()
    found = launch(1, tmp_path / "said", bodies.signalled, runs, {})
    last = [out.splitlines()[-1] for _, out, _ in found.words[0]]
    early = "Ended by max_seconds after 1 step of 3; "
    assert last == [
        f"{early}saved step-00000001: continue with --resume",
        f"{early}nothing was saved, because [checkpoint] folder is empty",
    ]


def test_a_second_sigterm_ends_the_process_at_once(tmp_path: Path) -> None:
    """Between two steps, by the signal itself; nothing is saved, and the status says running."""
    text(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG + SAVED)
    (tmp_path / "said").mkdir()
    twice = {0: [(1, "SIGTERM"), (1, "SIGTERM")]}
    run = [str(tmp_path / "run.toml"), "--quiet"]
    found = launch(1, tmp_path / "said", bodies.signalled, [run], twice)
    assert found.codes == [-15]
    assert status(tmp_path)["state"] == "running"
    assert not list((tmp_path / "kept").glob("step-*"))


class Fake:
    """A worker whose step does not end."""

    def __init__(self) -> None:
        self.consent = self.runtime = self.member = self.waits = self
        self.epoch, self.in_step, self.claimed = 3, True, False
        self.rank, self.world = 0, 2
        self.place: tuple[str, int] | None = ("0RECV_B1", 1)
        self.told: list[tuple[str, int, str]] = []

    def publish(self, error: Exception, epoch: int, at: str, *, seconds: float) -> None:
        """Note what another rank would read."""
        assert seconds == ending._PUBLISH_S
        self.told.append((str(error), epoch, at))


@pytest.mark.parametrize(
    ("change", "published", "woken", "plans"),
    [
        ({}, True, True, 1),  # if the main thread does not come back
        ({"epoch": 4}, False, False, 1),  # a look at the next step
        ({"claimed": True}, False, False, 0),
        ({"doing": "checkpoint"}, False, False, 1),
        ({"in_step": False}, True, False, 0),
    ],
    ids=["in the step", "the next step", "stopping already", "a save", "between two steps"],
)
def test_a_step_that_sigterm_finds_and_that_does_not_end_is_stopped(
    change: dict[str, Any],
    published: bool,
    woken: bool,
    plans: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that has gone on, that stops already, or that saves, is left alone for now."""
    fake, acts = Fake(), []
    request = ending.EndRequest(fake, 0.0, 0.0)  # type: ignore[arg-type]
    monkeypatch.setattr(request, "_wake_main", lambda: acts.append("wake"))
    monkeypatch.setattr(request, "_end_aside", lambda: acts.append("end"))
    place = request._place()
    for name, value in change.items():
        setattr(request if name == "doing" else fake, name, value)
    request._end_stuck(place)
    said = "0RECV_B1 with rank 1 did not end within 0 s of SIGTERM"
    assert fake.told == ([(said, 3, "step")] if published else [])
    assert acts == (["wake"] if woken else ["end"] if published else [])
    assert len(request._plans) == plans


def test_a_step_behind_the_one_that_sigterm_found_is_stopped_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step that SIGTERM found ended; the peer hangs in the next one."""
    fake, acts = Fake(), []
    request = ending.EndRequest(fake, 0.0, 0.0)  # type: ignore[arg-type]
    monkeypatch.setattr(request, "_wake_main", lambda: acts.append("wake"))
    place = request._place()
    fake.epoch += 1
    request._end_stuck(place)
    assert acts == []
    ((_, look),) = request._plans
    look()
    assert acts == ["wake"]
    assert [(epoch, at) for _, epoch, at in fake.told] == [(4, "step")]


def test_an_interrupt_is_told_in_the_status_file(tmp_path: Path) -> None:
    """Nothing is saved; the run may be resumed from what was saved before."""
    text(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG + SAVED + "every = 1\n")
    (tmp_path / "said").mkdir()
    run = [str(tmp_path / "run.toml"), "--quiet"]
    found = launch(1, tmp_path / "said", bodies.signalled, [run], {0: [(2, "SIGINT")]})
    ((code, _, err),) = found.words[0]
    assert code == 130
    newest = "Resume it with --resume; the newest checkpoint is step-00000002"
    assert err.splitlines()[-1] == f"qeffect: interrupted. {newest}"
    told = status(tmp_path)
    assert (told["state"], told["ended_by"], told["resume"]) == ("ended", "SIGINT", True)
    assert (told["step"], told["checkpoint"]) == (2, "step-00000002")


def test_a_failed_asynchronous_save_is_told_at_the_next_step(tmp_path: Path) -> None:
    """Once, with the path and the checkpoint that stays; not one period later."""
    text(tmp_path)
    body = CONFIG.replace("steps = 3", 'steps = 6\nlog = "log.jsonl"')
    (tmp_path / "run.toml").write_text(body + SAVED + "every = 2\nkeep = 9\nasynchronous = true\n")
    (tmp_path / "said").mkdir()
    found = launch(1, tmp_path / "said", bodies.failing, [[str(tmp_path / "run.toml"), "--quiet"]])
    assert [code for code, *_ in found.words[0]] == [0], found.words
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    ((step, told),) = [(line["step"], line["not_saved"]) for line in lines if "not_saved" in line]
    assert step == 2
    assert "step-00000002 was not saved: rank 0: " in told
    assert "No space left on device" in told
    assert sorted(p.name for p in (tmp_path / "kept").glob("step-*")) == [
        "step-00000004",
        "step-00000006",
    ]


@pytest.mark.ci
def test_torchruns_sigterm_saves_and_ends_its_ranks(tmp_path: Path) -> None:
    """It forwards the signal; its own code is its own, the status file has the ranks' end."""
    text(tmp_path)
    (tmp_path / "run.toml").write_text(TWO.replace("steps = 40", LOGGED) + SAVED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    with (tmp_path / "out.txt").open("wb") as out:
        agent = subprocess.Popen(
            [*command, "2", "-m", "qeffect", "runtime", "train", str(tmp_path / "run.toml")],
            stdout=out,
            stderr=out,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        until = time.monotonic() + 60.0
        while b"loss" not in (tmp_path / "out.txt").read_bytes():
            assert time.monotonic() < until, (tmp_path / "out.txt").read_text()
            time.sleep(0.05)
        agent.terminate()
        agent.wait(timeout=40)
    finally:
        agent.kill()
        agent.wait()
    said, told = (tmp_path / "out.txt").read_text(), status(tmp_path)
    assert (told["state"], told["ended_by"], told["resume"]) == ("ended", "SIGTERM", True), said
    assert (tmp_path / "kept" / told["checkpoint"]).is_dir()
    assert f"Ended by SIGTERM after {told['step']} steps of 100000; saved" in said
    report = replayed_run(tmp_path / "logs")
    assert (report.commits, report.checkpoints) == (2 * told["step"], 1)


def test_a_status_file_is_replaced_whole_or_not(tmp_path: Path) -> None:
    """What stands in the way of the new file leaves the old one."""
    assert write_status(tmp_path, {"state": "running"}) == ""
    (tmp_path / f".{STATUS}").mkdir()
    assert "status.json cannot be written: Is a directory" in write_status(tmp_path, {"state": "x"})
    assert json.loads((tmp_path / STATUS).read_text()) == {"state": "running"}


def test_on_a_full_disk_the_status_is_written_over_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second file has room; the file that is there has some."""
    assert write_status(tmp_path, {"state": "running", "cause": "x" * 200}) == ""
    real = Path.open

    def full(path: Path, mode: str = "r", *args: Any, **named: Any) -> Any:
        if mode == "wb":
            raise OSError(28, "No space left on device")
        return real(path, mode, *args, **named)

    monkeypatch.setattr(Path, "open", full)
    assert write_status(tmp_path, {"state": "ended"}) == ""
    assert json.loads((tmp_path / STATUS).read_text()) == {"state": "ended"}
    (tmp_path / STATUS).unlink()
    assert "cannot be written: No space left" in write_status(tmp_path, {"state": "ended"})
