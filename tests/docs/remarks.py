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
PROFILED = (
    "All but its first side were timed in a process in which the profiler had been used: the host "
    "of native, of replays and of a launch is slower there than it is without."
)
CUT = {
    ("tables_four.json", "df5819e4b527"): (
        "Its second start over two ranks and the one over four ended at a time limit: they lack 32 "
        "microbatches, and of the layers alone over four ranks one launch under 1f1b and all of "
        "izb. Layers alone over two ranks are of the first start. The starts over two ranks ran "
        f"while two other GPUs of the host were busy. {PROFILED}"
    ),
    ("scale_hosts.json", "9caffa76c788"): (
        "Its four ranks shared two GPUs, two on each, and took one another for other hosts, so "
        "that messages went over sockets; gpu_runtime/README.md says how they are started. Times "
        "of such ranks say nothing of four GPUs and were taken out."
    ),
}
"""Reports that did not reach their end, or from which something was taken, and what they lack."""
REMARKS = {
    ("scale_four.json", "34bca0e46a4f"): (
        "Its memory counts a side before that was still held, and is too high. "
        f"{FORMED_AGAIN} {PROFILED}"
    ),
    ("peers.json", "df5819e4b527"): (
        "It ran while two other GPUs of the host were busy. In each of its processes all but the "
        "first row was timed after the profiler had been used: what the host bounds is slower "
        "there than it is without."
    ),
    **CUT,
}


def remark(name: str, report: Mapping[str, Any]) -> str:
    """A sentence about a report, behind a blank, where one has to be said."""
    found = REMARKS.get((name, report["environment"]["commit"][:12]))
    return "" if found is None else f" {found}"
