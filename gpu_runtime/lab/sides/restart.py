"""
The parts of a run that stops and resumes, as one rank runs them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from qeffect.checkpoint import Checkpoint

from ...backends.protocol import BackendError, StageBackend, parameters
from ...ranks.job import Batches, Job
from ...ranks.membership import Limits, Member
from ...ranks.worker import Worker
from ...runtime import Mode, RuntimeConfig
from ...step.memory.digests import digests
from ...step.memory.numerical_state import NumericalState, live_state
from ...step.optimizer import Optimizer
from ...training.checkpoint import Checkpoints, Replicas
from ...training.launches import StepRunner
from ...training.state import PersistentTensors, by_layer, optimizer_state, shares_amax

__all__ = [
    "SAVED_AT",
    "UNTIL",
    "Trial",
    "bits",
    "differing",
    "facts_of",
    "gone_on",
    "made",
    "remapped",
    "started",
]

SAVED_AT, UNTIL = 3, 8


@attrs.frozen(kw_only=True)
class Trial:
    """
    What is trained, and how.

    Args:
        job: The model, its mapping and its data.
        device: `cpu` or `cuda`.
        mode: How a step runs.
        masters: Accumulate in float32, over master weights of float32.
        limits: Time limits.
    """

    job: Job = attrs.field(factory=Job)
    device: str = "cpu"
    mode: Mode = "eager"
    masters: bool = False
    limits: Limits = attrs.field(factory=Limits)

    @property
    def backend(self) -> str:
        """The layers of the device."""
        return "reference" if self.device == "cpu" else "transformer-engine"


def facts_of(job: Job) -> dict[str, Any]:
    """What numbers mean in a job, whatever its mapping: the model, and what a step takes."""
    c = job.config
    return {
        "layers": job.layers * job.num_stages,
        "hidden": c.hidden,
        "ffn": c.ffn,
        "heads": c.heads,
        "sequence": c.sequence,
        "batch": c.batch,
        "microbatches": job.microbatches * job.dp,
        "seed": job.seed,
    }


def made(member: Member, trial: Trial) -> Worker:
    """A worker before its first step; every rank calls it."""
    job = trial.job
    wide = torch.float32 if trial.masters else torch.bfloat16

    def optimizer(stages: list[StageBackend]) -> Optimizer:
        if not trial.masters:
            return Optimizer(stages)
        return Optimizer(stages, master_dtype=wide, capturable=trial.device == "cuda")

    worker = Worker(
        member,
        job.table(),
        job.pp,
        lambda indices: job.stages(
            indices, member.device, trial.backend, fuse=False if trial.masters else None
        ),
        lambda replica: Batches(job.batch(member.device, replica), member.device),
        RuntimeConfig(
            rule=job.rule,
            provisioning=job.provisioning,
            mode=trial.mode,
            dtype=wide,
            amax=job.amax,
        ),
        limits=trial.limits,
        optimizer=optimizer,
    )
    worker.heed_termination()
    return worker


def bits(worker: Worker, job: Job) -> dict[str, str]:
    """A digest of every tensor that persists, by the model's names."""
    worker.runtime.drain()
    place = worker.member.rank % worker.pp
    naming = by_layer(job.layers)
    held = PersistentTensors.of(
        worker.runtime, worker.optimizer, naming, worker.replica, place
    ).tensors
    return dict(zip(held, (digests([tensor])[0] for tensor in held.values()), strict=True))


def _losses(steps: StepRunner, wanted: Sequence[int]) -> dict[str, list[float]]:
    return {str(step): steps.result(step).losses for step in wanted}


def started(
    member: Member,
    trial: Trial,
    folder: str,
    *,
    until: int = UNTIL,
    save_at: Sequence[int] = (SAVED_AT,),
    asynchronous: bool = False,
) -> dict[str, Any]:
    """Train from the beginning, and save after some steps."""
    worker = made(member, trial)
    checkpoints = Checkpoints(folder, asynchronous=asynchronous)
    said = _trained(worker, trial, checkpoints, until, save_at)
    checkpoints.close()
    worker.close()
    return said


def gone_on(
    member: Member,
    trial: Trial,
    folder: str,
    *,
    until: int = UNTIL,
    save_at: Sequence[int] = (),
    replicas: Replicas = "same",
) -> dict[str, Any]:
    """Go on from the latest checkpoint."""
    worker = made(member, trial)
    checkpoints = Checkpoints(folder)
    free = _loaded(worker, trial, checkpoints, replicas)
    said = {**_trained(worker, trial, checkpoints, until, save_at), "free": free}
    said["changed"] = list(checkpoints.changed)
    checkpoints.close()
    worker.close()
    return said


