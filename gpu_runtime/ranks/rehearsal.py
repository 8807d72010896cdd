"""
A rehearsal is a step of a pipeline without device work. It lets the contract check a step that runs
as one launch.

The pipeline's own actions ask the contract, in the order of a guarded step. A performer that does
nothing replaces the device work. Therefore the contract gets the same calls in a rehearsal as in a
guarded step; a test compares these calls. Two rehearsed steps are recorded. If both records
describe the same step (`qeffect.steps`), later steps need no rehearsal. Before the launch of such a
later step, everything that the contract's checks would read is compared with the record. After the
launch, one call commits the step. If anything differs, the step is rehearsed again, action by
action, and recorded again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from torch import Tensor

from qeffect.steps import RecordedStep, Recording, StepObserver

from ..backends.protocol import BackendError
from ..step.eager import Executor, StageMemory
from ..step.effects import Effects
from ..step.graphs import Product, product_of
from ..step.memory.slots import Slot
from ..step.plan.slots import WgradVariant
from ..step.reductions import Reduction
from ..step.streams import Handoff, HostHandoff
from .channels import Message, Transfer
from .pipeline import Entry, Pipeline

__all__ = ["CaptureRecord", "Rehearsal"]


class CaptureRecord(Protocol):
    """The effects of each action, which an executor recorded when it captured the action."""

    @property
    def slots(self) -> Mapping[int, Any]:
        """By slot (the buffers of one microbatch): the recorded reports of F and dI."""

    @property
    def wgrads(self) -> Mapping[Product, Any]:
        """For each dW, the matrices whose gradients it computed at its capture."""

    @property
    def refreshed(self) -> Mapping[int, Effects]:
        """By stage, the recorded report of the weight cache's refresh."""

    def check_addresses(self, memory: StageMemory) -> None:
        """Raise an error if an address that graphs contain has changed."""


class _RehearsalExecutor:
    """An executor that runs nothing, and returns the reports recorded at the captures."""

    marks_tail = True

    def __init__(self, record: CaptureRecord) -> None:
        self.record = record

    def refresh(self, memory: StageMemory) -> Effects:
        self.record.check_addresses(memory)
        return self.record.refreshed[memory.stage.index]

    def forward(self, memory: StageMemory, slot: Slot) -> Effects:
        found: Effects = self.record.slots[slot.index].ran
        return found

    def dgrad(
        self, memory: StageMemory, slot: Slot, variant: WgradVariant
    ) -> tuple[tuple[str, ...], Effects]:
        found: tuple[tuple[str, ...], Effects] = self.record.slots[slot.index].queued
        return found

    def wgrad(
        self,
        memory: StageMemory,
        slot: Slot,
        variant: WgradVariant,
        others: Sequence[Slot] = (),
    ) -> tuple[str, ...]:
        found: tuple[str, ...] = self.record.wgrads[product_of(slot, variant, others)].covered
        return found


class _EndedReduction:
    """A stand-in for a reduction that was not sent."""

    def wait(self) -> None:
        """Return at once, because nothing was sent."""


