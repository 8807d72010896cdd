"""
The processes of ranks exit without any process-group thread that the interpreter would wait for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import bodies, ranks
from tests.ranks.ranks import launch

#: Rank 0 leaves a collective under way, which ends while the interpreter is about to: the sleep
#: holds its lock, and is the last thing before its end.
LEAVES = """
import atexit, ctypes
atexit.register(ctypes.PyDLL(None).usleep, 700_000)
import os, time, torch
import torch.distributed as dist
from qeffect.gpu_runtime.ranks.membership import Limits, join
member = join("cpu", Limits(start=30.0))
if member.rank == 0:
    found = [torch.ones(3), torch.ones(3)]
    dist.all_gather(found, torch.ones(3), async_op=True)
    del found
    member.store.set("leaving", "now")
else:
    member.store.wait(["leaving"])
    time.sleep(0.3)
    os._exit(0)
"""


@pytest.mark.ci
def test_a_process_whose_last_collective_is_under_way_ends_as_it_was_to() -> None:
    """A thread that gives tensors back to an interpreter that is ending aborts the process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES],
            env={**given, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said


def test_no_thread_of_a_group_is_left_behind_the_last_collective(tmp_path: Path) -> None:
    """Also of one that only a cycle of references holds."""
    said = launch(2, tmp_path, bodies.leaving)
    assert said.codes == [0, 0]
    for word in said.words.values():
        assert word["threads before"] >= 4
        assert word["threads after"] == 0
        assert not word["initialized"]


def test_a_rank_begins_with_what_its_server_imported(tmp_path: Path) -> None:
    """An import that fails there goes unnoticed: every rank would then import for seconds."""
    said = launch(1, tmp_path, bodies.frozen)
    assert said.codes == [0]
    assert said.words[0]["imported"]
    assert said.words[0]["frozen"] > 100_000


def test_a_rank_that_hangs_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is killed at the limit, and its stacks are printed with the failure of its test."""
    monkeypatch.setattr(ranks, "LIMIT_S", 2.0)
    said = launch(2, tmp_path, bodies.asleep, 60.0)
    assert said.codes == [-9, -9]
    printed = capfd.readouterr().err
    for rank in range(2):
        assert f"rank {rank} hung:" in printed
    assert printed.count("in asleep") == 2
