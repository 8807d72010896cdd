"""
The training loop: steps of the guarded pipeline, their log, evaluations and checkpoints.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from qeffect.cli.command import Progress
from qeffect.destination_registry import DestinationRegistry
from qeffect.launched import START, trains
from qeffect.log.rotation import Rotation
from qeffect.report import UnusableError, finite
from qeffect.text import counted

from ..ranks.causes import Cause, TerminatedError
from ..ranks.consent import StoppedError
from ..ranks.membership import Member, agree_on, all_gather
from ..ranks.torchrun_agent import TorchrunAgent, shared_store_warning
from ..ranks.worker_assembly import build_worker
from .checkpoint import Checkpoints
from .checkpoint.lock import FolderLock
from .config import Config
from .divergence import DivergedError, UpdateWatch, diverged
from .ending import REASONS, EndRequest
from .evaluate import evaluate
from .event_logs import set_aside
from .figures import perplexity
from .job_assembly import TIMES, JobData, backend_of, measure_cut, open_job
from .look import nonfinite
from .metrics import Log
from .saturation import GradientScales
from .saves import Saves
from .start import load_start
from .state_digest import state_digest
from .step_log import StepLog
from .step_runner import StepRunner, mode_of

__all__ = ["RESUMABLE", "Trainer"]

RESUMABLE: Final = ("gone", "late", "ended", "lost")
"""Kinds of causes after which a run may be resumed automatically, without a person's decision."""

#: How often in a row two runs of one step may differ before the run ends.
_MISMATCHES: Final = 3
#: Gradient destinations of every training of this process.
_DESTINATIONS: Final = DestinationRegistry()


