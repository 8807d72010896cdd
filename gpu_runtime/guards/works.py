"""Tell a contract about the computations and messages of one step."""

from __future__ import annotations

from qeffect.contract import Contract, Ticket
from qeffect.keys import TapeKey, TapeRef
from qeffect.relations.constants import GENERATION_MAX
from qeffect.schedule.pairing import Work

__all__ = ["Event", "Works"]

Event = tuple[str, int, int]
"""An action: torch's name of its kind, its stage, and its microbatch (-1 if it has none)."""

_RECEIVES = frozenset({"RECV_F", "RECV_B"})


class _Keys(dict[Work, TapeKey]):
    """The keys of works in a contract's epoch, which is the same until the step ends."""

    def __init__(self, contract: Contract) -> None:
        super().__init__()
        self._contract = contract

    def __missing__(self, work: Work) -> TapeKey:
        key = self[work] = TapeKey(self._contract.epoch, *work)
        return key


class _References(dict[Work, TapeRef]):
    """The references to works' tapes; for any other work, one that was never issued."""

    def __init__(self, contract: Contract) -> None:
        super().__init__()
        self._contract = contract

    def __missing__(self, work: Work) -> TapeRef:
        return TapeRef(0, GENERATION_MAX, self._contract.incarnation)


class Works:
    """
    Tells a contract about the computations and messages of one step.

    A *work* is what a stage computes for one microbatch.

    Every method that calls the contract raises `Refused` if an action breaks it.

    Args:
        contract: The contract of the rank.
    """

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self._keys, self._refs = _Keys(contract), _References(contract)
        self.posted: set[Event] = set()
        self.reading: set[Event] = set()

    def check(self, event: Event, used: Work | None = None, *, refresh: bool = False) -> Ticket:
        """
        Check F (`F`), dI (`I`), dW (`W`) or a full backward (`B`); return its ticket.

        Args:
            event: The action.
            used: The work whose output a backward uses; by default the backward's own work.
            refresh: Whether F quantizes the stage's weights anew.
        """
        kind, stage, microbatch = event
        work = (stage, microbatch)
        if kind == "F":
            self.finish_receive(("RECV_F", stage, microbatch))
            return self.contract.check_forward(self._keys[work], refresh=refresh)
        if kind == "W":
            return self.contract.check_wgrad(self._keys[work], self._refs[work])
        self.finish_receive(("RECV_B", stage, microbatch))
        return self.contract.check_dgrad(self._keys[work], self._refs[used or work])

    def commit(self, event: Event, ticket: Ticket) -> None:
        """Commit an action that ran, by the ticket that `check` returned."""
        kind, stage, microbatch = event
        contract, work = self.contract, (stage, microbatch)
        ref = contract.commit(ticket)
        if ref is not None:  # of F
            self._refs[work] = ref
        elif kind == "B":  # the full backward has run dW too
            contract.commit(contract.check_wgrad(self._keys[work], self._refs[work]))

    def reserve(self, work: Work, slot: int | None = None) -> None:
        """Reserve a slot for the input of a work."""
        self._refs[work] = self.contract.reserve(self._keys[work], slot)

    def post_message(self, event: Event, slot: int | None = None, used: Work | None = None) -> None:
        """
        Post a send or a receive.

        Args:
            event: The message.
            slot: The slot that takes a received input; by default a free slot.
            used: The work whose output or gradient is sent; by default the message's own work.
        """
        kind, stage, microbatch = event
        work = (stage, microbatch)
        if kind == "RECV_F":
            self.reserve(work, slot)
        key, ref = self._keys[work], self._refs[used or work]
        if kind in _RECEIVES:
            self.contract.post_receive(key, ref, gradient=kind == "RECV_B")
            self.posted.add(event)
        else:
            self.contract.read(key, ref, gradient=kind == "SEND_B")
            self.reading.add(event)

    def finish_receive(self, event: Event) -> None:
        """End a receive, if it was posted and has not ended."""
        if event in self.posted:
            self.posted.discard(event)
            kind, stage, microbatch = event
            work = (stage, microbatch)
            self.contract.finish_receive(
                self._keys[work], self._refs[work], gradient=kind == "RECV_B"
            )

    def finish_send(self, event: Event) -> None:
        """End a send that the framework has waited for."""
        kind, stage, microbatch = event
        work = (stage, microbatch)
        self.contract.finish_read(self._keys[work], self._refs[work], gradient=kind == "SEND_B")
        self.reading.discard(event)
