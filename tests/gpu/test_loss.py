"""
The ends of a language model on a GPU: torch's numbers for the cross entropy and the embedding, and
the same bits in a graph.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qeffect.gpu_runtime.backends.ends import LossShare, TokenEmbedding, mean_cross_entropy
from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.te.domain import library

pytestmark = pytest.mark.gpu

TOKENS, PARTS = 96, 8


def drawn(vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of a sequence of one text, and the tokens that follow."""
    g = torch.Generator("cuda").manual_seed(vocabulary)
    logits = torch.randn(TOKENS, 1, vocabulary, generator=g, device="cuda") * 3
    targets = torch.randint(vocabulary, (TOKENS, 1), generator=g, device="cuda")
    return logits.to(dtype).requires_grad_(), targets


def result(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A microbatch's share and its gradient."""
    share = LossShare(mean_cross_entropy, PARTS)(logits, targets)
    (gradient,) = torch.autograd.grad(share, logits)
    return share, gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocabulary", [64, 32_768, 50_304, 128_256])
def test_loss_and_gradient_are_torchs(vocabulary: int, dtype: torch.dtype) -> None:
    """
    As near to an fp64 result as torch's own; logits stay, and the same call has the same bits.
    """
    logits, targets = drawn(vocabulary, dtype)
    before = logits.detach().clone()
    share, gradient = result(logits, targets)

    exact = before.double().requires_grad_()
    wanted = functional.cross_entropy(exact.flatten(0, 1), targets.flatten()) / PARTS
    (slope,) = torch.autograd.grad(wanted, exact)
    assert share.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(share.double(), wanted, rtol=1e-5, atol=0)
    apart = (gradient.double() - slope).norm() / slope.norm()
    assert apart < (4e-3 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(logits.detach(), before)
    again = result(logits, targets)
    assert torch.equal(share, again[0])
    assert torch.equal(gradient, again[1])


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_librarys_own_backward_has_the_same_bits(overwrite: bool) -> None:
    """Also with a factor that is no power of two, and where the backward overwrites the logits."""
    logits, targets = drawn(50_304, torch.bfloat16)
    te = library().te
    graphs = {} if library().version.startswith("2.20") else {"is_cg_capturable": True}
    own = te.parallel_cross_entropy(
        logits.view(1, TOKENS, -1), targets.view(1, -1), reduce_loss=True, **graphs
    )
    (wanted,) = torch.autograd.grad(own.reshape(()) / 3, logits)
    own = own.detach().reshape(()).clone()

    copied = logits.clone()
    found = mean_cross_entropy(copied, targets, overwrite=overwrite)
    (gradient,) = torch.autograd.grad(found / 3, copied)
    assert torch.equal(found.detach(), own)
    assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kinds", [3, 4096])
def test_the_embeddings_gradient_is_summed_in_fp32(kinds: int, dtype: torch.dtype) -> None:
    """The bits of a dense sum in fp32 that is rounded once, also in a graph."""
    config = LayerConfig(256, 512, 2, 1024, dtype=dtype, positions="rotary")
    embedding = TokenEmbedding(config, 4096, torch.device("cuda"), seed=1)
    g = torch.Generator("cuda").manual_seed(0)
    tokens = torch.randint(kinds, (1024, 1), generator=g, device="cuda")
    slope = torch.randn(1024, 1, 256, generator=g, device="cuda").to(dtype)

    def run() -> Tensor:
        (found,) = torch.autograd.grad(embedding(tokens), embedding.weight, slope)
        return found

    wanted = torch.zeros(4096, 256, device="cuda")
    rows = slope.reshape(-1, 256).float()
    torch.ops.aten._index_put_impl_(wanted, [tokens.reshape(-1)], rows, True, True)
    assert torch.equal(run(), wanted.to(dtype))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = run()
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, wanted.to(dtype))


def test_a_left_out_position_has_no_gradient() -> None:
    """The mean is over the others, as torch's."""
    logits, targets = drawn(32_768, torch.bfloat16)
    targets[5] = targets[90] = -100
    share, gradient = result(logits, targets)
    wanted = functional.cross_entropy(logits.detach().flatten(0, 1).float(), targets.flatten())
    torch.testing.assert_close(share * PARTS, wanted, rtol=1e-5, atol=0)
    assert not gradient[[5, 90]].any()
    assert gradient[4].any()


def test_replays_have_the_bits_of_eager_calls() -> None:
    """F as one graph and dI as another, replayed over other logits."""
    logits, targets = drawn(50_304, torch.bfloat16)
    others, other_targets = drawn(50_304, torch.bfloat16)
    others = (others.detach() * 0.5).requires_grad_()
    wanted = result(others, other_targets)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result(logits, targets)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, stream=stream):
            share = LossShare(mean_cross_entropy, PARTS)(logits, targets)
        with torch.cuda.graph(backward, stream=stream, pool=forward.pool()):
            (gradient,) = torch.autograd.grad(share, logits)
        with torch.no_grad():
            logits.copy_(others)
            targets.copy_(other_targets)
        for _ in range(2):
            forward.replay()
            backward.replay()
    torch.cuda.synchronize()
    assert torch.equal(share, wanted[0])
    assert torch.equal(gradient, wanted[1])
