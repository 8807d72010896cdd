"""What the ranks run in the tests of language models."""

from __future__ import annotations

import io
import itertools
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from qeffect.cli import main
from qeffect.gpu_runtime.backends.protocol import matrices
from qeffect.gpu_runtime.backends.reference.dropout import RandomNumbers
from qeffect.gpu_runtime.backends.te import domain as te
from qeffect.gpu_runtime.lab.comparisons.ranks import compare_pipelines
from qeffect.gpu_runtime.ranks import processes
from qeffect.gpu_runtime.ranks.membership import join
from qeffect.gpu_runtime.ranks.worker_assembly import build_worker
from qeffect.gpu_runtime.step.memory.digests import digests
from qeffect.gpu_runtime.step.memory.numerical_state import live_state
from qeffect.gpu_runtime.step.optimizer import Optimizer
from qeffect.gpu_runtime.training.checkpoint.lock import FolderLock
from qeffect.gpu_runtime.training.checkpoint.status import STATUS
from qeffect.gpu_runtime.training.config_file import read
from qeffect.gpu_runtime.training.data import Loader, Tokens
from qeffect.gpu_runtime.training.evaluate import evaluate
from qeffect.gpu_runtime.training.language_model import LanguageJob
from qeffect.gpu_runtime.training.loop import Trainer
from tests.ranks.bodies import LIMITS, bits, parameters_of
from tests.runtime import fake_te


def evaluating(job: LanguageJob, held_out: Loader, steps: int) -> dict[str, Any]:
    """
    Run steps with evaluations between them, then the same steps without; return what differs, and
    what changed.
    """
    member = join("cpu", LIMITS)
    found, losses, held, moved = [], [], [], []
    for evaluates in (True, False):
        worker = build_worker(member, job, "reference", limits=LIMITS)
        for step in range(steps):
            if evaluates:
                before = bits(worker)
                held.append(evaluate(worker, job, held_out, 6))
                held.append(evaluate(worker, job, held_out, 6))
                after = bits(worker)
                moved += [name for name in before if before[name] != after[name]]
            job.prepare(step, worker.optimizer)
            worker.step()
        found.append(bits(worker))
        losses.append([worker.feed.losses_of(n) for n in range(steps)])
        live = live_state(worker.runtime.domain)
        worker.close()
    return {
        "differ": [name for name in found[0] if found[0][name] != found[1][name]],
        "of": len(found[0]),
        "moved": moved,
        "same losses": losses[0] == losses[1],
        "held out": held,
        "state": len(digests(list(live.values()))),
    }


def held_out(jobs: list[LanguageJob], text: Loader) -> list[list[float]]:
    """For each job before its first step: the loss of each single window, then of all windows."""
    member = join("cpu", LIMITS)
    said = []
    for job in jobs:
        worker = build_worker(member, job, "reference", limits=LIMITS)
        count, each = text.tokens.windows(text.sequence), text.sequence
        ones = []
        for n in range(count if job.config.batch == 1 else 0):
            values = text.tokens.values[n * each : (n + 1) * each + 1]
            one = Loader(tokens=Tokens(text.tokens.path, values), sequence=each, shuffle=False)
            ones.append(evaluate(worker, job, one, 1))
        said.append([*ones, evaluate(worker, job, text, count)])
        worker.close()
    return said


def library(jobs: list[LanguageJob], steps: int) -> list[dict[str, Any]]:
    """
    Train jobs over a stand-in for Transformer Engine, natively and guarded, and compare bit for
    bit.
    """
    sys.modules.update(fake_te.modules())
    te.library.cache_clear()
    member = join("cpu", LIMITS)
    results = [
        compare_pipelines(member, job, steps, "transformer-engine", limits=LIMITS) for job in jobs
    ]
    return [
        {"totals": one.totals(), "same": one.same, "losses": one.losses, "names": _names(job)}
        for job, one in zip(jobs, results, strict=True)
    ]


