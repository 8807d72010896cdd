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
(ownership); the order of F and dI on the rank (order); the stages' messages and reductions. It
knows nothing of weight caches, gradient buffers, graphs and streams; those relations are left out.
Sends and reductions end where the table awaits them (torch 2.15), otherwise at the end of the
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from qeffect.contract import Contract
from qeffect.refusals import Refused
from qeffect.schedule.actions import Kind, ScheduleError
from qeffect.schedule.ranks import check_ranks
from qeffect.schedule.transport import Transport
from qeffect.stage_config import StageConfig
from qeffect.text import shown

from .pipelining_step import GuardedStep, TableReductions
from .pipelining_table import Event, GuardedRow, declared_order, event_of, table_of

__all__ = ["UNUSED", "GuardedSchedule", "guard"]

#: Relations that a guard of plain modules leaves out.
UNUSED = ("version", "arena", "capture", "completion")

_COMPUTED = frozenset({"F", "I", "W", "B"})
_MESSAGES = frozenset({"RECV_F", "RECV_B", "SEND_F", "SEND_B"})
_AWAITED = {"WAIT_SEND_F": "SEND_F", "WAIT_SEND_B": "SEND_B"}
_REDUCE, _REDUCED = "REDUCE_GRAD", "WAIT_REDUCE_GRAD"
#: The stage's methods that post messages, with their kinds.
_MESSAGE_METHODS = {
    "get_fwd_recv_ops": "RECV_F",
    "get_bwd_recv_ops": "RECV_B",
    "get_fwd_send_ops": "SEND_F",
    "get_bwd_send_ops": "SEND_B",
}
#: The attribute of a guarded schedule and its stages that holds the guard.
_MARK = "_qeffect_guarded"
#: What an unfinished step leaves in a schedule and in its stages, by microbatch.
_LEFT = ("_internal_losses", "fwd_cache", "bwd_cache", "backward_state", "dw_runner")


def guard(schedule: Any, transport: Transport | None = None) -> GuardedSchedule:
    """
    Put a contract under a schedule: each later `schedule.step(...)` is one guarded epoch.

    `schedule.eval(...)` runs forwards alone and is not guarded.

    Args:
        schedule: A schedule of `torch.distributed.pipelining`, with a loss function.
        transport: How messages are carried, for the check of the table; torch's default transport
            by default.

    Raises:
        TypeError: Not a supported schedule, or an invalid transport.
        ValueError: The schedule or one of its stages is guarded already, it has no loss function
            and therefore no backward, or a registered function overlaps actions.
        ScheduleError: The table is wrong; the message is that of `qeffect check`.
    """
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
    return GuardedSchedule(schedule, list(stages), transport)


