"""
A contract under a schedule of `torch.distributed.pipelining`, for your own training code.

`guard(schedule)` needs neither Transformer Engine nor graphs, and changes no result: the schedule
runs as before, and a contract checks every action before it runs and commits it afterwards. The
guard refuses, by clause and on the rank where it happens, what torch does not notice: a microbatch
that is forwarded twice, a weight gradient or a message that is left out, actions in another order
than the table's. A table that `qeffect check` refuses is refused before the first step.

Where the guard checks: `_PipelineScheduleRuntime` walks a table and has assertions before it
computes, so the guard checks each action when the walk reaches that action. The stages' methods do
the computation; the single-stage classes (1F1B, GPipe) call them in their own loops. In these
methods the guard checks an action that no walk has checked, and commits it. A function registered
with `register_custom_function` replaces an action and cannot call what torch would have run. Such a
function therefore cannot guard torch's own actions; a registered function is guarded as the action
that it replaces.

What the guard knows of a plain module: which microbatch's work is retained, from F to dI to dW
(ownership); the order of F and dI on the rank (order); the stages' messages and reductions; that
each action's computation ran, and on which weights (`pipelining_evidence`). It knows nothing of
weight caches, gradient buffers, graphs and streams; those relations are left out. Sends and
reductions end where the table awaits them (torch 2.15), otherwise at the end of the step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from qeffect.contract import Contract
from qeffect.schedule.actions import Kind, ScheduleError
from qeffect.schedule.ranks import check_ranks
from qeffect.schedule.transport import Transport
from qeffect.stage_config import StageConfig
from qeffect.text import shown

from .judging import ContractLogs, Judge
from .meeting import MeetingError, meet
from .pipelining_evidence import StageEvidence
from .pipelining_step import GuardedStep, TableReductions
from .pipelining_table import GuardedRow, declared_order, event_of, table_of
from .releases import check_release
from .reports import Manner, OnViolation, Reports, Violation
from .works import Event

__all__ = ["UNUSED", "GuardedSchedule", "MeetingError", "Violation", "guard"]

#: Relations that a guard of plain modules leaves out.
UNUSED = ("version", "arena", "capture", "completion")

#: The oldest and the newest release of torch that the guard was tested with.
TESTED = ("2.11", "2.15")

_BACKWARD = frozenset({"I", "W", "B"})
_COMPUTED = _BACKWARD | {"F"}
_MESSAGES = frozenset({"RECV_F", "RECV_B", "SEND_F", "SEND_B"})
_AWAITED = {"WAIT_SEND_F": "SEND_F", "WAIT_SEND_B": "SEND_B"}
_REDUCE, _REDUCED = "REDUCE_GRAD", "WAIT_REDUCE_GRAD"
_OVERLAP = "OVERLAP_F_B"
#: The stage's methods that post messages, with their kinds.
_MESSAGE_METHODS = {
    "get_fwd_recv_ops": "RECV_F",
    "get_bwd_recv_ops": "RECV_B",
    "get_fwd_send_ops": "SEND_F",
    "get_bwd_send_ops": "SEND_B",
}
#: The attribute of a guarded schedule and its stages that holds the guard.
_MARK = "_qeffect_guarded"
#: Numbers the guards of a process: all ranks put them on in the same order.
_NUMBERS = count()
#: What an unfinished step leaves in a schedule and in its stages, by microbatch.
_LEFT = ("_internal_losses", "fwd_cache", "bwd_cache", "backward_state", "dw_runner")


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
    Put a contract under a schedule: each later `schedule.step(...)` is one guarded epoch.

    `schedule.eval(...)` runs forwards alone and is not guarded.

    In manner ``report`` a step is never refused. The first violation of each clause is logged by
    ``qeffect.guards`` and given to `on_violation`. The guard then judges nothing until the next
    step, which has a fresh contract. A table that is wrong is reported once, and its steps are not
    judged.

    Args:
        schedule: A schedule of `torch.distributed.pipelining`, with a loss function.
        transport: How messages are carried, for the check of the table; torch's default transport
            by default.
        manner: ``refuse`` raises at a violation; ``report`` reports it, and the run goes on.
        on_violation: Called with the first violation of each clause, in manner ``report``.
        log: A folder for the event log of each rank, ``rank0.jsonl`` and so on, which `qeffect
            replay` takes. A fresh contract has a file of its own: ``rank0.contract1.jsonl``. The
            files are complete after `GuardedSchedule.remove`, or at the end of the process.
        untested: Guard the schedule of a torch release that the guard was not tested with. Manner
            ``report`` warns of such a release in the log ``qeffect.guards``.

    Raises:
        UntestedReleaseError: The guard was not tested with the installed torch release, in manner
            ``refuse`` without `untested`.
        TypeError: Not a supported schedule, or an invalid transport.
        ValueError: The schedule or one of its stages is guarded already, it has no loss function
            and therefore no backward, or the manner is unknown.
        ScheduleError: The table is wrong, in manner ``refuse``; the message is that of `qeffect
            check`.
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
    if hasattr(schedule, _MARK):
        raise ValueError("this schedule is guarded already; call remove() on its guard first")
    if transport is not None and not isinstance(transport, Transport):
        raise TypeError(f"transport must be a Transport or None, got {shown(transport)}")
    for stage in stages:
        if (other := getattr(stage, _MARK, None)) is not None:
            raise ValueError(
                f"stage {stage.stage_index} is guarded already, in a "
                f"{type(other.schedule).__name__}: the actions of either schedule would count in "
                "both; call remove() on the other guard, or build separate stages"
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
    A schedule under a contract; `guard` makes it.

    Args:
        schedule: The schedule.
        stages: Its stages on this rank.
        transport: As for `guard`.
        reports: Where violations are reported; None refuses them.
        log: As for `guard`.

    Attributes:
        contract: The contract; `rebuild` makes a new one.
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
        self._judge = Judge(reports, self._rank, self._forget_actions)
        self._known = True
        self._left = False  # whether the latest step was left unfinished
        self._steps = 0
        self._logs = ContractLogs(log)
        self._number, self._rebuilds = next(_NUMBERS), 0
        #: Messages of the latest step: how many were posted, and whether torch's loop returned.
        self._messages, self._looped = 0, True
        self._walks = hasattr(schedule, "pipeline_order_with_comms")
        self._epoch = 0
        table = table_of(schedule)
        if table is not None:
            found = check_ranks(table, transport)
            if found and reports is None:
                raise ScheduleError(f"{table.source}: {found[0]} ({found[0].remedy})")
            if found and reports is not None:
                self._known = self._judge.judges = False
                said = Violation(
                    found[0].clause, self._rank(), 0, table.source, str(found[0]), found[0].remedy
                )
                reports.add(said)
                table = None
        self._declared = None if table is None else declared_order(table, stages)
        indices = [stage.stage_index for stage in stages]
        # A loop without reductions may be intended, as in torch 2.15 when FSDP accumulates.
        self._reductions = TableReductions(dict.fromkeys(indices, False))
        if table is not None and self._walks:
            reduced = {a.stage for row in table.atoms for a in row if a.kind is Kind.REDUCE_GRAD}
            self._reductions = TableReductions(
                {index: index in reduced for index in indices},
                awaits_sends=table.awaits_sends,
                awaits_reductions=table.awaits_reductions,
            )
        self.contract = self._contract()
        self._current = GuardedStep(self.contract, self._reductions)
        self._evidence = StageEvidence(stages)
        #: What is left of an overlapped action of the table.
        self._parts: set[Event] = set()
        #: What the walk has checked or posted, so that the stage's method does not do it again.
        self._checked: dict[Event, Any] = {}
        self._posted: set[Event] = set()
        self._replaced: list[tuple[Any, str, Any]] = []
        for stage in stages:
            self._guard_stage(stage)
        self._replace(schedule, "step", self._step(schedule.step))
        for owner in (schedule, *stages):
            setattr(owner, _MARK, self)

    @property
    def at(self) -> str:
        """The action that was checked last, in torch's notation, such as ``1W2``."""
        return self._judge.at

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The first violation of each clause, in manner ``report``."""
        reports = self._judge.reports
        return () if reports is None else tuple(reports.violations.values())

    def on_trust(self) -> tuple[str, ...]:
        """Return what the guard of this schedule takes on trust."""
        claims = [
            "each stage's own method computes all of its action",
            "no weight is written past its version counter, as through `.data`",
            "a message that was posted arrives, and brings what was sent",
        ]
        claims += [
            f"the function that is registered for {kind} runs its action"
            for kind in sorted(self._registered())
        ]
        claims += [
            f"no weight of stage {stage} is written in mid-step: its module is sharded"
            for stage in self._evidence.sharded()
        ]
        return tuple(claims)

    def remove(self) -> None:
        """Remove the guard; the schedule and its stages are as they were before it."""
        self._logs.close()
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is not None:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)
        for owner in (self.schedule, *self.stages):
            if hasattr(owner, _MARK):
                delattr(owner, _MARK)

    def rebuild(self, timeout_s: float = 60.0, *, alone: bool = False) -> None:
        """
        Restart the epoch on all ranks, after a step that was refused or failed on any of them.

        Every rank of the pipeline calls this, once, outside its step. A rank that still waits for
        a message in `step` calls it after its process group's timeout has ended the step. All ranks
        then restart the lowest epoch that one of them is in: no rank may have updated its weights
        since. What the step left in the schedule and its stages is dropped: torch keeps the losses
        of an unfinished step, and would take the next step's backwards from them. The caller drops
        the gradients, with `zero_grad`.

        Args:
            timeout_s: How long to wait for the other ranks, in seconds.
            alone: Restart this rank and ask nobody. The caller sees to it that the others do the
                same, and that no message is under way.

        Raises:
            MeetingError: On every rank: a rank did not come in time, or the step ended between
                messages on some rank, so that another rank waits for a message that nobody will
                send. Relaunch the ranks from their checkpoint.
        """
        epoch = self.contract.epoch
        if not alone and len(ranks := self._ranks()) > 1:
            words = self._meet(ranks, timeout_s)
            if cut := {rank: word for rank, word in words.items() if not word["whole"]}:
                rank, word = min(cut.items())
                raise MeetingError(
                    f"rebuild: the step ended on rank {rank} after {word['posted']} of "
                    f"{word['of']} messages; relaunch the ranks from their checkpoint"
                )
            epoch = min(int(word["epoch"]) for word in words.values())
            self._drain(timeout_s)
        self._epoch = epoch
        self.contract = self._contract()
        self._forget_step()
        self._left = False
        for owner in (self.schedule, *self.stages):
            for name in _LEFT:
                getattr(owner, name, {}).clear()

    def _ranks(self) -> list[int]:
        """Ranks of the pipeline's process group."""
        from torch import distributed

        if not distributed.is_initialized():
            return []
        return distributed.get_process_group_ranks(getattr(self.stages[0], "group", None))

    def _meet(self, ranks: list[int], timeout_s: float) -> dict[int, Any]:
        """Tell the other ranks how this one's step ended, and be told."""
        from torch import distributed

        place = f"qeffect/rebuild/{'-'.join(map(str, ranks))}/{self._number}/{self._rebuilds}"
        self._rebuilds += 1
        word = {
            "epoch": self.contract.epoch,
            "posted": self._messages,
            "of": self._expected,
            "whole": self._whole(),
        }
        store: Any = distributed.distributed_c10d._get_default_store()
        try:
            return meet(store, place, distributed.get_rank(), ranks, word, timeout_s=timeout_s)
        except MeetingError as error:
            raise MeetingError(
                f"rebuild: {error}; every rank of the pipeline has to call rebuild, after its own "
                "step has ended"
            ) from None

    def _whole(self) -> bool:
        """Whether no message of the latest step is missing, or none was begun."""
        if self._looped or self._messages == 0:
            return True
        # A class without a table may hold back a message that it has asked its stage for.
        return self._walks and self._messages == self._expected

    def _drain(self, timeout_s: float) -> None:
        """Wait for receives that torch has posted and not awaited; all were sent."""
        for posted in ("fwd_recv_ops", "bwd_recv_ops"):
            left = getattr(self.schedule, posted, {})
            for works in left.values():
                for work in works:
                    work.wait(timedelta(seconds=timeout_s))
            left.clear()

    def _contract(self) -> Contract:
        microbatches = self.schedule._n_microbatches
        local = {stage.stage_index for stage in self.stages}
        configs = []
        for stage in self.stages:
            index = stage.stage_index
            before = not stage.is_first and index - 1 not in local
            behind = not stage.is_last and index + 1 not in local
            configs.append(
                StageConfig(
                    index,
                    microbatches=microbatches,
                    slots=microbatches,
                    sends_output=behind,
                    sends_gradient=before,
                    receives_input=before,
                    receives_gradient=behind,
                    feeds=index + 1 if index + 1 in local else None,
                    reduces=self._reductions.reduces[index],
                )
            )
        self._expected = microbatches * sum(
            (c.receives_input, c.receives_gradient, c.sends_output, c.sends_gradient).count(True)
            for c in configs
        )
        contract = Contract(configs, omit=UNUSED, declared=self._declared, epoch=self._epoch)
        self._logs.begin(contract, self._rank())
        return contract

    # A step

    def _step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def guarded_step(*args: Any, **kwargs: Any) -> Any:
            if not self.schedule._has_backward:  # eval
                with self._unguarded():
                    return step(*args, **kwargs)
            self._begin_step()
            try:
                with self._guarded_walk():
                    found = step(*args, **kwargs)
                self._looped = True
                self._finish()
            except BaseException:
                self._abort()
                raise
            return found

        return guarded_step

    @contextmanager
    def _unguarded(self) -> Iterator[None]:
        """Let forwards run outside any epoch."""
        judges, self._judge.judges = self._judge.judges, False
        try:
            yield
        finally:
            self._judge.judges = judges

    @contextmanager
    def _guarded_walk(self) -> Iterator[None]:
        """Check each action when torch's loop reaches it, while the step runs."""
        if not self._walks:
            yield
            return
        schedule = self.schedule
        table = schedule.pipeline_order_with_comms
        row = GuardedRow(table[schedule.rank], self)
        schedule.pipeline_order_with_comms = {**table, schedule.rank: row}
        try:
            yield
        finally:
            schedule.pipeline_order_with_comms = table

    def _begin_step(self) -> None:
        """Drop the records of the last step, also of an unfinished one."""
        if self._judge.reports is not None and self._left:  # a violation, or a step that failed
            self._epoch = self._steps  # that of the ranks that committed the last step
            self._judge.judges = self._known
            self._judge("the beginning of the step", self._restart)
        self._left = True
        self._messages, self._looped = 0, False
        self._judge.step = self._steps
        self._steps += 1
        self._forget_step()
        self._judge("the beginning of the step", self._check_functions)

    def _restart(self) -> None:
        self.contract = self._contract()

    def _forget_step(self) -> None:
        self._current = GuardedStep(self.contract, self._reductions)
        self._evidence.begin_step()
        self._checked.clear()
        self._posted.clear()
        self._parts.clear()

    def _check_functions(self) -> None:
        if not self._walks:
            return
        row = self.schedule.pipeline_order_with_comms[self.schedule.rank]
        if _OVERLAP in self._registered() and any(event_of(a)[0] == _OVERLAP for a in row):
            raise ValueError(
                "a registered function runs OVERLAP_F_B: a forward and a backward of one rank at "
                "the same time, whose order the guard cannot see; register a function for each "
                "part, or remove this one"
            )

    def _registered(self) -> set[str]:
        """Kinds of action that a registered function runs in torch's place."""
        return {kind.value for kind in getattr(self.schedule, "_comp_type_to_function_map", {})}

    def _finish(self) -> None:
        def finish() -> None:
            self._current.finish(stage.stage_index for stage in self.stages)
            self._left = False

        self._judge("the end of the step", finish)

    def _abort(self) -> None:
        """Abort the actions that are under way."""
        self._judge.abort(self.contract)

    # Actions

    def begin(self, step: int, action: Any) -> None:
        """
        Check an action of the table that the walk has reached.

        Args:
            step: Its place in the row, from 0.
            action: torch's action.

        Raises:
            Refused: The action breaks the contract; a note names rank, step and action.
        """
        self._judge(str(action), partial(self._begin, action), f", step {step} of its row")

    def _begin(self, action: Any) -> None:
        event = kind, stage, microbatch = event_of(action)
        if kind in _COMPUTED:
            self._checked[event] = self._check(event)
            self._evidence.watch(event)
        elif kind == _OVERLAP:
            self._parts = {event_of(part) for part in action.sub_actions}
        elif kind in _MESSAGES:
            self._post(event)
            self._posted.add(event)
        elif kind in _AWAITED:
            self._current.finish_send((_AWAITED[kind], stage, microbatch))
        elif kind == _REDUCE:
            self._current.reduce(stage)
            self._posted.add(event)
            self._evidence.watch(event)
        elif kind == _REDUCED:
            self.contract.finish_reduction(stage)

    def end(self, step: int, action: Any) -> None:
        """
        Commit an action that no stage method committed, if its computation ran.

        Args:
            step: Its place in the row, from 0.
            action: torch's action.

        Raises:
            Refused: The computation of the action did not run.
        """
        self._judge(str(action), partial(self._end, action), f", step {step} of its row")

    def _end(self, action: Any) -> None:
        event = event_of(action)
        block = self._checked.pop(event, None)
        if block is not None:
            if self._left_out(event):
                self._abort()
                raise self._evidence.not_run(event)
            self._commit(event, block)
        elif event[0] == _OVERLAP and self._parts:
            raise self._evidence.not_run(min(self._parts))
        elif event in self._posted:
            self._posted.discard(event)
            if event[0] == _REDUCE and self._scales() and self._left_out(event):
                raise self._evidence.not_run(event)

    def _post(self, event: Event) -> None:
        self._current.post_message(event)
        self._messages += 1

    def _left_out(self, event: Event) -> bool:
        """Whether nothing shows that an action ran which no method of the guard has run."""
        return event[0] not in self._registered() and self._evidence.replaced(event)

    def _scales(self) -> bool:
        """Whether the reduction of gradients divides them by the number of microbatches."""
        return bool(self.schedule.scale_grads) and self.schedule._n_microbatches > 1

    def _check(self, event: Event) -> Any:
        self._evidence.check_weights(event)
        return self._current.check(event)

    def _commit(self, event: Event, block: Any) -> None:
        self._current.commit(event, block)
        if event[0] == "F":
            self._evidence.forwarded(event)

    def _guard_stage(self, stage: Any) -> None:
        index = stage.stage_index
        forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
        weight = stage.backward_weight_one_chunk

        def forward_one_chunk(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            with self._running(("F", index, fwd_chunk_id)):
                return forward(fwd_chunk_id, *args, **kwargs)

        def backward_one_chunk(
            bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **kwargs: Any
        ) -> Any:
            with self._running(("B" if full_backward else "I", index, bwd_chunk_id)):
                return backward(bwd_chunk_id, loss=loss, full_backward=full_backward, **kwargs)

        def backward_weight_one_chunk(bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            with self._running(("W", index, bwd_chunk_id)):
                return weight(bwd_chunk_id, *args, **kwargs)

        for method in (forward_one_chunk, backward_one_chunk, backward_weight_one_chunk):
            self._replace(stage, method.__name__, method)
            self._evidence.own(index, method.__name__, method)
        for name, kind in _MESSAGE_METHODS.items():
            ends = stage.is_last if kind in ("SEND_F", "RECV_B") else stage.is_first
            if not ends:
                self._replace(stage, name, self._guarded_ops(kind, index, getattr(stage, name)))
        if hasattr(stage, "perform_reduce_grad"):
            reduce, event = stage.perform_reduce_grad, (_REDUCE, index, -1)

            def begin() -> None:
                if event not in self._posted:
                    self._current.reduce(index)
                self._posted.discard(event)
                self._evidence.forget(event)

            def perform_reduce_grad(*args: Any, **kwargs: Any) -> Any:
                self._judge(f"{index}{_REDUCE}", begin)
                return reduce(*args, **kwargs)

            self._replace(stage, perform_reduce_grad.__name__, perform_reduce_grad)
            self._evidence.own(index, perform_reduce_grad.__name__, perform_reduce_grad)

    def _guarded_ops(self, kind: str, index: int, ops: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that posts messages: report each message to the contract, unless the walk
        has done so."""

        def get_ops(chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            event = (kind, index, chunk_id)
            if event in self._posted:
                self._posted.discard(event)
            else:
                self._judge(f"{index}{kind}{chunk_id}", partial(self._post, event))
            return ops(chunk_id, *args, **kwargs)

        return get_ops

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, method)

    @contextmanager
    def _running(self, event: Event) -> Iterator[None]:
        """Check a stage's action, unless the walk has checked it, and commit the action once it has
        run."""
        block = self._checked.pop(event, None)
        if block is None:
            check = partial(self._check, event)
            block = self._judge(f"{event[1]}{event[0]}{event[2]}", check)
        try:
            yield
        except BaseException:
            self._abort()
            raise
        if block is not None:
            self._judge("", partial(self._ran, event, block))

    def _ran(self, event: Event, block: Any) -> None:
        """Commit an action that the stage's own method has run."""
        self._evidence.forget(event)
        self._parts.discard(event)
        trusted = not _BACKWARD.isdisjoint(self._registered())  # what it left is its own affair
        if not trusted and self._evidence.untouched(event):
            self._abort()
            raise self._evidence.not_run(event)
        self._commit(event, block)

    def _forget_actions(self) -> None:
        """Forget the actions that are under way: nothing is judged until the next step."""
        self._abort()
        self._checked.clear()
        self._posted.clear()

    def _rank(self) -> int:
        rank = getattr(self.schedule, "rank", None)
        return int(self.stages[0].group_rank if rank is None else rank)