class Trainer:
    """
    One rank of a training run. Every rank makes a trainer and calls the same methods.

    Args:
        member: This process.
        config: The configuration of the run, from its training file.
        show: Function that shows a progress line on a terminal, but may skip lines that follow one
            another quickly. Only rank 0 uses this function.
        data: The model and data of the configuration, from `open_job`. By default, the trainer
            calls `open_job`.
        note: Function that shows every line; by default `show`.
        resume: Whether to continue from the newest checkpoint, if there is a checkpoint.
        adopt: Whether to accept another run's checkpoint.
        lock: The lock of the folder of checkpoints, on rank 0. By default, the trainer takes the
            lock. `close` releases it. If the constructor raises an error, a given lock is not
            released.

    Attributes:
        stands: The last status of the run that was written to the status file.
        tell: Function that prints why the run stopped, if the main thread cannot do so. The
            function takes the cause and the run's status, and returns whether this rank printed the
            cause.

    Raises:
        UnusableError: The configuration or the data cannot be used, or the folder has checkpoints
            although `resume` is False.
        BackendError: A stage cannot be built, or the checkpoint cannot be loaded.
        StoppedError: A rank was lost during the load of a checkpoint.
    """

    def __init__(
        self,
        member: Member,
        config: Config,
        show: Callable[[str], None] = lambda _: None,
        *,
        data: JobData | None = None,
        note: Callable[[str], None] | None = None,
        resume: bool = False,
        adopt: bool = False,
        lock: FolderLock | None = None,
    ) -> None:
        self._agent, self.saves = TorchrunAgent(), Saves(member, config, lock)
        self._met, self.ended_by = time.monotonic(), ""
        self.stands: dict[str, Any] = {}
        self.tell: Callable[[Cause, Mapping[str, Any]], bool] = lambda *_: True
        try:
            self._begin(member, config, show, data, note, resume=resume, adopt=adopt)
        except BaseException:
            if lock is None:  # otherwise the caller tells of it, and then releases the lock
                self.saves.release()
            raise

    def _begin(
        self,
        member: Member,
        config: Config,
        show: Callable[[str], None],
        data: JobData | None,
        note: Callable[[str], None] | None,
        *,
        resume: bool,
        adopt: bool,
    ) -> None:
        config, data = measure_cut(member, config, data or open_job(config), resume=resume)
        self.member, self.config = member, config
        self.job, self.held_out = data
        self.saves.config = config
        self.saves.open(resume=resume, adopt=adopt)
        self.log = self.saves.log = self._log(show, note)
        if self.log is not None:
            agents = shared_store_warning()
            for one in [*self.saves.warnings, *([agents] if agents else [])]:
                self.log({"warning": one})
                self.log.note(f"WARNING: {one}")
        self._tell_cut()
        mode, why = mode_of(member, self.job, config.parallel.mode)
        self.worker = build_worker(
            member,
            self.job,
            backend_of(config),
            mode=mode,
            limits=config.waits(),
            event_log=self._event_log(),
            registry=_DESTINATIONS,
            gradient_digests=config.guard.digests,
            zero_stages=True,
            replay_every=config.guard.replay_every,
        )
        self._watch_logs()
        if trains(sys.argv):
            START.arm()  # the worker's own handler names no cause before the first step
        self.seconds = 0.0
        self.evaluations: dict[int, float] = {}
        if self.saves.found is not None:
            START.place = f"loading {self.saves.found.name}"
            self.job = self.saves.load(self.worker, self.job)
        elif config.model.start:
            self._take_start(config.path(config.model.start))
        self.began = self.worker.runtime.epoch
        scales = GradientScales(self.worker, self.job.name_of)
        self.steps = StepRunner(self.worker, why=why, scales=scales)
        self.saves.begin()
        self.results = StepLog(member, config, self.job, self.worker, self.steps, scales, self.log)
        if config.parallel.mode == "one launch":
            self.results.log_launches()
        self.mismatches = 0  # steps whose two runs differed
        self._mismatches = self._stops = 0  # in a row
        self._stopped_at = -1
        self._calibrated = False  # whether the calibration was logged

    @property
    def checkpoints(self) -> Checkpoints | None:
        """The folder of checkpoints; None if the run has none."""
        return self.saves.checkpoints

    @property
    def losses(self) -> list[float]:
        """The loss of each step since the run began or was resumed."""
        return self.results.losses

    @property
    def watch(self) -> UpdateWatch:
        """The record of skipped updates."""
        return self.results.watch

    def save(self) -> None:
        """Write a checkpoint between two steps. Raises the same errors as `Saves.save`."""
        self.saves.save(self.worker, self.job)

    def _take_start(self, path: Path) -> None:
        """Load the initial weights from a file."""
        where = f"{self.config.source}: [model] start"
        names = self.config.model.start_names
        count = load_start(
            self.worker, self.job.name_of, path, where, names, self.config.source.parent
        )
        if self.log is not None:
            self.log({"started_from": str(path), "weights": count})
            self.log.note(f"Weights from {path}: {counted(count, 'tensor')}")

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
        """
        Log a measured cut with its times; a training file that contains these times gets the same
        cut.
        """
        parallel = self.config.parallel
        if self.log is not None and parallel.cut == "measured":
            times = {name: getattr(parallel, name) for name in TIMES}
            self.log({"cut": list(self.job.cut), **times})

    def _event_log(self) -> Path | Rotation | None:
        run = self.config.run
        if not run.event_logs:
            return None
        path = set_aside(
            self.config.path(run.event_logs),
            self.member,
            f"{self.config.source}: [run] event_logs",
            one=bool(run.event_log_keep),
        )
        rotates = bool(run.event_log_steps)
        return Rotation(path, run.event_log_steps, run.event_log_keep) if rotates else path

    def _watch_logs(self) -> None:
        """Let the run continue even if its event log or its rank log can no longer be written."""
        for log, what in (
            (self.worker.runtime.recorder, "event log"),
            (self.worker.rank_log, "rank log"),
        ):
            if log is not None:
                log.ends = partial(self._log_ended, what)

    def _log_ended(self, what: str, error: OSError) -> None:
        """Warn, on the rank whose log has ended, that the log is incomplete."""
        text = (
            f"NOT LOGGED from here on: [run] event_logs: the {what} of rank {self.member.rank}: "
            f"{error.strerror or error}"
        )
        if self.log is not None:
            self.log({"warning": text})
            self.log.note(text)
        else:
            Progress().note(text)

    def run(self) -> None:
        """
        Train until the last step, with the configured evaluations and checkpoints.

        SIGTERM, SIGUSR1 and `[run] max_seconds` end the run with a checkpoint. All ranks end after
        the same step, and `ended_by` then names the request. The status file says why the run
        ended.

        Raises:
            StoppedError: A rank could not continue; every rank raises this error.
            DivergedError: The run has diverged. Every rank raises this error after the same step.
            BackendError: A rank was lost in an evaluation, or the last checkpoint was not saved.
        """
        self._started = time.perf_counter()
        self.results.begin(self._started)
        self._status("running")
        if self.saves.lock is not None:
            self.saves.lock.began = True
        seconds = self.config.run.max_seconds
        try:
            with EndRequest(self.worker, seconds, self._met, self._told_aside) as self._request:
                self._run()
                with self._doing("checkpoint"):
                    self.saves.wait()
        except DivergedError as error:
            self._status("ended", by=error.cause.kind, cause=error.cause.text)
            with suppress(StoppedError):  # the step that still runs does not count
                self.steps.leave()
            self.seconds = time.perf_counter() - self._started
            raise
        except StoppedError as stopped:
            cause = stopped.cause
            resume = cause.kind in RESUMABLE
            self._status("ended", by=cause.kind, cause=cause.text, resume=resume)
            raise
        except KeyboardInterrupt:
            self._status("ended", by="SIGINT", cause="interrupted", resume=True)
            raise
        except Exception as error:
            self._status("ended", by="error", cause=str(error))
            raise
        self.member.synchronize(
            self.worker.limits.commit, action="end", step=self.worker.runtime.epoch
        )
        self._status("ended", by=self.ended_by, resume=self.ended_by != "steps")
        self.seconds = time.perf_counter() - self._started

    def _status(self, state: str, **told: Any) -> None:
        step, mismatches = self.worker.runtime.epoch, self.mismatches
        self.stands = self.saves.facts(state, step=step, mismatches=mismatches, **told)
        self.saves.write_status(self.stands)

    def _told_aside(self, cause: Cause) -> bool:
        """
        Print the cause of a stop while the main thread waits; return whether this rank printed the
        cause.
        """
        resume = cause.kind in RESUMABLE
        self._status("ended", by=cause.kind, cause=cause.text, resume=resume)
        return self.tell(cause, self.stands)

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """
        A context for an operation other than a step, such as an evaluation; the cause of a stop
        names the operation.
        """
        self._request.doing = what
        try:
            yield
        finally:
            self._request.doing = "step"

    def _run(self) -> None:
        run, runtime = self.config.run, self.worker.runtime
        step, self.ended_by = runtime.epoch, "steps"
        if self.saves.found is not None or self.config.model.start:
            self._look(step, "load")
        while step < run.steps:
            try:
                if runtime.epoch == step:  # else a stop came after its update
                    self._step(step)
                asked = self.steps.ending(step + 1) if step + 1 < run.steps else 0
                self._known(step + 1, last=bool(asked))
            except StoppedError as stopped:
                self._again(stopped)
                step = min(step, runtime.epoch)
                continue
            self.saves.log_failure(step)
            if not asked and self._evaluates(step + 1):
                paused = time.perf_counter()
                with self._doing("evaluation"):
                    self._evaluate(step + 1)
                passed = time.perf_counter() - paused  # an evaluation does not count as step time
                self._started += passed
                self.results.pause(passed)
            if self.saves.due(step + 1) or (asked and self.checkpoints is not None):
                last = bool(asked) or step + 1 == run.steps
                gather = self.steps.all_gather
                with self._doing("checkpoint"):
                    self.saves.attempt(self.worker, self.job, step + 1, gather, last=last)
            elif self._looks(step + 1):
                self._look(step + 1, "look")
            if asked:
                self.ended_by = REASONS[asked]
                return
            step += 1

    def _evaluates(self, step: int) -> bool:
        """Whether an evaluation is due after this number of steps."""
        run = self.config.run
        due = step == run.steps or (run.evaluate_every and step % run.evaluate_every == 0)
        return self.held_out is not None and bool(due)

    def _looks(self, step: int) -> bool:
        """
        Whether a separate check of all weights is due after this number of steps; a save also makes
        this check.
        """
        run = self.config.run
        return bool(run.look_every) and (step == run.steps or step % run.look_every == 0)

    def _look(self, step: int, action: str) -> None:
        """
        Check that all weights, moments and scales are finite after `step` steps; every rank calls
        this method.

        Raises:
            DivergedError: A value is not finite.
        """
        found = nonfinite(self.worker, self.job.name_of)
        if any(count for (count,) in self.steps.all_gather([float(len(found))])):
            said = all_gather(self.member, found)
            if (error := diverged(said, step - 1, action)) is not None:
                raise error

    def _step(self, step: int) -> None:
        """
        Run one optimizer step with its own learning rate; a launch may still be running on return.

        Raises:
            StoppedError: All ranks stopped in this step or in the previous step.
        """
        try:
            self._agent.require()
        except TerminatedError as error:
            raise self.steps.stop(error) from None
        self.worker.consent.asks = self._request.look()
        self.job.prepare(step, self.worker.optimizer)
        self.steps.step()
        self._tell_calibration()

    def _known(self, taken: int, *, last: bool = False) -> None:
        """
        Log the steps whose results are known. If no step follows, first wait for all results.

        Args:
            taken: Number of steps taken so far.
            last: Whether the run ends now, before its last step.

        Raises:
            StoppedError: All ranks stopped in the last step, or a rank stopped after this step.
            DivergedError: A loss is not finite, or too many updates in a row were skipped.
        """
        every, steps = self.config.run.log_every, self.config.run.steps
        steps = taken if last else steps
        if taken == steps or self._evaluates(taken) or self.saves.due(taken) or self._looks(taken):
            self.steps.leave()
        while (collected := self.results.collected) < steps:
            end = min(steps, (collected // every + 1) * every)
            if end > self.steps.known:
                break
            self.results.collect(end, self.mismatches)
        if self.steps.known > self._stopped_at:
            self._mismatches = self._stops = 0

    def _again(self, stopped: StoppedError) -> None:
        """
        Restart the step after a stop, as many times as the configuration allows.

        A step whose two runs differ is restarted only if `[guard] on_mismatch` is ``again``.

        Raises:
            StoppedError: The retries are used up, or not every rank survived.
        """
        if self.steps.uncaptured(stopped):
            self.results.log_launches()
        elif stopped.cause.kind == "differs":
            self._mismatch(stopped)
        elif self._stops == self.config.run.retries:
            raise stopped
        else:
            self._stops += 1
            self.steps.rebuild(stopped)
            self._stopped_at = self.worker.runtime.epoch
            if self.log is not None:
                self.log({"step": self._stopped_at, "stopped": stopped.cause.text})
        self.results.agree()

    def _mismatch(self, stopped: StoppedError) -> None:
        """
        Log which gradients differ between two runs of a step, and restart the step.

        Raises:
            StoppedError: The configuration ends the run at a mismatch, or this step had too many
                mismatches in a row.
        """
        self.mismatches += 1
        self._mismatches += 1
        cause, guard = stopped.cause, self.config.guard
        again = guard.on_mismatch == "again" and self._mismatches < _MISMATCHES
        if self.log is not None:
            naming = self.job.name_of
            found = [[d.rank, d.stage, naming(d.stage, d.name), d.count] for d in cause.differ]
            self.log({"step": cause.step, "mismatch": found, "again": again})
            self.log.note(f"MISMATCH: {cause.text}{'; the step is restarted' if again else ''}")
        if not again:
            raise stopped
        self.steps.rebuild(stopped)
        self._stopped_at = self.worker.runtime.epoch

    def _evaluate(self, step: int) -> None:
        assert self.held_out is not None
        loss = evaluate(self.worker, self.job, self.held_out, self.config.run.evaluate_windows)
        self.evaluations[step] = loss
        if self.log is not None:
            self.log({"step": step - 1, "held_out_loss": loss, "perplexity": perplexity(loss)})

    def digest(self) -> str:
        """
        Return one SHA-256 of the run's parameters, optimizer moments and scaling state. Every rank
        must call this method.

        Raises:
            BackendError: Ranks, or copies of a tied weight, hold different bits for the same
                tensor.
        """
        return state_digest(self.worker, self.job.name_of)

    def _tell_calibration(self) -> None:
        """Log the calibration of epoch scales, after the first step of a new run."""
        found = self.worker.calibration
        if found is None or self._calibrated:
            return
        self._calibrated = True
        if self.log is not None:
            self.log({"calibration_walks": found.walks, "converged": found.converged})
            if not found.converged:
                self.log.note(
                    f"The FP8 scales did not settle within {found.walks} calibration walks over "
                    "the schedule: a tensor is zero, or its scale still changes by more than a "
                    "factor of 2"
                )

    def close(self) -> None:
        """Close connections and logs."""
        self.saves.close()
        self.steps.close()
        self.worker.close()
        if self.log is not None:
            self.log.close()

    def record(self) -> Mapping[str, Any]:
        """Return the results of the run, as plain data for a report."""
        return {
            "began": self.began,
            "steps": self.worker.runtime.epoch,
            "losses": [finite(loss) for loss in self.losses],
            "seconds": self.seconds,
            "held_out": {str(step): finite(loss) for step, loss in self.evaluations.items()},
            "tokens_a_step": self.results.tokens_a_step,
            "cut": list(self.job.cut),
            "captured": self.worker.runtime.config.replays_graphs,
            "launches": self.steps.launches,
            "guarded_replays": self.steps.why_replays,
            "skipped": self.watch.skipped,
            "mismatches": self.mismatches,
            "ended_by": self.ended_by,
        }
