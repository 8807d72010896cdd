"""
The Transformer Engine backend with a stand-in for the library (`fake_te`), on a CPU.

The stand-in can show every refusal, and the order in which stores, destinations and state are
touched. It cannot show the real library's numerics, which `qeffect runtime compare` checks on a
GPU.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qeffect import gpu_runtime
from qeffect.gpu_runtime import doctor
from qeffect.gpu_runtime.backends.ends import Ends, mean_cross_entropy
from qeffect.gpu_runtime.backends.epoch_scales import SCALES, Scales
from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.protocol import (
    BackendError,
    StageBackend,
    StateDomain,
    Tape,
    matrices,
    products,
)
from qeffect.gpu_runtime.backends.split_head import SplitHead
from qeffect.gpu_runtime.backends.te import (
    baselines as te_baselines,
)
from qeffect.gpu_runtime.backends.te import (
    deferred_gradients,
    joining,
    loss,
)
from qeffect.gpu_runtime.backends.te import (
    domain as te,
)
from qeffect.gpu_runtime.backends.te import (
    self_test as self_test,
)
from qeffect.gpu_runtime.backends.te.domain import TransformerEngineDomain, version_problem
from qeffect.gpu_runtime.backends.te.internals import (
    BASELINE,
    EPOCH,
    IMPORTED,
    LAYER,
    STATE,
    ImportedName,
    missing_imports,
    missing_members,
    missing_state,
)
from qeffect.gpu_runtime.backends.te.stage import TransformerEngineStage
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.native import NativeRun, rule_for
from qeffect.gpu_runtime.lab.comparisons.recording import Recording, compare
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.runtime import Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.memory.arena import Rule
from qeffect.gpu_runtime.step.memory.numerical_state import live_state, preserving, same_bits
from qeffect.gpu_runtime.step.optimizer import Optimizer
from qeffect.gpu_runtime.step.plan.order import Order

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


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("version", ["2.18.0", "2.20.2"])
def test_the_librarys_cross_entropy_computes_mean_and_gradient(
    version: str, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A later version may overwrite the logits in the backward, and warns of the option for graphs.
    2.18's product with the loss's gradient is rounded to bf16 as autograd rounds it.
    """
    install(monkeypatch, version)
    logits, targets = torch.randn(3, 2, 7, dtype=BF16), torch.tensor([[1, 6], [-100, 0], [2, 3]])
    before = logits.clone()
    wanted = before.clone().requires_grad_()
    mean_cross_entropy(wanted, targets).div(4).backward()

    given = logits.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = loss.mean_cross_entropy(given, targets, overwrite=overwrite)
        (gradient,) = torch.autograd.grad(found / 4, given)

    assert torch.equal(found, mean_cross_entropy(before, targets))
    assert wanted.grad is not None
    assert torch.equal(gradient, wanted.grad)
    new = version != "2.18.0"
    assert fake_te.cross_entropies.asked == ([overwrite] if new else [])
    assert torch.equal(given, before) != (new and overwrite)
    assert (gradient.data_ptr() == given.data_ptr()) == (new and overwrite)


def stages_of(
    config: LayerConfig,
    order: Order = ORDER,
    *,
    history: int = 4,
    scales: Scales = "action",
    **options: Any,
) -> list[StageBackend]:
    """Fresh stages in a fresh process-wide domain."""
    te.reset_process()
    domain = TransformerEngineDomain("delayed", history, CPU, scales)
    return [TransformerEngineStage(n, domain, config, seed=n, **options) for n in order.stages]


def optimizer_of(stages: list[StageBackend], dtype: torch.dtype) -> Optimizer:
    """AdamW with masters for fp32 destinations."""
    return Optimizer(stages, master_dtype=None if dtype == BF16 else dtype)


