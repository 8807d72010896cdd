"""
The step-time simulator: closed forms from the literature, an oracle, and laws that hold for any
durations.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from fractions import Fraction
from graphlib import CycleError
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import attrs
import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qeffect.schedule.durations as durations_module
from qeffect.cli import main
from qeffect.schedule.actions import Schedule, ScheduleError
from qeffect.schedule.durations import Durations, parse_durations, read_durations
from qeffect.schedule.grouping import group_wgrads
from qeffect.schedule.index import index_of
from qeffect.schedule.infer import from_actions
from qeffect.schedule.layout import timed_layout
from qeffect.schedule.ranks import check_ranks
from qeffect.schedule.rendezvous import check_rendezvous
from qeffect.schedule.simulate import simulate
from qeffect.schedule.steptime import StepTime, step_time
from qeffect.schedule.tables import fixture_names, parse_table, read_fixture, read_table
from qeffect.schedule.te_order import te_order
from qeffect.schedule.timeline import timeline
from qeffect.schedule.torch_tables import torch_schedule
from qeffect.schedule.trace import timed_trace
from qeffect.schedule.transport import QUEUES, Transport

from .edits import LOOP, LOOP_COMMS, ZBV, ZBV_COMMS, Rows, edited, move
from .faults import random_illegal
from .random_schedules import random_schedule
from .steptime_oracle import longest_paths

RELEASE = Path(__file__).parent / "torch_tables" / "2.15.0"
SCHEMA = json.loads(
    Path(durations_module.__file__).with_name("durations.schema.json").read_text(encoding="utf-8")
)
VALID = jsonschema.Draft202012Validator(SCHEMA)
#: F and a backward that sends at its end take the same, as textbooks have it; W is in the backward.
EQUAL = Durations({"F": 1, "I": 1, "W": 0})
HELD = Transport("edge", rendezvous="rank")
#: F, I and W take the same, as the papers on zero bubbles have it.
THIRDS = Durations({"F": 1, "I": 1, "W": 1})


@functools.cache
def tables() -> dict[str, Schedule]:
    """Every shipped table and every one of torch 2.15's own, without the largest."""
    found = {name: read_fixture(name) for name in fixture_names() if "m64" not in name}
    for path in sorted(RELEASE.glob("*.csv")):
        if "defer" not in path.name:  # receives exchanged: refused under the default queues
            found[f"2.15.0 {path.name}"] = read_table(path)
    return found


