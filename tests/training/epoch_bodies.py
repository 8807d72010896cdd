"""What the ranks run in the tests of scales that move (are updated) once per step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qeffect.gpu_runtime.backends.protocol import parameters
from qeffect.gpu_runtime.ranks.consent import StoppedError
from qeffect.gpu_runtime.ranks.job import Batches, Job
from qeffect.gpu_runtime.ranks.membership import Member, join
from qeffect.gpu_runtime.ranks.worker import Worker
from qeffect.gpu_runtime.ranks.worker_assembly import build_worker
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits
from qeffect.gpu_runtime.training.checkpoint import Checkpoints
from qeffect.gpu_runtime.training.language_model import LanguageJob
from qeffect.gpu_runtime.training.state import Naming, by_layer
from qeffect.gpu_runtime.training.state_digest import state_digest
from tests.ranks.bodies import LIMITS
from tests.runtime.epoch_oracle import Oracle, state_of


def _naming(job: Job) -> Naming:
    return job.name_of if isinstance(job, LanguageJob) else by_layer(job.layers)


def _begun(member: Member, job: Job) -> Worker:
    return build_worker(member, job, "reference", limits=LIMITS)


def _stepped(worker: Worker, job: Job, until: int) -> dict[str, Any]:
    """
    Train to a step; return this rank's losses, the norms, and the digest of the state of all ranks.
    """
    norms = []
    began = worker.runtime.epoch
    for step in range(began, until):
        job.prepare(step, worker.optimizer)
        worker.step()
        norms.append(None if worker.norm is None else worker.norm.total)
    feed = worker.feed
    assert isinstance(feed, Batches)
    found = worker.calibration
    return {
        "digest": state_digest(worker, _naming(job)),
        "losses": [feed.losses_of(step) for step in range(began, until)],
        "norms": norms,
        "calibrated": None if found is None else [found.walks, found.converged],
    }


def trained(jobs: list[Job], steps: int) -> list[dict[str, Any]]:
    """Train every job in turn, from its beginning."""
    member = join("cpu", LIMITS)
    said = []
    for job in jobs:
        worker = _begun(member, job)
        said.append(_stepped(worker, job, steps))
        worker.close()
    return said


def stopped(job: LanguageJob, folder: str, steps: int) -> dict[str, Any]:
    """Train some steps and save."""
    member = join("cpu", LIMITS)
    worker = _begun(member, job)
    found = _stepped(worker, job, steps)
    kept = Checkpoints(Path(folder))
    kept.save(worker, job.name_of, {}, {})
    kept.close()
    worker.close()
    return found


def resumed(job: LanguageJob, folder: str, steps: int) -> dict[str, Any]:
    """Load a checkpoint, continue training to a step, and save."""
    member = join("cpu", LIMITS)
    worker = _begun(member, job)
    kept = Checkpoints(Path(folder))
    newest = kept.latest()
    assert newest is not None
    try:
        kept.load(newest, worker, job.name_of, {})
    except Exception as error:  # the test says which
        return {"refused": str(error)}
    found = _stepped(worker, job, steps)
    kept.save(worker, job.name_of, {}, {})
    kept.close()
    worker.close()
    return found


def beside_oracle(job: Job, steps: int) -> dict[str, Any]:
    """Train a job of one stage, after calibration, beside the oracle."""
    member = join("cpu", LIMITS)
    worker = _begun(member, job)
    (stage,) = worker.runtime.stages.values()
    oracle = Oracle(parameters(stage), job.config.heads, job.history)
    draw = job.batch(torch.device("cpu"))

    def microbatch(step: int, m: int) -> Callable[[Oracle], None]:
        def run(of: Oracle) -> None:
            x, target = draw(step, m)
            apart = of.forward(x).float() - target.float()
            (apart.pow(2).mean() / job.microbatches).backward()  # type: ignore[no-untyped-call]

        return run

    def batches(step: int) -> list[Callable[[Oracle], None]]:
        return [microbatch(step, m) for m in range(job.microbatches)]

    walks = oracle.calibrate(batches(0))
    for step in range(steps):
        oracle.step(batches(step))
        worker.step()
    ours = {**{n: p.detach() for n, p in parameters(stage).items()}, **stage.numerical_state()}
    theirs = {**{n: p.detach() for n, p in oracle.named.items()}, **state_of(oracle)}
    assert ours.keys() == theirs.keys()
    found = worker.calibration
    worker.close()
    return {
        "differ": [name for name in ours if not same_bits(ours[name], theirs[name])],
        "of": len(ours),
        "walks": [walks, None if found is None else found.walks],
    }


def stumbling(job: LanguageJob, steps: int) -> dict[str, Any]:
    """Train undisturbed; then let the calibration fail once on the last rank, and train again."""
    member = join("cpu", LIMITS)
    (plain,) = trained([job], steps)
    worker = _begun(member, job)
    stage = next(iter(worker.runtime.stages.values()))
    real, left = stage.forward, [0]

    def failing(tape: Any, inputs: Any) -> Any:
        left[0] += 1
        if left[0] == job.microbatches + 2:  # in the second walk
            raise RuntimeError("an injected failure")
        return real(tape, inputs)

    if member.rank == job.world - 1:
        stage.forward = failing  # type: ignore[method-assign]
    job.prepare(0, worker.optimizer)
    cause = None
    try:
        worker.step()
    except StoppedError as stopped:
        cause = stopped.cause.text
        epoch = worker.runtime.epoch
        worker.rebuild(stopped)
    found = _stepped(worker, job, steps)
    worker.close()
    return {"cause": cause, "epoch": epoch, "same": found == plain}
