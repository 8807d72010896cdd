"""Any input gives one clear error line or a verdict, and every verdict can be shown."""

from __future__ import annotations

from pathlib import Path
from random import Random

from qeffect.schedule.actions import Schedule, ScheduleError
from qeffect.schedule.check import check
from qeffect.schedule.grid import grid
from qeffect.schedule.infer import from_actions
from qeffect.schedule.pairing import DISCIPLINES
from qeffect.schedule.plan import plan
from qeffect.schedule.tables import fixture_names, read_fixture, read_table, write_table
from qeffect.schedule.timeline import timeline
from qeffect.schedule.trace import trace_json

KINDS = ("F", "I", "W", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B")
BYTES = b'0123456789FIWB,;()_\r\n"\x00\xff aSENDRCVT'


def random_entry(rng: Random) -> str:
    """Any entry that can be read, of a small pipeline."""
    stage, other, microbatch = rng.randrange(4), rng.randrange(4), rng.randrange(3)
    return rng.choice(
        (
            f"{stage}{rng.choice(KINDS)}{microbatch}",
            f"{stage}{rng.choice(KINDS)}{microbatch}",
            "",
            f"{stage}REDUCE_GRAD",
            f"{stage}WAIT_REDUCE_GRAD",
            f"{stage}UNSHARD",
            f"{stage}RESHARD",
            f"({stage}F{microbatch};{other}B{microbatch})OVERLAP_F_B",
        )
    )


def everything(schedule: Schedule, pairing: str) -> str:
    """Check, analyse and show a schedule; returns the verdict."""
    verdict = check(schedule, pairing, shared_pool=True)
    found = verdict.finding
    assert (found is None) is (verdict.verdict == "accepted")
    assert timeline(schedule, found)
    assert trace_json(schedule, found)
    assert grid(schedule, found)
    assert verdict.record()["clause"] == verdict.clause
    assert plan(schedule).ranks
    return verdict.verdict


def test_arbitrary_tables_get_a_verdict_or_one_line() -> None:
    """Tables of arbitrary entries get a verdict or one line, never anything else."""
    ends, said = set(), []
    for seed in range(300):
        rng = Random(seed)
        rows = [
            [random_entry(rng) for _ in range(rng.randrange(12))] for _ in range(rng.randint(1, 4))
        ]
        try:
            ends.add(everything(from_actions(rows), rng.choice(sorted(DISCIPLINES))))
        except ScheduleError as error:
            said.append(str(error))

    assert "refused" in ends
    assert said
    assert not any("\n" in line for line in said)


def test_damaged_files_get_a_verdict_or_one_line(tmp_path: Path) -> None:
    """Shipped tables with random bytes overwritten get a verdict or one line."""
    path = tmp_path / "table.csv"
    names = [n for n in fixture_names() if "_pp2_" in n]
    ends, said = set(), []
    for seed in range(400):
        rng = Random(seed)
        data = bytearray(write_table(read_fixture(rng.choice(names))).encode())
        for _ in range(rng.choice((1, 1, 3))):
            data[rng.randrange(len(data))] = rng.choice(BYTES)
        path.write_bytes(data)
        try:
            ends.add(everything(read_table(path), "contract"))
        except ScheduleError as error:
            said.append(str(error))

    assert "refused" in ends
    assert said
    assert not any("\n" in line for line in said)
