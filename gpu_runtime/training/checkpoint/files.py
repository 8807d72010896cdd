"""
The files of a checkpoint. They are hashed while they are written, and compared with the hashes when
they are read. The folder gets its name only when it is complete.

torch's DCP writes the tensors (`*.distcp`, `.metadata`). The folder also has `facts.json`, with all
plain data, and `manifest.json`, with the size and the SHA-256 of every other file. Sizes and hashes
are computed from the bytes that were passed to the file system. The folder is hidden until all
files are on the disk; the final rename makes the folder a checkpoint. DCP has no hashes, does not
sync `.metadata` to the disk, and unpickles this file when it is read. Therefore this module syncs
the file, and lets DCP read it only after a check of its hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from qeffect.log.rank_log import RankLog

from ...backends.protocol import BackendError

__all__ = [
    "AWAY",
    "FACTS",
    "FORMAT",
    "MANIFEST",
    "FileDigest",
    "Writer",
    "canonical",
    "checkpoint_folders",
    "checkpoint_name",
    "clear",
    "manifest",
    "partial_of",
    "problem_of",
    "read_facts",
    "retain",
    "run_of",
    "runs_in",
]

FORMAT = 1
FACTS, MANIFEST = "facts.json", "manifest.json"
_METADATA = ".metadata"
_PARTIAL, _REMOVED = ".partial-", ".removed-"
_CHUNK = 1 << 20
_NUMBERED = re.compile(r"step-([0-9]{8,})")
#: What to do about a damaged checkpoint.
AWAY = "move that folder away to continue from the previous checkpoint"
#: The parts of the facts, and their types.
_PARTS: dict[str, type] = {
    "epoch": int, "must": dict, "free": dict, "mapping": dict, "contracts": list, "made_by": list,
    "tensors": dict,
}  # fmt: skip


def checkpoint_name(epoch: int) -> str:
    """
    Return the name of the folder of an epoch's checkpoint.

    >>> checkpoint_name(3)
    'step-00000003'
    """
    return f"step-{epoch:08d}"


def partial_of(final: Path) -> Path:
    """Return the path of the hidden folder in which a checkpoint is written."""
    return final.with_name(f"{_PARTIAL}{final.name}")


def canonical(value: Any) -> bytes:
    """Return plain data as JSON. Equal data always give the same text."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


@attrs.frozen
class FileDigest:
    """Size and SHA-256 of a file."""

    size: int
    sha256: str


class _Stream:
    """A file that is written from beginning to end, while its size and hash are computed."""

    def __init__(self, raw: Any) -> None:
        self.raw, self.size, self.hash = raw, 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write bytes, then add them to the hash."""
        view = memoryview(data).cast("B")
        self.raw.write(view)
        self.hash.update(view)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the position of the next write."""
        return self.size

    def flush(self) -> None:
        """Pass all written bytes to the file system."""
        self.raw.flush()

    def fileno(self) -> int:
        """Return the file's descriptor."""
        number: int = self.raw.fileno()
        return number

    def close(self) -> None:
        """Close the file."""
        self.raw.close()


class _HashingFileSystem(FileSystem):
    """A file system that records the size and the hash of each file that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: dict[str, FileDigest] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file; when a written file is closed, its size and hash are recorded."""
        if mode != "wb":
            with super().create_stream(path, mode) as raw:
                yield raw
            return
        name = Path(path).name
        try:
            with super().create_stream(path, mode) as raw:
                stream = _Stream(raw)
                try:
                    yield stream
                finally:
                    raw.close()
        except (OSError, RuntimeError) as error:
            # The library says that a write failed, and not why; the system's own word is below.
            raise BackendError(f"{name} cannot be written: {_root(error)}") from error
        self.marks[name] = FileDigest(stream.size, stream.hash.hexdigest())

    def rename(self, path: Any, new_path: Any) -> None:
        """Rename a file, and keep its recorded size and hash."""
        super().rename(path, new_path)
        if (mark := self.marks.pop(Path(path).name, None)) is not None:
            self.marks[Path(new_path).name] = mark


