"""
A language model as stages: how the model is cut, the names of its parameters, and the gradient of
its embedding rows.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from qeffect.gpu_runtime.backends.ends import Ends, TokenEmbedding, cross_entropy
from qeffect.gpu_runtime.backends.protocol import BackendError, matrices, parameters
from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits
from qeffect.gpu_runtime.training.language_model import (
    LanguageJob,
    balanced_cut,
    decays,
    even_cut,
    name_of,
)

from .helpers import TINY, language, noise

CPU = torch.device("cpu")


def test_an_unknown_head_is_refused() -> None:
    """By name, with the heads that there are; it is not taken for the library's."""
    with pytest.raises(
        ValueError, match="expected head to be one of te, torchao, bf16, found 'unknown'"
    ):
        LanguageJob(schedule="il", pp=2, head="unknown")


class TestCut:
    @pytest.mark.parametrize(("layers", "stages"), [(1, 1), (4, 4), (7, 3), (32, 8)])
    def test_even(self, layers: int, stages: int) -> None:
        """Every layer is in one stage, and no stage has two more than another."""
        cut = even_cut(layers, stages)

        assert layers == sum(cut)
        assert stages == len(cut)
        assert max(cut) - min(cut) <= 1

    @pytest.mark.parametrize("seed", range(12))
    def test_balanced_against_every_cut(self, seed: int) -> None:
        """No other cut has a cheaper costliest stage, nor of those one that is more even."""
        g = torch.Generator().manual_seed(seed)
        layers, stages = 4 + seed % 5, 2 + seed % 3
        costs = [round(float(c), 2) for c in torch.rand(layers, generator=g) + 0.1]
        embedding, head = 0.3 * (seed % 2), 0.7 * (seed % 4)

        def priced(cut: tuple[int, ...]) -> tuple[float, float]:
            ends = list(itertools.accumulate(cut))
            prices = [sum(costs[stop - n : stop]) for n, stop in zip(cut, ends, strict=True)]
            prices[0] += embedding
            prices[-1] += head
            return max(prices), sum(p * p for p in prices)

        every = [
            cut
            for cut in itertools.product(range(1, layers + 1), repeat=stages)
            if sum(cut) == layers
        ]
        best = min(map(priced, every))

        found = priced(balanced_cut(costs, stages, embedding=embedding, head=head))

        assert found == pytest.approx(best)

    def test_a_head_that_costs_takes_layers_from_the_last_stage(self) -> None:
        """The head counts: with it the last stage has the fewest layers."""
        assert (2, 2, 2, 2) == balanced_cut([1.0] * 8, 4)
        assert 1 == balanced_cut([1.0] * 8, 4, head=2.0)[-1]

    def test_too_many_stages(self) -> None:
        """A stage without a layer is refused, in words."""
        with pytest.raises(ValueError, match="2 layers cannot be cut into 3 stages"):
            even_cut(2, 3)
        with pytest.raises(ValueError, match="2 layers cannot be cut into 3 stages"):
            balanced_cut([1.0, 1.0], 3)


class TestNames:
    def test_the_same_under_every_cut(self, tmp_path: Path) -> None:
        """Names and initial bits of the whole model do not depend on how it is cut."""
        path = noise(tmp_path)
        whole: list[dict[str, torch.Tensor]] = []
        for cut in ((2, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 1)):
            job = language(path, schedule="zbv", pp=2, cut=cut)
            stages = job.stages(range(4), CPU, "reference")
            found = {
                job.name_of(stage.index, name): parameter
                for stage in stages
                for name, parameter in parameters(stage).items()
            }
            assert len(found) == sum(len(parameters(stage)) for stage in stages)
            whole.append(found)

        assert {"embedding.weight", "embedding.position", "layers.4.fc2.weight"} < whole[0].keys()
        assert {"head.weight", "head.norm.weight", "head.norm.bias"} < whole[0].keys()
        for other in whole[1:]:
            assert whole[0].keys() == other.keys()
            assert all(same_bits(whole[0][name], other[name]) for name in other)

    def test_of_numerical_state(self) -> None:
        """Histories have the name of their layer in the model; what has no layer keeps its own."""
        named = name_of((2, 3))

        assert "layers.4.forward.scale" == named(1, "layers.2.forward.scale")
        assert "head.forward.scale" == named(1, "head.forward.scale")

    def test_what_decays(self, tmp_path: Path) -> None:
        """Weight decay is for the matrices of the products alone."""
        job = language(noise(tmp_path), schedule="zbv", pp=2)
        stages = job.stages(range(4), CPU, "reference")
        decayed = {
            (stage.index, name)
            for stage in stages
            for name, parameter in parameters(stage).items()
            if decays(name, parameter)
        }

        assert decayed == {(stage.index, m.name) for stage in stages for m in matrices(stage)}


class TestEmbedding:
    def test_gradient_is_the_sum_in_fp32(self) -> None:
        """Rows that one token has in many places are added in fp32 and rounded once."""
        embedding = TokenEmbedding(TINY, 64, CPU, seed=1)
        tokens = torch.randint(0, 8, (16, 3), generator=torch.Generator().manual_seed(0))
        out = embedding(tokens)
        wanted = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        found = torch.autograd.grad(out, list(embedding.parameters()), wanted)

        whole = embedding.weight.detach().float().requires_grad_()
        (expected,) = torch.autograd.grad(
            functional.embedding(tokens, whole), whole, wanted.float()
        )
        assert same_bits(found[0], expected.bfloat16())
        assert same_bits(found[1], wanted.sum(1))
        assert not found[0][8:].any()

    def test_only_the_first_stage_takes_tokens(self) -> None:
        """Nobody could give an embedding in the middle its input."""
        with pytest.raises(ValueError, match="an embedding takes tokens"):
            ReferenceStage(
                1, ReferenceDomain(4), TINY, ends=Ends(vocabulary=64, embedding=True), first=False
            )

    def test_a_vocabulary_that_fp8_cannot_multiply(self) -> None:
        """The head's rows are a multiple of 16."""
        with pytest.raises(ValueError, match="vocabulary is 100; FP8 products need"):
            Ends(vocabulary=100)


def test_shares_of_the_loss_add_up_to_the_mean() -> None:
    """Microbatches and replicas together have the loss of all their tokens at once."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 16, 2, 64, generator=g)
    targets = torch.randint(0, 64, (4, 16, 2), generator=g)

    shares = [cross_entropy(x, y, 4) for x, y in zip(logits, targets, strict=True)]

    whole = functional.cross_entropy(logits.reshape(-1, 64), targets.reshape(-1))
    assert float(sum(shares)) == pytest.approx(float(whole), rel=1e-6)


def test_a_job_without_data_says_so(tmp_path: Path) -> None:
    """What a test may leave out, a run may not."""
    job = language(noise(tmp_path), schedule="zbv", pp=2, loader=None)

    with pytest.raises(BackendError, match="has no data"):
        job.batch(CPU)
