"""
Inject the fault table's violations, and failures of physical actions, into a runtime during
training.

Six of the table's seven violations are refused and change nothing. The epoch (optimizer step) into
which these six are injected continues, and is compared like any other epoch. The seventh violation
starts a write after a failed write. Like an F or a dI that fails half way, the seventh violation
spoils its epoch. A spoiled epoch is rebuilt from the last commit and run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
from torch import Tensor

from qeffect.refusals import Refused
from qeffect.spec.document import fault_rows

from ...runtime import Runtime
from ...step.plan.order import ComputeAction, Kind
from .driver import GuardedRun

__all__ = [
    "INJECTED",
    "ROWS",
    "LocalReduction",
    "abort_write",
    "inject_faults",
    "kernel_state",
    "require_refusal",
]

#: The fault table by the name of each row.
ROWS: Mapping[str, Mapping[str, str]] = {row["id"]: row for row in fault_rows()}

#: Faults that the side `disturbed` injects, by the number of the step.
INJECTED = {
    1: "the six rows of the fault table that change nothing, while tapes are live",
    2: "an F that fails after its replay",
    3: "a dI that fails after its replay",
    4: "a dW that fails after its replay; a write after an aborted one, the table's seventh row",
}

_HANDOFFS = ("submitted", "joined", "waited")


class Failure(Exception):  # noqa: N818 - what it is, not what went wrong
    """An injected failure of a physical action."""


@attrs.define(eq=False)
class LocalReduction:
    """
    A reduction over one rank: it changes no gradient and can be interrupted once.

    Args:
        during: Function to call while the next reduction is in flight.
    """

    during: Callable[[], None] | None = None

    def __call__(self, bucket: int | str, gradients: Mapping[str, Tensor]) -> None:
        """Reduce the gradients of a bucket in place."""
        act, self.during = self.during, None
        if act is not None:
            act()


def kernel_state(runtime: Runtime) -> dict[str, object]:
    """
    The contract's state and the number of replays. The number of stream handoffs is left out,
    because refused calls make handoffs too.
    """
    found: dict[str, object] = dict(runtime.contract.snapshot())
    for name in _HANDOFFS:
        found.pop(name)
    found["replays"] = getattr(runtime.executor, "num_replays", None)
    return found


def require_refusal(
    runtime: Runtime, clause: str, transition: str, action: Callable[[], object]
) -> dict[str, str]:
    """
    Make an invalid call; the given clause of the given transition must refuse the call, and the
    call must change nothing.

    Returns:
        The clause and the transition, for a report.

    Raises:
        AssertionError: The call was accepted, was refused by another clause, replayed a graph, or
            changed the contract kernel.
    """
    before = kernel_state(runtime)
    try:
        action()
    except Refused as error:
        found = (error.clause, error.transition)
        if found != (clause, transition):
            raise AssertionError(
                f"refused by {found[0]} in {found[1]}, expected {clause} in {transition}"
            ) from error
    else:
        raise AssertionError(f"accepted; expected {clause} in {transition}")
    after = kernel_state(runtime)
    if changed := [name for name in before if before[name] != after[name]]:
        raise AssertionError(f"{clause}: the refused call changed {', '.join(changed)}")
    return {"clause": clause, "transition": transition}


def inject_faults(run: GuardedRun, number: int) -> list[dict[str, str]]:
    """
    Inject the faults that belong to a step.

    Afterwards the epoch is either committed, or rebuilt; a rebuilt epoch must run again from its
    start. An abandoned attempt at an epoch is not recorded.

    Returns:
        For each injected fault, the name of its row in the fault table or the failed action, the
        clause, the transition and the step.

    Raises:
        AssertionError: A fault was accepted, refused by another clause, or changed something.
    """
    if number not in INJECTED:
        return []
    if number == 1:
        return _refusals(run)
    recording, run.recording = run.recording, None
    try:
        kind = {2: Kind.FORWARD, 3: Kind.DGRAD, 4: Kind.WGRAD}[number]
        found = [_fail(run, kind)]
        run.runtime.rebuild()
        if kind is Kind.WGRAD:
            found.append(_write_after_abort(run))
            run.runtime.rebuild()
    finally:
        run.recording = recording
    return found


def _row(run: GuardedRun, name: str, where: object, action: Callable[[], object]) -> dict[str, str]:
    """
    Inject one violation of the fault table. Exactly the clause that the table names must refuse the
    call, in exactly the transition (call of the contract) that the table names.
    """
    row = ROWS[name]
    found = require_refusal(run.runtime, row["clause"], row["transition"], action)
    return {"fault": name, **found, "where": str(where)}


def _refusals(run: GuardedRun) -> list[dict[str, str]]:
    """
    Run an epoch to its commit, and inject the six violations of the fault table that change
    nothing.
    """
    runtime, actions = run.runtime, run.runtime.actions
    first, missing = runtime.order.steps[0], runtime.order.steps[-1]
    key = runtime.key(first.stage, first.microbatch)
    inputs = run.workload.inputs(runtime.stages[first.stage], runtime.epoch, first.microbatch)
    found = [_row(run, "stale-cache", first, lambda: actions.forward(key, inputs))]
    run.begin()
    for step in runtime.order.steps[:-1]:
        run.advance(step)
        if step.kind is Kind.DGRAD:
            found += _about_a_tape(run, step)
    found.append(_row(run, "missing-wgrad", missing, lambda: _finalize(runtime, missing.stage)))
    run.advance(missing)
    if not isinstance(runtime.reducer, LocalReduction):
        raise AssertionError(
            "expected a reduction that can be interrupted, found none in this runtime"
        )

    def save() -> None:
        runtime.drain()
        found.append(_row(run, "checkpoint-reduction", "reduction", runtime.checkpoint))

    runtime.reducer.during = save
    run.finish()
    # As the table requires: the checkpoint was withheld before and is taken now.
    runtime.checkpoint()
    lacking = ROWS.keys() - {entry["fault"] for entry in found} - {"write-after-abort"}
    if lacking:
        raise AssertionError(f"not injected: {', '.join(sorted(lacking))}")
    return found


def _about_a_tape(run: GuardedRun, step: ComputeAction) -> list[dict[str, str]]:
    """
    After a dI, inject three faults: a second dI, a dW with the reference of the slot's previous
    tape, and a checkpoint.
    """
    runtime, actions = run.runtime, run.runtime.actions
    key = runtime.key(step.stage, step.microbatch)
    ref = run.ref(key)
    gradients = run.workload.output_gradients(
        runtime.stages[step.stage], runtime.epoch, step.microbatch
    )
    found = [_row(run, "repeated-dgrad", step, lambda: actions.dgrad(key, ref, gradients))]
    old = run.released.get((step.stage, ref.slot))
    if old is not None:
        # The slot belongs to this tape now: its generation has advanced.
        if not old.generation < ref.generation:
            raise AssertionError(f"slot {ref.slot} was not reused: {old}, then {ref}")
        found.append(_row(run, "old-reference", step, lambda: actions.wgrad(key, old)))
    runtime.drain()
    found.append(_row(run, "checkpoint-live-tape", step, runtime.checkpoint))
    return found


def _finalize(runtime: Runtime, stage: int) -> None:
    """Finalize one stage; `Runtime.finalize` would finalize all stages."""
    link = runtime.contract.link()
    runtime.contract.submit("main")
    runtime.handoff.wait_for_caller()
    runtime.contract.join(link)
    runtime.contract.finalize(stage, link)


@contextmanager
def _failing(run: GuardedRun, kind: Kind) -> Any:
    """
    Let a physical action run, then raise before the contract kernel is notified of the action's
    end.
    """
    executor = run.runtime.executor
    method = {
        Kind.FORWARD: "forward",
        Kind.DGRAD: "dgrad",
        Kind.WGRAD: "wgrad",
    }[kind]
    physical = getattr(executor, method)

    def fails(*arguments: Any) -> Any:
        physical(*arguments)
        raise Failure(f"after the {kind.value} ran")

    setattr(executor, method, fails)
    try:
        yield
    except Failure:
        return
    finally:
        setattr(executor, method, physical)
    raise AssertionError(f"the injected failure of {kind.value} did not happen")


def _fail(run: GuardedRun, kind: Kind) -> dict[str, str]:
    """
    Run an epoch up to its second F or dI, or its last dW, and let that action fail after it ran.
    """
    steps = run.runtime.order.steps
    own = [step for step in steps if step.kind is kind]
    if len(own) < 2:
        raise AssertionError(f"expected an order with at least two {kind.value}, found {len(own)}")
    failing = own[-1] if kind is Kind.WGRAD else own[1]
    run.begin()
    for step in steps[: steps.index(failing)]:
        run.advance(step)
    with _failing(run, kind):
        run.advance(failing)
    # Recipes without hidden state have no order to poison; only their gradients are spoiled.
    poisons = kind is not Kind.WGRAD and "order" in run.runtime.relations
    clause = "order.poisoned" if poisons else "arena.spoiled"
    found = require_refusal(
        run.runtime, clause, "finalize", lambda: _finalize(run.runtime, failing.stage)
    )
    return {"fault": f"a failed {kind.value}", **found, "where": str(failing)}


def abort_write(run: GuardedRun, step: ComputeAction) -> None:
    """
    Start a weight-gradient action (dW) as a caller's own loop would, let the action write, and
    abort it.
    """
    runtime = run.runtime
    memory = runtime.memories[step.stage]
    key, variant = runtime.key(step.stage, step.microbatch), memory.variants[step.microbatch]
    link = runtime.contract.link()
    runtime.contract.submit("main")
    runtime.handoff.wait_for_caller()
    runtime.contract.join(link)
    ticket = runtime.contract.check_wgrad(
        key,
        run.ref(key),
        destination=memory.arena.present(step.microbatch),
        first=not variant.accumulate,
        link=link,
    )
    with runtime.handoff.scope():
        runtime.executor.wgrad(memory, memory.table[ticket.slot], variant)
    runtime.contract.abort(ticket)


def _write_after_abort(run: GuardedRun) -> dict[str, str]:
    """
    Delay the dWs that follow a stage's last F, abort the first of these dWs half way, then start
    the second.
    """
    runtime, steps = run.runtime, run.runtime.order.steps
    last = {step.stage: n for n, step in enumerate(steps) if step.kind is Kind.FORWARD}
    # After a stage's last F no action waits for its slots, so its dW can be delayed.
    late = {
        stage: [s for s in steps[n:] if s.stage == stage and s.kind is Kind.WGRAD]
        for stage, n in last.items()
    }
    stage = max(late, key=lambda stage: len(late[stage]))
    if len(late[stage]) < 2:
        raise AssertionError("no stage of this order can hold back two dW")
    aborted, second = late[stage][:2]
    run.begin()
    for step in steps:
        if step not in late[stage]:
            run.advance(step)
    abort_write(run, aborted)
    key = runtime.key(second.stage, second.microbatch)
    return _row(
        run,
        "write-after-abort",
        second,
        lambda: runtime.actions.wgrad(key, run.ref(key)),
    )
