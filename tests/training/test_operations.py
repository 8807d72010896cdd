"""An unattended run: only one run in a folder, its own checkpoints, and its launcher."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from qeffect.cli import main
from qeffect.cli.interrupts import descendants
from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.ranks.causes import TerminatedError
from qeffect.gpu_runtime.ranks.torchrun_agent import TorchrunAgent, shared_store_warning
from qeffect.gpu_runtime.training.checkpoint import Checkpoints
from qeffect.gpu_runtime.training.checkpoint.files import FACTS, MANIFEST, canonical, run_of
from qeffect.gpu_runtime.training.checkpoint.lock import LOCK, FolderLock
from qeffect.gpu_runtime.training.checkpoint.status import STATUS
from qeffect.launched import may_be_launcher
from tests.cli.test_interrupts import alive
from tests.ranks.ranks import launch

from . import language_bodies as bodies
from .helpers import CONFIG, text

RUN = CONFIG + '[checkpoint]\nfolder = "kept"\nevery = 1\n'
WORDS = ["--json", "--quiet"]


def run_file(folder: Path, name: str = "run.toml", body: str = RUN) -> str:
    """A run of three steps and three checkpoints, in one process."""
    if not (folder / "train.npy").exists():
        text(folder)
    (folder / name).write_text(body)
    return str(folder / name)


def said(folder: Path, *cases: list[str]) -> list[tuple[int, str, str]]:
    """The commands' exit codes and what they said, one after the other in one process."""
    words = folder / f"said{len(list(folder.glob('said*')))}"
    words.mkdir()
    found = launch(1, words, bodies.in_turn, [[*case, *WORDS] for case in cases])
    assert found.codes == [0]
    told: list[tuple[int, str, str]] = [tuple(one) for one in found.words[0]]
    return told


def names(folder: Path) -> list[str]:
    """The checkpoints of a folder."""
    return sorted(path.name for path in folder.glob("step-*"))


# One run in a folder


def test_a_second_run_in_a_folder_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    """The message names the process that holds the folder; once it is gone, the run begins."""
    run = run_file(tmp_path)
    held = FolderLock(tmp_path / "kept")
    held.say(run="run-one")
    before = (tmp_path / "kept" / LOCK).read_text()
    ((code, out, err),) = said(tmp_path, [run, "--resume"])
    held.release()
    assert code == 2
    (line,) = err.splitlines() or [out]
    assert "[checkpoint] folder" in line
    assert f"is in use by process {os.getpid()} on " in line
    assert "of run run-one, since " in line
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [LOCK]
    assert (tmp_path / "kept" / LOCK).read_text() == before
    ((code, _, err),) = said(tmp_path, [run, "--resume"])
    assert code == 0, err
    assert len(names(tmp_path / "kept")) == 3


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    """However the process ends; what it wrote about itself stays and locks nothing."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        held = FolderLock(tmp_path)
        os.write(told, b"1")
        signal.pause()
        held.release()
        os._exit(0)
    os.read(ready, 1)
    with pytest.raises(BackendError, match=f"in use by process {child} on "):
        FolderLock(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    FolderLock(tmp_path).release()


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is not refused: some file systems have no locks."""

    def flock(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    assert "cannot be locked: No locks available" in FolderLock(tmp_path).problem


def test_a_folder_that_was_moved_away_is_locked_again(tmp_path: Path) -> None:
    """The owner locks the new folder before it saves there; a run that was first keeps it."""
    folder = tmp_path / "kept"
    held = FolderLock(folder)
    held.require()
    assert not held.lost()
    folder.rename(tmp_path / "away")
    assert not held.lost()  # nobody has made a new one
    held.require()
    with pytest.raises(BackendError, match=f"in use by process {os.getpid()} on "):
        FolderLock(folder)
    (folder / LOCK).unlink()
    other = FolderLock(folder)
    assert held.lost()
    with pytest.raises(BackendError, match=f"{folder} is in use by process {os.getpid()} on "):
        held.require()
    other.release()
    held.require()
    assert not held.lost()
    held.release()


def test_a_run_whose_folder_another_run_took_saves_nothing_there(tmp_path: Path) -> None:
    """It goes on without a save, says why, and leaves the other run's status alone."""
    body = RUN.replace("steps = 3", 'steps = 4\nlog = "log.jsonl"')
    run = run_file(tmp_path, body=body)
    (tmp_path / "said").mkdir()
    found = launch(1, tmp_path / "said", bodies.moved, [run, *WORDS])
    ((code, out, err),) = found.words[0]
    assert code == 2
    assert "kept is in use by process " in json.loads(out)["error"], err
    assert names(tmp_path / "kept") == []
    assert names(tmp_path / "away") == ["step-00000001"]
    assert (tmp_path / "kept" / STATUS).read_text() == "the other run's"
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "not_saved" in line] == [1, 2]


