"""What the ranks run in the tests of faults that are noticed late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch

from qeffect.gpu_runtime.backends.protocol import BackendError, parameters
from qeffect.gpu_runtime.ranks.consent import StoppedError
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.training.checkpoint import Checkpoints
from qeffect.refusals import Refused
from tests.ranks.double_bodies import flip, made
from tests.training.bodies import by_layer, facts_of


def _save(job: Job, worker: Any, folder: str) -> None:
    Checkpoints(folder).save(worker, by_layer(job.layers), facts_of(job), {})


def failing(job: Job, folder: str, fault: str, steps: int) -> dict[str, Any]:
    """
    Run steps, of which the last ends in a fault on the last rank, and then try to save twice.

    Args:
        job: What is trained; every second step runs twice.
        folder: Folder of the saves.
        fault: `action`: the device fails in a dW; `save`: the device fails when the first save
            waits for it; `gradient` or `weight`: a gradient or weight differs between the two runs
            of a step.
        steps: Number of steps that succeed before the fault.
    """
    worker = made(job, 2 if fault in ("gradient", "weight") else 0, "eager")
    runtime = worker.runtime
    for _ in range(steps):
        worker.step()
    stage = min(runtime.stages)

    def fail(*_: Any) -> Any:
        raise torch.AcceleratorError("an injected device error")

    def differ() -> None:
        assert worker.double is not None
        if fault == "weight":
            flip(next(iter(parameters(runtime.stages[stage]).values())))
        else:
            worker.double.first.values[0] += 1

    if worker.member.rank == job.world - 1:
        if fault == "action":
            runtime.executor.wgrad = fail  # type: ignore[method-assign]
        elif fault == "save":
            runtime.drain = fail  # type: ignore[method-assign]
        else:
            assert worker.double is not None
            worker.double.between = differ
    said: dict[str, Any] = {"cause": None, "saves": []}
    if fault != "save":
        try:
            worker.step()
        except StoppedError as stopped:
            said["cause"] = attrs.asdict(stopped.cause)
    contract = runtime.contract
    said["spoiled"] = contract.memory.spoiled[stage] == contract.epoch
    said["half updated"] = contract.half_updated
    for _ in range(2):
        try:
            _save(job, worker, folder)
        except (StoppedError, BackendError, Refused) as error:
            said["saves"].append(str(error))
            if fault == "save":
                del runtime.drain  # the device answers again
                fault = "saved"
    said["half updated at last"] = contract.half_updated
    said["files"] = [path.name for path in Path(folder).glob("step-*")]
    return said
