"""
Take Transformer Engine's deferred weight gradients out of its queues, and run them into a
destination.

The library queues closures over the operands of each product in a `WeightGradStore`, a FIFO queue
without key or owner. The library's `backward_dw` pops the entries of the module's current store,
overwrites `.grad` and loses the gradients of split QKV. In this backend, each slot (fixed buffers
for one microbatch at a time) has its own stores. The end of dI takes every entry out of the slot's
stores and matches the entry with its unit (`WgradUnit`: one product for one or more matrices).
Later, dW runs the entry into the bound destination, alone or joined with entries of the same unit
in other slots (`joining`).
From dI to dW an entry keeps only what its product reads: on GPUs whose FP8 products read
transposes, the rows of an output gradient are freed once dI has used them (`tape_store`).
This module does not import the library: it only needs a queue with `empty` and `get`, and closures
over a dictionary of GEMM arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from ..protocol import BackendError, DeferredWork, WgradUnit
from . import joining

GEMM_ARGUMENTS = "wgrad_gemm_kwargs"
"""Suffix of the closure variable that holds a deferred product's arguments."""

_REBOUND = ("out", "out_dtype", "accumulate")


@cache
def tape_store(library_store: Any) -> Any:
    """
    Return a subclass of the library's store. If an operand also has a transpose, the subclass drops
    the operand itself (its rows) and keeps the transpose.

    The library puts an entry into the store after the entry's own dI, and only the product of dW
    reads the operands from then on. On GPUs whose FP8 products read transposes, dW reads the
    transposes alone; on other GPUs operands have no transposes.

    Args:
        library_store: The class `WeightGradStore`.
    """

    class TapeStore(library_store):  # type: ignore[misc]
        def put(self, operands: Sequence[Any], compute: Callable[..., Any]) -> None:
            for operand in operands:
                transpose = getattr(operand, "_transpose", None)
                if transpose is not None and not operand._transpose_invalid:
                    operand.update_usage(rowwise_usage=False)
            super().put(operands, compute)

    return TapeStore


def take(store: Any, units: Sequence[WgradUnit]) -> list[DeferredWork]:
    """
    Empty one store, and return its entries as the deferred work of the given units.

    Args:
        store: A `WeightGradStore` of one slot.
        units: The units whose work one dI queues in the store, in queue order.

    Raises:
        BackendError: The store held more or fewer entries than units; the store is now empty.
    """
    entries = []
    while not store.context.empty():
        entries.append(store.context.get())
    if len(entries) != len(units):
        raise BackendError(
            f"dI queued {len(entries)} deferred products for {[u.name for u in units]}, expected "
            f"{len(units)}: delayed weight gradients are off in that module, or a store is shared"
        )
    return [
        DeferredWork(unit, operands, compute, joining.join)
        for unit, (operands, compute) in zip(units, entries, strict=True)
    ]


def gemm_arguments(compute: Callable[..., Any]) -> MutableMapping[str, Any]:
    """
    Return the argument dictionary that a deferred product's closure reads when it runs.

    Raises:
        BackendError: The closure has no such dictionary, or the dictionary lacks an argument for
            the gradient's destination: this version of the library is built differently.
    """
    names = compute.__code__.co_freevars
    for name, cell in zip(names, compute.__closure__ or (), strict=True):
        if name.endswith(GEMM_ARGUMENTS):
            arguments: MutableMapping[str, Any] = cell.cell_contents
            if absent := [key for key in _REBOUND if key not in arguments]:
                raise BackendError(
                    f"deferred product {compute.__qualname__} has no argument {absent} in its "
                    f"*{GEMM_ARGUMENTS}; use a tested version of the library"
                )
            return arguments
    raise BackendError(
        f"deferred product {compute.__qualname__} closes over the variables {list(names)}; "
        f"expected a variable named *{GEMM_ARGUMENTS}; use a tested version of the library"
    )


def run(work: DeferredWork, destination: Tensor | None, *, accumulate: bool) -> Tensor:
    """
    Run one deferred product.

    Args:
        work: The product.
        destination: Where the product writes the gradient; None for fresh memory.
        accumulate: Add to the destination instead of overwriting it.

    Returns:
        The destination, or the fresh gradient.

    Raises:
        BackendError: The product did not write its destination.
    """
    if destination is not None:
        arguments = gemm_arguments(work.compute)
        arguments["out"] = destination
        arguments["out_dtype"] = destination.dtype
        arguments["accumulate"] = accumulate
    gradient: Tensor = work.compute(*work.operands)[0]
    if destination is None:
        return gradient
    if gradient is not None and gradient.data_ptr() != destination.data_ptr():
        raise BackendError(f"{work.unit.name}: the product did not write its destination")
    return destination


def check_bound(units: Sequence[WgradUnit], bound: Mapping[str, Tensor]) -> None:
    """
    Check that every unit has a contiguous destination of its shape.

    Raises:
        BackendError: A unit has no destination, or its destination has another shape or is not
            contiguous.
    """
    for unit in units:
        tensor = bound.get(unit.name)
        if tensor is None:
            raise BackendError(f"{unit.name} has no destination; bind all units before dI")
        if tuple(tensor.shape) != unit.shape or not tensor.is_contiguous():
            raise BackendError(
                f"{unit.name}: expected a contiguous destination of shape {unit.shape}, found "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )
