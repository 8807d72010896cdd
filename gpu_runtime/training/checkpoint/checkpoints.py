"""
`Checkpoints`: the folder of a run's checkpoints, with methods to save and load.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ...backends.protocol import BackendError
from ...ranks.worker import Worker
from ..look import nonfinite
from ..state import Naming, PersistentTensors, checksums
from .agreement import RankGroup, SharedError, consent, lost, raise_first, stop
from .facts import changes
from .files import Writer, checkpoint_folders, checkpoint_name, manifest, problem_of, run_of
from .load import (
    HalfLoadedError,
    Replicas,
    TensorSource,
    require_all_taken,
    require_compatible,
    sources,
    write_loaded,
)
from .lock import FolderLock
from .save import NonFiniteError, clear_for, facts_of, require_same, tensors_of

__all__ = ["Checkpoints", "EarlierSaveError"]


class EarlierSaveError(BackendError):
    """An earlier asynchronous save failed. The current save was still started."""


class Checkpoints:
    """
    The checkpoints of one run, in one folder that all ranks can read and write.

    Args:
        folder: The folder; `prepare` or the first save creates it.
        keep: Number of checkpoints to keep. The oldest checkpoint is removed once a newer
            checkpoint is complete.
        keep_every: Checkpoints whose epoch (number of optimizer steps) is a multiple of this number
            are never removed; 0 protects no checkpoint.
        asynchronous: Whether `save` returns as soon as all data are copied to the host. The files
            are then written during the next steps, and `failure`, `wait` or the next save reports a
            failure.

    Attributes:
        changed: Descriptions of the differences between the saving and the loading run that the
            last load accepted.
        run: The run's identity, followed by the identities of adopted runs, whose checkpoints this
            run continued. `load` copies these identities from the checkpoint. Every checkpoint's
            manifest contains the list of rank 0.
        lock: The folder's lock, on rank 0. A save requires that this process still holds the lock.
            None if the run uses no lock.
        told: Whether `failure` has already reported the failure of the current asynchronous save.
        untidy: On rank 0, a description of files that the last finished save could not remove. The
            checkpoint itself is complete.

    Raises:
        BackendError: `keep` is below 1, or `keep_every` below 0.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        keep_every: int = 0,
        asynchronous: bool = False,
    ) -> None:
        if keep < 1:
            raise BackendError(f"keep is {keep}; expected at least 1 checkpoint")
        if keep_every < 0:
            raise BackendError(f"keep_every is {keep_every}; expected at least 0 epochs")
        self.keep_every = keep_every
        self.folder, self.keep, self.asynchronous = Path(folder), keep, asynchronous
        self.changed: tuple[str, ...] = ()
        self.untidy: tuple[str, ...] = ()
        self.run: list[str] = [secrets.token_hex(8)]
        self.lock: FolderLock | None = None
        self._group = RankGroup()
        self._first = False  # whether this is rank 0, which clears the folder
        self._under_way: tuple[Writer, Future[Any]] | None = None
        self.told = False

    def prepare(self) -> None:
        """
        Create the folder, and check that this process can write files to it. The check leaves no
        file behind.

        Raises:
            BackendError: The folder cannot be written to. The message says why.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as probe:
                probe.write(b"1")
        except OSError as error:
            raise BackendError(
                f"{self.folder} cannot be written to: {error.strerror or error}; name a folder in "
                "which every rank can write"
            ) from error

    def latest(self) -> Path | None:
        """
        Return the newest checkpoint; None if there is no checkpoint.

        The method checks the newest checkpoint's manifest and the size of every file. `load` also
        checks the contents. If the newest checkpoint is damaged, the method raises an error and
        does not try an older checkpoint. After a start from an older checkpoint, the run would
        silently repeat steps. Also, it could not save until it had passed the epoch of the damaged
        checkpoint.

        Raises:
            BackendError: The newest checkpoint is damaged or incomplete. The message says what is
                wrong and what to do.
        """
        try:
            for _, path in checkpoint_folders(self.folder)[:1]:
                if problem := problem_of(path, manifest(path), ()):
                    raise BackendError(problem)
                return path
        except OSError as error:
            raise BackendError(
                f"{self.folder} cannot be read: {error.strerror or error}; name a folder in which "
                "every rank can read and write"
            ) from error
        return None

    def _newest_whole(self) -> Path | None:
        for _, path in checkpoint_folders(self.folder):
            try:
                if not problem_of(path, manifest(path), ()):
                    return path
            except (BackendError, OSError):
                continue
        return None

    def save(
        self,
        worker: Worker,
        naming: Naming,
        must: Mapping[str, Any],
        free: Mapping[str, Any],
        extra_tensors: Mapping[str, Tensor] | None = None,
    ) -> Path:
        """
        Save the state between two steps. Every rank must call this method with the same facts
        (plain data).

        Args:
            worker: This rank.
            naming: How the checkpoint names each tensor of the model.
            must: Plain data that must be equal in the run that loads, because they determine the
                meaning of saved numbers. Examples are dimensions and the training data.
            free: Plain data that may differ in the run that loads, such as positions, seeds and
                schedules. `load` returns these data.
            extra_tensors: Further tensors by name. Tensors with the same name must be equal on all
                ranks.

        Returns:
            The path of the checkpoint's folder. An asynchronous save gives the folder this name
            only when all files are complete.

        Raises:
            StoppedError: A rank has unfinished or failed work, does not know whether it has such
                work, or is gone. All ranks raise this error with the same cause, and no checkpoint
                is written.
            EarlierSaveError: An earlier asynchronous save failed. This save was still started.
            NonFiniteError: A weight, a moment or a scale is not finite on a rank. Earlier
                checkpoints are unchanged.
            BackendError: A rank cannot write the checkpoint. Earlier checkpoints are unchanged, and
                the run can continue.
        """
        runtime, self._first = worker.runtime, worker.member.rank == 0
        epoch = runtime.epoch
        final = self.folder / checkpoint_name(epoch)
        try:
            consent(worker)
        except Exception as error:
            raise self._stopped(worker, error) from None
        said: list[dict[str, Any]]
        own: dict[str, Any] = {"problem": "", "earlier": self._awaited()}
        tensors: dict[str, Tensor] = {}
        earlier = ""
        left: tuple[str, ...] = ()
        try:
            tensors = tensors_of(worker, naming, extra_tensors or {})
            own.update(facts_of(worker, must, free), sums=checksums(tensors))
            own["nonfinite"] = nonfinite(worker, naming)
            if worker.member.rank == 0:
                if self.lock is not None:
                    self.lock.require()
                left = clear_for(self.folder, final)
        except Exception as error:  # the other ranks wait for this one, whatever it is
            rank = worker.member.rank
            own["problem"] = f"rank {rank} cannot save {final.name}: {_text(error)}"
        try:
            said = self._group.gather(worker, own)
            earlier = next((one["earlier"] for one in said if one["earlier"]), "")
            require_same(said)
            facts = {
                **own["facts"],
                "contracts": [one["contract"] for one in said],
                "made_by": [one["made_by"] for one in said],
                "tensors": {n: mark[:2] for one in said for n, mark in one["sums"].items()},
            }
            log = worker.rank_log
            if log is not None:
                log("write_shard", epoch=epoch)
            publishes = log if worker.member.rank == 0 else None
            writer = Writer(final, facts, self.keep, left, publishes, self.keep_every, self.run)
            self._write(worker, writer, tensors)
        except Exception as error:
            if earlier and isinstance(error, SharedError) and not isinstance(error, NonFiniteError):
                error = SharedError(f"{error}; before that, {earlier}")
            raise self._stopped(worker, lost(error)) from None
        if earlier:
            raise EarlierSaveError(f"{earlier}; {final.name} is being written")
        return final

    def _stopped(self, worker: Worker, error: Exception) -> Exception:
        """
        Stop all ranks; an unfinished save of an earlier epoch keeps its process group and is
        completed.
        """
        return stop(worker, error, self._group if self._under_way is None else None)

    def _write(self, worker: Worker, writer: Writer, tensors: dict[str, Tensor]) -> None:
        if self.asynchronous:
            future = state_dict_saver.async_save(
                tensors,
                storage_writer=writer,
                process_group=self._group.handle,
                async_stager=writer,
            )
            assert isinstance(future, Future)
            self._under_way, self.told = (writer, future), False
            future.add_done_callback(self._ended)
            return
        try:
            state_dict_saver.save(tensors, storage_writer=writer, process_group=self._group.handle)
        except CheckpointException as error:
            raise SharedError(self._failed(writer, error)) from None
        self.untidy = writer.words

    def _ended(self, future: Future[Any]) -> None:
        """
        End the process group if the connection of an asynchronous save broke, so that no rank waits
        in it.
        """
        if isinstance(error := future.exception(), RuntimeError):
            error.__traceback__ = error.__context__ = error.__cause__ = None
            self._group.end()

    def _failed(self, writer: Writer, error: BaseException) -> str:
        """Return why a save failed, and remove its files if the save has ended on all ranks."""
        final = writer.final
        if isinstance(error, CheckpointException):
            rank, (cause, _) = min(error.failures.items())
            if self._first:  # the disk may be full: leave its space to others
                shutil.rmtree(writer.partial, ignore_errors=True)
            text = f"rank {rank}: {cause}"
        else:
            text = f"a rank is gone ({' '.join(str(error).split())[:80]})"
        before = self._newest_whole()
        left = "there is no earlier checkpoint" if before is None else f"the newest is {before}"
        return f"{final} was not saved: {text}; {left}"

    def _awaited(self) -> str:
        """Wait for the current save, and return why it failed; empty if it succeeded."""
        if self._under_way is None:
            return ""
        (writer, future), self._under_way = self._under_way, None
        error = future.exception()
        self.untidy = writer.words
        return "" if error is None else self._failed(writer, error)

    def failure(self) -> str:
        """
        Return why the current asynchronous save failed, without waiting for it.

        Returns:
            The reason as text. Empty while the save runs, if it succeeded, or if the reason was
            already returned.
        """
        if self._under_way is None or self.told or not self._under_way[1].done():
            return ""
        writer, future = self._under_way
        error = future.exception()
        self.told = error is not None
        return "" if error is None else self._failed(writer, error)

    def wait(self) -> None:
        """
        Wait until the current save is complete.

        Raises:
            BackendError: The save failed. The message says why, and names the newest checkpoint.
        """
        if problem := self._awaited():
            raise BackendError(problem)

    def close(self) -> None:
        """
        Wait for the current save, then end the process group for saves and loads. Never raises an
        error.
        """
        self._awaited()
        self._group.end()

    def load(
        self,
        path: str | Path,
        worker: Worker,
        naming: Naming,
        must: Mapping[str, Any],
        extra_tensors: Mapping[str, Tensor] | None = None,
        *,
        replicas: Replicas = "same",
    ) -> dict[str, Any]:
        """
        Load a checkpoint that was saved with any mapping of stages to ranks. Every rank must call
        this method.

        Args:
            path: The checkpoint, the same on every rank.
            worker: This rank, between two steps.
            naming: How the checkpoint names each tensor of the model.
            must: Plain data that must equal the `must` of the save.
            extra_tensors: By name, the tensors that `load` overwrites with the saved
                `extra_tensors`.
            replicas: Which FP8 scaling state replica r loads. With ``same``, replica r loads the
                state of saved replica r, and a checkpoint with another number of replicas is
                refused. With ``modulo``, replica r loads the state of saved replica r modulo the
                saved number of replicas.

        Returns:
            The `free` data of the save.

        Raises:
            BackendError: A file, a fact, a name, a size or a dtype is wrong on a rank. All ranks
                raise this error, and no rank has changed a tensor.
            StoppedError: A rank is gone, is at another epoch after the load, or failed while it
                copied loaded tensors. The run must then be relaunched in new processes.
        """
        path = Path(path)
        own: dict[str, Any] = {"problem": self._awaited(), "path": str(path)}
        found_at: dict[str, TensorSource] = {}
        facts: dict[str, Any] = {}
        held: PersistentTensors | None = None
        try:
            if not own["problem"]:
                facts = require_compatible(path, worker, must)
                place = worker.member.rank % worker.pp
                held = PersistentTensors.of(
                    worker.runtime, worker.optimizer, naming, worker.replica, place
                )
                found_at = sources(path, worker, facts, held, extra_tensors or {}, replicas)
                own["names"] = [one.saved for one in found_at.values()]
        except Exception as error:  # the other ranks wait for this one, whatever it is
            own["problem"] = _text(error)
        try:
            said = self._group.gather(worker, own)
            raise_first(said)
            require_all_taken(path, facts, said, worker.member.world // worker.pp)
            staged = {
                one.saved: torch.empty(one.into.shape, dtype=one.into.dtype)
                for one in found_at.values()
            }
            try:
                state_dict_loader.load(
                    staged, storage_reader=FileSystemReader(path), process_group=self._group.handle
                )
            except CheckpointException as error:
                rank, (cause, _) = min(error.failures.items())
                raise SharedError(f"{path} cannot be read: rank {rank}: {cause}") from None
        except Exception as error:
            raise self._stopped(worker, lost(error)) from None
        assert held is not None
        found = {name: staged[one.saved] for name, one in found_at.items()}
        try:
            try:
                write_loaded(worker, facts, held, found, extra_tensors or {})
            except Exception as error:
                raise HalfLoadedError(
                    f"{path} is half loaded ({type(error).__name__}: {error}); relaunch in new "
                    "processes"
                ) from None
            worker.consent.agree(worker.runtime.epoch)
        except Exception as error:
            raise self._stopped(worker, error) from None
        if worker.rank_log is not None:
            worker.rank_log("load", epoch=worker.runtime.epoch)
        self.changed = changes(worker, facts)
        self.run = run_of(path) or self.run
        free: dict[str, Any] = facts["free"]
        return free


def _text(error: Exception) -> str:
    """Return an error's text; with its type, unless the message already explains the problem."""
    if isinstance(error, (BackendError, OSError, ValueError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
