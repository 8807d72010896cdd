"""
A guard that checks a schedule of `torch.distributed.pipelining`, for your own training code.

`guard(schedule)` needs neither Transformer Engine nor graphs, and changes no result. The schedule
runs as before. A contract checks every action before the action runs, and records the action
afterwards. The guard refuses faults that torch does not notice, and names the contract's clause and
the rank of each fault. Examples are a microbatch that is forwarded twice, a weight gradient or a
message that is left out, and actions in another order than in the table. If `qeffect check` refuses
the table, the guard refuses it before the first step.

This module installs and removes the guard. `pipelining_walk` checks and commits the actions,
`pipelining_boundary` begins and ends steps and updates, and `pipelining_rebuild` lets the ranks
restart an epoch (an optimizer step) together.

A function registered with `register_custom_function` replaces one of torch's actions, and cannot
call the code that it replaces. Therefore the guard does not use registered functions to check
torch's actions. The guard checks a registered function in the same way as the replaced action.

What the guard knows about a plain module: the order of F (forward) and dI (input gradient) on the
rank, and which microbatch's tensors pass from F to dI to dW (weight gradient). The guard also sees
the stages' messages and reductions. It sees whether each action's computation ran, and on which
weights (`pipelining_evidence`). It does not see weight caches, gradient buffers, graphs and
streams, so the contract does not check them. If the table says where torch waits for a send or a
reduction (torch 2.15), the send or reduction counts as ended there. Otherwise it counts as ended at
the end of the step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qeffect.contract import Contract
from qeffect.schedule.actions import Kind, Schedule, ScheduleError
from qeffect.schedule.ranks import check_ranks
from qeffect.schedule.transport import Transport
from qeffect.text import shown

from .advice import PIPELINING_ADVICE
from .judging import ContractLogs, Judge
from .meeting import MeetingError
from .pipelining_boundary import UNUSED, EpochBoundaries
from .pipelining_rebuild import PipelineRanks
from .pipelining_step import TableReductions
from .pipelining_table import declared_order, table_of, transport_of
from .pipelining_update import Updates
from .pipelining_walk import ActionGuard
from .releases import check_release
from .reports import Manner, OnViolation, Reports, Violation
from .trust import PIPELINING

__all__ = ["UNUSED", "GuardedSchedule", "MeetingError", "Violation", "guard"]

#: The releases of torch that the guard was tested with.
TESTED = ("2.11", "2.13", "2.15")

#: The attribute of a guarded schedule and its stages that holds the guard.
MARK = "_qeffect_guarded"


def guard(
    schedule: Any,
    transport: Transport | None = None,
    *,
    manner: Manner = "refuse",
    on_violation: OnViolation | None = None,
    log: str | os.PathLike[str] | None = None,
    untested: bool = False,
) -> GuardedSchedule:
    """
    Install a guard that checks a schedule against a contract.

    Each later `schedule.step(...)` is one guarded epoch, that is, one optimizer step.
    `schedule.eval(...)` runs only forwards and is not guarded. If gradients accumulate over several
    steps, call `GuardedSchedule.follow_optimizer`; then the optimizer's update ends the epoch.

    In manner ``report`` a step is never refused. The first violation of each clause is logged by
    the logger ``qeffect.guards`` and passed to `on_violation`. After a violation the guard checks
    nothing until the next step, which has a fresh contract. A wrong table is reported once, and its
    steps are not checked.

    Args:
        schedule: A schedule of `torch.distributed.pipelining`, with a loss function.
        transport: How messages are sent; the check of the table needs this. By default, the
            transport that the stages name (torch 2.14 and later), otherwise torch's default
            transport.
        manner: ``refuse`` raises an error at a violation. ``report`` reports the violation, and the
            run continues.
        on_violation: Called with the first violation of each clause, in manner ``report``.
        log: A folder for the event log of each rank (``rank0.jsonl`` and so on), which `qeffect
            replay` reads. With several pipelines, each pipeline has its own subfolder, such as
            ``pipeline1``. Each later contract of a rank has its own file, such as
            ``rank0.contract1.jsonl``. The files are complete after `GuardedSchedule.remove`, or at
            the end of the process.
        untested: Whether manner ``refuse`` accepts a torch release that the guard was not tested
            with. Manner ``report`` only warns about such a release, in the log ``qeffect.guards``.

    Raises:
        UntestedReleaseError: The manner is ``refuse``, `untested` is False, and the guard was not
            tested with the installed torch release.
        TypeError: Not a supported schedule, or an invalid transport.
        ValueError: The schedule or one of its stages is already guarded, the schedule has no loss
            function and therefore no backward, or the manner is unknown.
        ScheduleError: The table is wrong, and the manner is ``refuse``. The message is the same as
            in `qeffect check`.
    """
    if manner not in ("refuse", "report"):
        raise ValueError(f"manner must be 'refuse' or 'report', got {shown(manner)}")
    check_release("torch", _release(), *TESTED, manner=manner, untested=untested)
    runtime = None
    if not hasattr(schedule, "_has_backward"):  # TorchTitan's GraphPipelineRuntime holds one
        runtime, schedule = schedule, getattr(schedule, "schedule", schedule)
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if not all(hasattr(stage, "forward_one_chunk") for stage in stages):
        raise TypeError(
            "guard expects a schedule of torch.distributed.pipelining, such as "
            f"ScheduleInterleaved1F1B(stages, 4, loss_fn=...); found {type(schedule).__name__}"
        )
    if hasattr(schedule, MARK):
        raise ValueError("this schedule is guarded already; call remove() on its guard first")
    if transport is not None and not isinstance(transport, Transport):
        raise TypeError(f"transport must be a Transport or None, got {shown(transport)}")
    for stage in stages:
        if (other := getattr(stage, MARK, None)) is not None:
            raise ValueError(
                f"stage {stage.stage_index} is guarded already, as part of a "
                f"{type(other.schedule).__name__}: each schedule's actions would also count in the "
                "other schedule; call remove() on the other guard, or build separate stages"
            )
    if not schedule._has_backward:
        raise ValueError(
            f"{type(schedule).__name__} has no loss_fn and therefore runs no backward, so a guard "
            "has no effect; give loss_fn on every rank"
        )
    reports = Reports(on_violation) if manner == "report" else None
    folder = None if log is None else Path(log)
    return GuardedSchedule(schedule, list(stages), transport, reports, folder, runtime)


def _release() -> str:
    """The release of torch that runs; its metadata may be of a release that is not imported."""
    import torch

    return str(torch.__version__)


class GuardedSchedule:
    """
    A schedule that is checked against a contract. `guard` returns this object.

    Args:
        schedule: The schedule.
        stages: The schedule's stages on this rank.
        transport: As for `guard`.
        reports: The object that collects violations. With None, a violation raises an error.
        log: As for `guard`.
        runtime: The object around the schedule that training code calls, if there is one.
    """

    def __init__(
        self,
        schedule: Any,
        stages: list[Any],
        transport: Transport | None,
        reports: Reports | None = None,
        log: Path | None = None,
        runtime: Any = None,
    ) -> None:
        self.schedule = schedule
        self.stages = stages
        self._ranks = PipelineRanks(schedule, stages)
        self._judge = Judge(
            reports, self._ranks.rank, lambda: self._actions.forget(), PIPELINING_ADVICE
        )
        self._logs = ContractLogs(self._ranks.folder(log))
        self._actions = ActionGuard(schedule, stages, self._judge)
        table, known = self._table(transport)
        self._boundaries = EpochBoundaries(
            schedule,
            stages,
            self._actions,
            self._judge,
            self._reductions(table),
            None if table is None else declared_order(table, stages),
            self._logs,
            self._ranks.rank,
            known=known,
        )
        self._replaced: list[tuple[Any, str, Any]] = []
        for stage in stages:
            self._actions.guard_methods(stage, self._replace)
        self._replace(schedule, "step", self._boundaries.guarded_step(schedule.step))
        if hasattr(runtime, "step"):
            self._replace(runtime, "step", self._boundaries.runtime_step(runtime.step))
        for owner in (schedule, *stages):
            setattr(owner, MARK, self)

    def _table(self, transport: Transport | None) -> tuple[Schedule | None, bool]:
        """Return the table, None if it is wrong or missing; and whether steps can be judged."""
        table, reports = table_of(self.schedule), self._judge.reports
        transport = transport or transport_of(self.stages)
        found = [] if table is None else check_ranks(table, transport)
        if table is None or not found:
            return table, True
        if reports is None:
            raise ScheduleError(f"{table.source}: {found[0]} ({found[0].remedy})")
        self._judge.report_schedule(reports, found[0], table.source, 0)
        return None, False

    def _reductions(self, table: Schedule | None) -> TableReductions:
        indices = [stage.stage_index for stage in self.stages]
        if table is None or not self._actions.walks:
            # A loop without reductions may be intended, as in torch 2.15 when FSDP accumulates.
            return TableReductions(dict.fromkeys(indices, False))
        reduced = {a.stage for row in table.atoms for a in row if a.kind is Kind.REDUCE_GRAD}
        return TableReductions(
            {index: index in reduced for index in indices},
            awaits_sends=table.awaits_sends,
            awaits_reductions=table.awaits_reductions,
        )

    @property
    def contract(self) -> Contract:
        """The current contract. `rebuild` replaces it with a new contract."""
        return self._boundaries.contract

    @property
    def at(self) -> str:
        """The action that was checked last, in torch's notation, such as ``1W2``."""
        return self._judge.at

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The first violation of each clause, in manner ``report``."""
        return self._judge.violations

    def on_trust(self) -> tuple[str, ...]:
        """Return sentences that say what the guard does not check for this schedule."""
        claims = [PIPELINING[name].said() for name in ("methods", "counters", "messages")]
        claims += self._actions.on_trust()
        sharded = self._actions.evidence.sharded()
        claims += [PIPELINING["sharded"].said(stage=stage) for stage in sharded]
        if (updates := self._boundaries.updates) is not None:
            claims.append(PIPELINING["update"].said())
            if not updates.declared:
                claims.append(PIPELINING["walks"].said())
        return tuple(claims)

    def follow_optimizer(self, optimizer: Any, *, walks: int | None = None) -> None:
        """
        From now on, let the optimizer's update end each epoch instead of the schedule's step.

        Each step is then a *walk* of the epoch: a pass over the schedule, whose gradients are added
        to those of the other walks. Call this method on every rank between two steps, with the
        optimizer of the rank's stages. The guard sees updates through the optimizer's hooks. If
        another function replaces the optimizer's `step` and does not call torch's `step`, the
        update counts as not run.

        Args:
            optimizer: A `torch.optim.Optimizer`, or a container of optimizers that is itself an
                `Optimizer`.
            walks: How many steps of the schedule belong to one update. Without this number, the
                guard notices a missing update only when the gradients are dropped.

        Raises:
            TypeError, ValueError: `optimizer` is not an optimizer, `walks` is not an integer of at
                least 1, or the guard already follows an optimizer.
        """
        if self._boundaries.updates is not None:
            raise ValueError(
                "this guard follows an optimizer already; give it one container of all optimizers, "
                "or put a new guard on the schedule"
            )
        self._boundaries.follow(Updates(optimizer, walks, self.stages))

    def remove(self) -> None:
        """Remove the guard, and restore the schedule and its stages."""
        self._logs.close()
        self._actions.evidence.remove()
        if self._boundaries.updates is not None:
            self._boundaries.updates.remove()
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is not None:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)
        for owner in (self.schedule, *self.stages):
            if hasattr(owner, MARK):
                delattr(owner, MARK)

    def rebuild(self, timeout_s: float = 60.0, *, alone: bool = False) -> None:
        """
        Restart the epoch on all ranks, after a step that was refused or failed on any rank.

        Every rank of the pipeline must call this method once, outside of its step. If a rank still
        waits for a message in `step`, the timeout of its process group first ends the step. All
        ranks then restart the lowest epoch that any rank is in. No rank may have updated its
        weights since this epoch began. The call drops all data of the unfinished step from the
        schedule and its stages, such as losses; otherwise torch would start the next step's
        backwards from these losses. The caller must drop the gradients with `zero_grad`.

        Args:
            timeout_s: How long to wait for the other ranks, in seconds.
            alone: Whether to restart this rank without asking the other ranks. The caller must then
                ensure that the other ranks restart too, and that no message is in flight.

        Raises:
            MeetingError: A rank did not call in time, or a rank's step ended after only some of its
                messages. Another rank may then wait for a message that is never sent. Every rank
                raises this error. Relaunch the ranks from their checkpoint.
        """
        if alone:
            epoch = self.contract.epoch
        else:
            epoch = self._ranks.agree(self._boundaries.ending(), timeout_s)
        self._boundaries.restart(epoch)
        self._ranks.drop_unfinished()

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, method)
