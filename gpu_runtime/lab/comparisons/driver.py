"""
The step loop of comparisons, which records outputs, gradients and state under native's labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from torch import Tensor

from qeffect.keys import TapeKey, TapeRef

from ...step.memory.arena import by_matrix
from ...step.memory.numerical_state import live_state
from ...step.plan.order import ComputeAction
from ..sides.step_loop import StepLoop
from .native import record_outputs, record_step, record_sum
from .recording import Recording
from .upkeep import Upkeep

__all__ = ["GuardedRun", "RecordedLoop"]


@attrs.define(eq=False)
class RecordedLoop(StepLoop):
    """
    A step loop, with or without guards, that records its results.

    Args:
        recording: Recording that receives the results, or None to record nothing.
    """

    recording: Recording | None = None

    def finish(self) -> None:
        """End an epoch, and record it."""
        number, stages = self.runtime.epoch, list(self.runtime.stages.values())
        gradients = self.runtime.finalize()
        record_step(self.recording, number, stages, gradients, before_update=True)
        self.runtime.update(self.optimizer, gradients)
        record_step(self.recording, number, stages, gradients, optimizer=self.optimizer)

    def after_forward(self, key: TapeKey, step: ComputeAction, outputs: Sequence[Tensor]) -> None:
        """Record the outputs and their losses."""
        if self.recording is not None:
            record_outputs(self.recording, f"step {key.epoch} {step}", outputs)

    def after_dgrad(
        self, key: TapeKey, ref: TapeRef, step: ComputeAction, gradients: Sequence[Tensor]
    ) -> None:
        """Record the input gradients."""
        if self.recording is not None:
            named = {str(n): gradient for n, gradient in enumerate(gradients)}
            self.recording.add_all("input gradients", f"step {key.epoch} {step}", named)


@attrs.define(eq=False)
class GuardedRun(RecordedLoop):
    """
    A guarded training run that records its results, the contract's state and the state of the
    memory.

    Attributes:
        upkeep: Counts that must be zero: memory that moved, unfinished work that remained, and
            resources that grew between steps.
        released: The reference of the last tape (one forward's saved data) that each slot (its
            buffers) held, by stage and slot.
    """

    upkeep: Upkeep = attrs.field(init=False)
    released: dict[tuple[int, int], TapeRef] = attrs.field(factory=dict, init=False)
    _added: dict[int, int] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.upkeep = Upkeep(self.runtime)

    def begin(self) -> None:
        """Forget the tapes of the last epoch, or of a failed attempt at this epoch."""
        super().begin()
        self._added = dict.fromkeys(self.runtime.stages, 0)

    def finish(self) -> None:
        """End an epoch, and record it."""
        number = self.runtime.epoch
        super().finish()
        self.upkeep.after_step(number, self.recording)

    def after_forward(self, key: TapeKey, step: ComputeAction, outputs: Sequence[Tensor]) -> None:
        """Record outputs, versions and numerical state."""
        super().after_forward(key, step, outputs)
        if (r := self.recording) is not None:
            where, runtime = f"step {key.epoch} {step}", self.runtime
            memory = runtime.contract.memory
            current = runtime.stages[key.stage].cache_is_current()
            r.add("versions", f"{where} weight epoch", memory.weight_epoch[key.stage])
            r.add("versions", f"{where} cache epoch", memory.cache_epoch[key.stage])
            r.add("versions", f"{where} cache is current", int(current))
            r.add_state(where, live_state(runtime.domain))

    def after_dgrad(
        self, key: TapeKey, ref: TapeRef, step: ComputeAction, gradients: Sequence[Tensor]
    ) -> None:
        """Record input gradients, the gradients of other parameters, and numerical state."""
        super().after_dgrad(key, ref, step, gradients)
        if (r := self.recording) is not None:
            memory = self.runtime.memories[key.stage]
            place = f"step {key.epoch} stage {key.stage} m{key.microbatch}"
            left = memory.table[ref.slot].non_matrix
            named = dict(zip((p.name for p in memory.stage.non_matrix), left, strict=True))
            r.add_all("microbatch gradients", place, named)
            r.add_state(f"step {key.epoch} {step}", live_state(self.runtime.domain))

    def after_wgrad(self, key: TapeKey, ref: TapeRef) -> None:
        """Record the gradients that dW wrote."""
        memory = self.runtime.memories[key.stage]
        self.released[key.stage, ref.slot] = ref
        added = self._added[key.stage] = self._added[key.stage] + 1
        if self.recording is None:
            return
        written = memory.arena.written(key.microbatch)
        if memory.arena.rule == "accumulate":
            record_sum(self.recording, memory.stage, key.epoch, added, written)
        else:
            place = f"step {key.epoch} stage {key.stage} m{key.microbatch}"
            named = by_matrix(memory.stage.units, written)
            self.recording.add_all("microbatch gradients", place, named)
