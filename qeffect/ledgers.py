"""
The ledgers of a contract: reservations, destinations, readers, streams, and the end of an epoch.

What a runtime asks and tells beside F, dI, dW and refresh. `qeffect.contract` adds those.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from .arguments import UNUSABLE, Arguments
from .checkpoint import Checkpoint
from .config import StageConfig
from .engine.freelist import FreeSlots
from .engine.memory import Memory
from .engine.stage import Transitions
from .explain import explain
from .keys import Cell, TapeKey, TapeRef
from .layout import Destination
from .refusals import Refused
from .relations.constants import GRAD, OUT

__all__ = ["Ledgers", "Observer"]

#: Called after every accepted transition with its name, its arguments and what it returned.
Observer = Callable[[str, tuple[Any, ...], Any], None]


class Ledgers:
    """
    The part of a contract that keeps books; `Contract` constructs it.

    Attributes:
        stages: The stages of this process.
        transitions: The composed transitions that run over the memory.
        memory: The contract's memory.
        observer: Called after every accepted transition; None costs nothing.
    """

    stages: tuple[StageConfig, ...]
    transitions: Transitions
    memory: Memory
    observer: Observer | None
    _slots: Mapping[int, tuple[int, ...]]
    _domains: Mapping[Hashable, int]
    _links: Mapping[tuple[Hashable, Hashable], int]
    _arguments: Arguments
    _callers: tuple[Hashable, ...]
    _links_of: Mapping[Hashable, tuple[int, ...]]
    _num_links: int
    _num_slots: int
    _transition: Mapping[str, Callable[..., Any]]
    _free: dict[int, FreeSlots]
    _reserved: dict[Cell, int]

    @property
    def epoch(self) -> int:
        """The weight epoch of the process; commit is atomic over its stages."""
        return int(self.memory.weight_epoch[self.stages[0].stage])

    def live(self) -> dict[TapeKey, TapeRef]:
        """Every live tape: its key and the reference that names it."""
        st = self.memory
        return {
            TapeKey(st.epoch_at[slot], *st.cell_at[slot]): TapeRef(
                slot, st.generation[slot], st.incarnation[0]
            )
            for slot, mask in enumerate(st.pending)
            if mask
        }

    # Slots, destinations and readers

    def reserve(self, key: TapeKey, slot: int | None = None) -> TapeRef:
        """
        Claim a slot for a key before its forward, so that a receive can fill its input buffer.

        Raises:
            Refused: A clause of ownership, version or order.
        """
        self._arguments.key("reserve", key)
        if slot is None:
            free = self._free[key.stage]
            slot = free[-1] if free else self.memory.slot_of[key.cell]
        else:
            self._arguments.slot("reserve", key, slot)
        self._run("reserve", key, slot)
        self._free[key.stage].take(slot)
        self._reserved[key.cell] = slot
        return TapeRef(slot, self.memory.generation[slot], self.memory.incarnation[0])

    def bind(self, key: TapeKey, destination: tuple[Destination, ...] | None = None) -> None:
        """
        Bind the destinations of a key's matrix gradients; must precede its dI (paper, III-D).

        Raises:
            Refused: ``arena.mismatch``, ``arena.duplicate-bind``, ``arena.unusable`` or
                ``version.wrong-epoch``.
        """
        st = self.memory
        try:
            if destination is None:
                destination = st.destination_of[key.cell]
            elif key.cell not in self._arguments.cells:
                raise KeyError(key)
            self._transition["bind"](st, key, destination)
        except Refused as refused:
            raise explain(refused, "bind", st, (key, destination)) from None
        except UNUSABLE as error:
            raise self._arguments.unusable(error, "bind", (key, destination)) from None
        if self.observer is not None:
            self.observer("bind", (key, destination), None)

    def read(self, key: TapeKey, ref: TapeRef, *, gradient: bool = False, link: int = 0) -> None:
        """
        Check that a stream may now read a tape's output (or input gradient).

        Raises:
            Refused: A clause of ownership, or ``completion.graph-to-caller``.
        """
        st, bit = self.memory, GRAD if gradient else OUT
        try:
            if not 0 <= link < self._num_links or not 0 <= ref.slot < self._num_slots:
                raise IndexError(link, ref)
            self._transition["read"](st, key, ref, bit, link)
        except Refused as refused:
            raise explain(refused, "read", st, (key, ref, bit, link)) from None
        except UNUSABLE as error:
            raise self._arguments.unusable(error, "read", (key, ref, bit, link)) from None
        if self.observer is not None:
            self.observer("read", (key, ref, bit, link), None)

    def finish_read(self, key: TapeKey, ref: TapeRef, *, gradient: bool = False) -> None:
        """
        Tell that the reader of a tape's output (or input gradient) is done with it.

        Raises:
            Refused: A clause of ownership.
        """
        st, bit = self.memory, GRAD if gradient else OUT
        try:
            if not 0 <= ref.slot < self._num_slots:
                raise IndexError(ref)
            self._transition["finish_read"](st, key, ref, bit)
        except Refused as refused:
            raise explain(refused, "finish_read", st, (key, ref, bit)) from None
        except UNUSABLE as error:
            raise self._arguments.unusable(error, "finish_read", (key, ref, bit)) from None
        if self.observer is not None:
            self.observer("finish_read", (key, ref, bit), None)
        if st.pending[ref.slot] == 0:
            self._reclaim(ref.slot)

    def drop(self, key: TapeKey, ref: TapeRef) -> None:
        """
        Abort one tape that has no action in flight; its epoch can no longer commit.

        Raises:
            Refused: A clause of ownership, or ``reduction.in-flight``.
        """
        self._arguments.tape("drop", key, ref)
        self._run("drop", key, ref)
        self._reserved.pop(key.cell, None)
        self._reclaim(ref.slot)

    def purge(self, epoch: int) -> int:
        """
        Abort every live tape of an epoch; return how many there were.

        Raises:
            Refused: ``ownership.pending`` or ``reduction.in-flight`` for one of them; then none
                is aborted.
        """
        tapes = [(key, ref) for key, ref in self.live().items() if key.epoch == epoch]
        rehearsal = self.memory.copy()
        for key, ref in tapes:
            try:
                self.transitions.drop(rehearsal, key, ref)
            except Refused as refused:
                raise explain(refused, "drop", rehearsal, (key, ref)) from None
        for key, ref in tapes:
            self.drop(key, ref)
        return len(tapes)

    def invalidate(self, stage: int) -> None:
        """Declare a stage's weight cache lost, for example re-created at another address."""
        self._arguments.stage("invalidate", stage)
        self._run("invalidate", stage)

    # Completion

    def submit(self, caller: Hashable = "main") -> None:
        """
        Tell that a caller stream enqueued work which later replays must see.

        Raises:
            ValueError: No caller has that name.
        """
        try:
            own = self._links_of[caller]
        except (KeyError, TypeError):
            raise ValueError(
                f"submit: no caller {caller!r}; there are {list(self._callers)}"
            ) from None
        for link in own:
            self._transition["submit"](self.memory, link)
            if self.observer is not None:
                self.observer("submit", (link,), None)

    def join(self, link: int = 0) -> None:
        """Tell that the graph stream waits for everything the caller submitted."""
        try:
            if not 0 <= link < self._num_links:
                raise IndexError(link)
            self._transition["join"](self.memory, link)
        except UNUSABLE as error:
            raise self._arguments.unusable(error, "join", (link,)) from None
        if self.observer is not None:
            self.observer("join", (link,), None)

    def wait(self, link: int = 0) -> None:
        """Tell that the caller waits for everything replayed so far on the graph stream."""
        try:
            if not 0 <= link < self._num_links:
                raise IndexError(link)
            self._transition["wait"](self.memory, link)
        except UNUSABLE as error:
            raise self._arguments.unusable(error, "wait", (link,)) from None
        if self.observer is not None:
            self.observer("wait", (link,), None)

    def drain(self) -> None:
        """Tell that the host has seen all device work of every domain finish."""
        for domain in self._domains.values():
            self._run("drain", domain)

    # The end of an epoch

    def finalize(self, stage: int, link: int = 0) -> None:
        """
        Declare a stage's gradients whole.

        Raises:
            Refused: ``order.incomplete``, ``arena.incomplete``, ``arena.unusable`` and others.
        """
        self._arguments.stage("finalize", stage)
        self._arguments.link("finalize", link)
        self._run("finalize", stage, link)

    def start_reduction(self, stage: int) -> None:
        """Tell that the data-parallel reduction of a finalized stage starts."""
        self._arguments.stage("start_reduction", stage)
        self._run("start_reduction", stage)

    def finish_reduction(self, stage: int) -> None:
        """Tell that a reduction finished."""
        self._arguments.stage("finish_reduction", stage)
        self._run("finish_reduction", stage)

    def fail_reduction(self, stage: int) -> None:
        """Tell that a reduction failed; the epoch can no longer commit."""
        self._arguments.stage("fail_reduction", stage)
        self._run("fail_reduction", stage)

    def commit_epoch(self, epoch: int | None = None) -> int:
        """
        Advance every stage to the next weight epoch; call it with the optimizer's update.

        Across processes the caller makes it a barrier.

        Returns:
            The new epoch.

        Raises:
            Refused: Work is live or in flight, or a stage is not final.
        """
        current = self.epoch if epoch is None else epoch
        self._run("commit_epoch", current)
        return current + 1

    def checkpoint(self, *, state: Any = None, recipe: Any = None) -> Checkpoint:
        """
        Return what persists, when nothing is live (paper, III-E; Invariant 4).

        Args:
            state: Handle of the numerical state that the caller saves alongside.
            recipe: Precision recipe, any JSON value.

        Raises:
            Refused: A clause of persistence.
        """
        self._run("checkpoint")
        return Checkpoint(
            epoch=self.epoch,
            stages=self.stages,
            relations=self.transitions.relations,
            state=state,
            recipe=recipe,
        )

    def restore(self, checkpoint: Checkpoint, *, incarnation: int | None = None) -> None:
        """
        Begin a new incarnation at a checkpoint's epoch, in this process or a fresh one.

        Every older reference is refused afterwards and every weight cache is stale. The caller
        restores the numerical state first.

        Raises:
            Refused: ``persistence.configuration``, or work is still in flight.
            TypeError, ValueError: No checkpoint, or an incarnation outside 64 bits.
        """
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"restore: expected a Checkpoint, got {checkpoint!r}")
        if incarnation is not None and not (
            isinstance(incarnation, int) and 0 <= incarnation < 1 << 64
        ):
            raise ValueError(f"restore: an incarnation has 64 bits, got {incarnation!r}")
        own = Checkpoint(self.epoch, self.stages, self.transitions.relations)
        if (checkpoint.stages, checkpoint.relations) != (own.stages, own.relations):
            refused = Refused("persistence.configuration")
            refused.transition = "restore"
            refused.presented = f"a checkpoint of {checkpoint.summary()}"
            refused.expected = f"one of {self.checkpoint_summary()}"
            raise refused
        fresh = secrets.randbits(64) if incarnation is None else incarnation
        self._run("restore", checkpoint.epoch, fresh)
        self._free = {stage: FreeSlots(own) for stage, own in self._slots.items()}
        self._reserved.clear()

    def checkpoint_summary(self) -> str:
        """Say in a line what configuration a checkpoint of this contract has."""
        return Checkpoint(self.epoch, self.stages, self.transitions.relations).summary()

    # Inside

    def _run(self, transition: str, *arguments: Any) -> Any:
        return self._act(transition, self.transitions.functions[transition], *arguments)

    def _act(self, transition: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            result = function(self.memory, *arguments)
        except Refused as refused:
            raise explain(refused, transition, self.memory, arguments) from None
        except UNUSABLE as error:
            raise self._arguments.unusable(error, transition, arguments) from None
        if self.observer is not None:
            self.observer(transition, arguments, result)
        return result

    def _reclaim(self, slot: int) -> None:
        st = self.memory
        if st.pending[slot] == 0:
            free = self._free[st.slot_stage[slot]]
            if st.generation[slot] == st.generation_max[0]:
                free.retire(slot)
            else:
                free.put(slot)
