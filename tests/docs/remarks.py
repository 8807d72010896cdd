"""
Caveats on checked-in reports.

A caveat belongs to a report of one commit: a new run of the report has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["CUT", "FORMED_AGAIN", "IN_SHORT", "REMARKS", "bound", "in_short", "remark"]

FORMED_AGAIN = (
    "The bounds were computed again later, from the report's own times, with a refresh before each "
    "stage's first F. These bounds are too low: they give every dW the time of its stage's first "
    "dW, which only writes its gradient; each later dW adds to the gradient and takes longer."
)
PROFILED = (
    "The first side was timed before the profiler was used in its process; every other side was "
    "timed after that. Once used, the profiler slows each launch on the host, for native, replays "
    "and one launch. The profiler slows native most, so *native / this* without the profiler is at "
    "most the ratio shown (≤)."
)
CUT = {
    ("tables_four.json", "df5819e4b527"): (
        "Two starts ended at a time limit: the second start over two ranks lacks 32 microbatches; "
        "the start over four ranks lacks, for layers alone, one launch under 1f1b and all of izb. "
        "The figures of layers alone over two ranks come from the first start. Two other GPUs of "
        f"the machine were busy during the starts over two ranks. {PROFILED}"
    ),
    ("scale_hosts.json", "9caffa76c788"): (
        "Four ranks shared two GPUs, two ranks on each GPU. NCCL was told that each rank is on "
        "a machine of its own, so messages went over sockets; gpu_runtime/README.md shows how to "
        "start such ranks. The times were taken out, because they say nothing about four GPUs."
    ),
    ("models_large.json", "3381b753b673"): (
        "The run ended at a time limit, so 8b has only native's row. Nothing was profiled. The "
        "command of that commit did not yet repeat native's rounds until three agree, and the "
        "rounds of 3b do not agree. Native's peak may include memory that was used to measure the "
        "model's parts."
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
        "Megatron without graphs lacks its last row, because its processes reached their time "
        "limit. Megatron's modes transformer_engine and local were not run, and nothing was "
        "profiled."
    ),
    ("models_one_gpu_torch_loss.json", "e550a7144739"): (
        "At that commit the loss was PyTorch's cross entropy. This run followed the run of "
        "models_one_gpu.json on the same GPU. Nothing was profiled."
    ),
    ("models_megatron.json", "e550a7144739"): (
        "At that commit we used PyTorch's cross entropy, and Megatron used Transformer Engine's. "
        "Since then we use Transformer Engine's too (models_loss.json). The cut was measured with "
        "our loss. "
        "Nothing was profiled, and the rounds of native do not agree."
    ),
    ("models_loss.json", "c80b86f8a843"): (
        "The same as models_megatron.json, but with Transformer Engine's loss on both sides. "
        "Nothing was profiled, and the rounds of native do not agree."
    ),
    ("models_3b.json", "6c8fd02c65c6"): (
        "Nothing was profiled, and the rounds of native do not agree."
    ),
    ("models_one_gpu_fp32.json", "e081436d5fe1"): (
        "Nothing was profiled. The rounds of native do not agree. Bits are not compared, because "
        "native accumulates in bf16."
    ),
    ("models.json", "3381b753b673"): (
        "The command of that commit did not yet repeat native's rounds until three agree, and the "
        "rounds of native do not agree. Native's peak may include memory that was used to measure "
        "the model's parts."
    ),
    **CUT,
}
IN_SHORT = {
    "scale_four.json": "caveats",
}
"""Short forms of the caveats for the README, by file."""


def remark(name: str, report: Mapping[str, Any]) -> str:
    """The caveat on a report after a space; empty without a caveat."""
    found = REMARKS.get((name, report["environment"]["commit"][:12]))
    return "" if found is None else f" {found}"


def bound(name: str, report: Mapping[str, Any]) -> str:
    """The sign before a ratio over native in a report that was timed behind the profiler."""
    return "≤ " if PROFILED in remark(name, report) else ""


def in_short(name: str, report: Mapping[str, Any]) -> str:
    """The short form of the caveat, in parentheses after a space; empty without a caveat."""
    return f" ({IN_SHORT[name]})" if remark(name, report) and name in IN_SHORT else ""