class TestClosedForms:
    """What papers say of schedules, none of it computed here."""

    @pytest.mark.parametrize("name", ["GPipe", "1F1B"])
    @pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 8), (4, 8), (4, 32), (8, 16)])
    def test_gpipe_and_1f1b(self, name: str, ranks: int, microbatches: int) -> None:
        """With equal F and B and free messages the bubble is (p-1)/(m+p-1) of the step."""
        schedule = torch_schedule(name, pp=ranks, microbatches=microbatches)
        timed = step_time(schedule, EQUAL)

        assert 2 * (microbatches + ranks - 1) == timed.time
        assert {(ranks - 1) / (microbatches + ranks - 1)} == {r.bubble for r in timed.ranks}

    @pytest.mark.parametrize("backward", [1, 2, 3])
    def test_the_bubble_is_that_of_both_directions(self, backward: int) -> None:
        """The idle time of 1F1B is (p-1)(tF+tB) on every rank, whatever F and B take."""
        schedule = torch_schedule("1F1B", pp=4, microbatches=8)
        timed = step_time(schedule, Durations({"F": 1, "I": backward, "W": 0}))

        assert {3 * (1 + backward)} == {rank.idle for rank in timed.ranks}

    @pytest.mark.parametrize("ranks", [2, 4, 8])
    @pytest.mark.parametrize("chunks", [1, 2, 4])
    def test_interleaving_divides_the_bubble(self, ranks: int, chunks: int) -> None:
        """With v stages a rank, each v times shorter, the bubble of 1F1B is v times shorter."""
        schedule = torch_schedule("Interleaved1F1B", pp=ranks, vpp=chunks, microbatches=16)
        piece = Fraction(1, chunks)
        timed = step_time(schedule, Durations({"F": piece, "I": piece, "W": 0}))

        assert {Fraction(2 * (ranks - 1), chunks)} == {rank.idle for rank in timed.ranks}
        assert {32} == {rank.busy for rank in timed.ranks}

    @pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 8), (4, 8), (4, 16)])
    def test_zbv_has_no_bubble(self, ranks: int, microbatches: int) -> None:
        """With equal F, I and W, and enough microbatches, no rank of ZB-V waits inside its step."""
        schedule = torch_schedule("ZBVZeroBubble", pp=ranks, microbatches=microbatches)
        timed = step_time(schedule, THIRDS)

        assert {0} == {rank.inside for rank in timed.ranks}
        assert 6 * microbatches + ranks - 1 == timed.time

    def test_zbv_of_few_microbatches_has_one(self) -> None:
        """The same does not hold with fewer microbatches: the statement has a condition."""
        timed = step_time(torch_schedule("ZBVZeroBubble", pp=4, microbatches=4), THIRDS)

        assert any(rank.inside for rank in timed.ranks)

    def test_a_refresh_is_hidden_by_the_wait_for_a_message(self) -> None:
        """The first rank's stands before its F; the second has refreshed when its input comes."""
        schedule = from_actions(
            [["0F0", "0SEND_F0", "0RECV_B0", "0I0", "0W0"], ["1RECV_F0", "1F0", "1I0", "1SEND_B0"]]
        )
        times = {"F": 5, "I": 1, "W": 1, "message": 2}
        without, short, long = (
            step_time(schedule, Durations(times, stages={1: {"refresh": r}})) for r in (0, 7, 9)
        )
        first = step_time(schedule, Durations(times, stages={0: {"refresh": 4}}))

        assert (short.time, long.time, first.time) == (
            without.time,
            without.time + 2,
            without.time + 4,
        )
        assert [s.name for s in long.critical][:2] == ["1REFRESH", "1F0"]

    def test_a_line_of_stages_pays_every_message(self) -> None:
        """One microbatch through p ranks takes p F, p I, the last W, and 2(p-1) messages."""
        schedule = torch_schedule("GPipe", pp=4, microbatches=1)
        timed = step_time(schedule, Durations({"F": 100, "I": 10, "W": 1, "message": 1000}))

        assert 4 * 100 + 4 * 10 + 1 + 6 * 1000 == timed.time


@st.composite
def times(draw: st.DrawFn, schedule: Schedule) -> Durations:
    """Whole times, so that sums are exact, with zeros among them."""
    time = st.integers(0, 20)
    optional = ("refresh", "message", "reduce", "update", "consent", "host", "launch")

    def some(names: tuple[str, ...]) -> st.SearchStrategy[dict[str, int]]:
        return st.dictionaries(st.sampled_from(names), time)

    stages = st.integers(0, schedule.num_stages - 1)
    ranks = st.integers(0, schedule.num_ranks - 1)
    links = st.tuples(ranks, ranks).filter(lambda ends: ends[0] != ends[1])
    return Durations(
        {name: draw(time) for name in "FIW"} | draw(some(optional)),
        stages=draw(
            st.dictionaries(stages, some(("F", "I", "W", "refresh", "reduce")), max_size=3)
        ),
        ranks=draw(st.dictionaries(ranks, some(("update", "host", "launch")), max_size=3)),
        links=draw(st.dictionaries(links, time, max_size=3)) if schedule.num_ranks > 1 else {},
    )


transports = st.builds(
    Transport, st.sampled_from(tuple(QUEUES)), rendezvous=st.sampled_from((None, "queue", "rank"))
)
#: Under these, every table that is in order ends.
ending = st.builds(
    Transport, st.sampled_from(tuple(QUEUES)), rendezvous=st.sampled_from((None, "queue"))
)


def names(timed: StepTime) -> dict[tuple[object, ...], tuple[Any, Any]]:
    """Start and end of everything, by the oracle's names."""
    found: dict[tuple[object, ...], tuple[Any, Any]] = {}
    for span in timed.spans:
        if span.what == "place":
            continue
        name: tuple[object, ...] = (span.name,)
        if span.what == "host":
            name = ("host", span.name)
        elif span.what == "update":
            name = ("update", span.rank)
        found[name] = span.start, span.end
    return found


