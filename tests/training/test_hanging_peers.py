"""
A rank whose peer hangs still reacts to SIGTERM, although it waits inside gloo: it reports the
reason and ends.

SIGSTOP stops the peer, so its connections stay open and no connection breaks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from qeffect.cli.interrupts import descendants
from qeffect.gpu_runtime.ranks import consent
from qeffect.gpu_runtime.ranks.membership import Limits
from qeffect.gpu_runtime.training import ending
from qeffect.gpu_runtime.training.checkpoint.status import STATUS
from tests.cli.test_interrupts import processes as processes

from .helpers import CONFIG, text
from .test_interrupts import begun, of_rank, wait
from .test_partitions import Proxy

#: Runs the command with other limits, if a test gives them.
PROGRAM = """
import json, os, sys
from qeffect.gpu_runtime.training import ending
for name, value in json.loads(os.environ.get("ENDING", "{}")).items():
    setattr(ending, name, value)
from qeffect.cli import main
sys.exit(main())
"""
#: The message limit, so that nothing but the signal ends a wait before the test gives up.
LIMIT_S = 60.0
RUN = (
    CONFIG.replace("[parallel]", "[parallel]\npp = 2").replace(
        "steps = 3", 'steps = 1000000\nlog = "log.jsonl"'
    )
    + '[checkpoint]\nfolder = "kept"\n'
)
THEN = "Start it again, with or without --resume; nothing was saved yet"
assert Limits().message == LIMIT_S


def configured(folder: Path, run: str = RUN) -> list[str]:
    """Write a run and its program; return their words."""
    text(folder, repeats=1500)
    text(folder, "held.npy", repeats=1500)
    (folder / "run.toml").write_text(run)
    (folder / "program.py").write_text(PROGRAM)
    return [str(folder / "program.py"), "runtime", "train", str(folder / "run.toml"), "--quiet"]


def logged(folder: Path, word: str = "step") -> bool:
    """Whether the log has a line of this kind."""
    log = folder / "log.jsonl"
    return log.exists() and f'"{word}"' in log.read_text()


def status(folder: Path) -> dict[str, object]:
    """The status file."""
    found: dict[str, object] = json.loads((folder / "kept" / STATUS).read_text())
    return found


@pytest.fixture
def store() -> Iterator[int]:
    """The port of a store that outlives the ranks, as torchrun's does."""
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield made.port
    del made


