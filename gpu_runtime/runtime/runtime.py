"""
The runtime of one process: its stages, their one state domain, and the boundaries of an epoch.

Everything that spans stages lives here: the contract, the slot plan, the snapshot of the last
commit from which a poisoned domain is restored, capture, and the optimizer step (finalize, no
retained work, update, next epoch). Actions are in `qeffect.gpu_runtime.step.actions`.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import attrs
import torch

from qeffect.checkpoint import Checkpoint, require_same
from qeffect.config import Bucket, StageConfig
from qeffect.contract import Contract
from qeffect.counts import DeviceCounts
from qeffect.engine.stage import OPTIONAL
from qeffect.keys import TapeKey
from qeffect.log.recorder import Recorder
from qeffect.refusals import Refused
from qeffect.text import shown

from ..backends.protocol import BackendError, StageBackend, StateDomain
from ..step.actions import GuardedActions
from ..step.clipping import Norm
from ..step.eager import EagerExecutor, Executor, StageMemory
from ..step.effects import StageReports
from ..step.memory.arena import Arena, by_matrix
from ..step.memory.copies import buckets_of, names_of, require_copies
from ..step.memory.counters import DeviceCounters
from ..step.memory.scaling import AMAX, SharedScaling
from ..step.memory.state import (
    GatedSnapshot,
    NumericalState,
    Snapshot,
    live_state,
    preserving,
)
from ..step.memory.tied import Tied
from ..step.optimizer import Gradients, Optimizer
from ..step.plan.order import Kind, Order
from ..step.plan.rows import Row
from ..step.plan.slots import SlotPlan, plan_slots
from ..step.reductions import SCALING, Reducer, Reductions, require_buckets
from ..step.streams import Handoff, handoff_for
from .configuration import RuntimeConfig


class Runtime:
    """
    Guarded F, dI, dW over the stages of one state domain.

    Args:
        stages: Every stage of the domain, that is of the process.
        order: The rank's row of the schedule: slots are a function of it.
        config: How to run.
        event_log: Where to write every accepted transition: a path, a binary file, or True for
            memory (`recorder.lines`). None costs nothing. `close` ends the log.
        reducer: Reduces a bucket's gradients in place over data-parallel ranks; it is given the
            bucket's name and the gradients by name, and may return what `wait` ends.
        row: The row with its messages, where the process is one of a pipeline. Its slots are the
            runtime's, counted with messages, and it says which stages receive and send;
            `RuntimeConfig`'s provisioning, feeds and readers are then its own.
        rank: Rank of the process, for whoever reads the event log.

    Raises:
        BackendError: The order names other stages or is not whole, the backend cannot be captured,
            or a stage does not fit the configuration.
    """

    def __init__(
        self,
        stages: Sequence[StageBackend],
        order: Order,
        config: RuntimeConfig | None = None,
        *,
        event_log: str | os.PathLike[str] | BinaryIO | bool | None = None,
        reducer: Reducer | None = None,
        row: Row | None = None,
        rank: int | None = None,
    ) -> None:
        self.row = row
        self.config = config or RuntimeConfig()
        self.reducer = reducer
        self._keys: dict[tuple[int, int], TapeKey] = {}
        self._keys_of = -1
        self._totals: dict[int, dict[str, torch.Tensor]] = {}
        self._final: set[int] = set()
        self.order = order
        self.domain = _one_domain(stages)
        self.stages = {stage.index: stage for stage in stages}
        if not isinstance(order, Order):
            raise BackendError(
                f"expected an Order, such as Order.parse('0F0 0I0 0W0'), found {shown(order)}"
            )
        order.require_whole()
        self.relations = frozenset[str]().union(*(stage.relations for stage in stages))
        if tuple(sorted(self.stages)) != order.stages:
            raise BackendError(
                f"the order runs stages {list(order.stages)}, this process has "
                f"{sorted(self.stages)}; build the stages of the rank whose row it is"
            )
        self.tied = Tied.of(stages, self.config.tied)
        self._require_shareable()
        self._require_amax()
        require_copies(
            self.stages, self.config.copies, self.config.buckets, reduces=self.reducer is not None
        )
        buckets = require_buckets(
            self.stages,
            self.config.buckets,
            self.config.reductions,
            self.tied,
            self.config.copies,
            reduces=self._guarded_reducer is not None,
        )
        plan = (
            plan_slots(order, self.config.provisioning, feeds=self.config.feeds)
            if row is None
            else row.slots
        )
        self.plan: SlotPlan = attrs.evolve(plan, sharers=self.tied.sharers)
        self.handoff: Handoff = handoff_for(self.domain.device)
        self.handoff.wait_for_caller()
        with self.handoff.scope(), preserving(self.domain):
            for stage in stages:
                stage.warm()
        self.handoff.synchronize()
        self.memories = self._allocate()
        scaling = SharedScaling(live_state(self.domain)) if self._shares_amax else None
        self.contract = Contract(
            [self._stage_config(memory) for memory in self.memories.values()],
            omit=sorted(OPTIONAL - self.relations),
            callers=self.config.callers,
            declared=self._declared(),
            reductions=self._reduction_order(),
            counted=self.config.counts is not None,
            late=self.config.counts_late,
        )
        self._reductions = Reductions(
            self.contract,
            buckets,
            self._total,
            told="reduction" in self.relations,
            copies=self.config.copies,
            scaling=scaling,
        )
        self.counters: DeviceCounters | None = None
        if self.config.counts is not None:
            places = [(i, slot.index) for i, m in self.memories.items() for slot in m.table]
            self.counters = DeviceCounters(places, self.domain.device)
        for own in self.contract.stages:
            self.memories[own.stage].all_matrices = own.matrices
        self.recorder: Recorder | None = None
        if event_log is not None and event_log is not False:
            into = None if event_log is True else event_log
            self.recorder = Recorder(self.contract, into, rank=rank)
        self.executor: Executor = self._make_executor()
        self.actions = GuardedActions(
            self.contract,
            self.memories,
            self.executor,
            self.handoff,
            {caller: self.contract.link(caller) for caller in self.config.callers},
        )
        self._restart_reports()
        self.handoff.synchronize()
        live = tuple(live_state(self.domain).values())
        self._committed = Snapshot(live)
        # Of the commit before: where counts come late, the last one may not have been.
        self._before = Snapshot(live) if self.config.counts_late else self._committed

    # Building

    def _allocate(self) -> dict[int, StageMemory]:
        memories: dict[int, StageMemory] = {}
        first = 0
        for index in sorted(self.stages):
            stage = self.stages[index]
            arena = Arena.for_stage(
                stage, self.config.rule, self.order.num_microbatches, self.config.dtype, self.tied
            )
            shared = self.tied.with_sharer(stage)
            reports = StageReports.of(stage, self.relations, captured=self.config.replays_graphs)
            memories[index] = StageMemory.allocate(stage, self.plan, arena, first, reports, shared)
            first += self.plan.num_slots[index]
        return memories

    def _stage_config(self, memory: StageMemory) -> StageConfig:
        stage = memory.stage
        reports = memory.reports.source
        row, index = self.row, stage.index
        readers = self.config.readers or row is not None
        buffers, tied = dict(self.tied.buffers(index)), self.tied.tied(index)
        if "reduction" in self.relations:
            copied = names_of(self.config.copies, index)
            shared = {m: copied[m] for m in memory.all_matrices if m in copied}
            buffers, tied = {**buffers, **shared}, (*tied, *shared)
        return StageConfig(
            stage=stage.index,
            microbatches=self.order.num_microbatches,
            slots=self.plan.num_slots[stage.index],
            matrices=memory.all_matrices,
            destinations=memory.arena.configured() if "arena" in self.relations else (),
            sends_output=readers,
            sends_gradient=readers and any(s.differentiable for s in stage.inputs),
            receives_input=row is not None and row.receives_input(index),
            receives_gradient=row is not None and row.receives_gradient(index),
            reduces=self._guarded_reducer is not None,
            reports_fills=reports.filled is not None,
            reports_updates=reports.updates is not None,
            tape_scales=reports.tape_scales,
            pool=self.config.pool,
            buckets=self._buckets(memory),
            buffers=buffers if "arena" in self.relations else {},
            tied=tied if "arena" in self.relations else (),
        )

    def _buckets(self, memory: StageMemory) -> tuple[Bucket, ...]:
        """
        A stage's buckets as the contract has them; none for one of all its gradients.

        The bucket of the scaling state is the last stage's. In a declared order it starts behind
        every gradient's, so behind the last F and dI of all stages.
        """
        index = memory.stage.index
        given = tuple(self.config.buckets.get(index, ()))
        if self._guarded_reducer is not None:
            given = given or buckets_of(memory.stage, self.config.copies)
        last = max(self.stages)
        if not self._shares_amax or self._guarded_reducer is None or index != last:
            return given
        return (*(given or (Bucket(index, memory.all_matrices),)), Bucket(SCALING))

    def _reduction_order(self) -> tuple[int | str, ...]:
        order = tuple(self.config.reductions)
        shared = order and self._shares_amax and self._guarded_reducer is not None
        return (*order, SCALING) if shared else order

    @property
    def _shares_amax(self) -> bool:
        """Whether there are replicas, and they share their scaling state."""
        return self.config.amax == "replicas" and self.reducer is not None

    def _require_amax(self) -> None:
        if self.config.amax not in AMAX:
            raise BackendError(
                f"amax is {self.config.amax!r}; expected one of {', '.join(map(repr, AMAX))}"
            )
        if self._shares_amax and not callable(getattr(self.reducer, "largest", None)):
            raise BackendError(
                "amax='replicas' needs a reducer that has largest(words), as "
                "qeffect.gpu_runtime.ranks.replicas.Replicas has; or take amax='replica'"
            )

    def _require_shareable(self) -> None:
        """Refuse tied weights where this runtime has no one place for their gradient."""
        if not self.tied.names:
            return
        if self.config.rule == "copied" or "arena" not in self.relations:
            raise BackendError(
                "weights are tied: their gradient needs one destination, so take the rule "
                "accumulate or per_microbatch, and a backend that uses the arena"
            )
        if self.tied.sharers and self.reducer is not None:
            raise BackendError(
                f"the stages {sorted(self.tied.sharers)} have tied weights, whose gradient leaves "
                "in a bucket of both; this runtime reduces buckets of one stage: tie matrices of "
                "one stage, or reduce the gradients that finalize returns"
            )

    @property
    def _guarded_reducer(self) -> Reducer | None:
        """The reducer, where the contract is told of reductions; a backend may leave them out."""
        return self.reducer if "reduction" in self.relations else None

    def on_trust(self) -> dict[int, tuple[str, ...]]:
        """
        What each stage's backend does not report here, so that it is taken on trust.

        Where graphs are replayed, that each did what its capture recorded, once, is taken on trust
        as well unless `RuntimeConfig.counts` is set.
        """
        return {own.stage: own.on_trust() for own in self.contract.stages}

    def _declared(self) -> Mapping[Hashable, Sequence[tuple[str, Any]]] | None:
        if not self.config.declared or "order" not in self.relations:
            return None
        names = {Kind.FORWARD: "F", Kind.DGRAD: "dI"}
        return {
            0: [
                (names[step.kind], (step.stage, step.microbatch, 0, 0))
                for step in self.order.steps
                if step.kind in names
            ]
        }

    def _make_executor(self) -> Executor:
        if not self.config.replays_graphs:
            return EagerExecutor(self.counters)
        from ..step.graphs import capture

        return capture(
            self.domain,
            self.memories,
            self.plan,
            self.handoff,
            shared_pool=self.config.pool,
            counters=self.counters,
            nested=self.config.mode == "one launch",
        )

    def caller_scope(self) -> Any:
        """
        A context in which the calling code runs on the graph stream.

        A loop inside it needs no event between its actions: one stream's order is both halves of
        the handoff. What the loop reads elsewhere must still wait for the stream.
        """
        return self.handoff.scope()

    # Actions, by name of the key

    def key(self, stage: int, microbatch: int) -> TapeKey:
        """The key of an execution in the current epoch."""
        epoch = self.contract.epoch
        if self._keys_of != epoch:
            self._keys_of = epoch
            self._keys.clear()
        key = self._keys.get((stage, microbatch))
        if key is None:
            key = self._keys[stage, microbatch] = TapeKey(epoch, stage, microbatch)
        return key

    @property
    def epoch(self) -> int:
        """The weight epoch."""
        return self.contract.epoch

    # The end of an epoch

    def finish(self, optimizer: Optimizer, *, caller: Hashable = "main") -> Gradients:
        """
        Finalize every stage, update the parameters, begin the next epoch.

        Args:
            optimizer: The optimizer over the same stages.
            caller: Name of the calling stream.

        Returns:
            The gradients that the optimizer was given, valid until the next dW.

        Raises:
            Refused: An F, dI or dW is missing, work is live, or the epoch was spoiled; nothing was
                updated.
        """
        gradients = self.finalize(caller=caller)
        self.update(optimizer, gradients, caller=caller)
        return gradients

    def reduce(self, bucket: int | str, *, caller: Hashable = "main") -> None:
        """
        Start a bucket's reduction, before the other stages or the epoch are at their end.

        The last dW of its stage has run. What is not reduced so, `finalize` reduces; it waits for
        what was started here.

        Args:
            bucket: Its name.
            caller: Name of the calling stream.

        Raises:
            Refused: A dW of the stage is missing, the bucket is not the next of the declared
                order, or its reduction has begun.
            BackendError: There is no reducer, or no bucket of that name.
        """
        reducer = self._guarded_reducer
        if reducer is None:
            raise BackendError(f"bucket {bucket!r} is to be reduced, and nothing reduces")
        if bucket not in self._reductions.buckets:
            raise BackendError(
                f"no bucket {bucket!r} is reduced; there are {[*self._reductions.buckets]}"
            )
        link = self.actions._enter(caller)
        with self.handoff.scope():
            self._reductions.start(reducer, bucket, link)
            self.handoff.record_tail()
        self.actions._leave(link)

    def finalize_stage(self, stage: int, *, caller: Hashable = "main") -> None:
        """
        Declare one stage's gradients whole, while others still run, and start its reductions.

        Args:
            stage: The stage; its last dW has run.
            caller: Name of the calling stream, the same for every stage.

        Raises:
            Refused: Something is missing or spoiled.
        """
        link = self.actions._enter(caller)
        self.contract.finalize(stage, link)
        self._final.add(stage)
        with self.handoff.scope():
            self._total(stage)
            if (reducer := self._guarded_reducer) is not None:
                self._reductions.start_of(reducer, stage, link)
            self.handoff.record_tail()
        self.actions._leave(link)

    def finalize(self, *, caller: Hashable = "main") -> Gradients:
        """
        Declare every stage's gradients whole, sum them, and reduce what is not reduced yet.

        Stages that `finalize_stage` was called for are whole already.

        Raises:
            Refused: Something is missing or spoiled; or, with late counts, the device skipped the
                last update: `rebuild` begins that epoch again.
        """
        self.confirm()
        link = self.actions._enter(caller)
        for index in self.memories:
            if index not in self._final:
                self.contract.finalize(index, link)
        with self.handoff.scope():
            if self.counters is not None and not self.config.counts_late:
                self.counters.read()  # first, so that the sums run while the host looks at it
            gradients: dict[int, Mapping[str, torch.Tensor]] = {
                index: self._total(index) for index in self.memories
            }
            if self.reducer is not None:
                self._reductions.end(self.reducer, link)
            self.handoff.record_tail()
        self.actions._leave(link)
        return gradients

    def _total(self, index: int) -> dict[str, torch.Tensor]:
        """Sum a stage's gradients, once an epoch: the sum is made in place."""
        if index not in self._totals:
            memory = self.memories[index]
            stage = memory.stage
            total = memory.arena.total(self.order.microbatches(stage.index, Kind.DGRAD))
            named = by_matrix(stage.units, total)
            named.update(zip((p.name for p in stage.non_matrix), memory.sums, strict=True))
            self._totals[index] = named
        return self._totals[index]

    def _forget_gradients(self) -> None:
        """What was summed and reduced is of an epoch that is over, or begins again."""
        self._totals.clear()
        self._reductions.forget()
        self._final.clear()
        for memory in self.memories.values():
            memory.arena.start_epoch()

    def update(
        self,
        optimizer: Optimizer,
        gradients: Gradients,
        *,
        caller: Hashable = "main",
        norm: Norm | None = None,
    ) -> int:
        """
        Commit the epoch and run the optimizer.

        The commit's guards come before the update, so that a refusal leaves the weights alone. The
        update runs on the graph stream, behind the caller's work and before the next replay.

        Args:
            optimizer: The optimizer over the same stages.
            gradients: What `finalize` returned.
            caller: Name of the calling stream; the one that `finalize` was called on.
            norm: What the gradients' norm says: their factor, and whether the update is skipped,
                on every rank alike. The epoch commits in any case.

        Returns:
            The new epoch.

        Raises:
            Refused: Work is live, a stage is not final, another caller finalized, or the device ran
                something else than was committed; nothing was updated.
        """
        link = self.actions._enter(caller)
        late = self.config.counts_late
        counted = None if late else self.device_counts()
        before = self.contract.epoch
        try:
            epoch = self.contract.commit_epoch(caller=caller, counted=counted)
            with self.handoff.scope():
                skip = self._gate() if late else None
                scale = None if norm is None else norm.scale(self.domain.device)
                if norm is not None and norm.skipped:
                    # Through the optimizer all the same: its first step makes its state.
                    skip = torch.ones((), device=self.domain.device)
                optimizer.step(gradients, skip=skip, scale=scale)
                self._committed, self._before = self._before, self._committed
                self._committed.take()
                self.handoff.record_tail()
        except BaseException:
            if self.contract.epoch != before:  # an observer may have raised after the commit, too
                self.actions.broken = (
                    f"the update to epoch {before + 1} failed after its commit: weights may be "
                    "half updated; load a checkpoint into a fresh runtime"
                )
            raise
        # The update was enqueued on the graph stream: its own order lets later replays wait for it.
        self.contract.join(link)
        self.actions._leave(link)
        self._forget_gradients()
        return epoch

    def _gate(self) -> torch.Tensor | None:
        """Let the device compare what it ran with what was committed."""
        if self.counters is None:
            return None
        return self.counters.gate(self.contract.committed_counts()[self.domain_name])

    @property
    def domain_name(self) -> Hashable:
        """The state domain's name in the contract."""
        return self.contract.stages[0].domain

    def confirm(self) -> None:
        """
        Present what the device had counted at the last commit, with ``counts='next step'``.

        `finalize` and `checkpoint` do; without late counts it does nothing. It waits for the last
        update, which a step later is long done.

        Raises:
            Refused: The device skipped that update, since it had not run what was committed;
                `rebuild` begins its epoch again.
        """
        if self.contract.counts_awaited:
            counted = self.device_counts()
            assert counted is not None
            self.contract.present_counts(counted)

    def counts_now(self) -> dict[Hashable, DeviceCounts] | None:
        """
        What the device has run until now, by state domain; None where it does not count.

        Waits for the device.
        """
        if self.counters is not None:
            with self.handoff.scope():
                self.counters.read()
        return self.device_counts()

    def device_counts(self) -> dict[Hashable, DeviceCounts] | None:
        """
        What the device had run at the last `finalize`, by state domain, for a commit of one's own.

        With late counts, at the last `update`.

        None if `RuntimeConfig.counts` is None. Waits for the device.
        """
        if self.counters is None:
            return None
        return {self.domain_name: self.counters.taken()}

    # Failure and restart

    def abort(self) -> int:
        """
        Abort every outstanding tape: something of the step failed that is no action of this class.

        An action that fails does this itself. A loop calls it when a transfer or another rank has
        failed. The epoch of a stage that had a tape can no longer commit; `rebuild` begins it
        again.

        Returns:
            How many tapes there were.
        """
        return self.actions.abort_outstanding()

    def rebuild(self) -> None:
        """
        Begin the epoch again after a failure: numerical state of the last commit, nothing live.

        Drops every tape that is left, waits for the device, restores the numerical state from the
        last commit's snapshot and begins a new incarnation, in which every older reference is
        refused and every weight cache is stale. Captured graphs stay: they hold addresses, not
        contents. Where late counts say that the device skipped the last update, the epoch that it
        was to end begins again.

        Raises:
            BackendError: An optimizer update failed half way; no snapshot covers weights.
        """
        if self.actions.broken is not None:
            raise BackendError(self.actions.broken)
        epoch = self.contract.epoch
        self._reductions.fail()
        self.drain()
        self.contract.purge(epoch)
        try:
            self.confirm()
        except Refused:
            epoch -= 1
            self._committed, self._before = self._before, self._committed
        with self.handoff.scope():
            self._committed.restore()
        self._restart(epoch)

    def rebuild_from(self, epoch: int, kept: GatedSnapshot) -> None:
        """
        As `rebuild`, at an epoch and with a numerical state that the device has kept by itself.

        Args:
            epoch: How many updates the device ran since the first.
            kept: The numerical state behind the last of them.

        Raises:
            BackendError: As `rebuild`.
        """
        if self.actions.broken is not None:
            raise BackendError(self.actions.broken)
        self._reductions.fail()
        self.drain()
        self.contract.purge(self.contract.epoch)
        with self.handoff.scope():
            kept.restore()
            self._committed.take()
        self._restart(epoch)

    def _restart(self, epoch: int) -> None:
        for memory in self.memories.values():
            memory.table.rebuild()
        self._forget_gradients()
        self.drain()
        self.contract.restore(Checkpoint(epoch, self.contract.configuration))
        self._count_from_zero()

    def _restart_reports(self) -> None:
        for memory in self.memories.values():
            memory.reports.restart()

    def _count_from_zero(self) -> None:
        self._restart_reports()
        if self.counters is not None:
            with self.handoff.scope():
                self.counters.zero()

    def drain(self) -> None:
        """Wait for all device work, and tell the kernel."""
        self.handoff.synchronize()
        if self.domain.device.type == "cuda":
            torch.cuda.synchronize(self.domain.device)
        self.contract.drain()

    def checkpoint(self) -> tuple[Checkpoint, NumericalState]:
        """
        What persists of the runtime: the contract's part and the numerical state.

        Parameters and the optimizer's state are the caller's to save beside it.

        Raises:
            Refused: Something is live, in flight or unfinished.
        """
        self.confirm()
        self.drain()
        state = NumericalState.of(self.domain)
        return self.contract.checkpoint(recipe=dict(self.domain.recipe())), state

    def restore(self, checkpoint: Checkpoint, state: NumericalState) -> None:
        """
        Continue from a checkpoint, in a fresh runtime or this one; parameters are loaded first.

        Raises:
            Refused: The checkpoint is of another configuration.
            BackendError: The numerical state is of another recipe or other stages.
            TypeError: One of the two is no such thing; nothing has changed.
        """
        for what, given, wanted in (
            ("a Checkpoint", checkpoint, Checkpoint),
            ("the NumericalState beside it", state, NumericalState),
        ):
            if not isinstance(given, wanted):
                raise TypeError(
                    f"restore: expected {what}, found {shown(given)}; runtime.checkpoint() gives "
                    "both: restore(*runtime.checkpoint())"
                )
        require_same(checkpoint, self.contract.configuration)
        self._reductions.fail()
        self.drain()
        self.contract.purge(self.contract.epoch)
        before = NumericalState.of(self.domain)
        state.into(self.domain)
        try:
            self.contract.restore(checkpoint)
        except BaseException:
            before.into(self.domain)
            raise
        self._count_from_zero()
        for memory in self.memories.values():
            memory.table.rebuild()
        self._forget_gradients()
        self._committed.take()
        self.actions.broken = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """
        A context between two epochs in which the backend's stages may be called directly.

        For evaluation: what F moves of the numerical state is put back, and what the backend
        counts of itself inside is no action's. It runs on the graph stream. Weight caches are the
        caller's to refresh; the next epoch's refresh comes before its first F in any case.

        Raises:
            Refused: Something is live, in flight or unfinished; a clause of persistence.
        """
        self.confirm()
        self.drain()
        self.contract.check_checkpoint()
        reports = [memory.reports for memory in self.memories.values()]
        before = [report.updates() for report in reports]
        self.handoff.wait_for_caller()
        try:
            with self.handoff.scope(), preserving(self.domain):
                yield
        finally:
            for report, count in zip(reports, before, strict=True):
                report.pass_over(count)
            self.handoff.caller_waits()

    def close(self) -> None:
        """End the event log, if one is written."""
        if self.recorder is not None:
            self.recorder.close()


def _one_domain(stages: Sequence[StageBackend]) -> StateDomain:
    for stage in stages:
        if not (hasattr(stage, "domain") and hasattr(stage, "index")):
            raise BackendError(f"expected stages of a backend, found {shown(stage)}")
    if not stages:
        raise BackendError("a runtime needs at least one stage")
    domain = stages[0].domain
    if any(stage.domain is not domain for stage in stages):
        raise BackendError("every stage of a process must be in one state domain")
    if {id(s) for s in domain.stages} != {id(s) for s in stages}:
        raise BackendError(
            f"the state domain has {len(domain.stages)} stages, the runtime was given "
            f"{len(stages)}; an update of any stage goes over all of them, so give all"
        )
    return domain