def test_a_start_that_fails_is_told_in_the_status_file(tmp_path: Path) -> None:
    """What ended the run before it does not stand there any more."""
    run = run_file(tmp_path)
    assert said(tmp_path, [run, "--steps", "2"])[0][0] == 0
    status = tmp_path / "kept" / STATUS
    told = json.loads(status.read_text())
    assert (told["ended_by"], told["resume"]) == ("steps", False)
    status.write_text(json.dumps({**told, "ended_by": "max_seconds", "resume": True}))
    facts = tmp_path / "kept" / "step-00000002" / "facts.json"
    facts.write_bytes(facts.read_bytes() + b" ")
    ((code, out, _),) = said(tmp_path, [run, "--resume"])
    assert code == 2
    told = json.loads(status.read_text())
    assert (told["state"], told["ended_by"], told["resume"]) == ("ended", "error", False)
    assert told["cause"] in json.loads(out)["error"]
    assert "facts.json has " in told["cause"]


def test_what_a_killed_save_left_is_removed_at_the_start(tmp_path: Path) -> None:
    """The run that holds the lock owns the folder; a run with no step left removes it too."""
    run = run_file(tmp_path)
    assert said(tmp_path, [run])[0][0] == 0
    left = tmp_path / "kept" / ".partial-step-00000009"
    left.mkdir()
    (left / "__0_0.distcp").write_text("half")
    ((code, _, err),) = said(tmp_path, [run, "--resume"])
    assert code == 0, err
    assert not left.exists()


# Event logs


LOGGED = RUN.replace("steps = 3", 'steps = 2\nevent_logs = "events"')


def contents(folder: Path) -> dict[str, bytes]:
    """The event logs of a folder."""
    return {path.name: path.read_bytes() for path in folder.glob("rank0*.jsonl")
            if not path.name.endswith(".ranks.jsonl")}  # fmt: skip


def test_a_run_that_resumes_keeps_the_event_logs_before_it(tmp_path: Path) -> None:
    """In folders of their own; both logs can be replayed."""
    run, events = run_file(tmp_path, body=LOGGED), tmp_path / "events"
    assert said(tmp_path, [run])[0][0] == 0
    first = contents(events)
    ((code, _, err),) = said(tmp_path, [run, "--resume", "--steps", "4"])
    assert code == 0, err
    assert contents(events / "before-0001") == first
    ((code, _, err),) = said(tmp_path, [run, "--resume", "--steps", "5"])
    assert code == 0, err
    assert contents(events / "before-0001") == first
    for folder in (events, events / "before-0001", events / "before-0002"):
        assert main(["replay", *map(str, folder.glob("rank*.jsonl"))]) == 0


def test_of_event_logs_with_a_limit_one_earlier_log_stays(tmp_path: Path) -> None:
    """Restarts do not fill the disk."""
    body = LOGGED.replace("[checkpoint]", "event_log_steps = 1\nevent_log_keep = 2\n[checkpoint]")
    run, events = run_file(tmp_path, body=body), tmp_path / "events"
    (events / "before-0007").mkdir(parents=True)
    (events / "before-0007" / "mine.txt").touch()
    for steps in ("2", "4", "6"):
        ((code, _, err),) = said(tmp_path, [run, "--resume", "--steps", steps])
        assert code == 0, err
    found = sorted(path.name for path in events.iterdir() if path.is_dir())
    assert found == ["before-0007", "before-0009"]
    assert len(contents(events / "before-0009")) == 2


