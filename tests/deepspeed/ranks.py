"""Launches ranks of a real DeepSpeed run, each a process of its own with a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["LIMIT_S", "launch"]

#: No launch takes longer: a rank that hangs is killed and fails its test.
LIMIT_S = 60.0
_ROOT = Path(__file__).parents[2]


def launch(
    world: int, folder: Path, cases: list[dict[str, Any]], *, whole: bool = True
) -> list[list[dict[str, Any]]]:
    """
    Run cases on every rank, one after another; return what each rank says of each case.

    Args:
        world: How many ranks.
        folder: An empty folder.
        cases: The runs; see `tests.deepspeed.rank`.
        whole: Whether every rank has to end well; otherwise a rank may end with its peer.
    """
    began = time.monotonic()
    outs = [folder / f"rank{rank}.json" for rank in range(world)]
    texts = [folder / f"rank{rank}.txt" for rank in range(world)]
    ranks = []
    for rank in range(world):
        command = [sys.executable, "-m", "tests.deepspeed.rank", str(rank), str(world)]
        command += [str(folder / "store"), str(outs[rank]), json.dumps(cases)]
        with texts[rank].open("w") as text:
            ranks.append(
                subprocess.Popen(
                    command,
                    cwd=_ROOT,
                    stdout=text,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
    for process in ranks:
        try:
            process.wait(max(0.0, began + LIMIT_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    codes = [process.returncode for process in ranks]
    print(f"{len(cases)} runs in {time.monotonic() - began:.1f} s")
    for rank, text in enumerate(texts):
        print(f"rank {rank} ended with {codes[rank]}; its last lines:")
        print("\n".join(text.read_text(errors="replace").splitlines()[-12:]))
    if whole:
        assert codes == [0] * world, codes
    return [json.loads(out.read_text()) if out.exists() else [] for out in outs]