def pair(
    folder: Path, ports: tuple[int, int], ending_limits: dict[str, float]
) -> list[subprocess.Popen[str]]:
    """Two ranks that no torchrun started, each with its own way to the store."""
    program = [sys.executable, *configured(folder)]
    made = []
    for rank, port in enumerate(ports):
        places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        given = {"ENDING": json.dumps(ending_limits), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        made.append(begun(program, {**places, **address, **given}))
    return made


def stopped(process: subprocess.Popen[str], seconds: float = LIMIT_S / 2) -> tuple[str, str]:
    """What a rank said until it ended."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 2, out + err
    return out, err


@pytest.mark.ci
def test_a_rank_whose_peer_hangs_names_it_after_sigterm(
    store: int, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """In half of the message limit; the last line and the status file say to resume."""
    short = {"_STUCK_S": 1.0, "_NEXT_S": 1.0, "_BACK_S": 0.5}
    own, peer = pair(tmp_path, (store, store), short)
    processes += [own, peer]
    wait(own, lambda: logged(tmp_path))
    os.kill(peer.pid, signal.SIGSTOP)
    os.kill(own.pid, signal.SIGTERM)
    out, _ = stopped(own)
    *_, cause, last = out.splitlines()
    told = status(tmp_path)
    assert cause.startswith("Every rank stopped: rank 1, step "), out
    assert "the process did not reach this action in time" in cause
    assert last == THEN
    assert (told["state"], told["ended_by"], told["resume"]) == ("ended", "late", True)
    assert cause == f"Every rank stopped: {told['cause']}"
    peer.kill()


@pytest.mark.nightly
def test_a_second_sigterm_ends_a_rank_whose_peer_hangs(
    store: int, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """It does not wait for what the first one waits for."""
    own, peer = pair(tmp_path, (store, store), {"_STUCK_S": 1000.0, "_SAME_S": 0.5})
    processes += [own, peer]
    wait(own, lambda: logged(tmp_path))
    os.kill(peer.pid, signal.SIGSTOP)
    os.kill(own.pid, signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        own.wait(2.0)
    os.kill(own.pid, signal.SIGTERM)
    out, _ = stopped(own)
    told = status(tmp_path)
    assert re.search(r"a second SIGTERM ended the rank while it (waited at |ran \w+)", out)
    assert (told["ended_by"], told["resume"]) == ("ended", True)
    peer.kill()


@pytest.mark.nightly
def test_a_rank_that_is_cut_off_too_ends_after_sigterm(
    store: int, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """Neither the peer nor the store answers; no limit of the file has passed."""
    before = Proxy(store)
    try:
        own, peer = pair(tmp_path, (before.port, store), {})
        processes += [own, peer]
        wait(own, lambda: logged(tmp_path))
        before.stopped.set()
        os.kill(peer.pid, signal.SIGSTOP)
        os.kill(own.pid, signal.SIGTERM)
        out, _ = stopped(own)
    finally:
        before.close()
    assert "did not end within " in out
    assert " s of SIGTERM; the ranks' common store is gone (no answer within " in out
    peer.kill()


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["step", "evaluation", "step or save"])
def test_torchruns_sigterm_leaves_time_for_a_cause(
    place: str, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """With the limits as they are: rank 0 ends by itself before torchrun would kill it."""
    run = RUN
    if place == "evaluation":
        run = run.replace('train = "train.npy"', 'train = "train.npy"\nheld_out = "held.npy"')
        run = run.replace("[run]", "[run]\nevaluate_every = 3\nevaluate_windows = 1000000")
    if place == "step or save":
        run += "every = 1\n"
    words = configured(tmp_path, run)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    agent = begun([*torchrun, *words], {})
    processes.append(agent)
    wait(agent, lambda: logged(tmp_path))
    os.kill(of_rank(1, descendants(agent.pid)), signal.SIGSTOP)
    os.kill(agent.pid, signal.SIGTERM)
    out, err = agent.communicate(timeout=LIMIT_S)
    told = status(tmp_path)
    assert (told["state"], told["ended_by"], told["resume"]) == ("ended", "late", True), out + err
    assert f"Every rank stopped: {told['cause']}" in out
    assert str(told["cause"]).startswith("rank 1, step ")
    if place == "evaluation":
        assert ", evaluation: the process did not reach this action in time" in str(told["cause"])
    newest = f"Resume it with --resume; the newest checkpoint is {told['checkpoint']}"
    assert (newest if place == "step or save" else THEN) in out


@pytest.mark.parametrize(
    "name",
    ["_STUCK_S", "_NEXT_S", "_PUBLISH_S", "_BACK_S", "_DECIDE_S", "_TELL_S", "_LAST_WORD_S"],
)
def test_the_limits_of_an_end_are_below_the_grace(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each counts in the worst case."""
    spent = ending.worst_end_s()
    assert spent < ending.GRACE_S == 30.0
    monkeypatch.setattr(ending, name, getattr(ending, name) + 30.0)
    assert ending.worst_end_s() > ending.GRACE_S


def test_a_stop_of_the_main_thread_is_over_within_the_grace() -> None:
    """Its parts get a little time each, though the moment by which it has to be over has passed."""
    ends_at = ending._LATEST_S + ending._PUBLISH_S + ending._DECIDE_S
    assert ends_at + 3 * consent._LEAST_S + ending._TELL_S < ending.GRACE_S
