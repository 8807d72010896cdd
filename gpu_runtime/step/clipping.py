"""
The norm of the gradients of an epoch (an optimizer step), for clipping and for skipping the update.
The norm has the same bits on every rank, for every mapping of stages to ranks.

A part of a model is its embedding, one of its layers, or the rest of a stage (its head). A part's
sum of squares is computed in float64 from its finalized and reduced gradients. Each parameter's
norm is squared, and the squares are added in the order of the stage's parameters. The sums of all
parts are added in the order of the model. Therefore the bits of the norm do not depend on the cut
of the model into stages, the mapping of stages to ranks, or the schedule. They also do not depend
on the number of replicas. (On a CPU the norm of one large tensor depends on torch's number of
threads.)

A tied weight has one gradient, which counts once. All replicas hold the same reduced gradients, so
the norm counts them only once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from ..backends.protocol import BackendError

__all__ = ["Clipping", "DeviceNorm", "Norm", "Part", "parts_of", "square_sums"]

Part = tuple[int, int]
"""
A part of a model: its stage, and its place in the stage. The place is -1 for the embedding, the
layer's number in the stage for a layer, and `_REST` for everything else. Parts in ascending order
are in the model's order.
"""

_REST = 2**31
_LAYER = re.compile(r"layers\.(\d+)\.")

EPSILON = 1e-6
"""Added to the norm before the division, as `torch.nn.utils.clip_grad_norm_` does."""


@attrs.frozen(kw_only=True)
class Clipping:
    """
    How an update uses the norm of all gradients.

    Args:
        max_norm: Gradients are multiplied by `max_norm / (norm + 1e-6)` if this factor is below 1;
            None leaves gradients unchanged.
        skip_nonfinite: If True, every rank skips the update if the norm is not finite. Weights,
            moments and step counts then stay unchanged. The epoch still commits, because its data
            are consumed and its scaling state was updated; the weight caches must then be
            refreshed. If False, a norm that is not finite makes every weight not finite, as in
            torch.
        elsewhere: Stage and name of each gradient that the norm leaves out, because the norm
            already counts another copy of the same weight.
        parts: Every part (embedding, layer, rest of a stage) of the model, in the model's order.

    Raises:
        BackendError: `max_norm` is not a positive finite number.
    """

    max_norm: float | None = attrs.field(default=None)
    skip_nonfinite: bool = False
    elsewhere: frozenset[tuple[int, str]] = frozenset()
    parts: tuple[Part, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.max_norm is not None and not (0 < self.max_norm < math.inf):
            raise BackendError(
                f"clip_norm is {self.max_norm}; expected a positive finite number, or None"
            )

    def __bool__(self) -> bool:
        """Whether the update needs the norm at all."""
        return self.max_norm is not None or self.skip_nonfinite

    @property
    def stages(self) -> tuple[int, ...]:
        """The stage of each part of the model."""
        return tuple(stage for stage, _ in self.parts)


@attrs.frozen
class Norm:
    """
    The norm of an epoch's gradients, and its effect on the update.

    Args:
        total: The norm of all stages' gradients, before clipping.
        factor: The float32 factor by which every gradient was multiplied; 1 if unchanged.
        skipped: Whether the update was skipped.
        parts: The sum of squares of each part (embedding, layer, rest of a stage) of the model, in
            the model's order.
        stages: The stage of each part. By default part i belongs to stage i.
    """

    total: float
    factor: float
    skipped: bool
    parts: tuple[float, ...] = attrs.field(default=(), repr=False)
    stages: tuple[int, ...] = attrs.field(
        default=attrs.Factory(lambda self: tuple(range(len(self.parts))), takes_self=True),
        repr=False,
    )

    @property
    def zero_stages(self) -> list[int]:
        """The stages whose gradients are all zero."""
        other = {s for s, part in zip(self.stages, self.parts, strict=True) if part != 0.0}
        return sorted(set(self.stages) - other)

    @property
    def nonfinite_stages(self) -> list[int]:
        """The stages with a gradient that is not finite."""
        pairs = zip(self.stages, self.parts, strict=True)
        return sorted({stage for stage, part in pairs if not math.isfinite(part)})

    @classmethod
    def of(cls, parts: Sequence[float], clipping: Clipping) -> Norm:
        """
        Compute the norm from the sums of squares of a model's parts (embedding, layers, rest of
        each stage), in the model's order.

        >>> Norm.of([9.0, 16.0], Clipping(max_norm=10.0))
        Norm(total=5.0, factor=1.0, skipped=False)
        """
        squares = 0.0
        for part in parts:
            squares += part
        total = math.sqrt(squares)
        skipped = clipping.skip_nonfinite and not math.isfinite(total)
        factor = 1.0
        if clipping.max_norm is not None and not skipped:
            wanted = clipping.max_norm / (total + EPSILON)
            factor = float(torch.tensor(wanted, dtype=torch.float64).clamp(max=1.0).float())
        return cls(
            total, factor, skipped, tuple(parts), *([clipping.stages] * bool(clipping.parts))
        )

    def scale(self, device: torch.device) -> Tensor | None:
        """The factor as a float32 scalar on the device; None if the factor is 1."""
        return None if self.factor == 1.0 else torch.full((), self.factor, device=device)


def parts_of(
    named: Mapping[int, Iterable[str]], elsewhere: Collection[tuple[int, str]] = ()
) -> dict[Part, list[str]]:
    """
    Return the parts of a model, in the model's order, each with the parameter names that the norm
    counts.

    >>> parts_of({0: ["layers.0.w", "layers.1.w", "embedding.w"], 1: ["layers.0.w", "head.w"]})
    {(0, -1): ['embedding.w'], (0, 0): ['layers.0.w'], (0, 1): ['layers.1.w'], \
(1, 0): ['layers.0.w'], (1, 2147483648): ['head.w']}

    Args:
        named: Names of the parameters by stage.
        elsewhere: Parameters to leave out, by stage and name.
    """
    found: dict[Part, list[str]] = {}
    for stage, names in named.items():
        for name in names:
            if (stage, name) in elsewhere:
                continue
            layer = _LAYER.match(name)
            place = -1 if name.startswith("embedding.") else int(layer[1]) if layer else _REST
            found.setdefault((stage, place), []).append(name)
    return dict(sorted(found.items()))


def square_sums(
    gradients: Mapping[int, Mapping[str, Tensor]],
    elsewhere: Collection[tuple[int, str]] = (),
) -> dict[Part, Tensor]:
    """
    Compute the sum of squares of each part of the model (embedding, layer, rest of a stage). Each
    sum is a float64 scalar on the gradients' device; the host does not wait.

    Args:
        gradients: Finalized and reduced gradients, by stage and name, one per parameter.
        elsewhere: Stage and name of each gradient to leave out, because the norm counts another
            copy of its weight.
    """
    found: dict[Part, Tensor] = {}
    for part, names in parts_of(gradients, elsewhere).items():
        own = [gradients[part[0]][name] for name in names]
        each = torch._foreach_norm(own, 2, dtype=torch.float64)
        found[part] = torch.stack(each).square().sum()
    return found


@attrs.define(eq=False)
class DeviceNorm:
    """
    The numbers of a `Norm` as tensors on the gradients' device, with the same bits as the numbers
    of `Norm.of`.

    Args:
        clipping: How the update uses the norm.
        total: The norm, a float64 scalar.
        factor: The factor, a float32 scalar.
        skip: 1 if the update must be skipped, else 0; a float32 scalar.
        parts: The sum of squares of each part (embedding, layer, rest of a stage) of the model,
            float64.
    """

    clipping: Clipping
    total: Tensor
    factor: Tensor
    skip: Tensor
    parts: Tensor

    @classmethod
    def on(cls, device: torch.device, clipping: Clipping, count: int | None = None) -> DeviceNorm:
        """
        Allocate the tensors `total`, `factor`, `skip` and `parts` for a model with `count` parts.
        Every `take` writes into these tensors.
        """
        size = len(clipping.parts) if count is None else count
        parts = torch.zeros(size, dtype=torch.float64, device=device)
        total, skip = parts.new_zeros(()), torch.zeros((), device=device)
        return cls(clipping, total, torch.ones((), device=device), skip, parts)

    def take(self, parts: Tensor) -> None:
        """
        Compute these tensors from the sums of squares of the model's parts (float64, in the model's
        order). The host does not wait.
        """
        self.parts.copy_(parts)
        squares = parts.new_zeros(())
        for part in parts.unbind():  # one by one: a single sum call chooses its own order
            squares = squares + part
        self.total.copy_(squares.sqrt())
        if self.clipping.skip_nonfinite:
            self.skip.copy_(~self.total.isfinite())
        if self.clipping.max_norm is not None:
            wanted = torch.div(
                torch.full_like(self.total, self.clipping.max_norm), self.total + EPSILON
            )
            self.factor.copy_(wanted.clamp(max=1.0))

    def read(self) -> Norm:
        """Return the four tensors' values as numbers; waits for the device."""
        skipped = bool(self.skip)
        factor = 1.0 if skipped else float(self.factor)
        return self.norm_of(float(self.total), factor, skipped, self.parts.tolist())

    def norm_of(self, total: float, factor: float, skipped: bool, parts: Sequence[float]) -> Norm:
        """Make a `Norm` from numbers that the host has already read."""
        stages = [self.clipping.stages] * bool(self.clipping.parts)
        return Norm(total, factor, skipped, tuple(parts), *stages)