class RehearsalPerformer:
    """
    A performer that does nothing, because the step's graph performs the actions.

    Args:
        record: The effects of each action, recorded at the captures.
    """

    def __init__(self, record: CaptureRecord) -> None:
        self.executor: Executor = _RehearsalExecutor(record)
        self.handoff: Handoff = HostHandoff()

    def fill(self, buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Do nothing: the graph copies the data."""

    def gradients(self, memory: StageMemory) -> Mapping[str, Tensor]:
        """Return no gradients: the graph sums them."""
        return {}

    def forget_gradients(self) -> None:
        """Do nothing: no gradient is kept."""

    def reduce(self, send: Callable[[], Reduction | None], *, waited: bool) -> Reduction | None:
        """
        Start no reduction. If the last real reduction returned an object to wait for, return such
        an object too.
        """
        return _EndedReduction() if waited else None


class _RehearsalChannels:
    """Channels that post nothing, because the graph posts the messages in the agreed order."""

    def send(self, tensor: Tensor, to: int, message: Message) -> Transfer:
        return Transfer(None, tensor, message.sent, to)

    def receive(self, into: Tensor, source: int, message: Message) -> Transfer:
        return Transfer(None, into, message.received, source)

    def wait(self, transfer: Transfer) -> None:
        """Do nothing: the graph waits."""


class Rehearsal:
    """
    Lets a pipeline's own actions ask the contract for every action of a step, without device work.

    An event log contains one line for a step that is committed in one call. If the contract has any
    other observer, every step is rehearsed, so that the observer sees each action. Then no step is
    recorded.

    Args:
        pipeline: The pipeline; its runtime's contract checks and commits the actions.
        record: The effects of each action, recorded at the captures.

    Attributes:
        as_one: Whether the latest step was checked in one call, and must therefore be committed in
            one call.
        steps: Two numbers: of the rehearsed steps, and of the steps that were checked in one call.
        recurs: The recorded step, if two consecutive rehearsed steps were the same; otherwise None.
        difference: Why the latest rehearsed step could not be checked in one call; empty before the
            first rehearsal.
    """

    def __init__(self, pipeline: Pipeline, record: CaptureRecord) -> None:
        self.pipeline = pipeline
        self.record = record
        self.performer = RehearsalPerformer(record)
        self.channels = _RehearsalChannels()
        self.as_one = False
        self.steps = [0, 0]
        self.difference = ""
        self._recording: Recording | None = None
        self._last: RecordedStep | None = None  # of the latest step that was rehearsed
        self.recurs: RecordedStep | None = None
        self._program: list[Entry] = []

    def run(self) -> None:
        """
        Run all of the contract's checks for the step, up to its commit.

        Raises:
            Refused: A check fails; the guarded step would raise the same refusal.
        """
        self.drop()
        self.as_one = self.recurs is not None and self._same(self.recurs)
        self.steps[self.as_one] += 1
        if self.as_one:
            self.pipeline.position = len(self.pipeline.program)
            return
        self.recurs = None
        contract = self.pipeline.runtime.contract
        if contract.observer is None or isinstance(contract.observer, StepObserver):
            self._recording = contract.record_step()
        self._walk()
        contract.check_commit(caller="main", guards_alone=True)

    def commit(self) -> None:
        """
        Commit the epoch (the optimizer step), as the update of a guarded step does.

        Raises:
            Refused: A check fails; `Runtime.update` would raise the same refusal.
        """
        runtime = self.pipeline.runtime
        contract, link = runtime.contract, runtime.actions.links["main"]
        if self.as_one:
            assert self.recurs is not None
            contract.commit_step(self.recurs)
            self.as_one = False
        else:
            contract.enter(link)
            with contract.update(caller="main") as update:
                # The step's graph moves scales as often as its capture did: once.
                runtime.tell_moved(update, 1)
            contract.join(link)
            contract.wait(link)
            self._keep()
        runtime.forget_gradients()

    def stopped(self) -> None:
        """
        After a stop, report the step's actions to the contract, if the contract has only checked
        them.

        Device work may have been launched. Therefore the contract must be in the middle of an
        epoch, as after a rehearsed step. In this state it accepts neither a step nor a checkpoint
        before a restore.
        """
        self.drop()
        if self.as_one:
            self.as_one = False
            with suppress(Exception):  # the stop has a cause already, which is reported instead
                self._walk()

    def drop(self) -> None:
        """Stop recording a step that did not complete."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.drop()

    def _same(self, step: RecordedStep) -> bool:
        """Whether this step would equal the recorded step; if not, `difference` says why."""
        self.difference = self._beside()
        if not self.difference:
            found = self.pipeline.runtime.contract.check_step(step, guards_alone=True)
            self.difference = "" if found is None else str(found)
        return not self.difference

    def _beside(self) -> str:
        """
        Compare what the actions read besides the contract: the rank's list of actions, and the
        addresses of tensors. Return the first change as text; empty without a change.
        """
        pipeline, runtime = self.pipeline, self.pipeline.runtime
        if runtime.actions.broken is not None:
            return runtime.actions.broken
        if pipeline.program != self._program:
            return "this rank's list of actions has changed"
        if not all(memory.arena.in_place() for memory in runtime.memories.values()):
            return "a gradient destination has moved"
        try:
            for memory in runtime.memories.values():
                self.record.check_addresses(memory)
        except BackendError as error:  # the rehearsal's refresh refuses it, and aborts
            return str(error)
        return ""

    def _keep(self) -> None:
        """Keep a rehearsed step; if it equals the step kept before, set `recurs`."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        before, self._last = self._last, None
        try:
            self._last = recording.end()
        except ValueError as error:
            self.difference = str(error)
            return
        if before is not None and before.recurs(self._last):
            self.recurs, self._program = self._last, [*self.pipeline.program]

    def _walk(self) -> None:
        with self.pipeline.performed_by(self.performer, self.channels):
            self.pipeline.run_actions()
            self.pipeline.runtime.declare_final()
