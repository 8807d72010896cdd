"""Delayed scaling in the reference backend: the rules that the contract protects."""

from __future__ import annotations

import pytest
import torch

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage
from qeffect.gpu_runtime.backends.reference.scaling import E4M3, E5M2, ScalingState
from qeffect.gpu_runtime.step.memory.numerical_state import NumericalState, live_state, same_bits

from .helpers import TINY

CPU = torch.device("cpu")


def state_of(amaxes: list[list[float]], scale: list[float]) -> ScalingState:
    """A scaling state with given histories, newest first."""
    return ScalingState(torch.tensor(amaxes), torch.tensor(scale), E4M3)


def stage_in(domain: ReferenceDomain, index: int = 0) -> ReferenceStage:
    """A small warm stage."""
    stage = ReferenceStage(index, domain, TINY, seed=index)
    stage.warm()
    return stage


def an_input() -> torch.Tensor:
    """A leaf for F."""
    made = torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    return made.requires_grad_()


class TestRoll:
    def test_largest_of_window(self) -> None:
        """The next scale comes from the largest amax in the window, not the latest."""
        state = state_of([[2.0], [8.0], [4.0]], [1.0])

        state.roll(margin=0)

        assert [448.0 / 8.0] == state.scale.tolist()

    def test_a_roll_closes_the_open_row_and_drops_the_oldest(self) -> None:
        """The open row becomes the youngest closed one, the oldest leaves, the open one is zero."""
        state = state_of([[1.0], [2.0], [3.0], [4.0]], [1.0])

        state.roll(margin=0)

        assert [[0.0], [3.0], [4.0], [1.0]] == state.history.tolist()
        assert [[0.0], [4.0], [1.0], [0.0]] == rolled(state).history.tolist()

    def test_a_history_of_one_entry_forgets_at_every_roll(self) -> None:
        """A history of one entry forgets at every roll."""
        state = state_of([[5.0]], [1.0])

        state.roll(margin=0)

        assert [[0.0]] == state.history.tolist()
        assert [448.0 / 5.0] == pytest.approx(state.scale.tolist())

    def test_without_an_amax_the_old_scale_stays(self) -> None:
        """Without an amax the old scale stays."""
        state = state_of([[0.0]], [7.0])

        assert [7.0] == rolled(state).scale.tolist()

    @pytest.mark.parametrize("amax", [float("inf"), float("nan")])
    def test_an_overflow_keeps_the_old_scale(self, amax: float) -> None:
        """An overflow keeps the old scale instead of making it zero or NaN."""
        assert [7.0] == rolled(state_of([[amax]], [7.0])).scale.tolist()

    def test_a_scale_that_overflows_is_the_largest_float(self) -> None:
        """A scale that overflows is the largest float."""
        assert [torch.finfo(torch.float32).max] == rolled(
            state_of([[1e-38 / 448]], [7.0])
        ).scale.tolist()

    def test_a_margin_leaves_powers_of_two_free(self) -> None:
        """A margin leaves powers of two free."""
        state = state_of([[8.0]], [1.0])

        state.roll(margin=2)

        assert [448.0 / 8.0 / 4.0] == state.scale.tolist()


def rolled(state: ScalingState) -> ScalingState:
    """The state after one roll."""
    state.roll(margin=0)
    return state


class TestQuantize:
    def test_uses_scale_of_before(self) -> None:
        """A tensor is quantized with the scale that was there before its own amax."""
        state = ScalingState.empty(4, 1, E4M3, CPU)

        quantized = state.quantize(torch.tensor([100.0, -300.0]), 0)

        assert 1.0 == quantized.scale_inv.item()
        assert [96.0, -288.0] == quantized.data.float().tolist()
        assert 300.0 == state.history[0, 0].item()

    def test_what_does_not_fit_becomes_the_largest_value(self) -> None:
        """What the scale of before cannot hold becomes the largest value, not infinity."""
        state = ScalingState.empty(4, 1, E5M2, CPU)

        quantized = state.quantize(torch.tensor([1e6]), 0)

        assert [57344.0] == quantized.data.float().tolist()

    def test_keeps_the_larger(self) -> None:
        """Two tensors quantized in one interval leave the larger amax."""
        state = ScalingState.empty(4, 1, E4M3, CPU)
        state.quantize(torch.tensor([5.0]), 0)

        state.quantize(torch.tensor([3.0]), 0)

        assert 5.0 == state.history[0, 0].item()