@pytest.mark.ci
def test_rank_logs_rotate_as_event_logs_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank log per file of steps; the newest stay, and replay with the event logs beside."""
    setting = "event_log_steps = 2\nevent_log_keep = 2\n[checkpoint]"
    body = LOGGED.replace("[checkpoint]", setting).replace("steps = 2", "steps = 11", 1)
    # In a process of its own: the tests' ranks keep their rank logs elsewhere.
    command = [sys.executable, "-m", "qeffect", "runtime", "train", run_file(tmp_path, body=body)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    files = sorted((tmp_path / "events").glob("rank0.*.ranks*.jsonl"))
    assert [path.name.rpartition(".ranks")[2] for path in files] == [
        ".00003.jsonl",  # removed two commits after the last file began
        ".00004.jsonl",
        ".00005.jsonl",
    ]
    every = sorted((tmp_path / "events").glob("rank*.jsonl"))
    capsys.readouterr()
    assert main(["replay", *map(str, every), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["rank_logs"]
    assert (told["logs"], told["trusted_epoch"], told["commits"]) == (1, 6, 5)


@pytest.mark.ci
def test_rank_logs_of_earlier_processes_stand_beside_their_event_logs(tmp_path: Path) -> None:
    """Restarts do not fill the disk; the logs of the process before replay together."""
    setting = "event_log_steps = 2\nevent_log_keep = 2\n[checkpoint]"
    run = run_file(tmp_path, body=LOGGED.replace("[checkpoint]", setting))
    events, attempts = tmp_path / "events", []
    for steps in ("2", "4", "6"):
        # In processes of their own: the tests' ranks keep their rank logs elsewhere.
        command = [sys.executable, "-m", "qeffect", "runtime", "train", run, "--resume"]
        subprocess.run([*command, "--steps", steps], check=True, capture_output=True, timeout=120)
        (attempt,) = {path.name.split(".")[1] for path in events.glob("rank0.*.ranks*.jsonl")}
        attempts.append(attempt)
    assert len(set(attempts)) == 3
    (before,) = (path for path in events.iterdir() if path.is_dir())
    assert before.name == "before-0002"
    logs = sorted(before.iterdir())
    assert {path.name.split(".")[1] for path in logs if ".ranks" in path.name} == {attempts[1]}
    assert before / "rank0.jsonl" in logs
    assert main(["replay", *map(str, logs)]) == 0


def test_a_run_whose_event_log_ends_goes_on(tmp_path: Path) -> None:
    """As for the run's own log: the end of the event log is reported, and nothing else changes."""
    run = run_file(tmp_path, body=LOGGED.replace("[checkpoint]", 'log = "log.jsonl"\n[checkpoint]'))
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "rank0.jsonl").symlink_to("/dev/full")
    ((code, _, err),) = said(tmp_path, [run])
    assert code == 0, err
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["warning"] for line in lines if "warning" in line] == [
        "NOT LOGGED from here on: [run] event_logs: the event log of rank 0: No space left on "
        "device"
    ]
    assert names(tmp_path / "kept") == ["step-00000001", "step-00000002"]


# Ranks whose launcher is gone


def test_a_rank_whose_launcher_has_ended_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is torchrun's agent; a process that torchrun did not start has none."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert TorchrunAgent().pid is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    TorchrunAgent().require()
    read, write = os.pipe()
    agent = os.fork()
    if agent == 0:  # starts a rank, and is gone
        own = os.getpid()
        forked, seen = os.pipe()
        if os.fork() == 0:
            os.write(seen, b"1")
            while os.getppid() == own:
                time.sleep(0.001)
            try:
                TorchrunAgent().require()
            except TerminatedError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.read(forked, 1)
        os._exit(0)
    os.waitpid(agent, 0)
    os.close(write)
    assert os.read(read, 200).decode() == f"its launcher, process {agent}, has ended"
    os.close(read)


def process(
    proc: Path, words: str, *, exe: str = "/usr/bin/x", environ: str = "A=1", maps: str = ""
) -> int:
    """A process as the system tells about it."""
    place = proc / "7"
    place.mkdir()
    (place / "cmdline").write_bytes(words.replace(" ", "\0").encode())
    (place / "comm").write_text(Path(words.split()[0]).name + "\n")
    (place / "environ").write_text(environ)
    (place / "maps").write_text(maps)
    (place / "exe").symlink_to(exe)
    return 7


