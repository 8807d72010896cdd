"""
Load a checkpoint: compare its facts with this run, find each tensor, and copy the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from qeffect.checkpoint import Checkpoint

from ...backends.protocol import BackendError
from ...ranks.worker import Worker
from ...step.memory.numerical_state import NumericalState
from ..state import (
    EXTRA,
    NUMERICAL,
    RANDOM,
    PersistentTensors,
    random_states,
    set_random_states,
    shares_amax,
)
from .agreement import SharedError
from .facts import first_difference, mapping_of, placement, plain, requirements
from .files import AWAY, FACTS, manifest, problem_of, read_facts
from .save import random_name

__all__ = [
    "HalfLoadedError",
    "Replicas",
    "TensorSource",
    "require_all_taken",
    "require_compatible",
    "sources",
    "write_loaded",
]

Replicas = Literal["same", "modulo"]
"""
Which scaling state replica r loads. With ``same``, replica r loads the state of saved replica r,
and both runs need the same number of replicas. With ``modulo``, replica r loads the state of saved
replica r modulo N, where N is the number of saved replicas.
"""


class HalfLoadedError(RuntimeError):
    """
    This rank failed while it copied a checkpoint's tensors into its own tensors. All ranks had
    accepted the checkpoint before.
    """

    unrecoverable = True


@attrs.frozen(eq=False)
class TensorSource:
    """
    Where a loaded tensor comes from, and where it is copied to.

    Args:
        saved: The tensor's name in the checkpoint.
        into: A tensor of this run, with the shape and dtype that the saved tensor must have.
    """

    saved: str
    into: Tensor


def require_compatible(path: Path, worker: Worker, must: Mapping[str, Any]) -> dict[str, Any]:
    """
    Check the files that this rank is responsible for, and compare all facts (plain data) with this
    run.

    Returns:
        The checkpoint's facts.

    Raises:
        BackendError: A file is missing or damaged, or a fact differs.
    """
    marks = manifest(path)
    member = worker.member
    share = sorted(marks)[member.rank :: member.world]
    if problem := problem_of(path, marks, share):
        raise BackendError(problem)
    facts = read_facts(path, marks)
    here = {**requirements(worker), "given": plain(must, "must")}
    if len(facts["contracts"]) != facts["mapping"]["ranks"] * facts["mapping"]["replicas"]:
        raise BackendError(
            f"{path / FACTS}: expected one contract per rank, of {facts['mapping']['ranks']} "
            f"ranks in each of {facts['mapping']['replicas']} replicas, found "
            f"{len(facts['contracts'])}; {AWAY}"
        )
    if (odd := first_difference(facts["must"], here, "")) is not None:
        name = odd[0].removeprefix("given.")
        raise BackendError(
            f"{path} was saved with {name} {odd[1]}, this run has {odd[2]}; load it with the "
            "saved value, or start a new run"
        )
    return facts


def sources(
    path: Path,
    worker: Worker,
    facts: Mapping[str, Any],
    held: PersistentTensors,
    extra: Mapping[str, Tensor],
    replicas: Replicas,
) -> dict[str, TensorSource]:
    """
    Find in the checkpoint each tensor that this rank loads.

    Returns:
        The source of each tensor, by the tensor's name in this run.

    Raises:
        BackendError: The checkpoint lacks a tensor, or a tensor has another shape or dtype. Or the
            checkpoint has the scaling state of another number of replicas, and `replicas` does not
            allow this.
    """
    there, here = facts["mapping"]["replicas"], worker.member.world // worker.pp
    shares = shares_amax(worker.runtime)  # state that all replicas share is saved once
    if there != here and not shares and replicas == "same":
        raise BackendError(
            f"{path} has the scaling state of {there} replicas, this run has {here}; to give "
            f"replica r the state of saved replica r modulo {there}, set [checkpoint] "
            'replicas = "modulo" in the training file, or pass replicas="modulo" to load'
        )
    mine, theirs = f"{NUMERICAL}.dp{worker.replica}.", (
        f"{NUMERICAL}.dp{worker.replica % there}."
    )  # fmt: skip
    found_at: dict[str, TensorSource] = {}
    for name, tensor in held.tensors.items():
        own = name in held.numerical and not shares
        saved = theirs + name.removeprefix(mine) if own else name
        found_at[name] = TensorSource(saved, tensor)
    for name, tensor in extra.items():
        found_at[f"{EXTRA}.{name}"] = TensorSource(f"{EXTRA}.{name}", tensor)
    if placement(facts["mapping"]) == placement(mapping_of(worker)):
        for kind, tensor in random_states(worker.member.device).items():
            name = random_name(worker, kind)
            if name in facts["tensors"]:
                found_at[name] = TensorSource(name, tensor)
    for one in found_at.values():
        if one.saved not in facts["tensors"]:
            raise BackendError(f"{path} has no {one.saved}; {_remedy(one.saved)}")
        dtype, size = facts["tensors"][one.saved]
        found = str(one.into.dtype), list(one.into.shape)
        if (dtype, size) != found:
            raise BackendError(
                f"{path}: {one.saved} is {dtype} {size}, here {found[0]} {found[1]}; build the "
                "model that was saved"
            )
    return found_at


def write_loaded(
    worker: Worker,
    facts: Mapping[str, Any],
    held: PersistentTensors,
    found: Mapping[str, Tensor],
    extra: Mapping[str, Tensor],
) -> None:
    """Copy the loaded tensors into this rank's tensors. `sources` must have checked them before."""
    runtime = worker.runtime
    worker.new = False
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
        kind: found[random_name(worker, kind)]
        for kind in ("cpu", "cuda")
        if random_name(worker, kind) in found
    }
    if states:
        set_random_states(states, worker.member.device)
    runtime.drain()


def require_all_taken(
    path: Path, facts: Mapping[str, Any], said: list[dict[str, Any]], replicas: int
) -> None:
    """
    Raise an error unless all ranks load the same checkpoint, and the ranks together load all its
    tensors.

    Args:
        path: The folder of the checkpoint.
        facts: The facts file of the checkpoint, as plain data.
        said: By rank, the ``path`` of the checkpoint and the ``names`` of the tensors that the rank
            loads.
        replicas: Number of replicas of this run.

    Raises:
        SharedError: The ranks load different checkpoints, or a tensor of the checkpoint does not
            exist in this run.
    """
    paths = {one["path"] for one in said}
    if len(paths) > 1:
        raise SharedError(
            f"ranks load different checkpoints: {sorted(paths)}; name the same checkpoint on every "
            "rank"
        )
    taken = {name for one in said for name in one["names"]}
    for name in sorted(facts["tensors"].keys() - taken):
        kind, scope = name.split(".")[:2]
        if kind in (RANDOM, EXTRA):
            continue
        if kind == NUMERICAL and int(scope.removeprefix("dp")) >= replicas:
            continue
        raise SharedError(f"{path} has {name}, which this run lacks; {_remedy(name)}")


def _remedy(name: str) -> str:
    """Return what to do about a tensor that exists only in the checkpoint, or only in this run."""
    if name.startswith(f"{NUMERICAL}.") and name.split(".")[2].startswith("process"):
        return "this state belongs to one rank: resume with the pp of the saved run"
    return "build the model that was saved"
