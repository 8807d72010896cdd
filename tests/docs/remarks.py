"""
What has to be known of a checked-in report beside its numbers.

A remark is of a report of one commit: one that is made again has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["CUT", "FORMED_AGAIN", "REMARKS", "remark"]

FORMED_AGAIN = (
    "Its bounds were formed again from its own times, with a refresh before each stage's first F. "
    "Every dW counts in them as the first of its stage, which only writes and takes less than one "
    "that adds: they are too low."
)
CUT = {
    ("tables.json", "df5819e4b527"): (
        "Its second start over two ranks and the one over four ended at a time limit: they lack 32 "
        "microbatches, and of the layers alone over four ranks one launch under 1f1b and all of "
        "izb. Layers alone over two ranks are of the first start. The starts over two ranks ran "
        "while two other GPUs of the host were busy."
    ),
    ("scale_in_order.json", "df5819e4b527"): (
        "It ended at a time limit, after the smaller cell. It ran while two other GPUs of the host "
        f"were busy. {FORMED_AGAIN}"
    ),
}
"""Reports whose run did not reach its end, and what they lack."""
REMARKS = {
    ("scale_four.json", "34bca0e46a4f"): (
        f"Its memory counts a side before that was still held, and is too high. {FORMED_AGAIN}"
    ),
    ("scale.json", "601976b5b2d6"): FORMED_AGAIN,
    ("peers.json", "df5819e4b527"): "It ran while two other GPUs of the host were busy.",
    **CUT,
}


def remark(name: str, report: Mapping[str, Any]) -> str:
    """A sentence about a report, behind a blank, where one has to be said."""
    found = REMARKS.get((name, report["environment"]["commit"][:12]))
    return "" if found is None else f" {found}"
