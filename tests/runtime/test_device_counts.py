"""
Device counts over the reference backend: stand-in graphs count as captured graphs do, and eager
actions count as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from qeffect.counts import COUNTED, fold, mark
from qeffect.gpu_runtime.lab.comparisons.recording import Recording
from qeffect.gpu_runtime.step.eager import EagerExecutor, StageMemory
from qeffect.gpu_runtime.step.memory.arena import RULES, Rule
from qeffect.gpu_runtime.step.memory.counters import DeviceCounters
from qeffect.gpu_runtime.step.memory.slots import Slot
from qeffect.gpu_runtime.step.plan.slots import WgradVariant
from qeffect.refusals import Refused

from .device_counts import DeviceCountsCases, LateCountsCases, Replay
from .helpers import guarded_run
from .injection import ORDER, Injection
from .stand_ins import install


class TestStandIns(DeviceCountsCases):
    """
    Every fault that no guard sees.

    A stand-in that does not run leaves no tape behind, where a graph that is not replayed leaves
    its memory as it was; one that runs twice finds its tape gone, and autograd notices a buffer
    that is filled after its F. So a skipped one runs uncounted here, a repeated one runs once and
    is counted twice, and of two swapped ones each is counted as the other.
    """

    @pytest.fixture
    def injected(self, monkeypatch: pytest.MonkeyPatch) -> Injection:
        """A captured run before its second epoch."""
        install(monkeypatch)
        return Injection(captured=True, counts="commit")

    def skipped(self, injected: Injection, kind: str, place: int, replay: Replay) -> list[Replay]:
        """The action, uncounted."""
        counters = injected.run.runtime.counters
        assert counters is not None

        def uncounted() -> None:
            before = counters.values.clone()
            replay()
            counters.values.copy_(before)

        return [uncounted]

    def replaced(
        self, injected: Injection, own: tuple[str, int, Replay], other: tuple[str, int, Replay]
    ) -> list[Replay]:
        """The action itself, counted as the other one."""
        counters = injected.run.runtime.counters
        assert counters is not None
        return [*self.skipped(injected, *own), lambda: counters.ran(*other[:2])]

    def written(
        self, injected: Injection, own: tuple[str, int, Replay], writes: int, other: Replay
    ) -> list[Replay]:
        """The action itself, counted as one that writes in another way."""
        counters = injected.run.runtime.counters
        assert counters is not None
        return [*self.skipped(injected, *own), lambda: counters.ran("dW", own[1], writes)]

    def repeated(self, injected: Injection, kind: str, place: int, replay: Replay) -> list[Replay]:
        """The action, and its count once more."""
        counters = injected.run.runtime.counters
        assert counters is not None
        return [replay, lambda: counters.ran(kind, place)]


class TestLateStandIns(LateCountsCases, TestStandIns):
    """The same where the counters are compared beside the update."""

    @pytest.fixture
    def injected(self, monkeypatch: pytest.MonkeyPatch) -> Injection:
        """A captured run before its second epoch."""
        install(monkeypatch)
        return Injection(captured=True, counts="next step")


class TestEager:
    def test_nothing_disturbed(self, undisturbed: Recording) -> None:
        """Counting changes no bit and refuses nothing, also across a failure and a rebuild."""
        injected = Injection(counts="commit")
        injected.until("1W1")

        injected.start_over(undisturbed)

    def test_an_action_behind_the_guards(self, undisturbed: Recording) -> None:
        """A refresh by the executor itself is seen at the commit."""
        injected = Injection(counts="commit")
        runtime = injected.run.runtime
        runtime.executor.refresh(runtime.memories[1])

        injected.run.actions()
        with pytest.raises(Refused, match=r"epoch\.device-count") as caught:
            injected.run.finish()

        assert "stage 1: the device ran 3 refresh" == caught.value.found
        injected.start_over(undisturbed)

    @pytest.mark.parametrize("told", [True, False])
    def test_a_dw_into_another_microbatchs_destination(self, told: bool) -> None:
        """Two microbatches share a slot, and their dW write in the same way to two buffers."""
        run = guarded_run(ORDER, rule="per_microbatch", counts="commit")
        runtime = run.runtime
        executor = runtime.executor
        assert isinstance(executor, EagerExecutor)
        memory = next(m for m in runtime.memories.values() if len({*m.slot_of}) < len(m.slot_of))
        slot = next(s for s in memory.slot_of if memory.slot_of.count(s) > 1)
        a, b, *_ = (m for m, s in enumerate(memory.slot_of) if s == slot)
        own, other = memory.variants[a], memory.variants[b]
        assert (own.writes, own.destination) != (other.writes, other.destination)
        assert own.writes == other.writes
        run.run(1)
        wgrad = executor.wgrad

        def elsewhere(
            held: StageMemory, at: Slot, variant: WgradVariant, others: Sequence[Slot] = ()
        ) -> tuple[str, ...]:
            wrong = held is memory and at.index == slot and variant == own
            if wrong and not told:  # as marks were that did not tell destinations apart
                at.tape.bound = memory.arena.buffers(other.destination)
                covered = memory.stage.wgrad(at.tape, accumulate=False).covered
                executor._count("dW", at.index, own.writes, memory.located(own.destination))
                return memory.evidence(covered)
            return wgrad(held, at, other if wrong else variant, others)

        executor.wgrad = elsewhere  # type: ignore[method-assign]
        if told:
            with pytest.raises(Refused, match=r"^epoch\.device-order"):
                run.run(1)
            assert 1 == runtime.epoch
        else:
            run.run(1)
            assert 2 == runtime.epoch

    @pytest.mark.parametrize("rule", RULES)
    def test_every_rule_counts_as_the_contract_does(self, rule: Rule) -> None:
        """Honest steps are accepted wherever dW writes."""
        run = guarded_run(ORDER, rule=rule, counts="commit")
        run.run(2)

        assert 2 == run.runtime.epoch

    def test_off_by_default(self) -> None:
        """Without the configuration nothing counts, and the same fault goes unseen."""
        injected = Injection()
        runtime = injected.run.runtime
        runtime.executor.refresh(runtime.memories[1])
        injected.run.step()

        assert 2 == runtime.epoch
        assert runtime.counters is None
        assert runtime.device_counts() is None

    def test_a_restored_checkpoint_counts_from_zero(self) -> None:
        """Both sides begin again with the new incarnation."""
        injected = Injection(counts="commit")
        runtime = injected.run.runtime
        runtime.restore(*runtime.checkpoint())
        injected.run.step()

        counts = runtime.device_counts()
        assert counts is not None
        (own,) = counts.values()
        assert {1} == {numbers[0] for numbers in own.stages.values()}


class TestCounters:
    def test_as_the_contract_folds(self) -> None:
        """The device's integers wrap around as the contract's arithmetic does."""
        counters = DeviceCounters([(3, 0), (3, 1), (5, 2)], torch.device("cpu"))
        digest = 0
        for n in range(100):
            action, place = (("F", 0), ("dW", 2), ("refresh", 5), ("dI", 1))[n % 4]
            counters.ran(action, place)
            digest = fold(digest, mark(action, place))
        counters.read()

        found = counters.taken()

        assert digest == found.digest
        assert {3: (0, 25, 25, 0), 5: (25, 0, 0, 25)} == found.stages
        assert ("refresh", "F", "dI", "dW") == COUNTED

    def test_warming_leaves_nothing(self) -> None:
        """What loads the kernel before a capture is not counted."""
        counters = DeviceCounters([(0, 0)], torch.device("cpu"))
        counters.warm()
        counters.read()

        assert (0, {0: (0, 0, 0, 0)}) == (counters.taken().digest, counters.taken().stages)
