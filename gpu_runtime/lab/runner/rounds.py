"""
All columns of a cell in turn, round by round, each in its own process.

Columns are set up one after another, so that set-up times and memory belong to one column; only
libraries, whose loading counts for no column, are loaded in all processes at once. Each round
starts with another column, so that no column always follows the pause in which clocks are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from ..sides.cells import BenchCell
from ..sides.columns import ColumnSpec, Settings
from . import device
from .column_process import ColumnHandle, ColumnProcess
from .processes import ChildError

TIMEOUT_S = 180.0
ACTION_STEPS = 20
"""Steps whose actions the host times one by one, and as many of bare replays."""

MakeColumn = Callable[[ColumnSpec, BenchCell, Settings], ColumnHandle]
Progress = Callable[[str], None]


@attrs.define(eq=False)
class CellRun:
    """
    One cell's measurement.

    Args:
        cell: The workload.
        specs: The columns.
        settings: Rounds and steps.
        save: Called whenever `record` has grown, so that a killed run leaves its results.
        progress: Shows a line.
        make_column: Starts a column, in a process unless a test says otherwise.
        record: What was measured, as plain data.
    """

    cell: BenchCell
    specs: Sequence[ColumnSpec]
    settings: Settings
    save: Callable[[], None] = lambda: None
    progress: Progress = lambda text: None
    make_column: MakeColumn = ColumnProcess
    record: dict[str, Any] = attrs.field(factory=dict, init=False)
    _running: dict[str, ColumnHandle] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        order = self.cell.order()
        self.record.update(
            cell=self.cell.to_json(),
            order=" ".join(map(str, order.steps)),
            order_source=order.source,
            peak_live_tapes={str(stage): peak for stage, peak in order.peaks.items()},
            libraries_bytes=None,
            columns={spec.name: _blank(spec) for spec in self.specs},
            clocks=[],
        )

    def run(self) -> dict[str, Any]:
        """Measure everything; columns that fail are recorded as failed and left out."""
        try:
            self._start()
            self._build()
            for number in range(self.settings.rounds):
                self._round(number)
            self._finish()
        finally:
            for running in self._running.values():
                running.end()
            self._running.clear()
        self.save()
        return self.record

    def _column(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.record["columns"][name]
        return found

    def _fail(self, name: str, error: ChildError) -> None:
        self._column(name)["error"] = str(error)
        self.progress(f"{self.cell.name} {name}: failed, {error}")
        handle = self._running.pop(name, None)
        if handle is not None:
            handle.end()
        self.save()

    def _ask(self, name: str, method: str, **arguments: Any) -> dict[str, Any] | None:
        """Call one method of one column; None when it failed, which ends the column."""
        try:
            handle = self._running[name]
            handle.post(method, **arguments)
            return handle.collect(TIMEOUT_S)
        except ChildError as error:
            self._fail(name, error)
            return None

    def _start(self) -> None:
        self.progress(f"{self.cell.name}: loading libraries in {len(self.specs)} processes")
        before = self._device_used()
        for spec in self.specs:
            self._running[spec.name] = self.make_column(spec, self.cell, self.settings)
        for name in list(self._running):
            try:
                self._running[name].post("prepare")
            except ChildError as error:
                self._fail(name, error)
        for name in list(self._running):
            try:
                self._column(name).update(self._running[name].collect(TIMEOUT_S))
            except ChildError as error:
                self._fail(name, error)
        after = self._device_used()
        if before is not None and after is not None and self._running:
            self.record["libraries_bytes"] = (after - before) // len(self._running)

    def _device_used(self) -> int | None:
        found = None if self.settings.device == "cpu" else device.query(("memory.used",))
        return None if found is None else int(found["memory.used"]) * 1024 * 1024

    def _build(self) -> None:
        if self.settings.device == "cpu":
            self._build_each(None)
            return
        # Polling ends before the rounds: it takes the driver's locks.
        with device.MemoryPoll() as poll:
            self._build_each(poll)

    def _build_each(self, poll: device.MemoryPoll | None) -> None:
        for spec in self.specs:
            if spec.name not in self._running:
                continue
            self.progress(f"{self.cell.name} {spec.name}: set-up and first steps")
            if poll is not None:
                poll.mark()
            built = self._ask(spec.name, "build")
            if built is not None:
                built["memory"]["device_polled_rise"] = None if poll is None else poll.rise()
                self._column(spec.name).update(built)
                self.save()

    def _round(self, number: int) -> None:
        names = [spec.name for spec in self.specs if spec.name in self._running]
        shift = number % max(len(names), 1)
        self.progress(f"{self.cell.name}: round {number + 1} of {self.settings.rounds}")
        for name in names[shift:] + names[:shift]:
            turn = self._ask(
                name, "turn", steps=self.settings.steps, warm_steps=self.settings.warm_steps
            )
            if turn is not None:
                self._column(name)["rounds"].append(turn)
        if self.settings.device != "cpu":
            self.record["clocks"].append({"round": number, **(device.query(device.STATE) or {})})
        self.save()

    def _finish(self) -> None:
        """Measure growth, then profile (its buffers would count as growth), then time calls."""
        for spec in self.specs:
            if spec.name in self._running:
                self.progress(f"{self.cell.name} {spec.name}: growth and kernels")
                self._growth(spec)
            if spec.name in self._running and self.settings.profile_steps:
                trace = self._ask(spec.name, "trace", steps=self.settings.profile_steps)
                if trace is not None:
                    self._column(spec.name)["trace"] = trace
                self.save()
            # Last, because it replays graphs in an order that no contract allows.
            if spec.name in self._running and spec.family == "ours_captured":
                timed = self._ask(spec.name, "host_actions", steps=ACTION_STEPS)
                if timed:
                    self._column(spec.name)["host_actions"] = timed
                self.save()

    def _growth(self, spec: ColumnSpec) -> None:
        column = self._column(spec.name)
        done = sum(
            turn["steps"] + turn["warm_steps"] + len(turn["host_s"]) for turn in column["rounds"]
        )
        wanted = self.settings.growth_steps if spec.family.startswith("ours") else 0
        if wanted > done:
            if self._ask(spec.name, "turn", steps=wanted - done, warm_steps=0) is None:
                return
            done = wanted
        now = self._ask(spec.name, "memory")
        if now is not None:
            before = column["memory"]
            column["growth"] = {
                "steps": done,
                "allocated_before": before["allocated"],
                "allocated_after": now["allocated"],
                "reserved_before": before["reserved"],
                "reserved_after": now["reserved"],
            }


def _blank(spec: ColumnSpec) -> dict[str, Any]:
    return {
        "title": spec.title,
        "family": spec.family,
        "rule": spec.rule,
        "options": dict(spec.options),
        "error": None,
        "prepare_s": None,
        "build_s": None,
        "warm_s": None,
        "first_step_s": None,
        "memory": None,
        "facts": {},
        "rounds": [],
        "growth": None,
        "trace": None,
    }
