"""
A contract under a schedule of `torch.distributed.pipelining`, for training code of one's own.

`guard(schedule)` needs neither Transformer Engine nor graphs, and changes no result: the schedule
runs as before, and a contract checks every action before it runs and commits it afterwards. The
guard refuses, by clause and on the rank where it happens, what torch does not notice: a microbatch
that is forwarded twice, a weight gradient or a message that is left out, actions in another order
than the table's. A table that `qeffect check` refuses is refused before the first step.

Where the guard takes hold: `_PipelineScheduleRuntime` walks a table, and asserts some things before
it computes, so the guard checks each action when the walk reaches it. The methods of the stages
compute, and the single-stage classes (1F1B, GPipe) call them in loops of their own: there the guard
checks an action unless the walk has, and commits it. A function registered with
`register_custom_function` replaces an action and cannot call what torch would have run. Such a
function therefore cannot guard torch's own actions; a registered function is guarded as the action
that it replaces.

What the guard knows of a plain module: which microbatch's work is retained, from F to dI to dW
(ownership); the order of F and dI on the rank (order); the stages' messages and reductions. It
knows nothing of weight caches, gradient buffers, graphs and streams; those relations are left out.
Sends and reductions end where the table awaits them (torch 2.15), otherwise at the end of the
step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from qeffect.config import StageConfig
from qeffect.contract import Contract
from qeffect.guarded import Dgrad, Forward
from qeffect.keys import Cell, TapeKey, TapeRef, cell_of
from qeffect.refusals import Refused
from qeffect.relations.constants import GENERATION_MAX
from qeffect.schedule.actions import Kind, Schedule, ScheduleError
from qeffect.schedule.infer import from_actions
from qeffect.schedule.ranks import check_ranks
from qeffect.schedule.torch_tables import SINGLE, torch_schedule
from qeffect.schedule.transport import Transport
from qeffect.text import shown

__all__ = ["UNUSED", "GuardedSchedule", "guard"]

#: Relations that a guard of plain modules leaves out.
UNUSED = ("version", "arena", "capture", "completion")

_Event = tuple[str, int, int]
_COMPUTED = frozenset({"F", "I", "W", "B"})
_RECEIVES = frozenset({"RECV_F", "RECV_B"})
_CARRIED = _RECEIVES | {"SEND_F", "SEND_B"}
_AWAITED = {"WAIT_SEND_F": "SEND_F", "WAIT_SEND_B": "SEND_B"}
_REDUCE, _REDUCED = "REDUCE_GRAD", "WAIT_REDUCE_GRAD"
#: The stage's methods that carry messages, by what they do.
_MESSAGES = {
    "get_fwd_recv_ops": "RECV_F",
    "get_bwd_recv_ops": "RECV_B",
    "get_fwd_send_ops": "SEND_F",
    "get_bwd_send_ops": "SEND_B",
}
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
        table = _table(schedule)
        if table is not None:
            found = check_ranks(table, transport)
            if found:
                raise ScheduleError(f"{table.source}: {found[0]} ({found[0].remedy})")
        self._declared: Mapping[Hashable, Sequence[tuple[str, Cell]]] | None = (
            None if table is None else _declared(table, stages)
        )
        # A loop without reductions may be intended, as in torch 2.15 when FSDP accumulates.
        self._reduces = {stage.stage_index: False for stage in stages}
        self._awaits_sends = self._awaits_reductions = False
        if table is not None and self._walks:
            self._awaits_sends = table.awaits_sends
            self._awaits_reductions = table.awaits_reductions
            reduced = {a.stage for row in table.atoms for a in row if a.kind is Kind.REDUCE_GRAD}
            self._reduces = {index: index in reduced for index in self._reduces}
        self.contract = self._contract()
        self._asked: dict[_Event, Any] = {}
        self._told: set[_Event] = set()
        self._refs: dict[tuple[int, int], TapeRef] = {}
        self._posted: set[_Event] = set()
        self._reading: set[_Event] = set()
        self._final: set[int] = set()
        self._reducing: list[int] = []
        self._put: list[tuple[Any, str]] = []
        for stage in stages:
            self._guard_stage(stage)
        self._replace(schedule, "step", self._step(schedule.step))
        for owner in (schedule, *stages):
            setattr(owner, _MARK, self)

    def remove(self) -> None:
        """Remove the guard; the schedule and its stages are as they were before it."""
        while self._put:
            owner, name = self._put.pop()
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
        self._forget()
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
                    reduces=self._reduces[index],
                )
            )
        return Contract(configs, omit=UNUSED, declared=self._declared, epoch=self._epoch)

    # A step

    def _step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def guarded_step(*args: Any, **kwargs: Any) -> Any:
            if not self.schedule._has_backward:  # eval
                with self._alone():
                    return step(*args, **kwargs)
            self._forget()
            self._check_functions()
            try:
                with self._walked():
                    found = step(*args, **kwargs)
                self._finish()
            except BaseException:
                for ticket in self.contract.outstanding():
                    self.contract.abort(ticket)
                raise
            return found

        return guarded_step

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let forwards run outside any epoch."""
        idle, self._idle = self._idle, True
        try:
            yield
        finally:
            self._idle = idle

    _idle = False

    @contextmanager
    def _walked(self) -> Iterator[None]:
        """Check each action when torch's loop reaches it, while the step runs."""
        if not self._walks:
            yield
            return
        schedule = self.schedule
        table = schedule.pipeline_order_with_comms
        row = _Row(table[schedule.rank])
        row.guard = self
        schedule.pipeline_order_with_comms = {**table, schedule.rank: row}
        try:
            yield
        finally:
            schedule.pipeline_order_with_comms = table

    def _forget(self) -> None:
        self._asked.clear()
        self._told.clear()
        self._refs.clear()
        self._posted.clear()
        self._reading.clear()
        self._final.clear()
        self._reducing.clear()

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
            if not self._awaits_sends:  # torch has already waited for every send
                for event in sorted(self._reading):
                    self._sent(event)
            for stage in self.stages:
                if stage.stage_index not in self._final:
                    self.contract.finalize(stage.stage_index)
            if not self._awaits_reductions:
                for reduced in self._reducing:
                    self.contract.finish_reduction(reduced)
            self.contract.commit_epoch()

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
        event = kind, stage, microbatch = _event(action)
        self.at = str(action)
        try:
            if kind in _COMPUTED:
                self._asked[event] = self._ask(event)
            elif kind in _CARRIED:
                self._message(event)
                self._told.add(event)
            elif kind in _AWAITED:
                self._sent((_AWAITED[kind], stage, microbatch))
            elif kind == _REDUCE:
                self._reduce(stage)
                self._told.add(event)
            elif kind == _REDUCED:
                self.contract.finish_reduction(stage)
        except Refused as refused:
            self._note(refused, f", step {step} of its row")
            raise

    def end(self, action: Any) -> None:
        """Commit an action that no stage method committed: a registered function ran it."""
        event = _event(action)
        self._told.discard(event)
        asked = self._asked.pop(event, None)
        if asked is not None:
            self._tell(event, asked)

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
        for name, kind in _MESSAGES.items():
            ends = stage.is_last if kind in ("SEND_F", "RECV_B") else stage.is_first
            if not ends:
                self._replace(stage, name, self._carrying(kind, index, getattr(stage, name)))
        if hasattr(stage, "perform_reduce_grad"):
            reduce = stage.perform_reduce_grad

            def perform_reduce_grad(*args: Any, **kwargs: Any) -> Any:
                if not self._idle and (_REDUCE, index, -1) not in self._told:
                    self.at = f"{index}{_REDUCE}"
                    with self._noted():
                        self._reduce(index)
                return reduce(*args, **kwargs)

            self._replace(stage, "perform_reduce_grad", perform_reduce_grad)

    def _carrying(self, kind: str, index: int, ops: Callable[..., Any]) -> Callable[..., Any]:
        def get_ops(chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            event = (kind, index, chunk_id)
            if event in self._told:
                self._told.discard(event)
            elif not self._idle:
                self.at = f"{index}{kind}{chunk_id}"
                with self._noted():
                    self._message(event)
            return ops(chunk_id, *args, **kwargs)

        return get_ops

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        setattr(owner, name, method)
        self._put.append((owner, name))

    @contextmanager
    def _running(self, event: _Event) -> Iterator[None]:
        """Check a stage's action unless the walk has, and commit it once it has run."""
        if self._idle:
            yield
            return
        asked = self._asked.pop(event, None)
        if asked is None:
            self.at = f"{event[1]}{event[0]}{event[2]}"
            with self._noted():
                asked = self._ask(event)
        try:
            yield
        except BaseException as error:
            asked.__exit__(type(error), error, error.__traceback__)
            raise
        with self._noted():
            self._tell(event, asked)

    def _ask(self, event: _Event) -> Any:
        kind, stage, microbatch = event
        key, work = TapeKey(self.contract.epoch, stage, microbatch), (stage, microbatch)
        block: Any
        if kind == "F":
            self._received("RECV_F", key)
            block = self.contract.forward(key)
        elif kind == "W":
            block = self.contract.wgrad(key, self._ref(work))
        else:
            self._received("RECV_B", key)
            block = self.contract.dgrad(key, self._ref(work))
        return block.__enter__()

    def _tell(self, event: _Event, block: Any) -> None:
        kind, stage, microbatch = event
        block.__exit__(None, None, None)
        if isinstance(block, Forward):
            self._refs[stage, microbatch] = block.ref
        elif isinstance(block, Dgrad) and kind == "B":  # its dW has run as well
            key = TapeKey(self.contract.epoch, stage, microbatch)
            with self.contract.wgrad(key, self._ref((stage, microbatch))):
                pass

    def _ref(self, work: tuple[int, int]) -> TapeRef:
        ref = self._refs.get(work)
        if ref is None:  # nothing was retained: use a reference that was never issued
            return TapeRef(0, GENERATION_MAX, self.contract.incarnation)
        return ref

    def _message(self, event: _Event) -> None:
        kind, stage, microbatch = event
        key, gradient = TapeKey(self.contract.epoch, stage, microbatch), kind.endswith("B")
        if kind == "RECV_F":
            self._refs[stage, microbatch] = self.contract.reserve(key)
        ref = self._ref((stage, microbatch))
        if kind in _RECEIVES:
            self.contract.post_receive(key, ref, gradient=gradient)
            self._posted.add(event)
        else:
            self.contract.read(key, ref, gradient=gradient)
            self._reading.add(event)

    def _received(self, kind: str, key: TapeKey) -> None:
        event = (kind, key.stage, key.microbatch)
        if event in self._posted:
            self._posted.discard(event)
            ref = self._ref((key.stage, key.microbatch))
            self.contract.finish_receive(key, ref, gradient=kind == "RECV_B")

    def _sent(self, event: _Event) -> None:
        kind, stage, microbatch = event
        key = TapeKey(self.contract.epoch, stage, microbatch)
        ref = self._ref((stage, microbatch))
        self.contract.finish_read(key, ref, gradient=kind == "SEND_B")
        self._reading.discard(event)

    def _reduce(self, stage: int) -> None:
        self.contract.finalize(stage)
        self._final.add(stage)
        if self._reduces[stage]:
            self.contract.start_reduction(stage)
            self._reducing.append(stage)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except Refused as refused:
            self._note(refused)
            raise

    def _note(self, refused: Refused, place: str = "") -> None:
        rank = getattr(self.schedule, "rank", None)
        rank = self.stages[0].group_rank if rank is None else rank
        refused.add_note(f"at pipeline rank {rank}{place}: {self.at}")


def _event(action: Any) -> _Event:
    microbatch = -1 if action.microbatch_index is None else action.microbatch_index
    return action.computation_type.value, action.stage_index, microbatch


class _Row(list[Any]):
    """
    A rank's row whose first walk checks each action when it is reached, and then commits it.

    The first walk is the step's. torch walks the row again to print it when an action fails.
    """

    guard: GuardedSchedule | None = None

    def __iter__(self) -> Iterator[Any]:
        guard, self.guard = self.guard, None
        if guard is None:
            yield from super().__iter__()
            return
        for step, action in enumerate(super().__iter__()):
            guard.begin(step, action)
            yield action
            guard.end(action)


def _table(schedule: Any) -> Schedule | None:
    """The table that a schedule executes; None for a user's own class without a table."""
    name = type(schedule).__name__
    order: Mapping[int, Any] | None = getattr(schedule, "pipeline_order_with_comms", None)
    if order is not None:
        return from_actions(
            {rank: list(row) for rank, row in order.items()},
            source=name,
            num_stages=schedule._num_stages,
            num_microbatches=schedule._n_microbatches,
        )
    if name in SINGLE and type(schedule).__module__.startswith("torch."):
        return torch_schedule(
            name, pp=schedule._num_stages, microbatches=schedule._n_microbatches, comms=True
        )
    return None


def _declared(table: Schedule, stages: list[Any]) -> dict[Hashable, list[tuple[str, Cell]]]:
    """The order of F and dI on this rank, from the table."""
    rank = table.stage_to_rank[stages[0].stage_index]
    names = {Kind.FORWARD: "F", Kind.DGRAD: "dI"}
    return {
        0: [
            (names[atom.kind], cell_of(atom.stage, atom.microbatch, 0, 0))
            for atom in table.atoms[rank]
            if atom.kind in names
        ]
    }
