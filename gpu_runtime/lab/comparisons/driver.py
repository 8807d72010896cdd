"""
One optimizer step in schedule order over a runtime: Algorithm 1 of the paper as a loop.

Comparisons use this driver. It is also an example of embedding: a pipeline runtime calls the same
actions from its own loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from torch import Tensor

from qeffect.keys import TapeKey, TapeRef

from ...runtime import Runtime
from ...step.memory.arena import by_matrix
from ...step.memory.numerical_state import live_state
from ...step.optimizer import Optimizer
from ...step.plan.order import Kind, Step
from .native import record_outputs, record_step, record_sum
from .recording import Recording
from .upkeep import Upkeep
from .workload import Workload


@attrs.define(eq=False)
class GuardedRun:
    """
    Training over a runtime with a workload's data, recorded if wanted.

    Args:
        runtime: The runtime; recording needs one with `readers`.
        workload: The data.
        optimizer: The optimizer over the same stages.
        recording: Where to record, or None.
        upkeep: Counts of what must not move, stay or grow between steps.
        released: The reference of each slot's last tenant, by stage and slot.
    """

    runtime: Runtime
    workload: Workload
    optimizer: Optimizer
    recording: Recording | None = None
    upkeep: Upkeep = attrs.field(init=False)
    released: dict[tuple[int, int], TapeRef] = attrs.field(factory=dict, init=False)
    _refreshed: set[int] = attrs.field(factory=set, init=False)
    _refs: dict[TapeKey, TapeRef] = attrs.field(factory=dict, init=False)
    _added: dict[int, int] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.upkeep = Upkeep(self.runtime)

    def run(self, num_steps: int) -> None:
        """Train for some optimizer steps, from the runtime's epoch on."""
        for _ in range(num_steps):
            self.step()

    def step(self) -> None:
        """One optimizer step."""
        self.actions()
        self.finish()

    def actions(self) -> None:
        """Every action of one epoch."""
        self.begin()
        for step in self.runtime.order.steps:
            self.advance(step)

    def begin(self) -> None:
        """Forget the tapes of the last epoch, or of an attempt at this one."""
        self._added = dict.fromkeys(self.runtime.stages, 0)
        self._refs.clear()
        self._refreshed.clear()

    def advance(self, step: Step) -> None:
        """One action, a stage's refresh before its first F."""
        if step.kind is Kind.FORWARD and step.stage not in self._refreshed:
            self.runtime.actions.refresh(step.stage)
            self._refreshed.add(step.stage)
        self.act(step)

    def ref(self, key: TapeKey) -> TapeRef:
        """The reference of a tape whose dW is still to come."""
        return self._refs[key]

    def act(self, step: Step) -> None:
        """One F, dI or dW."""
        key = self.runtime.key(step.stage, step.microbatch)
        if step.kind is Kind.FORWARD:
            self._forward(key, step)
        elif step.kind is Kind.DGRAD:
            self._dgrad(key, step)
        else:
            self._wgrad(key)

    def finish(self) -> None:
        """The end of an epoch."""
        number, stages = self.runtime.epoch, list(self.runtime.stages.values())
        gradients = self.runtime.finalize()
        record_step(self.recording, number, stages, gradients, before_update=True)
        self.runtime.update(self.optimizer, gradients)
        record_step(self.recording, number, stages, gradients, optimizer=self.optimizer)
        self.upkeep.after_step(number, self.recording)

    def _forward(self, key: TapeKey, step: Step) -> None:
        runtime, stage = self.runtime, self.runtime.stages[key.stage]
        inputs = self.workload.inputs(stage, key.epoch, key.microbatch)
        ref = self._refs[key] = runtime.actions.forward(key, inputs)
        if runtime.config.readers:
            outputs = runtime.actions.outputs(key, ref)
            if (r := self.recording) is not None:
                where = f"step {key.epoch} {step}"
                memory = runtime.contract.memory
                record_outputs(r, where, outputs)
                r.add("versions", f"{where} weight epoch", memory.weight_epoch[key.stage])
                r.add("versions", f"{where} cache epoch", memory.cache_epoch[key.stage])
                r.add("versions", f"{where} cache is current", int(stage.cache_is_current()))
                r.add_state(where, live_state(runtime.domain))
            runtime.actions.finish_outputs(key, ref)

    def _dgrad(self, key: TapeKey, step: Step) -> None:
        runtime, stage = self.runtime, self.runtime.stages[key.stage]
        ref = self._refs[key]
        runtime.actions.bind(key)
        runtime.actions.dgrad(
            key, ref, self.workload.output_gradients(stage, key.epoch, key.microbatch)
        )
        if not runtime.config.readers:
            return
        found: Sequence[Tensor] = ()
        if any(spec.differentiable for spec in stage.inputs):
            found = runtime.actions.dgrads(key, ref)
        if (r := self.recording) is not None:
            where = f"step {key.epoch} {step}"
            place = f"step {key.epoch} stage {key.stage} m{key.microbatch}"
            left = runtime.memories[key.stage].table[ref.slot].non_matrix
            named = dict(zip((p.name for p in stage.non_matrix), left, strict=True))
            r.add_all("microbatch gradients", place, named)
            r.add_all("input gradients", where, {str(n): g for n, g in enumerate(found)})
            r.add_state(where, live_state(runtime.domain))
        if found:
            runtime.actions.finish_dgrads(key, ref)

    def _wgrad(self, key: TapeKey) -> None:
        runtime = self.runtime
        memory = runtime.memories[key.stage]
        ref = self._refs[key]
        runtime.actions.wgrad(key, ref)
        del self._refs[key]
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
