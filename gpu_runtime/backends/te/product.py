"""
Transformer Engine's weight-gradient product for operands with fixed scales, for tests and reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .domain import library

__all__ = ["quantized", "quantized_operands", "wgrad"]

_SCALES = {"kFloat8E4M3": 64.0, "kFloat8E5M2": 4096.0}


def quantized(value: Tensor, kind: str, *, factor: float = 1.0) -> Any:
    """
    Quantize a tensor and its transpose with a fixed scale.

    Args:
        value: The tensor, on a CUDA device.
        kind: The library's name of the FP8 type: ``kFloat8E4M3`` or ``kFloat8E5M2``.
        factor: The scale is a fixed power of two times this factor. With factor 1, multiplying a
            product by its scales is exact.
    """
    library()  # the extension module can be imported only after the library
    import transformer_engine_torch as tex  # type: ignore[import-not-found,unused-ignore]
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    quantizer = Float8Quantizer(
        scale=torch.full((1,), _SCALES[kind] * factor, device=value.device),
        amax=torch.zeros(1, device=value.device),
        fp8_dtype=getattr(tex.DType, kind),
    )
    quantizer.set_usage(rowwise=True, columnwise=True)
    return quantizer(value)


def quantized_operands(tokens: int, rows: int, width: int, *, seed: int) -> tuple[Any, Any]:
    """
    Draw and quantize a random input and output gradient of one microbatch.

    Args:
        tokens: Number of rows of the input and of the output gradient.
        rows: Number of columns of the output gradient, which is the number of rows of the weight.
        width: Number of columns of the input and of the weight.
        seed: Seed of the values.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    drawn = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, width, generator=drawn, device=device)
    gradient = torch.randn(tokens, rows, generator=drawn, device=device) * 0.01
    return quantized(x.bfloat16(), "kFloat8E4M3"), quantized(gradient.bfloat16(), "kFloat8E5M2")


def wgrad(operands: Sequence[Any], out: Tensor, *, accumulate: bool) -> Tensor:
    """
    Compute a weight gradient with the library's matrix product, as the library's layers do in the
    backward.

    Args:
        operands: The input and the output gradient, quantized.
        out: The tensor to write the gradient into, `[rows, width]`.
        accumulate: Whether to add to `out` instead of overwriting it.
    """
    library()
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    general_gemm(
        *operands,
        out_dtype=out.dtype,
        layout="NT",
        out=out,
        accumulate=accumulate,
        use_split_accumulator=True,
        grad=True,
    )
    return out
