"""
A log in several files: each file continues the previous file, and the oldest files may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from qeffect import Contract, StageConfig
from qeffect.cli import main
from qeffect.log.checker import LogError
from qeffect.log.format import compact
from qeffect.log.joint import replay_together
from qeffect.log.recorder import Recorder
from qeffect.log.replayer import replay
from qeffect.log.rotation import Rotation
from qeffect.log.series import series_of
from qeffect.schedule.check import _Process
from qeffect.schedule.pairing import discipline
from qeffect.schedule.plan import plan
from qeffect.schedule.tables import read_fixture
from qeffect.verification.logs.edits import reseal

from .test_examples import schema
from .test_steps import recorded, step

#: A schedule of two ranks.
TABLE = "ScheduleZBVZeroBubble_pp2_vpp2_m4.comms.csv"


def written(folder: Path, *, keep: int = 0, repeats: int = 8, steps: int = 3) -> list[Path]:
    """The files of a log with a step in full, a recorded one, its repeats, and one in full."""
    contract = Contract([StageConfig(0, microbatches=2, slots=2, matrices=("w",))])
    log = Recorder(contract, Rotation(folder / "rank0.jsonl", steps, keep), rank=0)
    step(contract)
    again = recorded(contract)
    for _ in range(repeats):
        contract.commit_step(again)
    step(contract)
    log.close()
    return sorted(folder.glob("*.jsonl"), key=lambda path: (len(path.name), path.name))


def edited(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change what a file continues, and seal the file again."""
    first, *rest = path.read_text().splitlines()
    header = json.loads(first)
    edit(header["continues"])
    del header["digest"]
    bodies = [compact(header)[:-1], *(line.rpartition(',"digest":')[0] for line in rest)]
    path.write_text("".join(reseal(bodies)))