def native_run(
    config: LayerConfig, rule: Rule, dtype: torch.dtype, steps: int, scales: Scales = "action"
) -> Recording:
    """The library's full backward, from warm modules in fresh state."""
    same_sum = rule_for(ORDER, rule, dtype)
    fuse = same_sum == "main_grad"
    stages = stages_of(config, scales=scales, fuse_wgrad_accumulation=fuse)
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
    assert {3} == set(map(len, runtime.on_trust().values()))  # the library reports nothing
    return GuardedRun(runtime, Workload(), optimizer_of(stages, dtype), Recording("guarded"))


class TestEpochScales:
    """Regions that update nothing, and one update at the end of an epoch."""

    @pytest.mark.parametrize("rule", ["accumulate", "per_microbatch"])
    def test_split_has_the_bits_of_native(self, rule: Rule) -> None:
        """Every value, the state after each F and dI included."""
        run = guarded_te(FUSED, rule, BF16, scales="epoch")
        run.run(4)

        native = native_run(FUSED, rule, BF16, 4, "epoch")
        result = compare(native, run.recording or Recording("none"))

        assert result.mismatched == 0, str(result)
        default = compare(native_run(FUSED, rule, BF16, 4), run.recording or Recording("none"))
        assert default.mismatched > 0

    def test_only_the_end_of_an_epoch_updates(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Once forward, then once backward, by the library's own function."""
        run = guarded_te(FUSED, "accumulate", BF16, scales="epoch")
        manager, asked = fake_te.FP8GlobalStateManager, []
        real = manager.reduce_and_update_fp8_tensors

        def counted(forward: bool = True) -> None:
            asked.append((run.runtime.epoch, forward))
            real(forward)

        monkeypatch.setattr(manager, "reduce_and_update_fp8_tensors", counted)
        run.run(2)
        assert [(0, True), (0, False), (1, True), (1, False)] == asked

    def test_the_order_changes_no_bit(self) -> None:
        """Of the state and the parameters; by default it does."""
        texts = (
            "0F0 0F1 0I0 0W0 0I1 0W1 1F0 1F1 1I0 1W0 1I1 1W1",
            "1F1 0F0 0I0 0W0 1F0 1I0 0F1 1W0 1I1 1W1 0I1 0W1",
        )
        found: dict[str, list[dict[str, torch.Tensor]]] = {"epoch": [], "action": []}
        for scales, held in found.items():
            for text in texts:
                order = Order.parse(text)
                stages = stages_of(FUSED, order, scales=scales)  # type: ignore[arg-type]
                runtime = Runtime(stages, order, RuntimeConfig(readers=True))
                GuardedRun(runtime, Workload(), optimizer_of(stages, BF16)).run(3)
                held.append({n: t.clone() for n, t in live_state(stages[0].domain).items()})
        same = {
            scales: [same_bits(one[name], other[name]) for name in one]
            for scales, (one, other) in found.items()
        }
        assert all(same["epoch"])
        assert not all(same["action"])

    def test_modules_register_in_a_region_that_rolls(self) -> None:
        """Otherwise the library never updates their scales."""
        (first, *_) = stages_of(FUSED, scales="epoch")
        with preserving(first.domain):
            first.warm()
        state = fake_te.FP8GlobalStateManager.quantization_state
        assert len(state.states[True]) == 3
        assert not state.is_first_fp8_module

    def test_the_recipe_names_it(self) -> None:
        """A checkpoint of one is refused by the other."""
        recipes = [TransformerEngineDomain("delayed", 4, CPU, s).recipe() for s in SCALES]
        assert {**recipes[0], "scales": "epoch"} == recipes[1]

    def test_only_delayed_scaling_has_it(self) -> None:
        """The other recipes keep no scale over an action."""
        with pytest.raises(BackendError, match="no scales that outlive an action"):
            TransformerEngineDomain("current", 4, CPU, "epoch")

    def test_by_default_nothing_moves_them_once(self) -> None:
        """Moving them once more would be another recipe."""
        with pytest.raises(BackendError, match="scales='epoch'"):
            TransformerEngineDomain("delayed", 4, CPU).move_scales()

    @pytest.mark.parametrize("one", EPOCH, ids=lambda one: one.path)
    def test_a_library_without_its_names_is_refused(
        self, one: ImportedName, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """But not by default."""
        if one.parameters:
            monkeypatch.setattr(f"{one.name}", lambda: None)
            if "autocast" in one.path:  # what the library's other users pass stays
                monkeypatch.setattr(one.name, lambda enabled, recipe: None)
        else:
            monkeypatch.delattr(one.name)
        TransformerEngineDomain("delayed", 4, CPU)
        with pytest.raises(BackendError, match=one.path.rsplit(".", 1)[-1]):
            TransformerEngineDomain("delayed", 4, CPU, "epoch")


def stage_with_head(kind: str = "bf16", scales: Scales = "epoch") -> TransformerEngineStage:
    """A warm stage with a head, alone in its domain."""
    te.reset_process()
    domain = TransformerEngineDomain("delayed", 4, CPU, scales)
    ends = Ends(vocabulary=64, head=True, kind=kind)
    stage = TransformerEngineStage(0, domain, FUSED, ends=ends, fuse_wgrad_accumulation=False)
    stage.warm()
    return stage


def taped(
    stage: TransformerEngineStage,
    count: int,
    destinations: dict[str, torch.Tensor] | None,
) -> list[Tape]:
    """The given number of tapes (the data that each F leaves), after F and dI."""
    tapes = [stage.new_tape(slot) for slot in range(count)]
    for n, tape in enumerate(tapes):
        drawn = torch.Generator().manual_seed(n)
        inputs = [spec.buffer() for spec in stage.inputs]
        with torch.no_grad():
            inputs[0].copy_(torch.randn(inputs[0].shape, generator=drawn))
        outputs = stage.forward(tape, inputs)
        stage.bind(tape, destinations)
        stage.dgrad(tape, [torch.randn(o.shape, generator=drawn).to(o.dtype) for o in outputs])
    return tapes


def names_of(stage: TransformerEngineStage) -> Callable[[str], int]:
    """The place of a matrix among those of a stage."""
    return [matrix.name for matrix in matrices(stage)].index


def destinations_of(stage: TransformerEngineStage) -> dict[str, torch.Tensor]:
    """Zeroed fp32 destinations."""
    return {unit.name: torch.zeros(unit.shape) for unit in stage.units}


class TestGroupedWgrad:
    """One dW over the tapes of several microbatches."""

    @pytest.mark.parametrize("kind", ["te", "bf16"])
    def test_one_product_over_all_tokens(self, kind: str) -> None:
        """It runs once per unit, into the first tape's destinations; each tape is empty then."""
        stage = stage_with_head(kind)
        alone, joined = destinations_of(stage), destinations_of(stage)
        for n, tape in enumerate(taped(stage, 3, alone)):
            stage.wgrad(tape, accumulate=n > 0)
        first, *others = taped(stage, 3, joined)
        assert len(list(products(first, others))) == len(stage.units)

        result = stage.wgrad(first, accumulate=False, others=others)

        assert [m.name for m in matrices(stage)] == sorted(result.covered, key=names_of(stage))
        assert all(result.by_unit[name] is joined[name] for name in joined)
        assert not any(tape.work for tape in (first, *others))
        for name, wanted in alone.items():
            assert wanted.abs().max() > 0
            # The head's products round to bf16: three times alone, once if joined.
            near = 0.02 if (kind, name) == ("bf16", "head") else 1e-4
            assert (joined[name] - wanted).norm() < near * wanted.norm()

    def test_the_bits_are_those_of_concatenated_operands(self) -> None:
        """In the order of the tapes, on top of what the destinations hold."""
        stage = stage_with_head()
        bound = destinations_of(stage)
        first, second = taped(stage, 2, bound)
        expected = {}
        for name, one, other in zip(first.queued, first.work, second.work, strict=True):
            if name == "head":
                dy, x = (torch.cat(both) for both in zip(one.operands, other.operands, strict=True))
                expected[name] = SplitHead.product(dy, x).float() + 1
                continue
            x, dy = (
                torch.cat([part.transposed().data.float() for part in both])
                for both in zip(one.operands, other.operands, strict=True)
            )
            scale = one.operands[0]._scale_inv * one.operands[1]._scale_inv
            expected[name] = (dy.t() @ x).mul_(scale) + 1
        for tensor in bound.values():
            tensor.fill_(1)

        stage.wgrad(first, accumulate=True, others=[second])

        assert all(same_bits(bound[name], wanted) for name, wanted in expected.items())

    def test_kept_work_runs_again(self) -> None:
        """The operands stay on their tapes, for the capture of another variant."""
        stage = stage_with_head()
        bound = destinations_of(stage)
        first, *others = taped(stage, 2, bound)
        stage.wgrad(first, accumulate=False, keep=True, others=others)
        once = {name: tensor.clone() for name, tensor in bound.items()}

        stage.wgrad(first, accumulate=False, others=others)

        assert all(same_bits(once[name], bound[name]) for name in bound)

    @pytest.mark.parametrize("direct", [False, True])
    def test_operands_that_cannot_be_joined(
        self, direct: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A head with a scale per microbatch is multiplied once per tape, and covered once."""
        monkeypatch.setattr(SplitHead, "join", None)
        stage = stage_with_head()
        bound = destinations_of(stage) if direct else None
        tapes = taped(stage, 3, bound)
        with torch.no_grad():
            parts = [tape.work[-1].compute(*tape.work[-1].operands) for tape in tapes]
        expected = torch.zeros(parts[0].shape, dtype=FP32 if direct else BF16)
        for part in parts:
            expected.add_(part)

        result = stage.wgrad(tapes[0], accumulate=False, others=tapes[1:])

        assert same_bits(result.by_unit["head"], expected)
        assert len(set(result.covered)) == len(result.covered) == len(matrices(stage))

    def test_a_dynamic_head_cannot_join(self) -> None:
        """Each of its casts has a scale of its own."""
        pytest.importorskip("torchao")
        stage = stage_with_head("torchao")
        assert stage.split_head is not None
        assert stage.split_head.join is None

    def test_only_scales_of_an_epoch_group(self) -> None:
        """Scales that move at each F and dI differ between microbatches."""
        assert stage_with_head(scales="epoch").groups_wgrads
        assert not stage_with_head(scales="action").groups_wgrads

    def test_tapes_of_other_work_are_refused(self) -> None:
        """For example a tape whose dI has not run."""
        stage = stage_with_head()
        (first,) = taped(stage, 1, destinations_of(stage))
        with pytest.raises(BackendError, match="group only tapes of one stage, after their dI"):
            stage.wgrad(first, accumulate=False, others=[stage.new_tape(1)])


class TestPacking:
    """Operands of several microbatches as one."""

    @staticmethod
    def quantized(fill: int, **changes: Any) -> fake_te.Float8TensorStorage:
        """An operand of 16 tokens and 32 features, with rows alone."""
        data = (torch.arange(16 * 32).view(2, 8, 32) * 7 + fill).to(torch.uint8)
        given = {"data": data, "fp8_scale_inv": torch.ones(1), "fp8_dtype": torch.float8_e4m3fn}
        return fake_te.Float8TensorStorage(**{**given, **changes})

    def transposed(self, fill: int, *, rows: bool) -> fake_te.Float8TensorStorage:
        """The same operand with its transpose, `[features, 2, 8]` as the library makes it."""
        made = self.quantized(fill)
        assert made._data is not None
        turned = made._data.permute(2, 0, 1).contiguous()
        return self.quantized(fill, data=made._data if rows else None, data_transpose=turned)

    def expected(self, *fills: int) -> torch.Tensor:
        """The transposes side by side."""
        rows = [self.quantized(fill)._data for fill in fills]
        return torch.cat([row.view(16, 32) for row in rows if row is not None]).t()

    @pytest.mark.parametrize("rows", [False, True])
    def test_transposes(self, rows: bool) -> None:
        """Side by side, under the scale and quantizer of the first operand, which is not copied."""
        parts = [self.transposed(n, rows=rows) for n in range(3)]
        (joined,) = joining.join([[part] for part in parts])

        assert same_bits(joined._transpose, self.expected(0, 1, 2))
        assert (joined._data, joined._transpose_invalid) == (None, False)
        assert joined._scale_inv is parts[0]._scale_inv
        assert joined._fp8_dtype == parts[0]._fp8_dtype

    def test_rows(self) -> None:
        """Operands without a valid transpose: the library transposes the joined rows."""
        stale = self.transposed(1, rows=True)
        stale._transpose_invalid = True
        (joined,) = joining.join([[self.quantized(0)], [stale]])

        assert same_bits(joined._data, self.expected(0, 1).t())
        assert same_bits(joined._transpose, self.expected(0, 1))
        assert stale._transpose_invalid

    def test_rows_and_transposes(self) -> None:
        """A missing transpose is made; the operand itself stays as it was."""
        rows = self.quantized(1)
        flat = self.quantized(1)
        assert flat._data is not None
        rows._data = flat._data.view(16, 32)
        (joined,) = joining.join([[self.transposed(0, rows=False)], [rows]])

        assert same_bits(joined._transpose, self.expected(0, 1))
        assert rows._transpose is None

    def test_plain_tensors(self) -> None:
        """Their rows, one behind the other."""
        parts = [torch.randn(2, 8, 4), torch.randn(16, 4)]
        (joined,) = joining.join([[part] for part in parts])
        assert torch.equal(joined, torch.cat([part.view(16, 4) for part in parts]))

    def test_what_cannot_be_joined(self) -> None:
        """Each is refused with what was found."""
        good = self.transposed(0, rows=False)
        for bad, message in (
            (torch.zeros(16, 32), "partly quantized"),
            (self.quantized(0, fp8_dtype=torch.float8_e5m2), "have FP8 types"),
            (self.quantized(0, data=None), "neither rows nor a valid transpose"),
            (object(), "cannot join operands of type object"),
            (self.quantized(0, data=None, data_transpose=torch.zeros(8, 16)), "features"),
        ):
            with pytest.raises(BackendError, match=message):
                joining.join([[good], [bad]])


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
        stage.dgrad(slot.tape, gradients)

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

    def test_from_dgrad_to_wgrad_a_tape_keeps_transposes_alone(self) -> None:
        """The rows of each operand are gone once dI has used them; a plain tensor stays whole."""
        stage = stages_of(FUSED, fuse_wgrad_accumulation=True)[0]
        assert isinstance(stage, TransformerEngineStage)
        with preserving(stage.domain):
            stage.warm()
        tape = stage.new_tape(0)
        (output,) = stage.forward(tape, [stage.inputs[0].buffer()])
        stage.bind(tape, {unit.name: torch.zeros(unit.shape) for unit in stage.units})
        stage.dgrad(tape, [torch.ones_like(output)])

        operands = [operand for work in tape.work for operand in work.operands]
        assert len(operands) == 8
        for operand in operands:
            assert operand._data is None
            assert operand._transpose is not None

        plain = torch.ones(2)
        store = tape.stores[0]
        store.put([plain, plain], len)
        assert store.context.get() == [[plain, plain], len]

    def test_a_product_built_otherwise_is_named(self) -> None:
        """A deferred product that is built differently is named, instead of written nowhere."""
        with pytest.raises(BackendError, match="use a tested version of the library"):
            deferred_gradients.gemm_arguments(lambda: None)

    def test_arguments_without_a_destination(self) -> None:
        """A deferred product whose arguments have no `out` is refused by that name."""
        wgrad_gemm_kwargs = {"accumulate": False, "out_dtype": BF16}

        with pytest.raises(BackendError, match=r"no argument \['out'\] in its \*wgrad_gemm_kwargs"):
            deferred_gradients.gemm_arguments(lambda: wgrad_gemm_kwargs)

    def test_native_bind_needs_the_right_stage(self) -> None:
        """Native accumulation into `.grad` wants a stage that does not fuse, and the reverse."""
        fused = stages_of(FUSED)[0]

        with pytest.raises(BackendError, match="make the stage with False"):
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

    @pytest.mark.parametrize("version", ["2.18.0", "2.18.1+abc", "2.19.0", "2.20.2"])
    def test_releases_of_the_tested_versions_are_tested(
        self, version: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Patch releases of a tested version are tested versions."""
        install(monkeypatch, version)

        assert version_problem(version) is None
        assert version == te.library().version

    @pytest.mark.parametrize(
        "version",
        ["2.17.1", "2.21.0", "2.200.0", "3.19.0", "1.20.0", "2", "2.21rc1", "unknown", ""],
    )
    def test_outside(self, version: str) -> None:
        """Every other version is untested, also one that has no two numbers."""
        assert "tested: 2.18 to 2.20" in (version_problem(version) or "")


def names(reached: tuple[ImportedName, ...] = (*IMPORTED, *BASELINE)) -> Any:
    """One case for each name that is looked for at import."""
    return pytest.mark.parametrize("reached", reached, ids=lambda one: one.path)


def drop(reached: ImportedName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one name out of the stand-in, as a later version may."""
    holder: Any = sys.modules[reached.module]
    *parents, last = reached.path.split(".")
    for parent in parents:
        holder = getattr(holder, parent)
    monkeypatch.delattr(holder, last)
    te.library.cache_clear()


class TestInternals:
    def test_nothing_is_missing(self) -> None:
        """The stand-in has every name, so each test below shows the effect of the name that it
        removes."""
        layer = stages_of(FUSED)[0].layers[0]  # type: ignore[attr-defined]

        assert [] == missing_imports((*IMPORTED, *BASELINE))
        assert [] == missing_members(layer)

    @names(IMPORTED)
    def test_a_name_that_is_gone(
        self, reached: ImportedName, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A library without one of the names is refused, and the message has that name in full."""
        drop(reached, monkeypatch)

        with pytest.raises(BackendError) as refused:
            te.library()

        assert "2.18.0 lacks names that the runtime uses: " in str(refused.value)
        assert reached.name in str(refused.value)
        assert "(2.18 to 2.20)" in str(refused.value)

    def test_a_module_that_is_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every name of a module that cannot be imported is missing."""
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.quantization", None)

        assert [
            one.name for one in IMPORTED if one.module == "transformer_engine.pytorch.quantization"
        ] == missing_imports()

    def test_a_parameter_that_is_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A function that no longer takes a parameter is named with it."""

        def autocast(enabled: bool) -> None:
            """Without a recipe."""

        monkeypatch.setattr(sys.modules["transformer_engine.pytorch"], "autocast", autocast)

        assert ["transformer_engine.pytorch.autocast(recipe=)"] == missing_imports()

    @pytest.mark.parametrize(
        ("path", "name"), [(path, one.name) for one in LAYER for path in one.paths]
    )
    def test_a_member_that_is_gone(
        self, path: str, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A layer whose module lacks a member is named with its path."""
        layer = stages_of(FUSED)[0].layers[0]  # type: ignore[attr-defined]
        module = layer.get_submodule(path)
        held = hasattr(fake_te.FP8Module, name)
        monkeypatch.delattr(fake_te.FP8Module if held else module, name)

        assert f"{path}.{name}".lstrip(".") in missing_members(layer)

    def test_a_stage_of_such_a_layer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Building a stage is refused before anything is captured."""
        monkeypatch.delattr(fake_te.FP8Module, "tp_size")

        with pytest.raises(BackendError, match=r"uses: self_attention\.layernorm_qkv\.tp_size"):
            stages_of(FUSED)

    def test_a_submodule_that_is_gone(self) -> None:
        """A layer without one of the modules that defer is named with the module's path."""
        layer = stages_of(FUSED)[0].layers[0]  # type: ignore[attr-defined]
        del layer.self_attention.proj

        assert ["self_attention.proj"] == missing_members(layer)

    def test_a_cache_of_another_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A first F that leaves its cache under another name is found in warm-up."""
        forward = fake_te.TransformerLayer.forward

        def renaming(layer: Any, x: torch.Tensor, is_first_microbatch: bool) -> torch.Tensor:
            made = forward(layer, x, is_first_microbatch)
            caches = layer.layernorm_mlp._fp8_workspaces
            caches["fc1"] = caches.pop("fc1_weight")
            return made

        monkeypatch.setattr(fake_te.TransformerLayer, "forward", renaming)

        with pytest.raises(BackendError, match=r"layernorm_mlp\._fp8_workspaces\['fc1_weight'\]"):
            stages_of(FUSED)[0].warm()

    @pytest.mark.parametrize("name", [*STATE, "get_metadata", "quantize_"])
    def test_state_that_is_gone(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Histories, scales and what a cache can do are looked for after the first F."""
        stage = stages_of(FUSED)[0]
        stage.warm()
        layer = stage.layers[0]  # type: ignore[attr-defined]
        assert [] == missing_state(layer, delayed=True)
        if name == "scale":
            del layer.layernorm_mlp.fp8_meta["scaling_bwd"].scale
        else:
            owner: Any = fake_te.Meta if name in STATE else fake_te.Workspace
            monkeypatch.delattr(owner, name)

        missing = missing_state(layer, delayed=True)

        assert missing
        assert all(one.endswith(f".{name}") for one in missing)
        assert all("layernorm_mlp" in one for one in missing) == (name == "scale")

    def test_the_readme_lists_them(self) -> None:
        """The README's table has exactly the names that are looked for."""
        text = (Path(gpu_runtime.__file__).parent / "README.md").read_text()
        section = text.split("## Which internals of Transformer Engine are reached")[1]
        rows = [row for row in section.split("\n## ")[0].splitlines() if row.startswith("| `")]
        listed = {name for row in rows for name in row.split("|")[1].replace("`", "").split(", ")}
        listed = {name.strip() for name in listed}

        reached = {one.path for one in (*IMPORTED, *BASELINE, *EPOCH)}
        reached |= {one.name for one in LAYER}
        reached |= {f"fp8_meta[...].{name}" for name in STATE}
        reached |= {"get_metadata", "quantize_", "context", deferred_gradients.GEMM_ARGUMENTS}
        assert reached == listed


class TestBackendCheck:
    def test_it_leaves_nothing_behind(self) -> None:
        """F, dI, dW and refresh of a small layer run; afterwards a new domain can be made."""
        self_test.check_backend("cpu")

        assert 0 == len(TransformerEngineDomain("delayed", 4, CPU).stages)

    def test_a_store_of_another_kind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What no look at names sees: a library that no longer queues its products is found."""
        monkeypatch.setattr(fake_te.WeightGradStore, "delay_wgrad_compute", lambda _: False)

        with pytest.raises(BackendError, match="queued 0 deferred products"):
            self_test.check_backend("cpu")
        assert 0 == len(TransformerEngineDomain("delayed", 4, CPU).stages)


class TestDoctor:
    @pytest.fixture(autouse=True)
    def host(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], doctor.Diagnosis]:
        """A host with two GPUs whose second one is current, and a look at its library."""
        for name, said in (
            ("is_available", True),
            ("current_device", 1),
            ("device_count", 2),
        ):
            monkeypatch.setattr(torch.cuda, name, lambda said=said: said)
        monkeypatch.setattr(torch.cuda, "get_device_name", ["small", "large"].__getitem__)
        monkeypatch.setattr(torch.cuda, "get_device_capability", [(8, 0), (9, 0)].__getitem__)
        check = self_test.check_backend
        monkeypatch.setattr(self_test, "check_backend", lambda: check("cpu"))

        def look(version: str) -> doctor.Diagnosis:
            install(monkeypatch, version)
            monkeypatch.setattr(doctor, "version", lambda _: version)
            return doctor.examine(probe=True)[-1]

        self.look = look
        return look

    def test_the_current_device(self) -> None:
        """The message names the number of the current device."""
        self.look("2.18.0")
        found = doctor.examine()[2]

        assert "large (device 1 of 2), compute capability 9.0" == found.found
        assert found.works

    @pytest.mark.parametrize("version", ["2.18.0", "2.19.0", "2.20.2"])
    def test_a_tested_version_works(self, version: str) -> None:
        """A tested version whose small layer runs is enough."""
        assert doctor.Diagnosis("Transformer Engine", version, True) == self.look(version)

    def test_it_names_what_a_run_lacks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A member that only a layer shows is named."""
        monkeypatch.delattr(fake_te.FP8Module, "primary_weights_in_fp8")
        found = self.look("2.20.2")

        assert not found.works
        assert "layernorm_mlp.primary_weights_in_fp8" in found.remedy

    def test_an_untested_version_with_every_name(self) -> None:
        """The message calls the version untested, with no name known to be missing."""
        found = self.look("2.21.0")

        assert not found.works
        assert "tested: 2.18 to 2.20" in found.remedy
        assert found.remedy.endswith("Transformer Engine has all names that the runtime imports")

    def test_an_untested_version_without_a_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The message names the missing name before anything uses it."""
        look = self.look
        look("2.21.0")
        monkeypatch.setattr(doctor, "version", lambda _: "2.21.0")
        monkeypatch.delattr(sys.modules["transformer_engine.pytorch.module._common"], "noop_cat")

        found = doctor.examine()[-1]

        assert "transformer_engine.pytorch.module._common.noop_cat" in found.remedy

    def test_an_untested_version_on_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Asked for all the same, it is run and works, or the run says what is missing."""
        monkeypatch.setenv("QEFFECT_UNTESTED_TE", "1")
        assert self.look("2.21.0").works

        monkeypatch.delattr(fake_te.FP8Module, "tp_size")
        found = self.look("2.21.0")
        assert not found.works
        assert "2.21.0 is untested" in found.remedy
        assert "self_attention.proj.tp_size" in found.remedy


class TestDevice:
    @pytest.fixture
    def second(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A host whose second GPU is the current one."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    def test_the_default_is_the_current_one(self, second: None) -> None:
        """A domain without a device, or with one without an index, is on the current device."""
        there = torch.device("cuda", 1)

        assert there == TransformerEngineDomain().device
        assert there == TransformerEngineDomain(device=torch.device("cuda")).device
        assert CPU == TransformerEngineDomain(device=CPU).device

    def test_another_than_the_current_one(self, second: None) -> None:
        """A domain elsewhere cannot be captured; the obstacle says what to call."""
        assert () == TransformerEngineDomain().capture_obstacles()
        te.reset_process()
        (said,) = TransformerEngineDomain(device=torch.device("cuda", 0)).capture_obstacles()

        assert "the domain is on cuda:0, but the current device is cuda:1" in said
        assert "torch.cuda.set_device(0)" in said

    def test_without_a_device(self) -> None:
        """A domain can be made without a GPU; capture says what is missing."""
        assert ("no CUDA device is available",) == TransformerEngineDomain().capture_obstacles()


class TestBaselines:
    @pytest.mark.parametrize(
        ("version", "asked"),
        [
            ("2.18.0", {}),
            ("2.19.0", {"clone_param_grads_on_return": False}),
            ("2.20.2", {"clone_param_grads_on_return": False}),
        ],
    )
    def test_graphs_without_clones(
        self, version: str, asked: dict[str, bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The library's own graphs return gradients in the same way under every version."""
        install(monkeypatch, version)

        made = te_baselines.graphed(
            [torch.nn.Identity()], torch.zeros(2), 3, [1, -1], "chunks", SimpleNamespace()
        )

        assert 3 == len(made)
        assert asked == fake_te.graphs.asked

    def test_graphs_of_another_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only the columns of the library's own graphs need its graphs."""
        drop(BASELINE[0], monkeypatch)
        assert te.library()

        with pytest.raises(BackendError, match=r"uses: .*make_graphed_callables;"):
            te_baselines.graphed([], torch.zeros(2), 1, [1, -1], "chunks", None)
