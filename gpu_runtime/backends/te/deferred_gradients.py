"""
Take Transformer Engine's deferred weight-gradient products out of the library's queues, and run
them into a destination.

The library puts closures over the operands of each product into a `WeightGradStore`. This FIFO
queue does not know which microbatch an entry belongs to. The library's `backward_dw` takes the
entries out of the module's current store, overwrites `.grad` and loses the gradients of split QKV.
In this backend, each slot (fixed buffers for one microbatch at a time) has its own stores. At the
end of dI, every entry is taken out of the slot's stores and matched with its unit (`WgradUnit`: one
product for one or more matrices). Later, dW runs the entry into the bound destination, alone or
joined with entries of the same unit in other slots (`joining`). From dI to dW an entry keeps only
the operands that its product reads. On GPUs whose FP8 products read transposes, the rows of an
output gradient are freed once dI has used them (`tape_store`). This module does not import the
library. It only needs a queue with `empty` and `get`, and closures over a dictionary of GEMM
arguments.
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
    Return a subclass of the library's store. If an operand has a transpose, the subclass drops the
    operand's rows and keeps only the transpose.

    The library puts an entry into the store when dI has used the operands; after that only dW reads
    them. On GPUs whose FP8 products read transposes, dW reads only the transposes. On other GPUs
    operands have no transposes.

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
        store: A `WeightGradStore` that belongs to one slot.
        units: The units whose work one dI puts into the store, in this order.

    Raises:
        BackendError: The store had more or fewer entries than units. The store is now empty.
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
        BackendError: This version of the library works differently: the closure has no such
            dictionary, or the dictionary lacks an argument for the gradient's destination.
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
        destination: Tensor to which the product writes the gradient; None for new memory.
        accumulate: Whether to add to the destination instead of overwriting it.

    Returns:
        The destination, or the gradient in new memory.

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
