"""
Checks: calls that run every guard of an action and reserve what the action will touch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..destinations import Destination
from ..keys import TapeKey, TapeRef
from ..ledgers.runner import FAILURES
from ..relations.constants import ADDS, JOINS, OPENS, OVERWRITES
from ..threads import ConcurrentCallError, exclusive_call
from ..tickets import Ticket, issue
from .parts import ContractParts

__all__ = ["Checks"]

#: The link that an action uses by default; every other link is checked.
_FIRST: Final = 0

#: How a dW writes, by two facts: whether it overwrites its stage's own destinations, and whether it
#: overwrites the shared destinations.
_WRITES: Final = {
    (0, False): ADDS,
    (1, True): OVERWRITES,
    (1, False): JOINS,
    (0, True): OPENS,
}

#: The default group of a dW: no other tape.
_ALONE: Final[tuple[tuple[TapeKey, TapeRef], ...]] = ()

_new = object.__new__


# Pass the parameters after key, reference and evidence by name. Their signatures do not demand it,
# since a call of a function with keyword-only parameters takes the interpreter's slow path, which
# costs a twentieth of a guarded action. For the same reason a transition is read into a local
# before its call: a call through an attribute first looks for a method of the class.


class Checks(ContractParts):
    """The calls before an action; an accepted check returns a ticket for its reservation."""

    @exclusive_call
    def check_refresh(self, stage: int, link: int = 0) -> Ticket:
        """
        Reserve a stage's state domain (stages whose FP8 scales are updated together) for a refresh
        of the stage's quantized weight cache.

        Raises:
            Refused: A version, order or completion guard refused; or ``version.left-out``, if the
                contract omits the version relation and therefore tracks no weight cache.
        """
        self._arguments.stage("check_refresh", stage)
        self._arguments.link("check_refresh", link)
        serial = self._runner.run("check_refresh", stage, link)
        return issue("refresh", None, stage, serial, self.memory.incarnation[0], None)

    @exclusive_call
    def check_evaluation(self, stage: int, link: int = 0, cached: bool = True) -> Ticket:
        """
        Reserve a stage and its state domain (stages whose FP8 scales are updated together) for an
        evaluation: a forward without training.

        No dI or dW follows an evaluation. An evaluation has no key and no slot (set of buffers),
        updates neither the scaling state nor the weight cache, and runs in separate memory. An
        evaluation is accepted between any two actions of an epoch, except between a refresh and the
        stage's first F.

        Args:
            stage: Stage whose weights are read.
            link: Index of the link between the calling stream and the domain's graph stream.
            cached: True if the evaluation reads the stage's quantized weight cache, which must then
                be current. False if the evaluation quantizes the weights itself.

        Raises:
            Refused: A version, order, completion or epoch guard refused.

        >>> from qeffect import Contract, StageConfig
        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)])
        >>> contract.commit(contract.check_evaluation(0, cached=False))
        >>> contract.check_evaluation(0)
        Traceback (most recent call last):
        ...
        qeffect.refusals.Refused: version.stale-cache in check_evaluation: found ...
        """
        self._arguments.stage("check_evaluation", stage)
        self._arguments.link("check_evaluation", link)
        serial = self._runner.run("check_evaluation", stage, link, 1 if cached else 0)
        return issue("evaluation", None, stage, serial, self.memory.incarnation[0], None)

    def check_forward(
        self,
        key: TapeKey,
        slot: int | None = None,
        token: int | None = None,
        link: int = 0,
        refresh: bool = False,
    ) -> Ticket:
        """
        Reserve a slot, and the stage's state domain (stages whose FP8 scales are updated together),
        for F (a forward).

        Args:
            key: Key of the stage execution (epoch, stage, microbatch, block, invocation).
            slot: Slot (set of buffers for one microbatch) to use; by default the slot that the key
                reserved, or a free slot.
            token: Effect token (the domain's count of F and dI) that the caller expects; by default
                the domain's current token.
            link: Index of the link between the calling stream and the domain's graph stream.
            refresh: If True, this F also refreshes the weight cache; if False, the cache must be
                current.

        Raises:
            Refused: An ownership, version, order, capture or completion guard refused.

        >>> from qeffect import Contract, StageConfig, TapeKey
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
        Reserve a tape (what one forward leaves in memory for its backward), and the stage's state
        domain (stages whose FP8 scales are updated together), for dI (an input gradient).

        Raises:
            Refused: An ownership, version, order, arena, capture or completion guard refused.
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
                    raise IndexError(ref)  # a column raises for a slot beyond the last
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
        group: Iterable[tuple[TapeKey, TapeRef]] = _ALONE,
    ) -> Ticket:
        """
        Reserve a tape (what one forward leaves in memory for its backward), and its gradient
        destinations, for dW (a weight gradient). For a grouped dW, also reserve the group's other
        tapes.

        A grouped dW is one matrix product over several tapes of one stage. The product writes the
        tapes' common destination once, and ``first`` describes this single write. The device counts
        only the first tape's dW. A commit completes the dW of every tape; an abort aborts every
        tape.

        Args:
            key: The key of the tape that the reference must name: epoch, stage, microbatch and,
                where the stage uses them, block and invocation.
            ref: Reference that the forward's commit returned.
            destination: The destinations to be written; by default the configured destinations.
            first: Whether the write overwrites its destination (True) or adds to the destination
                (False). By default, the first write of an epoch overwrites.
            first_of_tied: Whether the write overwrites (True) or adds to (False) the destinations
                that the stage shares with another stage. Default: whether this is the first write
                of the shared destinations in the epoch. If the stage shares no destination, the
                default is the value of ``first``.
            link: Index of the link between the calling stream and the domain's graph stream.
            group: Keys and references of the other tapes (data of one F each) that the same product
                uses. Their gradients go to the same destination, and their F ran with the same
                scales (``scales="epoch"``).

        Raises:
            Refused: An ownership, version, order, arena, capture or completion guard refused the
                tape or another tape of the group; then nothing is reserved.
        """
        if self._entered:
            raise ConcurrentCallError("check_wgrad")
        self._entered = True
        try:
            st = self.memory
            run = self._check_wgrad
            members = _ALONE if group is _ALONE else self._groups.members(group)
            try:
                if type(key) is not TapeKey or type(ref) is not TapeRef or ref.slot < 0:
                    raise IndexError(ref)  # a column raises for a slot beyond the last
                if link is not _FIRST and (type(link) is not int or link < 0):
                    raise IndexError(link)
                if destination is None:
                    destination = st.destination_of[key.cell]
                if first is None:
                    first = st.opened[st.buffer_of[key.cell]] != key.epoch
                overwrites = 1 if first else 0
                if self._shares or first_of_tied is not None:
                    overwrites = self._writes(key, overwrites, first_of_tied)
                if members:
                    check = (key, ref, link, destination, overwrites)
                    self._groups.rehearse(check, members)
                serial = run(st, key, ref, link, destination, overwrites)
            except FAILURES as error:
                given = (key, ref, link, destination, first)
                raise self._runner.failure(error, "check_wgrad", given) from None
            taken = self._groups.take(check, serial, members) if members else None
            if self._observer is not None:
                self._observer("check_wgrad", (key, ref, link, destination, overwrites), serial)
            if self._counted is not None:
                self._counted.checked(key.cell, ref.slot, overwrites)
            if taken is not None:
                self._groups.tell(taken)
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
        """Return how a dW writes its stage's own destinations and its shared destinations."""
        st = self.memory
        own = st.buffer_of[key.cell]
        shared = st.shared_of[own]
        if first_of_tied is None:
            if shared == own:
                return overwrites
            first_of_tied = st.opened[shared] != key.epoch
        return _WRITES[overwrites, bool(first_of_tied)]