def _root(error: BaseException) -> str:
    """
    Return the text of an error's original cause, preferably of an error of the operating system.
    """
    found, at = error, error.__cause__ or error.__context__
    while at is not None and not isinstance(found, OSError):
        found, at = at, at.__cause__ or at.__context__
    if isinstance(found, OSError) and found.strerror:
        return found.strerror
    return " ".join(str(found).split())[:200]


class Writer(FileSystemWriter):
    """
    A DCP writer into a hidden folder, which gets its final name when all files are on the disk.

    Args:
        final: The folder's final name, which does not exist yet.
        facts: The plain data of the checkpoint, which rank 0 writes.
        keep: Number of complete checkpoints to keep.
        words: Descriptions of files that could not be removed. At the end, rank 0 removes old
            checkpoints. If rank 0 cannot remove one, it appends a description to this list.
        log: The rank log. Rank 0 writes an event to this log directly before the checkpoint gets
            its name.
        keep_every: Checkpoints whose epoch (number of optimizer steps) is a multiple of this number
            are also kept; 0 keeps no further checkpoint.
        run: The identities of the saving run and of the runs that it adopted (whose checkpoints it
            continued).
    """

    def __init__(
        self,
        final: Path,
        facts: Mapping[str, Any],
        keep: int,
        words: tuple[str, ...] = (),
        log: RankLog | None = None,
        keep_every: int = 0,
        run: Sequence[str] = (),
    ) -> None:
        self.run = list(run)
        self.final, self.facts, self.keep, self.log = final, facts, keep, log
        self.keep_every = keep_every
        self.partial = partial_of(final)
        self.words = words
        super().__init__(self.partial, overwrite=False)
        self.fs = self.hashed = _HashingFileSystem()

    def stage(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy all tensors to the host now. Files that are written later contain these values."""
        self.per_thread_copy_ahead = 0
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state_dict.items()}

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's tensors. The results also contain the size and hash of each file."""
        future = super().write_data(plan, planner)
        marks = {name: [mark.size, mark.sha256] for name, mark in self.hashed.marks.items()}
        told = WriteResult(index=MetadataIndex(f"marks of {id(self)}"), size_in_bytes=0,
                           storage_data=marks)  # fmt: skip
        results = [*future.value(), told]
        marked: torch.futures.Future[list[Any]] = torch.futures.Future()
        marked.set_result(results)
        return marked

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """
        Complete the checkpoint on rank 0, once all ranks have written: write index, facts and
        manifest, sync all files, and rename the folder.
        """
        marks: dict[str, Any] = {}
        own: list[list[Any]] = []
        for told in results:
            own.append([r for r in told if not isinstance(r.storage_data, dict)])
            for r in told:
                if isinstance(r.storage_data, dict):
                    marks |= r.storage_data
        super().finish(metadata, own)
        self._write(FACTS, canonical(self.facts))
        marks |= {name: [mark.size, mark.sha256] for name, mark in self.hashed.marks.items()}
        found = {path.name for path in self.partial.iterdir()}
        if odd := sorted(found ^ marks.keys()):
            raise BackendError(
                f"{odd[0]}: expected the file in the folder and in the manifest, found it in only "
                "one of them"
            )
        held = {"format": FORMAT, "epoch": self.facts["epoch"], "files": marks}
        if self.run:
            held["run"] = self.run
        sealed = {**held, "sha256": hashlib.sha256(canonical(held)).hexdigest()}
        self._write(MANIFEST, canonical(sealed))
        _sync(self.partial / _METADATA)
        _sync(self.partial)
        if self.log is not None:
            self.log("publish", epoch=self.facts["epoch"])
        self.partial.rename(self.final)
        _sync(self.final.parent)
        self.words += retain(self.final.parent, self.keep, self.keep_every)

    def _write(self, name: str, content: bytes) -> None:
        with self.fs.create_stream(self.partial / name, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# What is in the folder of all checkpoints


def _epoch_of(name: str) -> int | None:
    """Return the epoch in a name that `checkpoint_name` made; None for any other name."""
    found = _NUMBERED.fullmatch(name)
    epoch = None if found is None else int(found[1])
    return epoch if epoch is not None and checkpoint_name(epoch) == name else None


def checkpoint_folders(folder: Path) -> list[tuple[int, Path]]:
    """List the folders with a checkpoint's name, newest first, even if they are incomplete."""
    if not folder.is_dir():
        return []
    found = [(_epoch_of(path.name), path) for path in folder.iterdir()]
    folders = [(n, path) for n, path in found if n is not None and path.is_dir()]
    return sorted(folders, reverse=True)


def newest_name(folder: Path) -> str | None:
    """
    Return the name of the newest checkpoint, even if it is incomplete; None if there is no
    checkpoint or the folder is not readable.
    """
    try:
        return next((path.name for _, path in checkpoint_folders(folder)), None)
    except OSError:
        return None


def clear(folder: Path) -> tuple[str, ...]:
    """
    Remove files and folders that a killed save or removal left behind. Call this function only
    while no save is running.

    Only folders with exactly the names that this module writes are removed.

    Returns:
        Descriptions of everything that could not be removed.
    """
    words = []
    for path in sorted(folder.iterdir()):
        bare = path.name.removeprefix(_PARTIAL).removeprefix(_REMOVED)
        if bare == path.name or _epoch_of(bare) is None or path.is_symlink() or not path.is_dir():
            continue
        try:
            shutil.rmtree(path)
        except OSError as error:
            words.append(f"{path} is left over and cannot be removed: {error.strerror or error}")
    return tuple(words)


def retain(folder: Path, keep: int, keep_every: int = 0) -> tuple[str, ...]:
    """
    Remove all checkpoints except the newest ones. Each checkpoint is renamed before its removal, so
    a folder with a checkpoint's name is never half removed.

    Only folders with an undamaged manifest that lists `facts.json` are removed, because other
    folders are not checkpoints.

    Args:
        folder: The folder of all checkpoints.
        keep: Number of newest checkpoints to keep.
        keep_every: Checkpoints whose epoch (number of optimizer steps) is a multiple of this number
            are also kept; 0 keeps no further checkpoint.

    Returns:
        Descriptions of everything that could not be removed.
    """
    words = []
    try:
        ours = [(epoch, path) for epoch, path in checkpoint_folders(folder) if _is_ours(path)]
    except OSError as error:
        return (f"older checkpoints in {folder} are not removed: {error.strerror or error}",)
    for epoch, path in ours[keep:]:
        if keep_every and epoch % keep_every == 0:
            continue
        hidden = path.with_name(f"{_REMOVED}{path.name}")
        try:
            path.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            words.append(
                f"{path} is older than the {keep} kept checkpoints and cannot be removed: "
                f"{error.strerror or error}"
            )
    return tuple(words)


def _is_ours(path: Path) -> bool:
    try:
        return not path.is_symlink() and FACTS in manifest(path)
    except BackendError:
        return False


# What a reader compares


def manifest(path: Path) -> dict[str, FileDigest]:
    """
    Return the size and the hash of each file of a checkpoint, from an undamaged manifest.

    Raises:
        BackendError: The folder is missing, or is the parent folder of checkpoints. Or its manifest
            is missing, damaged, or of another format.
    """
    if not path.is_dir():
        raise BackendError(
            f"{path} is not a folder; name a checkpoint, such as .../{checkpoint_name(3)}"
        )
    if not (path / MANIFEST).exists() and (newest := newest_name(path)) is not None:
        raise BackendError(
            f"{path} is a folder of checkpoints; name one of them, such as {path / newest}"
        )
    return {name: FileDigest(*mark) for name, mark in _sealed(path)["files"].items()}


def run_of(path: Path) -> list[str]:
    """
    Return the identity of the run that saved a checkpoint, followed by the identities of the runs
    that it adopted (whose checkpoints it continued).

    Returns:
        The identities; empty if an earlier version without identities saved the checkpoint.

    Raises:
        BackendError: The folder is not a checkpoint, or its manifest is missing, damaged or of
            another format.
    """
    return [str(one) for one in _sealed(path).get("run", ())]


def runs_in(folder: Path) -> list[str]:
    """
    List the identities of all runs that have checkpoints in a folder, newest first and without
    repetition.

    A subfolder without an undamaged manifest is not a checkpoint, and is ignored.
    """
    found: list[str] = []
    for _, path in checkpoint_folders(folder):
        with suppress(BackendError):
            found += [one for one in run_of(path)[:1] if one not in found]
    return found


def _sealed(path: Path) -> dict[str, Any]:
    """
    Return the content of a manifest, which must be undamaged; the folder must have the name of its
    epoch.
    """
    place = path / MANIFEST
    try:
        held = json.loads(place.read_bytes())
        said = held.pop("sha256")
        found = held["format"]
    except OSError as error:
        raise BackendError(
            f"{place}: {error.strerror}; the checkpoint is not whole; {AWAY}"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BackendError(f"{place} is damaged and cannot be read; {AWAY}") from error
    if found != FORMAT:
        raise BackendError(
            f"{path} was written in format {found}, this version reads format {FORMAT}; load it "
            "with the version that wrote it"
        )
    if said != hashlib.sha256(canonical(held)).hexdigest():
        raise BackendError(f"{place} is damaged: its hash differs from its content; {AWAY}")
    named = _epoch_of(path.name)
    if named is not None and named != held["epoch"]:
        raise BackendError(
            f"{path} holds the checkpoint of step {held['epoch']}; rename the folder to "
            f"{checkpoint_name(held['epoch'])}"
        )
    found_in: dict[str, Any] = held
    return found_in


def problem_of(path: Path, marks: Mapping[str, FileDigest], hashed: Sequence[str]) -> str:
    """
    Describe the first problem with a checkpoint's files; empty if there is no problem.

    Args:
        path: The folder of the checkpoint.
        marks: The size and the hash of each file, from the checkpoint's manifest.
        hashed: Names of the files whose content is compared with the hash. For all other files,
            only the size is compared.
    """
    for name, mark in sorted(marks.items()):
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            return f"{file} is missing; {AWAY}"
        if size != mark.size:
            return f"{file} has {size} bytes, {mark.size} were written; {AWAY}"
    for name in hashed:
        file, seen = path / name, hashlib.sha256()
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                seen.update(chunk)
        if seen.hexdigest() != marks[name].sha256:
            return (
                f"{file} is damaged: its SHA-256 is {seen.hexdigest()[:16]}..., "
                f"{marks[name].sha256[:16]}... was written; {AWAY}"
            )
    return ""


def read_facts(path: Path, marks: Mapping[str, FileDigest]) -> dict[str, Any]:
    """
    Read the facts (the plain data) of a checkpoint.

    Raises:
        BackendError: The facts are missing, damaged or incomplete.
    """
    if FACTS not in marks:
        raise BackendError(f"{path / MANIFEST} does not list {FACTS}; {AWAY}")
    if problem := problem_of(path, {FACTS: marks[FACTS]}, (FACTS,)):
        raise BackendError(problem)
    facts: dict[str, Any] = json.loads((path / FACTS).read_bytes())
    for part, kind in _PARTS.items():
        found = facts.get(part) if isinstance(facts, dict) else None
        if not isinstance(found, kind) or (isinstance(found, int) and found < 0):
            raise BackendError(
                f"{path / FACTS}: {part} is {str(found)[:40]}, expected {kind.__name__}; {AWAY}"
            )
    for name, mark in facts["tensors"].items():
        if not (isinstance(mark, list) and len(mark) == 2 and isinstance(mark[1], list)):
            raise BackendError(
                f"{path / FACTS}: {name} is {str(mark)[:40]}, expected a type and a size; {AWAY}"
            )
    for key in ("replicas", "ranks", "stage_to_rank"):
        if key not in facts["mapping"]:
            raise BackendError(f"{path / FACTS}: mapping has no {key}; {AWAY}")
    return facts
