"""
Snapshots, restores and bitwise comparison of the numerical state (such as FP8 scales) of a state
domain (stages whose scales are updated together).

After a failed F or dI, the snapshot of the last commit must be restored. The library shifts its
amax histories even when F raises an error, and an abort cannot undo this shift.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs
import torch
from torch import Tensor

from ...backends.protocol import BackendError, StateDomain


def live_state(domain: StateDomain) -> dict[str, Tensor]:
    """Return the live tensors of the domain's numerical state, named by stage."""
    state = {
        f"stages.{stage.index}.{name}": tensor
        for stage in domain.stages
        for name, tensor in stage.numerical_state().items()
    }
    state.update((f"domain.{name}", tensor) for name, tensor in domain.extra_state().items())
    return state


def same_bits(a: Tensor, b: Tensor) -> bool:
    """
    Whether two tensors have the same raw bits: a NaN equals itself, and 0.0 differs from -0.0.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(raw_bits(a), raw_bits(b))


def raw_bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes as one flat tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@attrs.frozen(eq=False)
class NumericalState:
    """
    A detached copy of a domain's numerical state, with the FP8 recipe that produced the state.

    Args:
        tensors: The copies by name.
        recipe: The domain's FP8 recipe as plain data.
    """

    tensors: Mapping[str, Tensor]
    recipe: Mapping[str, object]

    @classmethod
    def of(cls, domain: StateDomain) -> NumericalState:
        """Copy a domain's current numerical state."""
        copies = {name: tensor.detach().clone() for name, tensor in live_state(domain).items()}
        return cls(copies, dict(domain.recipe()))

    def into(self, domain: StateDomain) -> None:
        """
        Overwrite a domain's numerical state, in place.

        Raises:
            BackendError: The recipe, the names or the shapes differ; nothing was written.
        """
        if dict(domain.recipe()) != dict(self.recipe):
            raise BackendError(
                f"numerical state was saved under recipe {dict(self.recipe)}, but these stages run "
                f"recipe {dict(domain.recipe())}; restore under the recipe of the checkpoint"
            )
        live = live_state(domain)
        if odd := sorted(live.keys() ^ self.tensors.keys()):
            raise BackendError(
                f"saved numerical state and these stages differ in {len(odd)} tensor names, first "
                f"{odd[0]}; build the same stages before restoring"
            )
        for name, tensor in live.items():
            if tensor.shape != self.tensors[name].shape:
                raise BackendError(
                    f"{name}: expected shape {tuple(tensor.shape)}, found "
                    f"{tuple(self.tensors[name].shape)}; restore under the same amax history length"
                )
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(self.tensors[name])

    def differences(self, other: NumericalState) -> list[str]:
        """
        Return the names of tensors whose raw bits differ, or that only one of the two states has.
        """
        both = self.tensors.keys() & other.tensors.keys()
        return sorted(self.tensors.keys() ^ other.tensors.keys()) + sorted(
            name for name in both if not same_bits(self.tensors[name], other.tensors[name])
        )


@contextmanager
def preserving(domain: StateDomain) -> Iterator[None]:
    """
    A context for a warm-up. At its end the numerical state is restored.

    State that the warm-up creates is reset at the end: amax histories are emptied and scales are
    set to 1.
    """
    before = {name: tensor.detach().clone() for name, tensor in live_state(domain).items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in live_state(domain).items():
                if name in before:
                    tensor.copy_(before[name])
                else:
                    tensor.fill_(1.0 if name.endswith("scale") else 0.0)


@attrs.define(eq=False)
class Snapshot:
    """
    A copy of live tensors that is renewed at every commit without a new allocation.

    Args:
        live: The tensors to copy; their addresses must not change.
    """

    live: Sequence[Tensor]
    _kept: list[Tensor] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._kept = [tensor.detach().clone() for tensor in self.live]

    def take(self) -> None:
        """Copy the live tensors."""
        _copy(self._kept, self.live)

    def restore(self) -> None:
        """Copy the last snapshot back into the live tensors."""
        _copy(self.live, self._kept)

    def moved(self) -> bool:
        """Whether any live tensor differs from the copy."""
        return not all(same_bits(a, b) for a, b in zip(self.live, self._kept, strict=True))

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._kept)


class GatedSnapshot:
    """
    A copy of live tensors. A flag on the device decides whether the device renews the copy.

    Args:
        live: The tensors to copy; their addresses must not change.
    """

    def __init__(self, live: Sequence[Tensor]) -> None:
        self._parts: list[tuple[list[Tensor], list[Tensor], Tensor, Tensor]] = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in live):
            own = [tensor for tensor in live if tensor.dtype == dtype]
            sizes = [tensor.numel() for tensor in own]
            now = torch.empty(sum(sizes), dtype=dtype, device=own[0].device)
            views = torch.split(now, sizes)
            placed = [view.view(t.shape) for view, t in zip(views, own, strict=True)]
            self._parts.append((own, placed, now, torch.empty_like(now)))

    def take(self, skip: Tensor | None = None) -> None:
        """
        Copy the live tensors.

        Args:
            skip: Scalar on the device. If its value is not 0, the copy stays unchanged.
        """
        for live, placed, now, kept in self._parts:
            _copy(placed, live)
            if skip is None:
                kept.copy_(now)
            else:
                torch.where(skip == 0, now, kept, out=kept)

    def restore(self) -> None:
        """Copy the last snapshot back into the live tensors."""
        for live, placed, now, kept in self._parts:
            now.copy_(kept)
            _copy(live, placed)


def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    into, out_of = list(targets), list(sources)
    if into:
        with torch.no_grad():
            torch._foreach_copy_(into, out_of)
