"""
The proof by induction: a history of the physical effects of actions, and the lemmas that make the
promises inductive (no transition breaks them all together).

The specification has the promises (``qeffect.spec.promises``). This package has what their proof
needs. The columns (arrays) of the history, called ghosts, are in ``ghosts``; ``history`` and
``effects`` change them at each accepted transition. Lemmas about the contract's memory alone are in
``memory_lemmas``. Lemmas about memory and history are in ``tapes``, ``scaling``, ``gradients``,
``device`` and ``converse``. ``INVARIANTS`` and ``HISTORY`` join promises and lemmas; the induction
proves all of them. ``ORIGIN`` has the assumptions about the initial state.

In the lemmas, a *cell* is a stage and a microbatch, a *domain* is a set of stages whose FP8 scales
are updated together, and a *link* is a pair of a caller's stream and a graph stream. A *tape* is
what one F leaves for its dI and dW. A *ticket* is the number of an action from its check to its
commit or abort. An *epoch* is one optimizer step, and a *walk* is one pass over its microbatches. A
*bucket* is a set of gradients that are reduced together.
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
