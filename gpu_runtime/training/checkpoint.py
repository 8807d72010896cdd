"""
Checkpoints of a pipeline through torch's DCP, that any mapping loads.

All ranks save together, between two steps, when nothing is live or in flight: each asks its
contract (`check_checkpoint`), then all consent to the same epoch; where one cannot, all stop with
that one cause, and nothing was written. A load compares everything (files, facts, names, sizes,
types) on every rank before any rank writes anything.

What may differ between the run that saved and the run that loads: ranks, stages, the table, and so
how microbatches are split and in which order F and dI move scaling state. `Checkpoints.changed`
says what did. Weights, AdamW and the histories of each layer are the same bits then; the steps
after are those of the new mapping.
"""

from __future__ import annotations

import datetime
import re
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from qeffect.checkpoint import Checkpoint

from ..backends.protocol import BackendError
from ..ranks.channels import LostError, end_group
from ..ranks.worker import Worker
from ..step.memory.numerical_state import NumericalState
from .files import (
    AWAY,
    FACTS,
    MANIFEST,
    Writer,
    clear,
    manifest,
    name_of,
    numbered,
    partial_of,
    problem_of,
    read_facts,
)
from .state import (
    EXTRA,
    MODEL,
    NUMERICAL,
    OPTIMIZER,
    RANDOM,
    Naming,
    Persistent,
    checksums,
    random_states,
    set_random_states,
    shares_amax,
)

__all__ = ["Checkpoints", "EarlierSaveError", "Replicas", "plain", "sizes"]

Replicas = Literal["same", "modulo"]
"""
Whose scaling state a replica takes: its own of as many replicas, or of whatever number there were,
that of replica r modulo their number.
"""

#: Whose amax scales are made of, as facts have it, by what a runtime is configured with.
AMAX = {"replica": "each replica its own", "replicas": "the largest of all replicas"}

#: What the name of a table made by torch begins with: a version is no mapping.
_TORCH = re.compile(r"^torch \S+ ")

#: How long ranks wait for each other's files, in seconds; one that has died is noticed at once.
_FILES_S = 1800.0


class HalfLoadedError(RuntimeError):
    """A load that all ranks found right failed while it was written, on this one."""

    unrecoverable = True


class EarlierSaveError(BackendError):
    """An asynchronous save failed; the one that says so went on, and is under way."""


