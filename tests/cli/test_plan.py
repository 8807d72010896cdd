"""
``qeffect plan --wgrad-group``: the comparison of grouped dW with one product per microbatch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qeffect.schedule import tables
from qeffect.schedule.durations import parse_durations
from qeffect.schedule.grouping import group_wgrads
from qeffect.schedule.plan import plan, runtime_slots
from qeffect.schedule.steptime import step_time
from qeffect.schedule.tables import read_fixture, write_table
from tests.cli.test_cli import json_of, run

FIXTURES = Path(tables.__file__).with_name("fixtures")
COMMS = "ScheduleZBVZeroBubble_pp2_vpp2_m4.comms.csv"
TIMES: dict[str, Any] = {
    **{"unit": "ms", "F": 3, "I": 3, "W": 2.5, "message": 0.5},
    "grouped_W": {"2": 4},
}


@pytest.fixture
def table(tmp_path: Path) -> str:
    """ZB-V at PP=2, M=4 with messages, as a file."""
    path = tmp_path / "zbv.csv"
    path.write_text(write_table(read_fixture(COMMS)))
    return str(path)


@pytest.fixture
def times(tmp_path: Path) -> Path:
    """Durations with the time of a product of two microbatches, as a file."""
    path = tmp_path / "times.json"
    path.write_text(json.dumps(TIMES))
    return path


def test_the_comparison_follows_the_plan(
    capsys: pytest.CaptureFixture[str], table: str, times: Path
) -> None:
    """The plan is printed as without the option, and then one row per group, group 1 first."""
    _, before, _ = run(capsys, "plan", table, "--durations", str(times))
    words = ("plan", table, "--durations", str(times), "--wgrad-group", "4", "--wgrad-group", "2")
    code, out, err = run(capsys, *words)

    assert (0, "") == (code, err)
    assert out.startswith(before)
    assert [
        "grouped dW: one product computes the dW of a group of microbatches, after their last dI",
        "group  live tapes  deferred dW  slots  runtime slots  step time ms  over group 1  bubble",
        "    1       4 / 4        1 / 3  5 / 5          6 / 5          72.5         1.000    6.2%",
        "    2       5 / 6        3 / 4  6 / 7          6 / 7          69.5         0.959    7.9%",
        "    4       8 / 8        6 / 8  8 / 8          8 / 8          73.5         1.014    7.5%",
        "live tapes, deferred dW and slots: by rank, rank 0 first",
        "runtime slots: slots in QEffect's own runtime; there a receive already takes the slot, "
        "and other stages of the rank also read the tape",
        "group 4: no time for a product of 4 microbatches: assumed 4 times W; "
        'add "grouped_W": {"4": TIME} to the durations',
        "fastest: group 2",
    ] == out.removeprefix(before).strip().splitlines()


def test_json_has_each_group(capsys: pytest.CaptureFixture[str], table: str, times: Path) -> None:
    """Needs and times of each group are those of the grouped table."""
    plain = json_of(capsys, "plan", table, "--durations", str(times))[1]
    code, data = json_of(
        capsys, "plan", table, "--durations", str(times), "--wgrad-group", "2", "--wgrad-group", "2"
    )
    groups, fastest = data.pop("groups"), data.pop("fastest_group")

    assert (0, plain) == (code, data)
    assert fastest == 2
    assert [1, 2] == [one["group"] for one in groups]
    given, durations = read_fixture(COMMS), parse_durations(TIMES)
    first = step_time(group_wgrads(given, 1), durations)
    for one in groups:
        grouped = group_wgrads(given, one["group"])
        timed = step_time(grouped, durations, group=one["group"])
        slots = runtime_slots(grouped)
        assert slots is not None
        assert timed.record() == one["step_time"]
        assert float(timed.time / first.time) == one["over_group_1"]
        assert [] == one["stages_without_product_time"]
        for rank, found in zip(plan(grouped).ranks, one["ranks"], strict=True):
            for name in ("rank", "peak_live", "peak_deferred", "slots"):
                assert getattr(rank, name) == found[name]
            assert sum(slots[stage.stage] for stage in rank.stages) == found["runtime_slots"]
            assert {stage.stage: slots[stage.stage] for stage in rank.stages} == {
                stage["stage"]: stage["runtime_slots"] for stage in found["stages"]
            }


def test_group_1_takes_as_long_as_the_table(
    capsys: pytest.CaptureFixture[str], table: str, times: Path
) -> None:
    """The comparison starts from the step time that the plan above it prints."""
    words = ("plan", table, "--durations", str(times), "--wgrad-group", "1")
    data = json_of(capsys, *words)[1]

    assert [data["step_time"]["step"]] == [one["step_time"]["step"] for one in data["groups"]]
    assert [1.0] == [one["over_group_1"] for one in data["groups"]]


def test_without_durations_there_are_slots_alone(
    capsys: pytest.CaptureFixture[str], table: str
) -> None:
    """No column of times, and no field of times in JSON."""
    out = run(capsys, "plan", table, "--wgrad-group", "2")[1]
    (_, second) = json_of(capsys, "plan", table, "--wgrad-group", "2")[1]["groups"]

    assert "group  live tapes  deferred dW  slots  runtime slots\n" in out
    assert "step time" not in out
    assert {"group", "ranks"} == set(second)


def test_a_table_without_messages_has_no_slots_in_the_runtime(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The plan says why, and what to give."""
    path = tmp_path / "compute.csv"
    path.write_text(write_table(read_fixture(COMMS.replace("comms", "compute"))))
    out = run(capsys, "plan", str(path), "--wgrad-group", "2")[1]
    groups = json_of(capsys, "plan", str(path), "--wgrad-group", "2")[1]["groups"]

    assert "group  live tapes  deferred dW  slots\n" in out
    assert "the table names no messages; give a table with messages (--comms" in out
    assert {None} == {rank["runtime_slots"] for one in groups for rank in one["ranks"]}


