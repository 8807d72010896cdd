"""
The norm of all gradients of an epoch, and what follows of it for the update: the same bits on every
rank, whichever rank holds which stage.

A stage's part is the sum of the squares of its finalized and reduced gradients, in float64: the
norm of each parameter's, squared, added in the order of the stage's parameters. The parts of all
stages are added in the order of the model. So the norm depends on where the model is cut into
stages, in its last bits, and not on which rank has which stage, on the schedule, or on the number
of replicas. (On a CPU the norm of one large tensor also depends on how many threads torch has.)

A tied weight has one gradient, so it counts once; a replica's gradients are its peers', so the
replicas count once together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from ..backends.protocol import BackendError

__all__ = ["Clipping", "DeviceNorm", "Norm", "square_sums"]

EPSILON = 1e-6
"""Added to the norm before the limit is divided by it, as `torch.nn.utils.clip_grad_norm_` does."""


@attrs.frozen(kw_only=True)
class Clipping:
    """
    What an update does with the norm of all gradients.

    Args:
        max_norm: Gradients are multiplied by `max_norm / (norm + 1e-6)` where that is below 1;
            None leaves them as they are.
        skip_nonfinite: Skip the update, on every rank, where the norm is not finite. The epoch
            commits all the same: its data are used up and the scaling state has moved, so that the
            caches are stale; weights, moments and step counts stay as they were. Without it a norm
            that is not finite does what it does in torch: it spoils every weight.
        elsewhere: Gradients, by stage and name, that count where another copy of the same weight
            is, so not here.

    Raises:
        BackendError: The limit is no positive finite number.
    """

    max_norm: float | None = attrs.field(default=None)
    skip_nonfinite: bool = False
    elsewhere: frozenset[tuple[int, str]] = frozenset()

    def __attrs_post_init__(self) -> None:
        if self.max_norm is not None and not (0 < self.max_norm < math.inf):
            raise BackendError(
                f"clip_norm is {self.max_norm}; expected a positive finite number, or None"
            )

    def __bool__(self) -> bool:
        """Whether a norm is needed at all."""
        return self.max_norm is not None or self.skip_nonfinite


@attrs.frozen
class Norm:
    """
    The norm of an epoch's gradients, and what followed.

    Args:
        total: The norm of all stages' gradients, before clipping.
        factor: What every gradient was multiplied by, a number of float32; 1 where none was.
        skipped: Whether the update was skipped.
    """

    total: float
    factor: float
    skipped: bool

    @classmethod
    def of(cls, parts: Sequence[float], clipping: Clipping) -> Norm:
        """
        The norm of stages' parts, in the model's order.

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
        return cls(total, factor, skipped)

    def scale(self, device: torch.device) -> Tensor | None:
        """The factor as a scalar of float32 there; None where it changes nothing."""
        return None if self.factor == 1.0 else torch.full((), self.factor, device=device)


def square_sums(
    gradients: Mapping[int, Mapping[str, Tensor]],
    elsewhere: Collection[tuple[int, str]] = (),
) -> dict[int, Tensor]:
    """
    Each stage's sum of squares, scalars of float64 where the gradients are; no host waits.

    Args:
        gradients: Finalized and reduced, by stage and name, each parameter's once.
        elsewhere: Those, by stage and name, that count where another copy of the weight is.
    """
    found = {}
    for stage, named in gradients.items():
        own = [gradient for name, gradient in named.items() if (stage, name) not in elsewhere]
        each = torch._foreach_norm(own, 2, dtype=torch.float64)
        found[stage] = torch.stack(each).square().sum()
    return found


@attrs.define(eq=False)
class DeviceNorm:
    """
    What `Norm.of` says, computed where the gradients are and by the same steps: the same bits.

    Args:
        clipping: What is asked for.
        total: The norm, a scalar of float64.
        factor: The factor, a scalar of float32.
        skip: 1 where the update is to be skipped, else 0; a scalar of float32.
    """

    clipping: Clipping
    total: Tensor
    factor: Tensor
    skip: Tensor

    @classmethod
    def on(cls, device: torch.device, clipping: Clipping) -> DeviceNorm:
        """Places for all three, which stay where they are."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        return cls(clipping, total, torch.ones((), device=device), torch.zeros((), device=device))

    def take(self, parts: Tensor) -> None:
        """Compute all three from the stages' parts, float64 in the model's order; no host waits."""
        squares = parts.new_zeros(())
        for part in parts.unbind():  # one after another: a sum in one call has an order of its own
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
        """All three as numbers; waits for the device."""
        skipped = bool(self.skip)
        return Norm(float(self.total), 1.0 if skipped else float(self.factor), skipped)
