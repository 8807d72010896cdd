"""Host time of single actions: what is timed and what is derived, with stand-in graphs on a CPU."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import pytest
import torch

import qeffect.gpu_runtime
from qeffect.gpu_runtime.backends.reference import ReferenceDomain
from qeffect.gpu_runtime.lab.reports.text import host_rows
from qeffect.gpu_runtime.lab.runner.action_parts import PARTS, part_times
from qeffect.gpu_runtime.lab.runner.host_times import ASKED, REPLAYS, host_times
from qeffect.gpu_runtime.lab.runner.rounds import CellRun
from qeffect.gpu_runtime.lab.sides.cells import CELLS, TINY, BenchCell
from qeffect.gpu_runtime.lab.sides.columns import Settings
from qeffect.gpu_runtime.lab.sides.ours import Ours
from qeffect.gpu_runtime.lab.statistics.derive import derive_cell
from qeffect.gpu_runtime.lab.statistics.host import derive_column
from qeffect.gpu_runtime.step import captures
from qeffect.gpu_runtime.step import graphs as capture
from qeffect.gpu_runtime.step.streams import HostHandoff

from . import toys

SCHEMA = Path(qeffect.gpu_runtime.__file__).parent / "lab" / "reports" / "report.schema.json"
SETTINGS = Settings(device="cpu", history=4)
#: The first cell's order over layers that a CPU runs at once: two chained stages, 4 microbatches.
CELL: BenchCell = attrs.evolve(CELLS[0], hidden=32, ffn=64, sequence=16, heads=2)
ACTIONS = 3 * 2 * 4 + 2


class Nothing:
    """A graph whose replay costs a call and does nothing."""

    replayed = 0

    def replay(self) -> None:
        """Count."""
        type(self).replayed += 1


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture runs each action once and keeps a graph that does nothing."""

    def record(self: Any, name: str, pool: Any, action: Any) -> Nothing:
        action()
        self.report.num_graphs += 1
        return Nothing()

    pools = itertools.count()
    monkeypatch.setattr(Nothing, "replayed", 0)
    monkeypatch.setattr(capture._Recorder, "record", record)
    monkeypatch.setattr(captures, "GraphStream", HostHandoff)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(ReferenceDomain, "capture_obstacles", lambda _: ())


def column(**options: Any) -> Ours:
    """A built column that replays graphs which do nothing."""
    made = Ours(CELL, SETTINGS, "accumulate", "live", "replays", **options)
    made.build()
    made.warm()
    return made


def _step(made: Ours, actions: Any) -> None:
    own, made.loop.calls = made.loop.calls, actions
    made.step()
    made.loop.calls = own


