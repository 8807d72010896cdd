"""
One rank of a real run of TorchTitan's trainer on a CPU, over gloo; `launch` starts it.

    python -m tests.torchtitan.rank RANK WORLD STORE OUT CASES

`CASES` is JSON: a list of runs, one after another. Each run has its own trainer with the same
initial weights; the rank's result of each run goes to `OUT` as JSON.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: No process lives longer; a hung rank prints where it hangs.
LIMIT_S = int(os.environ.get("TORCHTITAN_TEST_S", "580"))


def run(case: dict[str, Any], rank: int, folder: Path) -> dict[str, Any]:
    """Run a case; return what happened."""
    from qeffect.guards import torchtitan as guards
    from qeffect.refusals import Refused
    from tests.torchtitan.faults import FAULTS, GRAPH_FAULTS
    from tests.torchtitan.graphs import keep_outputs
    from tests.torchtitan.set_up import configuration

    config = configuration(case, str(folder))
    if manner := case.get("manner"):
        config.model_spec = guards.guarded(config.model_spec, manner=manner, log=case.get("log"))
    trainer = config.build()
    if case.get("graphs"):
        keep_outputs(trainer.pp_schedule.schedule._stages)
    for part in trainer.model_parts:
        for module in part.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no other of FSDP's
                module.set_force_sum_reduction_for_comms(True)
    fault = (FAULTS | GRAPH_FAULTS)[case["fault"]] if case.get("fault") else None
    if fault is not None and rank in fault.ranks:
        fault.put(trainer)
    said: dict[str, Any] = {"bits": [], "schedule": type(trainer.pp_schedule).__name__}
    watch_steps(trainer, said["bits"])
    try:
        trainer.train()
    except Refused as error:
        said["refused"], said["notes"] = error.clause, error.__notes__
    if manner:
        guard = guards.guard_of(trainer)
        said["violations"] = [
            [v.clause, v.rank, v.step, v.action, v.found] for v in guard.violations
        ]
        said["epoch"], said["trust"] = guard.contract.epoch, guard.on_trust()
        said["live"] = len(guard.contract.live())
        guard.remove()
    if "refused" not in said:
        trainer.close()
    return said


def watch_steps(trainer: Any, bits: list[list[str]]) -> None:
    """Record losses, gradients and parameters of every optimizer step."""
    losses: list[str] = []
    step, once = trainer.train_step, trainer.forward_backward_step

    def forward_backward_step(**given: Any) -> Tensor:
        loss: Tensor = once(**given)
        losses.append(float(loss).hex())
        return loss

    def train_step(data: Any) -> None:
        losses.clear()
        step(data)
        parameters = [p for part in trainer.model_parts for p in part.parameters()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        bits.append([*losses, *map(digest, gradients), *map(digest, parameters)])

    trainer.forward_backward_step, trainer.train_step = forward_backward_step, train_step


def digest(value: Any) -> str:
    value = getattr(value, "_local_tensor", value)
    return hashlib.sha256(value.detach().float().numpy().tobytes()).hexdigest()[:12]


def main(rank: int, world: int, store: str, out: str, cases: list[dict[str, Any]]) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    said: list[dict[str, Any]] = []
    try:
        from qeffect.gpu_runtime.lab.sides import titan_cpu

        titan_cpu.install()

        for number, case in enumerate(cases):
            print(f"case {case}", flush=True)
            said.append(run(case, rank, Path(out).parent / f"run{number}"))
            Path(out).write_text(json.dumps(said))
            if "refused" in said[-1]:
                break
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # without a barrier: a run that was refused has no group left to meet in


if __name__ == "__main__":
    own, ranks, *paths, given = sys.argv[1:]
    main(int(own), int(ranks), *paths, json.loads(given))