class Checkpoints:
    """
    The checkpoints of one run, in one folder that all ranks reach.

    Args:
        folder: The folder; made by `prepare`, or at the first save.
        keep: How many stay; the oldest goes when a newer one is whole.
        asynchronous: Return from `save` when everything is copied to the host, and write behind the
            next steps. `wait`, or the next save, says whether it went well.

    Attributes:
        changed: What the last load found different and is no reason to refuse, in words.
        untidy: What the last save that ended could not remove, in words, on rank 0; it is whole
            all the same.

    Raises:
        BackendError: `keep` is less than 1.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3, asynchronous: bool = False) -> None:
        if keep < 1:
            raise BackendError(f"keep is {keep}; at least 1 checkpoint has to stay")
        self.folder, self.keep, self.asynchronous = Path(folder), keep, asynchronous
        self.changed: tuple[str, ...] = ()
        self.untidy: tuple[str, ...] = ()
        self._group: Any = None
        self._group_of: tuple[int, int] | None = None
        self._under_way: tuple[Writer, Future[Any]] | None = None

    # What there is

    def prepare(self) -> None:
        """
        Make the folder, and see that this process can write there; nothing stays.

        Raises:
            BackendError: It cannot; why.
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
        The newest checkpoint; None where there is none.

        Its manifest is sound and every file has its size; `load` reads the contents, too. One that
        is damaged is not passed over: the run would go back behind it unasked, and its saves up
        to there would be refused.

        Raises:
            BackendError: The newest is not whole: what is wrong with it, and what to do.
        """
        try:
            for _, path in numbered(self.folder)[:1]:
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
        for _, path in numbered(self.folder):
            try:
                if not problem_of(path, manifest(path), ()):
                    return path
            except (BackendError, OSError):
                continue
        return None

    # Saving

    def save(
        self,
        worker: Worker,
        naming: Naming,
        must: Mapping[str, Any],
        free: Mapping[str, Any],
        extra_tensors: Mapping[str, Tensor] | None = None,
    ) -> Path:
        """
        Write the state between two steps; every rank calls it, with the same facts.

        Args:
            worker: This rank.
            naming: The model's names.
            must: Plain data that has to be equal at a load: dimensions, data, what else numbers
                mean.
            free: Plain data that comes back to who loads: positions, seeds, schedules.
            extra_tensors: Further tensors by name; what several ranks bring has to be equal.

        Returns:
            The checkpoint's folder; an asynchronous save gives it its name later.

        Raises:
            StoppedError: A rank has something live, in flight or spoiled, or is gone; all ranks
                raise it with one cause, and nothing has its name.
            EarlierSaveError: The asynchronous save before it had failed, which is told now. This
                one is being written all the same.
            BackendError: It cannot be written, by any rank, for what one of them says; the
                checkpoints before it are as they were, and the run can go on.
        """
        runtime = worker.runtime
        epoch = runtime.epoch
        final = self.folder / name_of(epoch)
        self._consent(worker)
        said: list[dict[str, Any]]
        own: dict[str, Any] = {"problem": "", "earlier": self._awaited()}
        tensors: dict[str, Tensor] = {}
        earlier = ""
        left: tuple[str, ...] = ()
        try:
            tensors = self._tensors(worker, naming, extra_tensors or {})
            own.update(self._facts(worker, must, free), sums=checksums(tensors))
            if worker.member.rank == 0:
                left = self._clear_for(final)
        except (BackendError, OSError, ValueError) as error:
            own["problem"] = f"rank {worker.member.rank} cannot save {final.name}: {error}"
        try:
            said = self._gathered(worker, own)
            earlier = next((one["earlier"] for one in said if one["earlier"]), "")
            self._require_alike(said)
            facts = {
                **own["facts"],
                "contracts": [one["contract"] for one in said],
                "made_by": [one["made_by"] for one in said],
                "tensors": {n: mark[:2] for one in said for n, mark in one["sums"].items()},
            }
            self._write(worker, Writer(final, facts, self.keep, left), tensors)
        except RuntimeError as error:
            if earlier and isinstance(error, BackendError):
                error = BackendError(f"{error}; and before it: {earlier}")
            raise self._stopped(worker, _lost(error)) from None
        if earlier:
            raise EarlierSaveError(f"{earlier}; {final.name} is being written")
        return final

    def _clear_for(self, final: Path) -> tuple[str, ...]:
        self.folder.mkdir(parents=True, exist_ok=True)
        left = clear(self.folder)
        for path in (final, partial_of(final)):
            if path.is_symlink() or (path.exists() and not (path == final and path.is_dir())):
                raise BackendError(f"{path} is there and cannot be written over; move it away")
        for epoch, path in numbered(self.folder):
            if epoch >= int(final.name.rpartition("-")[2]):
                raise BackendError(
                    f"{path} is there, of this epoch or a later one: of another run, or of a run "
                    "that was gone back behind; move it away, or take another folder"
                )
        return left

    def _consent(self, worker: Worker) -> None:
        """Every rank's contract says yes, and all ranks are at one epoch with no message away."""
        runtime = worker.runtime
        try:
            runtime.confirm()
            runtime.drain()
            runtime.contract.check_checkpoint()
            worker.consent.agree(runtime.epoch)
        except Exception as error:
            raise self._stopped(worker, error) from None

    def _stopped(self, worker: Worker, error: Exception) -> Exception:
        """What every rank raises; what is broken is closed, so that nobody waits for this rank."""
        if isinstance(error, BackendError):
            return error  # all ranks have it alike
        error.__traceback__ = error.__context__ = error.__cause__ = None
        for passage in worker.pipeline.passages.values():
            passage.forget()
        if self._under_way is None:  # one of an earlier epoch goes on: it is whole without us
            self._end_group()
        if worker.runtime.actions.broken is not None:
            error.unrecoverable = True  # type: ignore[attr-defined]
        stopped = worker.consent.stop(error, worker.runtime.epoch, None, 0, at="checkpoint")
        worker.runtime.abort()
        return stopped

    def _tensors(
        self, worker: Worker, naming: Naming, extra: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        place = worker.member.rank % worker.pp
        held = Persistent.of(worker.runtime, worker.optimizer, naming, worker.replica, place)
        held.require_alike()
        own = random_states(worker.member.device)
        return {
            **held.tensors,
            **{_random(worker, kind): state for kind, state in own.items()},
            **{f"{EXTRA}.{name}": tensor for name, tensor in extra.items()},
        }

    def _facts(
        self, worker: Worker, must: Mapping[str, Any], free: Mapping[str, Any]
    ) -> dict[str, Any]:
        runtime = worker.runtime
        facts = {
            "epoch": runtime.epoch,
            "must": {**_own(worker), "given": plain(must, "must")},
            "free": plain(free, "free"),
            "mapping": _mapping(worker),
        }
        return {
            "facts": facts,
            "contract": _contract(worker),
            "made_by": plain(runtime.domain.environment(), "environment"),
        }

    def _require_alike(self, said: list[dict[str, Any]]) -> None:
        _raise_first(said)
        held: dict[str, tuple[int, Any]] = {}
        for rank, one in enumerate(said):
            if (odd := _first_difference(said[0]["facts"], one["facts"], "")) is not None:
                raise BackendError(
                    f"{odd[0]} is {odd[1]} on rank 0 and {odd[2]} on rank {rank}; every rank has "
                    "to save the same facts"
                )
            for name, mark in one["sums"].items():
                first, other = held.setdefault(name, (rank, mark))
                if mark != other:
                    raise BackendError(
                        f"{name} is not the same on ranks {first} and {rank}, and is written once: "
                        "the replicas drifted apart, or the name needs the rank in it"
                    )

    def _write(self, worker: Worker, writer: Writer, tensors: dict[str, Tensor]) -> None:
        if self.asynchronous:
            future = state_dict_saver.async_save(
                tensors, storage_writer=writer, process_group=self._group, async_stager=writer
            )
            assert isinstance(future, Future)
            self._under_way = writer, future
            future.add_done_callback(self._ended)
            return
        try:
            state_dict_saver.save(tensors, storage_writer=writer, process_group=self._group)
        except CheckpointException as error:
            raise BackendError(self._failed(writer.final, error)) from None
        self.untidy = writer.words

    def _ended(self, future: Future[Any]) -> None:
        """Wake the others where the connection of an asynchronous save broke."""
        if isinstance(error := future.exception(), RuntimeError):
            error.__traceback__ = error.__context__ = error.__cause__ = None
            self._end_group()

    def _failed(self, final: Path, error: BaseException) -> str:
        if isinstance(error, CheckpointException):
            rank, (cause, _) = min(error.failures.items())
            text = f"rank {rank}: {cause}"
        else:
            text = f"a rank is gone ({' '.join(str(error).split())[:80]})"
        before = self._newest_whole()
        left = "there is none before it" if before is None else f"the newest is {before}"
        return f"{final} was not saved: {text}; {left}"

    def _awaited(self) -> str:
        """What went wrong with the save under way, when it has ended; empty where nothing did."""
        if self._under_way is None:
            return ""
        (writer, future), self._under_way = self._under_way, None
        error = future.exception()
        self.untidy = writer.words
        return "" if error is None else self._failed(writer.final, error)

    def wait(self) -> None:
        """
        Wait until a save under way is whole.

        Raises:
            BackendError: It was not written; what is wrong, and which checkpoint is the newest.
        """
        if problem := self._awaited():
            raise BackendError(problem)

    def close(self) -> None:
        """End the connections of saves and loads, behind a save under way; raises nothing."""
        self._awaited()
        self._end_group()

    def _end_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            end_group(group, abort=False)

    # Loading

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
        Continue from a checkpoint of any mapping; every rank calls it.

        Args:
            path: The checkpoint, the same on every rank.
            worker: This rank, between two steps.
            naming: The model's names.
            must: What was given to `save` has to be equal to it.
            extra_tensors: Where further tensors of that save go, by name.
            replicas: Whose scaling state each replica takes; `same` refuses another number.

        Returns:
            What `save` was given as free.

        Raises:
            BackendError: A file, a fact, a name, a size or a type is not right, on any rank; all
                ranks raise it, and nothing was written on any.
            StoppedError: A rank is gone, at another epoch after it, or failed while it wrote what
                it had read: begin again in new processes.
        """
        path = Path(path)
        own: dict[str, Any] = {"problem": self._awaited(), "path": str(path)}
        wanted: dict[str, Wanted] = {}
        facts: dict[str, Any] = {}
        held: Persistent | None = None
        try:
            if not own["problem"]:
                facts = self._compared(path, worker, must)
                place = worker.member.rank % worker.pp
                held = Persistent.of(
                    worker.runtime, worker.optimizer, naming, worker.replica, place
                )
                wanted = self._wanted(path, worker, facts, held, extra_tensors or {}, replicas)
                own["names"] = [one.saved for one in wanted.values()]
        except (BackendError, OSError, ValueError) as error:
            own["problem"] = f"{error}"
        try:
            said = self._gathered(worker, own)
            _raise_first(said)
            _require_all_taken(path, facts, said, worker.member.world // worker.pp)
            staged = {
                one.saved: torch.empty(one.into.shape, dtype=one.into.dtype)
                for one in wanted.values()
            }
            try:
                state_dict_loader.load(
                    staged, storage_reader=FileSystemReader(path), process_group=self._group
                )
            except CheckpointException as error:
                rank, (cause, _) = min(error.failures.items())
                raise BackendError(f"{path} cannot be read: rank {rank}: {cause}") from None
        except RuntimeError as error:
            raise self._stopped(worker, _lost(error)) from None
        assert held is not None
        found = {name: staged[one.saved] for name, one in wanted.items()}
        try:
            try:
                self._take(worker, facts, held, found, extra_tensors or {})
            except Exception as error:
                raise HalfLoadedError(
                    f"{path} is half loaded ({type(error).__name__}: {error}); begin again in new "
                    "processes"
                ) from None
            worker.consent.agree(worker.runtime.epoch)
        except Exception as error:
            raise self._stopped(worker, error) from None
        self.changed = _changes(worker, facts)
        free: dict[str, Any] = facts["free"]
        return free

    def _compared(self, path: Path, worker: Worker, must: Mapping[str, Any]) -> dict[str, Any]:
        """The facts, when files and facts are right."""
        marks = manifest(path)
        member = worker.member
        share = sorted(marks)[member.rank :: member.world]
        if problem := problem_of(path, marks, share):
            raise BackendError(problem)
        facts = read_facts(path, marks)
        here = {**_own(worker), "given": plain(must, "must")}
        if len(facts["contracts"]) != facts["mapping"]["ranks"] * facts["mapping"]["replicas"]:
            raise BackendError(
                f"{path / FACTS}: {len(facts['contracts'])} contracts of "
                f"{facts['mapping']['ranks']} ranks and {facts['mapping']['replicas']} replicas; "
                f"{AWAY}"
            )
        if (odd := _first_difference(facts["must"], here, "")) is not None:
            name = odd[0].removeprefix("given.")
            raise BackendError(
                f"{path} was saved with {name} {odd[1]}, this run has {odd[2]}; load it with what "
                "it was saved with, or begin anew"
            )
        return facts

    def _wanted(
        self,
        path: Path,
        worker: Worker,
        facts: Mapping[str, Any],
        held: Persistent,
        extra: Mapping[str, Tensor],
        replicas: Replicas,
    ) -> dict[str, Wanted]:
        """What this rank takes, by its own names, when the checkpoint has it as it is here."""
        there, here = facts["mapping"]["replicas"], worker.member.world // worker.pp
        shares = shares_amax(worker.runtime)  # what all replicas hold alike is there once
        if there != here and not shares and replicas == "same":
            raise BackendError(
                f"{path} has the scaling state of {there} replicas, this run has {here}; "
                '[checkpoint] replicas = "modulo" of a run, replicas="modulo" of `load`, lets '
                "replica r take that of r modulo their number"
            )
        mine, theirs = f"{NUMERICAL}.dp{worker.replica}.", (
            f"{NUMERICAL}.dp{worker.replica % there}."
        )  # fmt: skip
        wanted: dict[str, Wanted] = {}
        for name, tensor in held.tensors.items():
            own = name in held.numerical and not shares
            saved = theirs + name.removeprefix(mine) if own else name
            wanted[name] = Wanted(saved, tensor)
        for name, tensor in extra.items():
            wanted[f"{EXTRA}.{name}"] = Wanted(f"{EXTRA}.{name}", tensor)
        if _places(facts["mapping"]) == _places(_mapping(worker)):
            for kind, tensor in random_states(worker.member.device).items():
                name = _random(worker, kind)
                if name in facts["tensors"]:
                    wanted[name] = Wanted(name, tensor)
        for one in wanted.values():
            if one.saved not in facts["tensors"]:
                raise BackendError(
                    f"{path} has no {one.saved}; build the model that it was saved from"
                )
            dtype, size = facts["tensors"][one.saved]
            found = str(one.into.dtype), list(one.into.shape)
            if (dtype, size) != found:
                raise BackendError(
                    f"{path}: {one.saved} is {dtype} {size}, here {found[0]} {found[1]}; build the "
                    "model that it was saved from"
                )
        return wanted

    def _take(
        self,
        worker: Worker,
        facts: Mapping[str, Any],
        held: Persistent,
        found: Mapping[str, Tensor],
        extra: Mapping[str, Tensor],
    ) -> None:
        """Write what was read, everything of which fits."""
        runtime = worker.runtime
        runtime.drain()
        with torch.no_grad():
            for name in held.parameters:
                for into in (held.tensors[name], *held.copies.get(name, ())):
                    into.copy_(found[name])
            for name, tensor in extra.items():
                tensor.copy_(found[f"{EXTRA}.{name}"])
        worker.optimizer.load_state({own: found[name] for own, name in held.optimizer.items()})
        recipe = dict(runtime.domain.recipe())
        state = NumericalState({own: found[name] for name, own in held.numerical.items()}, recipe)
        configuration = runtime.contract.configuration
        runtime.restore(Checkpoint(facts["epoch"], configuration, recipe=recipe), state)
        states = {
            kind: found[_random(worker, kind)]
            for kind in ("cpu", "cuda")
            if _random(worker, kind) in found
        }
        if states:
            set_random_states(states, worker.member.device)
        runtime.drain()

    # Among ranks

    def _gathered(self, worker: Worker, own: Any) -> list[Any]:
        """What every rank brings, over a group of our own: a thread may be in another's."""
        of = worker.name, worker.attempt
        if self._group is None or self._group_of != of:
            self._end_group()  # some ranks may have lost theirs when all stopped
            self._group = dist.new_group(
                list(range(worker.member.world)),
                backend="gloo",
                timeout=datetime.timedelta(seconds=max(worker.limits.start, _FILES_S)),
            )
            self._group_of = of
        found: list[Any] = [None] * worker.member.world
        dist.all_gather_object(found, own, group=self._group)
        return found


@attrs.frozen(eq=False)
class Wanted:
    """The checkpoint's name of a tensor, and a tensor that is as it has to be."""

    saved: str
    into: Tensor


def plain(value: Any, where: str) -> Any:
    """
    Plain data as JSON gives it back.

    Raises:
        BackendError: JSON cannot hold it; where it is.

    >>> plain({"sizes": (1, 2)}, "must")
    {'sizes': [1, 2]}
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise BackendError(f"{where} has the key {key!r}; keys of facts are strings")
        return {key: plain(one, f"{where}.{key}") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, f"{where}[{n}]") for n, one in enumerate(value)]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and value - value == 0.0:
        return float(value)
    raise BackendError(
        f"{where} is {value!r}; facts are finite numbers, strings, lists and mappings: a tensor "
        "goes into extra_tensors"
    )


def sizes(path: str | Path) -> dict[str, int]:
    """
    How many bytes of a checkpoint are what.

    Returns:
        ``weights``, ``optimizer``, ``numerical`` (histories and scales), ``random`` and ``extra``,
        each the tensors alone; ``facts`` and ``total``, of files.

    Raises:
        BackendError: It is no whole checkpoint.
    """
    path = Path(path)
    marks = manifest(path)
    facts = read_facts(path, marks)
    kinds = {
        MODEL: "weights", OPTIMIZER: "optimizer", NUMERICAL: "numerical", RANDOM: "random",
        EXTRA: "extra",
    }  # fmt: skip
    found = dict.fromkeys(kinds.values(), 0)
    for name, (dtype, size) in facts["tensors"].items():
        width = getattr(torch, dtype.removeprefix("torch.")).itemsize
        count = 1
        for length in size:
            count *= length
        found[kinds[name.partition(".")[0]]] += count * width
    total = sum(mark.size for mark in marks.values()) + (path / MANIFEST).stat().st_size
    return {**found, "facts": marks[FACTS].size, "total": total}


def _lost(error: RuntimeError) -> RuntimeError:
    """What a library's error means that came out of a collective; what all ranks say stays."""
    if isinstance(error, BackendError):
        return error
    library = str(error)
    return LostError("checkpoint", -1, "imed out" in library, library)


def _random(worker: Worker, kind: str) -> str:
    return f"{RANDOM}.dp{worker.replica}.pp{worker.member.rank % worker.pp}.{kind}"


def _own(worker: Worker) -> dict[str, Any]:
    """What has to be equal whoever trains: what numbers mean."""
    domain, masters = worker.runtime.domain, worker.optimizer.master_dtype
    return {
        "backend": domain.name,
        "recipe": plain(domain.recipe(), "recipe"),
        "amax": AMAX[worker.runtime.config.amax],
        "optimizer": type(worker.optimizer.adamw).__name__,
        "masters": None if masters is None else str(masters),
    }


def _mapping(worker: Worker) -> dict[str, Any]:
    """How stages and microbatches lie on ranks: what may differ."""
    table = worker.table
    return {
        "schedule": _TORCH.sub("", Path(table.source).name),
        "ranks": worker.pp,
        "replicas": worker.member.world // worker.pp,
        "stages": table.num_stages,
        "stage_to_rank": [table.stage_to_rank[stage] for stage in range(table.num_stages)],
        "microbatches": table.num_microbatches,
    }


def _places(mapping: Mapping[str, Any]) -> list[Any]:
    """Which processes there are, and what is on each."""
    return [mapping[key] for key in ("ranks", "replicas", "stage_to_rank")]


def _contract(worker: Worker) -> dict[str, Any]:
    """What the rank's contract was built from, as plain data."""
    return worker.runtime.contract.configuration.without_places().plain()


def _changes(worker: Worker, facts: Mapping[str, Any]) -> tuple[str, ...]:
    """What a load found different and let be."""
    saved, own = facts["mapping"], _mapping(worker)
    found = [f"{key}: {saved[key]} -> {own[key]}" for key in own if saved[key] != own[key]]
    if not found:
        here = plain(_contract(worker), "contract")
        if (odd := _narrowed(facts["contracts"][worker.member.rank], here, "contract")) is not None:
            found.append(f"{odd[0]}: {odd[1]} -> {odd[2]}")
    environment = plain(worker.runtime.domain.environment(), "environment")
    first = facts["made_by"][0]
    found += [
        f"{key}: {first.get(key)} -> {environment[key]}"
        for key in environment
        if first.get(key) != environment[key]
    ]
    return tuple(found)


def _require_all_taken(
    path: Path, facts: Mapping[str, Any], said: list[dict[str, Any]], replicas: int
) -> None:
    """Refuse a checkpoint of more than this run has: it is of another model."""
    paths = {one["path"] for one in said}
    if len(paths) > 1:
        raise BackendError(f"ranks load different checkpoints: {sorted(paths)}; name one for all")
    taken = {name for one in said for name in one["names"]}
    for name in sorted(facts["tensors"].keys() - taken):
        kind, scope = name.split(".")[:2]
        if kind in (RANDOM, EXTRA):
            continue
        if kind == NUMERICAL and int(scope.removeprefix("dp")) >= replicas:
            continue
        raise BackendError(
            f"{path} has {name}, which this run has nowhere; build the model that it was saved from"
        )


def _raise_first(said: list[dict[str, Any]]) -> None:
    for one in said:
        if one["problem"]:
            raise BackendError(one["problem"])


def _first_difference(saved: Any, here: Any, where: str) -> tuple[str, Any, Any] | None:
    """The first place at which plain data differ, and what both have there."""
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        for key in sorted(saved.keys() | here.keys()):
            inner = f"{where}.{key}" if where else key
            if key not in saved or key not in here:
                a = saved.get(key, "nothing")
                return inner, a, here.get(key, "nothing")
            if (odd := _first_difference(saved[key], here[key], inner)) is not None:
                return odd
        return None
    return None if type(saved) is type(here) and saved == here else (where, saved, here)


def _narrowed(saved: Any, here: Any, where: str) -> tuple[str, str, str] | None:
    """The first entry at which plain data differ, lists looked into, and both values, short."""
    if isinstance(saved, list) and isinstance(here, list):
        if len(saved) != len(here):
            return where, f"{len(saved)} entries", f"{len(here)} entries"
        pairs = enumerate(zip(saved, here, strict=True))
        found = (_narrowed(one, other, f"{where}[{n}]") for n, (one, other) in pairs)
        return next((odd for odd in found if odd is not None), None)
    if isinstance(saved, Mapping) and isinstance(here, Mapping) and saved.keys() == here.keys():
        inner = (_narrowed(saved[key], here[key], f"{where}.{key}") for key in sorted(saved))
        return next((odd for odd in inner if odd is not None), None)
    return None if saved == here else (where, str(saved)[:40], str(here)[:40])
