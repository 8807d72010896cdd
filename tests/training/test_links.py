"""
The link between two hosts goes down in the middle of a step.

The hosts are network namespaces. If the machine does not permit network namespaces, these tests are
skipped and show nothing about links.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qeffect.gpu_runtime.training.checkpoint.status import STATUS
from tests.cli.test_interrupts import processes as processes
from tests.ranks.rank_logs import replayed_run

from .helpers import CONFIG, text
from .hosts import Hosts, NotPermittedError
from .test_interrupts import LOGS, PROGRAM, configured, wait
from .test_partitions import LIMITS

pytestmark = pytest.mark.nightly
#: Seconds for a run on a busy machine; the limits of its file are below 70 s together.
LIMIT_S = 240
SHORT_STEPS = (
    CONFIG.replace("[parallel]", "[parallel]\npp = 2").replace("steps = 3", "steps = 100")
    + 'log = "log.jsonl"\n'
    + LOGS
)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts and a cable between them."""
    try:
        made = Hosts()
    except NotPermittedError as error:
        pytest.skip(f"cannot make network namespaces to cut a link between hosts: {error}")
    made.start_store()
    yield made
    made.close()


@pytest.mark.parametrize("host", [0, 1])
def test_both_sides_of_a_link_that_goes_down_end_with_a_cause(
    host: int, hosts: Hosts, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """One side learns that the network is unreachable, and the other side hears nothing."""
    saves = '[checkpoint]\nfolder = "kept"\n'
    program = configured(tmp_path, "step", 2, LIMITS.format(start=60) + saves)
    processes += [hosts.start(rank, program) for rank in range(2)]
    wait(processes[0], (tmp_path / "kept" / STATUS).exists, LIMIT_S)  # the first step begins

    hosts.cut(host)
    cut = time.monotonic()
    said = [process.communicate(timeout=LIMIT_S) for process in processes]

    assert time.monotonic() - cut < LIMIT_S
    for rank, (process, (out, err)) in enumerate(zip(processes, said, strict=True)):
        assert process.returncode == 2, (rank, out, err)
        assert "internal error" not in err, err
        assert "Traceback" not in err, err
    assert "Every rank stopped: rank 1, " in said[0][0], said  # beside the store
    assert "the ranks' common store is gone (" in f"{said[1][0]}{said[1][1]}", said
    replayed_run(tmp_path / "logs")


def losses(folder: Path) -> list[float]:
    """The losses of a log, one per step; none before the log begins."""
    path = folder / "log.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [line["loss"] for line in lines if "loss" in line]


def test_a_link_that_comes_back_in_time_costs_nothing(
    hosts: Hosts, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """No step passes while the link is down; then the run goes on to the undisturbed losses."""
    found = []
    for name in ("whole", "cut"):
        folder = tmp_path / name
        folder.mkdir()
        text(folder)
        (folder / "run.toml").write_text(SHORT_STEPS + "[limits]\nmessage_s = 60\n")
        (folder / "program.py").write_text(PROGRAM)
        program = [str(folder / "program.py"), "runtime", "train", str(folder / "run.toml")]
        started = [hosts.start(rank, program) for rank in range(2)]
        processes += started
        if name == "cut":
            wait(started[0], lambda folder=folder: bool(losses(folder)), LIMIT_S)
            hosts.cut(1)
            time.sleep(0.5)  # what was under way arrives
            before = len(losses(folder))
            time.sleep(2.0)
            assert len(losses(folder)) == before < 100
            hosts.plug(1)
        for process in started:
            out, err = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, (out, err)
        found.append(losses(folder))
        assert replayed_run(folder / "logs").commits == 2 * 100
    assert len(found[0]) == 100
    assert found[0] == found[1]
