"""
Run, on one rank, the parts of a training run that stops and resumes.
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

from ...backends.protocol import StageBackend, parameters
from ...ranks.job import Job
from ...ranks.membership import Limits, Member
from ...ranks.worker import Worker
from ...runtime import Mode
from ...step.memory.digests import digests
from ...step.memory.numerical_state import NumericalState, live_state
from ...step.optimizer import Optimizer
from ...training.checkpoint import Checkpoints, Replicas
from ...training.state import PersistentTensors, by_layer, optimizer_state, shares_amax
from .pipelines import TrainedSide, build_worker_of

__all__ = [
    "SAVED_AT",
    "UNTIL",
    "Trial",
    "build_trial",
    "differing_names",
    "facts_of",
    "first_run",
    "persistent_digests",
    "remapped_run",
    "resumed_run",
]

SAVED_AT, UNTIL = 3, 8


@attrs.frozen(kw_only=True)
class Trial:
    """
    A training job and its settings.

    Args:
        job: The model, its mapping and its data.
        device: `cpu` or `cuda`.
        mode: How a step runs: `eager`, `replays` or `one launch`.
        masters: If True, gradients are float32, with float32 master weights; if False, gradients
            are bf16, without master weights.
        limits: Timeouts in seconds.
    """

    job: Job = attrs.field(factory=Job)
    device: str = "cpu"
    mode: Mode = "eager"
    masters: bool = False
    limits: Limits = attrs.field(factory=Limits)


def facts_of(job: Job) -> dict[str, Any]:
    """
    The facts of a job that determine its results, whatever the mapping onto ranks: the model and a
    step's data.
    """
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


def build_trial(member: Member, trial: Trial) -> Worker:
    """A trial's worker before its first step; every rank calls this function."""
    masters = trial.masters
    wide = torch.float32 if masters else torch.bfloat16

    def optimizer(stages: list[StageBackend]) -> Optimizer:
        if not masters:
            return Optimizer(stages)
        return Optimizer(stages, master_dtype=wide, capturable=trial.device == "cuda")

    worker = build_worker_of(
        member,
        trial.job,
        trial.mode,
        limits=trial.limits,
        optimizer=optimizer,
        dtype=wide,
        fuse=False if masters else None,
    )
    worker.heed_termination()
    return worker


def persistent_digests(worker: Worker, job: Job) -> dict[str, str]:
    """A digest of every tensor that a checkpoint saves, by the model's names."""
    worker.runtime.drain()
    place = worker.member.rank % worker.pp
    naming = by_layer(job.layers)
    held = PersistentTensors.of(
        worker.runtime, worker.optimizer, naming, worker.replica, place
    ).tensors
    return dict(zip(held, (digests([tensor])[0] for tensor in held.values()), strict=True))


def first_run(
    member: Member,
    trial: Trial,
    folder: str,
    *,
    until: int = UNTIL,
    save_at: Sequence[int] = (SAVED_AT,),
    asynchronous: bool = False,
) -> dict[str, Any]:
    """Train from the beginning, and save after some steps."""
    side = TrainedSide(build_trial(member, trial))
    checkpoints = Checkpoints(folder, asynchronous=asynchronous)
    said = _train(side, trial, checkpoints, until, save_at)
    checkpoints.close()
    side.close()
    return said


def resumed_run(
    member: Member,
    trial: Trial,
    folder: str,
    *,
    until: int = UNTIL,
    save_at: Sequence[int] = (),
    replicas: Replicas = "same",
) -> dict[str, Any]:
    """Resume from the latest checkpoint, and continue training."""
    side = TrainedSide(build_trial(member, trial))
    checkpoints = Checkpoints(folder)
    free = _load(side.worker, trial, checkpoints, replicas)
    said = {**_train(side, trial, checkpoints, until, save_at), "free": free}
    said["changed"] = list(checkpoints.changed)
    checkpoints.close()
    side.close()
    return said


