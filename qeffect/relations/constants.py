"""
The specification's sentinels and masks, for the transition functions.
"""

from __future__ import annotations

from typing import Any, Final

from qeffect.spec.constants import (
    ADDS,
    BACK_BIT,
    BEFORE_DGRAD,
    COPY_BIT,
    DGRAD_BIT,
    GRAD_BIT,
    GROUP_BIT,
    IN_BIT,
    INPUT_BITS,
    JOINS,
    NEVER,
    NO_RANK,
    NO_SLOT,
    NO_STAGE,
    OPENS,
    OUT_BIT,
    OVERWRITES,
    READ_BITS,
    RESERVED,
    SOURCE_BIT,
    TARGET_BIT,
    WGRAD_BIT,
)

__all__ = [
    "ADDS",
    "BACK_BIT",
    "BEFORE_DGRAD",
    "COPY_BIT",
    "DGRAD_BIT",
    "GENERATION_MAX",
    "GRAD_BIT",
    "GROUP_BIT",
    "INPUT_BITS",
    "IN_BIT",
    "JOINS",
    "NEVER",
    "NO_RANK",
    "NO_SLOT",
    "NO_STAGE",
    "OPENS",
    "OUT_BIT",
    "OVERWRITES",
    "READ_BITS",
    "RESERVED",
    "SOURCE_BIT",
    "TARGET_BIT",
    "WGRAD_BIT",
    "State",
]

#: The state of a transition function: any object whose attributes are indexable columns. The kernel
#: passes lists and dicts, the proofs Z3 arrays, the batches NumPy arrays.
State = Any

#: The last generation of a slot with the default 64-bit counter.
GENERATION_MAX: Final = (1 << 64) - 1