@pytest.mark.parametrize(
    ("words", "told", "may"),
    [
        ("/sbin/init", {}, False),
        ("/usr/bin/tini -- sleep", {}, False),
        ("systemd --user", {}, False),
        ("python3 /usr/bin/torchrun run.py", {}, True),
        ("trainer", {"exe": "/opt/bin/python3.11"}, True),
        ("trainer", {"maps": "7f00 r-xp /opt/lib/libpython3.11.so.1.0"}, True),
        ("bash ./rank.sh", {"environ": "HOME=/\0TORCHELASTIC_RUN_ID=none"}, True),
    ],
    ids=["init", "tini", "systemd", "torchrun", "renamed", "embedded", "script"],
)
def test_what_adopts_orphans_is_no_launcher(
    words: str, told: dict[str, str], may: bool, tmp_path: Path
) -> None:
    assert may_be_launcher(process(tmp_path, words, **told), tmp_path) is may


def test_a_parent_that_cannot_be_read_may_be_the_launcher(tmp_path: Path) -> None:
    """A rank whose launcher runs must not stop."""
    assert may_be_launcher(7, tmp_path)
    pid = process(tmp_path, "/sbin/init")
    (tmp_path / "7" / "exe").unlink()
    assert may_be_launcher(pid, tmp_path)
    assert may_be_launcher(os.getpid())


def test_a_launcher_that_ended_before_the_first_import_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    TorchrunAgent().require()
    monkeypatch.setattr("qeffect.gpu_runtime.ranks.torchrun_agent.ORPHANED", [True])
    with pytest.raises(TerminatedError, match="its launcher had ended before this process began"):
        TorchrunAgent().require()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    TorchrunAgent().require()


