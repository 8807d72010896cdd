"""
The Transformer Engine backend against a stand-in for the library (`fake_te`), on a CPU.

What the stand-in can show: the order in which stores, destinations and state are touched, and every
refusal. What it cannot: the real library's numerics, which `qeffect runtime compare`
checks on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.protocol import BackendError, StageBackend, StateDomain, matrices
from qeffect.gpu_runtime.backends.te import domain as te
from qeffect.gpu_runtime.backends.te.domain import TransformerEngineDomain, version_problem
from qeffect.gpu_runtime.backends.te.stage import TransformerEngineStage
from qeffect.gpu_runtime.evidence.comparison import Recording, compare
from qeffect.gpu_runtime.evidence.driver import GuardedRun
from qeffect.gpu_runtime.evidence.native import NativeRun, rule_for
from qeffect.gpu_runtime.memory.arena import Rule
from qeffect.gpu_runtime.memory.state import preserving
from qeffect.gpu_runtime.optimizer import Optimizer
from qeffect.gpu_runtime.plan.workload import Order, Workload
from qeffect.gpu_runtime.runtime import Runtime, RuntimeConfig

from . import fake_te
from .orders import table_order

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
FUSED = LayerConfig(hidden=32, ffn=64, heads=2, sequence=16)
SPLIT = LayerConfig(hidden=32, ffn=64, heads=2, sequence=16, fused_qkv=False)
ORDER = table_order("ScheduleZBVZeroBubble", 1)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the stand-in where the library would be."""
    install(monkeypatch)
    yield
    te.library.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, version: str = fake_te.VERSION) -> None:
    """Install the stand-in as some version, with no module registered."""
    for name, module in fake_te.modules(version).items():
        monkeypatch.setitem(sys.modules, name, module)
    fake_te.FP8GlobalStateManager.reset()
    te.library.cache_clear()


def stages_of(
    config: LayerConfig, order: Order = ORDER, *, history: int = 4, **options: Any
) -> list[StageBackend]:
    """Fresh stages in a fresh process-wide domain."""
    te.reset_process()
    domain = TransformerEngineDomain("delayed", history, CPU)
    return [TransformerEngineStage(n, domain, config, seed=n, **options) for n in order.stages]


def optimizer_of(stages: list[StageBackend], dtype: torch.dtype) -> Optimizer:
    """AdamW with masters for fp32 destinations."""
    return Optimizer(stages, master_dtype=None if dtype == BF16 else dtype)


def native_run(config: LayerConfig, rule: Rule, dtype: torch.dtype, steps: int) -> Recording:
    """The library's full backward, from warm modules in fresh state."""
    same_sum = rule_for(ORDER, rule, dtype)
    stages = stages_of(config, fuse_wgrad_accumulation=same_sum == "main_grad")
    with preserving(stages[0].domain):
        for stage in stages:
            stage.warm()
    recording = Recording(f"native, {same_sum}")
    optimizer = optimizer_of(stages, dtype)
    NativeRun(stages, ORDER, Workload(), same_sum, dtype, optimizer, recording).run(steps)
    return recording


def guarded_te(config: LayerConfig, rule: Rule, dtype: torch.dtype, **options: Any) -> GuardedRun:
    """A guarded runtime over the backend."""
    stages = stages_of(config, **options)
    runtime = Runtime(stages, ORDER, RuntimeConfig(rule=rule, dtype=dtype, readers=True))
    return GuardedRun(runtime, Workload(), optimizer_of(stages, dtype), Recording("guarded"))


class TestAgainstNative:
    @pytest.mark.parametrize("fuse", [True, False], ids=["main_grad at dI", "bound at dW"])
    @pytest.mark.parametrize(
        ("rule", "dtype"),
        [("per_microbatch", BF16), ("accumulate", BF16), ("accumulate", FP32)],
    )
    def test_direct_placement_has_the_bits_of_native(
        self, rule: Rule, dtype: torch.dtype, fuse: bool
    ) -> None:
        """Direct placement, by `main_grad` at dI or by rebinding at dW: native's bits."""
        run = guarded_te(FUSED, rule, dtype, fuse_wgrad_accumulation=fuse)
        run.run(6)

        result = compare(native_run(FUSED, rule, dtype, 6), run.recording or Recording("none"))

        assert result.mismatched == 0, str(result)

    @pytest.mark.parametrize("config", [FUSED, SPLIT], ids=["fused QKV", "split QKV"])
    def test_copied_gradients_have_the_bits_of_native(self, config: LayerConfig) -> None:
        """Copied gradients: native's bits, with 4 matrices and with 6."""
        run = guarded_te(config, "copied", BF16, fuse_wgrad_accumulation=False)
        run.run(6)

        result = compare(native_run(config, "copied", BF16, 6), run.recording or Recording("none"))

        assert result.mismatched == 0, str(result)

    def test_split_qkv_direct(self) -> None:
        """Split QKV places q, k, v in adjacent rows of one destination: native's bits."""
        run = guarded_te(SPLIT, "per_microbatch", BF16)
        run.run(6)

        result = compare(
            native_run(SPLIT, "per_microbatch", BF16, 6), run.recording or Recording("none")
        )

        assert result.mismatched == 0, str(result)

    def test_layers_under_one_autocast_are_one_interval(self) -> None:
        """Two layers under one autocast are one interval of the scaling state."""
        run = guarded_te(FUSED, "accumulate", FP32, num_layers=2)
        run.run(3)
        stages = stages_of(FUSED, num_layers=2)
        with preserving(stages[0].domain):
            for stage in stages:
                stage.warm()
        recording = Recording("native")
        NativeRun(
            stages, ORDER, Workload(), "main_grad", FP32, optimizer_of(stages, FP32), recording
        ).run(3)

        result = compare(recording, run.recording or Recording("none"))

        assert result.mismatched == 0, str(result)


