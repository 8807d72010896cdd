"""
The columns of the step tables (ways to run a step): what each column runs, and which columns may be
compared.

A column runs in its own process, because Transformer Engine keeps its numerical state per process.
The library's update of that state visits every registered module, so two columns in one process
would add to each other's times, and might change each other's state.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

from qeffect.report import UnusableError

from .cells import BenchCell
from .side import Column

Family = Literal["native", "te_graphs", "whole_step", "ours_eager", "ours_captured"]
SumRule = Literal["grad", "main_grad"]


@attrs.frozen
class Settings:
    """
    Settings of all columns of a report.

    Args:
        rounds: Number of timed rounds per column (a way to run a step).
        steps: Steps per round, between two synchronizations.
        warm_steps: Untimed steps before the timed steps of each round.
        profile_steps: Number of steps under the profiler, after all rounds; 0 for no profile.
        growth_steps: Number of steps after which memory must not have grown; 0 for no check.
        history: Number of entries of each amax history. 1024 is the library's own default.
        device: "cuda" or "cpu".
    """

    rounds: int = 5
    steps: int = 20
    warm_steps: int = 3
    profile_steps: int = 3
    growth_steps: int = 200
    history: int = 1024
    device: str = "cuda"


@attrs.frozen
class ColumnSpec:
    """
    A column (a way to run a step) by name, in a form that can be sent to the process that runs it.

    Args:
        name: Name of the column in reports.
        title: Name of the column in tables.
        family: Kind of the column, such as this runtime or the library's own graphs.
        rule: How matrix gradients are summed over microbatches. Columns with the same rule do the
            same arithmetic, so they are compared with the same shortest kernel time (floor).
        factory: `module:function`, called with the cell, the settings and the options.
        options: Further arguments of the factory.
    """

    name: str
    title: str
    family: Family
    rule: SumRule
    factory: str
    options: Mapping[str, Any] = attrs.field(factory=dict)

    def make(self, cell: BenchCell, settings: Settings) -> Column:
        """Import the column's factory and call the factory."""
        module, _, function = self.factory.partition(":")
        made: Column = getattr(importlib.import_module(module), function)(
            cell, settings, **self.options
        )
        return made


_SIDES = "qeffect.gpu_runtime.lab.sides."


def _ours(name: str, title: str, destination: str, rule: SumRule, **options: object) -> ColumnSpec:
    given = {"destination": destination, "provisioning": "live", **options}
    return ColumnSpec(name, title, "ours_captured", rule, _SIDES + "ours:captured_column", given)


def _native(title: str, *, fused: bool) -> ColumnSpec:
    rule: SumRule = "main_grad" if fused else "grad"
    factory = _SIDES + "library:native_column"
    return ColumnSpec(f"native_{rule}", title, "native", rule, factory, {"fused": fused})


def _graphed(name: str, title: str, chunking: str, **options: object) -> ColumnSpec:
    given = {"chunking": chunking, "fused": False, **options}
    rule: SumRule = "main_grad" if given["fused"] else "grad"
    factory = _SIDES + "library:graphed_column"
    return ColumnSpec(f"te_graphs_{name}", f"TE graphs, {title}", "te_graphs", rule, factory, given)


def _whole(rule: SumRule) -> ColumnSpec:
    title = f"one graph of the native step, {'.grad' if rule == 'grad' else rule}"
    factory = _SIDES + "library:whole_step_column"
    return ColumnSpec(
        f"whole_{rule}", title, "whole_step", rule, factory, {"fused": rule == "main_grad"}
    )


SPECS: tuple[ColumnSpec, ...] = (
    _native("native, .grad", fused=False),
    _native("native, fused main_grad", fused=True),
    _graphed("chunks", "a chunk each, table order", "chunks"),
    _graphed(
        "chunks_plain", "a chunk each, microbatch by microbatch", "chunks", by_microbatch=True
    ),
    _graphed("layers", "a layer each, one chunk", "layers"),
    _graphed("model", "both layers in one", "model"),
    _graphed("model_main_grad", "both layers in one, main_grad", "model", fused=True),
    _whole("grad"),
    _whole("main_grad"),
    ColumnSpec(
        "ours_eager",
        "ours, eager, accumulate",
        "ours_eager",
        "main_grad",
        _SIDES + "ours:eager_column",
        {"destination": "accumulate"},
    ),
    _ours("ours_copied", "ours, captured, copied", "copied", "grad"),
    _ours("ours_per_microbatch", "ours, captured, per microbatch", "per_microbatch", "grad"),
    _ours("ours_accumulate", "ours, captured, accumulate", "accumulate", "main_grad"),
    _ours(
        "ours_two_streams",
        "ours, captured, accumulate, called from a stream of the caller's own",
        "accumulate",
        "main_grad",
        two_streams=True,
    ),
)
"""Columns of the step table."""

UNGUARDED = _ours(
    "ours_unguarded",
    "ours, captured, accumulate, guards off",
    "accumulate",
    "main_grad",
    guards=False,
)
"""The accumulating captured step without guards; it exists only in this benchmark."""

COUNTED = _ours(
    "ours_device_counts",
    "ours, captured, accumulate, counted by the device",
    "accumulate",
    "main_grad",
    counts="commit",
)
"""
The accumulating captured step with counters in device memory, which the host compares at the
commit.
"""

LATE = _ours(
    "ours_late_counts",
    "ours, captured, accumulate, counted and compared by the device",
    "accumulate",
    "main_grad",
    counts="next step",
)
"""
The accumulating captured step with counters in device memory, which the device compares before the
update.
"""

SWEEP_SPECS: tuple[ColumnSpec, ...] = (
    _ours("live", "live slots, accumulate", "accumulate", "main_grad"),
    attrs.evolve(
        _ours(
            "per_microbatch", "a slot and a destination each microbatch", "per_microbatch", "grad"
        ),
        options={"destination": "per_microbatch", "provisioning": "static"},
    ),
)
"""
Columns of the microbatch sweep: slots for live microbatches only (this project), and a slot for
each microbatch (the paper).
"""


REFERENCE_SPECS: tuple[ColumnSpec, ...] = (
    ColumnSpec(
        "native_grad",
        "native reference, .grad",
        "native",
        "grad",
        _SIDES + "reference:native_column",
    ),
    *(
        attrs.evolve(spec, title=spec.title.replace("captured", "eager"))
        for spec in (*SPECS, UNGUARDED, COUNTED, LATE)
        if spec.family.startswith("ours")
    ),
)
"""Columns on a CPU: the reference backend, native and guarded, both eager."""


def specs_named(names: Iterable[str], among: Iterable[ColumnSpec]) -> list[ColumnSpec]:
    """
    The columns (ways to run a step) whose names, or the beginnings of whose names, are given.

    Raises:
        UnusableError: A name matches no column.
    """
    known = list(among)
    found: dict[str, ColumnSpec] = {}
    for name in names:
        exact = [spec for spec in known if spec.name == name]
        matching = exact or [spec for spec in known if spec.name.startswith(name)]
        if not matching:
            raise UnusableError(
                f"unknown column {name!r}; choose from {', '.join(spec.name for spec in known)}"
            )
        found.update((spec.name, spec) for spec in matching)
    return list(found.values())
