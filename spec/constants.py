"""
The constants of the contract's columns: sentinels, and the bits of a tape's masks.

The kernel, the predicates and the proofs import these constants from here.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "ADDS",
    "BACK_BIT",
    "BEFORE_DGRAD",
    "COPY_BIT",
    "DGRAD_BIT",
    "GRAD_BIT",
    "GROUP_BIT",
    "INPUT_BITS",
    "IN_BIT",
    "JOINS",
    "NEVER",
    "NO_RANK",
    "NO_SLOT",
    "NO_STAGE",
    "OPENS",
    "OUT_BIT",
    "OVERWRITES",
    "READ_BITS",
    "RESERVED",
    "SOURCE_BIT",
    "TARGET_BIT",
    "WGRAD_BIT",
]

#: No slot: the pool has no free slot, or the cell has no live tape.
NO_SLOT: Final = -1
#: No stage: no refresh waits for its first forward.
NO_STAGE: Final = -1
#: A value that no epoch has: the event never happened, or the cache is stale.
NEVER: Final = -1
#: No capture rank: the graph of the stage's refresh was captured in a pool of its own.
NO_RANK: Final = -1

#: Bits of a tape's consumer mask: the consumers that have not finished with the tape.
DGRAD_BIT: Final = 1
WGRAD_BIT: Final = 2
OUT_BIT: Final = 4  # a reader of the forward's output: a send, or the next local stage
GRAD_BIT: Final = 8  # a reader of the input gradient
#: Mask of a slot that a key has claimed and whose forward has not committed; no consumer may
#: visit the slot.
RESERVED: Final = 16

#: Transfer bits of messages that come into a slot. ``OUT_BIT`` and ``GRAD_BIT`` are the transfer
#: bits of reads from the slot.
IN_BIT: Final = 1  # a receive of the forward's input
BACK_BIT: Final = 2  # a receive of the output's gradient
COPY_BIT: Final = 16  # a copy of the forward's input, enqueued with the reservation of its slot
INPUT_BITS: Final = 17  # both ways of filling the input: ``IN_BIT`` and ``COPY_BIT``
GROUP_BIT: Final = 32  # the dW of another tape, whose one product takes this tape too
READ_BITS: Final = 44  # every use of a tape: ``OUT_BIT``, ``GRAD_BIT`` and ``GROUP_BIT``

#: What F and dI of a stage need from another stage of the process: its F makes the input for F, or
#: its dI makes the gradient for dI.
SOURCE_BIT: Final = 4
TARGET_BIT: Final = 8

#: Two bits, of which a tape's mask has one until its dI has committed: ``RESERVED`` until its
#: forward has committed, then ``DGRAD_BIT``.
BEFORE_DGRAD: Final = 17

#: How a dW writes its stage's own buffer and the buffer shared with another stage. If the stage
#: shares no buffer, both are the same buffer, and only ``ADDS`` and ``OVERWRITES`` apply.
ADDS: Final = 0  # to both
OVERWRITES: Final = 1  # both
JOINS: Final = 2  # overwrites its own, adds to the shared one
OPENS: Final = 3  # adds to its own, overwrites the shared one
