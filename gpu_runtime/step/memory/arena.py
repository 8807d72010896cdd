"""
The memory into which dW writes gradients.

Three rules say where dW writes and what the optimizer then reads:

`copied`
    dW writes to memory of the FP8 library, and the gradients are cloned after every dW. The clones
    are summed at finalize, once all dW of the stage have run. This is the most conservative rule.
`per_microbatch`
    dW writes one fixed buffer per matrix and microbatch; the buffers are summed at finalize. The
    paper calls this rule direct placement. M microbatches take `M * sum(sizeof(W))` bytes.
`accumulate`
    dW writes one fixed buffer per matrix. The first dW of an epoch (an optimizer step) overwrites
    the buffer, and later dW add to it. The size does not depend on the number of microbatches, but
    the sum depends on the order of dW.

Before each dI, a bind sets the memory to which the microbatch's dW will write. The contract decides
which microbatch may write, whether all microbatches have written, and whether the bound memory is
the configured memory. This module owns the memory. At every bind, this module reads shape, dtype,
device and address of the memory again, and passes them to the contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import attrs
import torch
from torch import Tensor

from qeffect.counts import located
from qeffect.destinations import Destination

from ...backends.protocol import StageBackend, WgradUnit
from .sums import OrderedSum
from .tensor_identity import TensorIdentity
from .tied_weights import TiedWeights

Rule = Literal["copied", "per_microbatch", "accumulate"]
RULES: tuple[Rule, ...] = ("copied", "per_microbatch", "accumulate")


@attrs.define(eq=False)
class Arena:
    """
    The matrix-gradient memory of one stage.

    Args:
        units: The stage's units (deferred matrix products).
        rule: The rule, such as `accumulate`, that says where dW writes its gradients.
        num_microbatches: Number of microbatches in an epoch.
        dtype: Type of the destinations. If this type differs from the parameters'
            type, the optimizer needs master weights of that type.
        device: Device of the destinations.
        tied: By unit, the name of the destination that this unit shares with another unit of the
            same tied weight.
        lent: By name, the shared destinations that an earlier arena has already made. This arena
            adds the shared destinations that it makes.
    """

    units: tuple[WgradUnit, ...]
    rule: Rule
    num_microbatches: int
    dtype: torch.dtype
    device: torch.device
    tied: Mapping[str, str] = attrs.field(factory=dict)
    lent: dict[str, list[Tensor]] = attrs.field(factory=dict)
    _own: tuple[str, ...] = attrs.field(init=False)
    _buffers: list[dict[str, Tensor]] = attrs.field(init=False, factory=list)
    _configured: list[tuple[Destination, ...]] = attrs.field(init=False, factory=list)
    _identities: list[TensorIdentity] = attrs.field(init=False, factory=list)
    _copies: dict[int, dict[str, Tensor]] = attrs.field(init=False, factory=dict)
    _sum: OrderedSum = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"unknown destination rule {self.rule!r}; choose {', '.join(RULES)}")
        if self.tied and not self.direct:
            raise ValueError(
                "tied weights share a destination, but rule 'copied' has no destinations; choose "
                "another rule"
            )
        terms = 1 if self.rule == "accumulate" else self.num_microbatches
        self._sum = OrderedSum.prepared(terms, self.dtype, self.device)
        sets = {"copied": 0, "per_microbatch": self.num_microbatches, "accumulate": 1}[self.rule]
        first = [self.tied.get(unit.name, unit.name) for unit in self.units]
        self._own = tuple(
            unit.name
            for at, unit in enumerate(self.units)
            if unit.name not in self.tied
            or (first[at] not in self.lent and first[at] not in first[:at])
        )
        for index in range(sets):
            self._buffers.append({unit.name: self._buffer(unit, index) for unit in self.units})
        for index in range(self.num_microbatches if self.rule != "accumulate" else 1):
            self._configured.append(self._described(index))
            held = self._buffers[index].values() if self.direct else ()
            self._identities.append(TensorIdentity(held))

    def _buffer(self, unit: WgradUnit, index: int) -> Tensor:
        """Make the destination of a unit in one set, or take the shared destination."""
        sets = self.lent.setdefault(self.tied[unit.name], []) if unit.name in self.tied else []
        if unit.name not in self._own:
            return sets[index]
        made = torch.zeros(unit.shape, dtype=self.dtype, device=self.device)
        sets.append(made)
        return made

    @classmethod
    def for_stage(
        cls,
        stage: StageBackend,
        rule: Rule,
        num_microbatches: int,
        dtype: torch.dtype,
        tied: TiedWeights | None = None,
    ) -> Arena:
        """The arena of a stage, on the stage's device."""
        device = stage.domain.device
        if tied is None:
            return cls(stage.units, rule, num_microbatches, dtype, device)
        lent = tied.memory
        return cls(stage.units, rule, num_microbatches, dtype, device, tied.units(stage), lent)

    @property
    def direct(self) -> bool:
        """Whether dW writes directly into the arena."""
        return self.rule != "copied"

    @property
    def num_bytes(self) -> int:
        """
        Bytes of the destinations. Shared destinations that were made for other units, and the
        clones under the rule `copied`, are not counted.
        """
        return sum(
            buffers[name].numel() * buffers[name].element_size()
            for buffers in self._buffers
            for name in self._own
        )

    def buffers(self, index: int) -> Mapping[str, Tensor] | None:
        """Return one set of destinations, by unit; None for index -1, the library's own memory."""
        return None if index < 0 else self._buffers[index]

    def index_of(self, microbatch: int) -> int:
        """Return the index of the set of destinations that a microbatch writes."""
        return {"copied": -1, "per_microbatch": microbatch, "accumulate": 0}[self.rule]

    def destinations(self, microbatch: int) -> Mapping[str, Tensor] | None:
        """Return the destinations that a microbatch's dW writes, by unit; None under `copied`."""
        return self.buffers(self.index_of(microbatch))

    def places(self) -> list[int]:
        """
        For each set of destinations, a number computed from its addresses
        (`qeffect.counts.located`).
        """
        return located(self._configured)

    def configured(self) -> tuple[Destination, ...]:
        """Every destination, as in the contract's configuration."""
        return tuple(d for described in self._configured for d in described)

    def present(self, microbatch: int) -> tuple[Destination, ...]:
        """
        Describe the memory to which a microbatch's dW would now write. The contract compares this
        description with its configuration.

        Every call reads shape, dtype, device and address of the tensors again. If the tensors are
        unchanged, the call returns the configured description itself, which the contract compares
        by identity.
        """
        index = 0 if self.rule == "accumulate" else microbatch
        return (
            self._configured[index]
            if self._identities[index].unchanged()
            else self._described(index)
        )

    def in_place(self) -> bool:
        """Whether `present` returns the configured destinations for every microbatch."""
        return all(look.unchanged() for look in self._identities)

    def _described(self, index: int) -> tuple[Destination, ...]:
        owner = None if self.rule == "accumulate" else index
        if not self.direct:
            found = [Destination(m.name, owner) for unit in self.units for m in unit.matrices]
        else:
            found = [
                Destination(
                    matrix.name,
                    owner,
                    tuple(rows.shape),
                    str(rows.dtype).removeprefix("torch."),
                    str(rows.device),
                    rows.data_ptr(),
                    rows.numel() * rows.element_size(),
                )
                for unit in self.units
                for matrix, rows in unit.rows(self._buffers[index][unit.name])
            ]
        return tuple(sorted(found, key=lambda d: d.matrix))

    def keep_copies(self, microbatch: int, by_unit: Mapping[str, Tensor]) -> None:
        """Under the rule `copied`, clone the gradients in the library's memory before the slot (the
        microbatch's buffers) is reused."""
        self._copies[microbatch] = {name: tensor.clone() for name, tensor in by_unit.items()}

    def written(self, microbatch: int) -> Mapping[str, Tensor]:
        """Return the gradients that a microbatch's dW wrote, by unit."""
        held = self.destinations(microbatch)
        return self._copies[microbatch] if held is None else held

    def spoil(self, microbatch: int) -> None:
        """
        Drop a half-written copy of gradients after a failed dW; the contract marks the epoch as
        spoiled (it cannot commit).
        """
        self._copies.pop(microbatch, None)

    def total(self, order: Sequence[int]) -> dict[str, Tensor]:
        """
        Return the step's gradient of each unit, summed in the given order of microbatches.

        The order matters: a sum of eight terms in another order differs in most elements. If two
        units share a destination, the result contains only the unit that owns the destination, with
        the sum of both units.
        """
        names = list(self._own)
        if self.rule == "accumulate":
            return {name: self._buffers[0][name] for name in names}
        sets = self._copies if self.rule == "copied" else dict(enumerate(self._buffers))
        ordered = [[sets[microbatch][name] for name in names] for microbatch in order]
        self._sum(ordered)
        return dict(zip(names, ordered[0], strict=True))

    @property
    def one_pass_obstacle(self) -> str:
        """
        The reason why `total` adds buffers one by one; empty if `total` adds all buffers in one
        pass.
        """
        return self._sum.obstacle

    def zero(self) -> None:
        """Set all buffers to zero, as in a new arena."""
        for buffers in self._buffers:
            for tensor in buffers.values():
                tensor.zero_()

    def start_epoch(self) -> None:
        """Release the copies of gradients from the last epoch."""
        self._copies.clear()


def by_matrix(units: Iterable[WgradUnit], by_unit: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """
    Split the gradients of units by matrix name. A unit (a deferred matrix product) may compute the
    gradients of several matrices, such as query, key and value. Units without a gradient are left
    out.
    """
    found = [unit for unit in units if unit.name in by_unit]
    return {m.name: rows for unit in found for m, rows in unit.rows(by_unit[unit.name])}
