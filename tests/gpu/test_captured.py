"""
Real graphs over Transformer Engine: native's bits, refusals during a run, addresses, memory, and
handoff.
"""

from __future__ import annotations

import gc
from typing import Any

import attrs
import pytest
import torch

from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.backends.te.domain import library
from qeffect.gpu_runtime.backends.te.stage import TransformerEngineStage
from qeffect.gpu_runtime.lab.commands import streams as streamcheck
from qeffect.gpu_runtime.lab.comparisons.cases import Case
from qeffect.gpu_runtime.lab.comparisons.faults import LocalReduction
from qeffect.gpu_runtime.lab.comparisons.recording import REQUIRED, Recording, compare
from qeffect.gpu_runtime.lab.comparisons.sides import fresh_stages, record
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.step.captures import capture_graph
from qeffect.gpu_runtime.step.memory.arena import Rule
from qeffect.gpu_runtime.step.plan.order import ComputeAction, Kind
from qeffect.refusals import Refused

from ..runtime.fault_table import FaultTable
from ..runtime.helpers import assert_same
from ..runtime.injection import Injection, boom
from .helpers import SMALL, TE, CapturedInjection, executor_of, given, guarded_run

#: Slot 0 runs another microbatch while slot 1 holds the work of its dW.
REUSE = "0F0 0F1 0I0 0I1 0W0 0F2 0I2 0W1 0W2"


def both(case: Case, side: str) -> None:
    """A side and native give the same bits in every category."""
    native = record(case, "native", TE)
    candidate = record(case, side, TE)
    assert native is not None
    assert candidate is not None
    assert_same(native, candidate)
    if side != "native-again":
        result = compare(native, candidate, categories=REQUIRED)
        assert result.mismatched == 0, str(result)


class TestSameBits:
    def test_native_repeats(self) -> None:
        """The oracle gives the same bits twice."""
        both(SMALL, "native-again")

    @pytest.mark.parametrize("side", ["eager", "captured"])
    @pytest.mark.parametrize(
        ("rule", "fused"),
        [("accumulate", True), ("per_microbatch", True), ("copied", True), ("copied", False)],
    )
    def test_as_native(self, side: str, rule: Rule, fused: bool) -> None:
        """Split eager and split captured against the library's full backward."""
        both(attrs.evolve(SMALL, rule=rule, fused_qkv=fused), side)

    def test_float32_destinations(self) -> None:
        """Fused accumulation into fp32, with master weights."""
        both(attrs.evolve(SMALL, dtype="float32", history=16), "captured")

    def test_slot_reuse_while_a_wgrad_waits(self) -> None:
        """A slot's graphs leave the work that another slot retains alone."""
        both(given(REUSE, rule="copied"), "captured")

    def test_faults_while_graphs_are_live(self) -> None:
        """Every fault of the table, and F, dI and dW that fail after their replay, then rebuilt."""
        both(attrs.evolve(SMALL, steps=6), "disturbed")


class TestFaultTable(FaultTable):
    """Every row of the table while graphs are live: no tensor changes, nothing is replayed."""

    @pytest.fixture
    def injected(self) -> Injection:
        """A captured run before its second epoch, with a reduction over one rank."""
        made = CapturedInjection(reducer=LocalReduction())
        assert executor_of(made.run).num_replays > 0
        return made