def _loaded(
    worker: Worker, trial: Trial, checkpoints: Checkpoints, replicas: Replicas
) -> dict[str, Any]:
    path = checkpoints.latest()
    assert path is not None, f"{checkpoints.folder} has no checkpoint"
    job = trial.job
    return checkpoints.load(path, worker, by_layer(job.layers), facts_of(job), replicas=replicas)


def _trained(
    worker: Worker, trial: Trial, checkpoints: Checkpoints, until: int, save_at: Sequence[int]
) -> dict[str, Any]:
    job = trial.job
    began, first, saved = worker.runtime.epoch, bits(worker, job), {}
    steps = StepRunner(worker)
    if steps.replays:
        raise BackendError(f"a step cannot be one launch: {steps.replays}")
    while worker.runtime.epoch < until:
        steps.step()
        if (epoch := worker.runtime.epoch) in save_at:
            steps.leave()
            saved[str(epoch)] = bits(worker, job)
            free = {"position": epoch * job.microbatches * job.dp}
            checkpoints.save(worker, by_layer(job.layers), facts_of(job), free)
    steps.leave()
    checkpoints.wait()
    last = bits(worker, job)
    losses = _losses(steps, range(began, until))
    launches = steps.launches
    steps.close()
    return {
        "began": began,
        "epoch": worker.runtime.epoch,
        "launches": launches,
        "losses": losses,
        "first": first,
        "saved": saved,
        "last": last,
    }


def remapped(
    member: Member,
    trial: Trial,
    folder: str,
    *,
    replicas: Replicas = "same",
    save: bool = False,
) -> dict[str, Any]:
    """
    Load the latest checkpoint, take a step; then the same step of a pipeline set up by hand.

    Args:
        member: This process.
        trial: The new mapping.
        folder: Of the checkpoints.
        replicas: Whose scaling state each replica takes.
        save: Whether the state after the step is saved.
    """
    worker = made(member, trial)
    checkpoints = Checkpoints(folder)
    path = checkpoints.latest()
    assert path is not None
    whole = Path(f"{path}-{os.getppid()}.pt")
    if member.rank == 0:
        dcp_to_torch_save(path, whole)
    free = _loaded(worker, trial, checkpoints, replicas)
    epoch = worker.runtime.epoch
    loaded = bits(worker, trial.job)
    said = _trained(worker, trial, checkpoints, epoch + 1, (epoch + 1,) if save else ())
    checkpoints.close()
    worker.close()
    held = torch.load(whole, weights_only=True, map_location="cpu")
    there = json.loads((path / "facts.json").read_text())["mapping"]["replicas"]
    by_hand = made(member, trial)
    whose = 0 if shares_amax(by_hand.runtime) else by_hand.replica % there
    _copy(by_hand, trial.job, held, epoch, whose)
    copied = bits(by_hand, trial.job)
    steps = StepRunner(by_hand)
    steps.step()
    theirs, losses = bits(by_hand, trial.job), _losses(steps, [epoch])
    by_hand.close()
    dist.barrier()
    if member.rank == 0:
        whole.unlink()
    return {
        **said,
        "free": free,
        "changed": list(checkpoints.changed),
        "loaded otherwise": differing(loaded, copied),
        "differ": differing(said["last"], theirs),
        "moved": len(differing(loaded, said["last"])),
        "same losses": losses == said["losses"],
    }


def _copy(worker: Worker, job: Job, held: Mapping[str, Tensor], epoch: int, replica: int) -> None:
    """By hand: layers counted here, tensors copied one after the other."""
    runtime = worker.runtime

    def there(stage: int, local: str) -> str:
        words = local.split(".")
        return ".".join([words[0], str(stage * job.layers + int(words[1])), *words[2:]])

    moments: dict[str, Tensor] = {}
    with torch.no_grad():
        for stage in runtime.stages.values():
            for local, parameter in parameters(stage).items():
                parameter.copy_(held[f"model.{there(stage.index, local)}"])
    for name in optimizer_state(worker.optimizer):
        _, index, local = name.split(".", 2)
        moments[name] = held[f"optim.{there(int(index), local)}"]
    worker.optimizer.load_state(moments)
    scaling = {}
    for name in live_state(runtime.domain):
        _, index, local = name.split(".", 2)
        scaling[name] = held[f"fp8.dp{replica}.{there(int(index), local)}"]
    recipe = dict(runtime.domain.recipe())
    runtime.restore(
        Checkpoint(epoch, runtime.contract.configuration), NumericalState(scaling, recipe)
    )


def differing(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """Names of which only one side has a value, or another one."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
