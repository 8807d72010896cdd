"""Small captured runs over Transformer Engine, and injections of faults into these runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch

from qeffect.gpu_runtime.backends.protocol import StageBackend, parameters
from qeffect.gpu_runtime.lab.comparisons.cases import Case
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.recording import Recording, compare
from qeffect.gpu_runtime.lab.comparisons.sides import (
    fresh_stages,
    fuse_for,
    optimizer_of,
    run_native,
)
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.runtime import Counts, Reducer, Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.graphs import GraphExecutor
from qeffect.gpu_runtime.step.memory.numerical_state import live_state

from ..runtime.injection import FINAL, NUM_STEPS, ORDER, Injection

TE = "transformer-engine"

#: Two ranks share one GPU, as separate machines do for NCCL; for hosts that have one GPU only.
SHARED = os.environ.get("QEFFECT_SHARED_GPU") == "1"
two_ranks = pytest.mark.skipif(
    torch.cuda.device_count() < 2 and not SHARED, reason="needs two GPUs, or QEFFECT_SHARED_GPU=1"
)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host")
four_gpus = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs of one host")

#: The order and the number of steps of the CPU's injections, so that these can be used again.
SMALL = Case(
    "small",
    "ScheduleZBVZeroBubble",
    1,
    4,
    "accumulate",
    hidden=128,
    ffn=256,
    heads=2,
    sequence=128,
    steps=NUM_STEPS,
)
assert SMALL.order() == ORDER


def given(cells: str, **changes: Any) -> Case:
    """A small case with the given order of actions."""
    return attrs.evolve(SMALL, schedule="given", cells=cells, **changes)


def guarded_run(
    case: Case = SMALL,
    *,
    captured: bool = True,
    reducer: Reducer | None = None,
    counts: Counts | None = None,
) -> GuardedRun:
    """A fresh guarded runtime over the library; no other runtime is live in this process."""
    stages = fresh_stages(case, TE, fuse=fuse_for(case.rule))
    config = RuntimeConfig(
        rule=case.rule,
        dtype=case.torch_dtype,
        mode="replays" if captured else "eager",
        readers=True,
        counts=counts,
    )
    runtime = Runtime(stages, case.order(), config, reducer=reducer)
    return GuardedRun(runtime, Workload(), optimizer_of(case, stages))


def executor_of(run: GuardedRun) -> GraphExecutor:
    """The executor that replays graphs."""
    assert isinstance(run.runtime.executor, GraphExecutor)
    return run.runtime.executor


def final_of(stages: Sequence[StageBackend], optimizer: Any) -> Recording:
    """A recording of the final state of training."""
    recording = Recording("final")
    recording.add_state("final", live_state(stages[0].domain))
    for stage in stages:
        recording.add_all("parameters", str(stage.index), parameters(stage))
        recording.add_all("caches", str(stage.index), stage.cached_weights())
    recording.add_all("AdamW state", "final", optimizer.state_tensors())
    return recording


def native_final(case: Case = SMALL) -> Recording:
    """The oracle: an undisturbed run of native full backward."""
    run = run_native(case, "main_grad", TE, "cuda", None)
    return final_of(run.stages, run.optimizer)


class CapturedInjection(Injection):
    """The fault injections of the CPU tests, into a runtime whose graphs are live."""

    def __init__(
        self,
        *,
        reducer: Reducer | None = None,
        counts: Counts | None = None,
    ) -> None:
        self.run = guarded_run(reducer=reducer, counts=counts)
        self.actions = self.run.runtime.actions
        self.contract = self.run.runtime.contract
        self.done = []
        self.run.step()

    def assert_final(self, undisturbed: Recording) -> None:
        """Require the same bits as in an undisturbed run."""
        stages = list(self.run.runtime.stages.values())
        result = compare(undisturbed, final_of(stages, self.run.optimizer), categories=FINAL)
        assert result.mismatched == 0, str(result)
