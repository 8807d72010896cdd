"""`megatron.guard(compare_caches=n)`: caches of FP8 weights are compared with the weights."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qeffect.guards import megatron
from qeffect.guards.megatron_cache_values import TOLERANCE, CacheValues, _Comparison
from qeffect.refusals import Refused
from tests.docs.blocks import load
from tests.gpu import guard_caches
from tests.megatron.model import QuantizedLinear, Workspace
from tests.megatron.stand_in import StandIn
from tests.megatron.test_guard import steps

QUANTIZED = {"quantized": True}


def keeps_its_cache(monkeypatch: pytest.MonkeyPatch, run: StandIn, after: int) -> None:
    """From a step on, a forward clears its flag but leaves the workspace of an earlier step."""
    quantize = QuantizedLinear.quantize

    def pretends(self: QuantizedLinear) -> None:
        if run.number < after:
            quantize(self)

    monkeypatch.setattr(QuantizedLinear, "quantize", pretends)


def saves_between(monkeypatch: pytest.MonkeyPatch, run: StandIn, numbers: set[int]) -> None:
    """In steps with these numbers, save a checkpoint between the loop and the update."""
    loop = run.loop

    def saves(**given: Any) -> Any:
        found = loop(**given)
        if run.number in numbers:
            run.save("between")
        return found

    monkeypatch.setattr(run, "loop", saves)


def with_idle_module(run: StandIn) -> None:
    """Add a module that never runs: its cache is not of its weight, which changed since."""
    idle = QuantizedLinear()
    idle.quantize()
    with torch.no_grad():
        idle.weight.mul_(2)
    run.model[0].module.idle = idle


class TestGuard:
    """The whole guard, over the stand-in for Megatron-core."""

    def test_flags_alone_do_not_show_it(
        self, made: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = StandIn(made, QUANTIZED, 0)
        keeps_its_cache(monkeypatch, run, 1)
        guarded = megatron.guard(manner="refuse")
        steps(run)

        assert guarded.values.compared == 0

    @pytest.mark.parametrize("rank", [0, 1])
    def test_the_values_show_it_before_the_update(
        self, rank: int, made: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = StandIn(made, QUANTIZED, rank)
        keeps_its_cache(monkeypatch, run, 1)
        megatron.guard(manner="refuse", compare_caches=1)
        run.step()
        with pytest.raises(Refused) as refused:
            run.step()

        assert refused.value.clause == "version.stale-cache"
        assert "1 of 1 caches" in str(refused.value.found)
        assert "before update 1: " in str(refused.value.found)
        assert "decoder.layers.0.linear.weight, the first" in str(refused.value.found)

    def test_a_report_names_the_step(
        self, made: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = StandIn(made, QUANTIZED, 0)
        keeps_its_cache(monkeypatch, run, 2)
        guarded = megatron.guard(compare_caches=1)
        steps(run, 4)

        assert [(v.clause, v.step) for v in guarded.violations] == [("version.stale-cache", 2)]

    def test_only_every_nth_update_is_compared(
        self, made: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = StandIn(made, QUANTIZED, 0)
        keeps_its_cache(monkeypatch, run, 1)
        guarded = megatron.guard(compare_caches=3)
        steps(run, 2)
        assert guarded.violations == ()
        steps(run, 1)

        assert [v.step for v in guarded.violations] == [2]

    @pytest.mark.parametrize("case", [QUANTIZED, {"chunks": 2, "quantized": True}])
    def test_a_legal_run_is_accepted_and_keeps_its_bits(
        self, case: dict[str, Any], made: dict[str, ModuleType]
    ) -> None:
        plain = steps(StandIn(made, case, 0))
        run = StandIn(made, case, 0)
        guarded = megatron.guard(manner="refuse", compare_caches=1)

        assert steps(run) == plain
        assert guarded.values.compared == len(plain) * case.get("chunks", 1)

    def test_a_module_that_does_not_run_is_left_out(self, made: dict[str, ModuleType]) -> None:
        """Its cache stays that of its last run, while the update goes on changing its weight."""
        run = StandIn(made, QUANTIZED, 0)
        with_idle_module(run)
        guarded = megatron.guard(manner="refuse", compare_caches=1)
        run.step()

        assert guarded.values.compared == 1

    def test_a_second_optimizer_finds_the_weights_of_the_first(
        self, made: dict[str, ModuleType]
    ) -> None:
        """Only the update that follows the loop is compared."""
        run = StandIn(made, QUANTIZED, 0)
        weights, biases = [], []
        for chunk in run.model:
            for name, parameter in chunk.named_parameters():
                (biases if name.endswith("bias") else weights).append(parameter)
        guarded = megatron.guard(compare_caches=1)
        for _ in range(2):
            run.zero()
            run.loop()
            for parameter in (*weights, *biases):
                parameter.grad = parameter.main_grad
            torch.optim.SGD(weights, lr=0.1).step()
            torch.optim.SGD(biases, lr=0.1).step()

        assert guarded.values.compared == 2
        assert "version.stale-cache" not in [v.clause for v in guarded.violations]

    def test_a_replayed_step_is_compared(
        self, made: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The stand-in's replays compute nothing, so the caches stay those of the first step."""
        run = StandIn(made, QUANTIZED, 0)
        guarded = megatron.guard(compare_caches=1)
        run.replay_loops()
        monkeypatch.setattr(run, "zero", lambda: None)  # the gradients of the first step stay
        steps(run, 2)

        assert [v.clause for v in guarded.violations] == ["version.stale-cache"]

    def test_a_replay_after_another_violation_is_compared(
        self, made: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A violation in the last loop ends what is judged of it, not what is compared later."""
        run = StandIn(made, QUANTIZED, 0)
        guarded = megatron.guard(compare_caches=1)
        guarded._updates.ever = True
        run.replay_loops()
        saves_between(monkeypatch, run, {0})
        monkeypatch.setattr(run, "zero", lambda: None)
        steps(run, 3)

        found = {v.clause: v.found for v in guarded.violations}
        assert list(found) == ["persistence.mid-epoch", "version.stale-cache"]
        assert "before update 1: " in found["version.stale-cache"]

    def test_a_run_that_goes_on_without_fp8_is_accepted(
        self, made: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The library then leaves the caches as they are."""
        run = StandIn(made, QUANTIZED, 0)
        forward = QuantizedLinear.forward

        def plain(self: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
            if run.config.fp8 is not None:
                return forward(self, x)
            return torch.nn.functional.linear(x, self.weight, self.bias)

        monkeypatch.setattr(QuantizedLinear, "forward", plain)
        guarded = megatron.guard(manner="refuse", compare_caches=1)
        steps(run, 2)
        run.config.fp8 = None
        steps(run, 2)

        assert guarded.values.compared == 2

    def test_an_idle_module_beside_a_graph_is_left_out(self, made: dict[str, ModuleType]) -> None:
        run = StandIn(made, QUANTIZED, 0)
        with_idle_module(run)
        run.model[0].module.decoder.layers[0].cuda_graphs = [object()]
        guarded = megatron.guard(manner="refuse", compare_caches=1)
        run.step()

        assert guarded.values.compared == 1

    def test_a_graphed_layer_is_compared_whatever_its_flags(
        self, made: dict[str, ModuleType]
    ) -> None:
        """A replay clears no flag."""
        run = StandIn(made, QUANTIZED, 0)
        layer = run.model[0].module.decoder.layers[0]
        layer.cuda_graphs = [object()]
        guarded = megatron.guard(compare_caches=1)
        run.zero()
        run.loop()
        with torch.no_grad():
            layer.linear._fp8_workspaces["weight"]._data.add_(1)
        layer.linear.is_first_microbatch = True
        run.update()

        assert [v.clause for v in guarded.violations] == ["version.stale-cache"]

    def test_the_loops_of_two_models_before_their_updates(
        self, made: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = (StandIn(made, {"quantized": True, "stages": 1}, 0) for _ in range(2))
        stale = first.model[0].module.decoder.layers[0].linear
        quantize = QuantizedLinear.quantize

        def pretends(self: QuantizedLinear) -> None:
            if self is not stale or first.number == 0:
                quantize(self)

        monkeypatch.setattr(QuantizedLinear, "quantize", pretends)
        guarded = megatron.guard(compare_caches=1)
        for first.number in range(3):
            for act in ("zero", "loop", "update"):
                for run in (first, second):
                    getattr(run, act)()

        assert guarded.values.compared >= 4
        assert "version.stale-cache" in [v.clause for v in guarded.violations]

    def test_every_update_is_counted(
        self, made: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also those of steps in which another violation was found."""
        run = StandIn(made, QUANTIZED, 0)
        keeps_its_cache(monkeypatch, run, 3)
        guarded = megatron.guard(compare_caches=1)
        saves_between(monkeypatch, run, {1, 2})
        steps(run, 5)

        found = {v.clause: (v.step, v.found) for v in guarded.violations}
        step, text = found["version.stale-cache"]
        assert step == 3
        assert "before update 3: " in text

    def test_without_the_option_nothing_is_kept(
        self, made: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(CacheValues, "update", lambda *_: pytest.fail("compared"))
        guarded = megatron.guard()
        steps(StandIn(made, QUANTIZED, 0))

        assert (guarded._quantized, guarded.values.updates) == ({}, 0)

    @pytest.mark.parametrize("bad", [-1, True, "1", 1.0])
    def test_a_bad_number_is_refused(self, bad: Any, made: dict[str, ModuleType]) -> None:
        with pytest.raises(ValueError, match="compare_caches must be an integer of at least 0"):
            megatron.guard(compare_caches=bad)


def module_of(weight: torch.Tensor, **changes: Any) -> SimpleNamespace:
    """A module whose cache is of its weight, with changed attributes of the cache."""
    cache = Workspace(weight)
    vars(cache).update(changes)
    return SimpleNamespace(weight=weight, _fp8_workspaces={"weight": cache})


class TestValues:
    """The comparison alone."""

    @given(st.integers(0, 2**31), st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]))
    def test_a_cache_of_its_weight_is_accepted(self, seed: int, dtype: torch.dtype) -> None:
        weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
        module = module_of(weight.bfloat16())
        module._fp8_workspaces["weight"] = Workspace(module.weight, dtype)
        values = CacheValues(1, waits=True)
        values.update([("layer", module)])

        assert values.compared == 1

    @given(st.integers(0, 2**31), st.floats(1.0, 2.0, exclude_max=True, width=32))
    def test_the_last_place_of_the_scale_is_not_known(self, seed: int, scale: float) -> None:
        """The cache has only the rounded reciprocal; bf16 weights lie at ties of many scales."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(256, 64, generator=generator).mul(0.02).bfloat16()
        exact = torch.tensor(4096 * scale)
        data = (weight.float() * exact).clamp(-448, 448).to(torch.float8_e4m3fn)
        module = module_of(weight, _scale_inv=exact.reciprocal(), _data=data.view(torch.uint8))
        values = CacheValues(1, waits=True)
        values.update([("layer", module)])

        assert values.compared == 1

    def test_a_scale_one_unit_off_is_accepted(self) -> None:
        """A scale at which the unit decides how 5% of the elements round."""
        weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
        weight = weight.mul(0.02).bfloat16()
        exact = torch.tensor(448.0) / 0.095703125
        near = torch.nextafter(exact, torch.tensor(0.0))
        rows = [
            (weight.float() * each).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            for each in (exact, near)
        ]
        assert (rows[0] != rows[1]).float().mean() > 0.01
        for data in rows:
            module = module_of(weight, _scale_inv=exact.reciprocal(), _data=data)
            CacheValues(1, waits=True).update([("layer", module)])

    @given(st.integers(0, 2**31))
    def test_a_small_update_of_the_weight_is_seen(self, seed: int) -> None:
        """A thousandth of the weights' size, as a step of AdamW leaves."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(256, 256, generator=generator)
        module = module_of(weight)
        weight += 1e-3 * torch.randn(256, 256, generator=generator)
        values = CacheValues(1, waits=True)
        with pytest.raises(Refused, match=r"version\.stale-cache"):
            values.update([("layer", module)])

    def test_one_element_in_ten_thousand_may_differ(self) -> None:
        weight = torch.randn(100, 100, generator=torch.Generator().manual_seed(0))
        module = module_of(weight)
        data = module._fp8_workspaces["weight"]._data.view(-1)
        data[0] ^= 1
        CacheValues(1, waits=True).update([("layer", module)])
        data[1] ^= 1
        with pytest.raises(Refused, match=r"0\.02% of the elements of layer\.weight"):
            CacheValues(1, waits=True).update([("layer", module)])
        assert TOLERANCE == 1 / weight.numel()

    def test_a_result_is_read_once_the_device_has_it(self) -> None:
        """Or at the end, which waits."""
        said: list[str] = []
        event = SimpleNamespace(query=lambda: False, synchronize=lambda: said.append("waited"))
        values = CacheValues(2, waits=False)
        values._begun = _Comparison(["layer.weight"], torch.tensor([0.5]), event, 1)
        values.updates = 1
        values.update([])
        assert (values.compared, said) == (0, [])
        with pytest.raises(Refused, match=r"50\.00% of the elements of layer\.weight"):
            values.finish()
        assert (values.compared, said) == (1, ["waited"])
        values.finish()

    def test_codes_of_nan_are_equal(self) -> None:
        weight = torch.full((4, 4), -torch.nan)
        module = module_of(weight, _data=torch.full((4, 4), 0x7F, dtype=torch.uint8))
        module._fp8_workspaces["weight"]._scale_inv = torch.ones(1)
        values = CacheValues(1, waits=True)
        values.update([("layer", module)])

        assert values.compared == 1

    def test_nothing_is_compared_in_a_capture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The optimizer's step may be captured; its graph must not hold the comparison."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        values = CacheValues(1, waits=True)
        values.update([("layer", module_of(torch.ones(4, 4)))])
        assert values.compared == 0
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        values.update([("layer", module_of(torch.ones(4, 4)))])

        assert values.compared == 1

    @pytest.mark.parametrize(
        "changes",
        [{"_data": None}, {"_scale_inv": torch.ones(8)}, {"_scale_inv": None}],
        ids=["no rows", "scales of blocks", "no scale"],
    )
    def test_another_format_is_not_compared(self, changes: dict[str, Any]) -> None:
        values = CacheValues(1, waits=True)
        values.update([("layer", module_of(torch.ones(4, 4), **changes))])

        assert values.compared == 0


def test_the_kept_report() -> None:
    """It has every run of `tests.gpu.guard_caches`, and everything was found."""
    report = load(guard_caches.KEPT)
    assert list(report["runs"]) == [" ".join(run) for run in guard_caches.RUNS]
    assert report["found"] == guard_caches.found(report["runs"])
    assert all(report["found"].values())
