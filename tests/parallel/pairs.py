"""
Two ranks over gloo, forked from a server that has torch loaded, so that a launch takes no seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

#: No pair takes longer: a rank that hangs is killed, and says nothing.
LIMIT_S = 60.0

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.parallel.guard_bodies"])


def _rank(rank: int, port: int, folder: str, body: Callable[..., Any], args: Any) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    words = body(*args)
    Path(folder, f"{rank}.json").write_text(json.dumps(words))
    os._exit(0)  # without a barrier: a rank that was refused has nobody left to meet


def pair(folder: Path, body: Callable[..., Any], *args: Any) -> dict[int, Any]:
    """
    Run `body(*args)` on two ranks, as torchrun would; return what each returned, by rank.

    Args:
        folder: An empty folder.
        body: A function of a module that can be imported.
        args: What it takes.
    """
    end = time.monotonic() + LIMIT_S
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        _CONTEXT.Process(target=_rank, args=(n, store.port, str(folder), body, args))
        for n in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
        if rank.is_alive():
            rank.kill()
            rank.join()
    return {int(f.stem): json.loads(f.read_text()) for f in folder.glob("*.json")}
