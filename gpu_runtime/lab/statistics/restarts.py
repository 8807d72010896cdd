"""
Derive figures of runs that stopped and resumed: values compared, and bytes of checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["derive_restarts"]


def derive_restarts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rows by kind (each row is one resumed run), totals of compared values, and the bytes of
    each checkpoint, listed once."""
    rows = raw["rows"]
    weighed = {row["saved_under"]: row["bytes"] for row in rows}
    return {
        "resumed": sum(row["how"] == "resumed" for row in rows),
        "remapped": sum(row["how"] == "remapped" for row in rows),
        "compared": sum(row["compared"] for row in rows),
        "differ": sum(row["differ"] for row in rows),
        "bytes": [
            {
                "saved_under": name,
                "numerical": found["numerical"],
                "total": found["total"],
                "share": round(found["numerical"] / found["total"], 8),
            }
            for name, found in weighed.items()
        ],
    }
