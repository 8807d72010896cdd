"""
The tensors of a rank that a checkpoint contains, with names that do not depend on the mapping of
stages to ranks.

Examples are `model.layers.5.qkv.weight`, `optim.layers.5.qkv.weight.exp_avg` and
`fp8.dp0.layers.5.forward.scale`. Layers are numbered over the whole model, so ranks of any mapping
find their tensors. A tensor that is the same in all replicas has one name. Scaling state differs
between replicas, so its names contain the replica. If the replicas share the state, all replicas
use the first replica's name. Random states belong to a process, and so does numerical state that
belongs to no stage. Only the names of these states contain the rank's index in the pipeline.

The contract's counters, tapes (data between F and dW), graphs, streams, events, addresses and
weight caches are not saved, because a restored process makes new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from ..backends.protocol import BackendError, parameters
from ..runtime import Runtime
from ..step.memory.numerical_state import same_bits
from ..step.optimizer import Optimizer

__all__ = [
    "EXTRA",
    "MODEL",
    "NUMERICAL",
    "OPTIMIZER",
    "RANDOM",
    "Naming",
    "PersistentTensors",
    "by_layer",
    "checksums",
    "optimizer_state",
    "random_states",
    "set_random_states",
    "shares_amax",
]

Naming = Callable[[int, str], str]
"""
A function that returns the model's name of a stage's tensor. The function takes the stage's index
and the tensor's name inside the stage, as in `parameters` and `numerical_state`.
"""

MODEL, OPTIMIZER, NUMERICAL, RANDOM, EXTRA = "model", "optim", "fp8", "random", "extra"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def by_layer(layers: int) -> Naming:
    """
    Return a naming function for a model whose stages all have the same number of layers.

    Args:
        layers: Number of layers per stage.

    >>> by_layer(2)(3, "layers.1.qkv.weight")
    'layers.7.qkv.weight'
    """

    def name(stage: int, local: str) -> str:
        head, layer, rest = local.split(".", 2)
        return f"{head}.{int(layer) + stage * layers}.{rest}"

    return name


def optimizer_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """
    Return AdamW's state under the optimizer's names. State that does not exist yet is returned as
    zeros.

    With zeros at step 0 the first update gives the same bits as with missing state.
    """
    held = dict(optimizer.state_tensors())
    for name, target in optimizer.named.items():
        for kind in _MOMENTS:
            if f"{name}.{kind}" not in held:
                held[f"{name}.{kind}"] = (
                    torch.zeros((), dtype=torch.float32, device=target.device)
                    if kind == "step"
                    else torch.zeros_like(target, requires_grad=False)
                )
    return held


@attrs.frozen(eq=False)
class PersistentTensors:
    """
    The live tensors of one rank that a checkpoint contains, by name.

    Args:
        tensors: The live tensors, by name.
        parameters: Names of the weights.
        optimizer: Maps the optimizer's name of each tensor of AdamW's state to its name in
            `tensors`.
        numerical: Maps the name in `tensors` of each tensor of scaling state to its name in the
            domain.
        copies: By name in `tensors`, further tensors that must be equal to this tensor: copies of a
            tied weight, and their AdamW state.
    """

    tensors: Mapping[str, Tensor]
    parameters: Sequence[str]
    optimizer: Mapping[str, str]
    numerical: Mapping[str, str]
    copies: Mapping[str, Sequence[Tensor]] = attrs.field(factory=dict)

    @classmethod
    def of(
        cls, runtime: Runtime, optimizer: Optimizer, naming: Naming, replica: int, place: int
    ) -> PersistentTensors:
        """
        Collect a rank's tensors under their names in a checkpoint.

        Args:
            runtime: The guarded runtime of this rank, which holds the tensors.
            optimizer: The optimizer over the runtime's stages.
            naming: How checkpoints name each tensor of the model.
            replica: The index of the rank's replica, whose scaling state the rank holds.
            place: The rank's index in its pipeline. Only names of state that belongs to no stage
                contain this index.

        Raises:
            BackendError: The naming function returns the same name for two tensors or fails for a
                tensor, or a tensor of the optimizer belongs to no parameter.
        """
        tensors: dict[str, Tensor] = {}
        weights: dict[str, None] = {}
        moments: dict[str, str] = {}
        numerical: dict[str, str] = {}
        copies: dict[str, list[Tensor]] = {}

        def add(name: str, tensor: Tensor, *, copied: bool = False) -> None:
            held = tensors.setdefault(name, tensor)
            if held is tensor or held.data_ptr() == tensor.data_ptr():
                return
            if copied:
                copies.setdefault(name, []).append(tensor)
            else:
                raise BackendError(
                    f"two tensors have the name {name}; pass a naming that counts layers over the "
                    "whole model"
                )

        kept = optimizer_state(optimizer)
        own: dict[str, list[str]] = {}
        for key in kept:
            target, _, kind = key.rpartition(".")
            own.setdefault(target, []).append(kind)
        tied = {place for places in runtime.config.copies.values() for place in places}
        for stage in runtime.stages.values():
            for local, parameter in parameters(stage).items():
                name = _named(naming, stage.index, local)
                copied = (stage.index, local) in tied
                add(f"{MODEL}.{name}", parameter.detach(), copied=copied)
                weights[f"{MODEL}.{name}"] = None
                target = f"stages.{stage.index}.{local}"
                for kind in own.get(target, ()):
                    there = f"{OPTIMIZER}.{name}.{kind}"
                    add(there, kept[f"{target}.{kind}"], copied=copied)
                    moments[f"{target}.{kind}"] = there
        if missing := sorted(kept.keys() - moments.keys()):
            raise BackendError(
                f"{len(missing)} tensors of the optimizer belong to no parameter, first "
                f"{missing[0]}; build the optimizer over the runtime's stages"
            )
        scope = f"{NUMERICAL}.dp{0 if shares_amax(runtime) else replica}"
        for stage in runtime.domain.stages:
            for local, tensor in stage.numerical_state().items():
                name = f"{scope}.{_named(naming, stage.index, local)}"
                add(name, tensor)
                numerical[name] = f"stages.{stage.index}.{local}"
        for local, tensor in runtime.domain.extra_state().items():
            name = f"{scope}.process{place}.{local}"
            add(name, tensor)
            numerical[name] = f"domain.{local}"
        return cls(tensors, tuple(weights), moments, numerical, copies)

    def require_alike(self) -> None:
        """
        Raise an error unless all copies of each tensor have the same bits. Only one copy is saved.

        Raises:
            BackendError: Copies of a tied weight differ.
        """
        for name, more in self.copies.items():
            if not all(same_bits(self.tensors[name], copy) for copy in more):
                raise BackendError(
                    f"expected equal copies of {name}, because a checkpoint holds only one, found "
                    "a difference; the copies were updated separately"
                )


def shares_amax(runtime: Runtime) -> bool:
    """Whether all replicas hold the same scaling state."""
    return runtime.config.amax == "replicas"


def _named(naming: Naming, stage: int, local: str) -> str:
    try:
        return naming(stage, local)
    except (LookupError, ValueError, TypeError) as error:
        raise BackendError(
            f"naming({stage}, {local!r}) failed ({error}); it must return a name for every "
            "parameter and every tensor of numerical state"
        ) from error


def random_states(device: torch.device) -> dict[str, Tensor]:
    """
    Return the states of torch's random generators in this process: the CPU's generator, and on a
    GPU also the device's generator.
    """
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set torch's random generators in this process to saved states."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """
    Return the dtype, the shape and a sum of the raw bits of each tensor. Different replicas are
    detected by comparing these values.

    Each tensor is summed on its own device. The host waits once per device.
    """
    sums: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous().reshape(-1)
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        whole = flat.view(width.get(flat.element_size(), torch.uint8))
        sums.setdefault(tensor.device, []).append((name, whole.sum(dtype=torch.int64)))
    found: dict[str, list[Any]] = {}
    for own in sums.values():
        numbers = torch.stack([total for _, total in own]).tolist()
        for (name, _), number in zip(own, numbers, strict=True):
            tensor = tensors[name]
            found[name] = [str(tensor.dtype), list(tensor.shape), number]
    return found
