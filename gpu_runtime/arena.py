"""
Physical gradient destinations, and what must stay true of them.

Three rules say where dW writes and what the optimizer then reads:

`copied`
    The library's own memory, cloned after every dW; summed at finalize. The conservative path.
`per_microbatch`
    One fixed buffer for every matrix and microbatch; summed at finalize. The paper's direct
    placement, `M * sum(sizeof(W))` bytes.
`accumulate`
    One fixed buffer for every matrix: the first dW of an epoch overwrites it, later ones add to it.
    Its size does not depend on the number of microbatches, its value depends on the order of dW.

The kernel's arena ledger decides which microbatch may write and whether all have. This module holds
the memory and checks, at every bind, that it is still the memory that graphs were captured with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import attrs
import torch
from torch import Tensor

from gpu_runtime.backend import BackendError, StageBackend, WgradUnit

Rule = Literal["copied", "per_microbatch", "accumulate"]
RULES: tuple[Rule, ...] = ("copied", "per_microbatch", "accumulate")


@attrs.frozen
class Descriptor:
    """What identifies a destination: a captured graph writes to exactly this."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    data_ptr: int

    @classmethod
    def of(cls, tensor: Tensor) -> Descriptor:
        """Describe a tensor as it is now."""
        return cls(tuple(tensor.shape), str(tensor.dtype), str(tensor.device), tensor.data_ptr())

    def mismatch(self, found: Descriptor) -> str | None:
        """The first field that differs, in words; None when none does."""
        for field in attrs.fields(Descriptor):
            mine, theirs = getattr(self, field.name), getattr(found, field.name)
            if mine != theirs:
                return f"{field.name}: expected {mine}, found {theirs}"
        return None


@attrs.define(eq=False)
class Arena:
    """
    The matrix-gradient memory of one stage.

    Args:
        units: The stage's units of deferred work.
        rule: Where dW writes.
        num_microbatches: Microbatches of an epoch.
        dtype: Type of the destinations. Where it differs from the parameters', the optimizer needs
            master weights of that type.
        device: Where they live.
    """

    units: tuple[WgradUnit, ...]
    rule: Rule
    num_microbatches: int
    dtype: torch.dtype
    device: torch.device
    _buffers: list[dict[str, Tensor]] = attrs.field(init=False, factory=list)
    _descriptors: list[dict[str, Descriptor]] = attrs.field(init=False, factory=list)
    _copies: dict[int, dict[str, Tensor]] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"unknown destination rule {self.rule!r}; choose {', '.join(RULES)}")
        sets = {"copied": 0, "per_microbatch": self.num_microbatches, "accumulate": 1}[self.rule]
        for _ in range(sets):
            buffers = {
                unit.name: torch.zeros(unit.shape, dtype=self.dtype, device=self.device)
                for unit in self.units
            }
            self._buffers.append(buffers)
            self._descriptors.append({name: Descriptor.of(t) for name, t in buffers.items()})
        self._check_overlap()

    @classmethod
    def for_stage(
        cls, stage: StageBackend, rule: Rule, num_microbatches: int, dtype: torch.dtype
    ) -> Arena:
        """The arena of a stage, on the stage's device."""
        return cls(stage.units, rule, num_microbatches, dtype, stage.domain.device)

    def _check_overlap(self) -> None:
        spans = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), name)
            for buffers in self._buffers
            for name, tensor in buffers.items()
        )
        for (_, end, first), (start, _, second) in pairwise(spans):
            if start < end:
                raise BackendError(f"destinations of {first} and {second} overlap in memory")

    @property
    def direct(self) -> bool:
        """Whether dW writes straight into the arena."""
        return self.rule != "copied"

    @property
    def num_bytes(self) -> int:
        """Reserved destination memory; copies under `copied` come and go and are not counted."""
        return sum(
            tensor.numel() * tensor.element_size()
            for buffers in self._buffers
            for tensor in buffers.values()
        )

    def index_of(self, microbatch: int) -> int:
        """Which set of buffers a microbatch writes."""
        return 0 if self.rule == "accumulate" else microbatch

    def destinations(self, microbatch: int) -> Mapping[str, Tensor] | None:
        """The buffers that a microbatch's dW writes, by unit; None under `copied`."""
        return self._buffers[self.index_of(microbatch)] if self.direct else None

    def descriptors(self, microbatch: int) -> Mapping[str, Descriptor]:
        """What those buffers were when the arena was made."""
        return self._descriptors[self.index_of(microbatch)] if self.direct else {}

    def check(self, microbatch: int, bound: Mapping[str, Tensor]) -> str | None:
        """
        Compare what is bound with what was configured.

        Args:
            microbatch: Whose dW will write.
            bound: The destinations presented, by unit.

        Returns:
            What differs, in words; None when nothing does.
        """
        expected = self.descriptors(microbatch)
        if expected.keys() != bound.keys():
            odd = sorted(expected.keys() ^ bound.keys())
            return f"units: {odd[0]} is configured or bound, but not both"
        for name, descriptor in expected.items():
            if found := descriptor.mismatch(Descriptor.of(bound[name])):
                return f"{name} {found}"
        return None

    def keep_copies(self, microbatch: int, by_unit: Mapping[str, Tensor]) -> None:
        """Under `copied`, clone what dW left in the library's memory before its slot is reused."""
        self._copies[microbatch] = {name: tensor.clone() for name, tensor in by_unit.items()}

    def spoil(self, microbatch: int) -> None:
        """Forget a half-written copy; the ledger marks arena buffers unusable."""
        self._copies.pop(microbatch, None)

    def total(self, order: Sequence[int]) -> dict[str, Tensor]:
        """
        The gradient of each unit for the epoch, summed in the given order of microbatches.

        The order matters: an eight-term sum in another order differs in most of its elements.
        """
        if self.rule == "accumulate":
            return self._buffers[0]
        sets = self._copies if self.rule == "copied" else dict(enumerate(self._buffers))
        names = [unit.name for unit in self.units]
        total = [sets[order[0]][name] for name in names]
        for microbatch in order[1:]:
            torch._foreach_add_(total, [sets[microbatch][name] for name in names])
        return dict(zip(names, total, strict=True))

    def start_epoch(self) -> None:
        """Release the last epoch's copies."""
        self._copies.clear()


def by_matrix(units: Iterable[WgradUnit], by_unit: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each matrix's rows of its unit's gradient, by name."""
    return {m.name: rows for unit in units for m, rows in unit.rows(by_unit[unit.name])}
