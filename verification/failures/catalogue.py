"""
The list of all public failures, ordered by the relation of the contract that they break.
"""

from __future__ import annotations

from typing import Final

from . import (
    accumulation,
    arena,
    capture,
    completion,
    epoch,
    order,
    ownership,
    persistence,
    reduction,
    schedule,
    transfers,
    version,
)
from .failure import Failure

__all__ = ["FAILURES"]

FAILURES: Final[tuple[Failure, ...]] = tuple(
    row
    for room in (
        ownership,
        version,
        order,
        completion,
        transfers,
        capture,
        arena,
        accumulation,
        reduction,
        epoch,
        persistence,
        schedule,
    )
    for row in room.ROWS.rows
)
