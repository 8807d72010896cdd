"""
The model of ranks also refuses two public orders that swap messages between two ranks.

`qeffect check` refuses both tables. Here the ranks have run the tables to the end of a step, which
gloo and NCCL permit: the n-th receive takes the n-th send, whatever message each was meant for. The
rank logs are written from the tables, and the protocol relation refuses the commit.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from qeffect.refusals import Refused
from qeffect.schedule.actions import RECEIVES, SENDS, Kind, Schedule
from qeffect.schedule.check import check
from qeffect.schedule.tables import read_table
from qeffect.spec.launches import message_meets_its_own
from qeffect.verification.ranks.concrete_state import Impossible
from qeffect.verification.ranks.launches import LAUNCHES
from qeffect.verification.ranks.messages_of_logs import action_of, number_of
from qeffect.verification.ranks.replay import RankReport, replay_ranks
from qeffect.verification.ranks.replayed_state import ReplayedState

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


#: The torch tables with messages: their number, and how many of them exchange messages.
TABLE_COUNTS = (24, 4)


def graphs_of(schedule: Schedule) -> ReplayedState:
    """The state of ranks that each captured their row of the table as the graph of a launch."""
    home = schedule.stage_to_rank
    numbered = []
    counts: Counter[tuple[int, int]] = Counter()
    for rank, atoms in enumerate(schedule.atoms):
        for atom in atoms:
            if atom.kind in SENDS or atom.kind in RECEIVES:
                sends = atom.kind in SENDS
                forth = 1 if atom.kind in (Kind.SEND_F, Kind.RECV_B) else -1
                gradient = atom.kind in (Kind.SEND_B, Kind.RECV_B)
                stage = atom.stage if sends else atom.stage + forth
                peer = home[atom.stage + forth]
                number = number_of({"message": [stage, atom.microbatch, gradient]})
                numbered.append((sends, rank, peer, number))
                if sends:
                    counts[rank, peer] += 1
    st = ReplayedState(len(schedule.atoms), counts)
    for sends, rank, peer, number in numbered:
        LAUNCHES["capture_send" if sends else "capture_receive"].run(st, rank, peer, number)
    return st


def launched(st: ReplayedState) -> int:
    """Launch the graphs once on every rank, up to the update; return how many messages met."""
    for rank in st.ranks:
        LAUNCHES["launch"].run(st, rank)
    met = 0
    for pair, count in st.total.messages.items():
        for _ in range(count):
            assert message_meets_its_own(st, *pair)
            LAUNCHES["transfer_launched"].run(st, *pair)
            met += 1
    for rank in st.ranks:
        LAUNCHES["vote_yes"].run(st, rank)
    for rank in st.ranks:
        for other in st.ranks:
            LAUNCHES["deliver"].run(st, rank, other)
        LAUNCHES["move"].run(st, rank)
    return met


class TestLaunches:
    """A rank that launches its steps captured its row of the table, in the order of the row."""

    @pytest.mark.parametrize(
        ("table", "cls"),
        [
            (deferred, "ScheduleZBVZeroBubble"),
            (deferred, "ScheduleInterleavedZeroBubble"),
            (batched, "batched"),
        ],
    )
    def test_an_exchange_is_refused_before_the_first_launch(
        self, tmp_path: Path, table: Any, cls: str
    ) -> None:
        """By the relation of launches alone; the corrected order is launched to its update."""
        wrong = graphs_of(table(tmp_path, cls, right=False))
        right = graphs_of(table(tmp_path, cls, right=True))

        for rank in wrong.ranks:
            with pytest.raises(Refused) as refused:
                LAUNCHES["launch"].run(wrong, rank)
            assert "ranks.same-order" == refused.value.clause
        assert sum(right.total.messages.values()) == launched(right)
        assert [1, 1] == [right.weights[rank] for rank in right.ranks]

    def test_a_missing_receive_is_refused_before_the_first_launch(self, tmp_path: Path) -> None:
        """And without this check the sender's device waits for it, and never votes."""
        st = graphs_of(batched(tmp_path, "", right=True))
        st.graph_receives[1, 0] = st.graph_receives[1, 0] - 1

        with pytest.raises(Refused) as refused:
            launched(st)
        assert "ranks.captured-by-all" == refused.value.clause
        for rank in st.ranks:
            st.launched[rank] = 1  # the runtime did not ask
        for pair in product(st.ranks, st.ranks):
            with suppress(Impossible):
                for _ in range(100):
                    LAUNCHES["transfer_launched"].run(st, *pair)
        LAUNCHES["vote_yes"].run(st, 1)
        with pytest.raises(Refused) as blocked:
            LAUNCHES["vote_yes"].run(st, 0)
        assert "ranks.messages-ended" == blocked.value.clause

    def test_agrees_with_the_check_of_every_table(self) -> None:
        """A table of torch may be launched exactly if `qeffect check` finds its messages alike."""
        tables = sorted(TABLES.glob("*.comms.csv"))
        exchanged = 0
        for path in tables:
            schedule = read_table(path)
            clauses = {found.clause for found in check(schedule).findings}
            st = graphs_of(schedule)
            if "schedule.message-order" in clauses:
                exchanged += 1
                with pytest.raises(Refused, match="same-order"):
                    launched(st)
            else:
                assert sum(st.total.messages.values()) == launched(st), path.name
        assert TABLE_COUNTS == (len(tables), exchanged)
