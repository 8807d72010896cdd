"""
Tickets: reservations that a check makes, and that a commit or an abort ends (redeems).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import define

from .keys import TapeKey, TapeRef

__all__ = ["ABORTS", "COMMITS", "Fills", "Ticket", "issue"]

#: What a refresh filled: by matrix, the weight epoch that its cache was filled from. Pairs may
#: replace the mapping; a matrix can then occur twice.
Fills = Mapping[str, int] | Iterable[tuple[str, int]]

#: By action, the transition that redeems its ticket: `COMMITS` after success, `ABORTS` after
#: failure.
COMMITS = {
    "F": "commit_forward",
    "dI": "commit_dgrad",
    "dW": "commit_wgrad",
    "refresh": "commit_refresh",
    "evaluation": "commit_evaluation",
    "update": "commit_update",
}
ABORTS = {action: name.replace("commit", "abort") for action, name in COMMITS.items()}


@define(slots=True)
class Ticket:
    """
    The reservation that a check made for one action; one commit or abort ends the reservation
    (redeems the ticket).

    Args:
        action: ``F``, ``dI``, ``dW``, ``refresh``, ``evaluation`` or ``update``.
        key: Key of the tape; None for a refresh, an evaluation or an update.
        slot: For F, dI and dW, the slot (set of buffers) of the tape. For a refresh or an
            evaluation, the stage. For an update, the epoch that the update ends.
        serial: Serial number of the check that issued the ticket.
        incarnation: The contract's incarnation (its life since construction or the last restore)
            that issued the ticket; no other incarnation accepts the ticket.
        ref: Reference of the tape that the action uses; None before a forward's commit.

    >>> from qeffect import Contract, StageConfig
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


_new = object.__new__


def issue(
    action: str,
    key: TapeKey | None,
    slot: int,
    serial: int,
    incarnation: int,
    ref: TapeRef | None,
) -> Ticket:
    """
    Return ``Ticket(action, key, slot, serial, incarnation, ref)``, in two thirds of the
    constructor's time.

    Every check issues a ticket, and a plain function avoids the call of ``__init__``. The checks of
    F, dI and dW contain a copy of these lines, because a call would cost more than the ticket.

    >>> issue("F", None, 0, 1, 5, None) == Ticket("F", None, 0, 1, 5)
    True
    """
    ticket = _new(Ticket)
    ticket.action = action
    ticket.key = key
    ticket.slot = slot
    ticket.serial = serial
    ticket.incarnation = incarnation
    ticket.ref = ref
    return ticket
