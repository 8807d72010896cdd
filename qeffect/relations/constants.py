"""
The specification's sentinels and consumer bits, as the transition functions name them.
"""

from __future__ import annotations

from typing import Any, Final

from qeffect.spec.constants import (
    ADDS,
    BACK_BIT,
    DGRAD_BIT,
    GRAD_BIT,
    IN_BIT,
    JOINS,
    NEVER,
    NO_SLOT,
    NO_STAGE,
    OPENS,
    OUT_BIT,
    OVERWRITES,
    READ_BITS,
    RESERVED,
    WGRAD_BIT,
)

__all__ = [
    "ADDS",
    "BACK_BIT",
    "DGRAD_BIT",
    "GENERATION_MAX",
    "GRAD_BIT",
    "IN_BIT",
    "JOINS",
    "NEVER",
    "NO_SLOT",
    "NO_STAGE",
    "OPENS",
    "OUT_BIT",
    "OVERWRITES",
    "READ_BITS",
    "RESERVED",
    "WGRAD_BIT",
    "State",
]

#: What a transition function is handed: any object whose attributes are indexable columns.
#: Lists and dicts when running for real, Z3 arrays when proving, NumPy batches when exploring.
State = Any

#: The last generation a slot reaches with the default 64-bit counter.
GENERATION_MAX: Final = (1 << 64) - 1
