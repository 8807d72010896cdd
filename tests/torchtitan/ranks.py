"""Launch the ranks of a real TorchTitan run, each in its own process with a time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.ports import free_port

__all__ = ["LIMIT_S", "launch", "run"]

#: No launch takes longer: a rank that hangs is killed and fails its test.
LIMIT_S = float(os.environ.get("TORCHTITAN_TEST_S", "600"))
_ROOT = Path(__file__).parents[2]


def launch(
    world: int,
    folder: Path,
    cases: list[dict[str, Any]],
    *,
    whole: bool = True,
    limit_s: float = LIMIT_S,
) -> list[list[dict[str, Any]]]:
    """
    Run cases on every rank, one after another; return the result that each rank reports for each
    case.

    Args:
        world: Number of ranks.
        folder: An empty folder.
        cases: The runs; see `tests.torchtitan.set_up`.
        whole: Whether every rank must end without an error; otherwise a rank may end because its
            peer ended.
        limit_s: Time limit of the launch.
    """
    outs = [folder / f"rank{rank}.json" for rank in range(world)]
    commands = []
    for rank, out in enumerate(outs):
        command = ["-m", "tests.torchtitan.rank", str(rank), str(world)]
        commands.append([*command, str(folder / "store"), str(out), json.dumps(cases)])
    codes = run(folder, commands, limit_s)
    print(f"{len(cases)} runs")
    if whole:
        assert codes == [0] * world, codes
    return [json.loads(out.read_text()) if out.exists() else [] for out in outs]


def run(
    folder: Path, commands: list[list[str]], limit_s: float = LIMIT_S, **variables: str
) -> list[int]:
    """
    Run a Python command for each rank; return the exit codes, and print each rank's last lines.

    Args:
        folder: Folder for each rank's output.
        commands: The arguments of each rank's interpreter.
        limit_s: Time limit of every rank.
        variables: Further variables of the environment.
    """
    began = time.monotonic()
    texts = [folder / f"rank{rank}.txt" for rank in range(len(commands))]
    port = free_port()
    ranks = []
    for rank, command in enumerate(commands):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(commands)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with texts[rank].open("w") as text:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    cwd=_ROOT,
                    stdout=text,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **place, **variables},
                )
            )
    for process in ranks:
        try:
            process.wait(max(0.0, began + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    codes = [process.returncode for process in ranks]
    print(f"{time.monotonic() - began:.1f} s")
    for rank, text in enumerate(texts):
        print(f"rank {rank} ended with {codes[rank]}; its last lines:")
        print("\n".join(text.read_text(errors="replace").splitlines()[-12:]))
    return codes