class TestStage:
    @pytest.mark.parametrize(("config", "total", "num"), [(FUSED, 12, 4), (SPLIT, 16, 6)])
    def test_parameters_and_matrices_are_counted_for_each_layout(
        self, config: LayerConfig, total: int, num: int
    ) -> None:
        """12 parameters with 4 matrices, or 16 with 6; four units either way."""
        stage = stages_of(config)[0]

        assert num == len(matrices(stage))
        assert total == num + len(stage.non_matrix)
        assert 4 == len(stage.units)
        assert isinstance(stage, StageBackend)
        assert isinstance(stage.domain, StateDomain)

    def test_split_qkv_cannot_fuse(self) -> None:
        """Fused accumulation with split QKV is refused before the library does."""
        with pytest.raises(BackendError, match="destinations are then bound at dW"):
            stages_of(SPLIT, fuse_wgrad_accumulation=True)

    def test_copied_needs_unfused(self) -> None:
        """Copied gradients with `main_grad` accumulation are refused at bind."""
        run = guarded_te(FUSED, "copied", BF16)

        with pytest.raises(BackendError, match="fuse_wgrad_accumulation=False"):
            run.step()

    def test_stores_are_the_slots_own(self) -> None:
        """After dI a slot's stores are empty, and its tape holds every unit's work."""
        run = guarded_te(FUSED, "accumulate", BF16)
        stage = run.runtime.stages[1]
        run.runtime.actions.refresh(1)
        run.act(ORDER.steps[0])
        key = run.runtime.key(1, 0)
        slot = run.runtime.memories[1].table[run._refs[key].slot]
        run.runtime.actions.bind(key)

        gradients = Workload().output_gradients(stage, 0, 0)
        stage.bind(slot.tape, run.runtime.memories[1].arena.destinations(0))
        stage.input_gradient(slot.tape, gradients)

        assert all(store.context.empty() for store in slot.tape.stores)
        assert tuple(unit.name for unit in stage.units) == slot.tape.queued

    @pytest.mark.parametrize("what", ["workspace", "workspaces", "history", "meta", "module"])
    def test_the_probe_sees_what_is_replaced(self, what: str) -> None:
        """The library re-creates workspaces and states silently; the probe differs as names do."""
        stage: Any = guarded_te(FUSED, "accumulate", BF16).runtime.stages[1]
        look, before = stage.address_probe(), dict(stage.addresses())
        seen = look()
        assert seen == look()
        module = stage.layers[0].layernorm_mlp
        if what == "workspace":
            made = fake_te.Workspace(module.fc1_weight.detach(), module.fp8_meta["scaling_fwd"], 1)
            module._fp8_workspaces["fc1_weight"] = made
        elif what == "workspaces":
            module._fp8_workspaces = {}
        elif what == "history":
            module.fp8_meta["scaling_bwd"].history = torch.zeros(4, 2)
        elif what == "meta":
            module.fp8_meta = {
                key: fake_te.Meta.empty(4, 4, torch.float8_e4m3fn, CPU)
                for key in ("scaling_fwd", "scaling_bwd")
            }
        else:
            stage.layers[0].layernorm_mlp = fake_te.LayerNormMLP(module.pieces, 32, True)

        assert before != dict(stage.addresses())
        assert seen != look()

    def test_delay_switched_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A module whose store does not defer is an error at dI, not a lost gradient."""
        run = guarded_te(FUSED, "accumulate", BF16)
        monkeypatch.setattr(fake_te.WeightGradStore, "delay_wgrad_compute", lambda _: False)

        with pytest.raises(BackendError, match="queued 0 deferred products"):
            run.step()

    def test_a_product_built_otherwise_is_named(self) -> None:
        """A deferred product that is built differently is named, instead of written nowhere."""
        from qeffect.gpu_runtime.backends.te import deferred

        with pytest.raises(BackendError, match="use a tested version of the library"):
            deferred.gemm_arguments(lambda: None)

    def test_native_bind_needs_the_right_stage(self) -> None:
        """Native accumulation into `.grad` wants a stage that does not fuse, and the reverse."""
        fused = stages_of(FUSED)[0]

        with pytest.raises(BackendError, match="make it with False"):
            fused.native_bind(None)


class TestDomain:
    def test_state_of_the_process(self) -> None:
        """Every module's history and scale, forward and backward, by name; nothing besides."""
        run = guarded_te(FUSED, "accumulate", BF16)

        state = run.runtime.stages[1].numerical_state()

        assert 3 * 2 * 2 == len(state)
        assert "layers.0.self_attention.proj.backward.scale" in state
        assert {} == run.runtime.domain.extra_state()

    def test_stranger_at_construction(self) -> None:
        """Modules that are registered already would share the state: refused."""
        guarded_te(FUSED, "accumulate", BF16)

        with pytest.raises(BackendError, match="FP8 states of this process are registered already"):
            TransformerEngineDomain("delayed", 4, CPU)

    def test_stranger_at_freeze(self) -> None:
        """A module of nobody's stage is found before capture."""
        run = guarded_te(FUSED, "accumulate", BF16)
        warm_stranger(run)

        with pytest.raises(BackendError, match="every module of the process must belong"):
            run.runtime.domain.freeze()

    def test_a_module_that_joins_after_capture_is_found(self) -> None:
        """A module that joins the process after capture is found at the next look."""
        run = guarded_te(FUSED, "accumulate", BF16)
        run.runtime.domain.freeze()
        run.runtime.domain.check_membership()
        warm_stranger(run)

        with pytest.raises(BackendError, match="6 FP8 states joined the process after capture"):
            run.runtime.domain.check_membership()

    def test_a_frozen_domain_takes_no_new_stage(self) -> None:
        """A stage that joins a frozen domain is refused."""
        stages = stages_of(FUSED)
        domain = stages[0].domain
        assert isinstance(domain, TransformerEngineDomain)
        for stage in stages:
            stage.warm()
        domain.freeze()

        with pytest.raises(BackendError, match="joins a frozen state domain"):
            TransformerEngineStage(9, domain, FUSED)

    def test_a_stage_without_caches_cannot_be_frozen(self) -> None:
        """A stage without caches cannot be frozen: its first use would be inside a graph."""
        stages = stages_of(FUSED)

        with pytest.raises(BackendError, match="has 0 weight caches, expected 4"):
            stages[0].domain.freeze()

    def test_the_process_wide_skip_flag_is_refused(self) -> None:
        """The process-wide skip flag, which overrides every F's, is refused."""
        run = guarded_te(FUSED, "accumulate", BF16)
        state = fake_te.FP8GlobalStateManager.quantization_state
        state.skip_fp8_weight_update_tensor = torch.zeros(1)

        with pytest.raises(BackendError, match="skip_fp8_weight_update"):
            run.runtime.domain.freeze()

    def test_what_cannot_be_captured_is_listed(self) -> None:
        """What cannot be captured is listed: evaluation mode, tensor parallelism, FP8 weights."""
        stage = stages_of(FUSED)[0]
        assert isinstance(stage, TransformerEngineStage)
        assert () == stage.capture_obstacles()
        stage.layers[0].eval()

        assert "evaluation mode" in stage.capture_obstacles()[0]


