"""
The fault table's seven rows as tests of a live runtime, whatever its executor and its device are.

A test checks that the fault is refused by the row's clause in the row's transition, and that it
changed nothing. Training then continues to its end and must give the result of an undisturbed
native run, bit for bit.
"""

from __future__ import annotations

from qeffect.gpu_runtime.lab.comparisons.faults import LocalReduction, abort_write
from qeffect.gpu_runtime.lab.comparisons.recording import Recording
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits
from qeffect.gpu_runtime.step.plan.order import ComputeAction, Kind

from .injection import ORDER, Injection, parameters_of


class FaultTable:
    """The paper's seven injections in six families, over the `injected` of a subclass."""

    def test_old_reference_after_slot_reuse(
        self, injected: Injection, undisturbed: Recording
    ) -> None:
        """A reference to the slot's previous tape does not give access to its current tape."""
        injected.until("1W0")
        old = injected.ref(1, 0)
        injected.until("1W2")
        (now,) = (key for key, ref in injected.contract.live().items() if ref.slot == old.slot)
        current = injected.ref(now.stage, now.microbatch)
        assert (current.slot, current.incarnation) == (old.slot, old.incarnation)
        assert current.generation > old.generation

        injected.row("old-reference", lambda: injected.actions.wgrad(now, old))
        # Nor is anything found under the name of the tenant that is gone.
        gone = injected.run.runtime.key(1, 0)
        injected.row("old-reference", lambda: injected.actions.wgrad(gone, old))

        injected.go_on(undisturbed)

    def test_repeated_dgrad(self, injected: Injection, undisturbed: Recording) -> None:
        """A second dI of a tape is refused, and would have rolled the backward scales twice."""
        injected.until("1W0")
        key, ref = injected.run.runtime.key(1, 0), injected.ref(1, 0)

        injected.row("repeated-dgrad", lambda: injected.actions.dgrad(key, ref))

        injected.go_on(undisturbed)

    def test_finalize_with_one_wgrad_missing(
        self, injected: Injection, undisturbed: Recording
    ) -> None:
        """
        An epoch without one dW cannot be finalized, and the weights stay unchanged; the dW can
        still run.
        """
        last = ORDER.steps[-1]
        assert last.kind is Kind.WGRAD
        injected.until(str(last))
        run = injected.run
        weights = [p.detach().clone() for p in parameters_of(run.runtime.stages[1])]
        # The stage that lacks it is the first, so that no other is final by then.
        assert last.stage == min(run.runtime.stages)

        injected.row("missing-wgrad", lambda: run.runtime.finish(run.optimizer))

        now = parameters_of(run.runtime.stages[1])
        assert all(same_bits(a, b) for a, b in zip(weights, now, strict=True))
        injected.go_on(undisturbed)

    def test_write_after_aborted_write(self, injected: Injection, undisturbed: Recording) -> None:
        """
        A dW that was aborted half way spoils the arena of its epoch; no later write is accepted.
        """
        injected.until("1W2")
        runtime = injected.run.runtime
        weights = [p.detach().clone() for p in parameters_of(runtime.stages[1])]
        abort_write(injected.run, ComputeAction(Kind.WGRAD, 1, 2))

        key, ref = runtime.key(1, 3), injected.ref(1, 3)
        injected.row("write-after-abort", lambda: injected.actions.wgrad(key, ref))
        injected.refused("arena.spoiled", lambda: runtime.finish(injected.run.optimizer))

        now = parameters_of(runtime.stages[1])
        assert all(same_bits(a, b) for a, b in zip(weights, now, strict=True))
        injected.start_over(undisturbed)

    def test_stale_weight_cache(self, injected: Injection, undisturbed: Recording) -> None:
        """F in a new epoch without a refresh is refused; after the refresh, F is accepted."""
        runtime = injected.run.runtime
        key = runtime.key(1, 0)
        inputs = Workload().inputs(runtime.stages[1], 1, 0)
        assert not runtime.stages[1].cache_is_current()

        injected.row("stale-cache", lambda: injected.actions.forward(key, inputs))

        injected.go_on(undisturbed)

    def test_checkpoint_with_a_live_tape(self, injected: Injection, undisturbed: Recording) -> None:
        """A checkpoint is withheld while any tape is live, and taken after the commit."""
        injected.until("1W2")
        injected.run.runtime.drain()

        injected.row("checkpoint-live-tape", injected.run.runtime.checkpoint)

        injected.go_on(undisturbed)
        saved, _ = injected.run.runtime.checkpoint()
        assert saved.epoch == injected.contract.epoch

    def test_checkpoint_with_a_reduction_in_flight(
        self, injected: Injection, undisturbed: Recording
    ) -> None:
        """A checkpoint inside a reduction is withheld; the reduction then finishes."""
        runtime, seen = injected.run.runtime, []

        def save() -> None:
            runtime.drain()
            injected.row("checkpoint-reduction", runtime.checkpoint)
            injected.refused("reduction.in-flight", injected.contract.commit_epoch)
            seen.append("both")

        assert isinstance(runtime.reducer, LocalReduction)
        runtime.reducer.during = save

        injected.go_on(undisturbed)

        assert ["both"] == seen
        runtime.checkpoint()
