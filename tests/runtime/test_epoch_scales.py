"""
Scales that move once per epoch: in the domain, in the runtime, and compared with two references.

The first reference is the backend's own full backward under the same recipe. The second is an
oracle in plain torch that was written from the recipe's description (`epoch_oracle`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.protocol import BackendError, parameters
from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.native import NativeRun, rule_for
from qeffect.gpu_runtime.lab.comparisons.recording import Recording, compare
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.runtime import Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.calibration import MOST_WALKS, Calibration, calibrate
from qeffect.gpu_runtime.step.clipping import Norm
from qeffect.gpu_runtime.step.memory.arena import RULES, Rule
from qeffect.gpu_runtime.step.memory.numerical_state import NumericalState, live_state, same_bits
from qeffect.gpu_runtime.step.optimizer import Optimizer
from qeffect.gpu_runtime.step.plan.order import ComputeAction, Order
from qeffect.keys import TapeKey
from qeffect.refusals import Refused

from .epoch_oracle import Oracle, state_of
from .helpers import (
    TINY,
    assert_same,
    differing,
    guarded_run,
    native,
    optimizer_for,
    reference_stages,
    state_after,
)
from .orders import table_order

BF16 = torch.bfloat16
ZBV = table_order("ScheduleZBVZeroBubble", 1)
GPIPE = Order.parse("0F0 0F1 0F2 0F3 0I0 0I1 0I2 0I3 0W0 0W1 0W2 0W3")
ONE_BY_ONE = Order.parse("0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2 0F3 0I3 0W3")
MIXED = Order.parse("0F2 0F0 0I0 0F1 0W0 0I1 0F3 0W1 0I2 0W2 0I3 0W3")
BACKWARDS = Order.parse("0F0 0F1 0F2 0F3 0I3 0I2 0I1 0I0 0W2 0W0 0W3 0W1")


def epoch_run(order: Order, rule: Rule = "accumulate", **options: Any) -> GuardedRun:
    """A guarded run under epoch scales."""
    return guarded_run(order, 4, rule, scales="epoch", **options)


@attrs.define(eq=False)
class Watched(GuardedRun):
    """A guarded run with a function that sees the outputs of each F."""

    look: Callable[[TapeKey, Sequence[Tensor]], None] = attrs.field(default=lambda *_: None)

    def after_forward(self, key: TapeKey, step: ComputeAction, outputs: Sequence[Tensor]) -> None:
        """Let the function see them."""
        super().after_forward(key, step, outputs)
        self.look(key, outputs)


def watched(run: GuardedRun, look: Callable[[TapeKey, Sequence[Tensor]], None]) -> GuardedRun:
    """The same run, watched."""
    return Watched(run.runtime, run.workload, run.optimizer, look=look)


class TestDomain:
    def test_f_and_di_gather_and_do_not_move(self) -> None:
        """Scales stand still until `move_scales`; the open entry holds the largest amax."""
        (stage,) = reference_stages(GPIPE, 4, TINY, scales="epoch")
        tape, workload = stage.new_tape(0), Workload()
        stage.refresh_cache()
        state = stage.numerical_state()
        seen = []
        for m in range(3):
            inputs = [x.requires_grad_() for x in workload.inputs(stage, 0, m)]
            stage.forward(tape, inputs)
            stage.dgrad(tape, workload.output_gradients(stage, 0, m))
            stage.wgrad(tape, accumulate=False)
            seen.append(state["layers.0.backward.amax_history"].clone())
        assert stage.domain.rolls == 0
        assert all(bool((s == 1).all()) for name, s in state.items() if name.endswith("scale"))
        assert bool((seen[2][0] >= seen[0][0]).all())
        assert bool((seen[2][0] > seen[0][0]).any())
        assert not seen[2][1:].any()
        largest = seen[2][0]

        stage.domain.move_scales()

        assert stage.domain.rolls == 1
        assert torch.equal(state["layers.0.backward.scale"], 57344.0 / largest)
        assert torch.equal(state["layers.0.backward.amax_history"][-1], largest)
        assert not state["layers.0.backward.amax_history"][0].any()

    def test_the_recipe_names_it(self) -> None:
        """The recipe of old checkpoints is unchanged."""
        assert "scales" not in ReferenceDomain().recipe()
        assert ReferenceDomain(scales="epoch").recipe()["scales"] == "epoch"

    def test_scales_that_move_at_every_action_do_not_move_once(self) -> None:
        """Moving them at the end too would be another recipe."""
        with pytest.raises(BackendError, match="scales='epoch'"):
            ReferenceDomain().move_scales()

    def test_an_unknown_value_is_refused(self) -> None:
        """Only two are known."""
        with pytest.raises(ValueError, match="'action' or 'epoch', got 'step'"):
            ReferenceDomain(scales="step")  # type: ignore[arg-type]


class TestAgainstReferences:
    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("order", [ZBV, MIXED], ids=["zbv", "mixed"])
    def test_split_has_the_bits_of_native(self, order: Order, rule: Rule) -> None:
        """Every recorded value, the state after each F and dI included."""
        run = epoch_run(order, rule, num_layers=2)
        run.recording = Recording("guarded")
        run.run(4)

        assert_same(
            native(order, 4, rule, BF16, 4, TINY, num_layers=2, scales="epoch"), run.recording
        )

    def test_split_and_native_have_the_bits_of_the_oracle(self) -> None:
        """Outputs, parameters, histories and scales after six steps of a history of four."""
        steps, workload = 6, Workload()
        outputs: dict[str, Tensor] = {}

        def keep(key: TapeKey, found: Sequence[Tensor]) -> None:
            outputs[f"{key.epoch} {key.microbatch}"] = found[0].clone()

        run = watched(epoch_run(MIXED, num_layers=2), keep)
        stage = run.runtime.stages[0]
        oracle = Oracle(parameters(stage), TINY.heads, 4)
        run.run(steps)
        (full,) = reference_stages(MIXED, 4, TINY, num_layers=2, scales="epoch")
        same_sum = rule_for(MIXED, "accumulate")
        NativeRun([full], MIXED, workload, same_sum, BF16, optimizer_for([full], BF16)).run(steps)
        theirs: dict[str, Tensor] = {}
        for step in range(steps):

            def batch(of: Oracle, m: int, step: int = step) -> None:
                (x,) = workload.inputs(stage, step, m)
                y = of.forward(x.requires_grad_())
                theirs[f"{step} {m}"] = y.detach()
                y.backward(*workload.output_gradients(stage, step, m))

            oracle.step([lambda of, m=m, batch=batch: batch(of, m) for m in range(4)])  # type: ignore[misc]

        assert outputs.keys() == theirs.keys()
        assert [name for name in theirs if not same_bits(theirs[name], outputs[name])] == []
        for one in (stage, full):
            held = {n: p.detach() for n, p in parameters(one).items()}
            assert differing({n: v.detach() for n, v in oracle.named.items()}, held) == []
            assert differing(state_of(oracle), dict(one.numerical_state())) == []

    def test_the_order_changes_no_bit(self) -> None:
        """By default the same orders differ: the comparison is not blind."""
        orders = (GPIPE, ONE_BY_ONE, MIXED)
        first, *others = (state_after(epoch_run(order)) for order in orders)
        assert [differing(first, other) for other in others] == [[], []]
        assert len(first) > 40
        default = [state_after(guarded_run(order, 4)) for order in orders]
        assert len(differing(default[0], default[2])) > 20


class TestSums:
    @pytest.mark.parametrize("rule", ["per_microbatch", "copied"])
    def test_gradients_add_in_the_order_of_microbatches(self, rule: Rule) -> None:
        """Matrices and others, where dI and dW run backwards or in any order."""
        assert (
            differing(state_after(epoch_run(GPIPE, rule)), state_after(epoch_run(BACKWARDS, rule)))
            == []
        )

    def test_norms_and_biases_are_kept_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Added in dI order they have other bits."""
        ordered = state_after(epoch_run(GPIPE, "per_microbatch"))
        run = epoch_run(BACKWARDS, "per_microbatch")
        for memory in run.runtime.memories.values():
            assert memory.kept is not None
            memory.kept = None
        odd = differing(ordered, state_after(run, 4))
        assert any("norm" in name or "bias" in name for name in odd)

    @pytest.mark.parametrize(
        ("order", "action"),
        [(BACKWARDS, "dI in the order 3, 2, 1, 0"), ("dW", "dW in the order 1, 0, 2, 3")],
        ids=["dI", "dW"],
    )
    def test_accumulate_refuses_another_order(self, order: Order | str, action: str) -> None:
        """The error names the table, the stage and the remedy."""
        if not isinstance(order, Order):
            order = Order.parse("0F0 0F1 0F2 0F3 0I0 0I1 0W1 0W0 0I2 0W2 0I3 0W3")
        order = attrs.evolve(order, source="my table rank 3")
        with pytest.raises(BackendError) as caught:
            epoch_run(order)
        text = str(caught.value)
        assert text.startswith(f"my table rank 3: stage 0 runs its {action} of microbatches")
        assert "take rule='per_microbatch', or a table" in text
        guarded_run(order, 4)  # by default it is legal

    def test_tied_weights_of_one_destination_are_refused(self) -> None:
        """Both products add to it, in an order that the mapping decides."""
        order = Order.parse("0F0 1F0 1I0 1W0 0I0 0W0")
        stages = reference_stages(order, 4, TINY, scales="epoch")
        stages[1].tie("layers.0.proj", stages[0].layers[0].proj)  # type: ignore[arg-type]
        tied = [[(0, "layers.0.proj.weight"), (1, "layers.0.proj.weight")]]
        with pytest.raises(BackendError, match="name the parameters as copies"):
            Runtime(stages, order, RuntimeConfig(tied=tied))


