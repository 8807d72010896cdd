"""
Operands of one weight-gradient product over the tokens of several microbatches.

With scales that move once a step, a matrix's deferred products have operands of the same scales,
and one product over all tokens replaces them. The library's FP8 product reads transposes of
`[features, tokens]`. So the joined operand is one matrix that holds the transposes side by side, in
the order of the microbatches. On a device one kernel writes this matrix; elsewhere `torch.cat`
does, with the same bytes.

This module does not import the library. It recognizes a quantized operand by the name of its
storage class, and builds the joined operand from the first operand's own metadata: the scale, the
FP8 type and the quantizer are those of the first microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..protocol import BackendError

__all__ = ["join", "pack", "prepare"]

STORAGE = "Float8TensorStorage"
"""The library's class of tensors with one scale: the class of each operand, or a base of it."""
_WORD = 8
_ALIGNED = 16

Launcher = Callable[[Sequence[Tensor], Tensor], None]
"""Arguments: matrices of int64 words, and the matrix that receives them side by side."""

# By device and tokens of a microbatch: the compiled kernel, or None with the reason.
_prepared: dict[tuple[torch.device, int], tuple[Launcher | None, str]] = {}


def join(operands: Sequence[Sequence[Any]]) -> list[Any]:
    """
    Make the operands of one product from the operands of several microbatches.

    Args:
        operands: The operands of each microbatch, in order. The library quantized all of one place
            with the same scale.

    Returns:
        The joined operands: the tokens of all microbatches, one microbatch behind the other.

    Raises:
        BackendError: Operands of one place have different kinds, FP8 types or features, or the
            library has quantized them in a way that this module does not know.
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
    """The library's storage class of a quantized operand; None for a plain tensor."""
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
        return _with(storage, parts[0], transpose=pack(transposes))
    made = _with(storage, parts[0], rows=torch.cat(rows))
    # As the library before each product: creates the transpose if its product reads one.
    made.update_usage(columnwise_usage=True)
    return made


def _with(
    storage: Any, like: Any, *, rows: Tensor | None = None, transpose: Tensor | None = None
) -> Any:
    """An operand with other bytes, and with the scale, type and quantizer of another operand."""
    return storage(**{**like.get_metadata(), "data": rows, "data_transpose": transpose})


def _is_transposed(operand: Any) -> bool:
    return operand._transpose is not None and not operand._transpose_invalid


def _rows(operand: Any) -> Tensor | None:
    """An operand's bytes by row, `[tokens, features]`; None if the library has dropped them."""
    data: Tensor | None = operand._data
    return None if data is None else data.reshape(-1, data.shape[-1])


def _transpose(storage: Any, operand: Any) -> Tensor:
    """
    An operand's transpose, `[features, tokens]`.

    A missing transpose is made in a copy: the operand stays on its tape, where memory of one
    graph's capture must not be read by another graph.
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
            "the operands of one dW have transposes in some microbatches only, and the library "
            "makes none on this device; run F and dI of all grouped microbatches in one way"
        )
    transpose: Tensor = operand._transpose
    return transpose.reshape(transpose.shape[0], -1)


def pack(blocks: Sequence[Tensor]) -> Tensor:
    """
    Write matrices side by side into a new one, by the kernel if it was prepared and suits.

    Args:
        blocks: Matrices of bytes with as many rows each.

    Raises:
        BackendError: The matrices have different numbers of rows.
    """
    if len({block.shape[0] for block in blocks}) != 1:
        raise BackendError(
            f"the operands of one dW have {[block.shape[0] for block in blocks]} features; "
            "expected the operands of one matrix"
        )
    height, width = blocks[0].shape
    launch = _launcher(blocks[0].device, width) if suits(blocks) else None
    if launch is None:
        return torch.cat(list(blocks), dim=1)
    out = torch.empty((height, width * len(blocks)), dtype=blocks[0].dtype, device=blocks[0].device)
    launch([block.view(torch.int64) for block in blocks], out.view(torch.int64))
    return out


def suits(blocks: Sequence[Tensor]) -> bool:
    """Whether the kernel can write these: bytes of a device, one shape, contiguous, aligned."""
    first = blocks[0]
    return (
        first.device.type == "cuda"
        and first.numel() > 0
        and first.shape[1] % _WORD == 0
        and all(
            block.dtype == torch.uint8
            and block.device == first.device
            and block.shape == first.shape
            and block.is_contiguous()
            and block.data_ptr() % _ALIGNED == 0
            for block in blocks
        )
    )


def prepare(device: torch.device, tokens: int) -> str:
    """
    Compile the kernel now, so that no captured graph has to; check it on a small matrix.

    Args:
        device: Device of the operands.
        tokens: Tokens of a microbatch.

    Returns:
        Why `pack` will use `torch.cat`, in one line; empty if it will use the kernel.
    """
    if device.type != "cuda" or tokens % _WORD:
        return f"{tokens} tokens on {device}"
    key = (device, tokens)
    if key not in _prepared:
        try:
            _prepared[key] = (_compiled(device, tokens), "")
        except Exception as error:  # a compiler can fail in any way; torch.cat gives the same bytes
            _prepared[key] = (None, f"{type(error).__name__}: {error}".splitlines()[0])
    return _prepared[key][1]


def _compiled(device: torch.device, tokens: int) -> Launcher:
    """The kernel, after a comparison of its bytes with those of `torch.cat`."""
    from .packing_kernel import launch

    drawn = torch.Generator().manual_seed(0)
    shape = (2, 16, tokens)
    blocks = list(torch.randint(0, 256, shape, generator=drawn, dtype=torch.uint8).to(device))
    out = torch.empty((16, 2 * tokens), dtype=torch.uint8, device=device)
    launch([block.view(torch.int64) for block in blocks], out.view(torch.int64))
    if not torch.equal(out, torch.cat(blocks, dim=1)):
        raise RuntimeError("the kernel writes other bytes than torch.cat")
    return launch


def _launcher(device: torch.device, tokens: int) -> Launcher | None:
    """The compiled kernel; None during a capture for which nobody has prepared it."""
    if (device, tokens) not in _prepared and torch.cuda.is_current_stream_capturing():
        return None
    prepare(device, tokens)
    return _prepared[device, tokens][0]
