"""
Caches of FP8 weights compared by value under Megatron-core's guard: one command, one report.

    python -m tests.gpu.guard_caches OUT.json

Two ranks, two virtual stages each, Transformer Engine's layers, delayed FP8 scaling, AdamW with a
learning rate above zero, `guard(compare_caches=1)`. Each run has its own processes:

* legal modes (none, transformer_engine, full_iteration) under a guard that refuses;
* ``cuda_graph_impl="local"``, whose caches become stale; the guard's look at flags is switched off;
* full-iteration graphs whose caches are put back to those of the step before, which no flag shows;
* the price: steps of eager layers at hidden 4096 and sequence 4096, in turns with and without the
  comparison.

It needs Megatron-core 0.19.2 (``pip install --no-deps megatron-core==0.19.2``) and takes two
minutes. If there is one GPU, both ranks share it (`NCCL_HOSTID`). Outside a git checkout give
``--commit SHA``. The exit code is 0 if every run ended as listed, else 1.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .guard_megatron import CELL, PRICED, make, take_loop, workspaces
from .two_ranks import begin, run_ranks

#: The kept report.
KEPT = Path(__file__).parents[1] / "megatron" / "cache_values.json"
#: Runs, in order: mode, manner of the guard, what is measured.
RUNS = (
    ("none", "refuse", "legal"),
    ("transformer_engine", "refuse", "legal"),
    ("full_iteration", "refuse", "legal"),
    ("local", "report", "no flags"),
    ("full_iteration", "report", "put back"),
    ("none", "report", "price"),
)
STEPS, WARM, ROUNDS = 8, 3, 30
AT_ONCE = 5  # runs of which no time is kept
LIMIT_S = 110.0


def caches(side: Any) -> list[Any]:
    """The FP8 caches of a rank's modules."""
    return [cache for cache, _ in workspaces(side)]


def put_back(side: Any) -> None:
    """Let the caches of each later step be those of the step before, once the loop has ended."""
    run, old = side.run, list[Any]()

    def loop(*args: Any, **kwargs: Any) -> Any:
        found = run(*args, **kwargs)
        now = [cache._data.clone() for cache in caches(side)]
        for cache, before in zip(caches(side), old, strict=False):
            cache._data.copy_(before)
        old[:] = now
        return found

    side.run = loop


def train(member: Any, mode: str, manner: str, what: str) -> dict[str, Any]:
    """Train some steps; return what the guard compared and what it says."""
    from qeffect.guards import megatron as guards
    from qeffect.guards.megatron_caches import Caches
    from qeffect.refusals import Refused

    if what == "no flags":
        Caches.stale = lambda self: None  # type: ignore[method-assign]
    side = make(member, mode, CELL)
    guarded = guards.guard(manner=manner, compare_caches=1)  # type: ignore[arg-type]
    take_loop(side)
    if what == "put back":
        put_back(side)
    said: dict[str, Any] = {"steps": 0}
    try:
        for _ in range(STEPS):
            side.step()
            member.synchronize()
            said["steps"] += 1
    except Refused as refused:
        said["refused"] = [refused.clause, *refused.__notes__, str(refused)]
    said["compared"], said["caches"] = guarded.values.compared, len(caches(side))
    said["violations"] = [[v.clause, v.step, v.found] for v in guarded.violations]
    return said


def price(member: Any) -> dict[str, Any]:
    """Time steps with and without the comparison, in turns, in milliseconds."""
    from qeffect.guards import megatron as guards

    side = make(member, "none", PRICED)
    guarded = guards.guard(compare_caches=1)
    take_loop(side)
    said: dict[str, Any] = {"off": [], "on": []}
    for number in range(WARM + ROUNDS):
        for turn in ("off", "on") if number % 2 else ("on", "off"):
            guarded.values.every = int(turn == "on")
            member.synchronize()
            began = time.perf_counter()
            side.step()
            member.synchronize()
            if number >= WARM:
                said[turn].append((time.perf_counter() - began) * 1e3)
    said["compared"] = guarded.values.compared
    said["elements"] = sum(cache._data.numel() for cache in caches(side))
    said["violations"] = list(map(str, guarded.violations))
    return said


def rank(mode: str, manner: str, what: str) -> dict[str, Any]:
    """What each rank runs, and says."""
    from qeffect.gpu_runtime.lab.sides.megatron import meet

    member = meet(mode)
    return price(member) if what == "price" else train(member, mode, manner, what)


def start(run: tuple[str, str, str], folder: Path) -> list[dict[str, Any]]:
    """Run two ranks; return what each of them says."""
    out = folder / "-".join(run).replace(" ", "_")
    return run_ranks("tests.gpu.guard_caches", out, run, limit_s=LIMIT_S)


def found(runs: dict[str, list[dict[str, Any]]]) -> dict[str, bool]:
    """What was to be found, and whether it was."""
    legal = [each for name, run in runs.items() if name.endswith(" legal") for each in run]

    def named(name: str) -> bool:
        return any(v[0] == "version.stale-cache" for each in runs[name] for v in each["violations"])

    return {
        "legal modes are accepted": all(
            each.get("steps") == STEPS and not each["violations"] for each in legal
        ),
        "legal modes are compared": all(each.get("compared", 0) > 0 for each in legal),
        "stale caches of local graphs are named": named("local report no flags"),
        "caches that were put back are named": named("full_iteration report put back"),
        "the priced steps are accepted": all(
            each["compared"] > 0 and not each["violations"] for each in runs["none report price"]
        ),
    }


def costs(ranks: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The median step of each rank without and with the comparison, in milliseconds."""
    return [{turn: statistics.median(each[turn]) for turn in ("off", "on")} for each in ranks]


def main() -> int:
    """Run everything, and write the report."""
    import torch

    out, where = begin(__doc__, rank)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        names = [" ".join(run) for run in RUNS]
        untimed = pool.map(lambda run: start(run, Path(folder)), RUNS[:-1])
        runs = dict(zip(names[:-1], untimed, strict=True))
        runs[names[-1]] = start(RUNS[-1], Path(folder))
    report: dict[str, Any] = {"environment": where, "gpus": torch.cuda.device_count()}
    try:
        report |= {"found": found(runs), "costs": costs(runs[names[-1]])}
    except KeyError as error:  # a rank did not say what it found
        report |= {"found": {f"a rank did not report {error}": False}, "costs": []}
    report["runs"] = runs
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"found": report["found"], "costs": report["costs"]}, indent=1))
    return 0 if all(report["found"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
