"""
Megatron-core's tables: equal to what its releases were recorded to run, and checked before a run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from qeffect.schedule.actions import Kind, ScheduleError
from qeffect.schedule.check import check
from qeffect.schedule.megatron import MESSAGES, megatron_schedule, schedule_table
from qeffect.schedule.transport import Transport
from tests.schedule.make_megatron_tables import FOLDER, MANNERS, SHAPES, name_of

RELEASES = ("0.16.1", "0.19.2")
RECORDED = sorted(FOLDER.glob("*/*.csv"))
_NAME = re.compile(r"pp(\d+)_vpp(\d+)_m(\d+)(?:_n(\d+))?\.(\w+)\.csv")


def shape_of(path: Path) -> dict[str, Any]:
    """The arguments of the table with this file name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    pp, vpp, microbatches, group, messages = match.groups()
    return {
        "pp": int(pp),
        "vpp": int(vpp),
        "microbatches": int(microbatches),
        "group": None if group is None else int(group),
        "messages": messages,
    }


def rows_of(path: Path) -> list[list[str]]:
    """The rows as they were recorded."""
    return [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_release_has_every_shape() -> None:
    """Each release was recorded in each shape and manner that Megatron-core takes."""
    wanted = {
        name_of(*shape, messages)
        for shape in SHAPES
        for messages in MANNERS
        if shape[1] > 1 or messages in ("batched", "plain")
    }

    assert set(MANNERS) == set(MESSAGES)
    for release in RELEASES:
        assert wanted == {path.name for path in RECORDED if path.parent.name == release}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_table_is_the_recorded_run(path: Path) -> None:
    """The written algorithm gives the actions and messages that the release ran, rank by rank."""
    table = megatron_schedule(**shape_of(path))

    assert rows_of(path) == [[str(action) for action in row] for row in table.rows]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_only_a_batch_between_two_ranks_exchanges_tensors(path: Path) -> None:
    """Refused are the batched tables of two ranks with virtual stages that alternate F and B."""
    shape = shape_of(path)
    verdict = check(megatron_schedule(**shape))
    two = shape["pp"] == 2 and shape["vpp"] > 1 and shape["messages"] == "batched"
    exchanged = two and shape["microbatches"] > 2

    assert verdict.clause == ("schedule.message-order" if exchanged else None), verdict.finding


def test_the_refusal_names_both_messages() -> None:
    """The finding is the one of two processes that ran Megatron-core with these settings."""
    verdict = check(megatron_schedule(pp=2, vpp=2, microbatches=4, messages="batched"))

    assert verdict.finding is not None
    assert (verdict.rank, verdict.action) == (1, "1RECV_F2")
    assert "rank 1 receives 1RECV_F2 where rank 0 sends 2SEND_B0" in verdict.finding.message
    assert ["2SEND_B0"] == [place.action for place in verdict.finding.related]


def test_the_order_within_an_exchange_decides() -> None:
    """The refused table and the accepted one of plain messages differ only in that order."""
    batched, plain = (
        megatron_schedule(pp=2, vpp=2, microbatches=4, messages=messages)
        for messages in ("batched", "plain")
    )
    for one, other in zip(batched.rows, plain.rows, strict=True):
        assert one != other
        assert sorted(map(str, one)) == sorted(map(str, other))
        computed = [[str(a) for a in row if a is not None and a.is_compute] for row in (one, other)]
        assert computed[0] == computed[1]


@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("shape", [(2, 2, 6, 3), (3, 3, 7, 4), (4, 2, 9, 5), (5, 2, 10, None)])
def test_other_shapes_are_whole(shape: tuple[int, int, int, int | None], messages: str) -> None:
    """Every stage runs F and B once for each microbatch, and its neighbours' messages meet."""
    pp, vpp, microbatches, group = shape
    table = megatron_schedule(
        pp=pp, vpp=vpp, microbatches=microbatches, group=group, messages=messages
    )
    ran = [a for row in table.rows for a in row if a is not None and a.is_compute]
    works = {(stage, m) for stage in range(pp * vpp) for m in range(microbatches)}
    clauses = {finding.clause for finding in check(table).findings}

    for kind in (Kind.FORWARD, Kind.BACKWARD):
        assert sorted(works) == sorted((a.stage, a.microbatch) for a in ran if a.kind is kind)
    assert clauses <= ({"schedule.message-order"} if (pp, messages) == (2, "batched") else set())


@pytest.mark.parametrize("vpp", [1, 2])
def test_plain_messages_need_no_buffered_sends(vpp: int) -> None:
    """With a queue each way, as with two ranks, no send that waits for its receive deadlocks."""
    table = megatron_schedule(pp=2, vpp=vpp, microbatches=4, messages="plain")

    assert "accepted" == check(table, transport=Transport("edge", rendezvous="queue")).verdict


def test_the_groups_are_those_of_megatron() -> None:
    """The example in Megatron-core's own comment: two ranks, groups of three, five microbatches."""
    microbatches, chunks = zip(*schedule_table(5, 2, 3), strict=True)

    assert (0, 1, 2, 0, 1, 2, 3, 4, 3, 4) == microbatches
    assert (0, 0, 0, 1, 1, 1, 0, 0, 1, 1) == chunks


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pp": 1}, "one rank exchanges no messages"),
        ({"pp": 0}, "pp must be at least 1, not 0"),
        ({"microbatches": -1}, "microbatches must be at least 1, not -1"),
        ({"vpp": True}, "vpp must be at least 1, not True"),
        ({"messages": "sent"}, "expected one of batched, overlapped, prefetched, plain"),
        ({"vpp": 1, "messages": "overlapped"}, "overlap_p2p_comm needs virtual stages"),
        ({"vpp": 1, "messages": "prefetched"}, "overlap_p2p_comm needs virtual stages"),
        ({"vpp": 1, "group": 2}, "a group needs virtual stages"),
        ({"group": 5}, "at most microbatches=4"),
        ({"group": 1}, "at least pp=2"),
        ({"microbatches": 5}, "the last group has 1 of 2 microbatches"),
        ({"microbatches": 10**6}, "more than the limit of 1000000 entries"),
    ],
)
def test_what_megatron_refuses_is_said_in_one_line(given: dict[str, Any], said: str) -> None:
    """A combination that Megatron-core refuses gives no table, only a message of one line."""
    shape = {"pp": 2, "vpp": 2, "microbatches": 4, **given}
    with pytest.raises(ScheduleError, match=re.escape(said)) as error:
        megatron_schedule(**shape)

    assert "\n" not in str(error.value)
