"""
Commit and abort: the calls that redeem a ticket (reservation) after its action succeeded or failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from ..arguments import UNUSABLE
from ..evidence import (
    NO_FILL,
    commit_arguments,
    printable_count,
    readable_count,
    sorted_fills,
    sorted_names,
)
from ..explain import explain
from ..keys import TapeRef, Unfrozen
from ..refusals import Refused
from ..relations.constants import NEVER
from ..stage_config import UNWEIGHTED
from ..threads import ConcurrentCallError, exclusive_call
from ..tickets import ABORTS, COMMITS, Fills, Ticket
from .queries import Queries

__all__ = ["Redemption"]


#: Actions that no device counts, and actions without a slot.
_UNCOUNTED: Final = ("evaluation", "update")
_SLOTLESS: Final = ("refresh", "evaluation", "update")


class Redemption(Queries):
    """
    The calls `commit` and `abort`; one of these calls redeems each ticket (reservation), once.
    """

    def commit(
        self,
        ticket: Ticket,
        evidence: Iterable[str] = (),
        filled: Fills | None = None,
        updates: int | None = None,
        scales: int | None = None,
        draws: int | None = None,
        weight: tuple[int, int] | None = None,
    ) -> TapeRef | None:
        """
        Redeem a ticket after its physical action (the device work) succeeded.

        Only wrong evidence can make a commit fail. dI must have queued deferred work for every
        matrix, and dW must have written every matrix exactly once. Each report that the stage is
        configured to make must have the expected value. If the evidence is wrong, the contract
        aborts the action, then raises the refusal. The commit of an update also fails if scales
        that are updated once an epoch were not updated (`move_scales`).

        Args:
            ticket: The ticket that the check returned.
            evidence: For dI, the matrices whose gradient work was queued; for dW, the matrices
                whose gradient was written. A matrix written twice is named twice.
            filled: For a refresh, or an F that refreshes: for each matrix, the weight epoch from
                which its cache was filled (`StageConfig.reports_fills`). None if nothing was filled
                or the backend does not report fills.
            updates: For F, dI and an evaluation, how often the domain's scaling state was updated
                (`StageConfig.reports_updates`).
            scales: For dI, the effect token (count of F and dI) of the F whose scales dI used
                (`StageConfig.tape_scales`). If scales are updated once an epoch, give the domain's
                token at the last update of the scales, or 0 before the first update since a
                restore.
            draws: For F, the position of the random generator at which F began to draw
                (`StageConfig.reports_draws`); for dI, the position at which its recomputation
                began (`StageConfig.recomputes_draws`). An integer of at least 0 that rises as the
                generator advances. After reseeding, add the last position before the reseeding to
                each later position, so that the number keeps rising.
            weight: For dI, the factor by which the microbatch's gradient is weighted, as the
                fraction (numerator, denominator). All weights of an epoch have the same
                denominator (`StageConfig.weights_sum`), so do not cancel common factors. The weight
                is the product of all factors that are applied to the gradient before the update,
                except the factor of a sum over replicas.

        Returns:
            For F, the reference of the new tape; otherwise None.

        Raises:
            Refused: ``ownership.unknown-ticket``, ``version.unknown-ticket``,
                ``epoch.unknown-ticket``, ``ownership.work-not-queued``,
                ``ownership.matrix-coverage``, ``version.fill-missing``, ``version.wrong-fill``,
                ``version.fill-unasked``, ``order.scaling-updates``, ``order.wrong-scales``,
                ``order.draws-again``, ``order.wrong-draws``, ``order.scales-not-moved`` or
                ``epoch.other-parts``.

        >>> from qeffect import Contract, StageConfig, TapeKey
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
            ref = ended = None
            try:
                slot, serial, action = ticket.slot, ticket.serial, ticket.action
                own = st.incarnation[0]
                if slot < 0 or (ticket.incarnation is not own and ticket.incarnation != own):
                    raise IndexError(slot)
                names, of = NO_FILL
                weighed = UNWEIGHTED
                if action == "F":
                    if filled is not None and st.reports_fills[st.slot_stage[slot]] != 0:
                        names, of = sorted_fills(filled, self._epochs.current)
                    run = self._commit_forward
                    moved = NEVER if updates is None else readable_count(updates)
                    began = NEVER if draws is None else readable_count(draws)
                    run(st, slot, serial, names, of, moved, began)
                    made: Any = Unfrozen()  # as `reference` does, without its call
                    made.slot = slot
                    made.generation = st.generation[slot]
                    made.incarnation = own
                    made.__class__ = TapeRef
                    ticket.ref = ref = made
                elif action == "dW":
                    stage = st.slot_stage[slot]
                    if evidence is not st.matrices[stage]:
                        evidence = sorted_names(evidence)
                    run = self._commit_wgrad
                    run(st, slot, serial, evidence)
                    if st.consumers[slot] == 0:
                        if st.generation[slot] == st.generation_max[0]:
                            self._free[stage].retire(slot)
                        else:
                            self._free[stage][slot] = None  # as `put` does, without its call
                    if self._groups.open:
                        ended = self._groups.commit(serial, evidence)
                elif action == "dI":
                    if evidence is not st.matrices[st.slot_stage[slot]]:
                        evidence = sorted_names(evidence)
                    run = self._commit_dgrad
                    moved = NEVER if updates is None else readable_count(updates)
                    used = NEVER if scales is None else readable_count(scales)
                    began = NEVER if draws is None else readable_count(draws)
                    if weight is not None:
                        weighed = self._weighed[st.slot_stage[slot]](weight)
                    share, parts = weighed  # passing *weighed would take a tenth longer
                    run(st, slot, serial, evidence, moved, used, began, share, parts)
                elif action == "refresh":
                    if filled is not None and st.reports_fills[slot] != 0:
                        names, of = sorted_fills(filled, self._epochs.current)
                    self.transitions.commit_refresh(st, slot, serial, names, of)
                elif action == "evaluation":
                    if filled is not None and st.reports_fills[slot] != 0:
                        names, of = sorted_fills(filled, self._epochs.current)
                    moved = NEVER if updates is None else readable_count(updates)
                    self.transitions.commit_evaluation(st, slot, serial, of, moved)
                elif action == "update":
                    if slot.__class__ is not int or serial.__class__ is not int:
                        raise TypeError(slot)  # an equal float would become the weight epoch
                    self.transitions.commit_update(st, slot, serial)
                    if self._counted is not None:
                        self._counted.committed()
                else:
                    raise IndexError(action)
            except Refused as refused:
                counts = [printable_count(count) for count in (updates, scales, draws)]
                given = commit_arguments(ticket, names, of, evidence, *counts, weighed=weighed)
                explain(refused, COMMITS[action], st, given)
                if not refused.clause.endswith("unknown-ticket"):
                    try:
                        self._abort(ticket)
                    except Exception as unheard:  # the observer raised; the abort has happened
                        raise refused from unheard
                raise
            except UNUSABLE:
                raise self._arguments.ticket("commit", ticket, self.incarnation) from None
            if self._heard:
                if self._counted is not None and action not in _UNCOUNTED:
                    self._counted.ran(action, slot)
                if self._observer is not None:
                    counts = [readable_count(count) for count in (updates, scales, draws)]
                    given = commit_arguments(ticket, names, of, evidence, *counts, weighed=weighed)
                    self._observer(COMMITS[action], given, None)
            if ended is not None:
                self._groups.tell(ended)
            return ref
        finally:
            self._entered = False

    @exclusive_call
    def abort(self, ticket: Ticket) -> None:
        """
        Redeem a ticket after its physical action (the device work) failed.

        The tape is dropped, and the epoch is spoiled: the epoch can no longer commit. A failed F,
        dI, refresh or evaluation also poisons the state domain: its scaling state may be half
        updated (paper, IV-E). Until a restore, F, dI, refresh, evaluation, `finalize` and a
        checkpoint are then refused. A failed update leaves the weights half updated; then only a
        `restore` is accepted.

        Raises:
            Refused: ``ownership.unknown-ticket``, ``version.unknown-ticket``,
                ``epoch.unknown-ticket`` or ``version.left-out``.

        >>> from qeffect import Contract, StageConfig, TapeKey
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
            if slot.__class__ is not int or ticket.serial.__class__ is not int:
                raise TypeError(slot)
            if slot < 0 or ticket.incarnation != self.memory.incarnation[0]:
                raise IndexError(slot)
            self.transitions.functions[name](self.memory, slot, ticket.serial)
        except Refused as refused:
            raise explain(refused, name, self.memory, (slot, ticket.serial)) from None
        except UNUSABLE:
            raise self._arguments.ticket("abort", ticket, self.incarnation) from None
        if ticket.action not in _SLOTLESS:
            self._pool.reclaim(slot)
        lost = self._groups.abort(ticket.serial) if self._groups.open else []
        if self._observer is not None:
            self._observer(name, (slot, ticket.serial), None)
        self._groups.tell(lost)
