"""
What is always true of the physical history, and what must be true when an action is accepted.

``HISTORY`` relates the world that ``qeffect.spec.history`` tells of to the contract's memory; it
holds in every reachable state. ``STEPS`` are the promises to the caller: when a transition is
accepted, the world is in order for it. ``ASSUMED`` is what the caller is trusted with, and
``ORIGIN`` what is taken for granted of the beginning.

The history is divided by what it is of: ``tapes``, ``scaling``, ``gradients`` and ``device``. The
promises are in ``steps``, and all that is assumed is in ``assumed``.
"""

from __future__ import annotations

from typing import Final

from ..predicates import Register
from . import device, gradients, scaling, tapes
from .assumed import ASSUMED, ORIGIN
from .steps import STEPS

__all__ = ["ASSUMED", "HISTORY", "ORIGIN", "STEPS"]

#: Proved: what every transition keeps, of the memory and the history together.
HISTORY: Final = Register(tapes.HISTORY, scaling.HISTORY, gradients.HISTORY, device.HISTORY)
