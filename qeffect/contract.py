"""
The contract of one process: what a training runtime asks before, and tells after, every action.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from attrs import define

from .arguments import UNUSABLE, Arguments
from .config import StageConfig, lay_out
from .engine.freelist import FreeSlots
from .engine.memory import Snapshot
from .engine.stage import transitions
from .explain import explain
from .guarded import Dgrad, Forward, Refresh, Wgrad
from .keys import Cell, TapeKey, TapeRef
from .layout import Destination
from .ledgers import Ledgers, Observer
from .refusals import Refused
from .relations.constants import GENERATION_MAX

__all__ = ["Contract", "Observer", "Ticket"]


@define(slots=True)
class Ticket:
    """
    What a check reserved; commit or abort redeems it, once.

    Args:
        action: ``F``, ``dI``, ``dW`` or ``refresh``.
        key: Key of the tape; None for a refresh.
        slot: Slot of the tape, or the stage of a refresh.
        serial: Serial of the check that issued the ticket.
        incarnation: Of the memory that issued it; no other redeems it.
        ref: Reference the action consumes; None before a forward's commit.

    >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)], omit=("version",))
    >>> ticket = contract.check_forward(TapeKey(epoch=0, stage=0, microbatch=0))
    >>> ticket.action, ticket.slot, ticket.ref
    ('F', 0, None)
    >>> contract.commit(ticket) == ticket.ref
    True
    """

    action: str
    key: TapeKey | None
    slot: int
    serial: int
    incarnation: int
    ref: TapeRef | None = None


_COMMITS = {
    "F": "commit_forward",
    "dI": "commit_dgrad",
    "dW": "commit_wgrad",
    "refresh": "commit_refresh",
}
_ABORTS = {action: name.replace("commit", "abort") for action, name in _COMMITS.items()}


class Contract(Ledgers):
    """
    The state and resource contract of one process (paper, Section III).

    ``check_*`` runs every guard and reserves what the action will touch, ``commit`` redeems the
    ticket after the physical action succeeded, ``abort`` after it failed. ``forward``, ``dgrad``,
    ``wgrad`` and ``refresh`` do this as context managers. A refused call leaves the contract
    exactly as it was.

    Args:
        stages: The stages of this process.
        omit: Relations that the backend does not use, from ``qeffect.engine.stage.OPTIONAL``.
        callers: Names of the streams that call into the graph streams.
        capture_order: Order of capture of graphs that share a pool; see ``config.lay_out``.
        declared: Declared order of F and dI per domain; see ``config.lay_out``.
        generation_max: The last generation that a slot may reach.
        epoch: Weight epoch to begin in.
        observer: Called after every accepted transition; None costs nothing.

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
    qeffect.refusals.Refused: ownership.stale-reference in check_wgrad: presented ...
    """

    def __init__(
        self,
        stages: Sequence[StageConfig],
        *,
        omit: Iterable[str] = (),
        callers: Sequence[Hashable] = ("main",),
        capture_order: Iterable[tuple[int, int, str]] = (),
        declared: Mapping[Hashable, Sequence[tuple[str, Cell]]] | None = None,
        generation_max: int = GENERATION_MAX,
        epoch: int = 0,
        observer: Observer | None = None,
    ) -> None:
        if not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch must be a number from 0, got {epoch!r}")
        self.stages = tuple(stages)
        self.transitions = transitions(omit)
        laid = lay_out(
            self.stages,
            self.transitions,
            callers=callers,
            capture_order=capture_order,
            declared=declared,
            generation_max=generation_max,
        )
        self.memory = laid.memory
        self.observer = observer
        self._slots = laid.slots
        self._domains = laid.domains
        self._links = laid.links
        self._arguments = Arguments(laid.cells, laid.slots, len(laid.links))
        self._callers = tuple(callers)
        self._free = {stage: FreeSlots(own) for stage, own in laid.slots.items()}
        self._reserved: dict[Cell, int] = {}
        self._num_slots = len(self.memory.pending)
        self._num_links = len(laid.links)
        self._links_of = {
            name: tuple(link for (caller, _), link in laid.links.items() if caller == name)
            for name in self._callers
        }
        self._transition = self.transitions.functions
        self.memory.incarnation[0] = secrets.randbits(64)
        self.memory.fill(self.memory.weight_epoch, epoch)
        t = self.transitions
        self._check_forward, self._commit_forward = t.check_forward, t.commit_forward
        self._check_dgrad, self._commit_dgrad = t.check_dgrad, t.commit_dgrad
        self._check_wgrad, self._commit_wgrad = t.check_wgrad, t.commit_wgrad
        self._commit_refresh = t.commit_refresh
        # Where each cell's gradients go: configured, so one look-up serves both columns.
        st = self.memory
        self._homes = {c: (st.destination_of[c], st.buffer_of[c]) for c in st.buffer_of}

    # Reading

    @property
    def incarnation(self) -> int:
        """The random number in every reference that this contract issues."""
        return int(self.memory.incarnation[0])

    def token(self, stage: int) -> int:
        """The effect token of the stage's domain: F and dI committed in this incarnation."""
        return int(self.memory.token[self.memory.domain_of[stage]])

    def link(self, caller: Hashable = "main", domain: Hashable | None = None) -> int:
        """Index of the link between a caller stream and a domain's graph stream."""
        name = self.stages[0].domain if domain is None else domain
        try:
            return self._links[caller, name]
        except (KeyError, TypeError):
            raise ValueError(
                f"no link of caller {caller!r} and domain {name!r}; there are {list(self._links)}"
            ) from None

    def first_writer(self, key: TapeKey) -> bool:
        """Whether the key's dW would be the first write of its buffer in this epoch."""
        st = self.memory
        return bool(st.opened[st.buffer_of[key.cell]] != key.epoch)

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

    def check_refresh(self, stage: int, link: int = 0) -> Ticket:
        """
        Reserve a stage's domain for a refresh of its quantized weight cache.

        Raises:
            Refused: A clause of version, order or completion.
            ValueError: The stages leave the version relation out, so there is no cache.
        """
        if "version" not in self.transitions.relations:
            raise ValueError("these stages leave version out: they have no cache to refresh")
        self._arguments.stage("check_refresh", stage)
        self._arguments.link("check_refresh", link)
        serial = self._run("check_refresh", stage, link)
        return Ticket("refresh", None, stage, serial, self.memory.incarnation[0])

    def check_forward(
        self,
        key: TapeKey,
        *,
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
        qeffect.refusals.Refused: version.stale-cache in check_forward: presented ...
        """
        st = self.memory
        try:
            if link < 0:
                raise IndexError(link)
            if slot is None:
                free = self._free[key.stage]
                if self._reserved and key.cell in self._reserved:
                    slot = self._reserved[key.cell]
                else:
                    slot = free[-1] if free else st.slot_of[key.cell]
            elif slot < 0 or key.cell not in st.slot_of:
                raise IndexError(slot)
            if token is None:
                token = st.token[st.domain_of[key.stage]]
            serial = self._check_forward(st, key, slot, token, link, 1 if refresh else 0)
        except Refused as refused:
            raise explain(refused, "check_forward", st, (key, slot, token, link, refresh)) from None
        except UNUSABLE as error:
            raise self._arguments.unusable(
                error, "check_forward", (key, slot, token, link, refresh)
            ) from None
        free = self._free[key.stage]
        if free and free[-1] == slot:
            free.pop()
        elif not free.take(slot):
            del self._reserved[key.cell]
        if self.observer is not None:
            self.observer("check_forward", (key, slot, token, link, int(refresh)), serial)
        return Ticket("F", key, slot, serial, st.incarnation[0])

    def check_dgrad(
        self, key: TapeKey, ref: TapeRef, *, token: int | None = None, link: int = 0
    ) -> Ticket:
        """
        Reserve a tape and the state domain for dI.

        Raises:
            Refused: A clause of ownership, version, order, arena, capture or completion.
        """
        st = self.memory
        try:
            if token is None:
                token = st.token[st.domain_of[key.stage]]
            if link < 0 or not 0 <= ref.slot < self._num_slots:
                raise IndexError(ref.slot)
            serial = self._check_dgrad(st, key, ref, token, link)
        except Refused as refused:
            raise explain(refused, "check_dgrad", st, (key, ref, token, link)) from None
        except UNUSABLE as error:
            raise self._arguments.unusable(error, "check_dgrad", (key, ref, token, link)) from None
        if self.observer is not None:
            self.observer("check_dgrad", (key, ref, token, link), serial)
        return Ticket("dI", key, ref.slot, serial, ref.incarnation, ref)

    def check_wgrad(
        self,
        key: TapeKey,
        ref: TapeRef,
        *,
        destination: tuple[Destination, ...] | None = None,
        first: bool | None = None,
        link: int = 0,
    ) -> Ticket:
        """
        Reserve a tape and its destinations for dW.

        Args:
            key: Key of the execution; its microbatch and the reference must name one slot.
            ref: Reference that the forward's commit returned.
            destination: The destinations about to be written; by default the configured ones.
            first: Whether the write overwrites; by default what the ledger says.
            link: Link of the calling stream.

        Raises:
            Refused: A clause of ownership, version, arena, capture or completion.
        """
        st = self.memory
        try:
            if link < 0 or not 0 <= ref.slot < self._num_slots:
                raise IndexError(ref.slot)
            configured, buffer = self._homes[key.cell]
            if destination is None:
                destination = configured
            if first is None:
                first = st.opened[buffer] != key.epoch
            serial = self._check_wgrad(st, key, ref, link, destination, 1 if first else 0)
        except Refused as refused:
            raise explain(
                refused, "check_wgrad", st, (key, ref, link, destination, first)
            ) from None
        except UNUSABLE as error:
            raise self._arguments.unusable(
                error, "check_wgrad", (key, ref, link, destination, first)
            ) from None
        if self.observer is not None:
            self.observer("check_wgrad", (key, ref, link, destination, int(first)), serial)
        return Ticket("dW", key, ref.slot, serial, ref.incarnation, ref)

    def commit(self, ticket: Ticket, evidence: Iterable[str] = ()) -> TapeRef | None:
        """
        Redeem a ticket after its physical action succeeded.

        No other action can make a commit fail. Only its own evidence can: dI must have queued
        deferred work for every matrix, dW must have covered every matrix exactly once. The
        action has then failed, and is aborted before the refusal is raised.

        Args:
            ticket: What the check returned.
            evidence: For dI the matrices whose gradient work was queued, for dW those whose
                gradient was written, each as often as it was.

        Returns:
            For F the reference of the new tape, else None.

        Raises:
            Refused: ``ownership.unknown-ticket``, ``ownership.work-not-queued`` or
                ``ownership.matrix-coverage``.

        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)], omit=("version",))
        >>> ticket = contract.check_forward(TapeKey(epoch=0, stage=0, microbatch=0))
        >>> ref = contract.commit(ticket)
        >>> ref.slot, ref.generation
        (0, 0)
        """
        st = self.memory
        ref = None
        try:
            slot, serial, action = ticket.slot, ticket.serial, ticket.action
            if slot < 0 or ticket.incarnation != st.incarnation[0]:
                raise IndexError(slot)
            if action == "F":
                self._commit_forward(st, slot, serial)
                ticket.ref = ref = TapeRef(slot, st.generation[slot], ticket.incarnation)
            elif action == "refresh":
                self._commit_refresh(st, slot, serial)
            else:
                stage = st.slot_stage[slot]
                if evidence is not st.matrices[stage]:
                    evidence = _names(evidence)
                if action == "dI":
                    self._commit_dgrad(st, slot, serial, evidence)
                elif action != "dW":
                    raise IndexError(action)
                else:
                    self._commit_wgrad(st, slot, serial, evidence)
                    if st.pending[slot] == 0:
                        if st.generation[slot] == st.generation_max[0]:
                            self._free[stage].retire(slot)
                        else:
                            self._free[stage].put(slot)
        except Refused as refused:
            explain(refused, _COMMITS[action], st, _redeemed(action, slot, serial, evidence))
            if not refused.clause.endswith("unknown-ticket"):
                self.abort(ticket)
            raise
        except UNUSABLE:
            raise self._arguments.ticket("commit", ticket, self.incarnation) from None
        if self.observer is not None:
            self.observer(_COMMITS[action], _redeemed(action, slot, serial, evidence), None)
        return ref

    def abort(self, ticket: Ticket) -> None:
        """
        Redeem a ticket after its physical action failed.

        The tape is dropped and the epoch spoiled. A failed F, dI or refresh also poisons the
        state domain: its scaling state may be half updated (paper, IV-E).

        Raises:
            Refused: ``ownership.unknown-ticket`` or ``version.unknown-ticket``.

        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)], omit=("version",))
        >>> ticket = contract.check_forward(TapeKey(epoch=0, stage=0, microbatch=0))
        >>> contract.abort(ticket)
        >>> contract.commit(ticket)
        Traceback (most recent call last):
        ...
        qeffect.refusals.Refused: ownership.unknown-ticket in commit_forward: presented ...
        """
        try:
            name, slot = _ABORTS[ticket.action], ticket.slot
            if slot < 0 or ticket.incarnation != self.memory.incarnation[0]:
                raise IndexError(slot)
            self.transitions.functions[name](self.memory, slot, ticket.serial)
        except Refused as refused:
            raise explain(refused, name, self.memory, (slot, ticket.serial)) from None
        except UNUSABLE:
            raise self._arguments.ticket("abort", ticket, self.incarnation) from None
        if self.observer is not None:
            self.observer(name, (slot, ticket.serial), None)
        if ticket.action != "refresh":
            self._reclaim(ticket.slot)

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


def _names(evidence: Iterable[str]) -> tuple[Any, ...]:
    """Sort evidence; what is no collection of names is evidence of nothing."""
    try:
        return tuple(sorted(evidence))
    except Exception as error:  # the caller's iterable may raise anything; the action has failed
        return (error,)


def _redeemed(action: str, slot: int, serial: int, evidence: Any) -> tuple[Any, ...]:
    """Return the arguments of a commit; only dI and dW bring evidence."""
    return (slot, serial, evidence) if action in ("dI", "dW") else (slot, serial)
