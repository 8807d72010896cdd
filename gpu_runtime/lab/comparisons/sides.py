"""
The sides of a comparison; each runs a case from fresh stages and is recorded.

`native` and `native-again` are the library's own full backward. `eager` and `captured` are the
guarded runtime. `disturbed` is the captured runtime (on a CPU the eager runtime) with faults
injected while its graphs are live. If the faults are refused, the epoch continues and is recorded;
a spoiled epoch is recorded after it was rebuilt and run again.
"""

from __future__ import annotations

import gc

import torch

from ...backends.protocol import StageBackend
from ...runtime import Runtime, RuntimeConfig, mode_on
from ...step.memory.arena import Rule
from ...step.memory.numerical_state import live_state, preserving
from ...step.optimizer import Optimizer
from .cases import Case
from .driver import GuardedRun
from .faults import LocalReduction, inject_faults
from .native import NativeRule, NativeRun
from .recording import Recording
from .upkeep import SETTLED
from .workload import Workload

__all__ = ["SIDES", "fresh_stages", "fuse_for", "optimizer_of", "record", "run_native"]

NATIVE = ("native", "native-again")
GUARDED = ("eager", "captured", "disturbed")
SIDES = (*NATIVE, *GUARDED)


def fresh_stages(
    case: Case, backend: str, *, fuse: bool | None = None, device: str = "cuda"
) -> list[StageBackend]:
    """
    Stages of a case in a new state domain, with the same bits each time.

    Args:
        case: The case: dimensions, order of actions, and gradient destinations.
        backend: `transformer-engine` or `reference`.
        fuse: Whether the library accumulates into `main_grad` itself; None lets the backend choose.
        device: Where the reference backend runs.
    """
    indices = case.order().stages
    if backend == "reference":
        from ...backends.reference import ReferenceDomain, ReferenceStage

        domain = ReferenceDomain(case.history, device=torch.device(device))
        return [
            ReferenceStage(
                n, domain, case.config, num_layers=case.num_layers, seed=n, dropout=case.dropout
            )
            for n in indices
        ]
    from ...backends.te.domain import TransformerEngineDomain, reset_process
    from ...backends.te.stage import TransformerEngineStage

    reset_process()
    te_domain = TransformerEngineDomain(case.scaling, case.history)
    return [
        TransformerEngineStage(
            n,
            te_domain,
            case.config,
            num_layers=case.num_layers,
            fuse_wgrad_accumulation=fuse,
            seed=n,
            dropout=case.dropout,
        )
        for n in indices
    ]


def record(case: Case, side: str, backend: str, device: str = "cuda") -> Recording | None:
    """
    Run one side (one way to run the steps) of a case.

    Returns:
        The recording; None for a native side if the library cannot form the same sum.
    """
    gc.collect()
    if side not in NATIVE:
        return _guarded(case, side, backend, device)
    rule = case.native_rule(backend)
    if rule is None:
        return None
    recording = Recording(f"{side}, {rule}")
    run_native(case, rule, backend, device, recording)
    return recording


def optimizer_of(case: Case, stages: list[StageBackend]) -> Optimizer:
    """
    AdamW, with master weights if the gradient destinations have another data type than the weights.
    """
    master = None if case.torch_dtype == case.config.dtype else case.torch_dtype
    return Optimizer(stages, master_dtype=master)


def run_native(
    case: Case, rule: NativeRule, backend: str, device: str, recording: Recording | None
) -> NativeRun:
    """Run the library's own full backward for every step of a case."""
    stages = fresh_stages(case, backend, fuse=rule == "main_grad", device=device)
    domain = stages[0].domain
    # Both sides begin from warm modules in the state of fresh modules: state exists, caches are
    # stale.
    with preserving(domain):
        for stage in stages:
            stage.warm()
    run = NativeRun(
        stages,
        case.order(),
        Workload(),
        rule,
        case.torch_dtype,
        optimizer_of(case, stages),
        recording,
    )
    for number in range(case.steps):
        run.recording = recording if number >= case.recorded_from else None
        run.step(number)
    return run


def fuse_for(rule: Rule) -> bool | None:
    """
    The argument `fuse` for a destination rule: False for copied gradients, which must stay out of
    `main_grad`; otherwise None, which lets the backend choose.
    """
    return False if rule == "copied" else None


def _guarded(case: Case, side: str, backend: str, device: str) -> Recording:
    stages = fresh_stages(case, backend, fuse=fuse_for(case.rule), device=device)
    runtime = Runtime(
        stages,
        case.order(),
        RuntimeConfig(
            rule=case.rule,
            dtype=case.torch_dtype,
            mode="eager" if side == "eager" else mode_on(device),
            readers=True,
        ),
        reducer=LocalReduction() if side == "disturbed" else None,
    )
    recording = Recording(side)
    run = GuardedRun(runtime, Workload(), optimizer_of(case, stages))
    for number in range(case.steps):
        run.recording = recording if number >= case.recorded_from else None
        if side == "disturbed":
            recording.injected += inject_faults(run, number)
        if runtime.epoch == number:
            run.step()
        if number == min(SETTLED, case.steps - 1):
            run.upkeep.count()
    run.upkeep.record_growth(recording)
    if device == "cuda" and torch.cuda.is_available():
        torch.cuda.synchronize()
    assert live_state(runtime.domain) or case.scaling != "delayed"
    return recording
