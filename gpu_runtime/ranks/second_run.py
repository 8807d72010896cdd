"""
Run a step's device work again, without the contract, which has checked the first run.

`SecondRun` takes the place of the runtime while the rank's row runs again. The second run performs
every action on the slot that the first run used, sums and reduces the gradients again, and does not
ask the contract. The numerical state and the device's counters must be as they were before the
first run (`double_run.py`). Weight caches need no copy: each run refreshes them from the weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from qeffect.keys import TapeKey

from ..backends.epoch_scales import begin_forward
from ..runtime import Runtime
from ..step.eager import StageMemory
from ..step.memory.slots import Slot
from ..step.optimizer import Gradients
from ..step.performer import Performer
from ..step.reductions import Reduction

__all__ = ["SecondRun"]


class _Place:
    """The slot of a microbatch; takes the place of a reference."""

    def __init__(self, slot: int) -> None:
        self.slot, self.generation = slot, 0


class _Actions:
    """
    The actions of `GuardedActions` without questions to the contract, which accepted all of them in
    the first run.
    """

    def __init__(self, run: SecondRun) -> None:
        self._run = run
        memories = run.runtime.memories
        self._slots = {
            (stage, m): memory.table[index]
            for stage, memory in memories.items()
            for m, index in enumerate(memory.slot_of)
        }

    @property
    def performer(self) -> Performer:
        """Performs the physical part of each action."""
        return self._run.runtime.performer

    def _of(self, key: TapeKey) -> tuple[StageMemory, Slot]:
        return self._run.runtime.memories[key.stage], self._slots[key.stage, key.microbatch]

    def refresh(self, stage: int) -> None:
        """Refresh a stage's weight cache."""
        self.performer.executor.refresh(self._run.runtime.memories[stage])

    def await_graph(self, caller: Hashable) -> None:
        """Nothing to declare."""

    def join(self, caller: Hashable) -> None:
        """Nothing to declare."""

    def fill_inputs(self, key: TapeKey, inputs: Sequence[Tensor]) -> None:
        """Copy the inputs into the key's slot, on the current stream."""
        self.performer.fill(self.input_buffers(key), inputs)

    def reserve(self, key: TapeKey, *, caller: Hashable = "main") -> _Place:
        """Return the slot of a key."""
        return _Place(self._slots[key.stage, key.microbatch].index)

    def input_buffers(self, key: TapeKey) -> tuple[Tensor, ...]:
        """The buffers that F reads."""
        return self._of(key)[1].input_views

    def post_receive(self, key: TapeKey, ref: Any, *, gradient: bool = False) -> tuple[Tensor, ...]:
        """The buffers that a message arrives in."""
        slot = self._of(key)[1]
        return slot.output_gradients if gradient else slot.input_views

    def finish_receive(self, key: TapeKey, ref: Any, *, gradient: bool = False) -> None:
        """Nothing to declare."""

    def forward(self, key: TapeKey, inputs: Sequence[Tensor] | None = None) -> _Place:
        """F."""
        memory, slot = self._of(key)
        if inputs is not None:
            self.performer.fill(slot.input_views, inputs)
        drawn = key.microbatch + self._run.walk * len(memory.slot_of)
        begin_forward(memory.stage.domain, key.epoch, drawn)
        self.performer.executor.forward(memory, slot)
        return _Place(slot.index)

    def bind(self, key: TapeKey) -> None:
        """The first run bound the same destinations."""

    def dgrad(
        self, key: TapeKey, ref: Any, output_gradients: Sequence[Tensor] | None = None
    ) -> None:
        """dI."""
        memory, slot = self._of(key)
        if output_gradients is not None:
            self.performer.fill(slot.output_gradients, output_gradients)
        self.performer.executor.dgrad(memory, slot, memory.variants[key.microbatch])
        memory.keep(key.microbatch, slot)

    def wgrad(self, key: TapeKey, ref: Any, *, group: Sequence[tuple[TapeKey, Any]] = ()) -> None:
        """dW, which adds in later walks."""
        memory, slot = self._of(key)
        variants = memory.later_variants if self._run.walk else memory.variants
        others = [self._of(other)[1] for other, _ in group]
        self.performer.executor.wgrad(memory, slot, variants[key.microbatch], others)
        if not memory.arena.direct:
            memory.arena.keep_copies(key.microbatch, slot.wgrads)

    def outputs(self, key: TapeKey, ref: Any) -> Sequence[Tensor]:
        """Outputs of F."""
        return self._of(key)[1].outputs

    def finish_outputs(self, key: TapeKey, ref: Any) -> None:
        """Nothing to declare."""

    def dgrads(self, key: TapeKey, ref: Any) -> Sequence[Tensor]:
        """Input gradients of dI."""
        return self._of(key)[1].dgrads

    def finish_dgrads(self, key: TapeKey, ref: Any) -> None:
        """Nothing to declare."""


class SecondRun:
    """
    The parts of a runtime that a walk (a pass over the rank's row) uses, without the contract.

    Args:
        runtime: The runtime whose contract has accepted the step's actions.

    Attributes:
        walk: How many walks (passes over the row) this run has completed.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.config = runtime.config
        self.stages = runtime.stages
        self.actions = _Actions(self)
        self.walk = 0
        self._started: dict[int | str, Reduction | None] = {}

    def begin(self) -> None:
        """Begin the run: drop the sums of the run before."""
        self.walk = 0
        self._started.clear()
        self.runtime.performer.forget_gradients()
        for memory in self.runtime.memories.values():
            memory.start_epoch()

    def key(self, stage: int, microbatch: int) -> TapeKey:
        """The key of an execution in the current epoch."""
        return self.runtime.key(stage, microbatch)

    def next_walk(self) -> None:
        """Begin the next walk: gradients accumulate."""
        self.walk += 1

    def finalize_stage(self, stage: int) -> None:
        """Sum a stage's gradients, and start its reductions."""
        runtime = self.runtime
        runtime.performer.gradients(runtime.memories[stage])
        if runtime.reducer is not None and runtime.reductions.told:
            for bucket, (owner, _) in runtime.reductions.buckets.items():
                if owner == stage:
                    self._start(bucket)

    def _start(self, bucket: int | str) -> None:
        runtime = self.runtime
        if bucket not in self._started and runtime.reducer is not None:
            self._started[bucket] = runtime.reductions.send(runtime.reducer, bucket)

    def finalize(self) -> Gradients:
        """Return complete and reduced gradients of every stage, as `Runtime.declare_final` does."""
        runtime = self.runtime
        found: dict[int, Mapping[str, Tensor]] = {
            index: runtime.performer.gradients(memory) for index, memory in runtime.memories.items()
        }
        if runtime.reducer is not None:
            for bucket in runtime.reductions.every:
                self._start(bucket)
                if not runtime.reductions.told:
                    self._wait(bucket)
            for bucket in list(self._started):
                self._wait(bucket)
        runtime.handoff.record_tail()
        return found

    def _wait(self, bucket: int | str) -> None:
        work = self._started[bucket]
        self._started[bucket] = None
        if work is not None:
            work.wait()