class TestRefusals:
    """Training ends as if undisturbed."""

    def test_a_failed_replay(self, undisturbed: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
        """F that raises aborts every tape; the rebuilt epoch replays the same graphs."""
        injected = CapturedInjection()
        injected.until("2F1")
        with monkeypatch.context() as broken:
            broken.setattr(executor_of(injected.run), "forward", boom)
            with pytest.raises(RuntimeError, match="injected"):
                injected.act(ComputeAction(Kind.FORWARD, 2, 1))
        with pytest.raises(Refused) as caught:
            injected.act(ComputeAction(Kind.DGRAD, 1, 0))
        assert "arena.spoiled" == caught.value.clause
        assert not injected.contract.live()

        injected.start_over(undisturbed)

    def test_inputs_of_another_device(self, undisturbed: Recording) -> None:
        """A host tensor is named before anything is touched."""
        injected = CapturedInjection()
        runtime = injected.run.runtime
        (given_there,) = Workload().inputs(runtime.stages[1], 1, 0)

        with pytest.raises(BackendError, match="stage 1, inputs 0"):
            injected.actions.forward(runtime.key(1, 0), (given_there.cpu(),))

        injected.go_on(undisturbed)


class TestAddresses:
    @pytest.mark.parametrize("what", ["parameter", "cache", "state"])
    def test_moved(self, what: str) -> None:
        """What graphs bake in and has moved is named at the next refresh, before any replay."""
        run = guarded_run()
        run.step()
        stage = run.runtime.stages[1]
        assert isinstance(stage, TransformerEngineStage)
        mlp: Any = stage.layers[0].get_submodule("layernorm_mlp")
        moved = {
            "parameter": lambda: mlp.fc1_weight,
            "cache": lambda: next(iter(stage.cached_weights().values())),
            "state": lambda: next(iter(stage.numerical_state().values())),
        }[what]()
        replays = executor_of(run).num_replays

        moved.data = moved.data.clone()

        with pytest.raises(BackendError, match=f"{what}:.* was at"):
            run.runtime.actions.refresh(1)
        assert replays == executor_of(run).num_replays

    def test_addresses_stay(self) -> None:
        """Steps of the optimizer, a rebuild and more steps move nothing."""
        run = guarded_run()
        before = dict(run.runtime.stages[1].addresses())

        run.run(2)
        run.runtime.rebuild()
        run.run(2)

        assert before == dict(run.runtime.stages[1].addresses())


class TestCapture:
    def test_a_stage_after_capture(self) -> None:
        """A stage that joins the frozen domain is refused."""
        domain: Any = guarded_run().runtime.domain
        with pytest.raises(BackendError, match="joins a frozen state domain"):
            TransformerEngineStage(9, domain, SMALL.config)

    def test_a_stranger_after_capture(self) -> None:
        """A module of somebody else that registers its state is seen at the next refresh."""
        run = guarded_run()
        run.step()
        domain: Any = run.runtime.domain
        stranger = library().te.TransformerLayer(
            SMALL.hidden,
            SMALL.ffn,
            SMALL.heads,
            layer_number=1,
            self_attn_mask_type="causal",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=torch.bfloat16,
            fuse_qkv_params=True,
            fuse_wgrad_accumulation=False,
            device=domain.device,
        )
        with domain.autocast():
            stranger(run.runtime.stages[1].inputs[0].buffer(), is_first_microbatch=True)

        with pytest.raises(BackendError, match="joined the process after capture"):
            run.runtime.actions.refresh(1)

    def test_a_module_that_cannot_be_captured(self) -> None:
        """A layer in evaluation mode records no amax; it is named, with its reason."""
        stages = fresh_stages(SMALL, TE)
        stage = stages[0]
        assert isinstance(stage, TransformerEngineStage)
        stage.layers.eval()

        from qeffect.gpu_runtime.runtime import Runtime, RuntimeConfig

        with pytest.raises(BackendError, match="is in evaluation mode"):
            Runtime(stages, SMALL.order(), RuntimeConfig(mode="replays"))

    def test_an_invalid_capture_leaves_torch_as_it_was(self) -> None:
        """CUDA invalidates a capture in which the host waits; memory is reused, numbers drawn."""

        def waits() -> None:
            torch.ones(1024, device="cuda").add_(1)
            torch.cuda.current_stream().synchronize()

        other, size = torch.cuda.Stream(), 64 << 20

        def reserved() -> int:
            for _ in range(8):
                block = torch.empty(size, dtype=torch.uint8, device="cuda")
                block.record_stream(other)
                del block
                torch.cuda.synchronize()
            return torch.cuda.memory_reserved()

        before, state = reserved(), torch.cuda.get_rng_state()
        drawn = torch.rand(4, device="cuda")
        torch.cuda.set_rng_state(state)
        with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="captur"):
            capture_graph(waits, torch.cuda.graph_pool_handle())
        torch.cuda.synchronize()

        assert reserved() < before + size  # the failed graph may hold what it allocated
        assert torch.equal(torch.rand(4, device="cuda"), drawn)

    def test_fusion_and_split_qkv(self) -> None:
        """The library refuses them together, so the stage says what to do instead."""
        (stage, *_) = fresh_stages(SMALL, TE)
        domain: Any = stage.domain
        with pytest.raises(BackendError, match="bound at dW"):
            TransformerEngineStage(
                9, domain, LayerConfig(fused_qkv=False), fuse_wgrad_accumulation=True
            )


class TestMemory:
    @pytest.mark.parametrize("rule", ["accumulate", "copied"])
    def test_nothing_grows(self, rule: Rule) -> None:
        """20 steps allocate and reserve no byte that stays."""
        run = guarded_run(attrs.evolve(SMALL, rule=rule))
        run.run(5)

        before = held()
        run.run(20)

        assert all(now <= then for now, then in zip(held(), before, strict=True))


def held() -> tuple[int, int]:
    """Bytes that the allocator has given out, and those that it has reserved."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


class TestHandoff:
    def test_both_halves(self) -> None:
        """A consumer that waits for the tail event reads what the producer left."""
        found = streamcheck.check_handoff("two-way", 20, width=2048, depth=16)

        assert (0, 0) == (found["stale"], found["vacuous"])

    def test_one_half(self) -> None:
        """Without that wait, it reads what was there before."""
        found = streamcheck.check_handoff("one-way", 20, width=2048, depth=16)

        assert found["stale"] > 0
        assert 0 == found["vacuous"]