def test_a_log_goes_on_in_the_next_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Together they say what one file says; the command takes them in any order."""
    files = written(tmp_path)

    assert ["rank0.jsonl", *(f"rank0.0000{n}.jsonl" for n in (1, 2, 3))] == [p.name for p in files]
    report = replay(*files)
    whole = written_whole(tmp_path / "whole")
    assert (report.verdict, report.epoch, report.events) == ("accepted", 11, whole.events)
    assert report.trusted_epoch is None
    assert main(["replay", *map(str, reversed(files)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["events"] == whole.events


def written_whole(folder: Path) -> Any:
    """The replay of the same steps in one file."""
    folder.mkdir()
    return replay(*written(folder, steps=1000))


def test_each_file_keeps_the_schema(tmp_path: Path) -> None:
    """Also the first line of one that continues another."""
    validator = jsonschema.Draft202012Validator(schema())
    for path in written(tmp_path):
        for line in path.read_text().splitlines():
            validator.validate(json.loads(line))


def test_without_its_beginning_a_log_says_what_it_cannot_show(tmp_path: Path) -> None:
    """The oldest files are removed; what is left is replayed, also where it repeats their steps."""
    files = written(tmp_path, keep=2)

    assert ["rank0.00002.jsonl", "rank0.00003.jsonl"] == [p.name for p in files]
    report = replay(*files)
    assert (report.verdict, report.epoch, report.trusted_epoch) == ("accepted", 11, 6)
    assert report.trusted > 0
    assert report.summary().endswith(
        f"The beginning of this log was rotated away: the state after its first {report.trusted} "
        "events, at weight epoch 6, is taken on trust from the first file given. Not checked: how "
        "the log reached that state, and whether a restore reuses an earlier incarnation"
    )
    alone = replay(files[1])
    assert (alone.verdict, alone.trusted_epoch) == ("accepted", 9)


def test_a_new_log_removes_the_files_of_an_earlier_one(tmp_path: Path) -> None:
    """They would not fit the new one; other files stay."""
    written(tmp_path)
    other = tmp_path / "rank0.0a1b2c3d.ranks.jsonl"
    other.touch()
    assert ["rank0.jsonl"] == [p.name for p in written(tmp_path, steps=99) if p != other]
    assert other.exists()


@pytest.mark.parametrize(
    ("edit", "clause", "field"),
    [
        (lambda said: said.update(after="0" * 16), "log.chain", "continues.after"),
        (lambda said: said.update(events=said["events"] + 1), "log.sequence", "continues.events"),
        (lambda said: said["state"]["token"].__setitem__(0, 99), "log.state",
         "continues.state.token"),
        (lambda said: said["steps"].clear(), "log.step", "continues.steps"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_the_one_before_is_refused(
    edit: Callable[[dict[str, Any]], object],
    clause: str,
    field: str,
    tmp_path: Path,
) -> None:
    """State, digest, number of events and recorded steps are those at the end of that file."""
    files = written(tmp_path)
    edited(files[2], edit)

    report = replay(*files[:3])

    assert (report.clause, report.field) == (clause, field)
    assert report.file == str(files[2])
    assert f"refused: {files[2]}, line 1, field {field}" in report.summary()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda given: given.update(part=0), "part: expected a number of at least 1"),
        (lambda given: given.pop("steps"), "expected the fields part, events, after, state"),
        (lambda given: given["state"].pop("token"), "the column token is missing"),
        (lambda given: given["state"].update(tokens=[1]), "is not a column of the state"),
        (lambda given: given["state"]["token"].append(1), "token: expected 1 entries"),
        (lambda given: given["state"].update(cell_at=[[9, 9, 9, 9], None]), "is not a cell"),
        (lambda given: given["state"].update(slot_of=[5, -1]), "slot_of: 5 is not a slot"),
        (lambda given: given["state"].update(token=["x"]), "token: 'x' is not a int"),
        (lambda given: given["steps"][0]["events"].clear(), "is not a recorded step"),
        (lambda given: given["steps"][0]["events"][0].update(transition="x"), "expected a tran"),
    ],
)
def test_a_malformed_beginning_is_a_line(
    edit: Callable[[dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    """With its file and its field."""
    files = written(tmp_path)
    edited(files[1], edit)
    with pytest.raises(LogError) as caught:
        replay(files[1])
    assert said in str(caught.value)
    assert "rank0.00001.jsonl, line 1, " in str(caught.value)


def test_a_file_that_is_missing_between_two_is_told(tmp_path: Path) -> None:
    """By the numbers of both; a file of another log, and one twice, likewise."""
    files = written(tmp_path)
    with pytest.raises(LogError, match=r"file 2 of its log, .*rank0.jsonl is file 0; give the"):
        replay(files[0], files[2])
    (tmp_path / "other").mkdir()
    other = written(tmp_path / "other")
    with pytest.raises(LogError, match="does not continue"):
        replay(files[0], other[1])
    assert 2 == len(series_of([files[0], other[1], other[0], files[1]]))
    twice = tmp_path / "copy.jsonl"
    twice.write_bytes(files[1].read_bytes())
    with pytest.raises(LogError, match="are both file 1 of one log"):
        series_of([files[1], twice])


@pytest.mark.parametrize("keep", [0, 2])
def test_the_logs_of_all_ranks_fit_together_in_files(keep: int, tmp_path: Path) -> None:
    """Epochs that every log has are compared; with a rank's older file missing, the later ones."""
    table = read_fixture(TABLE)
    for rank in range(table.num_ranks):
        process = _Process(table, rank, plan(table), discipline("contract"), False)
        where = Rotation(tmp_path / f"rank{rank}.jsonl", 2, keep)
        with Recorder(process.contract, where, rank=rank):
            for _ in range(7):
                process.run_step()
    series = series_of(sorted(tmp_path.glob("*.jsonl")))
    assert [4 if not keep else 2] * 2 == [len(files) for files in series]
    report = replay_together(series)
    assert (report.verdict, report.epochs) == ("accepted", 3 if keep else 7)
    if keep:
        report = replay_together([series[0], series[1][1:]])
        assert (report.verdict, report.epochs) == ("accepted", 1)


def test_a_step_as_one_costs_less_than_a_kilobyte_with_all_files(tmp_path: Path) -> None:
    """What each file begins with included, at a hundred steps per file."""
    files = written(tmp_path, repeats=2000, steps=100)
    few = sum(path.stat().st_size for path in files[:2])
    size = sum(path.stat().st_size for path in files)
    each = (size - few) / (2002 - 200)
    assert 20 < len(files)
    assert each < 1024, each
    assert replay(*files).verdict == "accepted"
