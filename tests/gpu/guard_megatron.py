"""
The guard of Megatron-core on two GPUs, with Transformer Engine's layers: one command, one report.

    python -m tests.gpu.guard_megatron OUT.json

It needs Megatron-core 0.19.2 (``pip install --no-deps megatron-core==0.19.2``) and takes under two
minutes. PP=2, VPP=2, delayed FP8 scaling, AdamW with a learning rate above zero. Each run has
processes of its own:

* legal modes (none, transformer_engine, full_iteration) under a guard that refuses, and none
  without a guard: the losses of the two have to be equal;
* ``cuda_graph_impl="local"`` without a guard, under one that reports, and under one that refuses:
  the weights' FP8 caches fall behind, and the guard names `version.stale-cache` at the third step;
* the price: steps of eager layers at hidden 4096 and sequence 4096, with the guard and without it
  in turns.

The exit code is 0 if all of that was found, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: Runs, in order: mode, manner of the guard, what is measured.
RUNS = (
    ("none", "off", "losses"),
    ("none", "refuse", "losses"),
    ("transformer_engine", "refuse", "losses"),
    ("full_iteration", "refuse", "losses"),
    ("local", "off", "losses"),
    ("local", "report", "losses"),
    ("local", "refuse", "losses"),
    ("none", "refuse", "price"),
)
CELL, PRICED = "h2048-s256-m4", "h4096-s256-m4"
SEQUENCE, FFN = 4096, 14336  # of the priced steps
STEPS = 8
ROUNDS, WARM, TIMED = 5, 2, 8
LIMIT_S = 60.0


def caches_apart(side: Any) -> float:
    """The largest relative distance of an FP8 cache from the weights that it should be of."""
    found = [0.0]
    for chunk in side.model:
        for module in chunk.modules():
            for name, cache in (getattr(module, "_fp8_workspaces", None) or {}).items():
                weight = getattr(module, name, None)
                if weight is not None:
                    kept, own = cache.dequantize().float(), weight.detach().float()
                    found.append(float((kept - own).norm() / own.norm()))
    return max(found)


def take_loop(side: Any) -> None:
    """Take Megatron's loop anew, so that the side runs the guarded one, or again the plain one."""
    from qeffect.gpu_runtime.lab.sides.megatron import CAPTURED_AT

    side.run = side.lib.pipeline_parallel.get_forward_backward_func()
    if side.mode == "full_iteration":
        side.run = side.lib.full_cuda_graph.FullCudaGraphWrapper(
            side.run, cuda_graph_warmup_steps=CAPTURED_AT
        )


def make(member: Any, mode: str, cell: str) -> Any:
    """Megatron's side of the peers' report, with an optimizer that moves the weights."""
    import attrs
    import torch

    from qeffect.gpu_runtime.lab.sides.language import PeerSettings
    from qeffect.gpu_runtime.lab.sides.megatron import MegatronSide

    job = PeerSettings(cells=[cell]).job(cell, "il")
    if cell == PRICED:
        config = attrs.evolve(job.config, sequence=SEQUENCE, ffn=FFN)
        job = attrs.evolve(job, config=config)
    side = MegatronSide(member, mode, job)
    side.adamw = torch.optim.AdamW(side.parameters, lr=1e-3, weight_decay=0.0, fused=True)
    return side


def losses(member: Any, mode: str, manner: str) -> dict[str, Any]:
    """Train some steps; return losses, how far caches are apart, and what the guard says."""
    from qeffect.guards import megatron as guards
    from qeffect.refusals import Refused

    side = make(member, mode, CELL)
    guarded = None if manner == "off" else guards.guard(manner=manner)  # type: ignore[arg-type]
    take_loop(side)
    said: dict[str, Any] = {"losses": [], "apart": []}
    try:
        for _ in range(STEPS):
            side.step()
            member.synchronize()
            said["losses"].append(side.loss().hex())
            said["apart"].append(caches_apart(side) if mode in ("none", "local") else None)
    except Refused as refused:
        said["refused"] = [refused.clause, len(said["losses"]), *refused.__notes__]
    if guarded is not None:
        said["violations"] = list(map(str, guarded.violations))
        said["epochs"], said["on_trust"] = guarded.epochs, guarded.on_trust()
    return said


