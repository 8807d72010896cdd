"""
An object that holds the parts of a runtime: memory, contract, performer, actions and snapshots.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch

from qeffect.destination_registry import DestinationRegistry
from qeffect.keys import TapeKey
from qeffect.log.recorder import Recorder

from ..backends.epoch_scales import moves_once
from ..backends.protocol import StageBackend
from ..step.actions import GuardedActions
from ..step.eager import Executor
from ..step.memory.numerical_state import Snapshot, live_state
from ..step.performer import DevicePerformer, Performer
from ..step.plan.order import Order
from ..step.plan.rows import Row
from ..step.reductions import Reducer, Reductions
from ..step.streams import Handoff, handoff_for
from .assembly import Assembly
from .runtime_config import RuntimeConfig

__all__ = ["RuntimeParts"]


class RuntimeParts:
    """The parts of a runtime. `Runtime` describes the arguments."""

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
        registry: DestinationRegistry | None = None,
    ) -> None:
        self.config = config or RuntimeConfig()
        assembly = Assembly(stages, order, self.config, reducer, row)
        self.row, self.order, self.reducer = row, order, reducer
        self._assembly = assembly
        self._keys: dict[tuple[int, int], TapeKey] = {}
        self._keys_of = -1
        self._final: set[int] = set()
        self.domain, self.stages = assembly.domain, assembly.stages
        self.relations, self.tied, self.plan = assembly.relations, assembly.tied, assembly.plan
        handoff: Handoff = handoff_for(self.domain.device)
        assembly.warm(handoff)
        self.memories = assembly.memories()
        self.registry = registry
        self.contract = assembly.contract(self.memories, registry)
        self.counters = assembly.counters(self.memories)
        self.recorder: Recorder | None = None
        if event_log is not None and event_log is not False:
            into = None if event_log is True else event_log
            self.recorder = Recorder(self.contract, into, rank=rank)
        executor = assembly.executor(self.memories, handoff, self.counters)
        self.performer: Performer = DevicePerformer(
            executor, handoff, order, by_microbatch=moves_once(self.domain)
        )
        self._reductions = assembly.reductions(self.contract, self.performer, self._gradients)
        self.actions = GuardedActions(
            self.contract,
            self.memories,
            self.performer,
            {caller: self.contract.link(caller) for caller in self.config.callers},
        )
        self._restart_reports()
        handoff.synchronize()
        live = tuple(live_state(self.domain).values())
        self._committed = Snapshot(live)
        # The commit before the last: with late counts, the device may have skipped the last update.
        self._before = Snapshot(live) if self.config.counts_late else self._committed

    @property
    def executor(self) -> Executor:
        """
        Runs F, dI and dW in a slot (a microbatch's buffers), and refreshes a stage's weight caches.
        """
        return self.performer.executor

    @property
    def handoff(self) -> Handoff:
        """The graph stream, and the waits between the graph stream and the callers' streams."""
        return self.performer.handoff

    @property
    def reductions(self) -> Reductions:
        """The gradient reductions of the current epoch (optimizer step)."""
        return self._reductions

    @contextmanager
    def performed_by(self, performer: Performer) -> Iterator[None]:
        """
        A context in which another performer replaces the runtime's own performer.

        A performer is the object that acts on memory, streams and other ranks.
        """
        before = self.performer
        self._perform_with(performer)
        try:
            yield
        finally:
            self._perform_with(before)

    def _perform_with(self, performer: Performer) -> None:
        self.performer = self.actions.performer = self._reductions.performer = performer

    @property
    def _guarded_reducer(self) -> Reducer | None:
        """The reducer; None if the backend excludes reductions from the contract's checks."""
        return self.reducer if "reduction" in self.relations else None

    def on_trust(self) -> dict[int, tuple[str, ...]]:
        """
        List, by stage, the effects that the backend does not report. The contract cannot check
        these effects.

        If `RuntimeConfig.counts` is None, the list also contains an assumption: the device ran each
        replayed graph once.
        """
        return {
            own.stage: (*own.on_trust(), *self.memories[own.stage].reports.source.on_trust())
            for own in self.contract.stages
        }

    def caller_scope(self) -> Any:
        """
        A context in which the calling code runs on the graph stream.

        A loop in this context needs no event between its actions, because a stream runs its work in
        order. Other streams must still wait for the graph stream before they read results.
        """
        return self.handoff.scope()

    # Actions, by the name of their key

    def key(self, stage: int, microbatch: int) -> TapeKey:
        """
        Return the contract's name for a stage and a microbatch in the current epoch (optimizer
        step).
        """
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
        """
        Number of the current epoch (optimizer step). Each weight update begins the next epoch.
        """
        return self.contract.epoch

    def _gradients(self, index: int) -> Mapping[str, torch.Tensor]:
        return self.performer.gradients(self.memories[index])

    def forget_gradients(self) -> None:
        """
        Drop the summed and reduced gradients. Called when their epoch (optimizer step) ends or
        restarts.
        """
        self.performer.forget_gradients()
        self._reductions.forget()
        self._final.clear()
        for memory in self.memories.values():
            memory.start_epoch()

    def take_snapshot(self) -> None:
        """
        Copy the current numerical state (FP8 scales and amax histories). `rebuild` restores this
        copy after a failure.
        """
        self._committed.take()

    def _restart_reports(self) -> None:
        for memory in self.memories.values():
            memory.reports.restart()
