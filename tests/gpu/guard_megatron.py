"""
The guard of Megatron-core on two GPUs, with Transformer Engine's layers: one command, one report.

    python -m tests.gpu.guard_megatron OUT.json

It needs Megatron-core 0.19.2 (``pip install --no-deps megatron-core==0.19.2``) and takes three
minutes. The report names hardware, versions and commit; outside a git checkout give
``--commit SHA``. PP=2, VPP=2, delayed FP8 scaling, AdamW with a learning rate above zero. Each run
has its own processes:

* legal modes (none, transformer_engine, full_iteration) under a guard that refuses, and none
  without a guard: their losses must be equal;
* ``cuda_graph_impl="local"`` without a guard, under one that reports, and under one that refuses:
  the weights' FP8 caches become stale, and the guard names `version.stale-cache` at the third step;
* a thousand steps, eager and as full-iteration graphs: a guard that refuses accepts all of them;
* faults in the user's code (`tests/megatron/faults.py`), first without a guard, where nothing
  reports them, then under a guard that reports; faults that need replicas or checkpoints run on
  CPUs only;
* the price: steps of eager layers at hidden 4096 and sequence 4096, one layer for each virtual
  stage, in rounds with and without the guard. Medians are compared, and tenth percentiles, because
  other work on the host slows most of the other steps by more than the guard does.

The exit code is 0 if every run ended as listed, else 1.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

import attrs

from .two_ranks import begin, run_ranks

#: The kept report of a run on two GPUs.
KEPT = Path(__file__).parents[1] / "megatron" / "two_gpus.json"
#: Runs, in order: mode, manner of the guard, what is measured.
RUNS = (
    ("none", "off", "losses"),
    ("none", "refuse", "losses"),
    ("transformer_engine", "refuse", "losses"),
    ("full_iteration", "refuse", "losses"),
    ("local", "off", "losses"),
    ("local", "report", "losses"),
    ("local", "refuse", "losses"),
    ("none", "refuse", "long"),
    ("full_iteration", "refuse", "long"),
    ("none", "report", "faults"),
    ("none", "refuse", "price"),
)
#: Faults of one replica, without checkpoints, that let an interleaved loop go on in silence.
GPU_FAULTS = (
    "doubled_forward",
    "forward_twice_inside",
    "left_out",
    "left_out_inside",
    "another_message",
    "another_input",
    "exchanged_microbatches",
    "skipped_refresh",
    "exchanged_messages",
    "weight_written",
    "updated_twice",
    "gradients_kept",
)
CELL, PRICED = "h2048-s256-m4", "h4096-s256-m4"
SEQUENCE, FFN = 4096, 14336  # of the priced steps
STEPS = 8
TURNS = ("off", "on", "calls")
WARM, ROUNDS = 3, 200
ACTIONS = 16  # F and B of a rank in a priced step: two chunks, four microbatches
LONG_STEPS = 1000
LIMIT_S, LONG_LIMIT_S = 100.0, 240.0
AT_ONCE = 4  # runs of which no time is kept


def workspaces(side: Any) -> Iterator[tuple[Any, Any]]:
    """The FP8 caches of a rank's modules, each with the weight that it should be of."""
    for chunk in side.model:
        for module in chunk.modules():
            for name, cache in (getattr(module, "_fp8_workspaces", None) or {}).items():
                yield cache, getattr(module, name, None)


def caches_apart(side: Any) -> float:
    """The largest relative distance of an FP8 cache from the weights that it should be of."""
    found = [0.0]
    for cache, weight in workspaces(side):
        if weight is not None:
            kept, own = cache.dequantize().float(), weight.detach().float()
            found.append(float((kept - own).norm() / own.norm()))
    return max(found)


def take_loop(side: Any) -> None:
    """Look up Megatron's loop again, so that the side (Megatron's run of a step) runs the guarded
    loop, or again the plain loop."""
    from qeffect.gpu_runtime.lab.sides.megatron import CAPTURED_AT

    side.run = side.lib.pipeline_parallel.get_forward_backward_func()
    if side.mode == "full_iteration":
        side.run = side.lib.full_cuda_graph.FullCudaGraphWrapper(
            side.run, cuda_graph_warmup_steps=CAPTURED_AT
        )


def make(member: Any, mode: str, cell: str) -> Any:
    """Megatron's run of a step as in the report of peers, with an optimizer that changes the
    weights."""
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


def long(member: Any, mode: str) -> dict[str, Any]:
    """Train a thousand steps under a guard that refuses; count what was committed."""
    from qeffect.guards import megatron as guards
    from qeffect.refusals import Refused

    side = make(member, mode, CELL)
    guarded = guards.guard(manner="refuse")
    take_loop(side)
    said: dict[str, Any] = {"steps": 0}
    try:
        for _ in range(LONG_STEPS):
            side.step()
            said["steps"] += 1
        member.synchronize()
    except Refused as refused:
        said["refused"] = [refused.clause, said["steps"], *refused.__notes__]
    said["epochs"], said["violations"] = guarded.epochs, list(map(str, guarded.violations))
    return said