class TestOracle:
    """Two simulators that share no code."""

    @given(data=st.data())
    def test_every_table_takes_its_longest_path(self, data: st.DataObject) -> None:
        """Every action, message, reduction and update is where the oracle has it, to the unit."""
        schedule = tables()[data.draw(st.sampled_from(sorted(tables())))]
        durations, transport = data.draw(times(schedule)), data.draw(ending)
        timed = step_time(schedule, durations, transport)
        when = longest_paths(schedule, durations, transport.queues, transport.rendezvous)

        assert max(end for _, end in when.values()) == timed.time
        found = names(timed)
        assert found == {name: when[name] for name in found}
        assert len(found) == sum(1 for name in when if self._takes_time(name))

    @staticmethod
    def _takes_time(name: tuple[object, ...]) -> bool:
        text = str(name[0])
        waits = "RECV" in text or "WAIT" in text or "SHARD" in text
        return not waits and text != "held"

    @given(seed=st.integers(0, 10**6), data=st.data())
    def test_random_schedules_too(self, seed: int, data: st.DataObject) -> None:
        """So it is for schedules of no known shape: out of order, overlapped, with waits."""
        schedule = random_schedule(seed)
        durations, transport = data.draw(times(schedule)), data.draw(transports)
        try:
            when = longest_paths(schedule, durations, transport.queues, transport.rendezvous)
        except CycleError:
            with pytest.raises(ScheduleError, match="wait for each other"):
                step_time(schedule, durations, transport)
            return
        found = names(step_time(schedule, durations, transport))

        assert found == {name: when[name] for name in found}

    def test_the_oracle_sees_a_wrong_clock(self) -> None:
        """A channel that carried messages at once would be seen: the times do depend on it."""
        schedule = read_fixture("ScheduleGPipe_pp4_vpp1_m8.comms.csv")
        slow = Durations({"F": 1, "I": 1, "W": 1, "message": 5})
        timed = step_time(schedule, slow)
        when = longest_paths(schedule, slow, "edge", None)
        sends = [s for s in timed.spans if s.what == "message" and (s.rank, s.peer) == (0, 1)]

        assert [1 + 5 * n for n in range(8)] == [span.start for span in sends]
        assert [when[span.name,][0] for span in sends] == [span.start for span in sends]


class TestLaws:
    """What holds of any schedule and any times."""

    @given(data=st.data())
    def test_the_critical_path_is_the_step(self, data: st.DataObject) -> None:
        """Each part of it begins when the one before has ended, and the last ends the step."""
        schedule = tables()[data.draw(st.sampled_from(sorted(tables())))]
        durations = data.draw(times(schedule))
        timed = step_time(schedule, durations, data.draw(ending))
        clock = 0
        for span in timed.critical:
            launched = span.what == "computation"
            assert span.start == clock + (durations.on(span.rank, "launch") if launched else 0)
            clock = span.end

        assert clock == timed.time

    @given(data=st.data())
    def test_a_rank_is_busy_or_idle(self, data: st.DataObject) -> None:
        """Busy and idle are the step; a rank does one thing at a time; no step beats the bound."""
        schedule = tables()[data.draw(st.sampled_from(sorted(tables())))]
        durations = data.draw(times(schedule))
        timed = step_time(schedule, durations)
        work = Counter[int]()
        for rank, atoms in enumerate(schedule.atoms):
            work[rank] += int(durations.on(rank, "update"))
            work[rank] += sum(int(durations.refresh(s)) for s in schedule.stages_of(rank))
            for atom in atoms:
                if atom.kind.value in ("F", "I", "W"):
                    work[rank] += int(durations.of(atom.kind, atom.stage))
        for rank in timed.ranks:
            assert rank.busy + rank.idle == timed.time
            assert rank.busy == work[rank.rank]
            assert min(rank.before, rank.inside, rank.after) >= 0
            assert rank.bubble == (rank.idle / timed.time if timed.time else 0.0)
            computes = ("computation", "refresh")
            own = [s for s in timed.spans if s.rank == rank.rank and s.what in computes]
            own.sort(key=lambda span: (span.start, span.end))
            assert all(a.end <= b.start for a, b in pairwise(own))

        assert timed.bound == max(work.values()) <= timed.time

    @given(data=st.data())
    def test_nothing_gets_earlier_when_something_takes_longer(self, data: st.DataObject) -> None:
        """If a duration rises, no time of the step falls."""
        schedule = tables()[data.draw(st.sampled_from(sorted(tables())))]
        transport, less = data.draw(ending), data.draw(times(schedule))
        every = ("F", "I", "W", "refresh", "message", "reduce", "host", "launch")
        name = data.draw(st.sampled_from(every))
        more = attrs.evolve(
            less, times={**less.times, name: less.times.get(name, 0) + data.draw(st.integers(1, 9))}
        )
        short, long = (
            names(step_time(schedule, less, transport)),
            names(step_time(schedule, more, transport)),
        )

        assert all(short[event][1] <= long[event][1] for event in short)

    @given(data=st.data(), factor=st.fractions(min_value="1/7", max_value=7))
    def test_the_unit_does_not_matter(self, data: st.DataObject, factor: Fraction) -> None:
        """With every duration k times as long, every start and end is k times as late, exactly."""
        schedule = tables()[data.draw(st.sampled_from(sorted(tables())))]
        one = data.draw(times(schedule))

        def scaled(inner: Any) -> Any:
            return {n: t * factor for n, t in inner.items()}

        other = Durations(
            scaled(one.times),
            stages={n: scaled(inner) for n, inner in one.stages.items()},
            ranks={n: scaled(inner) for n, inner in one.ranks.items()},
            links=scaled(one.links),
        )
        before, after = step_time(schedule, one), step_time(schedule, other)

        assert [s.end * factor for s in before.spans] == [s.end for s in after.spans]
        assert [s.name for s in before.critical] == [s.name for s in after.critical]

    @pytest.mark.parametrize("compute", [n for n in fixture_names() if ".compute" in n])
    def test_a_table_without_messages_has_those_of_the_table_with(self, compute: str) -> None:
        """torch's two tables of one schedule take the same time, whatever messages cost."""
        durations = Durations({"F": 5, "I": 7, "W": 4, "message": 3})
        with_messages = step_time(read_fixture(compute.replace("compute", "comms")), durations)

        assert step_time(read_fixture(compute), durations).time == with_messages.time

    def test_stricter_messages_never_help(self) -> None:
        """More queues are never slower, and a send that waits for its receive never faster."""
        durations = Durations({"F": 2, "I": 3, "W": 1, "message": 4})
        for schedule in tables().values():
            ways = [("edge-direction", None), ("edge", None), ("edge", "queue")]
            if schedule.has_comms and not any(check_rendezvous(index_of(schedule, HELD))):
                ways.append(("edge", "rank"))
            found = [
                step_time(schedule, durations, Transport(queues, rendezvous=held)).time
                for queues, held in ways
            ]
            assert found == sorted(found)


