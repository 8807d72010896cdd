"""
The explorer: every reachable state of small contracts, by running the composed functions.

``run(scope)`` walks a scope breadth first, in the plain reading or (``batch=True``) in the batch
reading of ``qeffect.verification.batch``, with or without symmetry reduction, and reports exact
counts, the first violation with its schedule, and a witness for everything that happened.
"""

from .report import ExploreReport
from .runs import run
from .scope_catalogue import large_scopes, pool_scope, standard_scopes
from .scopes import Scope
from .witnesses import unwitnessed

__all__ = [
    "ExploreReport",
    "Scope",
    "large_scopes",
    "pool_scope",
    "run",
    "standard_scopes",
    "unwitnessed",
]
