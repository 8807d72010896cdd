"""
Channel models: which messages share a queue, when a send ends, and which tables are then right.

The dry run under rendezvous semantics is compared with a brute-force simulation that has no event
queues, only lists that it reads again until nothing changes.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import attrs
import pytest

from qeffect.cli import main
from qeffect.schedule.actions import RECEIVES, SENDS, Atom, Kind, Schedule, ScheduleError
from qeffect.schedule.channels import channels
from qeffect.schedule.check import check
from qeffect.schedule.index import index_of
from qeffect.schedule.infer import from_actions
from qeffect.schedule.ranks import check_ranks
from qeffect.schedule.rendezvous import rendezvous
from qeffect.schedule.tables import read_fixture, read_table
from qeffect.schedule.torch_tables import LOOPED, V_SHAPED
from qeffect.schedule.transport import QUEUES, RENDEZVOUS, Transport

from .edits import ZBV, Rows, rows_of
from .random_schedules import random_schedule, random_shape

FOLDER = Path(__file__).parent / "torch_tables"
TABLES = sorted(FOLDER.glob("*/*.csv"))
ONE_F_ONE_B = "2.13.0/Schedule1F1B_pp2_vpp1_m4.comms.csv"
ZBV_DEFERRED = "2.13.0/ScheduleZBVZeroBubble_pp2_vpp2_m4.defer.comms.csv"
DUAL_DEFERRED = "2.13.0/ScheduleDualPipeV_pp2_vpp2_m4.defer.comms.csv"
BFS_DEFERRED = "2.13.0/ScheduleLoopedBFS_pp4_vpp2_m8.defer.comms.csv"
#: Ways to share queues, each with those that have more queues.
FINER = (
    ("pair", "direction"),
    ("pair", "edge"),
    ("direction", "edge-direction"),
    ("edge", "edge-direction"),
)


def verdict(name: str, queues: str, held: str | None = None) -> tuple[str, str | None]:
    """Verdict and clause of a table under a channel model."""
    found = check(read_table(FOLDER / name), transport=Transport(queues, rendezvous=held))
    return found.verdict, found.clause


RIGHT = ("accepted", None)
EXCHANGED = ("refused", "schedule.message-order")
STUCK = ("refused", "schedule.deadlock")


class TestEachModel:
    """A table that is right under a model and wrong under a weaker one."""

    @pytest.mark.parametrize(
        ("name", "right", "wrong", "held", "why"),
        [
            (ZBV_DEFERRED, "direction", "pair", None, EXCHANGED),
            (ZBV_DEFERRED, "edge-direction", "edge", None, EXCHANGED),
            (ONE_F_ONE_B, "direction", "pair", "queue", STUCK),
            (ONE_F_ONE_B, "edge", "pair", "queue", STUCK),
            (DUAL_DEFERRED, "edge", "direction", "queue", STUCK),
            (ZBV_DEFERRED, "edge-direction", "direction", "queue", STUCK),
        ],
    )
    def test_queues(
        self, name: str, right: str, wrong: str, held: str | None, why: tuple[str, str]
    ) -> None:
        """More queues make a table right that fewer make wrong."""
        assert RIGHT == verdict(name, right, held)
        assert why == verdict(name, wrong, held)

    @pytest.mark.parametrize("queues", QUEUES)
    def test_what_a_send_holds(self, queues: str) -> None:
        """It ends where sends are buffered or hold a queue, and not where they hold ranks."""
        assert RIGHT == verdict(BFS_DEFERRED, queues)
        assert RIGHT == verdict(BFS_DEFERRED, queues, "queue")
        assert STUCK == verdict(BFS_DEFERRED, queues, "rank")

    def test_two_sends_first(self) -> None:
        """The smallest case: both ranks send before they receive, in one queue."""
        rows = [
            ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
            ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
        ]
        found = check_ranks(from_actions(rows), Transport(rendezvous="queue"))

        assert ["schedule.deadlock"] == [f.clause for f in found]
        assert found[0].message == (
            "under rendezvous semantics (a send holds its queue until its receive is posted) with "
            "one queue for a pair of ranks, ranks wait for each other: rank 0 stops at 0B0 (step "
            "5), for 0RECV_B0 (step 4), behind 0SEND_F1 (step 3), and rank 1 has 1SEND_B0 (step 3) "
            "first in that queue"
        )
        assert () == check_ranks(from_actions(rows), Transport("edge", rendezvous="queue"))

    def test_round_a_circle(self) -> None:
        """Where a send holds its rank, ranks may wait for each other though no two heads meet."""
        found = check_ranks(read_table(FOLDER / ONE_F_ONE_B), Transport("edge", rendezvous="rank"))

        assert found[0].message.endswith(
            "rank 0 stops at 0SEND_F1 (step 3), and rank 1 has posted nothing in that queue; "
            "rank 1 stops at 1SEND_B0 (step 3), and rank 0 has posted nothing in that queue"
        )


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_tables_of_torch(path: Path) -> None:
    """
    torch's multi-stage tables end under every model as they stand; deferred receives take that.

    With more queues no table becomes wrong, and one that ends with buffered sends, and whose
    messages are in order in queues that go one way, ends where sends hold those queues.
    """
    schedule = read_table(path)
    found = {c.queues: c for c in channels(schedule, check_ranks(schedule))}

    assert list(QUEUES) == list(found)
    for fewer, more in FINER:
        assert found[more].in_order or not found[fewer].in_order
        for held in RENDEZVOUS:
            assert found[fewer].can_deadlock(held) or not found[more].can_deadlock(held)
    for queues in ("edge", "edge-direction"):
        assert not found[queues].can_deadlock("queue") or not found[queues].in_order
    for channel in found.values():
        assert channel.can_deadlock("rank") or not channel.can_deadlock("queue")
    if path.name.startswith(tuple(LOOPED + V_SHAPED)) and ".defer" not in path.name:
        assert not any(c.can_deadlock(held) for c in found.values() for held in RENDEZVOUS)
    elif not path.name.startswith("ScheduleGPipe"):
        assert all(c.can_deadlock("rank") for c in found.values())


class TestWhatIsAsked:
    def test_no_messages(self) -> None:
        """A compute-only table assumes no channel, and cannot be asked for a rendezvous."""
        schedule = read_fixture(ZBV)

        assert () == check(schedule).channels
        with pytest.raises(ScheduleError, match="names its messages"):
            check(schedule, transport=Transport(rendezvous="queue"))

    def test_one_rank(self) -> None:
        """A pipeline on one rank sends nothing, and ends under every model."""
        schedule = from_actions([["0F0", "1F0", "1B0", "0B0"]])

        assert "accepted" == check(schedule, transport=Transport(rendezvous="rank")).verdict

    def test_wrong_under_all(self) -> None:
        """A table that lacks a receive is wrong whatever shares a queue: nothing is tried."""
        rows = rows_of(read_table(FOLDER / ONE_F_ONE_B))
        rows[1].remove("1RECV_F2")

        assert () == check(from_actions(rows)).channels


@pytest.mark.parametrize("seed", range(150))
def test_agrees_with_brute_force(seed: int) -> None:
    """Retrying every rank and every queue until nothing moves stops at the same places."""
    rng = Random(seed)
    shape = attrs.evolve(random_shape(rng), comms=True, waits=bool(seed % 2))
    rows = rows_of(random_schedule(rng, shape))
    for _ in range(rng.randrange(6)):
        _hoist(rng, rows)
    schedule = from_actions(rows)
    for queues in QUEUES:
        for held in RENDEZVOUS:
            transport = Transport(queues, rendezvous=held)
            stops = rendezvous(index_of(schedule, transport), transport)
            left = _brute(schedule, transport)

            assert bool(stops) is any(left)
            for stop in stops:
                assert (None if stop.atom is None else str(stop.atom.action)) in left[stop.rank]


def test_brute_force_sees_both() -> None:
    """The random tables above both end and get stuck, under every model."""
    seen = set()
    for seed in range(150):
        rng = Random(seed)
        shape = attrs.evolve(random_shape(rng), comms=True, waits=bool(seed % 2))
        rows = rows_of(random_schedule(rng, shape))
        for _ in range(rng.randrange(6)):
            _hoist(rng, rows)
        schedule = from_actions(rows)
        for queues in QUEUES:
            for held in RENDEZVOUS:
                transport = Transport(queues, rendezvous=held)
                stuck = bool(rendezvous(index_of(schedule, transport), transport))
                seen.add((queues, held, stuck))

    assert len(QUEUES) * len(RENDEZVOUS) * 2 == len(seen)


def _hoist(rng: Random, rows: Rows) -> None:
    """Move a receive some entries earlier."""
    row = rng.choice(rows)
    places = [i for i, entry in enumerate(row) if "RECV" in entry]
    if places:
        at = rng.choice(places)
        row.insert(max(0, at - rng.randrange(1, 8)), row.pop(at))


_OTHER = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}


def _brute(schedule: Schedule, transport: Transport) -> list[list[str | None]]:
    """By rank, where it stopped: its entry, `None` for the row's end; nothing if it ended."""
    home = schedule.stage_to_rank
    rows = schedule.atoms
    at = [0] * len(rows)
    posted: list[list[Atom]] = [[] for _ in rows]
    done: set[tuple[Kind, int, int]] = set()

    def name(atom: Atom) -> tuple[Kind, int, int]:
        return atom.kind, atom.stage, atom.microbatch

    def peer(atom: Atom) -> int:
        return home[atom.stage + _OTHER[atom.kind][1]]

    def alike(atom: Atom, other: Atom) -> bool:
        # Whether two messages of one rank share a queue.
        return (
            peer(atom) == peer(other)
            and (transport.both_ways or (atom.kind in SENDS) == (other.kind in SENDS))
            and (not transport.by_kind or str(atom.kind)[-1] == str(other.kind)[-1])
        )

    def first(rank: int, atom: Atom) -> bool:
        return not any(alike(atom, other) for other in posted[rank][: posted[rank].index(atom)])

    def transfer() -> bool:
        for rank, mine in enumerate(posted):
            for atom in mine:
                if atom.kind not in SENDS or not first(rank, atom):
                    continue
                for other in posted[peer(atom)]:
                    meets = other.kind in RECEIVES and peer(other) == rank
                    same = not transport.by_kind or other.kind is _OTHER[atom.kind][0]
                    if meets and same and first(peer(atom), other):
                        done.update((name(atom), name(other)))
                        posted[peer(atom)].remove(other)
                        mine.remove(atom)
                        return True
        return False

    def blocked(atom: Atom) -> bool:
        mine = {name(a) for a in posted[home[atom.stage]]}
        number = (atom.stage, atom.microbatch)
        return (
            (atom.kind is Kind.FORWARD and (Kind.RECV_F, *number) in mine)
            or (atom.kind is Kind.DGRAD and (Kind.RECV_B, *number) in mine)
            or (atom.kind is Kind.WAIT_SEND_F and (Kind.SEND_F, *number) in mine)
            or (atom.kind is Kind.WAIT_SEND_B and (Kind.SEND_B, *number) in mine)
            or (atom.kind in SENDS and transport.rendezvous == "rank" and name(atom) in mine)
        )

    moved = True
    while moved:
        moved = False
        while transfer():
            moved = True
        for rank, row in enumerate(rows):
            if at[rank] == len(row):
                continue
            atom = row[at[rank]]
            if atom.kind in _OTHER and atom not in posted[rank] and name(atom) not in done:
                posted[rank].append(atom)
                moved = True
                while transfer():
                    pass
            if not blocked(atom):
                at[rank] += 1
                moved = True
    return [
        [str(row[at[rank]].action)] if at[rank] < len(row) else [None] if posted[rank] else []
        for rank, row in enumerate(rows)
    ]


