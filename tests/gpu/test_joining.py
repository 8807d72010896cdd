"""Operands of several microbatches as one on a device: the bits of their product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.te import joining
from qeffect.gpu_runtime.backends.te.domain import library
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits

pytestmark = pytest.mark.gpu

SCALES = {"kFloat8E4M3": 64.0, "kFloat8E5M2": 4096.0}


def device() -> torch.device:
    """The current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device())


def quantized(tensor: Tensor, kind: str) -> Any:
    """A tensor in FP8 under a fixed scale, as rows and as the transpose."""
    library()  # the extension module can be imported only after the library
    import transformer_engine_torch as tex  # type: ignore[import-not-found,unused-ignore]
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    scale = torch.full((1,), SCALES[kind], device=device())
    amax = torch.zeros(1, device=device())
    quantizer = Float8Quantizer(scale=scale, amax=amax, fp8_dtype=getattr(tex.DType, kind))
    quantizer.set_usage(rowwise=True, columnwise=True)
    return quantizer(tensor)


def product(operands: Sequence[Any], out: Tensor, *, accumulate: bool) -> Tensor:
    """The library's dW, from the input and the output gradient."""
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


def operands(
    tokens: int, wide: int, high: int, count: int
) -> tuple[list[tuple[Any, Any]], tuple[Any, Any]]:
    """The operands of each microbatch, and of all tokens quantized at once."""
    drawn = torch.Generator(device()).manual_seed(tokens)

    def normal(width: int, factor: float) -> list[Tensor]:
        return [
            (torch.randn(tokens, width, generator=drawn, device=device()) * factor).bfloat16()
            for _ in range(count)
        ]

    x, dy = normal(wide, 1.0), normal(high, 0.01)
    each = [
        (quantized(a, "kFloat8E4M3"), quantized(b, "kFloat8E5M2"))
        for a, b in zip(x, dy, strict=True)
    ]
    whole = quantized(torch.cat(x), "kFloat8E4M3"), quantized(torch.cat(dy), "kFloat8E5M2")
    return each, whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("held", ["both", "transposes", "rows", "mixed"])
@pytest.mark.parametrize("tokens", [48, 256, 1024])
def test_the_joined_product_is_that_of_all_tokens(
    tokens: int, held: str, dtype: torch.dtype
) -> None:
    """Operands and bits, whichever of its two forms each microbatch's operand still has."""
    each, whole = operands(tokens, 512, 768, 4)
    for n, pair in enumerate(each):
        for operand in pair:
            if held == "transposes" or (held == "mixed" and n % 2):
                operand.update_usage(rowwise_usage=False, columnwise_usage=True)
            elif held != "both":
                operand.update_usage(rowwise_usage=True, columnwise_usage=False)

    joined = joining.join(each)

    for made, wanted in zip(joined, whole, strict=True):
        if wanted._transpose is not None:
            assert torch.equal(made._transpose, wanted._transpose)
            assert not made._transpose_invalid
    out = torch.ones(768, 512, dtype=dtype, device=device())
    expected = out.clone()
    for accumulate in (False, True):
        product(joined, out, accumulate=accumulate)
        product(whole, expected, accumulate=accumulate)
        assert same_bits(out, expected)


@pytest.mark.parametrize("tokens", [256, 1024])
def test_one_product_is_near_the_sum_of_many(tokens: int) -> None:
    """In fp32 both add the same products of FP8 values, in another order."""
    each, _ = operands(tokens, 512, 768, 4)
    many = torch.zeros(768, 512, device=device())
    for n, pair in enumerate(each):
        product(pair, many, accumulate=n > 0)

    one = product(joining.join(each), torch.zeros_like(many), accumulate=False)

    assert ((one - many).norm() / many.norm()).item() < 1e-3
