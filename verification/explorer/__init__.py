"""
The explorer: it visits every reachable state of small contracts.

``run(scope)`` visits the states of a scope (a small contract) breadth first, with or without
symmetry reduction. It reports exact counts, the first violation with its schedule, and a witness (a
shortest schedule) for every transition and refusal that occurred. It runs every move on many states
at a time, in NumPy, from the paths of the composed functions. ``plain`` checks these results on
small scopes: it runs the functions themselves, one state at a time.
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