def price(member: Any) -> dict[str, Any]:
    """Time steps with the guard and without it, in turns; milliseconds of each round's median."""
    from qeffect.guards import megatron as guards

    side = make(member, "none", PRICED)
    said: dict[str, Any] = {"off": [], "on": []}
    for _ in range(ROUNDS):
        for turn in ("off", "on"):
            guarded = guards.guard(manner="refuse") if turn == "on" else None
            take_loop(side)
            times = []
            for n in range(WARM + TIMED):
                member.synchronize()
                began = time.perf_counter()
                side.step()
                member.synchronize()
                if n >= WARM:
                    times.append((time.perf_counter() - began) * 1e3)
            said[turn].append(statistics.median(times))
            if guarded is not None:
                guarded.remove()
    on, off = (statistics.median(said[turn]) for turn in ("on", "off"))
    actions = 2 * len(side.model) * side.job.microbatches
    said |= {"on_ms": on, "off_ms": off, "price": on / off - 1.0}
    said["us_per_action"] = (on - off) * 1e3 / actions
    return said


def rank(mode: str, manner: str, what: str, out: str) -> None:
    """What each rank runs."""
    from qeffect.gpu_runtime.lab.sides.megatron import meet

    member = meet(mode)
    said = price(member) if what == "price" else losses(member, mode, manner)
    import torch

    said["device"] = torch.cuda.get_device_name()
    Path(f"{out}.{member.rank}").write_text(json.dumps(said))
    sys.stdout.flush()
    os._exit(3 if "refused" in said else 0)  # a rank that was refused has nobody to meet


def found(runs: dict[str, list[dict[str, Any]]]) -> dict[str, bool]:
    """What was to be found, and whether it was."""

    def bits(name: str) -> list[Any]:
        return [each.get("losses") for each in runs[name]]

    reported = [v for each in runs["local report losses"] for v in each.get("violations", ())]
    refused = [each["refused"] for each in runs["local refuse losses"] if "refused" in each]
    legal = [f"{m} refuse losses" for m in ("none", "transformer_engine", "full_iteration")]
    return {
        "the guard keeps the losses": bits("none off losses") == bits("none refuse losses"),
        "legal modes are not refused": not any("refused" in e for n in legal for e in runs[n])
        and all(len(each.get("losses", ())) == STEPS for n in legal for each in runs[n]),
        "legal modes have the same losses": all(bits(n) == bits(legal[0]) for n in legal),
        "local graphs fall behind unguarded": bits("local off losses") != bits(legal[0]),
        "reported stale": any("version.stale-cache" in each for each in reported),
        "reporting keeps the losses": bits("local off losses") == bits("local report losses"),
        "refused stale": any(each[0] == "version.stale-cache" for each in refused),
        "price at most 1%": all(e.get("price", 1.0) <= 0.01 for e in runs["none refuse price"]),
    }


def main() -> int:
    """Run everything; write the report."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("out", type=Path, help="the report, as JSON")
    arguments.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.rank is not None:
        rank(*given.rank, str(given.out))
    runs: dict[str, list[dict[str, Any]]] = {}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for mode, manner, what in RUNS:
            name = f"{mode} {manner} {what}"
            part = Path(folder) / name.replace(" ", "-")
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += ["-m", "tests.gpu.guard_megatron", str(part), "--rank", mode, manner, what]
            start = time.perf_counter()
            try:
                done = subprocess.run(
                    [sys.executable, *command], timeout=LIMIT_S, capture_output=True, text=True
                )
                tail = done.stderr.splitlines()[-8:] if done.returncode else []
            except subprocess.TimeoutExpired:
                tail = [f"no end after {LIMIT_S:g} s"]
            parts = [Path(f"{part}.{n}") for n in range(2)]
            runs[name] = [
                json.loads(each.read_text()) if each.exists() else {"tail": tail} for each in parts
            ]
            print(f"{name}: {time.perf_counter() - start:.1f} s", *tail[-1:], flush=True)
    verdicts = found(runs)
    report = {"seconds": time.perf_counter() - began, "found": verdicts, "runs": runs}
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(verdicts, indent=1))
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