def test_one_rank_of_several(capsys: pytest.CaptureFixture[str]) -> None:
    """A Transformer Engine list is planned too; its table can have no slots in the runtime."""
    code, out, _ = run(capsys, "plan", "--te-order", "1,1,-1,-1", "--wgrad-group", "2")

    assert 0 == code
    assert "    2           2            2      2\n" in out
    assert "names no messages" not in out


def test_many_ranks_are_a_range(capsys: pytest.CaptureFixture[str]) -> None:
    """Above four ranks a row has the smallest and the largest number; JSON has every rank."""
    path = str(FIXTURES / "ScheduleZBVZeroBubble_pp8_vpp2_m64.comms.csv")
    out = run(capsys, "plan", path, "--wgrad-group", "8")[1]
    groups = json_of(capsys, "plan", path, "--wgrad-group", "8")[1]["groups"]

    assert "    1          16      1 to 15     17       17 to 18\n" in out
    assert "    8    27 to 30     15 to 16     31             31\n" in out
    assert "lowest to highest number of any rank" in out
    assert [8, 8] == [len(one["ranks"]) for one in groups]


def test_products_of_some_stages(
    capsys: pytest.CaptureFixture[str], table: str, times: Path
) -> None:
    """A stage with a W of its own needs a product of its own; the others are not named."""
    stages = {"1": {"W": 3}, "2": {"W": 3, "grouped_W": {"2": 5}}}
    times.write_text(json.dumps({**TIMES, "stages": stages}))
    words = ("plan", table, "--durations", str(times), "--wgrad-group", "2")
    out = run(capsys, *words)[1]
    data = json_of(capsys, *words)[1]
    groups = data["groups"]

    assert data["fastest_group"] is None
    assert "fastest" not in out
    assert (
        "group 2: no time for a product of 2 microbatches of stage 1: assumed 2 times W; "
        'add "grouped_W": {"2": TIME} to the stage' in out
    )
    assert [[], [1]] == [one["stages_without_product_time"] for one in groups]


def test_of_equally_fast_groups_the_smallest_is_proposed(
    capsys: pytest.CaptureFixture[str], table: str, times: Path
) -> None:
    """A larger group would hold more slots for nothing."""
    free = {"F": 1, "I": 1, "W": 0, "unit": "ms", "grouped_W": {"2": 0, "4": 0}}
    times.write_text(json.dumps(free))
    words = ("--durations", str(times), "--wgrad-group", "4", "--wgrad-group", "2")

    data = json_of(capsys, "plan", table, *words)[1]
    assert [1.0, 1.0, 1.0] == [one["over_group_1"] for one in data["groups"]]
    assert data["fastest_group"] == 1


@pytest.mark.parametrize("group", ["3", "0", "-1", "8", "9" * 40])
def test_a_group_that_does_not_divide_the_microbatches(
    group: str, capsys: pytest.CaptureFixture[str], table: str
) -> None:
    """Option, expected, found and what to give, before anything is planned."""
    code, out, err = run(capsys, "plan", table, "--wgrad-group", "2", "--wgrad-group", group)

    assert (2, "") == (code, out)
    assert (
        f"--wgrad-group: expected a divisor of the table's 4 microbatches, found {group}; "
        "give 1, 2 or 4" in err
    )


def test_not_a_number(capsys: pytest.CaptureFixture[str], table: str) -> None:
    """Words are refused like those of every other number."""
    code, out, err = run(capsys, "plan", table, "--wgrad-group", "all")

    assert (2, "") == (code, out)
    assert "--wgrad-group" in err


def test_many_divisors_are_shortened(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The list of groups to choose from stays on one line."""
    path = tmp_path / "many.csv"
    row = [f"0{kind}{m}" for kind in "FB" for m in range(720)]
    path.write_text(",".join(row) + "\n")
    code, _, err = run(capsys, "plan", str(path), "--wgrad-group", "7")

    assert 2 == code
    assert "give 1, 2, 3, 4, 5, 6, 8, 9, ..., 80, 90, 120, 144, 180, 240, 360 or 720" in err
