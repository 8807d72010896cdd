"""
The training loop: steps of the guarded pipeline, its rate, its log, its evaluation.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch

from qeffect.report import UnusableError, finite
from qeffect.schedule.actions import ScheduleError

from ..backends.dynamic import library
from ..backends.protocol import BackendError
from ..ranks.assembly import build_worker
from ..ranks.consent import StoppedError
from ..ranks.world import Limits, Member, agree_on, gathered
from ..runtime import mode_on
from ..step.graphs import GraphExecutor
from .balance import measured, slowest
from .checkpoint import Checkpoints, EarlierSaveError
from .config import Config
from .config_file import differences
from .data import DataError, Loader, Tokens
from .evaluate import evaluate
from .figures import perplexity
from .files import manifest, read_facts
from .launches import Steps, mode_of
from .metrics import Log, memory_bytes
from .model import Language, balanced_cut, even_cut
from .rates import Rate

__all__ = ["TIMES", "Opened", "Trainer", "backend_of", "job_of", "opened", "settled"]


def backend_of(config: Config) -> str:
    """The layers that a run has."""
    if config.run.backend != "auto":
        return config.run.backend
    return "reference" if config.run.device == "cpu" else "transformer-engine"


def job_of(config: Config) -> Language:
    """
    What a configuration trains, with its data open.

    Raises:
        UnusableError: Fields do not fit each other, or the data do not fit them.
    """
    model, parallel, source = config.model, config.parallel, config.source
    if model.vocabulary % 16:
        raise UnusableError(
            f"{source}: [model] vocabulary: expected a multiple of 16, which FP8 products need, "
            f"found {model.vocabulary}"
        )
    if model.head == "torchao":
        try:
            library()
        except BackendError as error:
            raise UnusableError(f"{source}: [model] head: {error}") from None
    steps, layer = config.optimizer.decay_steps or config.run.steps, config.layer()
    try:
        job = Language(
            schedule=parallel.schedule,
            pp=parallel.pp,
            vpp=parallel.vpp or None,
            dp=parallel.dp,
            microbatches=parallel.microbatches,
            history=model.history,
            rule=parallel.rule,  # type: ignore[arg-type]
            provisioning=parallel.provisioning,  # type: ignore[arg-type]
            amax=parallel.amax,
            config=layer,
            seed=model.seed,
            vocabulary=model.vocabulary,
            tied=model.tied,
            dynamic=model.head == "torchao",
            rate=Rate(
                peak=config.optimizer.rate,
                warmup=config.optimizer.warmup,
                steps=steps,
                least=config.optimizer.least_rate,
            ),
            weight_decay=config.optimizer.weight_decay,
            master=config.optimizer.master,
            clip_norm=config.optimizer.clip_norm or None,
            skip_nonfinite=config.optimizer.skip_nonfinite,
        )
        job.table()
    except (ScheduleError, ValueError) as error:
        raise UnusableError(f"{source}: [parallel] {error}") from None
    cut = _cut(config, job.num_stages)
    return attrs.evolve(job, cut=cut, loader=_loader(config, config.data.train, "train"))


def _cut(config: Config, stages: int) -> tuple[int, ...]:
    parallel, layers = config.parallel, config.model.layers
    times, where = parallel.layer_times, f"{config.source}: [parallel] cut"
    for name in ("embedding_time", "head_time"):
        if not times and getattr(parallel, name):
            raise UnusableError(
                f"{config.source}: [parallel] {name}: expected layer_times beside it, found none; "
                "give all three times, or none, to have them measured"
            )
    if isinstance(parallel.cut, list) and not times:
        if len(parallel.cut) != stages or sum(parallel.cut) != layers:
            raise UnusableError(
                f"{where}: expected {stages} stages with {layers} layers together, found "
                f"{parallel.cut}"
            )
        return tuple(parallel.cut)
    if times and parallel.cut != "measured":
        raise UnusableError(
            f"{config.source}: [parallel] layer_times: times are for cut = 'measured', found cut = "
            f"{parallel.cut!r}"
        )
    if times and len(times) != layers:
        raise UnusableError(
            f"{config.source}: [parallel] layer_times: expected one of each of {layers} layers, "
            f"found {len(times)}"
        )
    try:
        if times:
            return balanced_cut(
                times, stages, embedding=parallel.embedding_time, head=parallel.head_time
            )
        if parallel.cut in ("even", "measured"):  # `settled` cuts by what is measured
            return even_cut(layers, stages)
        return balanced_cut(
            [1.0] * layers, stages, embedding=parallel.embedding_cost, head=parallel.head_cost
        )
    except ValueError as error:
        raise UnusableError(f"{where}: {error}; set [model] layers, pp or vpp") from None


class Opened(NamedTuple):
    """What a run trains, and the text it is evaluated on where there is one; read once."""

    job: Language
    held_out: Loader | None


def opened(config: Config) -> Opened:
    """
    What a configuration trains, with its data open.

    Raises:
        UnusableError: As `job_of`; or the text to evaluate on cannot be used.
    """
    job, text = job_of(config), config.data.held_out
    return Opened(job, _loader(config, text, "held_out") if text else None)


TIMES = ("embedding_time", "layer_times", "head_time")
"""The fields of what is measured."""


def settled(
    member: Member,
    config: Config,
    data: Opened,
    *,
    resume: bool = False,
    times: Mapping[str, Any] | None = None,
) -> tuple[Config, Opened]:
    """
    Cut a model by measured times, where the file asks for that and has none; every rank calls it.

    Each rank times its own device, and each action takes as long as on the slowest of them. A run
    that goes on has the times of its newest checkpoint, and so its cut.

    Args:
        member: This process.
        config: The run.
        data: What `opened` gave of it.
        resume: Whether it goes on from a checkpoint.
        times: Those that another run of the same model was cut by; None measures.

    Returns:
        The configuration with its times, from which the same cut follows anywhere, and the data
        with the model cut.

    Raises:
        BackendError: A rank cannot measure; why.
    """
    parallel = config.parallel
    if parallel.cut != "measured" or parallel.layer_times:
        return config, data
    job, layers = data.job, config.model.layers
    saved = _times_saved(config) if resume and member.rank == 0 else None
    fields = times if times is not None else gathered(member, saved)[0]
    if fields is None:
        own, problem = None, ""
        try:
            mode = mode_on(member.device, parallel.mode)
            mode = "replays" if mode == "one launch" else mode
            own = measured(job, member.device, backend_of(config), mode=mode)
        except (BackendError, RuntimeError, ValueError) as error:
            problem = f"{config.source}: [parallel] cut: rank {member.rank} cannot measure: {error}"
        agree_on(member, problem)
        fields = slowest(gathered(member, own)).fields(layers)
        gc.collect()
        if member.device.type == "cuda":
            torch.cuda.empty_cache()
    settled_by = attrs.evolve(config, parallel=attrs.evolve(parallel, **fields))
    cut = _cut(settled_by, job.num_stages)
    return settled_by, Opened(attrs.evolve(job, cut=cut), data.held_out)


def _times_saved(config: Config) -> dict[str, Any] | None:
    """The times in the newest checkpoint; None where there is none, or it has none that fit."""
    folder = config.checkpoint.folder
    try:
        path = Checkpoints(config.path(folder)).latest() if folder else None
        if path is None:
            return None
        saved = read_facts(path, manifest(path))["free"]["configuration"]["parallel"]
    except (BackendError, LookupError, TypeError):
        return None  # a load says what is wrong with it
    fields = {name: saved.get(name) for name in TIMES}
    times = fields["layer_times"]
    return fields if times and len(times) == config.model.layers else None


def _loader(config: Config, name: str, field: str) -> Loader:
    sequence = config.model.sequence
    try:
        tokens = Tokens.open(
            config.path(name), vocabulary=config.model.vocabulary, sequence=sequence
        )
    except DataError as error:
        raise UnusableError(f"{config.source}: [data] {field}: {error}") from None
    shuffle = config.data.shuffle and field == "train"
    return Loader(tokens=tokens, sequence=sequence, seed=config.data.seed, shuffle=shuffle)


class Trainer:
    """
    One rank of a training run; every rank makes one and calls the same.

    Args:
        member: This process.
        config: The run.
        show: Shows a line on a terminal, unless one has just been shown; only rank 0 does.
        data: What `opened` gave of the configuration; opened here where it is left out.
        note: Shows a line in any case; `show` where it is left out.
        resume: Go on from the newest checkpoint, where there is one.

    Raises:
        UnusableError: The configuration or the data cannot be used; or there are checkpoints and
            nobody said to go on from them.
        BackendError: A stage cannot be built, or the checkpoint cannot be loaded.
        StoppedError: A rank is gone while it is loaded.
    """

    def __init__(
        self,
        member: Member,
        config: Config,
        show: Callable[[str], None] = lambda _: None,
        *,
        data: Opened | None = None,
        note: Callable[[str], None] | None = None,
        resume: bool = False,
    ) -> None:
        config, data = settled(member, config, data or opened(config), resume=resume)
        self.member, self.config = member, config
        self.job, self.held_out = data
        self.checkpoints, self.found = self._checkpoints(resume=resume)
        self.log = self._log(show, note)
        self._tell_cut()
        mode, why = mode_of(member, self.job, config.parallel.mode)
        self.worker = build_worker(
            member,
            self.job,
            backend_of(config),
            mode=mode,
            limits=Limits(start=config.run.start_s, commit=config.run.commit_s),
            event_log=self._event_log(),
        )
        self.losses: list[float] = []
        self.seconds = 0.0
        self.evaluations: dict[int, float] = {}
        self.began = 0
        if self.checkpoints is not None and self.found is not None:
            self._go_on(self.checkpoints, self.found)
        self.steps = Steps(self.worker, why=why)
        if config.parallel.mode == "one launch":
            self._tell_launches()
        self._told = self.began  # steps whose losses were brought together
        self._since = 0.0  # when the first of the others began
        self._stops = 0  # in a row
        self._stopped_at = -1

    def _checkpoints(self, *, resume: bool) -> tuple[Checkpoints | None, Path | None]:
        """Where checkpoints go, and the one to go on from."""
        given = self.config.checkpoint
        where = f"{self.config.source}: [checkpoint] folder"
        if not given.folder:
            if resume:
                raise UnusableError(f"{where}: --resume needs one; name where checkpoints are")
            return None, None
        made = Checkpoints(
            self.config.path(given.folder), keep=given.keep, asynchronous=given.asynchronous
        )
        newest, problem = None, ""
        try:
            made.prepare()
            newest = made.latest()
        except BackendError as error:
            problem = f"{where}: {error}"
        agree_on(self.member, problem)
        if newest is not None and not resume:
            raise UnusableError(
                f"{where}: {newest} is there; go on from it with --resume, or name another folder"
            )
        return made, newest

    def _must(self) -> dict[str, Any]:
        """What has to be equal where a checkpoint is loaded."""
        model = attrs.asdict(self.config.model)
        del model["seed"]
        return {"model": model, "master": self.job.master}

    def _go_on(self, checkpoints: Checkpoints, path: Path) -> None:
        whose: Any = self.config.checkpoint.replicas
        free = checkpoints.load(path, self.worker, self.job.name_of, self._must(), replicas=whose)
        self.began = self.worker.runtime.epoch
        problem = ""
        try:
            assert self.job.loader is not None
            self.job.loader.load(free["data"], self.began)
        except DataError as error:
            problem = f"{self.config.source}: [data] train: {error}"
        agree_on(self.member, problem)
        saved = free["configuration"]
        steps = saved["optimizer"]["decay_steps"] or saved["run"]["steps"]
        saved["optimizer"]["decay_steps"] = steps
        if not self.config.optimizer.decay_steps:  # the curve of the run that began
            self.job = attrs.evolve(self.job, rate=attrs.evolve(self.job.rate, steps=steps))
        if self.log is not None:
            changed = [*checkpoints.changed, *differences(saved, self._configuration())]
            self.log({"resumed": str(path), "step": self.began, "changed": changed})
            for one in changed:
                self.log.note(f"since {path.name}: {one}")

    def _configuration(self) -> dict[str, Any]:
        """The tables of this run, with the steps of its learning rate as they turned out."""
        tables = self.config.record()
        tables["optimizer"]["decay_steps"] = self.job.rate.steps
        return tables

    def _save(self, step: int, *, last: bool) -> None:
        """
        Save after `step` steps.

        Where that cannot be written, say so and go on, unless nothing comes after it.
        """
        try:
            self.save()
        except BackendError as error:
            if last and not isinstance(error, EarlierSaveError):
                raise
            if self.log is not None:
                self.log({"step": step - 1, "not_saved": str(error)})

    def save(self) -> None:
        """
        Write a checkpoint between two steps.

        Raises:
            BackendError: It cannot be written; those before it are as they were.
            StoppedError: Something is live, or a rank is gone.
        """
        if self.checkpoints is None:
            return
        step = self.worker.runtime.epoch
        assert self.job.loader is not None
        free = {
            "data": self.job.loader.state(self.job.position(step)),
            "configuration": self._configuration(),
        }
        self.checkpoints.save(self.worker, self.job.name_of, self._must(), free)
        if self.log is not None and self.checkpoints.untidy:
            self.log({"step": step - 1, "not_removed": list(self.checkpoints.untidy)})

    def _log(self, show: Callable[[str], None], note: Callable[[str], None] | None) -> Log | None:
        run, log, problem = self.config.run, None, ""
        if self.member.rank == 0:
            try:
                log = Log(
                    self.config.path(run.log) if run.log else None,
                    self.config.path(run.tensorboard) if run.tensorboard else None,
                    show,
                    note,
                )
            except UnusableError as error:
                problem = f"{self.config.source}: {error}"
        agree_on(self.member, problem)
        return log

    def _tell_cut(self) -> None:
        """Write a cut by measured times with them: a file that has them is cut alike."""
        parallel = self.config.parallel
        if self.log is not None and parallel.cut == "measured":
            times = {name: getattr(parallel, name) for name in TIMES}
            self.log({"cut": list(self.job.cut), **times})

    def _event_log(self) -> Path | None:
        if not self.config.run.event_logs:
            return None
        folder = self.config.path(self.config.run.event_logs)
        problem = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{self.config.source}: [run] event_logs: {folder}: {error.strerror or error}"
        agree_on(self.member, problem)
        return folder / f"rank{self.member.rank}.jsonl"

    @property
    def tokens_a_step(self) -> int:
        """Tokens that one step learns from."""
        return self.job.windows_a_step * self.job.config.sequence

    def run(self) -> None:
        """
        Train to the last step, and evaluate where the configuration says.

        Raises:
            StoppedError: A rank could not go on; every rank raises it.
            BackendError: A rank was lost in an evaluation.
        """
        run, runtime = self.config.run, self.worker.runtime
        started = self._since = time.perf_counter()
        step = runtime.epoch
        while step < run.steps:
            try:
                if runtime.epoch == step:  # else a stop came behind its update
                    self._step(step)
                self._known(step + 1)
            except StoppedError as stopped:
                self._again(stopped)
                step = min(step, runtime.epoch)
                continue
            if self._evaluates(step + 1):
                paused = time.perf_counter()
                self._evaluate(step + 1)
                passed = time.perf_counter() - paused  # an evaluation is no part of a step
                started, self._since = started + passed, self._since + passed
            if self._saves(step + 1):
                self._save(step + 1, last=step + 1 == run.steps)
            step += 1
        if self.checkpoints is not None:
            self.checkpoints.wait()
        self.member.synchronize()
        self.seconds = time.perf_counter() - started

    def _evaluates(self, step: int) -> bool:
        """Whether held-out text is looked at after so many steps."""
        run = self.config.run
        due = step == run.steps or (run.evaluate_every and step % run.evaluate_every == 0)
        return self.held_out is not None and bool(due)

    def _saves(self, step: int) -> bool:
        """Whether there is a checkpoint of so many steps."""
        every = self.config.checkpoint.every
        due = step == self.config.run.steps or (every and step % every == 0)
        return self.checkpoints is not None and bool(due)

    def _step(self, step: int) -> None:
        """
        One optimizer step with the rate that is its own; with launches it may be under way behind.

        Raises:
            StoppedError: It, or the one before, ended on every rank.
        """
        self.job.prepare(step, self.worker.optimizer)
        self.steps.step()

    def _known(self, taken: int) -> None:
        """
        Behind so many steps: the log as far as is known, and all of it where something comes next.

        Raises:
            StoppedError: The last step ended on every rank, or a rank stopped behind it.
        """
        every, steps = self.config.run.log_every, self.config.run.steps
        if taken == steps or self._evaluates(taken) or self._saves(taken):
            self.steps.leave()
        while self._told < steps:
            end = min(steps, (self._told // every + 1) * every)
            if end > self.steps.known:
                break
            self._tell(end)
        if self.steps.known > self._stopped_at:
            self._stops = 0

    def _again(self, stopped: StoppedError) -> None:
        """
        Begin again after a stop, where that is allowed.

        Raises:
            StoppedError: It was stopped once more than that, or not every rank survived.
        """
        if self.steps.uncaptured(stopped):
            self._tell_launches()
        elif self._stops == self.config.run.retries:
            raise stopped
        else:
            self._stops += 1
            self.steps.rebuild(stopped)
            self._stopped_at = self.worker.runtime.epoch
            if self.log is not None:
                self.log({"step": self._stopped_at, "stopped": stopped.cause.text})
        # A rank may have heard what another has not: they bring the same together again.
        self._told = min(gathered(self.member, self._told))

    def _tell_launches(self) -> None:
        """Whether steps are launches, and why not where they are not."""
        if self.log is None:
            return
        why = self.steps.replays
        self.log({"one_launch": not why, **({"guarded_replays": why} if why else {})})
        if why:
            self.log.note(f"guarded replays, not one launch a step: {why}")

    def _tell(self, end: int) -> None:
        """Bring the losses of the steps before one together, and write a line for each of them."""
        steps = range(self._told, end)
        if self.steps.whole is None:
            self.member.synchronize()  # with launches they have ended
        now = time.perf_counter()
        words = [self.steps.word(step) for step in steps]
        none = [0.0] * self.job.microbatches
        shares = [share for word in words for share in word.losses or none]
        ranks = self.steps.gathered([float(memory_bytes(self.member.device)), *shares])
        each = (now - self._since) / len(steps)
        self.steps.forget(self._told)  # those told now are kept: a rank may not have heard
        for n, step in enumerate(steps):
            if step < self.began + len(self.losses):
                continue  # told already
            # Of each replica the rank of the last stage has the shares of its microbatches.
            own = slice(1 + n * len(none), 1 + (n + 1) * len(none))
            loss = math.fsum(share for rank in ranks for share in rank[own])
            self.losses.append(loss)
            if self.log is None:
                continue
            line = {
                "step": step,
                "loss": loss,
                "rate": self.job.rate.at(step),
                "tokens": self.job.position(step + 1) * self.job.config.sequence,
                "tokens_per_s": self.tokens_a_step / each,
                "step_ms": each * 1e3,
                "memory_bytes": int(max(rank[0] for rank in ranks)),
            }
            if (norm := words[n].norm) is not None:
                line.update(norm=norm.total, skipped=norm.skipped)
            self.log(line)
        self._told, self._since = end, now

    def _evaluate(self, step: int) -> None:
        assert self.held_out is not None
        loss = evaluate(self.worker, self.job, self.held_out, self.config.run.evaluate_windows)
        self.evaluations[step] = loss
        if self.log is not None:
            self.log({"step": step - 1, "held_out_loss": loss, "perplexity": perplexity(loss)})

    def close(self) -> None:
        """End connections and logs."""
        if self.checkpoints is not None:
            self.checkpoints.close()
        self.steps.close()
        self.worker.close()
        if self.log is not None:
            self.log.close()

    def record(self) -> Mapping[str, Any]:
        """What the run came to, for a report."""
        executor = self.worker.runtime.executor
        return {
            "began": self.began,
            "steps": self.worker.runtime.epoch,
            "losses": [finite(loss) for loss in self.losses],
            "seconds": self.seconds,
            "held_out": {str(step): finite(loss) for step, loss in self.evaluations.items()},
            "tokens_a_step": self.tokens_a_step,
            "cut": list(self.job.cut),
            "captured": isinstance(executor, GraphExecutor),
            "launches": self.steps.launches,
            "guarded_replays": self.steps.replays,
        }
