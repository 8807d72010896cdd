"""Joining the operands of several microbatches on a device: the bits of the joint product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.te import joining
from qeffect.gpu_runtime.backends.te.product import quantized, wgrad
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits

pytestmark = pytest.mark.gpu


def device() -> torch.device:
    """The current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device())


def operands(
    tokens: int, wide: int, high: int, count: int, factor: float = 1.0
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
        (
            quantized(a, "kFloat8E4M3", factor=factor),
            quantized(b, "kFloat8E5M2", factor=factor),
        )
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
        wgrad(joined, out, accumulate=accumulate)
        wgrad(whole, expected, accumulate=accumulate)
        assert same_bits(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.93])
@pytest.mark.parametrize(("tokens", "high", "wide"), [(256, 768, 512), (1024, 4096, 4096)])
def test_one_product_is_no_further_from_the_exact_sum(
    tokens: int, high: int, wide: int, factor: float, dtype: torch.dtype
) -> None:
    """
    Than one product per microbatch. In fp32 and with scales that are powers of two, both have the
    same bits; with other scales each of the products is rounded once more.
    """
    each, _ = operands(tokens, wide, high, 8, factor)
    many, one = (torch.zeros(high, wide, dtype=dtype, device=device()) for _ in range(2))
    for n, pair in enumerate(each):
        wgrad(pair, many, accumulate=n > 0)
    wgrad(joining.join(each), one, accumulate=False)

    exact = torch.zeros(high, wide, dtype=torch.float64, device=device())
    for x, gradient in each:
        left, right = (part.dequantize(dtype=torch.float32).double() for part in (gradient, x))
        exact += left.t() @ right
    apart = [float((found.double() - exact).norm()) for found in (one, many)]
    assert 0.0 < apart[0] <= apart[1] * 1.001
    assert same_bits(one, many) == (dtype == torch.float32 and factor == 1.0)