class TestRuntime:
    def test_an_update_moves_once(self) -> None:
        """Neither the actions of an epoch nor its end outside of the update move."""
        run = epoch_run(ZBV)
        run.run(1)
        assert run.runtime.domain.rolls == 1  # type: ignore[attr-defined]
        run.run(3)
        assert run.runtime.domain.rolls == 4  # type: ignore[attr-defined]

    def test_a_refused_update_moves_nothing(self) -> None:
        """The contract is asked before."""
        run = epoch_run(GPIPE)
        before = NumericalState.of(run.runtime.domain)
        with pytest.raises(Refused):
            run.runtime.update(run.optimizer, {})
        assert NumericalState.of(run.runtime.domain).differences(before) == []

    def test_scales_move_also_if_the_norm_skips_the_update(self) -> None:
        """The data were consumed, and their amaxes gathered."""
        run = epoch_run(GPIPE)
        run.run(1)
        runtime = run.runtime
        weights = {n: p.detach().clone() for n, p in parameters(runtime.stages[0]).items()}
        scales = NumericalState.of(runtime.domain)
        finish = runtime.update

        def skipped(optimizer: Optimizer, gradients: Any, **options: Any) -> int:
            return finish(optimizer, gradients, norm=Norm(float("inf"), 1.0, True), **options)

        runtime.update = skipped  # type: ignore[method-assign]
        run.run(1)

        now = {n: p.detach() for n, p in parameters(runtime.stages[0]).items()}
        assert differing(weights, now) == []
        assert runtime.epoch == 2
        moved = NumericalState.of(runtime.domain).differences(scales)
        assert any(name.endswith("scale") for name in moved)

    def test_a_rebuild_restarts_the_epoch_with_its_scales(self) -> None:
        """An F that raised has gathered amaxes; the rebuilt epoch has none of them."""
        plain = state_after(epoch_run(GPIPE), 4)
        run = epoch_run(GPIPE)
        run.run(2)
        stage, runtime = run.runtime.stages[0], run.runtime
        real = stage.forward

        def failing(tape: Any, inputs: Any) -> Any:
            real(tape, [x * 100 for x in inputs])
            raise RuntimeError("a fault")

        stage.forward = failing  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="a fault"):
            run.run(1)
        stage.forward = real  # type: ignore[method-assign]
        runtime.rebuild()
        assert differing(plain, state_after(run, 2)) == []

    def test_a_checkpoint_of_the_other_recipe_is_refused(self) -> None:
        """In both directions, before anything changes."""
        for one, other in (("epoch", "action"), ("action", "epoch")):
            run, into = (guarded_run(GPIPE, 4, scales=s) for s in (one, other))  # type: ignore[arg-type]
            run.run(1)
            saved = run.runtime.checkpoint()
            before = NumericalState.of(into.runtime.domain)
            with pytest.raises(Refused, match="persistence"):
                into.runtime.restore(*saved)
            with pytest.raises(BackendError, match="was saved under recipe"):
                saved[1].into(into.runtime.domain)
            assert NumericalState.of(into.runtime.domain).differences(before) == []

    def test_a_restored_run_has_the_bits_of_one_that_never_stopped(self) -> None:
        """Histories and scales cross with the checkpoint."""
        run, other = epoch_run(MIXED), epoch_run(MIXED)
        run.run(2)
        saved = run.runtime.checkpoint()
        with torch.no_grad():
            for name, p in parameters(other.runtime.stages[0]).items():
                p.copy_(parameters(run.runtime.stages[0])[name])
        other.optimizer.load_state({n: t.clone() for n, t in run.optimizer.state_tensors().items()})
        other.runtime.restore(*saved)
        assert differing(state_after(run, 2), state_after(other, 2)) == []

    def test_an_evaluation_leaves_the_gathered_amaxes(self) -> None:
        """In the middle of an epoch, with inputs far larger than those of training."""
        plain = state_after(epoch_run(MIXED), 2)
        seen: list[Tensor] = []

        def look(key: TapeKey, found: Sequence[Tensor]) -> None:
            (x,) = run.workload.inputs(run.runtime.stages[0], 9, 9)
            seen.extend(run.runtime.actions.evaluate(0, [x * 50]))

        run = watched(epoch_run(MIXED), look)
        assert differing(plain, state_after(run, 2)) == []
        assert len(seen) == 8

    def test_activations_are_recomputed_with_the_scales_of_the_epoch(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And dropped alike, as the numbers follow from the microbatch."""
        plain = state_after(epoch_run(MIXED, dropout=0.2), 3)
        made = ReferenceStage.__init__

        def recomputing(self: ReferenceStage, *given: object, **options: object) -> None:
            made(self, *given, recompute=True, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(ReferenceStage, "__init__", recomputing)
        assert differing(plain, state_after(epoch_run(MIXED, dropout=0.2), 3)) == []

    def test_the_contract_is_asked(self) -> None:
        """Its stages have the form, and each action and movement is reported."""
        run = epoch_run(MIXED)
        run.run(2)
        contract = run.runtime.contract
        assert {(s.scales, s.reports_updates, s.tape_scales) for s in contract.stages} == {
            ("epoch", True, "carried")
        }
        assert list(contract.memory.rolled_at) == list(contract.memory.token)

    def test_scales_that_move_in_the_middle(self) -> None:
        """The F that follows used other scales than the epoch's, which its own dI then reports."""
        run = watched(epoch_run(GPIPE), lambda key, found: run.runtime.domain.move_scales())
        with pytest.raises(Refused) as caught:
            run.run(1)
        assert caught.value.clause == "order.wrong-scales"

    def test_an_update_that_moves_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The backend reports 0 movements."""
        run = epoch_run(GPIPE)
        monkeypatch.setattr(ReferenceDomain, "move_scales", lambda self: None)
        with pytest.raises(Refused) as caught:
            run.run(1)
        assert caught.value.clause == "order.scaling-updates"
        assert run.runtime.contract.half_updated

    def test_an_update_that_moves_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The backend reports 2 movements."""
        run, once = epoch_run(GPIPE), ReferenceDomain.move_scales

        def twice(domain: ReferenceDomain) -> None:
            once(domain)
            once(domain)

        monkeypatch.setattr(ReferenceDomain, "move_scales", twice)
        with pytest.raises(Refused) as caught:
            run.run(1)
        assert caught.value.clause == "order.scaling-updates"

    def test_an_update_that_forgets_the_contract(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The commit asks for the movement."""
        run = epoch_run(GPIPE)
        monkeypatch.setattr(type(run.runtime), "tell_moved", lambda *_: None)
        with pytest.raises(Refused) as caught:
            run.run(1)
        assert caught.value.clause == "order.scales-not-moved"


class TestDropout:
    def test_it_follows_from_the_microbatch_and_not_from_the_order(self) -> None:
        """By default the generator's position follows the order."""
        first, *others = (
            state_after(epoch_run(order, dropout=0.3)) for order in (GPIPE, ONE_BY_ONE, MIXED)
        )
        assert [differing(first, other) for other in others] == [[], []]
        assert not any("generator" in name for name in first)

    def test_every_layer_branch_microbatch_and_epoch_has_its_own_numbers(self) -> None:
        """And so has every stream; the same name gives the same numbers."""
        domain = ReferenceDomain(scales="epoch")
        ones = torch.ones(64)
        seen = set()
        for epoch, microbatch, layer, branch in [
            (e, m, n, b) for e in (0, 1) for m in (0, 1) for n in (0, 1) for b in (0, 1)
        ]:
            domain.begin_forward(epoch, microbatch)
            seen.add(tuple(domain.drop(ones, 0.5, layer, branch).tolist()))
        domain.random.stream = 1
        seen.add(tuple(domain.drop(ones, 0.5, 1, 1).tolist()))
        assert len(seen) == 17
        assert tuple(domain.drop(ones, 0.5, 1, 1).tolist()) in seen

    def test_it_has_the_bits_of_native(self) -> None:
        """Recorded value by recorded value."""
        run = epoch_run(MIXED, dropout=0.3)
        run.recording = Recording("guarded")
        run.run(2)
        assert_same(
            native(MIXED, 4, "accumulate", BF16, 2, TINY, dropout=0.3, scales="epoch"),
            run.recording,
        )
        without = native(MIXED, 4, "accumulate", BF16, 2, TINY, scales="epoch")
        assert compare(without, run.recording).mismatched > 0

    def test_an_unnamed_microbatch_is_refused(self) -> None:
        """A loop that forgets it would drop the same elements in every microbatch."""
        with pytest.raises(BackendError, match="begin_forward"):
            ReferenceDomain(scales="epoch").drop(torch.ones(4), 0.5)


class TestCalibration:
    def _domain(self) -> tuple[ReferenceDomain, Tensor, Tensor]:
        domain = ReferenceDomain(4, scales="epoch")
        (stage,) = [ReferenceStage(0, domain, TINY)]
        state = stage.numerical_state()
        return domain, state["layers.0.forward.amax_history"], state["layers.0.forward.scale"]

    def _walk(self, domain: ReferenceDomain, amaxes: Callable[[int], float]) -> Calibration:
        count = iter(range(100))

        def walk() -> None:
            n = next(count)
            for name, tensor in live_state(domain).items():
                if name.endswith("amax_history"):
                    assert not tensor.any()  # every walk begins with empty histories
                    tensor[0] = amaxes(n)

        return calibrate(domain, walk)

    def test_it_ends_once_scales_have_settled(self) -> None:
        """The last walk's entry stays alone, and its amax has made the scale."""
        domain, history, scale = self._domain()
        found = self._walk(domain, lambda n: [1e-4, 3.0, 5.0, 7.0][n])
        assert found == Calibration(3, True)
        assert bool((scale == 448.0 / 5.0).all())
        assert bool((history[-1] == 5.0).all())
        assert not history[:-1].any()

    def test_a_tensor_that_stays_zero_ends_it_too(self) -> None:
        """Training begins all the same, with the scale of 1 for this tensor."""
        domain, _, scale = self._domain()
        assert self._walk(domain, lambda n: 0.0) == Calibration(MOST_WALKS, False)
        assert bool((scale == 1.0).all())

    def test_all_processes_agree(self) -> None:
        """A process that has settled walks on while another has not."""
        domain, _, _ = self._domain()
        said: list[bool] = []

        def agree(settled: bool) -> bool:
            said.append(settled)
            return len(said) == 5

        def walk() -> None:
            for name, tensor in live_state(domain).items():
                if name.endswith("amax_history"):
                    tensor[0] = 448.0 if name.split(".")[-2] == "forward" else 57344.0

        assert calibrate(domain, walk, agree) == Calibration(5, True)
        assert said == [True] * 5