def _load(
    worker: Worker, trial: Trial, checkpoints: Checkpoints, replicas: Replicas
) -> dict[str, Any]:
    path = checkpoints.latest()
    assert path is not None, f"{checkpoints.folder}: expected a checkpoint, found none"
    job = trial.job
    return checkpoints.load(path, worker, by_layer(job.layers), facts_of(job), replicas=replicas)


def _train(
    side: TrainedSide, trial: Trial, checkpoints: Checkpoints, until: int, save_at: Sequence[int]
) -> dict[str, Any]:
    """
    Train until an epoch. Return losses, and digests of the state before training, at each save and
    after training.
    """
    job, worker = trial.job, side.worker
    began, first, saved = worker.runtime.epoch, persistent_digests(worker, job), {}
    while worker.runtime.epoch < until:
        side.step()
        if (epoch := worker.runtime.epoch) in save_at:
            side.drain()
            saved[str(epoch)] = persistent_digests(worker, job)
            free = {"position": epoch * job.microbatches * job.dp}
            checkpoints.save(worker, by_layer(job.layers), facts_of(job), free)
    side.drain()
    checkpoints.wait()
    last = persistent_digests(worker, job)
    losses = {str(step): side.losses_of(step) for step in range(began, until)}
    return {
        "began": began,
        "epoch": worker.runtime.epoch,
        "launches": side.launches,
        "losses": losses,
        "first": first,
        "saved": saved,
        "last": last,
    }


def remapped_run(
    member: Member,
    trial: Trial,
    folder: str,
    *,
    replicas: Replicas = "same",
    save: bool = False,
) -> dict[str, Any]:
    """
    Load the latest checkpoint and take a step; then take the same step in a pipeline set up by
    hand.

    Args:
        member: This process.
        trial: The training job under the new mapping.
        folder: The folder of checkpoints.
        replicas: The saved replica whose scaling state each replica loads.
        save: Whether the state after the step is saved.
    """
    side = TrainedSide(build_trial(member, trial))
    checkpoints = Checkpoints(folder)
    path = checkpoints.latest()
    assert path is not None
    whole = Path(f"{path}-{os.getppid()}.pt")
    if member.rank == 0:
        dcp_to_torch_save(path, whole)
    free = _load(side.worker, trial, checkpoints, replicas)
    epoch = side.worker.runtime.epoch
    loaded = persistent_digests(side.worker, trial.job)
    said = _train(side, trial, checkpoints, epoch + 1, (epoch + 1,) if save else ())
    checkpoints.close()
    side.close()
    held = torch.load(whole, weights_only=True, map_location="cpu")
    there = json.loads((path / "facts.json").read_text())["mapping"]["replicas"]
    by_hand = TrainedSide(build_trial(member, trial))
    worker = by_hand.worker
    whose = 0 if shares_amax(worker.runtime) else worker.replica % there
    _copy(worker, trial.job, held, epoch, whose)
    if worker.rank_log is not None:
        worker.rank_log("load", epoch=epoch)
    copied = persistent_digests(worker, trial.job)
    by_hand.step()
    theirs = persistent_digests(worker, trial.job)
    losses = {str(epoch): by_hand.losses_of(epoch)}
    by_hand.close()
    dist.barrier()
    if member.rank == 0:
        whole.unlink()
    return {
        **said,
        "free": free,
        "changed": list(checkpoints.changed),
        "loaded otherwise": differing_names(loaded, copied),
        "differ": differing_names(said["last"], theirs),
        "moved": len(differing_names(loaded, said["last"])),
        "same losses": losses == said["losses"],
    }


def _copy(worker: Worker, job: Job, held: Mapping[str, Tensor], epoch: int, replica: int) -> None:
    """
    Copy the saved state into the worker by hand: find each layer's number, and copy tensors one by
    one.
    """
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


def differing_names(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """The names whose values differ, or that only one side has."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
