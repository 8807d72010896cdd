"""
The promises: predicates about every state, about each accepted transition and about its changes.

``MEMORY`` and ``WORLD`` hold in every reachable state. ``STEPS`` are the promises to the caller:
they are true of the world when a transition is accepted. ``CHANGES`` state what an accepted
transition changes, and what no transition changes. ``LEGAL`` states when a check must be accepted.
``PAPER`` lists the paper's invariants, each with its promises. ``CONFIGURATION`` and ``ASSUMED``
are assumptions.

A promise uses the columns of ``qeffect.spec.columns`` and the words of ``qeffect.spec.world``,
never the contract's guards. Each promise is proved for any number of slots, microbatches and
epochs. Further lemmas of the proofs are not promised; they are kept with the proofs.
"""

from __future__ import annotations

from .accepted import STEPS
from .always import WORLD
from .assumed import ASSUMED, CONFIGURATION
from .changes import CHANGES
from .legal import LEGAL
from .memory import MEMORY
from .paper import PAPER

__all__ = ["ASSUMED", "CHANGES", "CONFIGURATION", "LEGAL", "MEMORY", "PAPER", "STEPS", "WORLD"]
