"""
The artefacts of the proofs: the history beside the memory, and the lemmas that make it inductive.

The promises are the specification's (``qeffect.spec.promises``). What is here serves their proof:
ghost columns and how each accepted transition moves them (``history``), and what else every
transition keeps, of the memory alone (``memory_lemmas``) and of the history beside it (``tapes``,
``scaling``, ``gradients``, ``device``, ``converse``). ``INVARIANTS`` and ``HISTORY`` are promises
and lemmas together, which is what an induction is about; ``ORIGIN`` is what it starts from.
"""

from __future__ import annotations

from typing import Final

from qeffect.spec.predicates import Register
from qeffect.spec.promises import MEMORY, WORLD

from . import converse, device, gradients, memory_lemmas, scaling, tapes
from .origin import ORIGIN

__all__ = ["HISTORY", "INVARIANTS", "LEMMAS", "ORIGIN"]

#: Proved: what every transition keeps of the memory.
INVARIANTS: Final = Register(MEMORY, memory_lemmas.MEMORY)
#: Proved: what every transition keeps of the memory and the history together.
HISTORY: Final = Register(
    WORLD,
    tapes.HISTORY,
    scaling.HISTORY,
    gradients.HISTORY,
    device.HISTORY,
    converse.HISTORY,
)
#: Of those, what nobody is promised.
LEMMAS: Final = Register(
    memory_lemmas.MEMORY,
    tapes.HISTORY,
    scaling.HISTORY,
    gradients.HISTORY,
    device.HISTORY,
    converse.HISTORY,
)
