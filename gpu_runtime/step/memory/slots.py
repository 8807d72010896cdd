"""
The memory of a stage's slots. A slot is the memory of one microbatch in progress: static buffers,
the tape (the data that F keeps for dI and dW), and the results of F and dI.

A slot table owns the input buffers and output-gradient buffers of its slots, so a receive can fill
them in place before F or dI. The table keeps outputs and input gradients until the slot is used
again, so a send can read them. The contract decides which slot may be touched; the table decides
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import attrs
import torch
from torch import Tensor

from qeffect.text import shown

from ...backends.protocol import BackendError, StageBackend, Tape, TensorSpec

_form = attrgetter("shape", "dtype", "device")
"""Attributes in which a tensor must equal its specification."""


@attrs.define(eq=False)
class Boundary:
    """
    The tensors that enter a stage, and the check of tensors that a caller passes.

    Args:
        stage: The stage's index.
        what: Name of these tensors in error messages.
        specs: Specification of each tensor.
    """

    stage: int
    what: str
    specs: tuple[TensorSpec, ...]
    _forms: list[tuple[Any, ...]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._forms = [*map(_form, self.specs)]

    def check(self, values: Sequence[Tensor]) -> None:
        """
        Compare tensors that a caller passes with the stage's specifications.

        Raises:
            BackendError: A value is not a tensor; or the number of tensors, or a tensor's shape,
                dtype or device differs.
        """
        try:
            forms = self._forms
            if len(values) == 1 == len(forms):
                # Most stages take one tensor; making a list of it costs more than the comparison.
                value, (shape, dtype, device) = values[0], forms[0]
                if value.shape == shape and value.dtype is dtype and value.device == device:
                    return
            # One comparison in C; only if it fails, find the difference.
            elif [*map(_form, values)] == forms:
                return
            if len(values) != len(self.specs):
                raise BackendError(
                    f"stage {self.stage} takes {len(self.specs)} {self.what}, found {len(values)}; "
                    "pass all of them"
                )
            for n, (value, spec) in enumerate(zip(values, self.specs, strict=True)):
                if problem := spec.mismatch(value):
                    raise BackendError(f"stage {self.stage}, {self.what} {n}: {problem}")
        except (AttributeError, LookupError, TypeError):
            raise BackendError(
                f"stage {self.stage}: expected a sequence of tensors as {self.what}, found "
                f"{shown(values)}"
            ) from None


@attrs.define(eq=False)
class Slot:
    """
    The memory of one microbatch in progress at one stage.

    Args:
        index: The slot's index in the process's pool of slots; the contract uses the same index.
        tape: The data that F keeps for dI and dW.
        inputs: Static buffers that F reads.
        output_gradients: Static buffers that dI reads.
        outputs: Outputs of the slot's last F.
        dgrads: Input gradients of the slot's last dI.
        non_matrix: Non-matrix gradients of the slot's last dI, already added to the stage's sums.
        wgrads: Gradients of the slot's last dW in the library's memory, under the rule `copied`.
    """

    index: int
    tape: Tape
    inputs: tuple[Tensor, ...]
    output_gradients: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] = ()
    dgrads: tuple[Tensor, ...] = ()
    non_matrix: tuple[Tensor, ...] = ()
    wgrads: Mapping[str, Tensor] = attrs.field(factory=dict)
    # Aliases without autograd: filling a buffer must not be part of an autograd graph.
    input_views: tuple[Tensor, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.input_views = tuple(buffer.detach() for buffer in self.inputs)

    def forget(self) -> None:
        """Drop the results of the slot's last microbatch. The buffers remain."""
        self.outputs = ()
        self.dgrads = ()
        self.non_matrix = ()
        self.wgrads = {}


@attrs.define(eq=False)
class SlotTable:
    """
    The slots of one stage; a slot is the buffers and results of one microbatch in progress.

    Args:
        stage: The backend's stage that the slots belong to.
        first_index: Index of the stage's first slot in the process's pool of slots.
        num_slots: Number of slots.
    """

    stage: StageBackend
    first_index: int
    num_slots: int
    inputs: Boundary = attrs.field(init=False)
    output_gradients: Boundary = attrs.field(init=False)
    _slots: list[Slot] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        index, wanted = self.stage.index, tuple(s for s in self.stage.outputs if s.differentiable)
        self.inputs = Boundary(index, "inputs", tuple(self.stage.inputs))
        self.output_gradients = Boundary(index, "output gradients", wanted)
        self._slots = [
            Slot(
                self.first_index + local,
                self.stage.new_tape(self.first_index + local),
                tuple(spec.buffer() for spec in self.stage.inputs),
                tuple(
                    torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device) for spec in wanted
                ),
            )
            for local in range(self.num_slots)
        ]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __getitem__(self, index: int) -> Slot:
        """Return the slot that has this index in the process's pool."""
        return self._slots[index - self.first_index]

    def rebuild(self) -> None:
        """
        Give every slot an empty tape (the data that F leaves for dI and dW) with new queues of
        deferred work. A failed dI may have filled a queue only partly.
        """
        for slot in self._slots:
            slot.forget()
            slot.tape.clear()
            slot.tape = self.stage.new_tape(slot.index)

    @property
    def num_bytes(self) -> int:
        """Bytes of the static buffers."""
        return sum(
            buffer.numel() * buffer.element_size()
            for slot in self._slots
            for buffer in (*slot.inputs, *slot.output_gradients)
        )


def fill(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """
    Copy values into static buffers, with one operation for all if the device supports it.

    A value that is the buffer itself needs no copy.
    """
    if len(values) == 1:
        value, buffer = values[0], buffers[0]
        if value.data_ptr() != buffer.data_ptr():
            buffer.copy_(value.detach() if value.requires_grad else value)
        return
    into: list[Tensor] = []
    out_of: list[Tensor] = []
    for buffer, value in zip(buffers, values, strict=True):
        if value.data_ptr() != buffer.data_ptr():
            into.append(buffer)
            # A copy from a tensor with an autograd graph would add the buffer to that graph.
            out_of.append(value.detach() if value.requires_grad else value)
    if into:
        torch._foreach_copy_(into, out_of)
