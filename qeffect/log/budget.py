"""
What a header may ask for: a contract whose memory is made in seconds, whoever wrote the header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["CELLS", "DECLARED", "PLACED", "STAGES", "require_affordable"]

#: Most slots, most cells and most links that a header may configure.
CELLS: Final = 1 << 18
#: Most destinations that it may have looked through, over all cells: each is compared with each of
#: its stage's cells, microbatches and matrices.
PLACED: Final = 1 << 20
#: Most stages; and most cells that it may have looked through, over all domains that declare an
#: order.
STAGES: Final = 1 << 10
DECLARED: Final = 1 << 24


def require_affordable(header: Mapping[str, Any]) -> None:
    """
    Refuse a header whose contract would cost more time or memory than replaying it is worth.

    A few bytes configure a number of slots, and three numbers are multiplied into one of cells; so
    neither the header's length nor any single number of it bounds what it asks for.

    Args:
        header: A header of the right shape.

    Raises:
        ValueError: It asks for too much; the message says what, how much, and the most.
    """
    stages = header["stages"]
    domains = len(dict.fromkeys(stage["domain"] for stage in stages))
    cells = [s["microbatches"] * s["blocks"] * s["invocations"] for s in stages]
    placed = sum(
        own * max(len(stage["destinations"]), len(stage["matrices"]))
        for own, stage in zip(cells, stages, strict=True)
    )
    for asked, what, most in (
        (len(stages), "stages", STAGES),
        (sum(stage["slots"] for stage in stages), "slots", CELLS),
        (sum(cells), "cells", CELLS),
        (len(header["callers"]) * domains, "links", CELLS),
        (placed, "destinations of cells", PLACED),
        (sum(cells) * len(header["declared"]), "cells of declared orders", DECLARED),
    ):
        if asked > most:
            raise ValueError(f"{asked} {what}; a log may have at most {most}")
