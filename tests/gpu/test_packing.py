"""Operands of several microbatches as one on a device: the kernel's bytes, the product's bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.te import packing
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits

pytestmark = pytest.mark.gpu

SCALES = {"kFloat8E4M3": 64.0, "kFloat8E5M2": 4096.0}


def device() -> torch.device:
    """The current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device())


def bytes_of(count: int, height: int, width: int) -> list[Tensor]:
    """Matrices of random bytes."""
    drawn = torch.Generator(device()).manual_seed(height + width)
    shape = (height, width)
    return [
        torch.randint(0, 256, shape, generator=drawn, dtype=torch.uint8, device=device())
        for _ in range(count)
    ]


@pytest.mark.parametrize("height", [64, 208, 4096])
@pytest.mark.parametrize("width", [8, 48, 256, 1024, 4096])
def test_the_kernel_writes_the_bytes_of_cat(width: int, height: int) -> None:
    """For groups that need one launch, and for groups that need several; sources are left alone."""
    assert packing.prepare(device(), width) == ""
    for count in (2, 4, 8, 9, 17):
        blocks = bytes_of(count, height, width)
        before = [block.clone() for block in blocks]
        assert packing.suits(blocks)

        assert torch.equal(packing.pack(blocks), torch.cat(blocks, dim=1))
        assert all(map(torch.equal, blocks, before))


def test_other_memory_is_left_to_cat() -> None:
    """Widths that are no words, addresses off 16 bytes, strided rows: the same bytes."""
    whole = bytes_of(2, 64, 264)
    for blocks in (
        bytes_of(3, 64, 20),
        [block[:, 8:] for block in whole],
        [block.view(-1)[8 : 8 + 64 * 256].view(64, 256) for block in whole],
    ):
        assert not packing.suits(blocks)
        assert torch.equal(packing.pack(blocks), torch.cat(blocks, dim=1))


def test_a_replay_packs_again() -> None:
    """A captured launch reads the same addresses at each replay."""
    assert packing.prepare(device(), 256) == ""
    blocks = bytes_of(4, 512, 256)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        packed = packing.pack(blocks)
    for block in blocks:
        block.bitwise_not_()
    graph.replay()
    assert torch.equal(packed, torch.cat(blocks, dim=1))


def test_a_capture_compiles_nothing() -> None:
    """Without a preparation a capture uses `torch.cat`."""
    tokens = 1136  # of no other test
    blocks = bytes_of(2, 64, tokens)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        packed = packing.pack(blocks)
    assert (device(), tokens) not in packing._prepared
    graph.replay()
    assert torch.equal(packed, torch.cat(blocks, dim=1))


def quantized(tensor: Tensor, kind: str) -> Any:
    """A tensor in FP8 under a fixed scale, as rows and as the transpose."""
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

    joined = packing.join(each)

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

    one = product(packing.join(each), torch.zeros_like(many), accumulate=False)

    assert ((one - many).norm() / many.norm()).item() < 1e-3
