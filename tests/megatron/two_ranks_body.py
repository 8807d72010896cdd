"""A script for `tests.gpu.two_ranks`: ``MODULE OUT --rank WORD``."""

from __future__ import annotations

import os
import sys
from typing import Any

from tests.gpu.two_ranks import report_rank


def measure() -> dict[str, Any]:
    """What a rank says: its rank and its word."""
    if sys.argv[3] == "fail" and os.environ["RANK"] == "1":
        raise ValueError("of rank 1")
    if sys.argv[3] == "silent":
        print("nothing to say", flush=True)
        os._exit(5)
    return {"rank": os.environ["RANK"], "word": sys.argv[3]}


if __name__ == "__main__":
    report_rank(measure, sys.argv[1])
