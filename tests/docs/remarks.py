"""
What has to be known of a checked-in report beside its numbers.

A remark is of a report of one commit: one that is made again has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["CUT", "REMARKS", "remark"]

CUT = {
    ("tables.json", "df5819e4b527"): (
        "Its second start over two ranks and the one over four ended at a time limit, each one row "
        "before its end: 32 microbatches, and one launch of the layers alone under 1f1b. The "
        "starts over two ranks ran while two other GPUs of the host were busy."
    ),
    ("scale_in_order.json", "df5819e4b527"): (
        "It ended at a time limit, after the smaller cell. It ran while two other GPUs of the host "
        "were busy."
    ),
}
"""Reports whose run did not reach its end, and what they lack."""
REMARKS = {
    ("scale_four.json", "34bca0e46a4f"): (
        "Its memory counts a side before that was still held, and is too high."
    ),
    ("peers.json", "df5819e4b527"): "It ran while two other GPUs of the host were busy.",
    **CUT,
}


def remark(name: str, report: Mapping[str, Any]) -> str:
    """A sentence about a report, behind a blank, where one has to be said."""
    found = REMARKS.get((name, report["environment"]["commit"][:12]))
    return "" if found is None else f" {found}"