def _names(job: LanguageJob) -> dict[str, list[str]]:
    """The names of the parts that only the stand-in's first and last stage have."""
    stages = job.stages((0, job.num_stages - 1), torch.device("cpu"), "transformer-engine")
    return {
        "matrices": [m.name for m in matrices(stages[1])],
        "others": [
            p.name for stage in stages for p in stage.non_matrix if not p.name.startswith("layers.")
        ],
        "state": [name for name in stages[1].addresses() if name.startswith("parameter:head")],
    }


def trained(config: str, *options: str) -> tuple[int, str, str]:
    """
    Run `qeffect runtime train` on a rank without TensorBoard; return the exit code and the output.
    """
    sys.modules["tensorboard"] = None  # type: ignore[assignment]
    processes._LAST_WORD_S = 0.0
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["runtime", "train", config, *options])
    return code, out.getvalue(), err.getvalue()


def standing_still(config: str) -> tuple[int, str, str]:
    """The same as `trained`, with a generator that always draws at the same position."""
    drop = RandomNumbers.drop

    def baked(self: RandomNumbers, value: Tensor, p: float, at: Tensor | None = None) -> Tensor:
        return drop(self, value, p, self.position.clone())

    RandomNumbers.drop = baked  # type: ignore[method-assign]
    return trained(config)


def in_turn(cases: list[list[str]]) -> list[tuple[int, str, str]]:
    """Run the command several times in turn, in the same processes."""
    return [trained(*case) for case in cases]


def moved(case: list[str]) -> list[tuple[int, str, str]]:
    """
    Run the command, and move its folder away after the first save. A second lock, as of another
    run, then takes the new folder.
    """
    real, others = Trainer._step, []

    def step(self: Trainer, number: int) -> None:
        if number == 1 and self.checkpoints is not None:
            folder = self.checkpoints.folder
            folder.rename(folder.with_name("away"))
            others.append(FolderLock(folder))
            (folder / STATUS).write_text("the other run's")
        real(self, number)

    Trainer._step = step  # type: ignore[method-assign]
    return [trained(*case)]


def exact(jobs: list[LanguageJob], steps: int) -> list[dict[str, Any]]:
    """Train jobs natively and guarded, and compare bit for bit, including the final parameters."""
    member = join("cpu", LIMITS)
    said = []
    for job in jobs:
        result = compare_pipelines(member, job, steps, limits=LIMITS)
        worker = build_worker(member, job, "reference", limits=LIMITS)
        for step in range(steps):
            job.prepare(step, worker.optimizer)
            worker.step()
        said.append({"same": result.same, "parameters": parameters_of(worker)})
        worker.close()
    return said


def stumbling(config: str) -> dict[str, Any]:
    """
    Train a run in which an action of rank 1 fails in one step, and in the second attempt at another
    step.
    """
    member = join("cpu", LIMITS)
    settings = read(Path(config))
    trainer = Trainer(member, settings)
    executor: Any = trainer.worker.runtime.executor
    calls = itertools.count()

    def fail(*given: Any) -> Any:
        if next(calls) in (5, 20):
            raise ArithmeticError("an injected failure")
        return type(executor).wgrad(executor, *given)

    if member.rank == 1:
        executor.wgrad = fail
    trainer.run()
    disturbed, losses = bits(trainer.worker), trainer.losses
    trainer.close()
    plain = Trainer(member, attrs.evolve(settings, run=attrs.evolve(settings.run, log="")))
    plain.run()
    clean = bits(plain.worker)
    plain.close()
    return {
        "losses": losses,
        "undisturbed": plain.losses,
        "differ": [name for name in clean if clean[name] != disturbed[name]],
        "stopped twice": trainer.worker.attempt == 2,
    }


def half_updated(config: str, at: int) -> tuple[int, str, str]:
    """Run `qeffect runtime train`; in one step, the optimizer's update fails half way."""
    update = Optimizer.update
    calls = itertools.count()

    def failing(self: Optimizer, *given: Any) -> Any:
        if next(calls) == at:
            parameter = self._parameters[0]
            parameter.data.zero_()
            raise MemoryError("an injected failure")
        return update(self, *given)

    Optimizer.update = failing  # type: ignore[method-assign]
    return trained(config)
