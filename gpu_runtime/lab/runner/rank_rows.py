"""
Run the rows of a report over ranks: build, warm up and time every row in the same way.

A report's command chooses the rows, and what each row reports besides its times. Every rank runs
the same rows in the same order. `rounds.py` runs columns instead, each in its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import attrs

from ...ranks.membership import Member
from ..sides.pipelines import build_side, isolation
from .rank_process import Findings
from .timing import RoundPlan, time_side

__all__ = ["RankRun", "TimedRow", "measure_rows"]


class TimedSide(Protocol):
    """A side (a way to run a step) that can be timed."""

    def step(self) -> object:
        """Enqueue one optimizer step."""


class TimedRow(Protocol):
    """A row of a report over ranks: one cell (workload) under one schedule, run by one side."""

    @property
    def label(self) -> str:
        """The row's name in progress lines."""


S = TypeVar("S", bound=TimedSide)
R = TypeVar("R", bound=TimedRow)


def measure_rows(
    member: Member, rows: Sequence[R], findings: Findings, measure: Callable[[R], Any]
) -> None:
    """
    Measure one row of the report after another; the memory of a row is freed before the next row is
    built.

    Args:
        member: This rank.
        rows: The rows, the same on every rank. A row is one cell (workload) under one schedule, run
            by one side (a way to run a step).
        findings: Receives each row's results.
        measure: Function that measures a row and returns its results.
    """
    for row in rows:
        findings.note(f"Timing: {row.label}")
        with isolation(member):
            found = measure(row)
        findings.add(found)


@attrs.define(eq=False)
class RankRun(Generic[S]):
    """
    One row of the report (a cell under one schedule, run by one side) on one rank.

    Args:
        member: This rank.
        side: The side (a way to run a step) that the row names; the side has run `steps` steps.
        construction_s: Seconds that building the side took on this rank.
        steps: Number of steps that the side has run before its timed rounds.
    """

    member: Member
    side: S
    construction_s: float
    steps: int = 0

    @classmethod
    def of(cls, member: Member, make: Callable[[Member], S]) -> RankRun[S]:
        """Build the row's side; every rank calls this method."""
        side, construction_s = build_side(member, lambda: make(member))
        return cls(member, side, construction_s)

    def settle(self, steps: int) -> None:
        """Run the side until it has run `steps` steps in total."""
        while self.steps < steps:
            self.side.step()
            self.steps += 1

    def time(self, plan: RoundPlan, facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """
        Time the side round by round (`time_side`).

        Args:
            plan: How many rounds are timed, and of how many steps each.
            facts: Further results of this rank.
        """
        return time_side(
            self.member,
            self.side.step,
            plan,
            construction_s=self.construction_s,
            facts=facts or {},
        )
