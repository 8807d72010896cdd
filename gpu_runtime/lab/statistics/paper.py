"""
Numbers printed in the paper (Sections IV and V), for tables that show ours beside them.

The paper's numbers were measured on H800 PCIe or RTX 5880 Ada GPUs. This module computes ratios
from the paper's numbers only where the paper prints no ratio. Times are milliseconds of the slowest
rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SMALL, LARGE = "h2048-s256-m4", "h4096-s256-m8"
"""The paper's cells: hidden size, tokens per microbatch, and number of microbatches."""

COMPLETE: Final[Mapping[str, Mapping[str, Mapping[str, float]]]] = {
    SMALL: {
        "initial": {"native": 44.887, "il": 16.184, "zbv": 16.648},
        "replication": {"native": 44.727, "il": 16.391, "zbv": 16.564},
    },
    LARGE: {
        "initial": {"native": 89.469, "il": 47.329, "zbv": 49.025},
        "replication": {"native": 89.138, "il": 47.319, "zbv": 49.002},
    },
}
"""
The table of the complete step on two H800 PCIe: captured schedules that write gradients directly to
their destinations.
"""

SPEEDUP: Final[Mapping[str, Mapping[str, Mapping[str, float]]]] = {
    SMALL: {
        "initial": {"il": 2.792, "zbv": 2.696},
        "replication": {"il": 2.729, "zbv": 2.700},
    },
    LARGE: {
        "initial": {"il": 1.895, "zbv": 1.824},
        "replication": {"il": 1.884, "zbv": 1.819},
    },
}
"""
From the table of the complete step: medians of ratios within a trial. These medians differ from the
ratios of the table's median times.
"""

BREAK_EVEN: Final[Mapping[str, Mapping[str, float]]] = {
    "initial": {"il": 34.55, "zbv": 75.77},
    "replication": {"il": 38.53, "zbv": 91.02},
}
"""Break-even steps, including set-up and first step, at hidden size 4,096."""

ABOVE_NATIVE_GB: Final[Mapping[str, Mapping[str, float]]] = {
    SMALL: {"il": 0.438, "zbv": 0.978},
    LARGE: {"il": 3.357, "zbv": 4.437},
}
"""Peak allocated memory above that of native eager."""

GRAPHS, HANDOFFS = 48, 96
"""Figures of one rank, at hidden size 4,096 with eight microbatches; handoffs are per step."""

ATTRIBUTION: Final[Mapping[str, float]] = {
    "native": 94.582,
    "eager": 122.498,
    "copied": 54.126,
    "direct": 47.833,
    "zbv": 49.492,
}
"""The five configurations on H800 at hidden size 4,096, medians of five fresh processes."""

COPIES: Final[Mapping[str, int]] = {"copied": 96, "direct": 0}
"""Matrix-gradient copies per rank and step, counted by a profiler."""

RESOURCES: Final[Mapping[int, Mapping[str, float]]] = {
    2: {"ms": 35.124, "graphs": 12, "live": 3, "delayed": 2, "capture_ms": 46.23},
    4: {"graphs": 24, "live": 4, "delayed": 5, "capture_ms": 265.21},
    8: {"graphs": 48, "live": 4, "delayed": 9, "capture_ms": 1593.84},
    16: {"ms": 175.589, "graphs": 96, "live": 4, "delayed": 17, "capture_ms": 3778.96},
}
"""
Figures of ZB-V by number of microbatches on two RTX 5880; times for 4 and 8 microbatches appear
only in a diagram.
"""

TOKENS_PER_S: Final[Mapping[int, float]] = {2: 14600, 16: 23300}

MAPPING: Final[Mapping[str, float]] = {
    "pp2_ms": 47.593,
    "pp4_ms": 34.730,
    "speedup": 1.370,
    "efficiency": 0.6849,
}
"""The four-stage model of hidden size 4,096 on two and on four H800 PCIe."""

MEGATRON: Final[Mapping[str, Mapping[str, float]]] = {
    SMALL: {"eager": 107.70, "transformer_engine": 51.05, "speedup": 2.191},
    LARGE: {"eager": 228.45, "transformer_engine": 133.05, "speedup": 1.751},
}
"""Native Megatron at PP=2, VPP=2, eager and with Transformer Engine's graphs."""