def test_a_launcher_that_ends_during_the_imports_is_noticed(tmp_path: Path) -> None:
    """The rank reads its parent when its first import begins, not when its training begins."""
    program = (
        "import os, sys, time\n"
        "import qeffect.launched\n"
        "agent = os.getppid()\n"
        "print(agent, flush=True)\n"
        "while os.getppid() == agent:\n"
        "    time.sleep(0.001)\n"
        "from qeffect.gpu_runtime.ranks.torchrun_agent import TorchrunAgent, TerminatedError\n"
        "try:\n"
        "    TorchrunAgent().require()\n"
        "except TerminatedError as error:\n"
        "    open('said.txt', 'w').write(str(error))\n"
        "os.rename('said.txt', 'said')\n"
    )
    agent_program = (
        "import subprocess, sys\n"
        f"rank = subprocess.Popen([sys.executable, '-c', {program!r}],\n"
        "                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)\n"
        "print(rank.stdout.readline().decode(), end='')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", agent_program],
        cwd=tmp_path,
        env={**os.environ, "TORCHELASTIC_RUN_ID": "run"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    until = time.monotonic() + 120.0  # it imports torch
    while not (tmp_path / "said").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    told = (tmp_path / "said").read_text()
    assert told == f"its launcher, process {int(ran.stdout)}, has ended"


@pytest.mark.parametrize(
    ("name", "value", "warned"),
    [
        ("TORCHELASTIC_USE_AGENT_STORE", "True", True),
        ("TORCHELASTIC_USE_AGENT_STORE", "False", False),
        ("GROUP_WORLD_SIZE", "1", False),
        ("TORCHELASTIC_MAX_RESTARTS", "0", False),
    ],
)
def test_agents_that_share_a_store_are_warned_of(
    name: str, value: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it matters: several agents, which restart their ranks."""
    for one, given in (
        ("GROUP_WORLD_SIZE", "2"),
        ("TORCHELASTIC_MAX_RESTARTS", "3"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        (name, value),
    ):
        monkeypatch.setenv(one, given)
    assert bool(shared_store_warning()) is warned


@pytest.mark.ci
def test_ranks_of_a_killed_torchrun_stop_at_the_next_step(tmp_path: Path) -> None:
    """Their cause says why; the folder is free then."""
    body = RUN.replace("[parallel]", "[parallel]\npp = 2").replace("steps = 3", "steps = 100000")
    run = run_file(tmp_path, body=body)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    with (tmp_path / "out.txt").open("wb") as out:
        agent = subprocess.Popen(
            [*command, "2", "-m", "qeffect", "runtime", "train", run, "--quiet"],
            stdout=out,
            stderr=out,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    ranks: list[int] = []
    try:
        until = time.monotonic() + 60.0
        while len(names(tmp_path / "kept")) < 2:
            assert time.monotonic() < until, (tmp_path / "out.txt").read_text()
            time.sleep(0.05)
        ranks = descendants(agent.pid)
        agent.kill()
        agent.wait()
        while any(map(alive, ranks)):
            assert time.monotonic() < until, (tmp_path / "out.txt").read_text()
            time.sleep(0.05)
    finally:
        for process in [agent.pid, *ranks]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    told = (tmp_path / "out.txt").read_text()
    assert f"its launcher, process {agent.pid}, has ended" in told
    FolderLock(tmp_path / "kept").release()


# A run's own checkpoints


def edited(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, and hash it again."""
    import hashlib

    held = json.loads((path / MANIFEST).read_text())
    del held["sha256"]
    edit(held)
    held["sha256"] = hashlib.sha256(canonical(held)).hexdigest()
    (path / MANIFEST).write_bytes(canonical(held))


def test_a_resume_carries_the_runs_identity_on(tmp_path: Path) -> None:
    """Every manifest has it; one of before has none, and is resumed with a warning."""
    run = run_file(tmp_path)
    assert [code for code, *_ in said(tmp_path, [run], [run, "--resume", "--steps", "5"])] == [0, 0]
    kept = tmp_path / "kept"
    found = {tuple(run_of(kept / name)) for name in names(kept)}
    assert names(kept)[-1] == "step-00000005"
    assert len(found) == 1
    assert len(found.pop()) == 1
    for name in names(kept):
        edited(kept / name, lambda held: held.pop("run"))
    log = run_file(tmp_path, body=RUN.replace("steps = 3", 'steps = 6\nlog = "log.jsonl"'))
    ((code, _, err),) = said(tmp_path, [log, "--resume"])
    assert code == 0, err
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    (told,) = [line["warning"] for line in lines if "warning" in line]
    assert "step-00000005 has no run identity" in told
    assert run_of(kept / "step-00000006")


def test_a_folder_of_two_runs_is_resumed_only_if_asked(tmp_path: Path) -> None:
    """Their checkpoints stand beside each other; the adopted run is remembered."""
    run = run_file(tmp_path)
    assert said(tmp_path, [run])[0][0] == 0
    kept = tmp_path / "kept"
    edited(kept / "step-00000002", lambda held: held.update(run=["another"]))
    more = [run, "--resume", "--steps"]
    refused, adopted, then = said(tmp_path, [*more, "4"], [*more, "4", "--adopt"], [*more, "5"])
    assert refused[0] == 2
    assert "has checkpoints of two runs" in refused[1] + refused[2]
    assert "others to run another" in refused[1] + refused[2]
    assert (adopted[0], then[0]) == (0, 0), adopted
    assert run_of(kept / "step-00000005") == run_of(kept / "step-00000004")
    assert run_of(kept / "step-00000005")[1] == "another"


def test_a_file_that_names_another_run_is_refused(tmp_path: Path) -> None:
    """`[checkpoint] run` is the identity; without `--resume`, `--adopt` has no effect."""
    one = run_file(tmp_path, "one.toml", RUN + 'run = "one"\n')
    two = run_file(tmp_path, "two.toml", RUN + 'run = "two"\nkeep = 9\n')
    more = [two, "--resume", "--steps", "4"]
    begun, refused, alone, adopted = said(
        tmp_path, [one], more, [two, "--adopt"], [*more, "--adopt"]
    )
    assert begun[0] == 0
    assert run_of(tmp_path / "kept" / "step-00000003") == ["one"]
    assert refused[0] == 2
    assert (
        "step-00000003 belongs to run one, but [checkpoint] run is two" in refused[1] + refused[2]
    )
    assert alone[0] == 2
    assert "--adopt given, but" in alone[1] + alone[2]
    assert adopted[0] == 0, adopted
    assert run_of(tmp_path / "kept" / "step-00000004") == ["two", "one"]


OTHER = RUN.replace("rate = 0.02", "rate = 0.01").replace("steps = 3", "steps = 5")


def test_another_file_in_a_finished_runs_folder_is_refused(tmp_path: Path) -> None:
    """Another name and another training; an adopted run goes on under an identity of its own."""
    one = run_file(tmp_path, "one.toml", RUN + "keep = 9\n")
    two = run_file(tmp_path, "two.toml", OTHER + "keep = 9\n")
    again = [two, "--resume"]
    begun, refused, adopted, then, back = said(
        tmp_path, [one], again, [*again, "--adopt"], [*again, "--steps", "6"], [one, "--resume"]
    )
    assert begun[0] == 0
    first = run_of(tmp_path / "kept" / "step-00000003")
    assert refused[0] == 2
    line = json.loads(refused[1])["error"]
    assert (
        "step-00000003 belongs to the run of one.toml, and two.toml differs from that file " in line
    )
    assert "([optimizer] rate was 0.02, is 0.01); name another folder" in line
    assert "--adopt" in line
    assert (adopted[0], then[0]) == (0, 0), adopted
    own, *earlier = run_of(tmp_path / "kept" / "step-00000005")
    assert earlier == first
    assert own not in first
    assert run_of(tmp_path / "kept" / "step-00000006") == [own, *first]
    assert back[0] == 2
    assert "belongs to the run of two.toml, and one.toml differs from that file" in back[1]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("run.toml", OTHER),
        ("renamed.toml", RUN.replace("steps = 3", "steps = 5")),
        ("renamed.toml", OTHER + 'run = "one"\n'),
    ],
    ids=["edited", "renamed, with more steps", "both, and named as one run"],
)
def test_a_file_that_was_edited_or_renamed_resumes_its_run(
    tmp_path: Path, name: str, body: str
) -> None:
    """The name or the training is the same, or `[checkpoint] run` says that it is one run."""
    named = 'run = "one"\n' if "run = " in body else ""
    first = run_file(tmp_path, body=RUN + named)
    begun = said(tmp_path, [first])
    then = said(tmp_path, [run_file(tmp_path, name, body), "--resume"])
    assert [code for code, *_ in (*begun, *then)] == [0, 0], then
    kept = tmp_path / "kept"
    assert run_of(kept / "step-00000005") == run_of(kept / "step-00000003")


