"""
Tests of device counts in a live runtime, for any device. The commit of a step refuses a replay that
bypassed the guards, a skipped replay, a replay that ran twice, and two swapped replays. Then the
step is run again, and training ends with the bits of an undisturbed native run.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from qeffect.gpu_runtime.lab.comparisons.recording import Recording
from qeffect.gpu_runtime.step.graphs import GraphExecutor
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits
from qeffect.refusals import Refused
from qeffect.relations.constants import ADDS, OVERWRITES

from .injection import Injection, parameters_of

Replay = Callable[[], object]


class Replays:
    """
    Every graph of an executor, replayed as a test requests.

    Args:
        executor: The executor; its graphs are replaced by graphs that first consult this object.

    Attributes:
        ran: Kind, position and replay of every requested graph, in order.
        instead: Replacements of some replays, by their position in `ran`.
        variants: The graphs of each slot's dW, by whether the dW overwrites or adds.
    """

    def __init__(self, executor: GraphExecutor) -> None:
        self.ran: list[tuple[str, int, Replay]] = []
        self.instead: dict[int, list[Replay]] = {}
        self.variants: dict[int, dict[int, Replay]] = {}
        for product, captured in executor.wgrads.items():
            index = product.slots[0]
            held = self.variants.setdefault(index, {})
            held[product.variant.writes] = captured.graph.replay
            graph: Any = self._of("dW", index, captured.graph)
            executor.wgrads[product] = attrs.evolve(captured, graph=graph)
        for index, slot in executor.slots.items():
            slot.forward = self._of("F", index, slot.forward)
            slot.dgrad = self._of("dI", index, slot.dgrad)
        for stage, graph in executor.refreshes.items():
            executor.refreshes[stage] = self._of("refresh", stage, graph)

    def _of(self, kind: str, place: int, graph: object) -> SimpleNamespace:  # stands for a graph
        replay: Replay = graph.replay  # type: ignore[attr-defined]

        def replayed() -> None:
            number = len(self.ran)
            self.ran.append((kind, place, replay))
            for each in self.instead.get(number, [replay]):
                each()

        return SimpleNamespace(replay=replayed)

    def places(self, kind: str) -> list[int]:
        """The positions in `ran` of the graphs of a kind."""
        return [n for n, (own, _, _) in enumerate(self.ran) if own == kind]


class DeviceCountsCases:
    """Faults that no guard sees, over the `injected` of a subclass."""

    @pytest.fixture
    def replays(self, injected: Injection) -> Replays:
        """
        The graphs of a run before its third epoch; the replays of the second epoch are recorded.
        """
        executor = injected.run.runtime.executor
        assert isinstance(executor, GraphExecutor)
        made = Replays(executor)
        injected.run.step()
        return made

    def skipped(self, injected: Injection, kind: str, place: int, replay: Replay) -> list[Replay]:
        """The replacement that skips a graph; on a device, a replay of nothing."""
        return []

    def repeated(self, injected: Injection, kind: str, place: int, replay: Replay) -> list[Replay]:
        """The replacement that runs a graph twice; on a device, two replays of the graph."""
        return [replay, replay]

    def replaced(
        self, injected: Injection, own: tuple[str, int, Replay], other: tuple[str, int, Replay]
    ) -> list[Replay]:
        """The replacement that runs another graph instead; on a device, a replay of that graph."""
        return [other[2]]

    def written(
        self, injected: Injection, own: tuple[str, int, Replay], writes: int, other: Replay
    ) -> list[Replay]:
        """
        The replacement with which a dW writes in another way; on a device, a replay of the other
        graph.
        """
        return [other]

    def refused(
        self, clause: str, injected: Injection, replays: Replays, undisturbed: Recording
    ) -> str:
        """The commit of the disturbed step is refused, and no weight has moved."""
        run, runtime = injected.run, injected.run.runtime
        weights = {
            n: [p.detach().clone() for p in parameters_of(s)] for n, s in runtime.stages.items()
        }
        epoch = runtime.epoch
        run.actions()
        with pytest.raises(Refused) as caught:
            run.finish()

        assert (clause, "check_update") == (caught.value.clause, caught.value.transition)
        assert epoch == runtime.epoch
        for n, stage in runtime.stages.items():
            for before, now in zip(weights[n], parameters_of(stage), strict=True):
                assert same_bits(before, now.detach())
        replays.instead.clear()
        injected.start_over(undisturbed)
        return str(caught.value.found)

    def shifted(self, replays: Replays, *places: int) -> list[int]:
        """The same positions in the next epoch."""
        return [len(replays.ran) + place for place in places]

    def test_nothing_disturbed(
        self, injected: Injection, replays: Replays, undisturbed: Recording
    ) -> None:
        """Counting changes no bit and refuses nothing."""
        while injected.run.runtime.epoch < 3:
            injected.run.step()

        injected.assert_final(undisturbed)
        counts = injected.run.runtime.device_counts()
        assert counts is not None
        (own,) = counts.values()
        runtime = injected.run.runtime
        microbatches = runtime.order.num_microbatches
        assert {s: (3, *[3 * microbatches] * 3) for s in runtime.stages} == own.stages

    @pytest.mark.parametrize("kind", ["refresh", "F", "dI", "dW"])
    def test_a_skipped_replay(
        self, kind: str, injected: Injection, replays: Replays, undisturbed: Recording
    ) -> None:
        """A graph that was not launched although its action was committed."""
        place = replays.places(kind)[-1]
        (at,) = self.shifted(replays, place)
        replays.instead[at] = self.skipped(injected, *replays.ran[place])

        found = self.refused("epoch.device-count", injected, replays, undisturbed)
        assert f" {kind}" in found

    @pytest.mark.parametrize("kind", ["refresh", "F", "dI", "dW"])
    def test_a_replay_that_ran_twice(
        self, kind: str, injected: Injection, replays: Replays, undisturbed: Recording
    ) -> None:
        """A graph that was launched twice for one action."""
        place = replays.places(kind)[0]
        (at,) = self.shifted(replays, place)
        replays.instead[at] = self.repeated(injected, *replays.ran[place])

        found = self.refused("epoch.device-count", injected, replays, undisturbed)
        assert f" {kind}" in found

    @pytest.mark.parametrize("writes", [ADDS, OVERWRITES])
    def test_a_dw_that_writes_in_another_way(
        self, writes: int, injected: Injection, replays: Replays, undisturbed: Recording
    ) -> None:
        """The slot's graph that adds runs in place of the graph that overwrites, or the reverse."""
        place, other = next(
            (n, graphs[writes])
            for n in replays.places("dW")
            if writes in (graphs := replays.variants[replays.ran[n][1]])
            and graphs[writes] != replays.ran[n][2]  # bound methods: equal, not identical
        )
        (at,) = self.shifted(replays, place)
        replays.instead[at] = self.written(injected, replays.ran[place], writes, other)

        found = self.refused("epoch.device-order", injected, replays, undisturbed)
        assert "order that ran" in found

    def test_a_replay_behind_the_guards(
        self, injected: Injection, replays: Replays, undisturbed: Recording
    ) -> None:
        """An unrequested refresh before the step: all of its effects stay within legal memory."""
        with injected.run.runtime.caller_scope():
            replays.ran[replays.places("refresh")[0]][2]()

        found = self.refused("epoch.device-count", injected, replays, undisturbed)
        assert "refresh" in found

    def test_two_microbatches_exchanged(
        self, injected: Injection, replays: Replays, undisturbed: Recording
    ) -> None:
        """
        The F of two microbatches of one stage are exchanged: each runs in the slot of the other
        microbatch.
        """
        self._exchanged(injected, replays, undisturbed, same_stage=True)

    def test_two_stages_exchanged(
        self, injected: Injection, replays: Replays, undisturbed: Recording
    ) -> None:
        """The F of two stages of one domain are exchanged."""
        self._exchanged(injected, replays, undisturbed, same_stage=False)

    def _exchanged(
        self, injected: Injection, replays: Replays, undisturbed: Recording, *, same_stage: bool
    ) -> None:
        owner = {s.index: n for n, m in injected.run.runtime.memories.items() for s in m.table}
        later = min(replays.places("dI"))
        forwards = [n for n in replays.places("F") if n < later]
        a, b = next(
            (a, b)
            for a in forwards
            for b in forwards
            if a < b
            and replays.ran[a][1] != replays.ran[b][1]
            and (owner[replays.ran[a][1]] == owner[replays.ran[b][1]]) is same_stage
        )
        first, second = self.shifted(replays, a, b)
        one, two = replays.ran[a], replays.ran[b]
        replays.instead[first] = self.replaced(injected, one, two)
        replays.instead[second] = self.replaced(injected, two, one)

        found = self.refused("epoch.device-order", injected, replays, undisturbed)
        assert "order that ran" in found


