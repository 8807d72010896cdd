"""The reference stage: parameters, deferred work, destinations, first and last stages."""

from __future__ import annotations

import attrs
import pytest
import torch

from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.protocol import (
    BackendError,
    StageBackend,
    StateDomain,
    TensorSpec,
    matrices,
)
from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage
from qeffect.gpu_runtime.step.memory.arena import Arena, by_matrix
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits

from .helpers import TINY
from .test_scaling import an_input

SPLIT = LayerConfig(hidden=32, ffn=64, heads=2, sequence=16, fused_qkv=False)


def stage_of(config: LayerConfig = TINY, **options: object) -> ReferenceStage:
    """A warm stage in a domain of its own."""
    stage = ReferenceStage(0, ReferenceDomain(4), config, **options)  # type: ignore[arg-type]
    stage.warm()
    return stage


def gradients(stage: ReferenceStage, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output, input gradient and every parameter gradient of one microbatch, split."""
    tape = stage.new_tape(0)
    (y,) = stage.forward(tape, [x])
    result = stage.dgrad(tape, [dy])
    weights = by_matrix(stage.units, stage.wgrad(tape, accumulate=False).by_unit)
    return y, *result.inputs, *result.non_matrix, *weights.values()


class TestParameters:
    @pytest.mark.parametrize(("config", "total", "num_matrices"), [(TINY, 12, 4), (SPLIT, 16, 6)])
    def test_parameters_and_matrices_are_counted_for_each_layout(
        self, config: LayerConfig, total: int, num_matrices: int
    ) -> None:
        """Fused QKV has 12 parameters, 4 of them matrices; split QKV 16 and 6. Units are 4."""
        stage = stage_of(config)

        assert total == len(list(stage.parameters()))
        assert num_matrices == len(matrices(stage))
        assert total - num_matrices == len(stage.non_matrix)
        assert 4 == len(stage.units)

    def test_the_reference_implements_both_protocols(self) -> None:
        """The reference implements both protocols."""
        stage = stage_of()

        assert isinstance(stage, StageBackend)
        assert isinstance(stage.domain, StateDomain)

    def test_fused_and_split_agree(self) -> None:
        """Splitting QKV renames parameters and changes no bit of what is computed."""
        x, dy = an_input(), torch.randn(16, 1, 32).bfloat16()
        fused, split = stage_of(TINY), stage_of(SPLIT)

        a, b = gradients(fused, x, dy), gradients(split, x, dy)

        assert same_bits(a[0], b[0])
        assert same_bits(a[1], b[1])
        qkv = torch.cat([g for g in b if g.shape == (32, 32)][:3])
        assert same_bits(next(g for g in a if g.shape == (96, 32)), qkv)


class TestDeferredWork:
    def test_dgrad_queues_every_unit(self) -> None:
        """dI leaves one piece of work for every unit, dW covers every matrix once and empties."""
        stage = stage_of(SPLIT)
        tape = stage.new_tape(0)
        (y,) = stage.forward(tape, [an_input()])
        assert () == tape.queued

        result = stage.dgrad(tape, [torch.ones_like(y)])
        assert tuple(u.name for u in stage.units) == result.queued == tape.queued
        covered = stage.wgrad(tape, accumulate=False).covered

        assert sorted(m.name for m in matrices(stage)) == sorted(covered)
        assert () == tape.queued

    def test_dgrad_without_forward(self) -> None:
        """dI on a tape that no F filled is an error, not a wrong gradient."""
        stage = stage_of()

        with pytest.raises(BackendError, match="holds no outputs of a forward"):
            stage.dgrad(stage.new_tape(0), [torch.ones(16, 1, 32).bfloat16()])

    def test_tapes_are_apart(self) -> None:
        """Two live tapes keep their own work, whatever the order of their dI and dW."""
        stage = stage_of()
        xs = [torch.randn(16, 1, 32).bfloat16().requires_grad_() for _ in range(2)]
        alone = [gradients(stage_of(), x, torch.ones_like(x)) for x in xs]
        tapes = [stage.new_tape(0), stage.new_tape(1)]
        # Each F sees the scale of before, so only the first two actions are comparable bit for bit.
        stage.forward(tapes[0], [xs[0]])
        stage.forward(tapes[1], [xs[1]])
        for tape in reversed(tapes):
            stage.dgrad(tape, [torch.ones_like(xs[0])])

        first = stage.wgrad(tapes[0], accumulate=False)
        second = stage.wgrad(tapes[1], accumulate=False)

        assert not same_bits(first.by_unit["layers.0.fc2"], second.by_unit["layers.0.fc2"])
        assert alone[0][0].shape == alone[1][0].shape


class TestDestinations:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_overwrite_then_accumulate(self, dtype: torch.dtype) -> None:
        """The first dW overwrites whatever was there; the second adds to it, rounding once."""
        stage = stage_of(SPLIT)
        arena = Arena.for_stage(stage, "accumulate", 2, dtype)
        bound = arena.destinations(0)
        assert bound is not None
        for buffer in bound.values():
            buffer.fill_(float("nan"))
        fresh = []
        for accumulate in (False, True):
            tape = stage.new_tape(0)
            (y,) = stage.forward(tape, [an_input()])
            stage.bind(tape, bound)
            stage.dgrad(tape, [torch.ones_like(y)])
            exact = {w.unit.name: w.compute(*w.operands) for w in tape.work}
            fresh.append(exact)
            stage.wgrad(tape, accumulate=accumulate)

        for name, buffer in bound.items():
            expected = (fresh[0][name].to(dtype) + fresh[1][name]).to(dtype)
            assert same_bits(expected, buffer)


class TestEnds:
    def test_first_stage_has_no_dgrad(self) -> None:
        """A first stage returns no input gradient, and the same parameter gradients."""
        x, dy = an_input(), torch.randn(16, 1, 32).bfloat16()
        first, middle = stage_of(first=True), stage_of()

        without = gradients(first, x.detach(), dy)
        with_dx = gradients(middle, x, dy)

        assert len(with_dx) == len(without) + 1
        assert all(same_bits(a, b) for a, b in zip(without[1:], with_dx[2:], strict=True))

    def test_last_stage_has_a_loss(self) -> None:
        """A last stage maps hidden states and targets to a loss, and differentiates through it."""
        target = TensorSpec((16, 1, 32), torch.bfloat16, torch.device("cpu"), False)
        stage = stage_of(
            loss=lambda y, t: torch.nn.functional.mse_loss(y.float(), t.float()),
            extra_inputs=(target,),
        )
        tape = stage.new_tape(0)
        (loss,) = stage.forward(tape, [an_input(), torch.zeros(16, 1, 32).bfloat16()])

        result = stage.dgrad(tape, [torch.ones(())])

        assert () == tuple(loss.shape)
        assert 1 == len(result.inputs)
        assert (16, 1, 32) == tuple(result.inputs[0].shape)


class TestCache:
    def test_current_until_weights_move(self) -> None:
        """The cache is current until a parameter changes in place, and again after a refresh."""
        stage = stage_of()
        assert stage.cache_is_current()

        with torch.no_grad():
            matrices(stage)[1].parameter.add_(1.0)
        assert not stage.cache_is_current()
        stage.refresh_cache()

        assert stage.cache_is_current()

    def test_refresh_in_place(self) -> None:
        """A refresh keeps every address: graphs have baked them in."""
        stage = stage_of()
        before = dict(stage.addresses())

        stage.refresh_cache()

        assert before == dict(stage.addresses())

    def test_forward_reads_the_cache(self) -> None:
        """F multiplies by the cache, not the weight: a stale one goes unnoticed without a guard."""
        stale, same = stage_of(), stage_of()
        with torch.no_grad():
            matrices(stale)[3].parameter.zero_()

        a = stale.forward(stale.new_tape(0), [an_input()])
        b = same.forward(same.new_tape(0), [an_input()])

        assert same_bits(a[0], b[0])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"heads": 3}, "not a multiple of heads 3"),
        ({"hidden": 24, "heads": 2}, "hidden is 24; FP8 products need a multiple of 16"),
        ({"sequence": 15}, "sequence . batch is 15"),
    ],
)
def test_impossible_dimensions_are_refused_in_one_line(wrong: dict[str, int], says: str) -> None:
    """Dimensions that FP8 or the heads cannot take are refused in one line."""
    with pytest.raises(ValueError, match=says):
        attrs.evolve(TINY, **wrong)  # type: ignore[arg-type]
