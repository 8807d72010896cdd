"""
Symbolic execution of the contract: every path of every composed transition, as Z3 terms.

``path_table`` runs the functions that guard a real run on symbolic memory. It returns the condition
of each path and the state after the path. The proofs ask Z3 about these paths; the explorer
compiles them to NumPy.
"""

from .encoding import ARGUMENTS, Encoding, Memory, flat_arguments
from .paths import Path, PathTable, merge, merged, path_table
from .terms import Array, PathRun, Scalar, Sym, UndecidedError, lift, raw

__all__ = [
    "ARGUMENTS",
    "Array",
    "Encoding",
    "Memory",
    "Path",
    "PathRun",
    "PathTable",
    "Scalar",
    "Sym",
    "UndecidedError",
    "flat_arguments",
    "lift",
    "merge",
    "merged",
    "path_table",
    "raw",
]