@st.composite
def grouped(draw: st.DrawFn, schedule: Schedule) -> tuple[int, Durations]:
    """A group of a schedule, and durations that may have times for it, of all or some stages."""
    whole = schedule.num_microbatches
    group = draw(st.sampled_from([g for g in range(1, whole + 1) if whole % g == 0]))
    products = st.dictionaries(st.just(group) if group > 1 else st.just(2), st.integers(0, 50))
    stages = st.integers(0, schedule.num_stages - 1)
    return group, attrs.evolve(
        draw(times(schedule)),
        grouped=draw(products),
        grouped_stages=draw(st.dictionaries(stages, products, max_size=3)),
    )


class TestGrouped:
    """Grouped dW: one product takes the time of the dW of its group."""

    @given(data=st.data())
    def test_every_grouped_table_takes_its_longest_path(self, data: st.DataObject) -> None:
        """The simulator and the oracle agree exactly on grouped tables."""
        schedule = tables()[data.draw(st.sampled_from(sorted(tables())))]
        group, durations = data.draw(grouped(schedule))
        transport = data.draw(ending)
        table = group_wgrads(schedule, group)
        timed = step_time(table, durations, transport, group=group)
        when = longest_paths(table, durations, transport.queues, transport.rendezvous, group)

        assert max(end for _, end in when.values()) == timed.time
        found = names(timed)
        assert found == {name: when[name] for name in found}

    def test_a_product_takes_its_time_once(self) -> None:
        """Product, launch and host: the two dW of the group together, to the unit."""
        table = group_wgrads(from_actions([["0F0", "0F1", "0B0", "0B1"]]), 2)
        one = Durations({"F": 10, "I": 10, "W": 10, "launch": 1}, grouped={2: 15})
        alone = step_time(table, one)
        product = step_time(table, one, group=2)

        assert (66, 60) == (alone.time, alone.bound)
        assert (60, 55) == (product.time, product.bound)
        assert [Fraction(15, 2)] * 2 == [
            span.end - span.start for span in product.spans if "W" in span.name
        ]
        hosts = step_time(table, attrs.evolve(one, times={**one.times, "host": 1}), group=2)
        issued = [span.name for span in hosts.spans if span.what == "host"]
        assert ["0F0", "0F1", "0I0", "0I1", "0W0"] == issued

    def test_thirds_stay_exact(self) -> None:
        """A product of three microbatches takes its exact time, although a third of this time has
        no finite decimal form."""
        row = [f"0{kind}{m}" for kind in "FB" for m in range(3)]
        table = group_wgrads(from_actions([row]), 3)

        assert (
            7 == step_time(table, Durations({"F": 1, "I": 1, "W": 9}, grouped={3: 1}), group=3).time
        )

    def test_without_its_time_a_product_is_as_many_dw(self) -> None:
        """Times of other groups do not count, and a stage with a W of its own has no other's."""
        table = group_wgrads(read_fixture(ZBV), 4)
        times = {"F": 5, "I": 7, "W": 4, "host": 1, "launch": 1}
        plain = step_time(table, Durations(times))
        other = step_time(table, Durations(times, grouped={2: 1}), group=4)
        own = {stage: {"W": 4} for stage in range(4)}
        special = step_time(table, Durations(times, stages=own, grouped={4: 1}), group=4)

        assert plain.time == other.time == special.time
        assert [None, 3] == [
            Durations(times, stages=own, grouped={4: 1}, grouped_stages={1: {4: 3}}).product(s, 4)
            for s in (0, 1)
        ]

    def test_split_backwards_change_no_time(self) -> None:
        """Group 1 is the table as it was, so that a comparison with it is fair."""
        durations = Durations({"F": 5, "I": 7, "W": 4, "message": 3, "reduce": 2, "update": 1})
        for schedule in tables().values():
            split = step_time(group_wgrads(schedule, 1), durations)
            assert step_time(schedule, durations).time == split.time, schedule.source

    @pytest.mark.parametrize("group", [0, -1, 3, True])
    def test_a_bad_group(self, group: int) -> None:
        """The group divides the microbatches."""
        with pytest.raises(ScheduleError, match="group: expected a divisor of the 4 microbatches"):
            step_time(read_fixture(ZBV), THIRDS, group=group)


