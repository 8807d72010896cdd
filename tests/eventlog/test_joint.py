"""
The logs of all ranks together: each log may keep the contract, although the logs contradict each
other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from qeffect import Contract, StageConfig
from qeffect.caller import Caller
from qeffect.cli import main
from qeffect.log.checker import LogError
from qeffect.log.joint import JointReport, _Log, replay_together
from qeffect.log.recorder import Recorder
from qeffect.log.replayer import replay
from qeffect.schedule.actions import Schedule
from qeffect.schedule.check import _Process
from qeffect.schedule.infer import from_actions
from qeffect.schedule.pairing import discipline
from qeffect.schedule.plan import plan
from qeffect.schedule.tables import fixture_names, read_fixture
from tests.schedule.edits import LOOP_COMMS, ZBV_COMMS, Rows, rows_of

LEGAL = [name for name in fixture_names() if ".comms" in name and "m64" not in name]


def logs(folder: Path, tables: list[Schedule], steps: list[int]) -> list[Path]:
    """
    Drive a contract a rank through its row, as `qeffect check` does, and keep the logs.

    Args:
        folder: Where they go.
        tables: For each rank, the schedule table whose actions for this rank are run.
        steps: For each rank, how many steps it runs.
    """
    paths = []
    for rank, (table, count) in enumerate(zip(tables, steps, strict=True)):
        process = _Process(table, rank, plan(tables[0]), discipline("contract"), False)
        path = folder / f"rank{rank}.jsonl"
        with Recorder(process.contract, path, rank=rank):
            for _ in range(count):
                process.run_step()
        paths.append(path)
    return paths


def edited(name: str, edit: Callable[[Rows], object]) -> Schedule:
    """A table after an edit, whose shape is as it was."""
    whole = read_fixture(name)
    rows = rows_of(whole)
    edit(rows)
    return from_actions(
        rows, stage_to_rank=whole.stage_to_rank, num_microbatches=whole.num_microbatches
    )


def joint(folder: Path, name: str, edit: Callable[[Rows], object], rank: int) -> JointReport:
    """Let one rank run an edited row and the others their own; each log is accepted alone."""
    whole = read_fixture(name)
    tables = [whole] * whole.num_ranks
    tables[rank] = edited(name, edit)
    paths = logs(folder, tables, [1] * whole.num_ranks)
    for path in paths:
        assert replay(path).clause is None
    return replay_together(paths)


class TestFit:
    @pytest.mark.parametrize("name", LEGAL)
    def test_the_ranks_of_a_legal_table_fit(self, name: str, tmp_path: Path) -> None:
        """Logs of ranks that ran one table fit, in whatever order they are given."""
        table = read_fixture(name)
        paths = logs(tmp_path, [table] * table.num_ranks, [2] * table.num_ranks)
        report = replay_together(paths[::-1])

        sends = sum("SEND" in str(a) for row in table.rows for a in row)
        assert ("accepted", 2, 2 * sends) == (report.verdict, report.epochs, report.messages)
        assert table.num_ranks == len(report.ranks)

    def test_a_grouped_dw_counts_once_for_each_microbatch(self, tmp_path: Path) -> None:
        """Also if it takes several blocks of one microbatch."""
        config = StageConfig(0, 2, 4, blocks=2, matrices=("w",), scales="epoch")
        caller = Caller(Contract([config]))
        cells = [(microbatch, block) for microbatch in (0, 1) for block in (0, 1)]
        with Recorder(caller.contract, tmp_path / "log", rank=0):
            caller.refresh(0)
            for microbatch, block in cells:
                caller.forward(0, microbatch, block)
            for microbatch, block in cells:
                caller.dgrad(0, microbatch, block)
            group = [(caller.key(0, *cell), caller.ref(0, *cell)) for cell in cells[1:]]
            caller.wgrad(0, 0, group=group)
            caller.finalize(0)
            caller.commit()
        steps = _Log.of([tmp_path / "log"]).steps

        assert replay_together([tmp_path / "log"]).verdict == "accepted"
        assert ["0W0", "0W1"] == [name for _, name in steps[0].rows({0: 0})[0][-2:]]


class TestMisfit:
    """Each log is accepted alone; together they are not."""

    def test_exchanged_sends(self, tmp_path: Path) -> None:
        """Two sends in the wrong order swap tensors; no single rank's log shows it."""

        def swap(rows: Rows) -> None:
            row = rows[0]
            a, b = row.index("0SEND_F0"), row.index("0SEND_F1")
            first = row.pop(a)
            row.insert(b, first)

        report = joint(tmp_path, ZBV_COMMS, swap, 0)

        assert ("refused", "schedule.message-order", 1) == (
            report.verdict, report.clause, report.rank
        )  # fmt: skip
        assert 0 == report.epoch
        assert "0SEND_F1" in str(report.message)

    def test_the_event_is_named(self, tmp_path: Path) -> None:
        """The place of a refusal is the sequence number of an event in that rank's log."""

        def swap(rows: Rows) -> None:
            row = rows[0]
            row.insert(row.index("0SEND_F1"), row.pop(row.index("0SEND_F0")))

        report = joint(tmp_path, ZBV_COMMS, swap, 0)
        events = (tmp_path / "rank1.jsonl").read_text().splitlines()
        event = next(e for e in map(json.loads, events) if e.get("seq") == report.step)

        assert "post_receive" == event["transition"]
        assert report.action == f"{event['key'][1]}RECV_F{event['key'][2]}"

    def test_a_receive_without_its_send(self, tmp_path: Path) -> None:
        """Something arrived that nobody's log sent: that rank's send was never asked about."""

        def drop(rows: Rows) -> None:
            # A stage that sends nothing at all has no reader that its log could miss.
            rows[0][:] = [entry for entry in rows[0] if not entry.startswith("0SEND_F")]

        report = joint(tmp_path, LOOP_COMMS, drop, 0)

        assert ("schedule.receive-without-send", 1, "1RECV_F0") == (
            report.clause, report.rank, report.action
        )  # fmt: skip

    def test_a_send_that_nobody_received(self, tmp_path: Path) -> None:
        """A gradient left and arrived nowhere."""

        def drop(rows: Rows) -> None:
            rows[0][:] = [entry for entry in rows[0] if not entry.startswith("0RECV_B")]

        report = joint(tmp_path, LOOP_COMMS, drop, 0)

        assert ("schedule.send-without-receive", 1) == (report.clause, report.rank)

    def test_orders_that_contradict_each_other(self, tmp_path: Path) -> None:
        """Each rank received before it sent what the other had received by then: no clock does."""
        rows = [
            "0F0 0SEND_F0 0RECV_B0 0B0 2RECV_F0 2F0 2RECV_B0 2B0 2SEND_B0 2SEND_F0",
            "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 3RECV_F0 3F0 3B0 3SEND_B0",
        ]
        homes = {0: 0, 1: 1, 2: 0, 3: 1}
        whole = from_actions([row.split() for row in rows], stage_to_rank=homes)
        paths = logs(tmp_path, [whole] * 2, [1, 1])
        report = replay_together(paths)

        assert all(replay(path).clause is None for path in paths)
        assert "schedule.deadlock" == report.clause
        assert "wait for each other" in str(report.message)

    def test_a_rank_that_committed_less(self, tmp_path: Path) -> None:
        """All ranks commit an epoch, or none."""
        table = read_fixture(ZBV_COMMS)
        report = replay_together(logs(tmp_path, [table] * 2, [3, 2]))

        assert ("epoch.wrong-epoch", 1, "commit_update") == (
            report.clause, report.rank, report.action
        )  # fmt: skip
        assert "rank 1 committed 2 epochs (0, 1), rank 0 3 epochs (0, 1, 2)" in str(report.message)

    def test_a_log_that_is_wrong_alone(self, tmp_path: Path) -> None:
        """A log that is refused alone is named, with its own clause."""
        table = read_fixture(ZBV_COMMS)
        paths = logs(tmp_path, [table] * 2, [1, 1])
        lines = paths[1].read_text().splitlines(keepends=True)
        paths[1].write_text("".join(lines[:9] + lines[10:]))
        report = replay_together(paths)

        assert ("refused", 1) == (report.verdict, report.rank)
        assert str(report.clause).startswith("log.")


