"""
The model of ranks also refuses two public orders that swap messages between two ranks.

`qeffect check` refuses both tables. Here the ranks have run the tables to the end of a step, which
gloo and NCCL permit: the n-th receive takes the n-th send, whatever message each was meant for. The
rank logs are written from the tables, and the protocol relation refuses the commit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qeffect.schedule.actions import RECEIVES, SENDS, Kind, Schedule
from qeffect.schedule.check import check
from qeffect.schedule.tables import read_table
from qeffect.verification.ranks.messages_of_logs import action_of
from qeffect.verification.ranks.replay import RankReport, replay_ranks

from .test_rank_logs import Lines, write

TABLES = Path(__file__).resolve().parents[1] / "schedule" / "torch_tables" / "2.13.0"
#: Interleaved stages on two ranks, Megatron-LM#1450: one batch posts the sends in a fixed order.
OWN = (
    "0F0,0SEND_F0,2RECV_F0,2F0,2SEND_F0,2RECV_B0,2I0,2W0,0F1,{sends},0RECV_B0,0I0,0W0,"
    "2RECV_F1,2F1,2SEND_F1,2RECV_B1,2I1,2W1,2SEND_B1,0RECV_B1,0I1,0W1"
)
OTHER = (
    "1RECV_F0,1F0,1SEND_F0,3RECV_F0,3F0,3I0,3W0,3SEND_B0,1RECV_F1,1RECV_B0,1I0,1W0,"
    "1SEND_B0,1F1,1SEND_F1,3RECV_F1,3F1,3I1,3W1,3SEND_B1,1RECV_B1,1I1,1W1,1SEND_B1"
)


def deferred(folder: Path, cls: str, *, right: bool) -> Schedule:
    """A table of torch with `defer_pp_recv=True`, or as it stands without."""
    name = f"{cls}_pp2_vpp2_m4{'' if right else '.defer'}.comms.csv"
    return read_table(TABLES / name)


def batched(folder: Path, _: str, *, right: bool) -> Schedule:
    """The batch of a send in each direction, or the two messages in the order of the receives."""
    path = folder / "table.csv"
    sends = "0SEND_F1,2SEND_B0" if right else "2SEND_B0,0SEND_F1"
    path.write_text(f"{OWN.format(sends=sends)}\n{OTHER}\n")
    return read_table(path)


def logs(schedule: Schedule) -> list[Lines]:
    """The rank logs of one committed step of the table; hosts wait for what they compute with."""
    home = schedule.stage_to_rank
    world = len(schedule.atoms)
    sent = {
        (source, target): sum(
            home[atom.stage + (1 if atom.kind is Kind.SEND_F else -1)] == target
            for atom in schedule.atoms[source]
            if atom.kind in SENDS
        )
        for source in range(world)
        for target in range(world)
    }
    channels = [[*ends, count] for ends, count in sorted(sent.items()) if count]
    return [_log(schedule, rank, channels) for rank in range(world)]


def _log(schedule: Schedule, rank: int, channels: list[list[int]]) -> Lines:
    home = schedule.stage_to_rank
    lines: Lines = [
        {"qeffect": "rank-log", "version": 1, "rank": rank, "world": len(schedule.atoms),
         "attempt": "one", "worker": 0, "began": 0, "epoch": 0, "channels": channels}
    ]  # fmt: skip
    names = ("offer", "confirm", "connect") if rank == 0 else ("take_seat", "connect")
    lines += [{"event": name, "name": "one"} for name in names]
    lines.append({"event": "begin_step", "epoch": 0})
    arriving: dict[tuple[Kind, int, int], dict[str, Any]] = {}
    leaving = []
    for atom in schedule.atoms[rank]:
        stage, m = atom.stage, atom.microbatch
        if atom.kind in SENDS or atom.kind in RECEIVES:
            gradient = atom.kind in (Kind.SEND_B, Kind.RECV_B)
            forth = 1 if atom.kind in (Kind.SEND_F, Kind.RECV_B) else -1
            sends = atom.kind in SENDS
            post = {
                "event": "post_send" if sends else "post_receive",
                "peer": home[stage + forth],
                "message": [stage if sends else stage + forth, m, gradient],
                "slot": stage * schedule.num_microbatches + m,
                "generation": 0,
            }
            lines.append(post)
            ended = {"peer": post["peer"], "action": action_of(post)}
            if sends:
                leaving.append({"event": "sent", **ended})
            else:
                uses = Kind.DGRAD if gradient else Kind.FORWARD
                arriving[uses, stage, m] = {"event": "received", **ended}
        elif (end := arriving.pop((atom.kind, stage, m), None)) is not None:
            lines.append(end)
    assert not arriving
    lines += leaving
    lines += [{"event": event, "epoch": 0} for event in ("finish", "consent", "commit")]
    return [*lines, {"event": "closed"}]


def replay(folder: Path, schedule: Schedule) -> RankReport:
    """What the model of ranks says."""
    return replay_ranks(
        [write(folder / f"{rank}.jsonl", lines) for rank, lines in enumerate(logs(schedule))]
    )


@pytest.mark.parametrize(
    ("table", "cls"),
    [
        (deferred, "ScheduleZBVZeroBubble"),
        (deferred, "ScheduleInterleavedZeroBubble"),
        (batched, "batched"),
    ],
)
class TestExchange:
    def test_is_refused_by_the_relation(self, tmp_path: Path, table: Any, cls: str) -> None:
        """Both ends posted as many messages, but not the same ones in the same places."""
        schedule = table(tmp_path, cls, right=False)
        report = replay(tmp_path, schedule)

        assert "ranks.same-messages" == report.clause, report.summary()
        assert "schedule.message-order" in {found.clause for found in check(schedule).findings}

    def test_the_corrected_order_is_accepted(self, tmp_path: Path, table: Any, cls: str) -> None:
        """The same messages, posted on both ends in one order."""
        schedule = table(tmp_path, cls, right=True)
        report = replay(tmp_path, schedule)

        assert (None, 2) == (report.clause, report.commits), report.summary()
        assert report.messages == sum(count for *_, count in logs(schedule)[0][0]["channels"])
        assert "accepted" == check(schedule).verdict
