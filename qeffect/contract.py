"""
The contract of one process: what a training runtime asks before, and tells after, every action.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn

from .arguments import UNUSABLE, Arguments
from .checkpoint import Checkpoint
from .config import StageConfig
from .configuration import Configuration
from .counts import DeviceCounts
from .destinations import Destination
from .engine.memory import Memory, Snapshot
from .engine.stage import Transitions, transitions
from .explain import explain
from .guarded import Dgrad, Forward, Refresh, Wgrad
from .keys import Cell, TapeKey, TapeRef, Unfrozen
from .layout import lay_out
from .ledgers.counted import Counted
from .ledgers.epochs import Epochs
from .ledgers.pool import Pool
from .ledgers.restarts import Restarts
from .ledgers.runner import FAILURES, Observer, Runner
from .ledgers.steps import Steps
from .ledgers.streams import Streams
from .ledgers.tapes import Tapes
from .refusals import Refused
from .relations.constants import ADDS, GENERATION_MAX, JOINS, NEVER, OPENS, OVERWRITES
from .steps import Difference, RecordedStep, Recording, Standing
from .text import shown
from .threads import ConcurrentCallError, alone
from .tickets import ABORTS, COMMITS, Fills, Ticket, issue

__all__ = ["Contract", "Observer", "Ticket"]

#: The link that an action calls on unless told otherwise; whatever else it is given is looked at.
_FIRST: Final = 0

_new = object.__new__


class Contract:
    """
    The state and resource contract of one process (paper, Section III).

    ``check_*`` runs every guard and reserves what the action will touch, ``commit`` redeems the
    ticket after the physical action succeeded, ``abort`` after it failed. ``forward``, ``dgrad``,
    ``wgrad`` and ``refresh`` do this as context managers. A refused call leaves the contract
    exactly as it was, but for a commit whose own evidence is refused: its action has physically
    run, and is aborted.

    One call at a time: calls may come from any thread, one after another. A call that comes while
    another one is under way raises `ConcurrentCallError` and does nothing.

    Args:
        stages: The stages of this process.
        omit: Relations that the backend does not use, from ``qeffect.engine.stage.OPTIONAL``.
        callers: Names of the streams that call into the graph streams.
        capture_order: Order of capture of graphs that share a pool; see ``layout.lay_out``.
        declared: Declared order of F and dI per domain; see ``layout.lay_out``.
        reductions: Declared order of the reductions of all buckets, the same for all replicas;
            see ``layout.lay_out``.
        generation_max: The last generation that a slot may reach.
        epoch: Weight epoch to begin in.
        observer: Called after every accepted transition; None costs nothing. What it raises
            reaches the caller of a call that has happened: see `outstanding`.
        counted: Whether `commit_epoch` wants what the devices counted; see `qeffect.counts`.
        late: With ``counted``, let `present_counts` bring them after the commit, for an update that
            the device itself skips where they differ.

    Raises:
        ValueError: The configuration is unusable.
        Refused: The gradient destinations are.

    >>> contract = Contract([StageConfig(0, microbatches=1, slots=1, matrices=("w",))])
    >>> key = TapeKey(epoch=0, stage=0, microbatch=0)
    >>> with contract.refresh(0):
    ...     pass  # quantize the weights
    >>> with contract.forward(key) as f:
    ...     pass  # replay F
    >>> contract.bind(key)
    >>> contract.wait()
    >>> with contract.dgrad(key, f.ref) as i:
    ...     i.queued = ("w",)  # replay dI
    >>> with contract.wgrad(key, f.ref, first=True) as w:
    ...     w.covered = ("w",)  # replay dW
    >>> contract.check_wgrad(key, f.ref).serial
    Traceback (most recent call last):
    ...
    qeffect.refusals.Refused: ownership.stale-reference in check_wgrad: found ...
    """

    def __init__(
        self,
        stages: Sequence[StageConfig],
        *,
        omit: Iterable[str] = (),
        callers: Sequence[Hashable] = ("main",),
        capture_order: Iterable[tuple[int, int, str]] = (),
        declared: Mapping[Hashable, Sequence[tuple[str, Cell]]] | None = None,
        reductions: Sequence[int | str] = (),
        generation_max: int = GENERATION_MAX,
        epoch: int = 0,
        observer: Observer | None = None,
        counted: bool = False,
        late: bool = False,
    ) -> None:
        if epoch.__class__ is not int or epoch < 0:
            raise ValueError(f"epoch must be a non-negative integer, got {shown(epoch)}")
        for name, given in (("stages", stages), ("omit", omit), ("reductions", reductions)):
            _collection(name, given)
        self.stages = tuple(stages)
        self.transitions: Transitions = transitions(omit)
        laid = lay_out(
            self.stages,
            self.transitions,
            callers=callers,
            capture_order=capture_order,
            declared=declared,
            reductions=reductions,
            generation_max=generation_max,
        )
        self.memory: Memory = laid.memory
        self._runner = Runner(
            laid.memory, self.transitions, Arguments(laid.cells, laid.slots, len(laid.links))
        )
        self._counted: Counted | None = None
        if late and not counted:
            raise ValueError("late=True wants counted=True: without it no counts are presented")
        if counted:
            own = {config.stage: config.domain for config in self.stages}
            self._counted = Counted(own, laid.memory.slot_stage, late=late)
        self.observer = observer
        self._entered = False  # while a call is under way
        self._shares = any(config.tied for config in self.stages)
        self._pool = Pool(laid.memory, laid.slots)
        self._tapes = Tapes(self._runner, self._pool)
        self._streams = Streams(self._runner, tuple(callers), laid.domains, laid.links)
        self._epochs = Epochs(self._runner, self.stages[0].stage, laid.buckets)
        self._restarts = Restarts(self._runner, self._pool, self._epochs, self._counted)
        self._steps = Steps(self._runner, self._pool, self._counted)
        self.memory.incarnation[0] = secrets.randbits(64)
        self.memory.fill(self.memory.weight_epoch, epoch)
        # What F, dI and dW reach for, bound once: each look-up costs a guard's time.
        self._join, self._wait = self._streams.join, self._streams.wait
        self._enter = self._streams.enter
        self._arguments = self._runner.arguments
        self._free, self._reserved = self._pool.free, self._pool.reserved
        t = self.transitions
        self._check_forward, self._commit_forward = t.check_forward, t.commit_forward
        self._check_dgrad, self._commit_dgrad = t.check_dgrad, t.commit_dgrad
        self._check_wgrad, self._commit_wgrad = t.check_wgrad, t.commit_wgrad
        self._commit_refresh = t.commit_refresh

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled: what it guards is in this process, once."""
        raise TypeError(
            "a Contract guards the memory of its process and is neither copied nor pickled; keep "
            "contract.checkpoint(), and restore it into a contract of the same configuration"
        )

    # Reading

    @property
    def observer(self) -> Observer | None:
        """Called after every accepted transition; None costs nothing."""
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        if observer is not None and not callable(observer):
            raise TypeError(f"observer must be a function or None, got {shown(observer)}")
        self._observer = self._runner.observer = observer
        self._heard = observer is not None or self._counted is not None

    @property
    def configuration(self) -> Configuration:
        """What the contract was built from; an event log and a checkpoint hold it."""
        return Configuration.of(
            self.stages, self.transitions.relations, self._streams.callers, self.memory
        )

    @property
    def epoch(self) -> int:
        """The weight epoch of the process; commit is atomic over its stages."""
        return self._epochs.current

    @property
    def incarnation(self) -> int:
        """The random number in every reference that this contract issues."""
        return int(self.memory.incarnation[0])

    def token(self, stage: int) -> int:
        """
        The effect token of the stage's domain: F and dI committed in this incarnation.

        Raises:
            TypeError, ValueError: No stage of this process.
        """
        self._arguments.stage("token", stage)
        return int(self.memory.token[self.memory.domain_of[stage]])

    def link(self, caller: Hashable = "main", domain: Hashable | None = None) -> int:
        """Index of the link between a caller stream and a domain's graph stream."""
        return self._streams.link(caller, self.stages[0].domain if domain is None else domain)

    def live(self) -> dict[TapeKey, TapeRef]:
        """Every live tape: its key and the reference that names it."""
        return self._tapes.live()

    def reference(self, key: TapeKey) -> TapeRef | None:
        """
        The reference that names a key's live tape; None where the key owns no slot.

        Raises:
            TypeError: What was given is no key.

        >>> contract = Contract([StageConfig(0, microbatches=2, slots=1)])
        >>> contract.reserve(TapeKey(epoch=0, stage=0, microbatch=0)).slot
        0
        >>> contract.reference(TapeKey(epoch=0, stage=0, microbatch=1)) is None
        True
        """
        self._arguments.tape_key("reference", key)
        return self._tapes.reference(key)

    def outstanding(self) -> tuple[Ticket, ...]:
        """
        Every ticket that is out, oldest first: issued by a check, not committed, not aborted.

        A check whose observer raised has happened, and its ticket is here. Whatever failed,
        aborting these, `drain` and `restore` lead back to a checkpoint.

        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)], omit=("version",))
        >>> ticket = contract.check_forward(TapeKey(epoch=0, stage=0, microbatch=0))
        >>> contract.outstanding() == (ticket,)
        True
        >>> contract.abort(ticket)
        >>> contract.outstanding()
        ()
        """
        return self._tapes.outstanding()

    def first_writer(self, key: TapeKey) -> bool:
        """
        Whether the key's dW would be the first write of its stage's own buffer in this epoch.

        Raises:
            TypeError, ValueError: What was given is no key, or none of this process.
        """
        self._arguments.of_process("first_writer", key)
        st = self.memory
        return bool(st.opened[st.buffer_of[key.cell]] != key.epoch)

    def first_of_tied(self, key: TapeKey) -> bool:
        """
        Whether the key's dW would be the first write, in this epoch, of the destinations that its
        stage shares with another; where it shares none, the same as `first_writer`.

        Raises:
            TypeError, ValueError: What was given is no key, or none of this process.

        >>> tied = {"microbatches": 1, "slots": 1, "tied": ("w",), "buffers": {"w": "table"}}
        >>> contract = Contract([StageConfig(s, matrices=("w",), **tied) for s in (0, 1)])
        >>> contract.first_of_tied(TapeKey(epoch=0, stage=1, microbatch=0))
        True
        """
        self._arguments.of_process("first_of_tied", key)
        st = self.memory
        return bool(st.opened[st.shared_of[st.buffer_of[key.cell]]] != key.epoch)

    def snapshot(self) -> Snapshot:
        """
        The whole state as plain values; equal before and after a refusal.

        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)])
        >>> before = contract.snapshot()
        >>> contract.finalize(0)
        Traceback (most recent call last):
        ...
        qeffect.refusals.Refused: ...
        >>> contract.snapshot() == before
        True
        """
        return self.memory.snapshot()

    # F, dI, dW and refresh: check, then commit or abort
    #
    # Give what follows key, reference and evidence by name. Nothing makes a caller do so: a call of
    # a function with keyword-only parameters takes the interpreter's slow way in, which is a
    # twentieth of a guarded action. For the same reason a transition is read into a local before
    # it is called: a call by way of an attribute looks for a method of the class first.

    @alone
    def check_refresh(self, stage: int, link: int = 0) -> Ticket:
        """
        Reserve a stage's domain for a refresh of its quantized weight cache.

        Raises:
            Refused: A clause of version, order or completion; ``version.left-out`` where the
                stages leave version out, so that there is no cache.
        """
        self._arguments.stage("check_refresh", stage)
        self._arguments.link("check_refresh", link)
        serial = self._runner.run("check_refresh", stage, link)
        return issue("refresh", None, stage, serial, self.memory.incarnation[0], None)

    def check_forward(
        self,
        key: TapeKey,
        slot: int | None = None,
        token: int | None = None,
        link: int = 0,
        refresh: bool = False,
    ) -> Ticket:
        """
        Reserve a slot and the state domain for F.

        Args:
            key: Key of the execution.
            slot: Slot to use; by default the one the key reserved, or a free one.
            token: Effect token the caller threads; by default the domain's own.
            link: Link of the calling stream.
            refresh: This F also refreshes the weight cache.

        Raises:
            Refused: A clause of ownership, version, order, capture or completion.

        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)])
        >>> contract.check_forward(TapeKey(epoch=0, stage=0, microbatch=0))
        Traceback (most recent call last):
        ...
        qeffect.refusals.Refused: version.stale-cache in check_forward: found ...
        """
        if self._entered:
            raise ConcurrentCallError("check_forward")
        self._entered = True
        try:
            st = self.memory
            run = self._check_forward
            taken = None
            try:
                refreshes = 1 if refresh else 0
                if type(key) is not TapeKey:
                    raise IndexError(key)
                if link is not _FIRST and (type(link) is not int or link < 0):
                    raise IndexError(link)
                if slot is None:
                    free = self._free[key.stage]
                    if self._reserved and key.cell in self._reserved:
                        slot = self._reserved[key.cell]
                    elif free:
                        slot = taken = free.popitem()[0]
                    else:
                        slot = st.slot_of[key.cell]
                elif type(slot) is not int or slot < 0 or key.cell not in st.slot_of:
                    raise IndexError(slot)
                if token is None:
                    token = st.token[st.domain_of[key.stage]]
                elif type(token) is not int:
                    raise IndexError(token)
                serial = run(st, key, slot, token, link, refreshes)
            except FAILURES as error:
                if taken is not None:
                    self._free[key.stage].put(taken)
                given = (key, slot, token, link, refresh)
                raise self._runner.failure(error, "check_forward", given) from None
            if taken is None and not self._free[key.stage].take(slot):
                self._reserved.pop(key.cell, None)
            if self._observer is not None:
                self._observer("check_forward", (key, slot, token, link, refreshes), serial)
            ticket = _new(Ticket)  # as `issue` does, without its call
            ticket.action = "F"
            ticket.key = key
            ticket.slot = slot
            ticket.serial = serial
            ticket.incarnation = st.incarnation[0]
            ticket.ref = None
            return ticket
        finally:
            self._entered = False

    def check_dgrad(
        self, key: TapeKey, ref: TapeRef, token: int | None = None, link: int = 0
    ) -> Ticket:
        """
        Reserve a tape and the state domain for dI.

        Raises:
            Refused: A clause of ownership, version, order, arena, capture or completion.
        """
        if self._entered:
            raise ConcurrentCallError("check_dgrad")
        self._entered = True
        try:
            st = self.memory
            run = self._check_dgrad
            try:
                if token is None:
                    token = st.token[st.domain_of[key.stage]]
                elif type(token) is not int:
                    raise IndexError(token)
                if type(key) is not TapeKey or type(ref) is not TapeRef or ref.slot < 0:
                    raise IndexError(ref)  # a slot beyond the last is no index of a column
                if link is not _FIRST and (type(link) is not int or link < 0):
                    raise IndexError(link)
                serial = run(st, key, ref, token, link)
            except FAILURES as error:
                raise self._runner.failure(error, "check_dgrad", (key, ref, token, link)) from None
            if self._observer is not None:
                self._observer("check_dgrad", (key, ref, token, link), serial)
            ticket = _new(Ticket)
            ticket.action = "dI"
            ticket.key = key
            ticket.slot = ref.slot
            ticket.serial = serial
            ticket.incarnation = ref.incarnation
            ticket.ref = ref
            return ticket
        finally:
            self._entered = False

    def check_wgrad(
        self,
        key: TapeKey,
        ref: TapeRef,
        destination: tuple[Destination, ...] | None = None,
        first: bool | None = None,
        first_of_tied: bool | None = None,
        link: int = 0,
    ) -> Ticket:
        """
        Reserve a tape and its destinations for dW.

        Args:
            key: Key of the execution; its microbatch and the reference must name one slot.
            ref: Reference that the forward's commit returned.
            destination: The destinations about to be written; by default the configured ones.
            first: Whether the write overwrites; by default what the ledger says.
            first_of_tied: Whether it overwrites the destinations that its stage shares with
                another stage; by default what the ledger says, and where the stage shares none,
                what ``first`` says.
            link: Link of the calling stream.

        Raises:
            Refused: A clause of ownership, version, arena, capture or completion.
        """
        if self._entered:
            raise ConcurrentCallError("check_wgrad")
        self._entered = True
        try:
            st = self.memory
            run = self._check_wgrad
            try:
                if type(key) is not TapeKey or type(ref) is not TapeRef or ref.slot < 0:
                    raise IndexError(ref)  # a slot beyond the last is no index of a column
                if link is not _FIRST and (type(link) is not int or link < 0):
                    raise IndexError(link)
                if destination is None:
                    destination = st.destination_of[key.cell]
                if first is None:
                    first = st.opened[st.buffer_of[key.cell]] != key.epoch
                overwrites = 1 if first else 0
                if self._shares or first_of_tied is not None:
                    overwrites = self._writes(key, overwrites, first_of_tied)
                serial = run(st, key, ref, link, destination, overwrites)
            except FAILURES as error:
                given = (key, ref, link, destination, first)
                raise self._runner.failure(error, "check_wgrad", given) from None
            if self._observer is not None:
                self._observer("check_wgrad", (key, ref, link, destination, overwrites), serial)
            ticket = _new(Ticket)
            ticket.action = "dW"
            ticket.key = key
            ticket.slot = ref.slot
            ticket.serial = serial
            ticket.incarnation = ref.incarnation
            ticket.ref = ref
            return ticket
        finally:
            self._entered = False

    def _writes(self, key: TapeKey, overwrites: int, first_of_tied: bool | None) -> int:
        """Return how a dW writes its stage's own destinations and those that it shares."""
        st = self.memory
        own = st.buffer_of[key.cell]
        shared = st.shared_of[own]
        if first_of_tied is None:
            if shared == own:
                return overwrites
            first_of_tied = st.opened[shared] != key.epoch
        return _WRITES[overwrites, bool(first_of_tied)]

    def commit(
        self,
        ticket: Ticket,
        evidence: Iterable[str] = (),
        filled: Fills | None = None,
        updates: int | None = None,
        scales: int | None = None,
    ) -> TapeRef | None:
        """
        Redeem a ticket after its physical action succeeded.

        No other action can make a commit fail. Only its own evidence can: dI must have queued
        deferred work for every matrix, dW must have covered every matrix exactly once, and what
        a stage is configured to report must be what was asked for. The action has otherwise
        failed, and is aborted before the refusal is raised.

        Args:
            ticket: What the check returned.
            evidence: For dI the matrices whose gradient work was queued, for dW those whose
                gradient was written, each as often as it was.
            filled: For a refresh, and an F that refreshes, the weight epoch that the cache of
                each matrix was filled from (`StageConfig.reports_fills`). None: nothing was
                filled, or the backend cannot say.
            updates: For F and dI how often the domain's scaling state was updated
                (`StageConfig.reports_updates`).
            scales: For dI the token at which the F ran whose scales it used
                (`StageConfig.tape_scales`).

        Returns:
            For F the reference of the new tape, else None.

        Raises:
            Refused: ``ownership.unknown-ticket``, ``ownership.work-not-queued``,
                ``ownership.matrix-coverage``, ``version.fill-missing``, ``version.wrong-fill``,
                ``version.fill-unasked``, ``order.scaling-updates`` or ``order.wrong-scales``.

        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)], omit=("version",))
        >>> ticket = contract.check_forward(TapeKey(epoch=0, stage=0, microbatch=0))
        >>> ref = contract.commit(ticket)
        >>> ref.slot, ref.generation
        (0, 0)
        """
        if self._entered:
            raise ConcurrentCallError("commit")
        self._entered = True
        try:
            st = self.memory
            ref = None
            try:
                slot, serial, action = ticket.slot, ticket.serial, ticket.action
                own = st.incarnation[0]
                if slot < 0 or (ticket.incarnation is not own and ticket.incarnation != own):
                    raise IndexError(slot)
                names, of = _NO_FILL
                if action == "F":
                    if filled is not None and st.reports_fills[st.slot_stage[slot]] != 0:
                        names, of = _fills(filled, self._epochs.current)
                    run = self._commit_forward
                    moved = NEVER if updates is None else _count(updates)
                    run(st, slot, serial, names, of, moved)
                    made: Any = Unfrozen()  # as `reference` does, without its call
                    made.slot = slot
                    made.generation = st.generation[slot]
                    made.incarnation = own
                    made.__class__ = TapeRef
                    ticket.ref = ref = made
                elif action == "dW":
                    stage = st.slot_stage[slot]
                    if evidence is not st.matrices[stage]:
                        evidence = _names(evidence)
                    run = self._commit_wgrad
                    run(st, slot, serial, evidence)
                    if st.consumers[slot] == 0:
                        if st.generation[slot] == st.generation_max[0]:
                            self._free[stage].retire(slot)
                        else:
                            self._free[stage][slot] = None  # as `put` does, without its call
                elif action == "dI":
                    if evidence is not st.matrices[st.slot_stage[slot]]:
                        evidence = _names(evidence)
                    run = self._commit_dgrad
                    moved = NEVER if updates is None else _count(updates)
                    used = NEVER if scales is None else _count(scales)
                    run(st, slot, serial, evidence, moved, used)
                elif action == "refresh":
                    if filled is not None and st.reports_fills[slot] != 0:
                        names, of = _fills(filled, self._epochs.current)
                    self._commit_refresh(st, slot, serial, names, of)
                else:
                    raise IndexError(action)
            except Refused as refused:
                given = _redeemed(ticket, names, of, evidence, _told(updates), _told(scales))
                explain(refused, COMMITS[action], st, given)
                if not refused.clause.endswith("unknown-ticket"):
                    try:
                        self._abort(ticket)
                    except Exception as unheard:  # the observer's: the abort has happened
                        raise refused from unheard
                raise
            except UNUSABLE:
                raise self._arguments.ticket("commit", ticket, self.incarnation) from None
            if self._heard:
                if self._counted is not None:
                    self._counted.ran(action, slot)
                if self._observer is not None:
                    counts = _count(updates), _count(scales)
                    given = _redeemed(ticket, names, of, evidence, *counts)
                    self._observer(COMMITS[action], given, None)
            return ref
        finally:
            self._entered = False

    @alone
    def abort(self, ticket: Ticket) -> None:
        """
        Redeem a ticket after its physical action failed.

        The tape is dropped and the epoch spoiled. A failed F, dI or refresh also poisons the
        state domain: its scaling state may be half updated (paper, IV-E).

        Raises:
            Refused: ``ownership.unknown-ticket``, ``version.unknown-ticket`` or
                ``version.left-out``.

        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)], omit=("version",))
        >>> ticket = contract.check_forward(TapeKey(epoch=0, stage=0, microbatch=0))
        >>> contract.abort(ticket)
        >>> contract.commit(ticket)
        Traceback (most recent call last):
        ...
        qeffect.refusals.Refused: ownership.unknown-ticket in commit_forward: found ...
        """
        self._abort(ticket)

    def _abort(self, ticket: Ticket) -> None:
        try:
            name, slot = ABORTS[ticket.action], ticket.slot
            if slot < 0 or ticket.incarnation != self.memory.incarnation[0]:
                raise IndexError(slot)
            self.transitions.functions[name](self.memory, slot, ticket.serial)
        except Refused as refused:
            raise explain(refused, name, self.memory, (slot, ticket.serial)) from None
        except UNUSABLE:
            raise self._arguments.ticket("abort", ticket, self.incarnation) from None
        if ticket.action != "refresh":
            self._pool.reclaim(slot)
        if self._observer is not None:
            self._observer(name, (slot, ticket.serial), None)

    # The same as context managers

    def refresh(self, stage: int, link: int = 0) -> Refresh:
        """Guard a refresh of a stage's weight cache: ``with contract.refresh(stage): ...``."""
        return Refresh(self, stage, link)

    def forward(self, key: TapeKey, **options: Any) -> Forward:
        """Guard F: ``with contract.forward(key) as f: ...``, then ``f.ref``."""
        return Forward(self, key, options)

    def dgrad(self, key: TapeKey, ref: TapeRef, **options: Any) -> Dgrad:
        """Guard dI: ``with contract.dgrad(key, ref) as i: ...; i.queued = matrices``."""
        return Dgrad(self, key, ref, options)

    def wgrad(self, key: TapeKey, ref: TapeRef, **options: Any) -> Wgrad:
        """Guard dW: ``with contract.wgrad(key, ref) as w: ...; w.covered = matrices``."""
        return Wgrad(self, key, ref, options)

    # Slots, destinations and readers

    @alone
    def reserve(self, key: TapeKey, slot: int | None = None, *, link: int = 0) -> TapeRef:
        """
        Claim a slot for a key before its forward, so that its input buffer can be filled.

        Args:
            key: Key of the execution.
            slot: Slot to use; by default a free one.
            link: Link of the stream that will fill the buffer; it has waited for the slot's last
                tenant.

        Raises:
            Refused: A clause of ownership, version or completion.
        """
        return self._tapes.reserve(key, slot, link)

    def bind(self, key: TapeKey, destination: tuple[Destination, ...] | None = None) -> None:
        """
        Bind the destinations of a key's matrix gradients; must precede its dI (paper, III-D).

        Raises:
            Refused: ``arena.mismatch``, ``arena.duplicate-bind``, ``arena.spoiled`` or
                ``version.wrong-epoch``.
        """
        if self._entered:
            raise ConcurrentCallError("bind")
        self._entered = True
        try:
            self._tapes.bind(key, destination)
        finally:
            self._entered = False

    @alone
    def post_receive(
        self, key: TapeKey, ref: TapeRef, *, gradient: bool = False, link: int = 0
    ) -> None:
        """
        Check that a stream may now receive a tape's input (or its output's gradient).

        The slot is kept for the message until `finish_receive`, also when its tape is aborted.

        Args:
            key: Key of the execution; for an input it has reserved the slot.
            ref: What `reserve` returned, or the forward's commit.
            gradient: The message is the gradient of the output.
            link: Link of the stream that receives.

        Raises:
            Refused: A clause of ownership or completion.
        """
        self._tapes.post_receive(key, ref, gradient, link)

    @alone
    def finish_receive(
        self, key: TapeKey, ref: TapeRef, *, gradient: bool = False, link: int = 0
    ) -> None:
        """
        Tell that a message has arrived whole.

        This makes F (or dI) of the tape legal on what the buffer now holds. A message that can no
        longer arrive is never just told finished: first the tape is dropped (`drop`), so that
        nothing runs on it and its epoch cannot commit; then the end of the receive is told, which
        frees the slot.

        Args:
            key: Key of the execution.
            ref: The reference that the receive was posted with.
            gradient: The message was the gradient of the output.
            link: Link of a stream that has waited for the message; this counts as work that the
                replay which uses the message must see.

        Raises:
            Refused: A clause of ownership or completion.
        """
        self._tapes.finish_receive(key, ref, gradient, link)

    def read(self, key: TapeKey, ref: TapeRef, *, gradient: bool = False, link: int = 0) -> None:
        """
        Check that a stream may now read a tape's output (or input gradient), which it begins.

        The slot is kept for the reader until `finish_read`, also when its tape is aborted. Where
        several streams read one buffer, one read is told: before the first of them begins.

        Raises:
            Refused: A clause of ownership, or ``completion.graph-to-caller``.
        """
        if self._entered:
            raise ConcurrentCallError("read")
        self._entered = True
        try:
            self._tapes.read(key, ref, gradient, link)
        finally:
            self._entered = False

    def finish_read(
        self, key: TapeKey, ref: TapeRef, *, gradient: bool = False, link: int = 0
    ) -> None:
        """
        Tell that the reader of a tape's output (or input gradient) is done with it.

        Args:
            key: Key of the execution.
            ref: The reference that was read with.
            gradient: The reader was of the input gradient.
            link: Link of a stream that has waited for the reader's end; this counts as work that
                the slot's next forward must see.

        Raises:
            Refused: A clause of ownership or completion.
        """
        if self._entered:
            raise ConcurrentCallError("finish_read")
        self._entered = True
        try:
            self._tapes.finish_read(key, ref, gradient, link)
        finally:
            self._entered = False

    @alone
    def drop(self, key: TapeKey, ref: TapeRef) -> None:
        """
        Abort one tape that has no action in flight; its epoch can no longer commit.

        Raises:
            Refused: A clause of ownership.
        """
        self._tapes.drop(key, ref)

    @alone
    def purge(self, epoch: int) -> int:
        """
        Abort every live tape of an epoch; return how many there were.

        Raises:
            Refused: ``ownership.in-flight`` for one of them; then none is aborted.
        """
        return self._tapes.purge(epoch)

    @alone
    def invalidate(self, stage: int) -> None:
        """
        Declare a stage's weight cache lost, for example re-created at another address.

        Raises:
            Refused: ``version.in-flight``, or ``version.left-out`` where there is no cache.
        """
        self._arguments.stage("invalidate", stage)
        self._runner.run("invalidate", stage)

    # Completion

    def submit(self, caller: Hashable = "main") -> None:
        """
        Tell that a caller stream enqueued work which later replays must see.

        Raises:
            ValueError: No caller has that name.
        """
        if self._entered:
            raise ConcurrentCallError("submit")
        self._entered = True
        try:
            self._streams.submit(caller)
        finally:
            self._entered = False

    def enter(self, link: int = 0) -> None:
        """
        Tell both in one call: the link's caller enqueued work, and the graph stream waits for it.

        The same as `submit` of the caller and `join` of the link; every guarded replay begins so.
        """
        if self._entered:
            raise ConcurrentCallError("enter")
        self._entered = True
        try:
            self._enter(link)
        finally:
            self._entered = False

    def join(self, link: int = 0) -> None:
        """
        Tell that the graph stream waits for everything the caller submitted.

        That includes the optimizer's update, where it ran on this caller's stream.
        """
        if self._entered:
            raise ConcurrentCallError("join")
        self._entered = True
        try:
            self._join(link)
        finally:
            self._entered = False

    def wait(self, link: int = 0) -> None:
        """Tell that the caller waits for everything replayed so far on the graph stream."""
        if self._entered:
            raise ConcurrentCallError("wait")
        self._entered = True
        try:
            self._wait(link)
        finally:
            self._entered = False

    @alone
    def drain(self) -> None:
        """
        Tell that the host has seen all device work of every domain finish.

        Before a `restore` that includes every transfer: one still under way is forgotten there.
        """
        self._streams.drain()

    # The end of an epoch

    @alone
    def finalize(self, stage: int, link: int = 0) -> None:
        """
        Declare a stage's gradients whole.

        Raises:
            Refused: ``order.incomplete``, ``arena.incomplete``, ``arena.spoiled`` and others.
        """
        self._epochs.finalize(stage, link)

    def default_reader(self, bucket: int | str) -> tuple[int, int]:
        """
        Return a bucket's index, and the link that its reduction names where none is given.

        Raises:
            ValueError: No bucket has that name.
        """
        return self._epochs.default(bucket)

    @alone
    def start_reduction(self, bucket: int | str, link: int | None = None) -> None:
        """
        Tell that the data-parallel reduction of a bucket is enqueued, behind its last dW.

        Args:
            bucket: Name of the bucket; the index of the stage where that configures none.
            link: Link of the communication stream, which has waited for the bucket's replays. By
                default that of the stream that finalized the stage, or of the first caller.

        Raises:
            Refused: A clause of reduction or completion.
            ValueError: No bucket has that name.

        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1, reduces=True)])
        >>> contract.start_reduction(0)
        Traceback (most recent call last):
        ...
        qeffect.refusals.Refused: reduction.incomplete in start_reduction: found ...
        """
        self._epochs.reduction("start_reduction", bucket, link)

    @alone
    def finish_reduction(self, bucket: int | str, link: int | None = None) -> None:
        """
        Tell that the stream which will read the gradients waits for a bucket's reduction.

        Args:
            bucket: Name of the bucket.
            link: Link of that stream, the optimizer's; it is the stream that finalizes the
                stage. By default as in ``start_reduction``.

        Raises:
            Refused: ``reduction.not-started`` or a clause of completion.
            ValueError: No bucket has that name.
        """
        self._epochs.reduction("finish_reduction", bucket, link)

    @alone
    def fail_reduction(self, bucket: int | str) -> None:
        """Tell that a bucket's reduction failed; the epoch can no longer commit."""
        self._epochs.fail_reduction(bucket)

    @alone
    def check_commit(
        self,
        epoch: int | None = None,
        *,
        caller: Hashable | None = None,
        counted: Mapping[Hashable, DeviceCounts] | None = None,
        guards_alone: bool = False,
    ) -> None:
        """
        Ask whether `commit_epoch` would be accepted now; nothing changes and nothing is logged.

        Every guard of the commit runs, so that the processes of a pipeline can consent before any
        of them moves its weights.

        Args:
            epoch: As for `commit_epoch`, like the two that follow.
            caller: As there.
            counted: As there; with ``late=True`` it may be given here, and is compared at once.
            guards_alone: Leave the devices' counts out, those of the last commit included.

        Raises:
            Refused, TypeError, ValueError: What `commit_epoch` would raise, in the same words.

        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)])
        >>> contract.check_commit()
        Traceback (most recent call last):
        ...
        qeffect.refusals.Refused: epoch.not-final in commit_epoch: found ...
        """
        self._epochs.check_commit(epoch, self._streams.caller("commit_epoch", caller))
        if not guards_alone:
            self._require_counts(counted, now=True)

    @alone
    def commit_epoch(
        self,
        epoch: int | None = None,
        *,
        caller: Hashable | None = None,
        counted: Mapping[Hashable, DeviceCounts] | None = None,
    ) -> int:
        """
        Advance every stage to the next weight epoch; call it with the optimizer's update.

        The update is device work: before anything else is called it is enqueued on the caller's
        stream. Until each graph stream has waited for that stream (`join`), or the host has seen
        the update finish (`drain`), no refresh and no F is accepted; a checkpoint wants `drain`.
        Across processes the caller makes the commit a barrier.

        Args:
            epoch: The epoch that ends; by default the current one.
            caller: Name of the stream that the update runs on, the one on whose links every stage
                was finalized; by default the first caller.
            counted: By state domain what its device counted; for a contract with ``counted=True``
                and not ``late=True``, where `present_counts` brings it.

        Returns:
            The new epoch.

        Raises:
            Refused: Work is live or in flight, a stage is not final, or the device did not run
                exactly what was committed: ``epoch.uncounted``, ``epoch.device-count`` or
                ``epoch.device-order``. What a guard refuses is named first.
            TypeError, ValueError: The epoch is no ``int``, no caller has that name, or the counts
                are none of the contract's domains and stages.
        """
        updater = self._streams.caller("commit_epoch", caller)
        if self._counted is not None or counted is not None:
            self._epochs.check_commit(epoch, updater)
            self._require_counts(counted)
        if self._counted is not None:
            self._counted.committed()  # nothing refuses any more, and an observer may raise
        return self._epochs.commit(epoch, updater)

    def committed_counts(self) -> Mapping[Hashable, DeviceCounts]:
        """
        Return what devices that ran exactly the committed actions, in their order, have counted.

        By state domain, since the incarnation began; a device compares its own counts with them to
        skip an update (``late=True``).

        Raises:
            ValueError: The contract was made without ``counted=True``.
        """
        if self._counted is None:
            raise ValueError("committed_counts: the contract was made without counted=True")
        return self._counted.own()

    @property
    def counts_awaited(self) -> bool:
        """Whether the last commit awaits its counts; always false without ``late=True``."""
        return self._counted is not None and self._counted.awaited is not None

    @alone
    def present_counts(self, counted: Mapping[Hashable, DeviceCounts]) -> None:
        """
        Present what the devices had counted at the last commit, for a contract with ``late=True``.

        Until then neither the next commit nor a checkpoint is accepted. Where the counts differ the
        device has skipped the update, and only a restore leads on: the weights are still those of
        the epoch that ended with that commit.

        Args:
            counted: By state domain what its device had counted when the update began.

        Raises:
            Refused: ``epoch.device-count`` or ``epoch.device-order``.
            TypeError, ValueError: They are no counts of the contract's domains and stages, or no
                commit awaits any.
        """
        if self._counted is None:
            raise ValueError("present_counts: the contract was made without counted=True")
        self._counted.present(counted)

    def _require_counts(
        self, counted: Mapping[Hashable, DeviceCounts] | None, *, now: bool = False
    ) -> None:
        """Require that these counts let an epoch commit."""
        if self._counted is not None:
            self._counted.require_commit(counted, now=now)
        elif counted is not None:
            raise ValueError("counted: the contract was made without counted=True")

    # A step as one

    def standing(self) -> Standing:
        """All that the contract holds and a step may move, as it is now."""
        return self._steps.standing()

    @alone
    def record_step(self) -> Recording:
        """
        Begin to record a step, which is then asked and told action by action.

        `Recording.end`, behind its `commit_epoch` and whatever else is told of it, returns it as
        what `check_step` and `commit_step` take.

        Raises:
            ValueError: The contract has an observer, which is told of every action.

        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)])
        >>> def run() -> None:
        ...     key = TapeKey(contract.epoch, stage=0, microbatch=0)
        ...     contract.join()
        ...     with contract.refresh(0):
        ...         pass
        ...     with contract.forward(key) as f:
        ...         contract.bind(key)
        ...     contract.wait()
        ...     with contract.dgrad(key, f.ref):
        ...         pass
        ...     with contract.wgrad(key, f.ref):
        ...         pass
        ...     contract.wait()
        ...     contract.finalize(0)
        ...     contract.commit_epoch()
        >>> run()
        >>> recording = contract.record_step()
        >>> run()
        >>> step = recording.end()
        >>> contract.check_step(step) is None, contract.commit_step(step), contract.token(0)
        (True, 3, 6)
        """
        return Recording(self)

    @alone
    def check_step(self, step: RecordedStep) -> Difference | None:
        """
        Ask whether a recorded step would be accepted now, action by action; nothing changes.

        All that its transitions would read is looked at, once (`qeffect.steps` says why that is as
        good as every guard of every action). Beside it the caller has to know that the step would
        ask for the same actions with the same evidence: the order, slots and destinations.

        Returns:
            None where every guard would pass and `commit_step` would leave what they would; else
            the first difference, and the clause that would refuse. What differs may be harmless:
            the actions are then asked for one by one.

        Raises:
            TypeError, ValueError: It is no step, or none of this contract.
        """
        return self._steps.differs(step)

    @alone
    def commit_step(self, step: RecordedStep) -> int:
        """
        Commit every action of a recorded step, and its epoch, at once.

        The state is afterwards what it is when they are asked for and told one by one. It is
        compared again, since the contract may have been told something since `check_step`.

        Returns:
            The new epoch.

        Raises:
            Refused: ``epoch.uncounted``: the last commit's counts have not come.
            TypeError, ValueError: It is no step of this contract, or the state differs from its
                start; nothing was changed.
        """
        difference = self._steps.differs(step)
        if difference is not None:
            raise ValueError(f"commit_step: {difference}; ask check_step before the step is run")
        if self._counted is not None:
            self._counted.require_commit(None)
        self._steps.commit(step)
        if self._counted is not None:
            self._counted.committed()
        return self._epochs.current

    @alone
    def check_checkpoint(self) -> None:
        """
        Ask whether `checkpoint` would be accepted now; nothing changes and nothing is logged.

        Raises:
            Refused: What `checkpoint` would raise, with the same explanation.

        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)])
        >>> contract.check_checkpoint()
        """
        self._restarts.check_checkpoint()

    @alone
    def checkpoint(self, *, state: Any = None, recipe: Any = None) -> Checkpoint:
        """
        Return what persists, when nothing is live (paper, III-E; Invariant 4).

        Args:
            state: Handle of the numerical state that the caller saves alongside.
            recipe: Precision recipe, any JSON value.

        Raises:
            Refused: A clause of persistence.
        """
        return self._restarts.checkpoint(self.configuration, state, recipe)

    @alone
    def restore(self, checkpoint: Checkpoint, *, incarnation: int | None = None) -> None:
        """
        Begin a new incarnation at a checkpoint's epoch, in this process or a fresh one.

        Every older reference is refused afterwards and every weight cache is stale. The caller
        restores the numerical state first.

        Raises:
            Refused: ``persistence.configuration``, work is still in flight, or the incarnation is
                one that this contract has had.
            TypeError, ValueError: No checkpoint, or an incarnation outside 64 bits.
        """
        self._restarts.restore(self.configuration, checkpoint, incarnation=incarnation)


