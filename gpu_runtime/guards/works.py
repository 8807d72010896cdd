"""The live work and messages of one step under a contract."""

from __future__ import annotations

from typing import Any

from qeffect.action_blocks import Dgrad, Forward
from qeffect.contract import Contract
from qeffect.keys import TapeKey, TapeRef
from qeffect.relations.constants import GENERATION_MAX
from qeffect.schedule.pairing import Work

__all__ = ["Event", "Works"]

Event = tuple[str, int, int]
"""An action: torch's name of its kind, its stage, and its microbatch (-1 without one)."""

_RECEIVES = frozenset({"RECV_F", "RECV_B"})


class Works:
    """
    The live work and messages of one step under a contract.

    Every method that calls the contract raises `Refused` if an action breaks it.

    Args:
        contract: The contract of the rank.
    """

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.refs: dict[Work, TapeRef] = {}
        self._keys: dict[Work, TapeKey] = {}
        self.posted: set[Event] = set()
        self.reading: set[Event] = set()

    def check(self, event: Event, used: Work | None = None, *, refresh: bool = False) -> Any:
        """
        Check F (`F`), dI (`I`), dW (`W`) or a full backward (`B`); return its open block.

        Args:
            event: The action.
            used: The work whose output a backward uses; by default its own.
            refresh: Whether F quantizes the stage's weights anew.
        """
        kind, stage, microbatch = event
        key, work = self.key((stage, microbatch)), (stage, microbatch)
        block: Any
        if kind == "F":
            self.finish_receive(("RECV_F", *work))
            block = self.contract.forward(key, refresh=refresh)
        elif kind == "W":
            block = self.contract.wgrad(key, self.ref(work))
        else:
            self.finish_receive(("RECV_B", *work))
            block = self.contract.dgrad(key, self.ref(used or work))
        return block.__enter__()

    def commit(self, event: Event, block: Any) -> None:
        """Commit an action that ran, by the block that `check` returned."""
        kind, stage, microbatch = event
        block.__exit__(None, None, None)
        if isinstance(block, Forward):
            self.refs[stage, microbatch] = block.ref
        elif isinstance(block, Dgrad) and kind == "B":  # the full backward has run dW too
            work = (stage, microbatch)
            with self.contract.wgrad(self.key(work), self.ref(work)):
                pass

    def reserve(self, work: Work, slot: int | None = None) -> None:
        """Reserve a slot for the input of a work."""
        self.refs[work] = self.contract.reserve(self.key(work), slot)

    def post_message(self, event: Event, slot: int | None = None, used: Work | None = None) -> None:
        """
        Post a send or a receive.

        Args:
            event: The message.
            slot: The slot that takes a received input; by default a free slot.
            used: The work whose output or gradient is sent; by default the message's own.
        """
        kind, stage, microbatch = event
        work, gradient = (stage, microbatch), kind.endswith("B")
        if kind == "RECV_F":
            self.reserve(work, slot)
        ref = self.ref(used or work)
        if kind in _RECEIVES:
            self.contract.post_receive(self.key(work), ref, gradient=gradient)
            self.posted.add(event)
        else:
            self.contract.read(self.key(work), ref, gradient=gradient)
            self.reading.add(event)

    def finish_receive(self, event: Event) -> None:
        """End a receive, if it was posted and has not ended."""
        if event in self.posted:
            self.posted.discard(event)
            kind, *work = event
            stage, microbatch = work
            ref = self.ref((stage, microbatch))
            self.contract.finish_receive(
                self.key((stage, microbatch)), ref, gradient=kind == "RECV_B"
            )

    def finish_send(self, event: Event) -> None:
        """End a send, which the framework has waited for."""
        kind, stage, microbatch = event
        work = (stage, microbatch)
        self.contract.finish_read(self.key(work), self.ref(work), gradient=kind == "SEND_B")
        self.reading.discard(event)

    def key(self, work: Work) -> TapeKey:
        """Return the key of a work in the contract's epoch."""
        key = self._keys.get(work)
        if key is None:  # the epoch is the same until the step ends
            key = self._keys[work] = TapeKey(self.contract.epoch, *work)
        return key

    def ref(self, work: Work) -> TapeRef:
        """Return the reference to a work's tape."""
        ref = self.refs.get(work)
        if ref is None:  # nothing was retained: use a reference that was never issued
            return TapeRef(0, GENERATION_MAX, self.contract.incarnation)
        return ref
