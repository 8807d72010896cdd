"""
The actions of a guarded pipeline's steps. Each action is checked before it runs, and committed
afterwards.

torch's `_PipelineScheduleRuntime` goes through the rank's row of a table (the walk), and runs
assertions before an action computes. Therefore the guard checks an action when the walk reaches it.
Methods of the stages then compute the action. Schedule classes with a single stage per rank (1F1B,
GPipe) have no table and call these methods in their own loops. The guard replaces these methods
with guarded methods, which check every action that the walk has not checked, and commit every
action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from qeffect.refusals import Refused

from .evidence import is_sharded
from .judging import Judge
from .pipelining_evidence import METHODS, StageEvidence
from .pipelining_step import GuardedStep
from .pipelining_table import GuardedRow, ReadActions, event_of
from .trust import PIPELINING
from .works import Event

__all__ = ["ActionGuard"]

_COMPUTED = frozenset({"F", "I", "W", "B"})
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
#: The stage's methods that reduce or scale gradients; torch 2.15 calls the second under FSDP.
_REDUCE_METHODS = ("perform_reduce_grad", "start_gradient_reduction")


class ActionGuard:
    """
    Guards the actions of one rank, both in the walk over the rank's row and in the methods of its
    stages.

    Args:
        schedule: The schedule.
        stages: The schedule's stages on this rank.
        judge: The object that asks the contract.

    Attributes:
        evidence: The evidence that the actions ran.
        step: The current step, which `begin_step` sets.
        messages: How many messages the current step has posted.
        walks: Whether torch runs the schedule from a table.
    """

    step: GuardedStep

    def __init__(self, schedule: Any, stages: list[Any], judge: Judge) -> None:
        self._schedule, self._stages, self._judge = schedule, stages, judge
        self.evidence = StageEvidence(stages)
        self.walks = hasattr(schedule, "pipeline_order_with_comms")
        self.messages = 0
        self._reducing = False
        #: The kinds that registered functions run in this step, and torch's actions, read once.
        self._functions: frozenset[str] = frozenset()
        self._read = ReadActions()
        #: The parts of the last overlapped action; a stage's method removes what it has run.
        self._parts: set[Event] = set()
        #: What the walk has checked or posted, so that the stage's method does not do it again.
        self._checked: set[Event] = set()
        self._posted: set[Event] = set()

    def begin_step(self, step: GuardedStep, *, begins_epoch: bool = True) -> None:
        """Drop the records of the last step, even if it has not finished, and begin a new step."""
        self.step = step
        self.evidence.begin_step(begins_epoch=begins_epoch)
        self._checked.clear()
        self._posted.clear()
        self._parts.clear()

    def forget(self) -> None:
        """Forget all unfinished actions. Nothing is checked until the next step."""
        self.abort()
        self._checked.clear()
        self._posted.clear()
        self.evidence.stop_watching()

    def abort(self) -> None:
        """Abort all unfinished actions."""
        self._judge.abort(self.step.steps)

    def registered(self) -> frozenset[str]:
        """Return the kinds of action for which a registered function replaces torch's own code."""
        functions = getattr(self._schedule, "_comp_type_to_function_map", {})
        return frozenset(kind.value for kind in functions)

    def on_trust(self) -> list[str]:
        """Return sentences that say what the guard does not check about registered functions."""
        own = [stage.stage_index for stage in self._stages]
        recorded = [n for n in own if self.evidence.keeps_records(n)]
        kept = [n for n in own if self.evidence.keeps_graphs(n) and n not in recorded]
        judged = {*METHODS} if len(kept) < len(own) else set()
        if recorded == own:
            judged.add(_OVERLAP)
        kinds = sorted(self.registered())
        said = [
            PIPELINING["function" if kind in judged else "unseen function"].said(kind=kind)
            for kind in kinds
        ]
        return said + [PIPELINING["graphs"].said(stage=n) for n in kept if kinds]

    def read_functions(self) -> None:
        """Find out which functions are registered in this step."""
        self._functions = self.registered()

    def check_functions(self) -> None:
        """
        Check that the order of actions is visible, whatever functions are registered.

        A forward and a full backward of different stages or microbatches do not depend on each
        other. If they run in graphs of their stages, the contract takes them in the table's order.

        Raises:
            ValueError: A function runs a forward and a backward at the same time, and not in graphs
                of their stages.
        """
        if not self.walks or _OVERLAP not in self._functions:
            return
        row = self._schedule.pipeline_order_with_comms[self._schedule.rank]
        overlaps = [action for action in row if event_of(action)[0] == _OVERLAP]
        if not all(self._runs_in_graphs(action) for action in overlaps):
            raise ValueError(
                "a registered function runs OVERLAP_F_B: a forward and a backward of one rank at "
                "the same time, whose order the guard cannot see; register a function for each "
                "part, or remove this function"
            )

    def _runs_in_graphs(self, overlap: Any) -> bool:
        """
        Whether the parts of an overlap run in graphs of their stages: a forward and a full backward
        of another stage or microbatch.
        """
        parts = _parts_of(overlap)
        kinds = sorted(kind for kind, _, _ in parts)
        works = {(stage, microbatch) for _, stage, microbatch in parts}
        graphs = all(self.evidence.keeps_graphs(stage) for stage, _ in works)
        return kinds == ["B", "F"] and len(works) == 2 and graphs

    # The walk

    @contextmanager
    def guarded_walk(self) -> Iterator[None]:
        """Check each action when torch's loop reaches it, while the step runs."""
        if not self.walks:
            yield
            return
        schedule = self._schedule
        table = schedule.pipeline_order_with_comms
        row = GuardedRow(table[schedule.rank], self)
        schedule.pipeline_order_with_comms = {**table, schedule.rank: row}
        try:
            yield
        finally:
            schedule.pipeline_order_with_comms = table

    def begin(self, step: int, action: Any) -> None:
        """
        Check the action of the table that the walk has reached.

        Args:
            step: The action's place in the row, from 0.
            action: torch's action.

        Raises:
            Refused: The action breaks the contract. A note at the error names rank, step and
                action.
        """
        event, text = self._read(action)
        self._judge(text, self._begin, event, action, step=step)

    def _begin(self, event: Event, action: Any) -> None:
        kind, stage, microbatch = event
        if kind in _COMPUTED:
            self._check(event)
            self._checked.add(event)
            self._watch(event)
        elif kind == _OVERLAP:
            parts = _parts_of(action)
            self._parts = set(parts)
            if kind in self._functions:
                self._check(parts[0])
                self._checked.add(parts[0])
                for part in parts:
                    self.evidence.watch(part, registered=True)
        elif kind in _MESSAGES:
            self._post(event)
            self._posted.add(event)
        elif kind in _AWAITED:
            self.step.finish_sends(((_AWAITED[kind], stage, microbatch),))
        elif kind == _REDUCE:
            self.step.reduce(stage)
            self._posted.add(event)
            self._watch(event)
        elif kind == _REDUCED:
            self.step.end_reduction(stage)
            self._posted.add(event)

    def end(self, step: int, action: Any) -> None:
        """
        Commit an action if its computation ran and no stage method has committed it.

        Args:
            step: The action's place in the row, from 0.
            action: torch's action.

        Raises:
            Refused: The computation of the action did not run.
        """
        event, text = self._read(action)
        if event[0] == _OVERLAP and _OVERLAP in self._functions:
            for part in _parts_of(action):
                self._judge(text, self._end_part, part, step=step)
        else:
            self._judge(text, self._end, event, step=step)

    def _end_part(self, part: Event) -> None:
        """Commit a part of an overlap that has run; the contract takes one part after another."""
        if part not in self._parts:  # a stage's method has run and committed the part
            return
        if part not in self._checked:
            self._check(part)
            self._checked.add(part)
        self._end(part)

    def _end(self, event: Event) -> None:
        if event in self._checked:
            self._checked.discard(event)
            if self._left_out(event):
                self.abort()
                raise self.evidence.not_run(event)
            self._commit(event)
        elif event[0] == _OVERLAP and self._parts:
            raise self.evidence.not_run(min(self._parts))
        elif event in self._posted:
            self._posted.discard(event)
            if event[0] == _REDUCE and self._reduces(event[1]) and self._left_out(event):
                raise self.evidence.not_run(event)
            if event[0] == _REDUCED and self.evidence.still_reduces(event[1]):
                raise self.evidence.not_run(event)

    def _post(self, event: Event) -> None:
        self.step.post_message(event)
        self.messages += 1

    def _watch(self, event: Event) -> None:
        self.evidence.watch(event, registered=event[0] in self._functions)

    def _provided(self, event: Event) -> bool:
        """Whether a registered function runs an action by its stage's graphs, without records."""
        kind, stage, _ = event
        if self.evidence.keeps_records(stage) or not self.evidence.keeps_graphs(stage):
            return False
        return kind in self._functions or event in self._parts

    def _left_out(self, event: Event) -> bool:
        """Whether an action was left out: it left no evidence, and no stage's graph runs it."""
        return self.evidence.replaced(event) and not self._provided(event)

    def _reduces(self, index: int) -> bool:
        """
        Whether the reduction of a stage's gradients has to run: it changes them, or leaves a record
        in any case.
        """
        if _REDUCE in self._functions and self.evidence.keeps_records(index):
            return True
        if self._schedule.scale_grads and self._schedule._n_microbatches > 1:
            return True
        stage = next(stage for stage in self._stages if stage.stage_index == index)
        starts = hasattr(stage, _REDUCE_METHODS[1]) and is_sharded(stage.submod)
        return starts and bool(getattr(self._schedule, "_finalize_gradients", True))

    def _check(self, event: Event) -> bool:
        self.evidence.check_weights(event)
        self.step.check(event)
        return True

    def _commit(self, event: Event) -> None:
        self.step.commit(event)
        self.evidence.wrote(event, self._schedule._n_microbatches)
        if event[0] == "F":
            self.evidence.forwarded(event)

    # The stages' methods

    def guard_methods(self, stage: Any, replace: Callable[[Any, str, Any], None]) -> None:
        """
        Replace a stage's methods with guarded methods.

        Args:
            stage: The stage.
            replace: Function that is called with the stage, a method's name and the replacement of
                the method.
        """
        index = stage.stage_index
        forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
        weight = stage.backward_weight_one_chunk

        def forward_one_chunk(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            return self._run(("F", index, fwd_chunk_id), forward, fwd_chunk_id, *args, **kwargs)

        def backward_one_chunk(
            bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **kwargs: Any
        ) -> Any:
            event = "B" if full_backward else "I", index, bwd_chunk_id
            given = {"loss": loss, "full_backward": full_backward, **kwargs}
            return self._run(event, backward, bwd_chunk_id, **given)

        def backward_weight_one_chunk(bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            return self._run(("W", index, bwd_chunk_id), weight, bwd_chunk_id, *args, **kwargs)

        for method in (forward_one_chunk, backward_one_chunk, backward_weight_one_chunk):
            replace(stage, method.__name__, method)
            self.evidence.own(index, method.__name__, method)
        for name, kind in _MESSAGE_METHODS.items():
            ends = stage.is_last if kind in ("SEND_F", "RECV_B") else stage.is_first
            if not ends:
                replace(stage, name, self._guarded_ops(kind, index, getattr(stage, name)))
        for name in _REDUCE_METHODS:
            if hasattr(stage, name):
                reduce = self._guarded_reduce(index, getattr(stage, name))
                replace(stage, name, reduce)
                self.evidence.own(index, name, reduce)

    def _guarded_reduce(self, index: int, reduce: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that reduces or scales a stage's gradients; inner calls are not checked."""
        event = (_REDUCE, index, -1)

        def begin() -> None:
            if event not in self._posted:
                self.step.reduce(index)
            self._posted.discard(event)
            self.evidence.forget(event)

        def guarded_reduce(*args: Any, **kwargs: Any) -> Any:
            if self._reducing:
                return reduce(*args, **kwargs)
            self._judge(f"{index}{_REDUCE}", begin)
            self._reducing = True
            try:
                return reduce(*args, **kwargs)
            finally:
                self._reducing = False

        return guarded_reduce

    def _guarded_ops(self, kind: str, index: int, ops: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that posts messages: report each message to the contract, unless the walk
        has done so."""

        def get_ops(chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            event = (kind, index, chunk_id)
            if event in self._posted:
                self._posted.discard(event)
            else:
                self._judge(f"{index}{kind}{chunk_id}", self._post, event)
            return ops(chunk_id, *args, **kwargs)

        return get_ops

    def _run(self, event: Event, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a stage's action: check it, unless the walk has checked it, and commit it once it has
        run."""
        if checked := event in self._checked:
            self._checked.discard(event)
        else:
            said = f"{event[1]}{event[0]}{event[2]}"
            checked = self._judge(said, self._check, event) is not None
        if event[0] == "I" and checked:
            self.evidence.begin_split(event, kwargs.get("loss"))
        try:
            found = method(*args, **kwargs)
        except BaseException:
            self.abort()
            raise
        if checked:
            self._judge("", self._ran, event)
        return found

    def _ran(self, event: Event) -> None:
        """Commit an action that the stage's own method has run."""
        self.evidence.forget(event)
        self._parts.discard(event)
        try:
            if self.evidence.untouched(event):
                raise self.evidence.not_run(event)
            self.evidence.check_split(event)
        except Refused:
            self.abort()
            raise
        self._commit(event)


def _parts_of(overlap: Any) -> list[Event]:
    """Return the parts of an overlapped action as events."""
    return [event_of(part) for part in overlap.sub_actions]
