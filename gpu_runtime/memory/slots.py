"""
The physical side of a stage's slots: static buffers, retained tapes, and what F and dI left.

A table owns its slots' input and output-gradient buffers, so that a receive can fill them in place
before F or dI, and keeps outputs and input gradients alive until the slot is used again, so that a
send can read them. It never decides anything: which slot may be touched is the kernel's answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.protocol import BackendError, StageBackend, Tape, TensorSpec


@attrs.define(eq=False)
class Slot:
    """
    One slot.

    Args:
        index: Its index in the process's pool, as the kernel counts.
        tape: What it retains between F and dW.
        inputs: Static buffers that F reads.
        output_gradients: Static buffers that dI reads.
        outputs: What its last F returned.
        input_gradients: What its last dI returned.
        non_matrix: Its last dI's non-matrix gradients, already added to the stage's sums.
        weight_gradients: What its last dW left in the library's memory, under `copied`.
    """

    index: int
    tape: Tape
    inputs: tuple[Tensor, ...]
    output_gradients: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] = ()
    input_gradients: tuple[Tensor, ...] = ()
    non_matrix: tuple[Tensor, ...] = ()
    weight_gradients: Mapping[str, Tensor] = attrs.field(factory=dict)
    # Aliases without autograd: filling a buffer is not part of any graph.
    input_views: tuple[Tensor, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.input_views = tuple(buffer.detach() for buffer in self.inputs)

    def forget(self) -> None:
        """Drop what the last tenant left, buffers excepted."""
        self.outputs = ()
        self.input_gradients = ()
        self.non_matrix = ()
        self.weight_gradients = {}


@attrs.define(eq=False)
class SlotTable:
    """
    The slots of one stage.

    Args:
        stage: The stage.
        first_index: Index of its first slot in the process's pool.
        num_slots: How many it has.
    """

    stage: StageBackend
    first_index: int
    num_slots: int
    gradient_specs: tuple[TensorSpec, ...] = attrs.field(init=False)
    _slots: list[Slot] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.gradient_specs = tuple(s for s in self.stage.outputs if s.differentiable)
        self._slots = [
            Slot(
                self.first_index + local,
                self.stage.new_tape(self.first_index + local),
                tuple(spec.buffer() for spec in self.stage.inputs),
                tuple(
                    torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
                    for spec in self.gradient_specs
                ),
            )
            for local in range(self.num_slots)
        ]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __getitem__(self, index: int) -> Slot:
        """The slot with an index of the process's pool."""
        return self._slots[index - self.first_index]

    def rebuild(self) -> None:
        """Give every slot an empty tape with fresh stores: a failed dI may have half filled one."""
        for slot in self._slots:
            slot.forget()
            slot.tape.clear()
            slot.tape = self.stage.new_tape(slot.index)

    @property
    def num_bytes(self) -> int:
        """Memory of the static buffers."""
        return sum(
            buffer.numel() * buffer.element_size()
            for slot in self._slots
            for buffer in (*slot.inputs, *slot.output_gradients)
        )


def check_values(
    values: Sequence[Tensor], specs: Sequence[TensorSpec], what: str, stage: int
) -> None:
    """
    Compare tensors that a caller passes with what a stage takes.

    Raises:
        BackendError: Their number, or the shape, dtype or device of one differs.
    """
    if len(values) != len(specs):
        raise BackendError(
            f"stage {stage} takes {len(specs)} {what}, found {len(values)}; pass them all"
        )
    for n, (value, spec) in enumerate(zip(values, specs, strict=True)):
        if problem := spec.mismatch(value):
            raise BackendError(f"stage {stage}, {what} {n}: {problem}")


def fill(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """
    Copy values into static buffers, several of them at once where the device can.

    A value that is its buffer was filled in place already.
    """
    into: list[Tensor] = []
    out_of: list[Tensor] = []
    for buffer, value in zip(buffers, values, strict=True):
        if value.data_ptr() != buffer.data_ptr():
            into.append(buffer)
            # A copy from a tensor with a graph would make the buffer part of it.
            out_of.append(value.detach() if value.requires_grad else value)
    if len(into) == 1:
        into[0].copy_(out_of[0])
    elif into:
        torch._foreach_copy_(into, out_of)
