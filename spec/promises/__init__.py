"""
What is promised: at every moment, when an action is accepted, and of what it changes.

``MEMORY`` and ``WORLD`` hold in every reachable state. ``STEPS`` are the promises to the caller:
when a transition is accepted, the world is in order for it. ``CHANGES`` say what an accepted
transition does, and what no transition does. ``LEGAL`` says when a check must be accepted.
``PAPER`` names the paper's invariants and the promises that make up each. ``CONFIGURATION`` and
``ASSUMED`` are taken as given.

A promise is written in the columns of ``qeffect.spec.columns`` and in the words of
``qeffect.spec.world``, never in the contract's guards. Each is proved for any number of slots,
microbatches and epochs; what the proofs need besides is not promised and stands with them.
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