class LateCountsCases(DeviceCountsCases):
    """
    The same faults if the device compares the counts: no weight changes, and the host learns of the
    fault later.
    """

    def refused(
        self, clause: str, injected: Injection, replays: Replays, undisturbed: Recording
    ) -> str:
        """
        The disturbed step ends, and the end of the next step is refused; no weight changes between
        them.
        """
        run, runtime = injected.run, injected.run.runtime
        before = self.kept(injected)
        epoch = runtime.epoch
        run.actions()
        run.finish()
        assert self.unmoved(before, injected)
        replays.instead.clear()
        run.actions()
        with pytest.raises(Refused) as caught:
            run.finish()

        assert (clause, "check_update") == (caught.value.clause, caught.value.transition)
        assert self.unmoved(before, injected)
        with pytest.raises(Refused, match=clause):
            runtime.checkpoint()
        injected.start_over(undisturbed)
        assert epoch < runtime.epoch
        return str(caught.value.found)

    def kept(self, injected: Injection) -> dict[str, torch.Tensor]:
        """Parameters and AdamW's state, step counts included."""
        found = {
            f"{n} {m}": p.detach().clone()
            for n, stage in injected.run.runtime.stages.items()
            for m, p in enumerate(parameters_of(stage))
        }
        state = injected.run.optimizer.state_tensors()
        return found | {name: tensor.detach().clone() for name, tensor in state.items()}

    def unmoved(self, before: dict[str, torch.Tensor], injected: Injection) -> bool:
        """Whether the update changed nothing."""
        now = self.kept(injected)
        return before.keys() == now.keys() and all(same_bits(before[n], now[n]) for n in now)

    def test_a_failure_before_it_is_known(
        self, injected: Injection, replays: Replays, undisturbed: Recording
    ) -> None:
        """
        A rebuild in the middle of the next step first reads the counts, and then begins the skipped
        epoch again.
        """
        place = replays.places("dW")[-1]
        (at,) = self.shifted(replays, place)
        replays.instead[at] = self.skipped(injected, *replays.ran[place])
        injected.run.step()
        replays.instead.clear()
        epoch = injected.run.runtime.epoch
        injected.done.clear()
        injected.until("1W1")
        injected.run.runtime.rebuild()

        assert epoch - 1 == injected.run.runtime.epoch
        injected.start_over(undisturbed)

    def test_a_failure_after_a_right_update(
        self, injected: Injection, replays: Replays, undisturbed: Recording
    ) -> None:
        """A rebuild begins the current epoch again where the last update was right."""
        epoch = injected.run.runtime.epoch
        injected.done.clear()
        injected.until("1W1")
        injected.run.runtime.rebuild()

        assert epoch == injected.run.runtime.epoch
        injected.start_over(undisturbed)

    def test_a_checkpoint_after_a_right_update(self, injected: Injection, replays: Replays) -> None:
        """A checkpoint first reads the counts; afterwards no counts are outstanding."""
        runtime = injected.run.runtime
        assert runtime.contract.counts_awaited
        checkpoint, _ = runtime.checkpoint()

        assert not runtime.contract.counts_awaited
        assert runtime.epoch == checkpoint.epoch
