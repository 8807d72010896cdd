"""Small runs that the tests compare."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.epoch_scales import Scales
from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.protocol import parameters
from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.native import NativeRun, rule_for
from qeffect.gpu_runtime.lab.comparisons.recording import Comparison, Recording, compare
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.runtime import Counts, Reducer, Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.memory.arena import Rule
from qeffect.gpu_runtime.step.memory.numerical_state import live_state, same_bits
from qeffect.gpu_runtime.step.optimizer import Optimizer
from qeffect.gpu_runtime.step.plan.order import Order
from qeffect.gpu_runtime.step.plan.slots import Provisioning

from .unguarded import UnguardedRun

SMALL = LayerConfig(hidden=128, ffn=256, heads=2, sequence=64)
LARGE = LayerConfig(hidden=512, ffn=2048, heads=8, sequence=256)
TINY = LayerConfig(hidden=32, ffn=64, heads=2, sequence=16)


def reference_stages(
    order: Order,
    history: int,
    config: LayerConfig = SMALL,
    *,
    num_layers: int = 1,
    dropout: float = 0.0,
    scales: Scales = "action",
) -> list[ReferenceStage]:
    """Fresh stages in one fresh state domain, with the same bits each time."""
    domain = ReferenceDomain(history, scales=scales)
    return [
        ReferenceStage(index, domain, config, num_layers=num_layers, seed=index, dropout=dropout)
        for index in order.stages
    ]


def optimizer_for(stages: list[ReferenceStage], dtype: torch.dtype) -> Optimizer:
    """
    AdamW; if the destinations have another data type than the parameters, with master weights of
    that type.
    """
    return Optimizer(stages, master_dtype=None if dtype == torch.bfloat16 else dtype)


def native(
    order: Order,
    history: int,
    rule: Rule,
    dtype: torch.dtype,
    num_steps: int,
    config: LayerConfig = SMALL,
    *,
    num_layers: int = 1,
    dropout: float = 0.0,
    scales: Scales = "action",
) -> Recording:
    """A recorded run of the backend's own full backward."""
    stages = reference_stages(
        order, history, config, num_layers=num_layers, dropout=dropout, scales=scales
    )
    same_sum = rule_for(order, rule, dtype)
    recording = Recording(f"native, {same_sum}")
    NativeRun(
        stages,
        order,
        Workload(),
        same_sum,
        dtype,
        optimizer_for(stages, dtype),
        recording,
    ).run(num_steps)
    return recording


def unguarded(
    order: Order,
    history: int,
    rule: Rule,
    dtype: torch.dtype,
    num_steps: int,
    config: LayerConfig = SMALL,
    *,
    num_layers: int = 1,
    change: Callable[[UnguardedRun], None] = lambda run: None,
) -> Recording:
    """
    A recorded run of F, dI and dW without guards; `change` may alter the run before it starts.
    """
    stages = reference_stages(order, history, config, num_layers=num_layers)
    recording = Recording(f"split, {rule}")
    run = UnguardedRun(
        stages, order, Workload(), rule, dtype, optimizer_for(stages, dtype), recording
    )
    change(run)
    run.run(num_steps)
    return recording


def guarded_run(
    order: Order,
    history: int = 4,
    rule: Rule = "accumulate",
    dtype: torch.dtype = torch.bfloat16,
    config: LayerConfig = TINY,
    *,
    num_layers: int = 1,
    dropout: float = 0.0,
    provisioning: Provisioning = "live",
    readers: bool = True,
    captured: bool = False,
    event_log: bool = False,
    reducer: Reducer | None = None,
    counts: Counts | None = None,
    scales: Scales = "action",
    group: int = 1,
) -> GuardedRun:
    """A fresh guarded runtime over reference stages, with data and an optimizer."""
    stages = reference_stages(
        order, history, config, num_layers=num_layers, dropout=dropout, scales=scales
    )
    runtime = Runtime(
        stages,
        order,
        RuntimeConfig(
            rule=rule,
            dtype=dtype,
            provisioning=provisioning,
            readers=readers,
            mode="replays" if captured else "eager",
            counts=counts,
            group=group,
        ),
        event_log=event_log,
        reducer=reducer,
    )
    return GuardedRun(runtime, Workload(), optimizer_for(stages, dtype))


def guarded(
    order: Order,
    history: int,
    rule: Rule,
    dtype: torch.dtype,
    num_steps: int,
    config: LayerConfig = SMALL,
    *,
    num_layers: int = 1,
    provisioning: Provisioning = "live",
) -> Recording:
    """A recorded run of the guarded runtime."""
    run = guarded_run(
        order, history, rule, dtype, config, num_layers=num_layers, provisioning=provisioning
    )
    run.recording = Recording(f"guarded, {rule}, {provisioning}")
    run.run(num_steps)
    return run.recording


def run_and_repeat(run: GuardedRun) -> None:
    """Run two steps; before the second step is recorded, its epoch is run once and rebuilt."""
    run.run(1)
    run.recording, kept = None, run.recording
    run.actions()
    run.runtime.rebuild()
    run.recording = kept
    run.run(1)


def assert_same(reference: Recording, candidate: Recording) -> Comparison:
    """
    Require that every value of every category is equal, bit for bit, and that no category is empty.
    """
    result = compare(reference, candidate)
    assert result.mismatched == 0, str(result)
    assert all(category.compared for category in result.categories)
    return result


def state_after(run: GuardedRun, steps: int = 4) -> dict[str, Tensor]:
    """Parameters, AdamW's state and scaling state after some steps."""
    run.run(steps)
    found: dict[str, Tensor] = {
        f"{index} {name}": value.detach()
        for index, stage in run.runtime.stages.items()
        for name, value in parameters(stage).items()
    }
    return {**found, **live_state(run.runtime.domain), **run.optimizer.state_tensors()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names whose bits differ."""
    assert a.keys() == b.keys()
    return [name for name in a if not same_bits(a[name], b[name])]
