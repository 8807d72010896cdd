"""
The parts of the proofs by induction: the history beside the memory, and the lemmas that make the
promises inductive.

The specification has the promises (``qeffect.spec.promises``). This package has what the proof of
the promises needs: ghost columns (``ghosts``), their changes by each accepted transition
(``history``, ``effects``), and lemmas of the memory alone (``memory_lemmas``) and of memory and
history (``tapes``, ``scaling``, ``gradients``, ``device``, ``converse``). ``INVARIANTS`` and
``HISTORY`` join promises and lemmas: the claims of the induction. ``ORIGIN`` has the assumptions
about the initial state.
"""

from __future__ import annotations

from typing import Final

from qeffect.spec.predicates import Register
from qeffect.spec.promises import MEMORY, WORLD

from . import converse, device, gradients, memory_lemmas, scaling, tapes
from .origin import ORIGIN

__all__ = ["HISTORY", "INVARIANTS", "LEMMAS", "ORIGIN"]

#: Proved: every transition keeps these predicates of the memory.
INVARIANTS: Final = Register(MEMORY, memory_lemmas.MEMORY)
#: Proved: every transition keeps these predicates of memory and history together.
HISTORY: Final = Register(
    WORLD,
    tapes.HISTORY,
    scaling.HISTORY,
    gradients.HISTORY,
    device.HISTORY,
    converse.HISTORY,
)
#: The lemmas among them, which are not promised.
LEMMAS: Final = Register(
    memory_lemmas.MEMORY,
    tapes.HISTORY,
    scaling.HISTORY,
    gradients.HISTORY,
    device.HISTORY,
    converse.HISTORY,
)
