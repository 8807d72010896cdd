"""
Start ranks as torchrun does, but by forks of a server that has loaded torch, so that a start takes
less than seconds.

The test's own process hosts the store, as torchrun's agent does, so that the store outlives every
rank.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .rank_logs import alike, keep_logs, logs_of, replayed

#: No launch takes longer: a rank that hangs is killed and fails its test.
LIMIT_S = 100.0
#: All ranks share one GPU (`NCCL_HOSTID`), if a host has only one.
SHARED = os.environ.get("QEFFECT_SHARED_GPU") == "1"
#: Seconds before the limit at which a rank that hangs writes where each of its threads is.
_STACKS_S = 5.0

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.ranks.preloaded"])


class Said:
    """
    The results of a start of ranks: exit codes, the results that each rank returned, and the rank
    logs with the verdict of the model of ranks.
    """

    def __init__(
        self,
        codes: list[int | None],
        words: dict[int, Any],
        seconds: float,
        logs: list[Path],
        replay: Any,
    ) -> None:
        self.codes, self.words, self.seconds = codes, words, seconds
        self.logs, self.replay = logs, replay


def _rank(
    rank: int,
    world: int,
    port: int,
    out: str,
    logs: Path,
    limit: float,
    body: Callable[..., Any],
    args: Any,
) -> None:
    stacks = _stacks(logs, rank).open("w")
    faulthandler.dump_traceback_later(max(limit - _STACKS_S, limit / 2), file=stacks)
    import torch

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0" if SHARED else str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    if SHARED:
        os.environ["NCCL_HOSTID"] = str(rank)
    keep_logs(logs, rank)
    words = body(*args)
    Path(out, f"{rank}.json").write_text(json.dumps(words))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without a barrier: a run that was stopped has no group left to meet in


def _stacks(logs: Path, rank: int) -> Path:
    """The file into which a rank that hangs writes its stacks."""
    return logs.with_name(f"stacks of {logs.name}") / str(rank)


def launch(
    world: int,
    folder: Path,
    body: Callable[..., Any],
    *args: Any,
    refused: str = "",
    beside: bool = True,
) -> Said:
    """
    Run `body(*args)` on every rank, and return the results of all ranks.

    The rank logs of every worker are replayed through the model of ranks, and compared with the
    worker's event log.

    Args:
        world: Number of ranks.
        folder: An empty folder.
        body: A function of `tests.ranks.bodies`.
        args: Arguments of the body.
        refused: The clause by which the model must refuse the logs; empty if the model must accept
            them.
        beside: Whether each rank log is complete, so that it must agree with the event log of its
            worker.
    """
    logs = next(path for n in itertools.count() if not (path := folder / f"logs {n}").exists())
    logs.mkdir()
    _stacks(logs, 0).parent.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    began = time.monotonic()
    ranks = [
        _CONTEXT.Process(
            target=_rank, args=(n, world, store.port, str(folder), logs, LIMIT_S, body, args)
        )
        for n in range(world)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(max(0.0, began + LIMIT_S - time.monotonic()))
    for n, rank in enumerate(ranks):
        if rank.is_alive():
            rank.kill()
            rank.join()
            print(f"rank {n} hung:", _stacks(logs, n).read_text(), sep="\n", file=sys.stderr)
    words = {int(f.stem): json.loads(f.read_text()) for f in folder.glob("*.json")}
    seconds = time.monotonic() - began
    left = logs_of(logs)
    if beside:
        alike(left)
    codes = [rank.exitcode for rank in ranks]
    return Said(codes, words, seconds, left, replayed(left, refused))
