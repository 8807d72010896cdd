"""
One rank of `report modes`. The rank runs rows one after another, each without a guard and with a
guard.

    python -m qeffect.gpu_runtime.lab.sides.modes run RANK WORLD FOLDER

The rank reads the rows from `FOLDER/rows.json`, and writes a line of JSON into `FOLDER` for each
row. If a row raises an exception, the rank ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .mode_runs import ModeRun, TorchRun

__all__ = ["STEPS", "digest", "run", "train"]

#: Steps of each run; Megatron-core's graphs replay from the fourth step on.
STEPS = {"cpu": 3, "cuda": 7}
_PACKAGES = ("megatron-core", "torchtitan", "transformer-engine")


def digest(value: Tensor) -> str:
    """A digest of the bits of a tensor."""
    whole = value.detach().contiguous().cpu()
    return hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def make(framework: str, row: Mapping[str, Any], device: torch.device) -> ModeRun:
    """Build the small model that a row describes."""
    if framework == "torch":
        return TorchRun(row, device)
    if framework == "torchtitan":
        from .titan_modes import TitanRun

        return TitanRun(row, device)
    from .megatron_modes import MegatronRun

    made: ModeRun = MegatronRun(row, device)
    return made


def train(
    framework: str, row: Mapping[str, Any], device: torch.device, guards: bool
) -> dict[str, Any]:
    """Train the model of a row (one combination of values); return losses and digests by step, and
    the guard's reports."""
    run = make(framework, row, device)
    guarded = run.guard() if guards else None
    said: dict[str, Any] = {"losses": [], "violations": []}
    gradients: list[dict[str, str]] = []
    for _ in range(STEPS[device.type]):
        said["losses"].append(run.step())
        gradients.append({name: digest(value) for name, value in run.gradients().items()})
    losses = [{"loss": [x.hex() for x in step]} if step else {} for step in said["losses"]]
    pieces = {name: digest(value) for name, value in run.parameters().items()}
    said["bits"] = {"losses": losses, "parameters": [pieces]}
    if all(gradients):
        said["bits"]["gradients"] = gradients
    if guarded is not None:
        said["violations"] = [
            [v.clause, v.rank, v.step, v.action, v.found] for v in guarded.violations
        ]
        guarded.remove()
    run.close()
    return said


def prepare(framework: str, device: str) -> None:
    """Set up this process before the framework is imported."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if device == "cpu" and framework == "megatron":
        from . import as_cpu

        as_cpu.install()
    if framework == "torchtitan":
        from . import titan_cpu

        titan_cpu.install()
    if framework == "megatron":
        from .megatron import MODES, library

        library(MODES)


def versions() -> dict[str, str]:
    """The versions of the installed packages."""
    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run(rank: int, world: int, folder: Path) -> int:
    """Run the rows (combinations of values) that a folder lists; return the exit code."""
    asked = json.loads((folder / "rows.json").read_text())
    prepare(asked["framework"], asked["device"])
    cuda = asked["device"] == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{(folder / 'store').resolve()}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=50),
    )
    with (folder / f"rank{rank}.jsonl").open("w", buffering=1) as out:
        out.write(json.dumps({"ready": True}) + "\n")
        for one in asked["rows"]:
            print(one["row"], flush=True)
            said: dict[str, Any] = {}
            guards = False
            began = time.perf_counter()
            try:
                for guards in (False, True):
                    torch.manual_seed(31)
                    said["guarded" if guards else "plain"] = train(
                        asked["framework"], one["row"], device, guards
                    )
            except BaseException as error:
                traceback.print_exc()
                while error.__cause__ is not None:  # frameworks wrap what went wrong
                    error = error.__cause__
                text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                out.write(json.dumps({"failed": text, "guarded": guards, "at": time.time()}) + "\n")
                return 3
            said["seconds"] = round(time.perf_counter() - began, 3)
            out.write(json.dumps(said) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "versions":
        prepare(*sys.argv[2:])
        print(json.dumps(versions()))
    else:
        code = run(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without a barrier: a rank that failed has nobody to meet
