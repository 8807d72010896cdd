"""
Every row of the paper's fault table, injected into a running runtime over real tensors.

Each test says where the fault is refused and what it left as it was, and then goes on to the end of
training: what comes out must be what an undisturbed native run gives, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from qeffect.gpu_runtime.evidence.comparison import Recording
from qeffect.gpu_runtime.measure.workload import Workload
from qeffect.gpu_runtime.memory.state import same_bits
from qeffect.gpu_runtime.plan.order import Kind, Step
from qeffect.refusals import Refused

from .helpers import guarded_run
from .injection import ORDER, Injection, half_a_wgrad, parameters_of


class TestFaultTable:
    """The paper's seven injections in six families."""

    def test_old_reference_after_slot_reuse(self, undisturbed: Recording) -> None:
        """A reference to a slot's last tenant is stale; the tenant of now is left alone."""
        injected = Injection()
        injected.until("1W0")
        key, old = injected.run.runtime.key(1, 0), injected.ref(1, 0)
        injected.until("1W2")
        tenants = {ref.slot for ref in injected.contract.live().values()}
        assert old.slot in tenants

        injected.refused(
            "ownership.stale-reference", lambda: injected.actions.weight_gradient(key, old)
        )
        injected.refused(
            "ownership.stale-reference",
            lambda: injected.actions.input_gradient(key, old, [torch.zeros(16, 1, 32).bfloat16()]),
        )

        injected.go_on(undisturbed)

    def test_repeated_dgrad(self, undisturbed: Recording) -> None:
        """A second dI of a tape is refused, and would have rolled the backward scales twice."""
        injected = Injection()
        injected.until("1W0")
        key, ref = injected.run.runtime.key(1, 0), injected.ref(1, 0)

        injected.refused(
            "ownership.duplicate-dgrad", lambda: injected.actions.input_gradient(key, ref)
        )

        injected.go_on(undisturbed)

    def test_finalize_with_one_wgrad_missing(self, undisturbed: Recording) -> None:
        """An epoch that lacks one dW is not final, and the weights stay; the dW can still come."""
        injected = Injection()
        last = ORDER.steps[-1]
        assert last.kind is Kind.WGRAD
        injected.until(str(last))
        stage = injected.run.runtime.stages[1]
        weights = [p.detach().clone() for p in parameters_of(stage)]

        with pytest.raises(Refused) as caught:
            injected.run.runtime.finish(injected.run.optimizer)

        assert caught.value.clause in ("arena.incomplete", "epoch.incomplete")
        assert all(same_bits(a, b) for a, b in zip(weights, parameters_of(stage), strict=True))
        injected.go_on(undisturbed)

    def test_write_after_aborted_write(
        self, undisturbed: Recording, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A dW that raises spoils its epoch's arena; the next write cannot even be bound."""
        injected = Injection()
        injected.until("1W0")
        runtime, stage = injected.run.runtime, injected.run.runtime.stages[1]
        weights = [p.detach().clone() for p in parameters_of(stage)]
        with monkeypatch.context() as broken:
            broken.setattr(stage, "weight_gradient", half_a_wgrad(stage.weight_gradient))
            with pytest.raises(RuntimeError, match="injected"):
                injected.act(Step(Kind.WGRAD, 1, 0))

        key = runtime.key(1, 3)
        assert injected.contract.memory.bound[key.cell] != key.epoch
        injected.refused("arena.unusable", lambda: injected.actions.bind(key))
        with pytest.raises(Refused) as caught:
            runtime.finish(injected.run.optimizer)

        assert "order.incomplete" == caught.value.clause
        assert all(same_bits(a, b) for a, b in zip(weights, parameters_of(stage), strict=True))
        injected.start_over(undisturbed)

    def test_stale_weight_cache(self, undisturbed: Recording) -> None:
        """F in a new epoch without a refresh is refused; after the refresh it goes on."""
        injected = Injection()
        key = injected.run.runtime.key(1, 0)
        inputs = Workload().inputs(injected.run.runtime.stages[1], 1, 0)
        assert not injected.run.runtime.stages[1].cache_is_current()

        injected.refused("version.stale-cache", lambda: injected.actions.forward(key, inputs))

        injected.go_on(undisturbed)

    def test_checkpoint_with_a_live_tape(self, undisturbed: Recording) -> None:
        """A checkpoint is withheld while any tape is live."""
        injected = Injection()
        injected.until("1W2")

        with pytest.raises(Refused) as caught:
            injected.run.runtime.checkpoint()

        assert "persistence" == caught.value.relation
        injected.go_on(undisturbed)

    def test_checkpoint_with_a_reduction_in_flight(self, undisturbed: Recording) -> None:
        """A checkpoint inside a reduction is withheld; the reduction then finishes."""
        seen: list[str] = []

        def reduce(stage: int, gradients: Mapping[str, torch.Tensor]) -> None:
            for act in (injected.run.runtime.checkpoint, injected.contract.commit_epoch):
                with pytest.raises(Refused) as caught:
                    act()
                seen.append(caught.value.clause)

        injected = Injection.__new__(Injection)
        injected.run = guarded_run(ORDER, reducer=reduce)
        injected.actions = injected.run.runtime.actions
        injected.contract = injected.run.runtime.contract
        injected.done = []

        injected.go_on(undisturbed)

        assert {"persistence", "epoch", "reduction"} >= {clause.split(".")[0] for clause in seen}
        assert "reduction.in-flight" in seen
