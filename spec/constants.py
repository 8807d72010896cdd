"""
The plain numbers of the contract's columns: sentinels, and the consumer bits of a tape's mask.

They are defined here once; the kernel, the predicates and the proofs import them.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "ADDS",
    "BACK_BIT",
    "DGRAD_BIT",
    "GRAD_BIT",
    "IN_BIT",
    "JOINS",
    "NEVER",
    "NO_SLOT",
    "NO_STAGE",
    "OPENS",
    "OUT_BIT",
    "OVERWRITES",
    "READ_BITS",
    "RESERVED",
    "WGRAD_BIT",
]

#: No slot: the pool had none free, or the cell holds no live tape.
NO_SLOT: Final = -1
#: No stage: no refresh waits for its first forward.
NO_STAGE: Final = -1
#: An epoch mark that no epoch equals: never happened, or stale.
NEVER: Final = -1

#: Consumer bits of a tape's mask: who still has to visit the slot before it is free.
DGRAD_BIT: Final = 1
WGRAD_BIT: Final = 2
OUT_BIT: Final = 4  # a reader of the forward's output: a send, or the next local stage
GRAD_BIT: Final = 8  # a reader of the input gradient
#: Mask of a slot that a key has claimed before its forward ran; no consumer may visit it.
RESERVED: Final = 16

#: Transfer bits: what a message is bringing into a slot, beside ``OUT_BIT`` and ``GRAD_BIT`` for
#: what a reader is reading out of it.
IN_BIT: Final = 1  # a receive of the forward's input
BACK_BIT: Final = 2  # a receive of the output's gradient
READ_BITS: Final = 12  # every read: ``OUT_BIT`` and ``GRAD_BIT``

#: How a dW writes its stage's own buffer and the buffer shared with another stage. Where
#: a stage shares none the two are one, and it can only add to it or overwrite it.
ADDS: Final = 0  # to both
OVERWRITES: Final = 1  # both
JOINS: Final = 2  # overwrites its own, adds to the shared one
OPENS: Final = 3  # adds to its own, overwrites the shared one