def test_a_checkpoint_that_names_no_file_is_resumed_with_a_line(tmp_path: Path) -> None:
    """An earlier release did not write the name."""
    import hashlib

    log = RUN.replace("steps = 3", 'steps = 3\nlog = "log.jsonl"')
    one, two = run_file(tmp_path, body=log), run_file(tmp_path, "two.toml", OTHER + "\n")
    assert said(tmp_path, [one])[0][0] == 0
    newest = tmp_path / "kept" / "step-00000003"
    facts = json.loads((newest / FACTS).read_bytes())
    assert facts["free"].pop("source") == "run.toml"
    (newest / FACTS).write_bytes(content := canonical(facts))
    mark = [len(content), hashlib.sha256(content).hexdigest()]
    edited(newest, lambda held: held["files"].update({FACTS: mark}))
    ((code, _, err),) = said(tmp_path, [two, "--resume"])
    assert code == 0, err
    assert (
        "source" in json.loads((tmp_path / "kept" / "step-00000005" / FACTS).read_bytes())["free"]
    )


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    """The manifest holds the step; the name does not decide it."""
    run = run_file(tmp_path)
    assert said(tmp_path, [run])[0][0] == 0
    kept = tmp_path / "kept"
    shutil.move(kept / "step-00000003", kept / "step-00000100")
    with pytest.raises(BackendError, match="step-00000100 holds the checkpoint of step 3; rename"):
        Checkpoints(kept).latest()
    ((code, out, err),) = said(tmp_path, [run, "--resume"])
    assert code == 2
    assert "step-00000100 holds the checkpoint of step 3" in out + err