def _names(evidence: Iterable[str]) -> tuple[Any, ...]:
    """
    Sort evidence; anything but a collection of names is evidence of nothing.

    One name is no collection, though Python walks its letters.
    """
    try:
        if isinstance(evidence, str):
            raise TypeError(f"{shown(evidence)} is one name; expected a collection of names")
        names = tuple(sorted(evidence))
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"{shown(name)} is no name")
    except Exception as error:  # the caller's iterable may raise anything; the action has failed
        return (error,)
    return names


#: How a dW writes, by whether it overwrites its stage's own destinations and the shared ones.
_WRITES: Final = {
    (0, False): ADDS,
    (1, True): OVERWRITES,
    (1, False): JOINS,
    (0, True): OPENS,
}

#: The evidence of an action that filled no cache, or whose backend cannot say.
_NO_FILL: Final = ((), NEVER)

#: The largest count that a refusal repeats as a number.
_LARGEST: Final = (1 << 63) - 1

#: Stands for what was filled from no epoch that can be read; neither `NEVER` nor any epoch.
_UNREADABLE: Final = NEVER - 1


def _collection(name: str, given: Any) -> None:
    """Require a collection of a configuration's parts; a string would be one of letters."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a collection, got {shown(given)}")


def _count(reported: Any) -> int:
    """Return a count or a token as it was reported; what is none stands for nothing reported."""
    return reported if type(reported) is int and reported >= 0 else NEVER


def _told(reported: Any) -> Any:
    """Return what a refusal says of a reported count: itself, no report, or the text of another."""
    if reported is None:
        return NEVER
    return reported if 0 <= _count(reported) <= _LARGEST else shown(reported)


def _fills(filled: Fills, epoch: int) -> tuple[tuple[Any, ...], int]:
    """
    Return the matrices that were filled, sorted, and the weight epoch that they were filled from.

    Where not all are from the given epoch, the first other one stands for all. A report that
    cannot be read is of an epoch that is none: something was filled, and nobody knows from what.
    """
    try:
        pairs = list(filled.items() if isinstance(filled, Mapping) else filled)
        if not pairs:
            return _NO_FILL
        of = next((e for _, e in pairs if e.__class__ is not int or e != epoch), epoch)
        known = of.__class__ is int and of >= 0
        return _names([name for name, _ in pairs]), of if known else _UNREADABLE
    except Exception:  # the caller's iterable may raise anything; the action has failed
        return (), _UNREADABLE


def _redeemed(
    ticket: Ticket, names: Any, of: int, evidence: Any, updates: Any, scales: Any
) -> tuple[Any, ...]:
    """Return the arguments of a commit: each action brings evidence of its own."""
    redeems = ticket.slot, ticket.serial
    if ticket.action == "F":
        return (*redeems, names, of, updates)
    if ticket.action == "refresh":
        return (*redeems, names, of)
    return (*redeems, evidence, updates, scales) if ticket.action == "dI" else (*redeems, evidence)
