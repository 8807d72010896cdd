"""
Run one order of actions under one discipline of capture memory (a rule for sharing memory pools),
in its own process.

`private` is the runtime itself: one pool per slot, guarded. `shared` gives all slots one pool: the
guarded run stops at the contract's refusal, then the same graphs are replayed from the start
without guards. `private-unguarded` also replays without guards, but with private pools; the
comparison shows that the shared pool, not the missing guards, causes the corruption under `shared`.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from qeffect.refusals import Refused

from ...runtime import Runtime, RuntimeConfig, mode_on
from ..runner.processes import first_line
from ..sides.step_loop import StepLoop
from ..sides.unguarded import UnguardedActions, remove_contract
from .cases import Case
from .driver import RecordedLoop
from .recording import Category, Recording
from .sides import fresh_stages, fuse_for, optimizer_of, run_native
from .workload import Workload

__all__ = ["DISCIPLINES", "NATIVE", "ORDERS", "WATCHED", "FiniteRecording", "run_trial"]

NATIVE = ("native", "native-again")
DISCIPLINES = ("private", "private-unguarded", "shared")

#: Orders that differ from the capture order of a shared pool, which is all F, then all dI, then all
#: dW.
ORDERS: tuple[Case, ...] = (
    Case(
        "crossed dI",
        "given",
        0,
        4,
        "copied",
        steps=8,
        cells="0F0 0F1 0I1 0I0 0W1 0W0",
    ),
    # Slot 0 runs F and dI of microbatch 2 while slot 1 still holds the work of its dW.
    Case(
        "slot reuse before dW",
        "given",
        0,
        4,
        "copied",
        steps=8,
        cells="0F0 0F1 0I0 0I1 0W0 0F2 0I2 0W1 0W2",
    ),
    Case("ZB-V rank 1", "ScheduleZBVZeroBubble", 1, 4, "accumulate", steps=8),
)

WATCHED: tuple[Category, ...] = ("outputs", "input gradients", "parameter gradients", "parameters")


@attrs.define
class FiniteRecording(Recording):
    """
    A recording that also counts values that are not finite.

    Args:
        nonfinite: Number of values in the watched categories that are not finite.
    """

    nonfinite: int = 0

    def add_all(self, category: Category, where: str, named: Mapping[str, Tensor]) -> None:
        """Record several tensors of one category by name."""
        super().add_all(category, where, named)
        if category in WATCHED:
            self.nonfinite += sum(int((~torch.isfinite(t)).sum()) for t in named.values())


def first_refusal(loop: StepLoop) -> dict[str, Any] | None:
    """
    Run an epoch without its last action; return the first refusal, or None if nothing is refused.
    """
    loop.begin()
    for position, step in enumerate(loop.runtime.order.steps[:-1]):
        try:
            loop.advance(step)
        except Refused as refused:
            return {"clause": refused.clause, "action": str(step), "position": position}
    return None


def run_trial(
    case: Mapping[str, Any], discipline: str, backend: str, device: str
) -> dict[str, Any]:
    """
    Run one order of actions under one pool discipline, or natively. Call this function in a fresh
    process.

    Returns:
        `recording` (None if the run failed), `nonfinite`, `refused`, `slots` and
        `error`.
    """
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "recording": None,
        "nonfinite": 0,
        "refused": None,
        "slots": {},
        "error": None,
    }
    try:
        recording = FiniteRecording(discipline)
        _run(Case.from_json(case), discipline, backend, device, recording, found)
        if device == "cuda":
            torch.cuda.synchronize()
        found["recording"] = recording.to_json()
        found["nonfinite"] = recording.nonfinite
    except Exception as error:
        # An error of a corrupted replay is a result too; the process ends either way.
        found["error"] = first_line(error)
    return found


def _run(
    case: Case,
    discipline: str,
    backend: str,
    device: str,
    recording: Recording,
    found: dict[str, Any],
) -> None:
    gc.collect()
    if discipline in NATIVE:
        rule = case.native_rule(backend)
        if rule is None:
            raise ValueError(
                f"{case.name}: the library cannot sum gradients natively in this order"
            )
        run_native(case, rule, backend, device, recording)
        return
    stages = fresh_stages(case, backend, fuse=fuse_for(case.rule), device=device)
    runtime = Runtime(
        stages,
        case.order(),
        RuntimeConfig(
            rule=case.rule,
            dtype=case.torch_dtype,
            mode=mode_on(device),
            readers=True,
            # A declared order that a shared pool cannot run would be refused before any action.
            declared=discipline != "shared",
            pool="shared" if discipline == "shared" else None,
        ),
    )
    found["slots"] = {str(stage): count for stage, count in runtime.plan.num_slots.items()}
    optimizer = optimizer_of(case, stages)
    loop = RecordedLoop(runtime, Workload(), optimizer, recording)
    if discipline != "private":
        found["refused"] = first_refusal(StepLoop(runtime, Workload(), optimizer))
        # Numerical state as before the first action; the graphs stay.
        runtime.rebuild()
        loop.calls = UnguardedActions(runtime)
        remove_contract(runtime)
    loop.run(case.steps)
