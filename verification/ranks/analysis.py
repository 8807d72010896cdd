"""
The proofs, explorations and mutants of the ranks' protocol that need Z3, for ``qeffect ranks``.
"""

from __future__ import annotations

from .explore import SCOPES, explore
from .kernel import KERNEL_SCOPES, match
from .mutants import caught, mutants
from .prove import run_proofs

__all__ = ["KERNEL_SCOPES", "SCOPES", "caught", "explore", "match", "mutants", "run_proofs"]
