"""
A run that stops before one action to inject a fault, and then continues or starts the epoch again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qeffect.gpu_runtime.backends.protocol import StageBackend, parameters
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.faults import ROWS, kernel_state
from qeffect.gpu_runtime.lab.comparisons.native import NativeRun, rule_for
from qeffect.gpu_runtime.lab.comparisons.recording import Recording, compare
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.step.memory.numerical_state import live_state, same_bits
from qeffect.gpu_runtime.step.plan.order import ComputeAction, Kind, Order
from qeffect.keys import TapeRef
from qeffect.refusals import Refused

from .helpers import TINY, guarded_run, optimizer_for, reference_stages
from .orders import table_order

ORDER = table_order("ScheduleZBVZeroBubble", 1)
NUM_STEPS = 3
FINAL = ("parameters", "AdamW state", "amax histories", "scales", "caches")


def final_of(stages: list[Any], optimizer: Any) -> Recording:
    """A recording of the final state of training."""
    recording = Recording("final")
    recording.add_state("final", live_state(stages[0].domain))
    for stage in stages:
        recording.add_all("parameters", str(stage.index), dict(stage.named_parameters()))
        recording.add_all("caches", str(stage.index), stage.cached_weights())
    recording.add_all("AdamW state", "final", optimizer.state_tensors())
    return recording


def native_final(history: int = 4) -> Recording:
    """The oracle: an undisturbed run of native full backward."""
    stages = reference_stages(ORDER, history, TINY)
    optimizer = optimizer_for(stages, torch.bfloat16)
    rule = rule_for(ORDER, "accumulate")
    NativeRun(stages, ORDER, Workload(), rule, torch.bfloat16, optimizer).run(NUM_STEPS)
    return final_of(stages, optimizer)


class Injection:
    """
    A run that is stopped before one action of its second epoch, so that a test can inject a fault.
    """

    def __init__(self, **options: Any) -> None:
        self.run: GuardedRun = guarded_run(ORDER, **options)
        self.actions = self.run.runtime.actions
        self.contract = self.run.runtime.contract
        self.done: list[ComputeAction] = []
        self.run.step()

    def until(self, cell: str) -> None:
        """Run the current epoch up to, and not including, an action."""
        stop = Order.parse(cell).steps[0]
        for step in ORDER.steps[len(self.done) :]:
            if step == stop:
                return
            self.act(step)
        raise AssertionError(f"expected an action that is still to run, found {cell}")

    def act(self, step: ComputeAction) -> None:
        """Run one action in order, refreshing before a stage's first F."""
        first = step.kind is Kind.FORWARD and step.stage not in {s.stage for s in self.done}
        if first:
            self.actions.refresh(step.stage)
        if not self.done:
            self.run._added = dict.fromkeys(self.run.runtime.stages, 0)
            self.run._refs.clear()
        self.run.act(step)
        self.done.append(step)

    def ref(self, stage: int, microbatch: int) -> TapeRef:
        """The reference of a live tape (the data that one F left)."""
        return self.run._refs[self.run.runtime.key(stage, microbatch)]

    def go_on(self, undisturbed: Recording) -> None:
        """Finish training, and compare with the undisturbed native run."""
        for step in ORDER.steps[len(self.done) :]:
            self.act(step)
        self.run.finish()
        while self.run.runtime.epoch < NUM_STEPS:
            self.run.step()
        self.assert_final(undisturbed)

    def start_over(self, undisturbed: Recording) -> None:
        """Rebuild, run the epoch again from its start, finish, and compare."""
        self.run.runtime.rebuild()
        while self.run.runtime.epoch < NUM_STEPS:
            self.run.step()
        self.assert_final(undisturbed)

    def assert_final(self, undisturbed: Recording) -> None:
        """Require the same bits as in an undisturbed run."""
        stages = list(self.run.runtime.stages.values())
        result = compare(undisturbed, final_of(stages, self.run.optimizer), categories=FINAL)
        assert result.mismatched == 0, str(result)

    def refused(self, clause: str, action: Callable[[], object]) -> Refused:
        """
        Require that a clause refuses the action, and that no tensor and no contract state changes.
        """
        before, contents = kernel_state(self.run.runtime), self.contents()
        with pytest.raises(Refused) as caught:
            action()
        assert clause == caught.value.clause
        assert before == kernel_state(self.run.runtime)
        after = self.contents()
        assert contents.keys() == after.keys()
        assert all(same_bits(contents[name], after[name]) for name in contents)
        return caught.value

    def row(self, name: str, action: Callable[[], object]) -> None:
        """
        Inject one violation of the fault table: its clause must refuse, in its transition, and
        nothing may change.
        """
        refusal = self.refused(ROWS[name]["clause"], action)
        assert ROWS[name]["transition"] == refusal.transition

    def contents(self) -> dict[str, torch.Tensor]:
        """Every tensor that the runtime holds."""
        runtime = self.run.runtime
        found = {f"state {n}": t.clone() for n, t in live_state(runtime.domain).items()}
        for index, memory in runtime.memories.items():
            for n, total in enumerate(memory.sums):
                found[f"{index} sum {n}"] = total.clone()
            for name, tensor in memory.arena.written(0).items():
                found[f"{index} arena {name}"] = tensor.clone()
            for name, parameter in parameters(memory.stage).items():
                found[f"{index} {name}"] = parameter.detach().clone()
            for name, cached in memory.stage.cached_weights().items():
                found[f"{index} cache {name}"] = cached.clone()
            for slot in memory.table:
                for n, tensor in enumerate((*slot.outputs, *slot.dgrads)):
                    found[f"{slot.index} left {n}"] = tensor.clone()
                for n, tensor in enumerate((*slot.inputs, *slot.output_gradients)):
                    found[f"{slot.index} buffer {n}"] = tensor.detach().clone()
        return found


def parameters_of(stage: StageBackend) -> list[torch.nn.Parameter]:
    """A stage's parameters."""
    return list(parameters(stage).values())


def boom(*_: object, **__: object) -> None:
    """Raise, as a failing kernel would."""
    raise RuntimeError("injected")
