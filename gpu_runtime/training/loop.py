"""
The training loop: steps of the guarded pipeline, their log, evaluations and checkpoints.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import attrs

from qeffect.destination_registry import DestinationRegistry
from qeffect.launched import START, trains
from qeffect.log.rotation import Rotation
from qeffect.report import UnusableError, finite
from qeffect.text import counted

from ..backends.protocol import BackendError
from ..ranks.assembly import build_worker
from ..ranks.causes import TerminatedError
from ..ranks.consent import StoppedError
from ..ranks.launcher import Launcher
from ..ranks.membership import Member, agree_on, all_gather
from ..step.clipping import Norm
from ..step.graphs import GraphExecutor
from .assembly import TIMES, JobData, backend_of, measure_cut, open_job
from .checkpoint import Checkpoints, EarlierSaveError, NonFiniteError
from .checkpoint.files import checkpoint_folders, clear
from .checkpoint.identity import identity_of
from .checkpoint.lock import FolderLock
from .checkpoint.status import write_status
from .config import Config
from .config_file import differences
from .data import DataError
from .digest_log import DIGESTS, MATRICES, joined, padded
from .divergence import DivergedError, UpdateWatch, diverged
from .ending import REASONS, EndRequest
from .evaluate import evaluate
from .figures import perplexity
from .launches import StepRunner, mode_of
from .look import NonFinite, nonfinite
from .metrics import Log, memory_bytes
from .saturation import SATURATED, GradientScales
from .start import load_start
from .step_times import SlowestRank

__all__ = ["RESUMABLE", "Trainer"]

RESUMABLE: Final = ("gone", "late", "ended", "lost")
"""Kinds of causes after which a run may be resumed without a look."""

#: Blocks of steps whose mean time gives the time to the end of a run.
_PACES: Final = 50
#: Gradient destinations of every training of this process.
_DESTINATIONS: Final = DestinationRegistry()


class Trainer:
    """
    One rank of a training run. Every rank makes a trainer and calls the same methods.

    Args:
        member: This process.
        config: The run.
        show: Shows a line on a terminal, unless one was shown a moment ago; used on rank 0.
        data: The configuration's data, from `open_job`; opened here by default.
        note: Always shows a line; `show` by default.
        resume: Continue from the newest checkpoint, if there is one.
        adopt: Resume also from another run's checkpoint.
        lock: The lock of the folder of checkpoints, on rank 0; taken here by default. `close`
            releases it. If no trainer can be made, a lock that was given stays.

    Raises:
        UnusableError: The configuration or the data cannot be used, or the folder has checkpoints
            and `resume` is not given.
        BackendError: A stage cannot be built, or the checkpoint cannot be loaded.
        StoppedError: A rank is gone during the load.
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
        self._launcher, self._lock = Launcher(), lock
        self._met, self.ended_by = time.monotonic(), ""
        try:
            self._begin(member, config, show, data, note, resume=resume, adopt=adopt)
        except BaseException:
            if lock is None:  # otherwise the caller tells of it, and then releases the lock
                self._release()
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
        self._warnings: list[str] = []
        self.checkpoints, self.found = self._checkpoints(resume=resume, adopt=adopt)
        self.log = self._log(show, note)
        if self.log is not None:
            for one in self._warnings:
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
        )
        if trains(sys.argv):
            START.arm()  # the worker's own handler names no cause before the first step
        self.losses: list[float] = []
        self.watch = UpdateWatch(config.optimizer.stop_after_skips)
        self.seconds = 0.0
        self.evaluations: dict[int, float] = {}
        self.began = 0
        if self.checkpoints is not None and self.found is not None:
            START.place = f"loading {self.found.name}"
            self._go_on(self.checkpoints, self.found)
        elif config.model.start:
            self._take_start(config.path(config.model.start))
        scales = GradientScales(self.worker, self.job.name_of) if self.worker.clipping else None
        self.steps = StepRunner(self.worker, why=why, scales=scales)
        if self._lock is not None and self.checkpoints is not None:
            self._lock.say(run=self.checkpoints.run[0])
        self._scales = all_gather(member, [] if scales is None else scales.names)
        self._tell_matrices()
        if config.parallel.mode == "one launch":
            self._tell_launches()
        self._told = self.began  # steps whose losses were brought together
        self._since = 0.0  # when the first of the others began
        self._paces: deque[float] = deque(maxlen=_PACES)
        self._slowest = SlowestRank()
        self._stops = 0  # in a row
        self._stopped_at = -1

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _checkpoints(self, *, resume: bool, adopt: bool) -> tuple[Checkpoints | None, Path | None]:
        """Return the folder of checkpoints and the newest checkpoint; None for either that is
        missing."""
        given = self.config.checkpoint
        where = f"{self.config.source}: [checkpoint] folder"
        if not given.folder:
            if resume:
                raise UnusableError(f"{where}: --resume needs a folder of checkpoints; name it")
            return None, None
        made = Checkpoints(
            self.config.path(given.folder),
            keep=given.keep,
            keep_every=given.keep_every,
            asynchronous=given.asynchronous,
        )
        newest, problem = None, ""
        try:
            made.prepare()
            if self.member.rank == 0:
                self._lock = self._lock or FolderLock(made.folder)
                self._warnings += [self._lock.problem] if self._lock.problem else clear(made.folder)
                made.lock = self._lock
            newest = made.latest()
            if newest is None or resume:
                named = given.run
                made.run, odd = identity_of(made.folder, newest, named, adopt=adopt)
                self._warnings += [odd] if odd else []
        except BackendError as error:
            problem = f"{where}: {error}"
        agree_on(self.member, problem)
        if newest is not None and not resume:
            raise UnusableError(
                f"{where}: {newest} exists; continue from it with --resume, or name another folder"
            )
        return made, newest

    def _take_start(self, path: Path) -> None:
        """Begin with the weights of a file."""
        where = f"{self.config.source}: [model] start"
        names = self.config.model.start_names
        count = load_start(
            self.worker, self.job.name_of, path, where, names, self.config.source.parent
        )
        if self.log is not None:
            self.log({"started_from": str(path), "weights": count})
            self.log.note(f"Weights of {path}: {counted(count, 'tensor')}")

    def _must(self) -> dict[str, Any]:
        """The facts that must be equal in the saving run and the loading run."""
        model = attrs.asdict(self.config.model)
        del model["seed"], model["start"], model["start_names"]
        if not model["dropout"]:
            del model["dropout"]  # as in checkpoints of earlier releases
        return {"model": model, "master": self.job.master}

    def _go_on(self, checkpoints: Checkpoints, path: Path) -> None:
        whose: Any = self.config.checkpoint.replicas
        run = checkpoints.run
        free = checkpoints.load(path, self.worker, self.job.name_of, self._must(), replicas=whose)
        self.began = self.worker.runtime.epoch
        checkpoints.run = run
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
            if "sha256" not in free["data"]:
                changed.append(
                    "[data] train: the checkpoint has no hash of the whole file; only its length "
                    "and its ends were compared"
                )
            line = {"resumed": str(path), "step": self.began, "changed": changed}
            self.log({**line, "run": run[0]})
            for one in changed:
                self.log.note(f"since {path.name}: {one}")

    def _configuration(self) -> dict[str, Any]:
        """The tables of this run, with the number of decay steps that is in force."""
        tables = self.config.record()
        tables["optimizer"]["decay_steps"] = self.job.rate.steps
        return tables

    def _save(self, step: int, *, last: bool) -> None:
        """
        Save after `step` steps; a failure is logged, and raised only after the last step.
        """
        told = self.checkpoints is not None and self.checkpoints.told
        began = time.perf_counter()
        try:
            self.save()
        except BackendError as error:
            earlier = isinstance(error, EarlierSaveError)
            if last and not earlier:
                raise
            if self.log is not None and not (earlier and told):
                self.log({"step": step - 1, "not_saved": str(error)})
        spent = self.steps.all_gather([(time.perf_counter() - began) * 1e3])
        if self.log is not None:
            self.log({"step": step - 1, "save_ms": [round(ms, 3) for (ms,) in spent]})

    def _tell_failure(self, step: int) -> None:
        """Log that an asynchronous save has failed, at the first step after the failure."""
        if self.checkpoints is None or self.log is None:
            return
        if problem := self.checkpoints.failure():
            self.log({"step": step, "not_saved": problem})

    def save(self) -> None:
        """
        Write a checkpoint between two steps.

        Raises:
            BackendError: It cannot be written; earlier checkpoints are unchanged.
            StoppedError: A rank has live state, or is gone.
            DivergedError: A weight, a moment or a scale is not finite.
        """
        if self.checkpoints is None:
            return
        step = self.worker.runtime.epoch
        assert self.job.loader is not None
        free = {
            "data": self.job.loader.state(self.job.position(step)),
            "configuration": self._configuration(),
        }
        try:
            self.checkpoints.save(self.worker, self.job.name_of, self._must(), free)
        except NonFiniteError as error:
            self._end_if_diverged(error.said, step - 1, "save")
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
        """Log a measured cut with its times: a file with these times has the same cut."""
        parallel = self.config.parallel
        if self.log is not None and parallel.cut == "measured":
            times = {name: getattr(parallel, name) for name in TIMES}
            self.log({"cut": list(self.job.cut), **times})

    def _tell_matrices(self) -> None:
        """Log, once, which gradients the digests of each step are of, by rank."""
        kept, naming = self.worker.gradient_digests, self.job.name_of
        if kept is None:
            self._matrices = [0] * self.member.world
            return
        every = all_gather(self.member, [(s, naming(s, name)) for s, name in kept.names])
        self._matrices = [len(own) for own in every]
        if self.log is not None:
            self.log({MATRICES: every})

    def _event_log(self) -> Path | Rotation | None:
        run = self.config.run
        if not run.event_logs:
            return None
        folder = self.config.path(self.config.run.event_logs)
        problem = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{self.config.source}: [run] event_logs: {folder}: {error.strerror or error}"
        agree_on(self.member, problem)
        path = folder / f"rank{self.member.rank}.jsonl"
        rotates = bool(run.event_log_steps)
        return Rotation(path, run.event_log_steps, run.event_log_keep) if rotates else path

    @property
    def tokens_a_step(self) -> int:
        """Tokens that one step trains on, all replicas together."""
        return self.job.windows_a_step * self.job.config.sequence

    def run(self) -> None:
        """
        Train to the last step, with the evaluations and checkpoints that are due.

        SIGTERM, SIGUSR1 and `[run] max_seconds` end the run after a step that all ranks agree on,
        with a checkpoint; `ended_by` then names the request. The status file says what ended it.

        Raises:
            StoppedError: A rank could not continue; every rank raises it.
            DivergedError: The run has diverged; every rank raises it after the same step.
            BackendError: A rank was lost in an evaluation, or the last checkpoint was not saved.
        """
        self._started = self._since = time.perf_counter()
        self._status("running")
        if self._lock is not None:
            self._lock.began = True
        seconds = self.config.run.max_seconds
        try:
            with EndRequest(self.worker, seconds, self._met) as self._request:
                self._run()
                if self.checkpoints is not None:
                    self.checkpoints.wait()
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
        self.member.synchronize()
        self._status("ended", by=self.ended_by, resume=self.ended_by != "steps")
        self.seconds = time.perf_counter() - self._started

    def _status(
        self, state: str, *, by: str = "", cause: str | None = None, resume: bool = False
    ) -> None:
        """Write the status file; only rank 0 does, and only beside checkpoints."""
        if self.checkpoints is None or self.member.rank:
            return
        if self._lock is not None and self._lock.lost():
            return  # it is another run's by now
        folder = self.checkpoints.folder
        facts = {
            "state": state,
            "run": self.checkpoints.run[0],
            "ended_by": by or None,
            "cause": cause,
            "resume": resume,
            "step": self.worker.runtime.epoch,
            "steps": self.config.run.steps,
            "checkpoint": next((path.name for _, path in checkpoint_folders(folder)), None),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if (problem := write_status(folder, facts)) and self.log is not None:
            self.log.note(f"WARNING: {problem}")

    def _run(self) -> None:
        run, runtime = self.config.run, self.worker.runtime
        step, self.ended_by = runtime.epoch, "steps"
        if self.found is not None or self.config.model.start:
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
            self._tell_failure(step)
            if not asked and self._evaluates(step + 1):
                paused = time.perf_counter()
                self._evaluate(step + 1)
                passed = time.perf_counter() - paused  # an evaluation does not count as step time
                self._started, self._since = self._started + passed, self._since + passed
            if self._saves(step + 1) or (asked and self.checkpoints is not None):
                self._save(step + 1, last=bool(asked) or step + 1 == run.steps)
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
        """Whether a look at all weights is due after this number of steps; a save looks too."""
        run = self.config.run
        return bool(run.look_every) and (step == run.steps or step % run.look_every == 0)

    def _look(self, step: int, action: str) -> None:
        """
        Look at all weights, moments and scales after `step` steps; every rank calls it.

        Raises:
            DivergedError: One is not finite.
        """
        found = nonfinite(self.worker, self.job.name_of)
        if any(count for (count,) in self.steps.all_gather([float(len(found))])):
            self._end_if_diverged(all_gather(self.member, found), step - 1, action)

    def _end_if_diverged(self, said: Sequence[Sequence[NonFinite]], step: int, action: str) -> None:
        if (error := diverged(said, step, action)) is not None:
            raise error

    def _saves(self, step: int) -> bool:
        """Whether a checkpoint is due after this number of steps."""
        every = self.config.checkpoint.every
        due = step == self.config.run.steps or (every and step % every == 0)
        return self.checkpoints is not None and bool(due)

    def _step(self, step: int) -> None:
        """
        One optimizer step with its own learning rate; a launch may still run on return.

        Raises:
            StoppedError: All ranks stopped this step or the one before.
        """
        try:
            self._launcher.require()
        except TerminatedError as error:
            raise self.steps.stop(error) from None
        self.worker.consent.asks = self._request.look()
        self.job.prepare(step, self.worker.optimizer)
        self.steps.step()

    def _known(self, taken: int, *, last: bool = False) -> None:
        """
        Log the steps whose results are known. If anything but a step follows, first wait for all
        results.

        Args:
            taken: Steps taken so far.
            last: Whether the run ends here before its last step.

        Raises:
            StoppedError: All ranks stopped the last step, or a rank stopped after it.
            DivergedError: As `_tell`.
        """
        every, steps = self.config.run.log_every, self.config.run.steps
        steps = taken if last else steps
        if taken == steps or self._evaluates(taken) or self._saves(taken) or self._looks(taken):
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
        Restart the step after a stop, as often as the configuration allows.

        Raises:
            StoppedError: The retries are used up, or not every rank survived.
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
        # One rank may have collected losses that another has not: all continue from the same step.
        self._told = min(all_gather(self.member, self._told))

    def _tell_launches(self) -> None:
        """Log whether steps are launches, and if not, why."""
        if self.log is None:
            return
        why = self.steps.replays
        self.log({"one_launch": not why, **({"guarded_replays": why} if why else {})})
        if why:
            self.log.note(f"guarded replays, not one launch per step: {why}")

    def _tell(self, end: int) -> None:
        """
        Collect the losses of all steps before `end` from all ranks, and log a line for each.

        Raises:
            DivergedError: A loss is not finite, or too many updates in a row were skipped.
        """
        steps = range(self._told, end)
        if self.steps.whole is None:
            self.member.synchronize()  # launches have finished by now
        now = time.perf_counter()
        results = [self.steps.result(step) for step in steps]
        none = [0.0] * self.job.microbatches
        shares = [share for one in results for share in one.losses or none]
        falls = [number for one in results for number in one.saturation]
        times = [ms for one in results for ms in one.times.spent]
        memory = float(memory_bytes(self.member.device))
        digests = padded([one.digests for one in results], max(self._matrices))
        ranks = self.steps.all_gather([memory, *shares, *falls, *digests, *times])
        each = (now - self._since) / len(steps)
        self._paces.append(each)
        pace = math.fsum(self._paces) / len(self._paces)
        self.steps.forget(self._told)  # keeps the latest: a rank may collect them again
        for n, step in enumerate(steps):
            if step < self.began + len(self.losses):
                continue  # logged before
            # In each replica the rank of the last stage has the losses of its microbatches.
            own = slice(1 + n * len(none), 1 + (n + 1) * len(none))
            loss = math.fsum(share for rank in ranks for share in rank[own])
            self.losses.append(loss)
            norm = results[n].norm
            if self.log is not None:
                line: dict[str, Any] = {
                    "step": step,
                    "loss": loss,
                    "rate": self.job.rate.at(step),
                    "tokens": self.job.position(step + 1) * self.job.config.sequence,
                    "tokens_per_s": self.tokens_a_step / each,
                    "step_ms": each * 1e3,
                    "seconds_left": pace * (self.config.run.steps - step - 1),
                    "memory_bytes": int(max(rank[0] for rank in ranks)),
                }
                if norm is not None:
                    skipped = self.watch.skipped + norm.skipped
                    line.update(norm=norm.total, skipped=norm.skipped, skipped_updates=skipped)
                    place = 1 + len(shares) + 2 * n
                    line.update(self._unusual(norm, [rank[place : place + 2] for rank in ranks]))
                if any(self._matrices):
                    place = 1 + len(shares) + len(falls) + n * len(digests) // len(steps)
                    line[DIGESTS] = [
                        joined(rank[place : place + 2 * own])
                        for rank, own in zip(ranks, self._matrices, strict=True)
                    ]
                own_times = len(ranks[0]) - len(times) + 3 * n
                line.update(self._times([rank[own_times : own_times + 3] for rank in ranks]))
                self.log(line)
            self.watch.take(step, [rank[own] for rank in ranks], norm)
        self._told, self._since = end, now

    def _times(self, ranks: Sequence[Sequence[float]]) -> dict[str, Any]:
        """What the log says of a step's times, by rank, and of the slowest rank."""
        computed, waited, launched = (
            [round(ms, 3) if math.isfinite(ms) else None for ms in column]
            for column in zip(*ranks, strict=True)
        )
        found: dict[str, Any] = {"compute_ms": computed, "wait_ms": waited}
        if any(launched):
            found = {"launch_ms": launched, "wait_ms": waited}
        if (slowest := self._slowest.take([rank[0] for rank in ranks])) is not None:
            found["slowest"] = {"rank": slowest[0], "times_median": round(slowest[1], 2)}
        return found

    def _unusual(self, norm: Norm, falls: Sequence[Sequence[float]]) -> dict[str, Any]:
        """What the log says of gradients that are saturated or all zero."""
        rank, (factor, place) = max(enumerate(falls), key=lambda one: one[1][0])
        found: dict[str, Any] = {"saturation": factor}
        if factor >= SATURATED:
            found["saturated"] = self._scales[rank][int(place)]
        if norm.zero_stages:
            found["zero_stages"] = norm.zero_stages
        return found

    def _evaluate(self, step: int) -> None:
        assert self.held_out is not None
        loss = evaluate(self.worker, self.job, self.held_out, self.config.run.evaluate_windows)
        self.evaluations[step] = loss
        if self.log is not None:
            self.log({"step": step - 1, "held_out_loss": loss, "perplexity": perplexity(loss)})

    def close(self) -> None:
        """Close connections and logs."""
        if self.checkpoints is not None:
            self.checkpoints.close()
        self._release()
        self.steps.close()
        self.worker.close()
        if self.log is not None:
            self.log.close()

    def record(self) -> Mapping[str, Any]:
        """Return the results of the run, as plain data for a report."""
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
            "skipped": self.watch.skipped,
            "ended_by": self.ended_by,
        }
