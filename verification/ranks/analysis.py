"""
The parts of the ranks' analysis that need Z3, for the command.
"""

from __future__ import annotations

from .explore import SCOPES, explore
from .kernel import KERNEL_SCOPES, match
from .mutants import caught, mutants
from .prove import run_proofs

__all__ = ["KERNEL_SCOPES", "SCOPES", "caught", "explore", "match", "mutants", "run_proofs"]
