"""
Faults injected into a runtime whose graphs are live, each followed by a rebuilt epoch.

The first half of the list is refused and changes nothing, so training goes on in the same epoch;
the second half fails a physical action half way, so the epoch is rebuilt from the last commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qeffect.gpu_runtime.evidence.driver import GuardedRun
from qeffect.gpu_runtime.plan.order import Kind, Step
from qeffect.refusals import Refused

__all__ = ["REFUSED", "disturb"]


class Injected(Exception):  # noqa: N818 - what it is, not what went wrong
    """The failure of a physical action that a test makes happen."""


def _expect(clauses: tuple[str, ...], action: Callable[[], object]) -> str:
    try:
        action()
    except Refused as refused:
        if refused.clause not in clauses:
            raise AssertionError(
                f"refused by {refused.clause}, expected one of {', '.join(clauses)}"
            ) from refused
        return refused.clause
    raise AssertionError(f"accepted; expected one of {', '.join(clauses)}")


#: What `disturb` injects, by the number of the step that it precedes.
REFUSED = {
    1: "every row of the fault table, refused while tapes are live",
    2: "an F that fails after its replay",
    3: "a dI that fails after its replay",
    4: "a dW that fails after its replay",
}


def disturb(run: GuardedRun, number: int) -> None:
    """
    Inject what belongs before a step, then rebuild, so that the step starts its epoch again.

    Nothing of the disturbed epoch is recorded.

    Raises:
        AssertionError: A fault was accepted, or refused by another clause.
    """
    if number not in REFUSED:
        return
    recording, run.recording = run.recording, None
    try:
        if number == 1:
            _table(run)
        else:
            _fail(run, {2: Kind.FORWARD, 3: Kind.DGRAD, 4: Kind.WGRAD}[number])
    finally:
        run.recording = recording
    run.runtime.rebuild()


def _steps(run: GuardedRun) -> list[Step]:
    return list(run.runtime.order.steps)


def _begin(run: GuardedRun) -> Callable[[Step], None]:
    """Return a function that runs an action of the epoch, refreshing where it must."""
    run._added = dict.fromkeys(run.runtime.stages, 0)
    run._refs.clear()
    refreshed: set[int] = set()

    def act(step: Step) -> None:
        if step.kind is Kind.FORWARD and step.stage not in refreshed:
            run.runtime.actions.refresh(step.stage)
            refreshed.add(step.stage)
        run.act(step)

    return act


def _table(run: GuardedRun) -> None:
    """The rows of the fault table, against a half-finished epoch."""
    runtime, contract, actions = run.runtime, run.runtime.contract, run.runtime.actions
    steps = _steps(run)
    first = steps[0]
    key = runtime.key(first.stage, first.microbatch)
    _expect(("version.stale-cache",), lambda: actions.forward(key, _inputs(run, first)))
    act = _begin(run)
    done: list[Step] = []
    refs: dict[Any, Any] = {}
    for step in steps[:-1]:
        act(step)
        done.append(step)
        refs.update(run._refs)
        if step.kind is Kind.DGRAD and sum(s.kind is Kind.DGRAD for s in done) == 1:
            name = runtime.key(step.stage, step.microbatch)
            _expect(
                ("ownership.duplicate-dgrad",),
                lambda name=name: contract.check_dgrad(name, refs[name]),  # type: ignore[misc]
            )
            runtime.drain()
            _expect(("persistence.live-tape",), contract.checkpoint)
        if step.kind is Kind.WGRAD and sum(s.kind is Kind.WGRAD for s in done) == 1:
            name = runtime.key(step.stage, step.microbatch)
            _expect(
                ("ownership.stale-reference",),
                lambda name=name: contract.check_wgrad(name, refs[name]),  # type: ignore[misc]
            )
    missing = steps[-1]
    _expect(
        ("arena.incomplete", "epoch.incomplete"),
        lambda: contract.finalize(missing.stage),
    )


def _inputs(run: GuardedRun, step: Step) -> Any:
    stage = run.runtime.stages[step.stage]
    return run.workload.inputs(stage, run.runtime.epoch, step.microbatch)


def _fail(run: GuardedRun, kind: Kind) -> None:
    """Let the second action of a kind run, then fail before the kernel is told."""
    runtime, executor = run.runtime, run.runtime.executor
    method = {
        Kind.FORWARD: "forward",
        Kind.DGRAD: "input_gradient",
        Kind.WGRAD: "weight_gradient",
    }[kind]
    physical = getattr(executor, method)

    def fails(*arguments: Any) -> Any:
        physical(*arguments)
        raise Injected(f"after the {kind.value} ran")

    act = _begin(run)
    seen = 0
    for step in _steps(run):
        seen += step.kind is kind
        if seen == 2:
            setattr(executor, method, fails)
            try:
                act(step)
            except Injected:
                break
            finally:
                setattr(executor, method, physical)
            raise AssertionError(f"the injected failure of {step} did not happen")
        act(step)
    else:
        raise AssertionError(f"the order has fewer than two {kind.value}")
    if kind is not Kind.WGRAD:
        # Recipes without hidden state have no order to poison; the epoch is spoiled all the same.
        clauses = ("order.poisoned", "arena.unusable", "epoch.spoiled")
        _expect(clauses, lambda: runtime.contract.finalize(step.stage))
    else:
        clauses = ("arena.unusable", "epoch.spoiled", "order.incomplete")
        _expect(clauses, lambda: runtime.contract.finalize(step.stage))
