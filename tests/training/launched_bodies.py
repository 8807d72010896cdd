"""
What the ranks run in the tests of training with launches, with a stand-in for a device's graphs.
"""

from __future__ import annotations

import gc
import io
import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import attrs
import torch

from qeffect.cli import main
from qeffect.gpu_runtime.backends.determinism import DETERMINISTIC
from qeffect.gpu_runtime.lab.sides import restart as restarts
from qeffect.gpu_runtime.lab.sides.restart import Trial
from qeffect.gpu_runtime.ranks import processes
from qeffect.gpu_runtime.ranks.channels import LostError
from qeffect.gpu_runtime.ranks.consent import Consent
from qeffect.gpu_runtime.ranks.gate import UpdateGate
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.membership import join
from qeffect.gpu_runtime.ranks.obstacles import obstacles
from qeffect.gpu_runtime.ranks.worker_assembly import build_worker
from qeffect.gpu_runtime.training.config_file import read
from qeffect.gpu_runtime.training.loop import Trainer
from tests.ranks import recorded, recorded_bodies
from tests.ranks.bodies import bits
from tests.ranks.recorded_bodies import LIMITS


def stand_in() -> None:
    """Let this process run a step as one launch from now on, as far as a CPU can."""
    recorded.install()


def trained(config: str, *, resume: bool = False, faults: Any = (), **run: Any) -> dict[str, Any]:
    """
    Train one run, and return its final state.

    Args:
        config: The file.
        resume: Whether the run continues from the newest checkpoint.
        faults: For each fault, the epoch before which it is injected, its rank, its kind, and its
            action.
        run: Fields of `[run]` instead of the file's.
    """
    settings = read(Path(config), run=run)
    member = join(settings.run.device, LIMITS)
    trainer = Trainer(member, settings, resume=resume)
    makes = {**recorded_bodies.FAULTS, "unheard": _unheard, "heard in vain": _heard_in_vain}
    for _, rank, kind, action in faults:
        assert kind in makes, (rank, action)
    due = {epoch: fault for epoch, *fault in faults}
    step, whole = trainer.steps.step, trainer.steps.one_launch
    ahead: list[int] = []

    def faulty() -> None:
        ahead.append(0 if whole is None else whole.ahead)
        if fault := due.pop(trainer.worker.runtime.epoch, None):
            victim, kind, action = fault
            if member.rank == victim:
                makes[kind](trainer.worker, action)
        step()

    trainer.steps.step = faulty  # type: ignore[method-assign]
    trainer.run()
    left = bits(trainer.worker)
    record = dict(trainer.record())
    trainer.close()
    return {
        **{name: record[name] for name in ("began", "losses", "held_out", "launches")},
        "replays": record["guarded_replays"],
        "left": left,
        "ahead": ahead,
        "rehearsed and as one": [0, 0] if whole is None else whole.rehearsal.steps,
    }


def _unheard(*_: Any) -> None:
    """Once, this rank does not receive the other ranks' votes after a step in time."""
    real = Consent.all_gather

    def all_gather(consent: Consent, own: torch.Tensor) -> torch.Tensor:
        Consent.all_gather = real  # type: ignore[method-assign]
        raise LostError("commit", -1, True, "nothing was heard")

    Consent.all_gather = all_gather  # type: ignore[method-assign]


def _heard_in_vain(*_: Any) -> None:
    """Once, this rank receives the other ranks' votes after a step only after its time limit."""
    real = Consent.all_gather

    def all_gather(consent: Consent, own: torch.Tensor) -> torch.Tensor:
        Consent.all_gather = real  # type: ignore[method-assign]
        real(consent, own)
        raise LostError("commit", -1, True, "heard too late")

    Consent.all_gather = all_gather  # type: ignore[method-assign]


def on_devices(cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The same as `in_turn`, on GPUs."""
    os.environ.update(DETERMINISTIC)
    found = []
    for config, options in cases:
        found.append(trained(config, **options))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the handler holds the worker
        gc.collect()  # one runtime at a time shares the library's state
    return found


def in_turn(cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Train several runs in turn, in the same processes."""
    stand_in()
    return [trained(config, **options) for config, options in cases]


def commands(cases: list[list[str]]) -> list[tuple[int, str, str]]:
    """The same as `said`, in a process where a step can be one launch."""
    stand_in()
    return said(cases)


def said(cases: list[list[str]]) -> list[tuple[int, str, str]]:
    """Run several `qeffect runtime` commands in turn; return exit codes and output."""
    processes._LAST_WORD_S = 0.0
    found = []
    for case in cases:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(["runtime", *case])
        found.append((code, out.getvalue(), err.getvalue()))
    return found


def unable(config: str) -> dict[str, Any]:
    """
    Train a run in which the last rank's library cannot capture a step; return its output and final
    state.
    """
    stand_in()
    member = join("cpu", LIMITS)
    real = UpdateGate.capture

    def capture(self: Any, gradients: Any, differs: Any = None) -> Any:
        if gradients is not None and member.rank == member.world - 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return real(self, gradients, differs)

    UpdateGate.capture = capture  # type: ignore[method-assign]
    return trained(config)


def without_graphs(jobs: list[Any]) -> list[dict[str, Any]]:
    """What workers for launches lack on a CPU, and whether their learning rates are tensors."""
    recorded.actions_without_graphs()
    member = join("cpu", LIMITS)
    found = []
    for job in jobs:
        worker = build_worker(member, job, "reference", mode="one launch")
        groups = worker.optimizer.adamw.param_groups
        rates = [group["lr"] for group in groups]
        found.append({"missing": obstacles(worker), "tensors": all(map(torch.is_tensor, rates))})
        worker.close()
    return found


def restarted(job: Job, folder: str) -> list[dict[str, Any]]:
    """
    The parts of `report restarts`, called directly: a run, a run resumed with launches, and a run
    resumed with replays.
    """
    stand_in()
    member = join("cpu", LIMITS)
    launched = Trial(job=job, limits=LIMITS, mode="one launch")
    replayed = attrs.evolve(launched, mode="eager")
    whole = restarts.first_run(member, launched, folder)
    return [whole, *(restarts.resumed_run(member, one, folder) for one in (launched, replayed))]