class TestDeadlock:
    """A table has a step time exactly when its ranks do not wait for each other."""

    def test_it_stops_where_the_dry_run_stops(self) -> None:
        """Over hundreds of edited tables the two agree, and both answers occur."""
        rng, seen = Random(8), Counter[bool]()
        for _ in range(800):
            schedule = random_illegal(rng).schedule
            if {f.clause for f in check_ranks(schedule)} - {"schedule.deadlock"}:
                continue
            stops = bool(simulate(index_of(schedule), blocking=False).waits)
            seen[stops] += 1
            if stops:
                with pytest.raises(ScheduleError, match="ranks wait for each other"):
                    step_time(schedule, THIRDS)
            else:
                assert step_time(schedule, THIRDS).time >= step_time(schedule, THIRDS).bound > 0

        assert min(seen[True], seen[False]) > 5, seen

    @pytest.mark.ci
    @pytest.mark.parametrize("held", ["queue", "rank"])
    def test_it_stops_where_rendezvous_stops(self, held: str) -> None:
        """With sends that wait for receives it agrees with the check of rendezvous semantics."""
        seen = Counter[bool]()
        for seed in range(400):
            schedule = random_schedule(seed)
            if not schedule.has_comms or check_ranks(schedule):
                continue
            transport = Transport("edge", rendezvous=held)
            stops = any(True for _ in check_rendezvous(index_of(schedule, transport)))
            seen[stops] += 1
            if stops:
                with pytest.raises(ScheduleError, match="ranks wait for each other"):
                    step_time(schedule, THIRDS, transport)
            else:
                assert step_time(schedule, THIRDS, transport).time > 0

        assert seen[False] > 50
        assert (seen[True] > 5) is (held == "rank"), seen

    def test_the_circle_is_named(self) -> None:
        """The message names who waits for whom."""

        def edit(rows: Rows) -> None:
            move(rows[0], "2F0", before="0F0")

        with pytest.raises(
            ScheduleError, match="2F0 on rank 0, which waits for 1SEND_F0 on rank 1"
        ):
            step_time(edited(LOOP, edit), THIRDS)