class FaultyRun:
    """A side (Megatron's run of a step) in the form that `tests/megatron/faults.py` uses: numbered
    steps whose methods a fault can replace."""

    def __init__(self, side: Any) -> None:
        self.side, self.number, self.optimizer = side, 0, self
        self.schedules = side.lib.pipeline_parallel.schedules
        self.p2p = side.lib.pipeline_parallel.p2p_communication
        self.model, self.config = side.model, side.config

    def zero(self) -> None:
        for chunk in self.model:
            chunk.zero_grad_buffer()

    def update(self) -> None:
        for parameter in self.side.parameters:
            parameter.grad = parameter.main_grad
        self.side.adamw.step()
        for parameter in self.side.parameters:
            parameter.grad = None

    step = update  # the optimizer's

    def loop(self) -> None:
        side, job = self.side, self.side.job
        side.losses = side.run(
            forward_step_func=side._forward,
            data_iterator=[cycle(side.data) for _ in self.model],  # a doubled F takes one more
            model=self.model,
            num_microbatches=job.microbatches,
            seq_length=job.config.sequence,
            micro_batch_size=job.config.batch,
            forward_only=False,
        )

    def train(self, steps: int) -> None:
        for self.number in range(steps):
            self.zero()
            self.loop()
            self.update()


def faults(member: Any) -> dict[str, Any]:
    """Run each fault without a guard and with one; what the guard says of each, by name."""
    from qeffect.guards import megatron as guards
    from tests.megatron.faults import FAULTS, Undo
    from tests.megatron.faults import STEPS as FAULTY_RUN

    side = make(member, "none", CELL)
    side.config.deallocate_pipeline_outputs = False  # a message of another microbatch is whole
    said: dict[str, Any] = {}
    for name in GPU_FAULTS:
        fault, one = FAULTS[name], {"expected": FAULTS[name].clause}
        for manner in ("off", "report"):
            run, undo, guarded = FaultyRun(side), Undo(), None
            overlap, batch = side.config.overlap_p2p_comm, side.config.batch_p2p_comm
            happens = member.rank in fault.ranks
            if happens and not fault.above:
                fault.put(run, undo)
            if manner == "report":
                guarded = guards.guard(manner="report")
            if happens and fault.above:
                fault.put(run, undo)
            take_loop(side)
            run.train(FAULTY_RUN)
            member.synchronize()
            if guarded is None:
                one["unguarded_loss"] = side.loss()
            else:
                one["violations"] = [[v.clause, v.step, v.action] for v in guarded.violations]
                if fault.above:
                    undo()
                guarded.remove()
            undo()
            side.config.overlap_p2p_comm, side.config.batch_p2p_comm = overlap, batch
        said[name] = one
    return {"faults": said}


def price(member: Any) -> dict[str, Any]:
    """
    Time rounds of three steps, in milliseconds, as time that passes and as time of processors. The
    second kind varies more from step to step than the guard adds, so no price comes from it.

    The guard passes one step of a round by (``off``); its wrappers then only call Megatron's
    functions. Another step repeats a recorded step (``on``). For the third (``calls``), every call
    of the contract is made. Between the steps the guard is only switched, so that it goes on from
    step to step as in a run.
    """
    from qeffect.guards import megatron as guards
    from qeffect.guards.recurring import RecurringSteps

    begin: Any = RecurringSteps.begin

    def begin_alone(steps: RecurringSteps, step: Any) -> None:
        steps.settle()

    side = make(member, "none", PRICED)
    guarded = guards.guard(manner="refuse")
    take_loop(side)
    said: dict[str, Any] = {f"{turn}{what}": [] for turn in TURNS for what in ("", " cpu")}
    for number in range(WARM + ROUNDS):
        first = number % len(TURNS)
        for turn in TURNS[first:] + TURNS[:first]:
            guarded._off = turn == "off"
            RecurringSteps.begin = begin_alone if turn == "calls" else begin  # type: ignore[method-assign]
            member.synchronize()
            began, worked = time.perf_counter(), time.process_time()
            side.step()
            host = time.process_time() - worked
            member.synchronize()
            if number >= WARM:
                said[turn].append((time.perf_counter() - began) * 1e3)
                said[f"{turn} cpu"].append(host * 1e3)
    guarded._off, RecurringSteps.begin = False, begin  # type: ignore[method-assign]
    said["repeated"] = guarded._recurring.repeated if guarded._recurring is not None else 0
    guarded.remove()
    return said


@attrs.frozen
class Price:
    """
    What the guard costs on a rank.

    Args:
        median: The share of time that it adds to the median step.
        tenth: The share that it adds to the tenth percentile of the steps, which other work on the
            host slows least.
        us: Microseconds that it adds to the median step for each F and each B with their messages.
    """

    median: float
    tenth: float
    us: float


def cost(said: dict[str, Any], turn: str = "on") -> Price | None:
    """
    Return the guard's price on a rank; None if the rank did not report.

    Args:
        said: What `price` returned on the rank.
        turn: ``on``, or ``calls``: whether every call of the contract is made.
    """
    if not (said.get(turn) and said.get("off")):
        return None
    on, off = statistics.median(said[turn]), statistics.median(said["off"])
    quiet = tenth(said[turn]) / tenth(said["off"])
    return Price(on / off - 1.0, quiet - 1.0, (on - off) * 1e3 / ACTIONS)


