"""
Limits on a log's header, so that a replayer builds the contract within seconds, even from a
malicious header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["CELLS", "DECLARED", "PLACED", "STAGES", "require_affordable"]

#: Maximum number of slots, of cells and of links that a header may configure.
CELLS: Final = 1 << 18
#: Maximum sum over all stages of the number of cells times the number of destinations (or of
#: matrices, if a stage has more matrices): the destinations are searched for each cell.
PLACED: Final = 1 << 20
#: Maximum number of stages; and maximum number of cells times declared orders, since all cells are
#: searched for each declared order.
STAGES: Final = 1 << 10
DECLARED: Final = 1 << 24


def require_affordable(header: Mapping[str, Any]) -> None:
    """
    Refuse a header whose contract would cost too much time or memory.

    A few bytes can configure many slots (sets of buffers), and a stage's number of executions is
    the product of three numbers (microbatches, blocks, invocations). So neither the header's length
    nor any single number limits the size of the contract.

    Args:
        header: The parsed header; its fields already have the right types.

    Raises:
        ValueError: The header exceeds a limit; the message names the number and the limit.
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
