"""
Measure all columns (ways to run a step) of a cell in turn, round by round, each in its own process.

Columns are set up one after another, so that set-up times and memory belong to one column. Only
libraries are loaded in all processes at once, and no column's time includes this loading. Each
round starts with another column, so that the pause for reading clocks does not always precede the
same column. After all columns have been timed, their processes end, and other processes profile
some steps of each column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs

from ..sides.cells import BenchCell
from ..sides.columns import ColumnSpec, Settings
from . import device
from .column_process import ColumnHandle, ColumnProcess
from .processes import ChildError

TIMEOUT_S = 180.0
ACTION_STEPS = 20
"""
Number of steps whose actions are timed one by one on the host; the same number of steps of bare
replays follows.
"""


class MakeColumn(Protocol):
    """Starts a column; `profiles` tells whether the column may use the profiler."""

    def __call__(
        self, spec: ColumnSpec, cell: BenchCell, settings: Settings, *, profiles: bool = False
    ) -> ColumnHandle: ...


Progress = Callable[[str], None]


@attrs.define(eq=False)
class CellRun:
    """
    The measurement of one cell (a workload: layer dimensions and number of microbatches).

    Args:
        cell: The layer dimensions and the order of actions to run.
        specs: The columns (ways to run a step) to measure.
        settings: The device, and how many rounds and steps are timed.
        save: Called whenever `record` has grown, so that a killed run keeps its results.
        progress: Function that shows a line of progress.
        make_column: Function that starts a column in a new process; tests pass a function that
            starts no process.
        record: The measurements, as plain data.
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
            self._end()
            if self.settings.profile_steps:
                self._profile()
        finally:
            self._end()
        self.save()
        return self.record

    def _end(self) -> None:
        for running in self._running.values():
            running.end()
        self._running.clear()

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
        """Call one method of a column; if it fails, end the column and return None."""
        try:
            handle = self._running[name]
            handle.post(method, **arguments)
            return handle.collect(TIMEOUT_S)
        except ChildError as error:
            self._fail(name, error)
            return None

    def _start(self) -> None:
        before = self._device_used()
        for name, prepared in self._prepare(self.specs, profiles=False).items():
            self._column(name).update(prepared)
        after = self._device_used()
        if before is not None and after is not None and self._running:
            self.record["libraries_bytes"] = (after - before) // len(self._running)

    def _prepare(self, specs: Sequence[ColumnSpec], *, profiles: bool) -> dict[str, dict[str, Any]]:
        """Start the processes of some columns, which all load their libraries at the same time."""
        self.progress(f"{self.cell.name}: loading libraries in {len(specs)} processes")
        for spec in specs:
            self._running[spec.name] = self.make_column(
                spec, self.cell, self.settings, profiles=profiles
            )
        found = {}
        for name in list(self._running):
            try:
                self._running[name].post("prepare")
            except ChildError as error:
                self._fail(name, error)
        for name in list(self._running):
            try:
                found[name] = self._running[name].collect(TIMEOUT_S)
            except ChildError as error:
                self._fail(name, error)
        return found

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
        """Measure the growth of memory, then time single calls."""
        for spec in self.specs:
            if spec.name in self._running:
                self.progress(f"{self.cell.name} {spec.name}: growth and single calls")
                self._growth(spec)
            # Last, because it replays graphs in an order that the contract does not allow.
            if spec.name in self._running and spec.family == "ours_captured":
                timed = self._ask(spec.name, "host_actions", steps=ACTION_STEPS)
                if timed:
                    self._column(spec.name)["host_actions"] = timed
                self.save()

    def _profile(self) -> None:
        """Build the timed columns again in other processes, and profile them one by one."""
        columns = self.record["columns"]
        timed = [spec for spec in self.specs if columns[spec.name]["error"] is None]
        self._prepare(timed, profiles=True)
        for spec in timed:
            if spec.name not in self._running:
                continue
            self.progress(f"{self.cell.name} {spec.name}: kernels")
            if self._ask(spec.name, "build") is not None:
                trace = self._ask(spec.name, "trace", steps=self.settings.profile_steps)
                self._column(spec.name)["trace"] = trace
            if (running := self._running.pop(spec.name, None)) is not None:
                running.end()
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