class TestRefusals:
    """What has no step time."""

    def test_a_row_of_one_rank(self) -> None:
        """A Transformer Engine list is one rank of several: its inputs' times are not known."""
        with pytest.raises(ScheduleError, match="use the table of all ranks"):
            step_time(te_order("1,1,-1,-1"), THIRDS)

    def test_what_is_missing_or_doubled(self) -> None:
        """A message that nobody sends, and an action that stands twice, are named."""

        def drop(rows: Rows) -> None:
            rows[0].remove("0SEND_F1")

        def double(rows: Rows) -> None:
            rows[0].append("0F0")

        with pytest.raises(ScheduleError, match="1F1 needs 0SEND_F1, which is missing"):
            step_time(edited(LOOP_COMMS, drop), THIRDS)
        with pytest.raises(ScheduleError, match="0F0 occurs twice"):
            step_time(edited(LOOP, double), THIRDS)
        with pytest.raises(ScheduleError, match="a stage that does not exist"):
            step_time(from_actions([["0F0", "0SEND_B0", "0B0"], ["1F0", "1B0"]]), THIRDS)

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (Durations(THIRDS.times, stages={4: {"F": 1}}), "stages of the schedule, 0 to 3"),
            (Durations(THIRDS.times, grouped_stages={4: {2: 1}}), "stages of the schedule, 0 to 3"),
            (Durations(THIRDS.times, ranks={2: {"host": 1}}), "ranks of the schedule, 0 to 1"),
            (Durations(THIRDS.times, links={(0, 7): 1}), "links: expected ranks .* found 7"),
            (Durations(THIRDS.times, links={(1, 1): 1}), "expected two ranks, found 1->1"),
        ],
    )
    def test_durations_of_another_schedule(self, given: Durations, said: str) -> None:
        """A stage, rank or link that the schedule does not have is refused, not passed over."""
        with pytest.raises(ScheduleError, match=said):
            step_time(read_fixture(ZBV), given)


GOOD: dict[str, Any] = {
    "unit": "ms", "F": 0.3, "I": 0.3, "W": 0.25, "message": 0.04, "reduce": 0.5, "update": 0.2,
    "consent": 0.1, "host": 0.01, "launch": 0.002,
    "stages": {"0": {"F": 0.4, "reduce": 0}, "2": {"grouped_W": {"4": 1, "16": 3.5}}},
    "grouped_W": {"2": 0.4, "4": 0.8},
    "ranks": {"1": {"host": 0.02}}, "links": {"0->1": 0.08},
}  # fmt: skip
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"unit": "hours"}, 'durations: unit: expected one of s, ms, us, found "hours"; name the unit'),
    ({"unit": None}, "unit: expected one of s, ms, us, found null"),
    (
        {"F": -0.1},
        "durations: F: expected a number from 0 to 1,000,000,000, found -0.1; give",
    ),
    ({"W": True}, "W: expected a number .* found true"),
    ({"message": "0.04"}, 'message: expected a number .* found "0.04"'),
    ({"host": 10**10}, "host: expected a number .* found 10000000000"),
    ({"B": 0.6}, 'B: expected one of unit, .* found "B"; give I and W instead'),
    ({"sends": 1}, 'sends: expected one of .* found "sends"; leave it out'),
    ({"stages": []}, r"stages: expected an object, found \[\]"),
    ({"stages": {"01": {}}}, 'stages: expected names that are numbers, as in "0", found "01"'),
    ({"stages": {"0": {"host": 1}}}, "stages.0.host: expected one of F, I, W, refresh, reduce"),
    ({"stages": {"0": {"F": None}}}, "stages.0.F: expected a number .* found null"),
    ({"grouped_W": 0.5}, "grouped_W: expected an object, found 0.5"),
    (
        {"grouped_W": {"1": 0.3}},
        "grouped_W: expected names that are numbers of microbatches from 2 to 999999, as in "
        '"4", found "1"',
    ),
    ({"grouped_W": {"4": "x"}}, 'grouped_W.4: expected a number .* found "x"'),
    ({"stages": {"0": {"grouped_W": []}}}, r"stages.0.grouped_W: expected an object, found \[\]"),
    ({"stages": {"0": {"grouped_W": {"02": 1}}}}, 'stages.0.grouped_W: expected .* found "02"'),
    ({"stages": {"0": {"grouped_W": {"2": -1}}}}, "stages.0.grouped_W.2: expected a number .* -1"),
    ({"ranks": {"0": {"grouped_W": {"2": 1}}}}, "ranks.0.grouped_W: expected one of update, host"),
    ({"ranks": {"0": {"F": 1}}}, "ranks.0.F: expected one of update, host, launch"),
    ({"links": {"0-1": 1}}, 'links: expected names that are two ranks, as in "0->1", found "0-1"'),
    ({"links": {"0->1": []}}, "links.0->1: expected a number"),
]


