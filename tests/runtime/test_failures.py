"""
Failures that only a running runtime has: actions that raise, dW that is not deferred, memory that
moves, and streams without a wait. As with the fault table, training then ends bit for bit as if
nothing had happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch

from qeffect.gpu_runtime.backends.protocol import BackendError, StageBackend
from qeffect.gpu_runtime.backends.reference import ReferenceStage
from qeffect.gpu_runtime.backends.reference.linear import ScaledLinear
from qeffect.gpu_runtime.lab.comparisons.recording import Recording, compare
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.step.memory.numerical_state import NumericalState
from qeffect.gpu_runtime.step.plan.order import ComputeAction, Kind, Order
from qeffect.refusals import Refused

from .helpers import guarded_run
from .injection import FINAL, NUM_STEPS, ORDER, Injection, boom, final_of


def linears_of(stage: StageBackend) -> tuple[ScaledLinear, ...]:
    """The products of a reference stage, in the order of F."""
    assert isinstance(stage, ReferenceStage)
    return stage.linears


class TestActionsThatRaise:
    def test_a_forward_that_raises_poisons_its_domain(
        self, undisturbed: Recording, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """F that raises has rolled the scales: the domain is poisoned until it is rebuilt."""
        injected = Injection()
        injected.until("2F1")
        runtime = injected.run.runtime
        before = NumericalState.of(runtime.domain)
        with monkeypatch.context() as broken:
            broken.setattr(linears_of(runtime.stages[2])[3], "forward", boom)
            with pytest.raises(RuntimeError, match="injected"):
                injected.act(ComputeAction(Kind.FORWARD, 2, 1))
        assert NumericalState.of(runtime.domain).differences(before)

        key = runtime.key(1, 2)
        inputs = Workload().inputs(runtime.stages[1], 1, 2)
        injected.refused("order.poisoned", lambda: injected.actions.forward(key, inputs))

        injected.start_over(undisturbed)

    def test_a_dgrad_that_raises_poisons_its_domain_and_drops_its_tape(
        self, undisturbed: Recording, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """dI that raises half way poisons the domain and drops its tape."""
        injected = Injection()
        injected.until("1I1")
        runtime = injected.run.runtime
        with monkeypatch.context() as broken:
            broken.setattr(linears_of(runtime.stages[1])[0], "quantize_gradient", boom)
            with pytest.raises(RuntimeError, match="injected"):
                injected.act(ComputeAction(Kind.DGRAD, 1, 1))
        assert runtime.key(1, 1) not in injected.contract.live()

        key = runtime.key(2, 3)
        inputs = Workload().inputs(runtime.stages[2], 1, 3)
        injected.refused("order.poisoned", lambda: injected.actions.forward(key, inputs))

        injected.start_over(undisturbed)

    def test_a_refresh_that_raises_poisons_its_domain(
        self, undisturbed: Recording, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A refresh that raises half way poisons the domain: amaxes were recorded."""
        injected = Injection()
        runtime = injected.run.runtime
        with monkeypatch.context() as broken:
            broken.setattr(runtime.stages[1], "refresh_cache", boom)
            with pytest.raises(RuntimeError, match="injected"):
                injected.actions.refresh(1)

        injected.refused("order.poisoned", lambda: injected.actions.refresh(1))

        injected.start_over(undisturbed)

    def test_an_update_that_raises_leaves_weights_that_nothing_covers(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An update that raises half way leaves weights that no snapshot covers."""
        injected = Injection()
        for step in ORDER.steps:
            injected.act(step)
        monkeypatch.setattr(injected.run.optimizer, "update", boom)
        with pytest.raises(RuntimeError, match="injected"):
            injected.run.finish()

        runtime = injected.run.runtime
        for act in (runtime.rebuild, runtime.checkpoint, lambda: injected.actions.refresh(1)):
            with pytest.raises(BackendError, match="load a checkpoint into a new runtime"):
                act()

    def test_a_reduction_that_fails_stops_the_commit_until_a_rebuild(
        self, undisturbed: Recording
    ) -> None:
        """A reduction that fails makes the epoch uncommittable; rebuilt, it goes on."""
        failing = [True]

        def reduce(bucket: int | str, gradients: Mapping[str, torch.Tensor]) -> None:
            if failing:
                raise ConnectionError("injected")

        run = guarded_run(ORDER, reducer=reduce)
        with pytest.raises(ConnectionError, match="injected"):
            run.step()
        with pytest.raises(Refused) as caught:
            run.runtime.contract.commit_epoch()
        assert caught.value.relation in ("epoch", "reduction")
        failing.clear()

        run.runtime.rebuild()
        while run.runtime.epoch < NUM_STEPS:
            run.step()

        stages = list(run.runtime.stages.values())
        result = compare(undisturbed, final_of(stages, run.optimizer), categories=FINAL)
        assert result.mismatched == 0, str(result)


class TestTheWholeStepIsAborted:
    """An action that fails ends every outstanding tape of its domain, not its own alone."""

    @pytest.mark.parametrize(
        ("cell", "kind"),
        [("2F1", "forward"), ("1I1", "dgrad"), ("1W1", "wgrad")],
    )
    def test_by_an_action_that_raises(
        self, cell: str, kind: str, undisturbed: Recording, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """F, dI or dW that raises drops the others of every stage; their references are stale."""
        injected = Injection()
        injected.until(cell)
        runtime, step = injected.run.runtime, Order.parse(cell).steps[0]
        before = injected.contract.live()
        others = {k: r for k, r in before.items() if (k.stage, k.microbatch) != step[1:]}
        assert {1, 2} == {key.stage for key in others}
        with monkeypatch.context() as broken:
            broken.setattr(runtime.executor, kind, boom)
            with pytest.raises(RuntimeError, match="injected"):
                injected.act(step)

        assert {} == injected.contract.live()
        for key, ref in before.items():
            slot = runtime.memories[key.stage].table[ref.slot]
            assert not slot.tape.work
            assert () == (*slot.tape.inputs, *slot.tape.outputs, *slot.outputs)
        for key, ref in others.items():
            injected.refused(
                "ownership.stale-reference",
                lambda key=key, ref=ref: injected.actions.wgrad(key, ref),  # type: ignore[misc]
            )
        injected.start_over(undisturbed)

    def test_by_a_refresh_that_raises(
        self, undisturbed: Recording, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A stage whose refresh fails ends the tapes of the stage before it."""
        injected = Injection()
        stage = max(injected.run.runtime.stages)
        first = next(step for step in ORDER.steps if step.stage == stage)
        injected.until(str(first))
        assert injected.contract.live()
        with monkeypatch.context() as broken:
            broken.setattr(injected.run.runtime.executor, "refresh", boom)
            with pytest.raises(RuntimeError, match="injected"):
                injected.actions.refresh(stage)

        assert {} == injected.contract.live()
        injected.start_over(undisturbed)

    def test_by_evidence_that_falls_short(
        self, undisturbed: Recording, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """dW that covers less than every matrix ends all other tapes as well."""
        injected = Injection()
        injected.until("1W1")
        assert 1 < len(injected.contract.live())
        with monkeypatch.context() as broken:
            broken.setattr(injected.run.runtime.executor, "wgrad", lambda *_: ())
            with pytest.raises(Refused) as caught:
                injected.act(ComputeAction(Kind.WGRAD, 1, 1))

        assert "ownership.matrix-coverage" == caught.value.clause
        assert {} == injected.contract.live()
        injected.start_over(undisturbed)

    def test_not_by_a_refusal(self, undisturbed: Recording) -> None:
        """A refused call is not a failure: every tape stays, and the epoch continues."""
        injected = Injection()
        injected.until("1W0")
        live = injected.contract.live()
        key, ref = injected.run.runtime.key(1, 0), injected.ref(1, 0)

        injected.refused("ownership.duplicate-dgrad", lambda: injected.actions.dgrad(key, ref))

        assert live == injected.contract.live()
        injected.go_on(undisturbed)

    def test_by_the_loop(self, undisturbed: Recording) -> None:
        """A loop whose transfer failed aborts all tapes itself; the epoch cannot commit."""
        injected = Injection()
        injected.until("1W2")
        live = len(injected.contract.live())
        assert 1 < live

        assert live == injected.run.runtime.abort()
        assert 0 == injected.run.runtime.abort()

        with pytest.raises(Refused) as caught:
            injected.run.finish()
        assert "arena.spoiled" == caught.value.clause
        injected.start_over(undisturbed)

    @pytest.mark.parametrize("late", [False, True])
    def test_a_log_that_is_full_at_the_check_of_the_update(self, late: bool) -> None:
        """The check has happened and the update has not: nothing goes on from there."""
        injected = Injection(counts="next step" if late else None)
        injected.run.actions()

        def full(transition: str, *_: Any) -> None:
            if transition == "check_update":
                raise OSError("full")

        injected.contract.observer = full
        with pytest.raises(OSError, match=r"^full$"):
            injected.run.finish()
        injected.contract.observer = None

        with pytest.raises(BackendError, match="an update of the weights failed half way"):
            injected.run.runtime.rebuild()
        assert injected.contract.half_updated
        assert () == injected.contract.outstanding()

    def test_by_a_fault_that_is_seen_late(self) -> None:
        """A fault of the epoch spoils it; one of an epoch that was committed, the weights."""
        injected = Injection()
        runtime = injected.run.runtime
        injected.run.actions()
        runtime.fail(1)
        with pytest.raises(Refused, match=r"^arena\.spoiled"):
            injected.run.finish()

        runtime.rebuild()
        injected.run.actions()
        injected.run.finish()
        runtime.fail(1, epoch=runtime.epoch - 1)
        with pytest.raises(BackendError, match="gradients in which a fault was found only later"):
            injected.run.actions()

    def test_by_a_device_error_that_a_wait_meets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The last update may have failed, so nothing is saved even if the device answers again."""
        injected = Injection()
        runtime = injected.run.runtime
        injected.run.actions()
        injected.run.finish()
        with monkeypatch.context() as patched:

            def failing(_: Any) -> None:
                raise torch.AcceleratorError("an injected device error")

            patched.setattr(type(runtime.handoff), "synchronize", failing)
            with pytest.raises(torch.AcceleratorError, match="an injected device error"):
                runtime.checkpoint()

        assert injected.contract.half_updated
        with pytest.raises(BackendError, match="gradients in which a fault was found only later"):
            runtime.checkpoint()
        with pytest.raises(BackendError, match="gradients in which a fault was found only later"):
            injected.run.actions()

    def test_by_an_update_beside_a_reader_of_the_weights(self) -> None:
        """The refusal comes before the optimizer runs; after the read's end the update runs."""
        injected = Injection()
        runtime = injected.run.runtime
        epoch = runtime.epoch
        runtime.start_weights_read(1)
        injected.run.actions()
        gradients = runtime.finalize()
        with pytest.raises(Refused, match=r"^completion\.weights-in-use in check_update"):
            runtime.update(injected.run.optimizer, gradients)

        runtime.finish_weights_read(1)
        assert epoch + 1 == runtime.update(injected.run.optimizer, gradients)
        runtime.start_weights_read(1)  # the caller has waited for the update

    def test_an_optimizer_that_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The epoch did not end, and neither an action nor a checkpoint is accepted."""
        injected = Injection()
        injected.run.actions()
        epoch = injected.contract.epoch

        def raising(*_: Any, **__: Any) -> None:
            raise MemoryError("half way")

        monkeypatch.setattr(injected.run.optimizer, "step", raising)
        with pytest.raises(MemoryError, match=r"^half way$"):
            injected.run.finish()

        assert epoch == injected.contract.epoch
        injected.run.runtime.drain()
        with pytest.raises(BackendError, match="an update of the weights failed half way"):
            injected.run.runtime.checkpoint()
        with pytest.raises(Refused, match=r"^persistence\.half-updated"):
            injected.contract.checkpoint()

    def test_a_log_that_is_full_at_the_commit(self) -> None:
        """The update was enqueued whole and its commit has happened: a rebuild goes on from it."""
        injected = Injection()
        injected.run.actions()
        epoch = injected.contract.epoch

        def full(transition: str, *_: Any) -> None:
            if transition == "commit_update":
                raise OSError("full")

        injected.contract.observer = full
        with pytest.raises(OSError, match=r"^full$"):
            injected.run.finish()
        injected.contract.observer = None

        assert epoch + 1 == injected.contract.epoch
        injected.run.runtime.rebuild()
        assert epoch + 1 == injected.contract.epoch
        injected.run.step()
        assert epoch + 2 == injected.contract.epoch

    def test_a_reserved_slot_too(self, undisturbed: Recording) -> None:
        """A slot that was reserved for a receive is free again."""
        injected = Injection()
        injected.until("1W1")
        free = {stage: len(own) for stage, own in injected.contract._free.items()}
        step = next(s for s in ORDER.steps[len(injected.done) :] if s.kind is Kind.FORWARD)
        injected.actions.reserve(injected.run.runtime.key(step.stage, step.microbatch))

        injected.run.runtime.abort()

        slots = injected.run.runtime.plan.num_slots
        assert free != slots
        assert slots == {stage: len(own) for stage, own in injected.contract._free.items()}
        injected.start_over(undisturbed)


class TestEvidence:
    def test_work_not_queued(self, undisturbed: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
        """dI that deferred less than every matrix is refused at its commit."""
        injected = Injection()
        injected.until("1I1")
        stage = injected.run.runtime.stages[1]
        with monkeypatch.context() as broken:
            real = stage.dgrad

            def without_one(tape: Any, gradients: Any) -> Any:
                result = real(tape, gradients)
                tape.work.pop()
                return attrs.evolve(result, queued=tape.queued)

            broken.setattr(stage, "dgrad", without_one)
            with pytest.raises(Refused) as caught:
                injected.act(ComputeAction(Kind.DGRAD, 1, 1))

        assert "ownership.work-not-queued" == caught.value.clause
        injected.start_over(undisturbed)

    @pytest.mark.parametrize("twice", [False, True])
    def test_a_matrix_covered_twice_or_never_is_refused_at_the_commit(
        self, undisturbed: Recording, monkeypatch: pytest.MonkeyPatch, twice: bool
    ) -> None:
        """dW that covers a matrix twice, or not at all, is refused at its commit."""
        injected = Injection()
        injected.until("1W1")
        stage = injected.run.runtime.stages[1]
        with monkeypatch.context() as broken:
            real = stage.wgrad

            def other(tape: Any, **options: Any) -> Any:
                if twice:
                    tape.work.append(tape.work[0])
                else:
                    tape.work.pop()
                return real(tape, **options)

            broken.setattr(stage, "wgrad", other)
            with pytest.raises(Refused) as caught:
                injected.act(ComputeAction(Kind.WGRAD, 1, 1))

        assert "ownership.matrix-coverage" == caught.value.clause
        injected.start_over(undisturbed)

    def test_swapped_destinations_are_refused_at_bind_and_at_wgrad(
        self, undisturbed: Recording
    ) -> None:
        """A destination whose memory was swapped is refused at bind, and again at dW."""
        injected = Injection()
        injected.until("1I1")
        key = injected.run.runtime.key(1, 1)
        buffer = (injected.run.runtime.memories[1].arena.destinations(1) or {})["layers.0.fc1"]
        right = buffer.data
        buffer.data = right.clone()
        injected.refused("arena.mismatch", lambda: injected.actions.bind(key))
        buffer.data = right
        injected.until("1W1")
        ref = injected.ref(1, 1)
        buffer.data = right.clone()

        injected.refused("arena.mismatch", lambda: injected.actions.wgrad(key, ref))

        buffer.data = right
        injected.go_on(undisturbed)


class TestOrderAndTime:
    def test_refresh_too_early(self, undisturbed: Recording) -> None:
        """Refreshing a stage and then running another's F first is refused."""
        injected = Injection()
        injected.actions.refresh(1)

        injected.refused("version.refresh-interrupted", lambda: injected.actions.refresh(2))

        injected.run._added = dict.fromkeys(injected.run.runtime.stages, 0)
        injected.run._refs.clear()
        injected.run.act(ORDER.steps[0])
        injected.done.append(ORDER.steps[0])
        injected.go_on(undisturbed)

    def test_a_forward_out_of_the_declared_order_is_refused(self, undisturbed: Recording) -> None:
        """An F out of the declared order of the state domain is refused."""
        injected = Injection()
        injected.until("1F1")
        stage = injected.run.runtime.stages[1]
        key = injected.run.runtime.key(1, 2)

        injected.refused(
            "order.reordered",
            lambda: injected.actions.forward(key, Workload().inputs(stage, 1, 2)),
        )

        injected.go_on(undisturbed)

    def test_no_wait_for_caller(
        self, undisturbed: Recording, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A replay that did not wait for its caller is refused."""
        injected = Injection()
        injected.until("1W1")
        key, ref = injected.run.runtime.key(1, 1), injected.ref(1, 1)

        with monkeypatch.context() as broken:
            broken.setattr(injected.contract, "enter", lambda link: injected.contract.submit())
            injected.refused(
                "completion.caller-to-graph",
                lambda: injected.actions.wgrad(key, ref),
            )

        injected.go_on(undisturbed)

    def test_no_wait_for_graph(
        self, undisturbed: Recording, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Reading an output before the caller waited for the replay is refused."""
        injected = Injection()
        injected.until("1F1")
        key = injected.run.runtime.key(1, 1)
        inputs = Workload().inputs(injected.run.runtime.stages[1], 1, 1)
        with monkeypatch.context() as broken:
            broken.setattr(injected.contract, "wait", lambda link: None)
            ref = injected.actions.forward(key, inputs)

        injected.refused("completion.graph-to-caller", lambda: injected.actions.outputs(key, ref))

        injected.contract.wait()
        injected.actions.outputs(key, ref)
        injected.actions.finish_outputs(key, ref)
        injected.run._refs[key] = ref
        injected.done.append(ComputeAction(Kind.FORWARD, 1, 1))
        injected.go_on(undisturbed)

    def test_old_references_after_rebuild(self, undisturbed: Recording) -> None:
        """After a rebuild every older reference is of a foreign incarnation."""
        injected = Injection()
        injected.until("1W0")
        old = injected.ref(1, 0)
        injected.run.runtime.rebuild()
        injected.done.clear()
        injected.until("1W0")

        injected.refused(
            "ownership.foreign-incarnation",
            lambda: injected.actions.wgrad(injected.run.runtime.key(1, 0), old),
        )

        injected.go_on(undisturbed)