class TestCommand:
    def test_says_what_it_assumes(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The text names the assumed model, and what every model makes of the table."""
        code = main(["check", str(FOLDER / ZBV_DEFERRED)])
        said = capsys.readouterr().out.splitlines()
        start = next(i for i, line in enumerate(said) if "check assumes" in line)

        assert 1 == code
        assert (
            "  messages: check assumes one queue for a pair of ranks, and buffered sends "
            "(--queues, --rendezvous)" == said[start]
        )
        assert [
            "> a pair of ranks swapped can deadlock / can deadlock",
            "a pair of ranks and kind of message in order can deadlock / can deadlock",
            "a directed pair of ranks swapped ends / can deadlock",
            "a directed pair of ranks and kind of message in order ends / can deadlock",
        ] == [" ".join(line.split()) for line in said[start + 2 :]]

    def test_json_has_the_answer_of_every_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The record has every model's answer, and where it goes wrong."""
        main(["check", str(FOLDER / ZBV_DEFERRED), "--queues", "edge-direction", "--json"])
        record = json.loads(capsys.readouterr().out)
        answers = {answer["queues"]: answer for answer in record["channels"]}

        assert "accepted" == record["verdict"]
        assert {"queues": "edge-direction", "max_outstanding_sends": None, "rendezvous": None} == (
            record["transport"]
        )
        assert list(QUEUES) == list(answers)
        assert "exchanged" == answers["edge"]["order"]
        assert "rank 1 receives 2RECV_B0 where" in answers["edge"]["exchanged"]
        assert {"queue": "ends", "rank": "can deadlock"} == answers["edge"]["rendezvous"]
        assert "under rendezvous semantics" in answers["pair"]["deadlocks"]["queue"]

    @pytest.mark.parametrize(("queues", "code"), [("pair", 1), ("edge", 0)])
    def test_rendezvous(self, queues: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
        """`--rendezvous` makes a deadlock under the assumed model a refusal."""
        table = str(FOLDER / ONE_F_ONE_B)

        assert 0 == main(["check", table])
        assert code == main(["check", table, "--queues", queues, "--rendezvous", "queue"])
        assert ("schedule.deadlock" in capsys.readouterr().out) is bool(code)

    def test_unusable(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A table without messages cannot be asked."""
        code = main(["check", "--torch", "ZBVZeroBubble", "--rendezvous", "queue"])

        assert 2 == code
        assert "has messages only with --comms" in capsys.readouterr().err

    def test_fixtures(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Over the shipped tables: 1F1B's two, of fifteen, in one queue for a pair."""
        assert 0 == main(["check", "--fixtures", "--quiet"])
        said = capsys.readouterr().out

        assert (
            "Of 15 tables with messages, this many can deadlock under rendezvous semantics" in said
        )
        assert "  2 if a send holds its queue, 2 if a send holds its rank, with one queue" in said