class TestDurations:
    """The file of durations."""

    def test_a_whole_one(self) -> None:
        """Everything that a file may say is read, and what is left out is zero."""
        jsonschema.validate(GOOD, SCHEMA)
        found = parse_durations(GOOD)

        assert (0.08, 0.04) == (found.message(0, 1), found.message(1, 0))
        assert (0.02, 0.01, 0.002) == (
            found.on(1, "host"), found.on(0, "host"), found.on(1, "launch")
        )  # fmt: skip
        assert (0, 0.5) == (found.reduction(0), found.reduction(1))
        assert (0.8, 1, None, 3.5) == (
            found.product(0, 4), found.product(2, 4), found.product(0, 16), found.product(2, 16)
        )  # fmt: skip
        assert {0: {"F": 0.4, "reduce": 0}, 2: {}} == found.stages
        assert 0 == parse_durations({"unit": "s", "F": 1, "I": 1, "W": 1}).consent

    @pytest.mark.parametrize(("wrong", "said"), WRONG, ids=[next(iter(w)) for w, _ in WRONG])
    def test_an_error_names_the_field(self, wrong: dict[str, Any], said: str) -> None:
        """Field, expected, found and what to do; the schema refuses the same."""
        given = GOOD | wrong
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(given, SCHEMA)

        with pytest.raises(ScheduleError, match=said) as caught:
            parse_durations(given)
        assert ";" in str(caught.value)

    @pytest.mark.parametrize("name", ["unit", "F", "I", "W"])
    def test_what_must_be_there(self, name: str) -> None:
        """Unit, F, I and W have no default: a zero nobody wrote would look like a result."""
        with pytest.raises(ScheduleError, match=f"{name}: expected .*, found nothing; add it"):
            parse_durations({n: t for n, t in GOOD.items() if n != name})

    @given(data=st.data())
    def test_the_schema_says_the_same(self, data: st.DataObject) -> None:
        """The parser accepts what the checked-in schema accepts, and nothing else."""
        scalar = st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-2, 10**10),
            st.floats(-1, 2e9),
            st.text(max_size=3),
        )
        inner = st.dictionaries(st.sampled_from((*"FIWB", "reduce", "host", "update")), scalar)
        keys = st.sampled_from(
            ("0", "1", "01", "2", "12", "x", "0->1", "1->0", "-1", "1234567", "grouped_W")
        )
        value = st.one_of(
            scalar, st.integers(0, 5), inner, st.dictionaries(keys, st.one_of(scalar, inner))
        )
        field = data.draw(st.sampled_from((*GOOD, "B", "x")))
        given = GOOD | {field: data.draw(value)}
        legal = VALID.is_valid(given)

        if legal:
            parse_durations(given)
        else:
            with pytest.raises(ScheduleError):
                parse_durations(given)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "not JSON"),
            ("[1]", r"expected an object, found \[1\]"),
            ('{"unit": "ms", "F": NaN}', "NaN is not a duration"),
            ('{"unit": "ms", "F": 1, "F": 2}', "the name 'F' occurs twice"),
            ("[" * 100_000, "not JSON"),
            ('{"unit": "ms", "F": 1e999, "I": 1, "W": 1}', "F: expected a number"),
            ("\udc80", "not JSON"),
            (" " * (2 << 20), "larger than the limit of 1 MiB"),
        ],
    )
    def test_no_file_of_durations(self, text: str, said: str, tmp_path: Path) -> None:
        """Any content gives one line."""
        path = tmp_path / "d.json"
        path.write_bytes(text.encode("utf-8", "surrogateescape"))

        with pytest.raises(ScheduleError, match=said) as caught:
            read_durations(path)
        assert "\n" not in str(caught.value)
        with pytest.raises(ScheduleError, match="cannot be read"):
            read_durations(tmp_path / "absent.json")