class TestDomain:
    def test_every_forward_rolls_all(self) -> None:
        """F of one stage rolls the forward histories of every stage, and no backward one."""
        domain = ReferenceDomain(4)
        first, second = stage_in(domain, 0), stage_in(domain, 1)
        opened = second.numerical_state()["layers.0.forward.amax_history"][0].clone()
        assert opened.any()

        first.forward(first.new_tape(0), [an_input()])

        history = second.numerical_state()["layers.0.forward.amax_history"]
        assert not history[0].any()
        assert same_bits(history[-1], opened)
        assert not second.numerical_state()["layers.0.backward.amax_history"].any()

    def test_every_dgrad_rolls_all(self) -> None:
        """dI of one stage rolls the backward histories of every stage, and no forward one."""
        domain = ReferenceDomain(4)
        first, second = stage_in(domain, 0), stage_in(domain, 1)
        second.numerical_state()["layers.0.backward.amax_history"][0].fill_(2.0)
        tape = first.new_tape(0)
        (y,) = first.forward(tape, [an_input()])
        before = NumericalState.of(domain)

        first.dgrad(tape, [torch.ones_like(y)])

        history = second.numerical_state()["layers.0.backward.amax_history"]
        assert [2.0] * 4 == history[-1].tolist()
        assert all("backward" in name for name in NumericalState.of(domain).differences(before))

    def test_wgrad_rolls_nothing(self) -> None:
        """dW leaves every bit of numerical state alone."""
        domain = ReferenceDomain(4)
        stage = stage_in(domain)
        tape = stage.new_tape(0)
        (y,) = stage.forward(tape, [an_input()])
        stage.dgrad(tape, [torch.ones_like(y)])
        before = NumericalState.of(domain)

        stage.wgrad(tape, accumulate=False)

        assert [] == NumericalState.of(domain).differences(before)

    def test_raising_forward_rolls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The roll happens even if F raises, as the library's does: nothing undoes it."""
        domain = ReferenceDomain(4)
        stage = stage_in(domain)
        before = NumericalState.of(domain)
        monkeypatch.setattr(stage.layers[0].fc2, "forward", boom)

        with pytest.raises(RuntimeError, match="boom"):
            stage.forward(stage.new_tape(0), [an_input()])

        assert "stages.0.layers.0.forward.amax_history" in NumericalState.of(domain).differences(
            before
        )

    def test_a_frozen_domain_takes_no_new_stage(self) -> None:
        """A stage that appears after the domain is frozen is refused."""
        domain = ReferenceDomain(4)
        stage_in(domain)
        domain.freeze()

        with pytest.raises(BackendError, match="build every stage of the process before capture"):
            stage_in(domain, 1)

    def test_refresh_joins_open_interval(self) -> None:
        """A refresh records the weights' amax, so when it happens is part of the result."""
        domain = ReferenceDomain(4)
        stage = ReferenceStage(0, domain, TINY)

        stage.refresh_cache()

        opened = stage.numerical_state()["layers.0.forward.amax_history"][0]
        assert [False, True] * 4 == (opened > 0).tolist()


def boom(*_: object) -> None:
    raise RuntimeError("boom")


class TestNumericalState:
    def test_round_trip_into_fresh_object(self) -> None:
        """State saved from one domain fills a fresh one, bit for bit."""
        domain, fresh = ReferenceDomain(4), ReferenceDomain(4)
        stage, _ = stage_in(domain), stage_in(fresh)
        stage.forward(stage.new_tape(0), [an_input()])
        saved = NumericalState.of(domain)
        assert saved.differences(NumericalState.of(fresh))

        saved.into(fresh)

        assert [] == saved.differences(NumericalState.of(fresh))

    def test_other_recipe_refused(self) -> None:
        """State saved under another history length is refused before anything is written."""
        domain, other = ReferenceDomain(4), ReferenceDomain(16)
        stage_in(domain)
        stage_in(other)
        before = NumericalState.of(other)

        with pytest.raises(BackendError, match="restore under the recipe of the checkpoint"):
            NumericalState.of(domain).into(other)

        assert [] == NumericalState.of(other).differences(before)

    def test_other_stages_refused(self) -> None:
        """State of other stages is refused before anything is written."""
        domain, other = ReferenceDomain(4), ReferenceDomain(4)
        stage_in(domain)
        stage_in(other, 1)

        with pytest.raises(BackendError, match="build the same stages before restoring"):
            NumericalState.of(domain).into(other)

    def test_a_restore_keeps_addresses(self) -> None:
        """Restoring writes in place: captured graphs keep their addresses."""
        domain = ReferenceDomain(4)
        stage = stage_in(domain)
        before = dict(stage.addresses())

        NumericalState.of(domain).into(domain)

        assert before == dict(stage.addresses())
        assert live_state(domain).keys() == NumericalState.of(domain).tensors.keys()

    @pytest.mark.parametrize(
        ("a", "b", "same"),
        [
            (torch.tensor([0.0]), torch.tensor([-0.0]), False),
            (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
            (torch.tensor([1.0]), torch.tensor([1.0]).bfloat16(), False),
            (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        ],
    )
    def test_equality_is_of_raw_bits_type_and_shape(
        self, a: torch.Tensor, b: torch.Tensor, same: bool
    ) -> None:
        """Equality is of raw bits, type and shape; NaN equals itself and zero has a sign."""
        assert same is same_bits(a, b)
