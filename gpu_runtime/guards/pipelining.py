"""
A contract that checks a schedule of `torch.distributed.pipelining`, for your own training code.

`guard(schedule)` needs neither Transformer Engine nor graphs, and changes no result: the schedule
runs as before, and a contract checks every action before the action runs, and commits the action
afterwards. The guard refuses faults that torch does not notice, and names the clause and the rank
of each. Examples are a microbatch that is forwarded twice, a weight gradient or a message that is
left out, and actions in an order that differs from the table's. A table that `qeffect check`
refuses is refused before the first step.

This module puts the guard on and takes it off. `pipelining_walk` checks and commits the actions,
`pipelining_boundary` begins and ends steps and updates, `pipelining_rebuild` lets the ranks restart
an epoch together.

A function registered with `register_custom_function` replaces an action and cannot call what torch
would have run. Such a function therefore cannot guard torch's own actions. The guard checks a
registered function like the action that the function replaces.

What the guard knows of a plain module: the microbatch whose tensors go from F (forward) to dI
(input gradient) to dW (weight gradient), and the order of F and dI on the rank. The guard also sees
the stages' messages and reductions, whether each action's computation ran, and on which weights
(`pipelining_evidence`). The guard does not see weight caches, gradient buffers, graphs and streams,
so the contract's relations for them are left out. If the table says where a send or a reduction is
awaited (torch 2.15), the guard ends it there. Otherwise the guard ends it at the end of the step.
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
    Check a schedule against a contract.

    Each later `schedule.step(...)` is one guarded epoch, that is, one optimizer step.
    `schedule.eval(...)` runs only forwards and is not guarded. Where gradients accumulate over
    several steps, `GuardedSchedule.follow_optimizer` lets the optimizer's update end the epoch.

    In manner ``report`` a step is never refused. The first violation of each clause is logged by
    ``qeffect.guards`` and given to `on_violation`. After a violation the guard checks nothing until
    the next step, which has a fresh contract. A wrong table is reported once, and its steps are not
    checked.

    Args:
        schedule: A schedule of `torch.distributed.pipelining`, with a loss function.
        transport: How messages are carried, which the check of the table needs. By default, the
            transport that the stages name (torch 2.14 and later), or else torch's default.
        manner: ``refuse`` raises at a violation; ``report`` reports it, and the run goes on.
        on_violation: Called with the first violation of each clause, in manner ``report``.
        log: A folder for the event log of each rank, ``rank0.jsonl`` and so on, which `qeffect
            replay` reads; with several pipelines, each pipeline has its own subfolder, such as
            ``pipeline1``. Each later contract of a rank has its own file, such as
            ``rank0.contract1.jsonl``. The files are complete after `GuardedSchedule.remove`, or at
            the end of the process.
        untested: Whether manner ``refuse`` accepts a torch release that the guard was not tested
            with. Manner ``report`` only warns of such a release in the log ``qeffect.guards``.

    Raises:
        UntestedReleaseError: The guard was not tested with the installed torch release, the
            manner is ``refuse``, and `untested` is false.
        TypeError: Not a supported schedule, or an invalid transport.
        ValueError: The schedule or one of its stages is guarded already, the schedule has no loss
            function and therefore no backward, or the manner is unknown.
        ScheduleError: The table is wrong, in manner ``refuse``; the message is the one that
            `qeffect check` gives.
    """
    if manner not in ("refuse", "report"):
        raise ValueError(f"manner must be 'refuse' or 'report', got {shown(manner)}")
    check_release("torch", _release(), *TESTED, manner=manner, untested=untested)
    if not hasattr(schedule, "_has_backward"):  # TorchTitan's GraphPipelineRuntime holds one
        schedule = getattr(schedule, "schedule", schedule)
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
    return GuardedSchedule(schedule, list(stages), transport, reports, folder)


def _release() -> str:
    """The release of torch that runs; its metadata may be of a release that is not imported."""
    import torch

    return str(torch.__version__)


class GuardedSchedule:
    """
    A schedule, checked against a contract; `guard` makes this object.

    Args:
        schedule: The schedule.
        stages: Its stages on this rank.
        transport: As for `guard`.
        reports: Where violations are reported; with None, a violation raises.
        log: As for `guard`.
    """

    def __init__(
        self,
        schedule: Any,
        stages: list[Any],
        transport: Transport | None,
        reports: Reports | None = None,
        log: Path | None = None,
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
        """The current contract; `rebuild` makes a new contract."""
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
        """Return sentences that say what the guard of this schedule does not check."""
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
        Let the optimizer's update end each epoch from now on, not the schedule's step.

        Each step is then a *walk* of the epoch, whose gradients accumulate. Call this method on
        every rank between two steps, with the optimizer of the rank's stages. The guard sees
        updates through the optimizer's hooks. A replacement of the optimizer's `step` that does not
        call torch's `step` counts as an update that did not run.

        Args:
            optimizer: A `torch.optim.Optimizer`, or a container of optimizers that is itself an
                `Optimizer`.
            walks: How many steps of the schedule one update takes. Without this number the guard
                notices a missing update only when the gradients are dropped.

        Raises:
            TypeError, ValueError: `optimizer` is not an optimizer, `walks` is not a whole number
                from 1 on, or the guard follows an optimizer already.
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
        Restart the epoch on all ranks, after a step that was refused or failed on any of them.

        Every rank of the pipeline calls this method, once, outside its step. If a rank still waits
        for a message in `step`, its process group's timeout first ends the step. All ranks then
        restart the lowest epoch that any rank is in; no rank may have updated its weights since
        that epoch began. The call drops what the unfinished step left in the schedule
        and its stages, such as losses: torch would start the next step's backwards from these
        losses. The caller has to drop the gradients, with `zero_grad`.

        Args:
            timeout_s: How long to wait for the other ranks, in seconds.
            alone: Restart this rank without asking the other ranks. The caller makes sure that the
                other ranks restart too, and that no message is under way.

        Raises:
            MeetingError: Raised on every rank, if a rank did not come in time, or if the step of a
                rank ended after some of its messages but before the others. Another rank may then
                wait for a message that nobody will send. Relaunch the ranks from their checkpoint.
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