class TestNotOnePipeline:
    def test_a_rank_is_missing(self, tmp_path: Path) -> None:
        """Without a rank's log nothing can be said of its messages."""
        table = read_fixture(ZBV_COMMS)
        paths = logs(tmp_path, [table] * 2, [1, 1])

        with pytest.raises(LogError, match="stage 1 is missing, although stage 3 is there"):
            replay_together(paths[:1])

    def test_two_replicas(self, tmp_path: Path) -> None:
        """A stage that two logs have is of two replicas, whose messages never meet."""
        table = read_fixture(ZBV_COMMS)
        paths = logs(tmp_path, [table] * 2, [1, 1])

        with pytest.raises(LogError, match="with each stage in one log"):
            replay_together([*paths, paths[0]])


class TestCommand:
    def test_exit_codes(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """0 where they fit, 1 where they do not, 2 where they are not of one pipeline."""
        table = read_fixture(ZBV_COMMS)
        paths = list(map(str, logs(tmp_path, [table] * 2, [2, 1])))
        assert main(["replay", *paths]) == 1
        assert "epoch.wrong-epoch" in capsys.readouterr().out
        assert main(["replay", paths[0], paths[0]]) == 2
        assert "one replica" in capsys.readouterr().err
        paths = list(map(str, logs(tmp_path, [table] * 2, [1, 1])))
        assert main(["replay", *paths, "--json"]) == 0
        assert "accepted" == json.loads(capsys.readouterr().out)["verdict"]
