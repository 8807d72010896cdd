"""
Start two ranks of a script of this folder, and collect what each of them says.

The script is started again in each rank as ``MODULE OUT --rank WORDS``, and calls `report_rank`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from qeffect.gpu_runtime.report import environment

__all__ = ["begin", "report_rank", "run_ranks"]

WORLD, LINES = 2, 12


def begin(
    description: str | None, measure: Callable[..., dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    """
    Read the command line of a script that writes a report. In a rank, report what `measure` says
    for the words behind ``--rank``, and end the process.

    Returns:
        The report's path, and what the report records of the machine, with the version of
        Megatron-core. A wrong ``--commit`` is refused here, before a rank starts.
    """
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("out", type=Path, help="the report, as JSON")
    arguments.add_argument("--commit", help="the commit, outside a git checkout")
    arguments.add_argument("--rank", nargs="*", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.rank is not None:
        report_rank(partial(measure, *given.rank), str(given.out))
    where = environment(given.commit, given.out)
    where["packages"]["megatron-core"] = version("megatron-core")
    return given.out, where


def run_ranks(
    module: str, out: Path, words: Sequence[str] = (), *, limit_s: float
) -> list[dict[str, Any]]:
    """
    Run two ranks. If there is one GPU, both ranks share it (`NCCL_HOSTID`).

    Args:
        module: Name of the script's module.
        out: Each rank writes what it says to this path with its rank appended.
        words: What is behind ``--rank``.
        limit_s: The ranks are killed after so many seconds.

    Returns:
        What each rank says. For a rank that says nothing: the last lines of all ranks, as ``tail``.
    """
    import torch

    shared = "NCCL_HOSTID=$RANK LOCAL_RANK=0 " if torch.cuda.device_count() == 1 else ""
    own = shlex.join([sys.executable, "-m", module, str(out), "--rank", *words])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(WORLD), "--no-python", "bash", "-c", f"{shared}exec {own}"]
    with tempfile.TemporaryFile("w+") as lines:
        ends = []
        try:
            subprocess.run(command, timeout=limit_s, stdout=lines, stderr=lines, check=False)
        except subprocess.TimeoutExpired:
            ends = [f"no end after {limit_s:g} s"]
        lines.seek(0)
        tail = [*lines.read().splitlines()[-LINES:], *ends]
    parts = [Path(f"{out}.{rank}") for rank in range(WORLD)]
    said = [json.loads(part.read_text()) if part.exists() else {"tail": tail} for part in parts]
    for part in parts:
        part.unlink(missing_ok=True)
    if any("tail" in each for each in said):
        print(module, *words, *tail, sep="\n", flush=True)
    return said


def report_rank(measure: Callable[[], dict[str, Any]], out: str) -> NoReturn:
    """
    Write what this rank measures, with the name of its device, and end its process.

    The exit code is 3 if the rank failed or was refused: such a rank has nobody to meet.
    """
    try:
        said = measure()
    except Exception:
        said = {"error": traceback.format_exc().splitlines()[-LINES:]}
    import torch

    said["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    Path(f"{out}.{os.environ['RANK']}").write_text(json.dumps(said))
    sys.stdout.flush()
    os._exit(3 if {"refused", "error"} & said.keys() else 0)
