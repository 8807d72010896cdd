"""
The explorer: every reachable state of small contracts.

``run(scope)`` walks a scope breadth first, with or without symmetry reduction, and reports exact
counts, the first violation with its schedule, and a witness, a shortest schedule, for every
transition and refusal that occurred. It runs every move over many states at a time, in NumPy, from
the paths of the composed functions. To check it on small scopes, ``plain`` runs the functions
themselves, one state at a time.
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