class TestPictures:
    """Timeline and trace of a timed step."""

    TIMES = Durations(
        {"F": 0.2, "I": 0.3, "W": 0.1, "message": 0.05, "reduce": 0.2, "update": 0.4, "host": 0.02},
        unit="ms",
    )

    @pytest.mark.parametrize("name", [ZBV, ZBV_COMMS, LOOP, LOOP_COMMS])
    def test_the_timeline_is_to_scale(self, name: str) -> None:
        """Widths on the page have the ratio of the times, and every message is an arrow."""
        timed = step_time(read_fixture(name), self.TIMES)
        text = timeline(timed.schedule, timed=timed)
        placed = timed_layout(timed)
        parsed = {(e.rank, str(e.action)): e for e in placed.entries}

        assert placed.end == pytest.approx(float(timed.time))
        assert f"step {float(timed.time):.4g} ms" in text
        assert text.count("SEND_") == sum(s.what == "message" for s in timed.spans)
        assert text.count(": update</title>") == 2
        for entry in parsed.values():
            parts = [0.2 if x == "F" else 0.3 if x == "I" else 0.1 for x in entry.action.kind.value]
            if entry.action.kind.value == "B":
                parts = [0.3, 0.1]
            assert entry.length == pytest.approx(sum(parts))

    def test_the_trace_has_the_times(self) -> None:
        """Slices are in microseconds, none of a thread overlap, and arrows join two ranks."""
        timed = step_time(read_fixture(ZBV_COMMS), self.TIMES)
        made = timed_trace(timed)
        events = made["traceEvents"]
        slices = [e for e in events if e["ph"] == "X"]
        whole = float(timed.time) * 1000

        assert whole == pytest.approx(max(e["ts"] + e["dur"] for e in slices))
        assert f"{float(timed.time):g} ms" == made["otherData"]["step"]
        lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for e in slices:
            lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
        for lane in lanes.values():
            assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(sorted(lane)))
        flows: dict[int, list[dict[str, Any]]] = {}
        for e in events:
            if e["ph"] in "sf":
                flows.setdefault(e["id"], []).append(e)
        assert len(flows) == sum(s.what == "message" for s in timed.spans)
        for start, end in flows.values():
            assert (start["ph"], end["ph"]) == ("s", "f")
            assert start["pid"] != end["pid"]
            assert start["ts"] <= end["ts"]
        json.dumps(made, allow_nan=False)


class TestCommand:
    """``qeffect plan --durations``."""

    @pytest.fixture
    def given(self, tmp_path: Path) -> tuple[str, str]:
        """A table and durations, as files."""
        table, times = tmp_path / "t.csv", tmp_path / "d.json"
        table.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
        times.write_text('{"unit": "us", "F": 10, "I": 10, "W": 0, "message": 1}')
        return str(table), str(times)

    def test_json(self, given: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
        """``--json`` has step time, each rank's share and the critical path."""
        table, times = given
        assert main(["plan", table, "--durations", times, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["step_time"]
        timed = step_time(parse_table(Path(table).read_text()), read_durations(Path(times)))

        assert found == timed.record()
        assert (62.0, 40.0) == (found["step"], found["bound"])
        assert [22 / 62] * 2 == [rank["bubble"] for rank in found["ranks"]]
        path = [span["name"] for span in found["critical_path"] if span["end"] > span["start"]]
        assert ["0F0", "0SEND_F0", "1F0", "1I0", "1F1", "1I1", "1SEND_B1", "0I1"] == path

    def test_text_and_pictures(
        self, given: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The text says the step time and what it is made of; both pictures are written."""
        table, times = given
        svg, trace = tmp_path / "a.svg", tmp_path / "a.json"
        arguments = ["--durations", times, "--svg", str(svg), "--trace", str(trace)]
        assert main(["plan", table, *arguments]) == 0
        text = capsys.readouterr().out

        busiest = "the busiest rank computes for 40 us: the step takes 1.550 times as long"
        assert f"step time 62 us; {busiest}" in text
        assert "rank 1            1F0 1I0 1F1 1I1" in text
        assert svg.read_text().startswith("<svg")
        assert json.loads(trace.read_text())["otherData"]["step"] == "62 us"

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            (["--svg", "x.svg"], "add --durations F"),
            (["--durations", "absent.json"], "cannot be read"),
        ],
    )
    def test_unusable(
        self,
        more: list[str],
        said: str,
        given: tuple[str, str],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """What cannot be timed exits with 2 and one line."""
        assert main(["plan", given[0], *more]) == 2
        assert said in capsys.readouterr().err
