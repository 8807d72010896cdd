"""
Calls for tapes before, between and after F, dI and dW: slots, buffers, messages, readers, aborts.
"""

from __future__ import annotations

from ..destinations import Destination
from ..keys import TapeKey, TapeRef
from ..threads import ConcurrentCallError, exclusive_call
from .parts import ContractParts

__all__ = ["TapeCalls"]


class TapeCalls(ContractParts):
    """
    Reserve slots (sets of buffers), bind gradient destinations, receive and send messages, abort
    tapes (what one F leaves for its dI and dW).
    """

    @exclusive_call
    def reserve(self, key: TapeKey, slot: int | None = None, *, link: int = 0) -> TapeRef:
        """
        Claim a slot (a set of buffers) for a key before the key's forward, so that the slot's input
        buffer can be filled.

        If the stage has ``copies_input``, the call also records the input copy as work of the link.
        Enqueue the copy before any other call, and `join` the link before F.

        Args:
            key: The key of the tape: epoch, stage, microbatch and, where the stage uses them, block
                and invocation.
            slot: Slot (set of buffers for one microbatch) to use; by default a free slot.
            link: Link (caller stream and graph stream) of the stream that will fill the buffer;
                that stream must have waited for the work of the slot's previous tape.

        Raises:
            Refused: An ownership, version or completion guard refused.
        """
        return self._tapes.reserve(key, slot, link)

    @exclusive_call
    def skip(self, key: TapeKey) -> None:
        """
        Leave one key out of the walk (pass over all microbatches): its F, dI and dW will not run.
        Call `skip` before the walk's first F.

        `shorten_walk` does this for all stages at once.

        Raises:
            Refused: ``ownership.walk-begun``, ``ownership.skipped``, ``order.declared``,
                ``epoch.sole-writer`` and others.
        """
        self._tapes.skip(key)

    def bind(self, key: TapeKey, destination: tuple[Destination, ...] | None = None) -> None:
        """
        Bind the destinations (buffers) of a key's matrix gradients, before the key's dI (paper,
        III-D).

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

    @exclusive_call
    def post_receive(
        self, key: TapeKey, ref: TapeRef, *, gradient: bool = False, link: int = 0
    ) -> None:
        """
        Check that a stream may now receive the input of a tape's F, or the gradient of the F's
        output.

        The tape's slot (set of buffers) stays reserved for the message until `finish_receive`, even
        if the tape is aborted.

        Args:
            key: The key of the tape: epoch, stage and microbatch. For an input, the key must have
                reserved the slot.
            ref: The reference that `reserve` or the forward's commit returned.
            gradient: Whether the message is the gradient of the output (True) or the input (False).
            link: Link of the stream that receives.

        Raises:
            Refused: An ownership or completion guard refused.
        """
        self._tapes.post_receive(key, ref, gradient, link)

    @exclusive_call
    def finish_receive(
        self, key: TapeKey, ref: TapeRef, *, gradient: bool = False, link: int = 0
    ) -> None:
        """
        Record that a message has arrived completely.

        Afterwards F (or dI) of the tape may use the received data. If a message can no longer
        arrive, first `drop` the tape, so that no action uses it and its epoch cannot commit. Then
        call `finish_receive` to free the slot.

        Args:
            key: The key of the tape: epoch, stage and microbatch.
            ref: The reference that the receive was posted with.
            gradient: Whether the message was the gradient of the output (True) or the input
                (False).
            link: Link of a stream that has waited for the message. The replay that uses the
                message must wait for that stream.

        Raises:
            Refused: An ownership or completion guard refused.
        """
        self._tapes.finish_receive(key, ref, gradient, link)

    def read(self, key: TapeKey, ref: TapeRef, *, gradient: bool = False, link: int = 0) -> None:
        """
        Check that a stream may now read a tape's output (of F) or input gradient (of dI), and begin
        the read.

        The tape's slot (set of buffers) stays reserved for the reader until `finish_read`, even if
        the tape is aborted. If several streams read one buffer, call `read` once, before the first
        stream begins.

        Raises:
            Refused: An ownership guard refused, or ``completion.graph-to-caller``.
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
        Record that the read of a tape's output (of F) or input gradient (of dI) has ended.

        Args:
            key: The key of the tape: epoch, stage and microbatch.
            ref: The reference that the read began with.
            gradient: Whether the input gradient (True) or the output (False) was read.
            link: Link of a stream that has waited for the end of the read. The slot's next forward
                must wait for that stream.

        Raises:
            Refused: An ownership or completion guard refused.
        """
        if self._entered:
            raise ConcurrentCallError("finish_read")
        self._entered = True
        try:
            self._tapes.finish_read(key, ref, gradient, link)
        finally:
            self._entered = False

    @exclusive_call
    def drop(self, key: TapeKey, ref: TapeRef) -> None:
        """
        Abort one tape (what one F left) that has no action in flight; its epoch can no longer
        commit.

        Raises:
            Refused: An ownership guard refused.
        """
        self._tapes.drop(key, ref)

    @exclusive_call
    def purge(self, epoch: int) -> int:
        """
        Abort every live tape (what one F left) of an epoch; return the number of aborted tapes.

        Raises:
            Refused: ``ownership.in-flight`` if an action of one of these tapes is in flight; then
                no tape is aborted.
        """
        return self._tapes.purge(epoch)
