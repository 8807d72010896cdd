"""
The checkpoints of one run: the folder and its lock, loads, saves, and the status file.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from qeffect.report import UnusableError
from qeffect.text import counted

from ..backends.protocol import BackendError
from ..ranks.membership import Member, agree_on
from ..ranks.worker import Worker
from .checkpoint import Checkpoints, EarlierSaveError, NonFiniteError
from .checkpoint.files import clear
from .checkpoint.identity import identity_of
from .checkpoint.lock import FolderLock
from .checkpoint.status import facts_of_run, write_status
from .config import Config, Model
from .config_file import differences
from .data import DataError
from .divergence import diverged
from .language_model import LanguageJob
from .metrics import Log

__all__ = ["Saves"]

#: Tables that define what a run trains. The other tables define how, how long, and where results
#: go.
_TRAINING = ("model", "data", "optimizer")
#: Fields of `[model]` that earlier releases lacked, with the values that those releases used.
_LATER = {
    name: getattr(Model(), name)
    for name in (
        *("dropout", "scales", "kv_heads", "norm", "activation", "positions", "bias"),
        "wgrad_group",
    )
}


class Saves:
    """
    The checkpoints of one run. Without a checkpoint folder in the configuration, nothing is loaded
    or saved. Every rank makes a `Saves` object and calls the same methods.

    Args:
        member: This process.
        config: The configuration of the run, from its training file.
        lock: The lock of the folder, on rank 0. By default, `open` takes the lock.

    Attributes:
        checkpoints: The folder of checkpoints; None if the configuration names no folder.
        found: The checkpoint from which the run continues; None for a new run.
        warnings: Sentences about problems that `open` found but accepted.
        log: The run's log, on rank 0; the trainer sets it.
    """

    def __init__(self, member: Member, config: Config, lock: FolderLock | None) -> None:
        self.member, self.config, self.lock = member, config, lock
        self.checkpoints: Checkpoints | None = None
        self.found: Path | None = None
        self.warnings: list[str] = []
        self._adopt = False
        self.log: Log | None = None

    def open(self, *, resume: bool, adopt: bool) -> None:
        """
        Open the folder of checkpoints and find the newest checkpoint.

        Args:
            resume: Whether to continue from the newest checkpoint, if there is a checkpoint.
            adopt: Whether to accept another run's checkpoint.

        Raises:
            UnusableError: The folder cannot be used, or has checkpoints although `resume` is False.
        """
        given = self.config.checkpoint
        where = f"{self.config.source}: [checkpoint] folder"
        if not given.folder:
            if resume:
                raise UnusableError(
                    f"{where}: --resume needs a folder of checkpoints, and this field is empty; "
                    "name the folder here"
                )
            return
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
                self.lock = self.lock or FolderLock(made.folder)
                self.warnings += [self.lock.problem] if self.lock.problem else clear(made.folder)
                made.lock = self.lock
            newest = made.latest()
            if newest is None or resume:
                made.run, odd = identity_of(made.folder, newest, given.run, adopt=adopt)
                self.warnings += [odd] if odd else []
        except BackendError as error:
            problem = f"{where}: {error}"
        agree_on(self.member, problem)
        if newest is not None and not resume:
            raise UnusableError(
                f"{where}: {newest} exists; continue from it with --resume, or name another folder"
            )
        self.checkpoints, self.found, self._adopt = made, newest, adopt

    def begin(self) -> None:
        """
        Write the run's identity into the lock file. Call this method when all checks before the
        start have passed.
        """
        if self.lock is not None and self.checkpoints is not None:
            self.lock.say(run=self.checkpoints.run[0])

    def load(self, worker: Worker, job: LanguageJob) -> LanguageJob:
        """
        Load the checkpoint that `open` found into the worker, and continue the data at the
        checkpoint's position.

        Returns:
            The job, with the learning-rate curve of the saved run.

        Raises:
            BackendError: The checkpoint cannot be loaded.
            StoppedError: A rank is gone.
            UnusableError: The data differ from the checkpoint's data, or the checkpoint belongs to
                another training file and `adopt` was not set in `open`.
        """
        checkpoints, path = self.checkpoints, self.found
        assert checkpoints is not None
        assert path is not None
        whose: Any = self.config.checkpoint.replicas
        run = checkpoints.run
        free = checkpoints.load(path, worker, job.name_of, self._must(job), replicas=whose)
        began = worker.runtime.epoch
        problem, saved = "", free["configuration"]
        try:
            assert job.loader is not None
            job.loader.load(free["data"], began)
        except DataError as error:
            problem = f"{self.config.source}: [data] train: {error}"
        odd = self._other_run(free.get("source"), saved)
        if odd and self._adopt:
            run = [secrets.token_hex(8), *run]
        elif odd:
            problem = problem or f"{self.config.source}: {path} belongs to {odd}"
        agree_on(self.member, problem)
        checkpoints.run = run
        steps = saved["optimizer"]["decay_steps"] or saved["run"]["steps"]
        saved["optimizer"]["decay_steps"] = steps
        if not self.config.optimizer.decay_steps:
            job = attrs.evolve(job, rate=attrs.evolve(job.rate, steps=steps))
        if self.log is not None:
            changed = [*checkpoints.changed, *differences(saved, self._configuration(job))]
            if "sha256" not in free["data"]:
                changed.append(
                    "[data] train: the checkpoint has no hash of the whole file; only its "
                    "length, beginning and end were compared"
                )
            if "source" not in free:
                changed.append(
                    "the checkpoint does not name its training file, so the run did not check "
                    "whether the checkpoint belongs to this run"
                )
            line = {"resumed": str(path), "step": began, "changed": changed}
            self.log({**line, "run": run[0]})
            for one in changed:
                self.log.note(f"compared with {path.name}: {one}")
        return job

    def _other_run(self, source: str | None, saved: Mapping[str, Any]) -> str:
        """
        Describe the other training file to which a checkpoint belongs; empty if the checkpoint
        belongs to this file.

        A file may be edited or renamed between two starts. A file with another name and with other
        training fields belongs to another run, unless `[checkpoint] run` names the run.
        """
        own = self.config.source.name
        if source is None or source == own or self.config.checkpoint.run:
            return ""
        odd = differences(_training(saved), _training(self.config.record()))
        if not odd:
            return ""
        more = f", and {counted(len(odd) - 1, 'more field')}" if odd[1:] else ""
        return (
            f"the run of {source}, and {own} differs from that file ({odd[0]}{more}); name "
            "another folder, or continue this checkpoint with --adopt"
        )

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this number of steps."""
        every = self.config.checkpoint.every
        due = step == self.config.run.steps or (every and step % every == 0)
        return self.checkpoints is not None and bool(due)

    def save(self, worker: Worker, job: LanguageJob) -> None:
        """
        Write a checkpoint between two steps.

        Raises:
            BackendError: The checkpoint cannot be written; earlier checkpoints are unchanged.
            StoppedError: A rank has unfinished work, or is gone.
            DivergedError: A weight, a moment or a scale is not finite.
        """
        if self.checkpoints is None:
            return
        step = worker.runtime.epoch
        assert job.loader is not None
        free = {
            "data": job.loader.state(job.position(step)),
            "configuration": self._configuration(job),
            "source": self.config.source.name,
        }
        try:
            self.checkpoints.save(worker, job.name_of, self._must(job), free)
        except NonFiniteError as error:
            if (found := diverged(error.said, step - 1, "save")) is not None:
                raise found from None
        if self.log is not None and self.checkpoints.untidy:
            self.log({"step": step - 1, "not_removed": list(self.checkpoints.untidy)})

    def attempt(
        self,
        worker: Worker,
        job: LanguageJob,
        step: int,
        all_gather: Callable[[Sequence[float]], list[list[float]]],
        *,
        last: bool,
    ) -> None:
        """
        Save a checkpoint after `step` steps, and log the time of the save. If the last save of the
        run fails, the error is raised. Other failures are only logged.

        Args:
            worker: The worker (the pipeline of this rank) whose state is saved.
            job: The job that the pipeline trains.
            step: Number of steps taken.
            all_gather: Function that gathers the time in milliseconds from each rank.
            last: Whether the run ends with this save.

        Raises:
            BackendError: The last checkpoint cannot be written.
            StoppedError, DivergedError: A rank has unfinished work or is gone, or a value is not
                finite.
        """
        told = self.checkpoints is not None and self.checkpoints.told
        began = time.perf_counter()
        try:
            self.save(worker, job)
        except BackendError as error:
            earlier = isinstance(error, EarlierSaveError)
            if last and not earlier:
                raise
            if self.log is not None and not (earlier and told):
                self.log({"step": step - 1, "not_saved": str(error)})
        spent = all_gather([(time.perf_counter() - began) * 1e3])
        if self.log is not None:
            self.log({"step": step - 1, "save_ms": [round(ms, 3) for (ms,) in spent]})

    def log_failure(self, step: int) -> None:
        """If an asynchronous save has failed, log the failure. Each failure is logged only once."""
        if self.checkpoints is None or self.log is None:
            return
        if problem := self.checkpoints.failure():
            self.log({"step": step, "not_saved": problem})

    def wait(self) -> None:
        """
        Wait for a save that is still running.

        Raises:
            BackendError: The last checkpoint was not saved.
        """
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def facts(self, state: str, **told: Any) -> dict[str, Any]:
        """Return the run's status (`facts_of_run`). Any rank may call this method."""
        made, given = self.checkpoints, self.config.checkpoint.folder
        folder = self.config.path(given) if given else None
        run = self.config.checkpoint.run or None if made is None else made.run[0]
        return facts_of_run(folder, state, run=run, steps=self.config.run.steps, **told)

    def write_status(self, facts: Mapping[str, Any]) -> None:
        """
        Write the status file. Only rank 0 writes it, and only if the run has a folder of
        checkpoints.
        """
        if self.checkpoints is None or self.member.rank:
            return
        if self.lock is not None and self.lock.lost():
            return  # the folder is another run's by now
        problem = write_status(self.checkpoints.folder, facts)
        if problem and self.log is not None:
            self.log.note(f"WARNING: {problem}")

    def close(self) -> None:
        """Close the folder and release its lock."""
        if self.checkpoints is not None:
            self.checkpoints.close()
        self.release()

    def release(self) -> None:
        """Release the folder's lock, if this process holds the lock."""
        if self.lock is not None:
            self.lock.release()

    def _must(self, job: LanguageJob) -> dict[str, Any]:
        """Return the facts that must be equal in the saving run and the loading run."""
        model = attrs.asdict(self.config.model)
        del model["seed"], model["start"], model["start_names"]
        for name, default in _LATER.items():
            if model[name] == default:
                del model[name]
        return {"model": model, "master": job.master}

    def _configuration(self, job: LanguageJob) -> dict[str, Any]:
        """
        Return the configuration tables of this run, with the number of decay steps that is used.
        """
        tables = self.config.record()
        tables["optimizer"]["decay_steps"] = job.rate.steps
        return tables


def _training(tables: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the configuration tables that distinguish runs, without the values that a resume fills
    in.
    """
    found = {name: dict(tables.get(name, {})) for name in _TRAINING}
    found["optimizer"].pop("decay_steps", None)
    return found
