"""
Which tensors of a rank persist, under names in which no mapping of stages to ranks appears.

`model.layers.5.qkv.weight`, `optim.layers.5.qkv.weight.exp_avg`,
`fp8.dp0.layers.5.forward.scale`: a layer counts over the whole model, so any rank of any mapping
finds what it needs, and what replicas hold alike has one name. Scaling state differs between
replicas and is named by replica; where they share it, all of them call it the first one's. Random
states belong to a process: theirs are the only names with a place in the pipeline.

Tokens, generations, tapes, graphs, streams, events, addresses and weight caches have no name here:
they are of a process, and a restore makes them anew.
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
    "Persistent",
    "by_layer",
    "checksums",
    "optimizer_state",
    "random_states",
    "set_random_states",
    "shares_amax",
]

Naming = Callable[[int, str], str]
"""
The model's name of what a stage holds: of a stage's index, and of a name inside the stage as
`parameters` and `numerical_state` have it.
"""

MODEL, OPTIMIZER, NUMERICAL, RANDOM, EXTRA = "model", "optim", "fp8", "random", "extra"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def by_layer(layers: int) -> Naming:
    """
    Name by layers alone, of a model whose stages have equally many.

    Args:
        layers: Layers of each stage.

    >>> by_layer(2)(3, "layers.1.qkv.weight")
    'layers.7.qkv.weight'
    """

    def name(stage: int, local: str) -> str:
        head, layer, rest = local.split(".", 2)
        return f"{head}.{int(layer) + stage * layers}.{rest}"

    return name


def optimizer_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """
    AdamW's state by its own names, with what its first step will make: zeros.

    A state of zeros at step 0 and no state give the same first update, bit for bit.
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
class Persistent:
    """
    The live tensors of one rank that persist, by the names under which they do.

    Args:
        tensors: Every one of them, live.
        parameters: Names of the weights.
        optimizer: For each of the optimizer's own names of AdamW's state, the name here.
        numerical: For each name of scaling state, the domain's own.
        copies: By name, further tensors that hold the same: copies of a tied weight, and AdamW's
            state of them.
    """

    tensors: Mapping[str, Tensor]
    parameters: Sequence[str]
    optimizer: Mapping[str, str]
    numerical: Mapping[str, str]
    copies: Mapping[str, Sequence[Tensor]] = attrs.field(factory=dict)

    @classmethod
    def of(
        cls, runtime: Runtime, optimizer: Optimizer, naming: Naming, replica: int, place: int
    ) -> Persistent:
        """
        Name what a rank holds.

        Args:
            runtime: The rank's runtime.
            optimizer: The optimizer over its stages.
            naming: The model's names.
            replica: Whose scaling state it is.
            place: The rank's place in its pipeline; only state that belongs to no stage is named
                by it.

        Raises:
            BackendError: The naming gives two tensors one name, or fails on one.
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
                    f"two tensors are called {name}; give a naming that counts layers over the "
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
                f"{missing[0]}; build it over the runtime's stages"
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
        Require that what is saved once is the same in every tensor of its name.

        Raises:
            BackendError: Copies of a tied weight have drifted apart.
        """
        for name, more in self.copies.items():
            if not all(same_bits(self.tensors[name], copy) for copy in more):
                raise BackendError(
                    f"the copies of {name} are not the same, and it is written once: they were "
                    "updated apart"
                )


def shares_amax(runtime: Runtime) -> bool:
    """Whether all replicas hold the same scaling state, however many they are."""
    return runtime.config.amax == "replicas"


def _named(naming: Naming, stage: int, local: str) -> str:
    try:
        return naming(stage, local)
    except (LookupError, ValueError, TypeError) as error:
        raise BackendError(
            f"the naming has no name for {local} of stage {stage} ({error}); it must name every "
            "parameter and every tensor of numerical state"
        ) from error


def random_states(device: torch.device) -> dict[str, Tensor]:
    """torch's generators of this process: the CPU's, and the device's where it is a GPU."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Let this process draw on from where another stopped."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """
    Type, size and a sum of the raw bits of each tensor, to see whether replicas drifted apart.

    Each is summed where it lives; the host waits for each device once.
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
