"""
Run a step's device work a second time. The contract has checked the first run and is not asked
again.

`SecondRun` replaces the runtime while the rank's row runs again. The second run performs every
action on the same slot as the first run, and sums and reduces the gradients again. Before the
second run, the numerical state and the device's counters must be restored to their values from
before the first run (`double_run.py`). Weight caches are not restored, because each run refreshes
them from the weights.
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
    """The index of a microbatch's slot (its buffers), in place of a reference from the contract."""

    def __init__(self, slot: int) -> None:
        self.slot, self.generation = slot, 0


class _Actions:
    """
    The methods of `GuardedActions`, but these methods do not ask the contract, because the contract
    accepted all actions in the first run.
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
        """Acts on memory and streams for each action."""
        return self._run.runtime.performer

    def _of(self, key: TapeKey) -> tuple[StageMemory, Slot]:
        return self._run.runtime.memories[key.stage], self._slots[key.stage, key.microbatch]

    def refresh(self, stage: int) -> None:
        """Refresh a stage's weight cache."""
        self.performer.executor.refresh(self._run.runtime.memories[stage])

    def await_graph(self, caller: Hashable) -> None:
        """Do nothing: the second run declares nothing to the contract."""

    def join(self, caller: Hashable) -> None:
        """Do nothing: the second run declares nothing to the contract."""

    def fill_inputs(self, key: TapeKey, inputs: Sequence[Tensor]) -> None:
        """Copy the inputs of a microbatch into its slot (its buffers), on the current stream."""
        self.performer.fill(self.input_buffers(key), inputs)

    def reserve(self, key: TapeKey, *, caller: Hashable = "main") -> _Place:
        """Return the slot (the buffers) of a key (an epoch, stage and microbatch)."""
        return _Place(self._slots[key.stage, key.microbatch].index)

    def input_buffers(self, key: TapeKey) -> tuple[Tensor, ...]:
        """Return the buffers that F reads."""
        return self._of(key)[1].input_views

    def post_receive(self, key: TapeKey, ref: Any, *, gradient: bool = False) -> tuple[Tensor, ...]:
        """Return the buffers into which a message is received."""
        slot = self._of(key)[1]
        return slot.output_gradients if gradient else slot.input_views

    def finish_receive(self, key: TapeKey, ref: Any, *, gradient: bool = False) -> None:
        """Do nothing: the second run declares nothing to the contract."""

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
        """Do nothing: the first run has bound the same destinations."""

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
        """Run dW, which adds to the gradients in later walks (passes over the rank's actions)."""
        memory, slot = self._of(key)
        variants = memory.later_variants if self._run.walk else memory.variants
        others = [self._of(other)[1] for other, _ in group]
        self.performer.executor.wgrad(memory, slot, variants[key.microbatch], others)
        if not memory.arena.direct:
            memory.arena.keep_copies(key.microbatch, slot.wgrads)

    def outputs(self, key: TapeKey, ref: Any) -> Sequence[Tensor]:
        """Return the outputs of F."""
        return self._of(key)[1].outputs

    def finish_outputs(self, key: TapeKey, ref: Any) -> None:
        """Do nothing: the second run declares nothing to the contract."""

    def dgrads(self, key: TapeKey, ref: Any) -> Sequence[Tensor]:
        """Return the input gradients of dI."""
        return self._of(key)[1].dgrads

    def finish_dgrads(self, key: TapeKey, ref: Any) -> None:
        """Do nothing: the second run declares nothing to the contract."""


class SecondRun:
    """
    A replacement for the runtime that runs a walk (a pass over the rank's actions) without the
    contract.

    Args:
        runtime: The runtime whose contract has accepted the step's actions.

    Attributes:
        walk: Number of walks (passes over the rank's actions) that this run has completed.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.config = runtime.config
        self.stages = runtime.stages
        self.actions = _Actions(self)
        self.walk = 0
        self._started: dict[int | str, Reduction | None] = {}

    def begin(self) -> None:
        """Begin the run, and drop the gradient sums of the first run."""
        self.walk = 0
        self._started.clear()
        self.runtime.performer.forget_gradients()
        for memory in self.runtime.memories.values():
            memory.start_epoch()

    def key(self, stage: int, microbatch: int) -> TapeKey:
        """Return the key of a stage and a microbatch in the current epoch."""
        return self.runtime.key(stage, microbatch)

    def next_walk(self) -> None:
        """Begin the next walk (a pass over the rank's actions), in which gradients accumulate."""
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