class GuardedSchedule:
    """
    A schedule under a contract; `guard` makes it.

    Args:
        schedule: The schedule.
        stages: Its stages on this rank.
        transport: As for `guard`.

    Attributes:
        contract: The contract; `rebuild` makes a new one.
        at: The action that was checked last, in torch's notation, such as ``1W2``.
    """

    def __init__(self, schedule: Any, stages: list[Any], transport: Transport | None) -> None:
        self.schedule = schedule
        self.stages = stages
        self.at = ""
        self._walks = hasattr(schedule, "pipeline_order_with_comms")
        self._epoch = 0
        table = table_of(schedule)
        if table is not None:
            found = check_ranks(table, transport)
            if found:
                raise ScheduleError(f"{table.source}: {found[0]} ({found[0].remedy})")
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
        #: What the walk has checked or posted, so that the stage's method does not do it again.
        self._checked: dict[Event, Any] = {}
        self._posted: set[Event] = set()
        self._replaced: list[tuple[Any, str]] = []
        for stage in stages:
            self._guard_stage(stage)
        self._replace(schedule, "step", self._step(schedule.step))
        for owner in (schedule, *stages):
            setattr(owner, _MARK, self)

    def remove(self) -> None:
        """Remove the guard; the schedule and its stages are as they were before it."""
        while self._replaced:
            owner, name = self._replaced.pop()
            delattr(owner, name)
        for owner in (self.schedule, *self.stages):
            if hasattr(owner, _MARK):
                delattr(owner, _MARK)

    def rebuild(self) -> None:
        """
        Restart the epoch, after a step that was refused or failed.

        What the step left in the schedule and its stages is dropped: torch keeps the losses of an
        unfinished step, and would take the next step's backwards from them. The caller drops what
        the step left elsewhere: gradients, with `zero_grad`, and messages that another rank has
        sent or waits for. torch's table runtime keeps the receives that it has posted, and then
        fails an assertion when it posts them again; relaunch a rank that stopped between its
        messages.
        """
        self._epoch = self.contract.epoch
        self.contract = self._contract()
        self._begin_step()
        for owner in (self.schedule, *self.stages):
            for name in _LEFT:
                getattr(owner, name, {}).clear()

    def _contract(self) -> Contract:
        count = self.schedule._n_microbatches
        local = {stage.stage_index for stage in self.stages}
        configs = []
        for stage in self.stages:
            index = stage.stage_index
            before = not stage.is_first and index - 1 not in local
            behind = not stage.is_last and index + 1 not in local
            configs.append(
                StageConfig(
                    index,
                    microbatches=count,
                    slots=count,
                    sends_output=behind,
                    sends_gradient=before,
                    receives_input=before,
                    receives_gradient=behind,
                    feeds=index + 1 if index + 1 in local else None,
                    reduces=self._reductions.reduces[index],
                )
            )
        return Contract(configs, omit=UNUSED, declared=self._declared, epoch=self._epoch)

    # A step

    def _step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def guarded_step(*args: Any, **kwargs: Any) -> Any:
            if not self.schedule._has_backward:  # eval
                with self._unguarded():
                    return step(*args, **kwargs)
            self._begin_step()
            self._check_functions()
            try:
                with self._guarded_walk():
                    found = step(*args, **kwargs)
                self._finish()
            except BaseException:
                for ticket in self.contract.outstanding():
                    self.contract.abort(ticket)
                raise
            return found

        return guarded_step

    @contextmanager
    def _unguarded(self) -> Iterator[None]:
        """Let forwards run outside any epoch."""
        idle, self._idle = self._idle, True
        try:
            yield
        finally:
            self._idle = idle

    _idle = False

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
        self._current = GuardedStep(self.contract, self._reductions)
        self._checked.clear()
        self._posted.clear()

    def _check_functions(self) -> None:
        registered = getattr(self.schedule, "_comp_type_to_function_map", {})
        if any(kind.value == "OVERLAP_F_B" for kind in registered):
            raise ValueError(
                "a registered function runs OVERLAP_F_B: a forward and a backward of one rank at "
                "the same time, whose order the guard cannot see; register a function for each "
                "part, or remove this one"
            )

    def _finish(self) -> None:
        self.at = "the end of the step"
        with self._noted():
            self._current.finish(stage.stage_index for stage in self.stages)

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
        event = kind, stage, microbatch = event_of(action)
        self.at = str(action)
        try:
            if kind in _COMPUTED:
                self._checked[event] = self._current.check(event)
            elif kind in _MESSAGES:
                self._current.post_message(event)
                self._posted.add(event)
            elif kind in _AWAITED:
                self._current.finish_send((_AWAITED[kind], stage, microbatch))
            elif kind == _REDUCE:
                self._current.reduce(stage)
                self._posted.add(event)
            elif kind == _REDUCED:
                self.contract.finish_reduction(stage)
        except Refused as refused:
            self._note(refused, f", step {step} of its row")
            raise

    def end(self, action: Any) -> None:
        """Commit an action that no stage method committed: a registered function ran it."""
        event = event_of(action)
        self._posted.discard(event)
        block = self._checked.pop(event, None)
        if block is not None:
            self._current.commit(event, block)

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
        for name, kind in _MESSAGE_METHODS.items():
            ends = stage.is_last if kind in ("SEND_F", "RECV_B") else stage.is_first
            if not ends:
                self._replace(stage, name, self._guarded_ops(kind, index, getattr(stage, name)))
        if hasattr(stage, "perform_reduce_grad"):
            reduce = stage.perform_reduce_grad

            def perform_reduce_grad(*args: Any, **kwargs: Any) -> Any:
                if not self._idle and (_REDUCE, index, -1) not in self._posted:
                    self.at = f"{index}{_REDUCE}"
                    with self._noted():
                        self._current.reduce(index)
                return reduce(*args, **kwargs)

            self._replace(stage, "perform_reduce_grad", perform_reduce_grad)

    def _guarded_ops(self, kind: str, index: int, ops: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that posts messages: report each message to the contract, unless the walk
        has done so."""

        def get_ops(chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            event = (kind, index, chunk_id)
            if event in self._posted:
                self._posted.discard(event)
            elif not self._idle:
                self.at = f"{index}{kind}{chunk_id}"
                with self._noted():
                    self._current.post_message(event)
            return ops(chunk_id, *args, **kwargs)

        return get_ops

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        setattr(owner, name, method)
        self._replaced.append((owner, name))

    @contextmanager
    def _running(self, event: Event) -> Iterator[None]:
        """Check a stage's action, unless the walk has checked it, and commit the action once it has
        run."""
        if self._idle:
            yield
            return
        block = self._checked.pop(event, None)
        if block is None:
            self.at = f"{event[1]}{event[0]}{event[2]}"
            with self._noted():
                block = self._current.check(event)
        try:
            yield
        except BaseException as error:
            block.__exit__(type(error), error, error.__traceback__)
            raise
        with self._noted():
            self._current.commit(event, block)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Add rank and action to a refusal."""
        try:
            yield
        except Refused as refused:
            self._note(refused)
            raise

    def _note(self, refused: Refused, place: str = "") -> None:
        rank = getattr(self.schedule, "rank", None)
        rank = self.stages[0].group_rank if rank is None else rank
        refused.add_note(f"at pipeline rank {rank}{place}: {self.at}")
