"""
Caveats on checked-in reports.

A caveat belongs to a report of one commit: a new run of the report has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["CUT", "FORMED_AGAIN", "IN_SHORT", "REMARKS", "in_short", "remark"]

FORMED_AGAIN = (
    "Its bounds were recomputed from its own times, with a refresh before each stage's first F. "
    "They count every dW as the first of its stage, which only writes and takes less time than a "
    "dW that adds: the bounds are too low."
)
PROFILED = (
    "Every side but the first was timed in a process that had used the profiler before, which "
    "slows the host of native, of replays and of a launch."
)
CUT = {
    ("tables_four.json", "df5819e4b527"): (
        "Two starts ended at a time limit: the second start over two ranks lacks 32 microbatches; "
        "the start over four ranks lacks, for layers alone, one launch under 1f1b and all of izb. "
        "Layers alone over two ranks come from the first start. Two other GPUs of the host were "
        f"busy during the starts over two ranks. {PROFILED}"
    ),
    ("scale_hosts.json", "9caffa76c788"): (
        "Its four ranks shared two GPUs, two ranks each, and were configured to treat each other "
        "as separate hosts, so that messages went over sockets; gpu_runtime/README.md shows how to "
        "start them. Times of such ranks say nothing about four GPUs and were taken out."
    ),
    ("models_large.json", "3381b753b673"): (
        "The run ended at a time limit: 8b has only native's row. Nothing was profiled. Native was "
        "timed when rounds were not yet repeated until three agree; its rounds of 3b do not agree. "
        "Its peak may include memory that measuring the model's parts used."
    ),
}
"""Incomplete reports, by file and commit, and what each lacks."""
REMARKS = {
    ("scale_four.json", "34bca0e46a4f"): (
        "Its memory figures are too high, because memory of an earlier side was still held. "
        f"{FORMED_AGAIN} {PROFILED}"
    ),
    ("peers.json", "df5819e4b527"): (
        "Two other GPUs of the host were busy during the run. In each process every row but the "
        "first was timed after the profiler had been used, which slows the host: host-bound rows "
        "are therefore pessimistic."
    ),
    ("models.json", "3381b753b673"): (
        "Native was timed when rounds were not yet repeated until three agree; its rounds do not "
        "agree. Its peak may include memory that measuring the model's parts used."
    ),
    **CUT,
}
IN_SHORT = {
    "scale_four.json": "caveats",
    "peers.json": "its head bf16, ours FP8",
}
"""Short forms of the caveats for the README, by file."""


def remark(name: str, report: Mapping[str, Any]) -> str:
    """The caveat on a report after a space; empty without a caveat."""
    found = REMARKS.get((name, report["environment"]["commit"][:12]))
    return "" if found is None else f" {found}"


def in_short(name: str, report: Mapping[str, Any]) -> str:
    """The short form of the caveat, in parentheses after a space; empty without a caveat."""
    return f" ({IN_SHORT[name]})" if remark(name, report) and name in IN_SHORT else ""
