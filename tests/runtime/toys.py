"""
Columns (ways to run a step) and workers that a test scripts, so that the tests check the harness
and not the clock.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from qeffect.gpu_runtime.lab.runner.column_process import ColumnSession
from qeffect.gpu_runtime.lab.runner.processes import ChildError, first_line
from qeffect.gpu_runtime.lab.sides.cells import BenchCell
from qeffect.gpu_runtime.lab.sides.columns import ColumnSpec, Family, Settings, SumRule

SETTINGS = Settings(
    rounds=3, steps=4, warm_steps=1, profile_steps=2, growth_steps=40, history=16, device="cpu"
)


@attrs.define
class Toy:
    """A column (a way to run a step) that counts its steps, and fails or dies where a test
    requests."""

    fail_in: str = ""
    die_in: str = ""
    profile: bool = False
    steps: int = 0

    def _come_to(self, where: str) -> None:
        if self.die_in == where:
            os._exit(7)
        if self.fail_in == where:
            raise ValueError(f"told to fail in {where}\nwith a second line")

    def build(self) -> None:
        self._come_to("build")

    def warm(self) -> None:
        self._come_to("warm")

    def step(self) -> None:
        self._come_to("step")
        if self.profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                pass
        self.steps += 1

    def facts(self) -> Mapping[str, Any]:
        return {"steps": self.steps}

    def close(self) -> None:
        pass


def make(cell: BenchCell, settings: Settings, **options: Any) -> Toy:
    """The factory."""
    return Toy(**options)


def spec(
    name: str, *, family: Family = "native", rule: SumRule = "grad", **options: Any
) -> ColumnSpec:
    """The description of a toy column (a way to run a step), as its process receives it."""
    return ColumnSpec(name, f"toy {name}", family, rule, f"{__name__}:make", options)


@attrs.define
class Scripted:
    """
    A worker that records its requests and answers from a script.

    Args:
        log: List of pairs that all workers share: the column's name and the called method.
        name: The name of the column (the way to run a step) that the worker pretends to run.
        wall_s: Wall time of each round, in seconds.
        fails: The method in which the worker fails, and the number of the call.
    """

    log: list[tuple[str, str]]
    name: str
    wall_s: list[float]
    fails: tuple[str, int] | None = None
    _calls: dict[str, int] = attrs.field(factory=dict)
    _next: tuple[str, dict[str, Any]] = ("", {})

    def post(self, method: str, **arguments: Any) -> None:
        self._next = (method, arguments)

    def collect(self, timeout_s: float) -> dict[str, Any]:
        method, arguments = self._next
        self.log.append((self.name, method))
        call = self._calls[method] = self._calls.get(method, -1) + 1
        if self.fails == (method, call):
            raise ChildError("scripted")
        if method == "turn":
            number = min(call, len(self.wall_s) - 1)
            return {**arguments, "wall_s": self.wall_s[number], "host_s": [0.001]}
        return {
            "prepare": {"prepare_s": 1.0},
            "build": {
                "build_s": 1.0,
                "warm_s": 0.5,
                "first_step_s": 0.1,
                "memory": dict.fromkeys(
                    (
                        "allocated",
                        "reserved",
                        "allocated_peak",
                        "reserved_peak",
                        "device_before",
                        "device_after",
                    ),
                    1000,
                ),
                "facts": {},
            },
            "memory": {"allocated": 1000, "reserved": 1000},
            "host_actions": {},
            "trace": {
                "steps": 2,
                "device_us": 2000.0,
                "device_events": 2,
                "copies": [],
                "copy_kernels": [],
                "top": [],
            },
        }[method]

    def end(self) -> None:
        self.log.append((self.name, "end"))


class InlineColumn:
    """A session in this process, where no library has process-wide state."""

    def __init__(
        self, spec: ColumnSpec, cell: BenchCell, settings: Settings, *, profiles: bool = False
    ) -> None:
        self._session = ColumnSession(spec, cell, settings)
        self._next: tuple[str, dict[str, Any]] | None = None

    def post(self, method: str, **arguments: Any) -> None:
        """Store the method to run."""
        self._next = (method, arguments)

    def collect(self, timeout_s: float) -> dict[str, Any]:
        """Run the stored method."""
        assert self._next is not None
        method, arguments = self._next
        try:
            result: dict[str, Any] = getattr(self._session, method)(**arguments)
        except Exception as error:
            raise ChildError(first_line(error)) from error
        return result

    def end(self) -> None:
        """Close the column."""
        self._session.close()