def warm_stranger(run: GuardedRun) -> None:
    """Use a layer that belongs to no stage."""
    layer = fake_te.TransformerLayer(32, 64, 2, fuse_qkv_params=True, fuse_wgrad_accumulation=False)
    domain = run.runtime.domain
    assert isinstance(domain, TransformerEngineDomain)
    with domain.autocast():
        layer(torch.randn(16, 1, 32).bfloat16(), True)


class TestVersion:
    def test_an_untested_version_is_refused_with_what_to_do(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An untested version is refused with what was tested and how to go on."""
        install(monkeypatch, "2.31.0")

        with pytest.raises(BackendError, match=r"2\.31\.0 is untested; tested: 2\.18"):
            te.library()

    def test_untested_on_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A variable lets an untested version run."""
        install(monkeypatch, "2.31.0")
        monkeypatch.setenv("QEFFECT_UNTESTED_TE", "1")

        assert "2.31.0" == te.library().version

    def test_without_the_library_the_message_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without the library the message says what to install and what works without."""
        for name in list(fake_te.modules()):
            monkeypatch.setitem(sys.modules, name, None)
        te.library.cache_clear()

        with pytest.raises(BackendError, match="or use the reference backend"):
            TransformerEngineDomain("delayed", 4, CPU)

    @pytest.mark.parametrize("version", ["2.18.0", "2.18.1+abc"])
    def test_patch_releases_of_a_tested_version_are_tested(self, version: str) -> None:
        """Patch releases of a tested version are tested versions."""
        assert version_problem(version) is None