def between(said: dict[str, Any], turn: str = "on") -> tuple[float, float]:
    """
    Return the limits, with a confidence of 95%, between which the median price lies.

    The price is taken from the two steps of each round, which ran one after the other. The limits
    are the differences at the ranks that a binomial distribution gives: they hold for any
    distribution of the differences.

    Args:
        said: What `price` returned on the rank, of at least six rounds.
        turn: ``on`` or ``calls``, as for `cost`.

    Returns:
        The lower and the upper limit, in microseconds for each F and each B with their messages.
    """
    differences = sorted(on - off for on, off in zip(said[turn], said["off"], strict=True))
    n = len(differences)
    outside, rank = 0.0, 0
    while outside + math.comb(n, rank) / 2**n <= 0.025:
        outside += math.comb(n, rank) / 2**n
        rank += 1
    low, high = differences[rank - 1], differences[n - rank]
    return low * 1e3 / ACTIONS, high * 1e3 / ACTIONS


def tenth(times: list[float]) -> float:
    """The tenth percentile of some times."""
    return statistics.quantiles(times, n=10, method="inclusive")[0]


def rank(mode: str, manner: str, what: str) -> dict[str, Any]:
    """What each rank runs, and says."""
    from qeffect.gpu_runtime.lab.sides.megatron import meet

    member = meet(mode)
    if what == "price":
        return price(member)
    if what == "faults":
        return faults(member)
    return long(member, mode) if what == "long" else losses(member, mode, manner)


def found(runs: dict[str, list[dict[str, Any]]]) -> dict[str, bool]:
    """What was to be found, and whether it was."""

    def bits(name: str) -> list[Any]:
        return [each.get("losses") for each in runs[name]]

    reported = [v for each in runs["local report losses"] for v in each.get("violations", ())]
    refused = [each["refused"] for each in runs["local refuse losses"] if "refused" in each]
    legal = [f"{m} refuse losses" for m in ("none", "transformer_engine", "full_iteration")]
    costs = [each for each in map(cost, runs["none refuse price"]) if each is not None]
    return {
        "the guard keeps the losses": bits("none off losses") == bits("none refuse losses"),
        "legal modes are not refused": not any("refused" in e for n in legal for e in runs[n])
        and all(len(each.get("losses", ())) == STEPS for n in legal for each in runs[n]),
        "legal modes have the same losses": all(bits(n) == bits(legal[0]) for n in legal),
        "local graphs fall behind unguarded": bits("local off losses") != bits(legal[0]),
        "reported stale": any("version.stale-cache" in each for each in reported),
        "reporting keeps the losses": bits("local off losses") == bits("local report losses"),
        "refused stale": any(each[0] == "version.stale-cache" for each in refused),
        "a thousand steps are not refused": all(
            each.get("steps") == LONG_STEPS
            for mode in ("none", "full_iteration")
            for each in runs[f"{mode} refuse long"]
        )
        # The host runs no action of a step that is replayed as one graph, so none is judged.
        and all(each.get("epochs") == LONG_STEPS for each in runs["none refuse long"]),
        "every fault is named": named(runs["none report faults"]) == set(GPU_FAULTS),
        "price at most 1% of the median step": bool(costs) and max(p.median for p in costs) <= 0.01,
        "price at most 1% of a quiet step": bool(costs) and max(p.tenth for p in costs) <= 0.01,
        "price at most 30 us for an F or a B": bool(costs) and max(p.us for p in costs) <= 30,
    }


def named(ranks: list[dict[str, Any]]) -> set[str]:
    """The faults of which a rank's guard named the expected clause first."""
    return {
        name
        for each in ranks
        for name, one in each.get("faults", {}).items()
        if one["violations"] and one["violations"][0][0] == one["expected"]
    }


def ran(folder: Path, mode: str, manner: str, what: str) -> list[dict[str, Any]]:
    """Run two processes of a mode; what each rank says, or the end of what the launcher says."""
    name, limit_s = f"{mode} {manner} {what}", LONG_LIMIT_S if what == "long" else LIMIT_S
    part = folder / name.replace(" ", "-")
    start = time.perf_counter()
    said = run_ranks("tests.gpu.guard_megatron", part, (mode, manner, what), limit_s=limit_s)
    print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    return said


def main() -> int:
    """Run everything; write the report."""
    out, where = begin(__doc__, rank)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:

        def start(run: tuple[str, str, str]) -> list[dict[str, Any]]:
            return ran(Path(folder), *run)

        untimed = [run for run in RUNS if run[2] != "price"]
        runs = dict(zip(map(" ".join, untimed), pool.map(start, untimed), strict=True))
        runs |= {" ".join(run): start(run) for run in RUNS if run[2] == "price"}
    verdicts = found(runs)
    seconds = time.perf_counter() - began
    report = {"environment": where, "seconds": seconds, "found": verdicts, "runs": runs}
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(verdicts, indent=1))
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
