"""
Gathers of FP8 parameters under Megatron-core's guard: one command, one report.

    python -m tests.gpu.guard_gathers OUT.json

Two ranks, Transformer Engine's layers with FP8 parameters, delayed scaling, the distributed
optimizer, reductions and gathers that overlap. Each run has its own processes:

* legal runs with a guard that reports: two replicas, without graphs and under each of
  Megatron-core's modes of graphs; and pipelines of one replica, which gather nothing, with two
  virtual stages a rank and under each of the modes;
* two replicas whose hooks do not gather the parameters in one step, with and without the guard;
* two replicas without the guard, whose bits the other runs of two replicas are compared with.

It takes two minutes and needs Megatron-core 0.19.2
(``pip install --no-deps megatron-core==0.19.2``).
If there is one GPU, both ranks share it (`NCCL_HOSTID`). Outside a git checkout give
``--commit SHA``. The exit code is 0 if every run ended as listed, else 1.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .two_ranks import begin, run_ranks

#: The kept report.
KEPT = Path(__file__).parents[1] / "megatron" / "gathers.json"
PLAIN: Mapping[str, Any] = {
    "graphs": "none",
    "vpp": 1,
    "messages": "plain",
    "scaling": "delayed",
    "fp8_param": True,
    "reduction": "overlapped",
    "optimizer": "distributed, gathered",
    "layout": "pp2",
    "group": 1,
}
#: What differs from `PLAIN`, by the name of a run.
ROWS: Mapping[str, Mapping[str, Any]] = {
    "replicas": {"layout": "pp1 dp2"},
    "virtual stages": {"vpp": 2, "messages": "overlapped"},
    "local": {"graphs": "local"},
    "transformer_engine": {"graphs": "transformer_engine"},
    "full_iteration": {"graphs": "full_iteration"},
    "replicas, local": {"layout": "pp1 dp2", "graphs": "local"},
    "replicas, transformer_engine": {"layout": "pp1 dp2", "graphs": "transformer_engine"},
    "replicas, full_iteration": {"layout": "pp1 dp2", "graphs": "full_iteration"},
}
#: Runs: the row, the guard, and what happens.
RUNS = (
    *((name, "on", "legal") for name in ROWS),
    ("replicas", "off", "legal"),
    ("replicas", "on", "hooks off"),
    ("replicas", "off", "hooks off"),
)
STEPS, FAULTY = 7, 4
AT_ONCE, LIMIT_S = 4, 150.0


def train(name: str, guard: str, what: str) -> dict[str, Any]:
    """Train some steps on this rank; return what the guard says, and digests of the parameters."""
    import torch
    import torch.distributed as dist

    from qeffect.gpu_runtime.lab.sides.megatron_modes import MegatronRun
    from qeffect.gpu_runtime.lab.sides.modes import digest

    torch.cuda.set_device(device := torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    dist.init_process_group("nccl", device_id=device)
    run = MegatronRun({**PLAIN, **ROWS[name]}, device)
    guarded = run.guard() if guard == "on" else None
    said: dict[str, Any] = {"steps": 0}
    for number in range(STEPS):
        if what == "hooks off" and number == FAULTY:
            for chunk in run.model:
                chunk.disable_forward_pre_hook(param_sync=False)
        run.step()
        if what == "hooks off" and number == FAULTY:
            for chunk in run.model:
                chunk.enable_forward_pre_hook()
        torch.cuda.synchronize()
        said["steps"] += 1
    if guarded is not None:
        said["violations"] = [[v.clause, v.step, v.action, v.found] for v in guarded.violations]
        said["epochs"] = guarded.epochs
    said["bits"] = {key: digest(value) for key, value in run.parameters().items()}
    weights = [value for value in run.named.values() if value.dim() > 1]
    said["quantized"] = sum(hasattr(value, "dequantize") for value in weights)
    return said


def start(run: tuple[str, str, str], folder: Path) -> list[dict[str, Any]]:
    """Run two ranks; return what each of them says."""
    out = folder / "-".join(run).replace(" ", "_").replace(",", "")
    return run_ranks("tests.gpu.guard_gathers", out, run, limit_s=LIMIT_S)


def found(runs: Mapping[str, list[dict[str, Any]]]) -> dict[str, bool]:
    """What was to be found, and whether it was."""
    legal = [each for name, run in runs.items() if name.endswith("on legal") for each in run]
    faulty = runs["replicas on hooks off"]
    plain = [each["bits"] for each in runs["replicas off legal"]]
    silent = runs["replicas off hooks off"]
    return {
        "legal runs are accepted": all(
            each.get("steps") == STEPS and each["violations"] == [] for each in legal
        ),
        "parameters are quantized": all(each["quantized"] > 0 for each in legal),
        "the guard keeps the bits": [r["bits"] for r in runs["replicas on legal"]] == plain,
        "a gather that was left out is named": all(
            [v[:2] for v in each["violations"]] == [["version.wrong-epoch", FAULTY]]
            for each in faulty
        ),
        "without the guard it changes bits in silence": all(
            each["steps"] == STEPS and each["bits"] != right
            for each, right in zip(silent, plain, strict=True)
        ),
    }


def main() -> int:
    """Run everything, and write the report."""
    import torch

    out, where = begin(__doc__, train)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        said = pool.map(lambda run: start(run, Path(folder)), RUNS)
        runs = dict(zip((" ".join(run) for run in RUNS), said, strict=True))
    report: dict[str, Any] = {"environment": where, "gpus": torch.cuda.device_count()}
    try:
        report["found"] = found(runs)
    except KeyError as error:  # a rank did not say what it found
        report["found"] = {f"a rank did not report {error}": False}
    report["runs"] = runs
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["found"], indent=1))
    return 0 if all(report["found"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
