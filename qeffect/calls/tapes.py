"""
Calls about tapes outside F, dI and dW: slots, destinations, messages, readers, and aborts.
"""

from __future__ import annotations

from ..destinations import Destination
from ..keys import TapeKey, TapeRef
from ..threads import ConcurrentCallError, exclusive_call
from .parts import ContractParts

__all__ = ["TapeCalls"]


class TapeCalls(ContractParts):
    """Reserve slots, bind destinations, receive and send messages, abort tapes."""

    @exclusive_call
    def reserve(self, key: TapeKey, slot: int | None = None, *, link: int = 0) -> TapeRef:
        """
        Claim a slot (a set of buffers) for a key before the key's forward, so that the slot's input
        buffer can be filled.

        If the stage has ``copies_input``, the call also records the copy as work of the link:
        enqueue the copy before any other call, and `join` the link before F.

        Args:
            key: The key of the tape: epoch, stage, microbatch and, where the stage uses them, block
                and invocation.
            slot: Slot (set of buffers for one microbatch) to use; by default a free slot.
            link: Link (caller stream and graph stream) of the stream that will fill the buffer;
                that stream must have waited for the work of the slot's previous tape.

        Raises:
            Refused: A guard of ownership, version or completion refused.
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
        Check that a stream may now receive a tape's input, or the gradient of its output.

        The slot stays reserved for the message until `finish_receive`, also if the tape is aborted.

        Args:
            key: The key of the tape: epoch, stage and microbatch. For an input, the key must have
                reserved the slot.
            ref: The reference that `reserve` or the forward's commit returned.
            gradient: Whether the message is the gradient of the output (True) or the input (False).
            link: Link of the stream that receives.

        Raises:
            Refused: A guard of ownership or completion refused.
        """
        self._tapes.post_receive(key, ref, gradient, link)

    @exclusive_call
    def finish_receive(
        self, key: TapeKey, ref: TapeRef, *, gradient: bool = False, link: int = 0
    ) -> None:
        """
        Record that a message has arrived completely.

        Afterwards F (or dI) of the tape may run on the buffer's content. If a message can no longer
        arrive, first `drop` the tape, so that nothing runs on it and its epoch cannot commit; then
        call `finish_receive` to free the slot.

        Args:
            key: The key of the tape: epoch, stage and microbatch.
            ref: The reference that the receive was posted with.
            gradient: Whether the message was the gradient of the output (True) or the input
                (False).
            link: Link of a stream that has waited for the message. The replay that uses the
                message must wait for that stream.

        Raises:
            Refused: A guard of ownership or completion refused.
        """
        self._tapes.finish_receive(key, ref, gradient, link)

    def read(self, key: TapeKey, ref: TapeRef, *, gradient: bool = False, link: int = 0) -> None:
        """
        Check that a stream may now read a tape's output (or input gradient), and begin the read.

        The slot stays reserved for the reader until `finish_read`, also if the tape is aborted. If
        several streams read one buffer, call `read` once, before the first stream begins.

        Raises:
            Refused: A guard of ownership refused, or ``completion.graph-to-caller``.
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
        Record that the read of a tape's output (or input gradient) has ended.

        Args:
            key: The key of the tape: epoch, stage and microbatch.
            ref: The reference that the read began with.
            gradient: Whether the input gradient (True) or the output (False) was read.
            link: Link of a stream that has waited for the end of the read. The slot's next forward
                must wait for that stream.

        Raises:
            Refused: A guard of ownership or completion refused.
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
        Abort one tape that has no action in flight; its epoch can no longer commit.

        Raises:
            Refused: A guard of ownership refused.
        """
        self._tapes.drop(key, ref)

    @exclusive_call
    def purge(self, epoch: int) -> int:
        """
        Abort every live tape of an epoch; return how many there were.

        Raises:
            Refused: ``ownership.in-flight`` if an action of one of these tapes is in flight; then
                no tape is aborted.
        """
        return self._tapes.purge(epoch)
