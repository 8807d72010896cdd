"""
Join the operands of several microbatches, so that one matrix product computes the sum of their
weight gradients.

If scales are updated once per step, the operands of all deferred products of a matrix have the same
scales. Therefore one product over all tokens can replace these products. The library's FP8 product
reads transposed operands, of shape `[features, tokens]`. Therefore a joined operand is one matrix
that contains the transposes side by side, in the order of the microbatches.

This module does not import the library. It recognizes a quantized operand by the name of its
storage class, and takes the joined operand's metadata (scale, FP8 type and quantizer) from the
first microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..protocol import BackendError

__all__ = ["join"]

STORAGE = "Float8TensorStorage"
"""Name of the library's class of tensors with one scale: the class of each operand, or its base
class.
"""


def join(operands: Sequence[Sequence[Any]]) -> list[Any]:
    """
    Make the operands of one product from the operands of several microbatches.

    Args:
        operands: One list of operands per microbatch, in order. Operands at the same position of
            these lists have the same scale.

    Returns:
        The joined operands: the tokens of all microbatches, one microbatch after the other.

    Raises:
        BackendError: Operands at one position have different kinds, FP8 types or numbers of
            features, or the library has quantized them in a way that this module does not know.
    """
    return [_joined(parts) for parts in zip(*operands, strict=True)]


def _joined(parts: Sequence[Any]) -> Any:
    storages = {_storage_of(part) for part in parts}
    if len(storages) != 1:
        raise BackendError(
            "the operands of one dW are partly quantized: found "
            f"{sorted({type(part).__name__ for part in parts})}; run F and dI of all grouped "
            "microbatches under one recipe"
        )
    (storage,) = storages
    if storage is not None:
        return _joined_quantized(storage, parts)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _storage_of(operand: Any) -> Any:
    """Return the library's storage class of a quantized operand; None for a plain tensor."""
    for base in type(operand).__mro__:
        if base.__name__ == STORAGE:
            return base
    if type(operand) in (Tensor, torch.nn.Parameter):
        return None
    raise BackendError(
        f"cannot join operands of type {type(operand).__name__}: expected {STORAGE} or a plain "
        "tensor; group dW only under delayed scaling with a tested version of the library"
    )


def _joined_quantized(storage: Any, parts: Sequence[Any]) -> Any:
    found = {str(part.get_metadata()["fp8_dtype"]) for part in parts}
    if len(found) != 1:
        raise BackendError(
            f"the operands of one dW have FP8 types {sorted(found)}; expected one type: run F and "
            "dI of all grouped microbatches under one recipe"
        )
    rows = [row for part in parts if (row := _rows(part)) is not None]
    if len(rows) < len(parts) or all(map(_is_transposed, parts)):
        transposes = [_transpose(storage, part) for part in parts]
        return _with(storage, parts[0], transpose=_side_by_side(transposes))
    made = _with(storage, parts[0], rows=torch.cat(rows))
    # As the library before each product: creates the transpose if its product reads one.
    made.update_usage(columnwise_usage=True)
    return made


def _with(
    storage: Any, like: Any, *, rows: Tensor | None = None, transpose: Tensor | None = None
) -> Any:
    """Make an operand from new bytes, with the scale, type and quantizer of the operand `like`."""
    return storage(**{**like.get_metadata(), "data": rows, "data_transpose": transpose})


def _is_transposed(operand: Any) -> bool:
    return operand._transpose is not None and not operand._transpose_invalid


def _rows(operand: Any) -> Tensor | None:
    """
    Return an operand's bytes by row, `[tokens, features]`; None if the library has dropped these
    bytes.
    """
    data: Tensor | None = operand._data
    return None if data is None else data.reshape(-1, data.shape[-1])


def _transpose(storage: Any, operand: Any) -> Tensor:
    """
    Return an operand's transpose, `[features, tokens]`.

    A missing transpose is made in a copy of the operand. The operand itself stays on its tape,
    where another graph must not read memory of this graph's capture.
    """
    if not _is_transposed(operand):
        rows = _rows(operand)
        if rows is None:
            raise BackendError(
                "an operand of dW has neither rows nor a valid transpose: the library has freed "
                "it; run dW once, before its slot is used again"
            )
        operand = _with(storage, operand, rows=rows)
        operand.update_usage(columnwise_usage=True)
    if not _is_transposed(operand):
        raise BackendError(
            "the operands of one dW have transposes in some microbatches only, and on this device "
            "the library makes no transposes; run F and dI of all grouped microbatches in the same "
            "way"
        )
    transpose: Tensor = operand._transpose
    return transpose.reshape(transpose.shape[0], -1)


def _side_by_side(blocks: Sequence[Tensor]) -> Tensor:
    """Write matrices of bytes with the same number of rows side by side into a new matrix."""
    if len({block.shape[0] for block in blocks}) != 1:
        raise BackendError(
            f"the operands of one dW have {[block.shape[0] for block in blocks]} features; "
            "expected the operands of one matrix"
        )
    # On an H200 `torch.cat` moves as many bytes a second as a kernel written for this.
    return torch.cat(list(blocks), dim=1)
