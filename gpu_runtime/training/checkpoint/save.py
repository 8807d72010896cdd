"""
Save a checkpoint: collect the tensors and facts (plain data) of each rank, and compare them between
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...backends.protocol import BackendError
from ...ranks.worker import Worker
from ..look import NonFinite
from ..state import EXTRA, RANDOM, Naming, PersistentTensors, random_states
from .agreement import SharedError, raise_first
from .facts import contract_of, first_difference, mapping_of, plain, requirements
from .files import checkpoint_folders, clear, partial_of

__all__ = ["NonFiniteError", "clear_for", "facts_of", "random_name", "require_same", "tensors_of"]


class NonFiniteError(SharedError):
    """
    A weight, an optimizer moment or a scale is not finite, so nothing is saved.

    Args:
        said: By rank, the tensors that are not finite.
    """

    def __init__(self, said: list[list[NonFinite]]) -> None:
        rank, first = next((rank, found[0]) for rank, found in enumerate(said) if found)
        super().__init__(f"rank {rank}: {first}; a state that is not finite is not saved")
        self.said = said


def clear_for(folder: Path, final: Path) -> tuple[str, ...]:
    """
    Prepare the folder for a new checkpoint: create the folder, and remove files that killed saves
    left behind.

    Args:
        folder: The folder of all checkpoints.
        final: The path of the new checkpoint.

    Returns:
        Descriptions of everything that could not be removed.

    Raises:
        BackendError: The new checkpoint's name already exists, or the folder contains a checkpoint
            of this epoch (number of optimizer steps) or a later epoch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    left = clear(folder)
    for path in (final, partial_of(final)):
        if path.is_symlink() or (path.exists() and not (path == final and path.is_dir())):
            raise BackendError(f"{path} exists and cannot be overwritten; move it away")
    for epoch, path in checkpoint_folders(folder):
        if epoch >= int(final.name.rpartition("-")[2]):
            raise BackendError(
                f"{path} is of this epoch or a later one: it was saved by another run, or by this "
                "run before it resumed from an earlier checkpoint; move it away, or name another "
                "folder"
            )
    return left


def random_name(worker: Worker, kind: str) -> str:
    """
    Return the name that this rank's random state has in a checkpoint. `kind` is ``cpu`` or
    ``cuda``.
    """
    return f"{RANDOM}.dp{worker.replica}.pp{worker.member.rank % worker.pp}.{kind}"


def tensors_of(worker: Worker, naming: Naming, extra: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """
    Collect the tensors that this rank saves, by their names in the checkpoint.

    Args:
        worker: This rank.
        naming: How the checkpoint names each tensor of the model.
        extra: Further tensors by name.

    Raises:
        BackendError: Copies of one weight differ.
    """
    place = worker.member.rank % worker.pp
    held = PersistentTensors.of(worker.runtime, worker.optimizer, naming, worker.replica, place)
    held.require_alike()
    own = random_states(worker.member.device)
    return {
        **held.tensors,
        **{random_name(worker, kind): state for kind, state in own.items()},
        **{f"{EXTRA}.{name}": tensor for name, tensor in extra.items()},
    }


def facts_of(worker: Worker, must: Mapping[str, Any], free: Mapping[str, Any]) -> dict[str, Any]:
    """
    Collect the plain data that this rank writes into a checkpoint.

    Returns:
        A mapping with the keys ``facts``, ``contract`` and ``made_by``, whose values are plain
        data.

    Raises:
        BackendError: A fact is not plain data.
    """
    runtime = worker.runtime
    facts = {
        "epoch": runtime.epoch,
        "must": {**requirements(worker), "given": plain(must, "must")},
        "free": plain(free, "free"),
        "mapping": mapping_of(worker),
    }
    return {
        "facts": facts,
        "contract": contract_of(worker),
        "made_by": plain(runtime.domain.environment(), "environment"),
    }


def require_same(said: list[dict[str, Any]]) -> None:
    """
    Raise an error unless all ranks save the same facts, and the same bits for tensors with the same
    name.

    Args:
        said: By rank, its facts and the checksums of its tensors.

    Raises:
        NonFiniteError: A rank has a tensor that is not finite.
        SharedError: A rank has a problem, or two ranks have different facts or tensors.
    """
    raise_first(said)
    if any(one["nonfinite"] for one in said):
        raise NonFiniteError([one["nonfinite"] for one in said])
    held: dict[str, tuple[int, Any]] = {}
    for rank, one in enumerate(said):
        if (odd := first_difference(said[0]["facts"], one["facts"], "")) is not None:
            raise SharedError(
                f"{odd[0]} is {odd[1]} on rank 0 and {odd[2]} on rank {rank}; all ranks must save "
                "the same facts"
            )
        for name, mark in one["sums"].items():
            first, other = held.setdefault(name, (rank, mark))
            if mark != other:
                raise SharedError(
                    f"{name} differs between ranks {first} and {rank}, but is saved only once: "
                    "the replicas drifted apart, or the name must contain the rank"
                )
