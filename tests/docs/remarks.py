"""
Caveats on checked-in reports.

A caveat belongs to the report of one commit. If the report is made again at another commit, it has
no caveat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["CUT", "FORMED_AGAIN", "IN_SHORT", "REMARKS", "bound", "in_short", "remark"]

FORMED_AGAIN = (
    "The bounds were later computed again from the report's own times, to include a refresh "
    "(quantization of weights) before each stage's first F. These bounds are too low, because "
    "they give every dW the time of its stage's first dW. The first dW only writes its "
    "gradient; each later dW adds to the gradient and takes longer."
)
PROFILED = (
    "Only the first side was timed before its process first used the profiler. After its first "
    "use, the profiler slows each later launch on the host, for native, replays and one launch. "
    "The profiler slows native most. Without the profiler, *native / this* would therefore be "
    "at most the ratio shown (≤)."
)
FP32 = (
    "Nothing was profiled. Native's step times differ between rounds by more than the "
    "tolerance. Bits are not compared, because native accumulates in bf16."
)
CUT = {
    ("tables_four.json", "df5819e4b527"): (
        "Two of the starts ended at a time limit. The second start over two ranks lacks the "
        "measurement with 32 microbatches. The start over four ranks lacks three measurements "
        "of layers alone: one launch under 1f1b, and replays and one launch under izb. The "
        "figures of layers alone over two ranks come from the first start. Two other GPUs of "
        f"the machine were busy during the starts over two ranks. {PROFILED}"
    ),
    ("scale_hosts.json", "9caffa76c788"): (
        "Four ranks shared two GPUs, two ranks on each GPU. NCCL was configured as if each rank "
        "were on a separate machine, so messages went over sockets; gpu_runtime/README.md shows "
        "how to start such ranks. The times were removed, because they do not show how fast "
        "four GPUs are."
    ),
    ("models_kinds.json", "fb0f23cabae6"): (
        "The run ended at a time limit, so Megatron's rows lack the kinds of kernels and the "
        "idle share. Native's step times differ between rounds by more than the tolerance. The "
        "column *messages* includes waits for messages."
    ),
    ("models_8192.json", "7695c02e45b9"): (
        "The run ended at a time limit while Megatron was profiled, so Megatron's row has no idle "
        "share."
    ),
    ("models_8b_8192_izb.json", "feb7937984fd"): (
        "Only izb was timed, on another day than the other schedules. The run ended with an error "
        "before the second row, and nothing was profiled."
    ),
}
"""Incomplete reports, by file and commit, and what each lacks."""
REMARKS = {
    ("scale_four.json", "34bca0e46a4f"): (
        "The memory figures are too high, because each process still held memory of an earlier "
        "side. "
        f"{FORMED_AGAIN} {PROFILED}"
    ),
    ("peers.json", "4b61ba3ed631"): (
        "The last row of Megatron without graphs is missing, because its processes reached "
        "their time limit. Megatron's modes transformer_engine and local were not run, and "
        "nothing was profiled."
    ),
    ("models_3b.json", "6c8fd02c65c6"): (
        "Nothing was profiled. Native's step times differ between rounds by more than the "
        "tolerance."
    ),
    ("models_8b.json", "f51db27973e0"): "Nothing was profiled.",
    ("models_izb.json", "feb7937984fd"): (
        "Only izb was timed, on another day than the other schedules. Nothing was profiled."
    ),
    ("models_8b_kinds.json", "19be4c0204aa"): (
        "Only the side *one launch* under zbv was run. The column *messages* includes waits for "
        "messages."
    ),
    ("peers_4096.json", "0ffef18a5552"): (
        "Of Megatron's modes only full_iteration was run, and nothing was profiled."
    ),
    ("models_3b_8192.json", "9cf88d2ac1cf"): "Nothing was profiled.",
    ("models_8b_8192.json", "9cf88d2ac1cf"): "Nothing was profiled.",
    ("models_replicas.json", "fb0f23cabae6"): (
        "The last row has two replicas on two GPUs, which reduce their gradients within the "
        "launch. Nothing was profiled. Native's step times differ between rounds by more than "
        "the tolerance."
    ),
    ("models_fp32.json", "fb0f23cabae6"): FP32,
    ("models_one_gpu_fp32.json", "e081436d5fe1"): FP32,
    **CUT,
}
IN_SHORT = {
    "scale_four.json": "caveats",
}
"""Short forms of the caveats for the README, by file."""


def remark(name: str, report: Mapping[str, Any]) -> str:
    """Return the caveat on a report, after a space; an empty text without a caveat."""
    found = REMARKS.get((name, report["environment"]["commit"][:12]))
    return "" if found is None else f" {found}"


def bound(name: str, report: Mapping[str, Any]) -> str:
    """Return the sign (≤) for a ratio to native if the report was timed after profiling."""
    return "≤ " if PROFILED in remark(name, report) else ""


def in_short(name: str, report: Mapping[str, Any]) -> str:
    """Return the caveat's short form in parentheses, after a space; empty without a caveat."""
    return f" ({IN_SHORT[name]})" if remark(name, report) and name in IN_SHORT else ""