class TestMeasured:
    def test_every_call_of_every_step(self) -> None:
        """Each action of a step is timed once a step, and so is the bare replay of its graph."""
        found = column().host_actions(3, lambda: None)

        assert (3, ACTIONS) == (found["steps"], found["actions"])
        counts = {name: len(ns) for name, ns in found["guarded_ns"].items()}
        assert {"refresh": 6, "forward": 24, "dgrad": 24, "wgrad": 24} == {
            name: counts[name] for name in REPLAYS
        }
        assert 24 == counts["bind"] == counts["outputs"] == counts["finish_outputs"]
        assert {name: counts[name] for name in REPLAYS} == {
            name: len(ns) for name, ns in found["bare_ns"].items()
        }
        assert found["copy_ns"]
        assert all(0 <= ns for times in found["guarded_ns"].values() for ns in times)

    def test_the_same_graphs(self) -> None:
        """As many replays go bare as guarded: one for each action of a step."""
        made = column()
        executor = made.runtime.executor
        before = executor.num_replays, Nothing.replayed

        made.host_actions(2, lambda: None)

        guarded = 2 * (1 + len(PARTS)) * ACTIONS
        assert guarded == executor.num_replays - before[0]
        assert guarded + 2 * ACTIONS == Nothing.replayed - before[1]

    def test_guards_are_asked(self) -> None:
        """What is timed is the guarded step: its epochs are committed."""
        made = column()

        made.host_actions(2, lambda: None)

        assert 2 * (1 + len(PARTS)) == made.runtime.epoch
        assert made.loop.calls is made.runtime.actions

    def test_the_device_is_drained_between_steps(self) -> None:
        """Before the first step and after each one, so that no queue is full."""
        drained: list[int] = []
        made = column()

        made.host_actions(3, lambda: drained.append(Nothing.replayed))

        assert [0, 1, 2, 3] == [n // ACTIONS for n in drained[:4]]
        assert 1 + 3 * (3 + len(PARTS)) == len(drained)

    def test_by_the_clock(self) -> None:
        """A clock that moves one microsecond at each look makes every call cost one."""
        made = column()
        ticks = itertools.count(0, 1000)

        found = host_times(
            made.runtime,
            lambda actions: _step(made, actions),
            made.loop.calls,
            lambda: None,
            2,
            clock=lambda: next(ticks),
        )

        assert {1000} == {ns for times in found["guarded_ns"].values() for ns in times}
        assert {1000} == {ns for times in found["bare_ns"].values() for ns in times}

    def test_nothing_bare_without_graphs(self) -> None:
        """An eager column (a way to run a step) has no replay to compare with, and the table shows
        this."""
        made = Ours(TINY, SETTINGS, "accumulate", "live", "eager")
        made.build()
        made.warm()

        found = made.host_actions(1, lambda: None)

        assert ({}, []) == (found["bare_ns"], found["copy_ns"])
        assert derive_column(found)["of_an_action_us"] is None


class TestParts:
    def test_each_part_of_each_call(self) -> None:
        """Every part is read at every call that has it, and at no other."""
        made = column()

        found = made.host_actions(2, lambda: None)["parts_ns"]

        assert set(PARTS) == set(found)
        assert set(REPLAYS) == set(found["kernel check"]) == set(found["kernel commit"])
        assert {"wgrad", "bind"} == set(found["destinations"])
        assert {"forward", "dgrad"} == set(found["copies"]) == set(found["caller's tensors"])
        assert {"refresh"} == set(found["addresses"])
        assert {"bind", "outputs", "finish_outputs", "dgrads", "finish_dgrads"} == set(
            found["kernel bind and read"]
        )
        assert 2 * 2 == len(found["addresses"]["refresh"])
        assert 2 * 8 == len(found["copies"]["forward"])

    def test_by_the_clock(self) -> None:
        """
        A clock that moves by a microsecond at each look reads nothing of its own looks.

        Only what happens between two looks is a part's: here, an executor that looks once.
        """
        made = column()
        ticks = itertools.count(0, 1000)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(capture.GraphExecutor, "check_addresses", lambda *_: next(ticks))
            found = part_times(
                lambda actions: _step(made, actions),
                made.loop.calls,
                (*REPLAYS, *ASKED),
                lambda: None,
                1,
                clock=lambda: next(ticks),
            )

        read = {
            (part, name): {*times} for part, calls in found.items() for name, times in calls.items()
        }
        looking = {(part, "refresh") for part in ("addresses", "executor")}
        assert looking == {of for of, times in read.items() if times != {0}}
        assert {1000} == set().union(*(read[of] for of in looking))

    def test_everything_is_as_it_was(self) -> None:
        """What is patched to be timed is put back, also when a step fails."""
        before = {
            (owner, name): getattr(owner, name)
            for owners in PARTS.values()
            for owner, names in owners
            for name in names
        }
        made = column()

        def fails(_: Any) -> None:
            raise RuntimeError("a step")

        with pytest.raises(RuntimeError, match="a step"):
            part_times(fails, made.loop.calls, REPLAYS, lambda: None, 1)

        assert all(getattr(owner, name) is call for (owner, name), call in before.items())

    def test_no_guards_no_parts(self) -> None:
        """The unguarded column has no kernel to split, and says nothing."""
        assert {} == column(guards=False).host_actions(1, lambda: None)["parts_ns"]


class TestDerived:
    RAW = {
        "steps": 2,
        "actions": 4,
        "guarded_ns": {"forward": [9000, 11000, 10000, 30000], "bind": [1000, 1000, 3000, 3000]},
        "bare_ns": {"forward": [2000, 2000, 2000, 4000]},
        "copy_ns": [5000, 7000],
    }

    def test_over_the_bare_replay(self) -> None:
        """A kind's median over its replay's, and all calls of a step shared among its actions."""
        found = derive_column(self.RAW)

        forward = found["kinds"]["forward"]
        assert (2.0, 10.5, 2.0, 8.5) == (
            forward["calls"],
            forward["us"]["median"],
            forward["bare_us"]["median"],
            forward["over_bare_us"],
        )
        assert found["kinds"]["bind"]["bare_us"] is None
        # (20 + 2 - 4) / 4 and (40 + 6 - 6) / 4
        over = found["of_an_action_us"]
        assert (4.5, 10.0, 7.25) == (over["min"], over["max"], over["median"])
        assert 6.0 == found["copy_us"]["median"]

    def test_parts_are_the_whole(self) -> None:
        """
        The launch and the look at addresses leave the executor's part; then comes own code.

        Together with the rest they are the number that the goal judges, the median of whole steps.
        """
        parts = {
            "kernel check": {"forward": [2000, 2000, 4000, 4000]},
            "addresses": {},
            "executor": {"forward": [3000, 3000, 3000, 3000]},
        }

        found = derive_column({**self.RAW, "parts_ns": parts})["parts_us"]

        # Two F and two binds a step, four actions: (10.5 - 2) / 2 + 2 / 2 over the bare replay.
        assert 2.0 == found.pop("rest")
        assert {"kernel check": 1.5, "addresses": 0.0, "executor": 0.5, "own code": 3.25} == found
        assert 7.25 == 2.0 + sum(found.values())
        assert "parts_us" not in derive_column(self.RAW)

    def test_rows(self) -> None:
        """The table has a row for each kind, for the copies, and for an action."""
        rows = host_rows({"ours": derive_column(self.RAW)})

        assert ["ours forward", "ours bind", "ours copy"] == [row[0] for row in rows[:3]]
        assert "goal 12" in rows[3][0]
        assert "7.25" == rows[3][-1]

    @pytest.mark.ci
    def test_in_a_report(self) -> None:
        """A cell's run records it for captured columns alone, in the schema's form."""
        specs = [
            toys.spec("native"),
            attrs.evolve(
                toys.spec("ours_accumulate", family="ours_captured"),
                factory="qeffect.gpu_runtime.lab.sides.ours:captured_column",
                options={"destination": "accumulate", "provisioning": "live"},
            ),
        ]
        run = CellRun(TINY, specs, toys.SETTINGS, make_column=toys.InlineColumn)

        record = run.run()

        assert record["columns"]["ours_accumulate"]["error"] is None
        assert "host_actions" not in record["columns"]["native"]
        raw = record["columns"]["ours_accumulate"]["host_actions"]
        schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
        jsonschema.validate(raw, {"$defs": schema["$defs"], "$ref": "#/$defs/host_actions"})
        derived = derive_cell(record)
        assert {"ours_accumulate"} == derived["host"].keys()
        assert derived["host"] == {"ours_accumulate": derive_column(raw)}
