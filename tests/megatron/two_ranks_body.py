"""A script for `tests.gpu.two_ranks`: ``MODULE OUT --rank WORD``."""

from __future__ import annotations

import os
from typing import Any

from tests.gpu.two_ranks import begin


def measure(word: str) -> dict[str, Any]:
    """What a rank says: its rank and its word."""
    if word == "fail" and os.environ["RANK"] == "1":
        raise ValueError("of rank 1")
    if word == "silent":
        print("nothing to say", flush=True)
        os._exit(5)
    return {"rank": os.environ["RANK"], "word": word}


if __name__ == "__main__":
    begin(__doc__, measure)
