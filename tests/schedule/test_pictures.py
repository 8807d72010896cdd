"""
Grid, timeline and trace: the refused entry is marked in each, and each shows the whole table.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import attrs
import pytest

from qeffect.schedule.actions import RECEIVES
from qeffect.schedule.check import check
from qeffect.schedule.findings import Finding
from qeffect.schedule.grid import grid
from qeffect.schedule.index import index_of
from qeffect.schedule.infer import from_actions
from qeffect.schedule.layout import layout
from qeffect.schedule.ranks import check_ranks
from qeffect.schedule.simulate import simulate
from qeffect.schedule.tables import fixture_names, parse_table, read_fixture
from qeffect.schedule.timeline import COLOURS, timeline
from qeffect.schedule.trace import trace, trace_json

from .edits import LOOP_COMMS, ZBV, ZBV_COMMS, Rows, edited, move
from .faults import FAULTS, random_illegal
from .random_schedules import random_schedule

SVG = "{http://www.w3.org/2000/svg}"
RED, GREY = "#d11a2a", "#5b6472"
PICTURES = Path(__file__).parents[2] / "qeffect" / "schedule" / "pictures"


#: What is neither the colour of a kind nor a shade of one: the page, boxes, the note.
GROUNDS = {"none", "#ffffff", "#fdf1f2", "#eef1f5", RED, GREY}


@pytest.fixture
def mismatch() -> Finding:
    """What `check` finds in ZB-V under `latest`."""
    found = check(read_fixture(ZBV), "latest").finding
    assert found is not None
    return found


def deadlock() -> tuple[Any, Finding]:
    """A schedule with a deadlock, and the finding."""

    def edit(rows: Rows) -> None:
        move(rows[0], "2RECV_B0", before="0SEND_F1")

    schedule = edited(LOOP_COMMS, edit)
    return schedule, check_ranks(schedule)[0]


class TestGrid:
    @pytest.mark.parametrize("name", [n for n in fixture_names() if "_pp2_" in n])
    def test_without_a_finding_the_grid_is_what_torch_prints(self, name: str) -> None:
        """Without a finding, the grid says what torch's own print says."""
        from torch.distributed.pipelining.schedules import _Action, _format_pipeline_order

        schedule = read_fixture(name)
        theirs = _format_pipeline_order(
            {
                rank: [None if a is None else _Action.from_str(str(a)) for a in row]
                for rank, row in enumerate(schedule.rows)
            }
        )

        assert [line.split() for line in theirs.splitlines()] == [
            line.split() for line in grid(schedule).splitlines()
        ]

    def test_the_refused_action_and_its_work_are_marked(self, mismatch: Finding) -> None:
        """The picture marks the refused entry, the work that it owns and the work that it got, and
        names the entry's line."""
        lines = grid(read_fixture(ZBV), mismatch, context=3).splitlines()

        assert [
            "         Rank 0 Rank 1",
            "... 19 steps",
            "Step 19: 3W3    +1I2",
            "Step 20: 0I2    2I3",
            "Step 21: 0W2    !1I3",
            "Step 22: 0I3    >1W2< <-- ownership.wrong-key on rank 1",
            "Step 23: 0W3    2W3",
            "Step 24:        1W3",
            "",
            "  >  the refused entry, marked >..<",
            "  +  the expected entry, the first of two entries, or a needed entry",
            "  !  the entry that was used instead, or another entry that waits",
        ] == lines

    def test_cut_at_both_ends(self, mismatch: Finding) -> None:
        """What is cut off is counted."""
        lines = grid(read_fixture(ZBV), mismatch, context=1).splitlines()

        assert ("... 21 steps", "... 1 step", "") == (lines[1], *lines[5:7])

    def test_nothing_is_cut_unless_asked(self, mismatch: Finding) -> None:
        """Nothing is cut when nothing is asked to be."""
        picture, _, legend = grid(read_fixture(ZBV), mismatch, context=None).partition("\n\n")

        assert 26 == len(picture.splitlines())
        assert 3 == len(legend.splitlines())

    def test_without_a_step(self) -> None:
        """A finding about something missing marks no entry and cuts nothing."""
        schedule = edited(ZBV, lambda rows: rows[0].remove("3W2"))
        found = check_ranks(schedule)[0]

        assert ">" not in grid(schedule, found)
        assert 26 == len(grid(schedule, found).splitlines())


def shapes(svg: str, tag: str, *, legend: bool = False) -> list[dict[str, str]]:
    """The attributes of all elements of a kind, of the picture itself or of its legend."""
    root = ET.fromstring(svg)
    (explained,) = (e for e in root.iter(f"{SVG}g") if e.get("id") == "legend")
    named = list(explained.iter(f"{SVG}{tag}"))
    return [
        dict(e.attrib)
        for e in (named if legend else root.iter(f"{SVG}{tag}"))
        if legend or e not in named
    ]


def explanations(svg: str) -> set[str]:
    """The words of the legend."""
    root = ET.fromstring(svg)
    (explained,) = (e for e in root.iter(f"{SVG}g") if e.get("id") == "legend")
    return {"".join(e.itertext()) for e in explained.iter(f"{SVG}text")}


def style(shape: dict[str, str]) -> tuple[str | None, bool]:
    """The colour of a line, and whether it is dashed."""
    return shape.get("stroke"), "stroke-dasharray" in shape


def marks(svg: str, *, legend: bool = False) -> set[tuple[str | None, bool]]:
    """The styles of the outlines of entries and rows."""
    outlines = shapes(svg, "rect", legend=legend)
    return {style(r) for r in outlines if r.get("stroke") in (RED, GREY)}


def arcs(svg: str, *, legend: bool = False) -> list[dict[str, str]]:
    """All lines with an arrowhead."""
    return [p for p in shapes(svg, "path", legend=legend) if "marker-end" in p]


def tip(arc: dict[str, str]) -> tuple[float, float]:
    """Where an arrow ends."""
    x, y = arc["d"].split()[-1].split(",")
    return float(x), float(y)


def covered(svg: str, point: tuple[float, float]) -> bool:
    """Whether an outline or a badge lies over a point."""
    x, y = point
    rects = [r for r in shapes(svg, "rect") if r.get("stroke") in (RED, GREY)]
    return any(
        float(r["x"]) - float(r["stroke-width"]) / 2 <= x
        and x <= float(r["x"]) + float(r["width"]) + float(r["stroke-width"]) / 2
        and float(r["y"]) - float(r["stroke-width"]) / 2 <= y
        and y <= float(r["y"]) + float(r["height"]) + float(r["stroke-width"]) / 2
        for r in rects
    ) or any(
        (x - float(c["cx"])) ** 2 + (y - float(c["cy"])) ** 2 <= float(c["r"]) ** 2
        for c in shapes(svg, "circle")
    )


def texts(svg: str) -> list[str]:
    """All texts, in order."""
    return ["".join(e.itertext()) for e in ET.fromstring(svg).iter(f"{SVG}text")]


class TestTimeline:
    def test_every_entry_is_drawn(self) -> None:
        """Each computation is a rectangle of its kind's colour with its entry as text."""
        schedule = read_fixture(ZBV)
        svg = timeline(schedule)

        entries = [str(a) for row in schedule.rows for a in row if a]
        drawn = texts(svg)
        assert all(entry in drawn for entry in entries)
        fills = {shape.get("fill") for shape in shapes(svg, "rect")}
        assert {COLOURS[k] for k in COLOURS if k.value in "FIW"} <= fills

    def test_titles_name_places(self) -> None:
        """Every entry's tooltip says its rank and step."""
        titles = [e.text for e in ET.fromstring(timeline(read_fixture(ZBV))).iter(f"{SVG}title")]

        assert "rank 1, step 22: 1W2" in titles

    def test_a_timeline_needs_nothing_from_elsewhere(self, mismatch: Finding) -> None:
        """The file needs no script, style sheet, font or image from elsewhere."""
        svg = timeline(read_fixture(ZBV), mismatch)
        root = ET.fromstring(svg)

        tags = {e.tag.removeprefix(SVG) for e in root.iter()}
        assert not tags & {"script", "style", "image", "foreignObject", "use", "a"}
        assert 1 == svg.count("http://")
        for element in root.iter():
            assert not [v for v in element.attrib.values() if "url(" in v and "url(#" not in v]

    def test_refused_entry_is_outlined(self, mismatch: Finding) -> None:
        """A red outline lies exactly over the refused entry, and the picture says the clause."""
        schedule = read_fixture(ZBV)
        svg = timeline(schedule, mismatch)
        red = [r for r in shapes(svg, "rect") if r.get("stroke") == RED and "fill" in r]
        outline = next(r for r in red if "stroke-dasharray" not in r)
        step_width = float(outline["width"])

        assert 76 + 22 * step_width == float(outline["x"])
        assert "ownership.wrong-key" in "".join(texts(svg))
        assert mismatch.message in texts(svg)
        assert not [r for r in shapes(timeline(schedule), "rect") if r.get("stroke") == RED]

    def test_arcs_lead_from_owned_and_from_taken_work(self, mismatch: Finding) -> None:
        """One arc comes from the owned work, a dashed one from the work that was taken."""
        svg = timeline(read_fixture(ZBV), mismatch)

        assert [False, True] == ["stroke-dasharray" in p for p in arcs(svg)]
        assert ["url(#ink)", "url(#red)"] == [p["marker-end"] for p in arcs(svg)]
        assert {"its own work", "the work that it is given", "refused"} <= explanations(svg)

    def test_missing_action_outlines_the_row(self) -> None:
        """If the refused action is missing from the table, the whole line of its rank is marked."""
        schedule = edited(ZBV, lambda rows: rows[0].remove("3W2"))
        svg = timeline(schedule, check_ranks(schedule)[0])

        dashed = [r for r in shapes(svg, "rect") if r.get("stroke-dasharray") == "7 4"]
        assert 1 == len(dashed)

    def test_finding_without_a_rank(self) -> None:
        """A finding about no rank is written below and marks nothing."""
        schedule = parse_table("0F0,0I0,0W0\n", num_stages=2)
        svg = timeline(schedule, check_ranks(schedule)[0])

        assert "schedule.stage-missing" in "".join(texts(svg))

    def test_waiting_ranks_are_outlined_and_the_rest_is_pale(self) -> None:
        """Every waiting rank is outlined, and what never ran is pale."""
        schedule, found = deadlock()
        svg = timeline(schedule, found)

        reds = [r for r in shapes(svg, "rect") if r.get("stroke") == RED]
        assert 2 == len(reds)
        assert [r for r in shapes(svg, "rect") if r.get("fill-opacity")]
        assert {"pale: never runs", "is waited for", "also waits"} <= explanations(svg)

    def test_long_schedules_are_cut(self) -> None:
        """A long schedule is cut around the refused entry, and the picture notes the cut."""
        schedule = read_fixture("ScheduleZBVZeroBubble_pp8_vpp2_m64.compute.csv")
        found = check(schedule, "latest", steps=1).finding
        assert found is not None
        cut = timeline(schedule, found)
        whole = timeline(schedule, found, window=None)

        assert found.action in texts(cut)
        assert "(earlier part cut)" in texts(cut)
        assert "(earlier part cut)" not in texts(whole)
        assert len(cut) < len(whole) / 3

    def test_cut_at_the_start(self) -> None:
        """Without a finding a long schedule is shown from its start."""
        schedule = read_fixture("ScheduleZBVZeroBubble_pp8_vpp2_m64.compute.csv")

        assert "(later part cut)" in texts(timeline(schedule))

    def test_names_are_escaped(self) -> None:
        """A source's name cannot break the file."""
        schedule = from_actions([["0F0", "0B0"]], source='<b>"&')

        assert '<b>"&' in texts(timeline(schedule))[0]

    @pytest.mark.parametrize("name", fixture_names())
    def test_every_shipped_table_is_well_formed(self, name: str) -> None:
        """All formats, overlaps and sizes give valid XML."""
        assert ET.fromstring(timeline(read_fixture(name))).tag == f"{SVG}svg"

    @pytest.mark.parametrize("fault", sorted(FAULTS))
    @pytest.mark.parametrize("seed", range(4))
    def test_every_finding_can_be_drawn(self, fault: str, seed: int) -> None:
        """Whatever is found is drawn in all three pictures and named in each."""
        illegal = random_illegal(seed, fault)
        for found in check_ranks(illegal.schedule):
            svg = timeline(illegal.schedule, found)
            assert found.clause in "".join(ET.fromstring(svg).itertext())
            assert json.loads(trace_json(illegal.schedule, found))["otherData"]["clause"] == (
                found.clause
            )
            if found.step is not None:
                assert f"<-- {found.clause} on rank {found.rank}" in grid(illegal.schedule, found)

    @pytest.mark.parametrize("fault", sorted(FAULTS))
    def test_the_legend_names_what_the_picture_has(self, fault: str) -> None:
        """Every outline, arrow and shade of a picture is in its legend, and no other is."""
        for seed in range(6):
            schedule = random_illegal(seed, fault).schedule
            svg = timeline(schedule, check_ranks(schedule)[0])
            fills, named = (
                {r.get("fill") for r in shapes(svg, "rect", legend=legend)} - GROUNDS
                for legend in (False, True)
            )
            pale = any("fill-opacity" in r for r in shapes(svg, "rect"))
            lighter = bool(fills - set(COLOURS.values()))

            assert marks(svg) == marks(svg, legend=True)
            assert {p["marker-end"] for p in arcs(svg)} == {
                p["marker-end"] for p in arcs(svg, legend=True)
            }
            assert fills & set(COLOURS.values()) <= named
            assert ("pale: never runs" in explanations(svg)) is pale
            assert ("lighter: a later stage of the rank" in explanations(svg)) is lighter

    @pytest.mark.parametrize("fault", sorted(FAULTS))
    def test_what_takes_no_time_is_named_beside_its_box(self, fault: str) -> None:
        """A refused message is written out with its step, which no axis counts."""
        for seed in range(6):
            schedule = random_illegal(seed, fault).schedule
            found = check_ranks(schedule)[0]
            svg = timeline(schedule, found)
            narrow = [
                entry
                for entry in layout(schedule).entries
                if (entry.rank, entry.step) == (found.rank, found.step) and not entry.length
            ]

            assert all(f"{e.action}, step {e.step}" in texts(svg) for e in narrow)
            assert "narrow: takes no time, such as a message" in explanations(svg) or not narrow

    @pytest.mark.parametrize("fault", sorted(FAULTS))
    def test_nothing_lies_over_an_arrowhead(self, fault: str) -> None:
        """Every arrow ends beside the outline of what it leads to, and not under its badge."""
        for seed in range(6):
            schedule = random_illegal(seed, fault).schedule
            svg = timeline(schedule, check_ranks(schedule)[0])

            assert not [arc for arc in arcs(svg) if covered(svg, tip(arc))]

    def test_a_time_stands_where_it_begins_and_the_step_is_said(self) -> None:
        """Where the axis is time, the note says which entry of its row is meant, and when it is."""
        schedule = edited(ZBV_COMMS, lambda rows: rows[0].remove("3RECV_F1"))
        found = check_ranks(schedule)[0]
        svg = timeline(schedule, found)
        (refused,) = (
            e for e in layout(schedule).entries if (e.rank, e.step) == (found.rank, found.step)
        )
        (box,) = (r for r in shapes(svg, "rect") if r.get("stroke") == RED)
        axis = {
            "".join(e.itertext()): float(e.attrib["x"])
            for e in ET.fromstring(svg).iter(f"{SVG}text")
            if e.get("font-size") == "9" and e.get("text-anchor") == "middle"
        }
        unit = (axis["5"] - axis["0"]) / 5

        assert axis["0"] + unit * refused.start == float(box["x"]) + float(box["width"]) / 2
        place = f"step {found.step} of its row, at time {refused.start}: {found.action}"
        assert any(place in text for text in texts(svg))

    def test_the_picture_of_the_readme(self) -> None:
        """
        The README's first picture is what `qeffect check` draws today.

        `qeffect check qeffect/schedule/fixtures/ScheduleZBVZeroBubble_pp2_vpp2_m4.compute.csv
        --pairing latest --svg qeffect/schedule/pictures/zbv_latest.svg` writes it anew.
        """
        schedule = attrs.evolve(read_fixture(ZBV), source=f"qeffect/schedule/fixtures/{ZBV}")
        drawn = timeline(schedule, check(schedule, "latest").finding)

        assert (PICTURES / "zbv_latest.svg").read_text("utf-8") == drawn


class TestLayout:
    def test_compute_by_step(self) -> None:
        """A compute-only table is drawn as it stands."""
        placed = layout(read_fixture(ZBV))

        assert "step" == placed.unit
        assert all((c.start, c.length) == (c.step, 1) for c in placed.entries)

    def test_comms_by_time(self) -> None:
        """A table with messages is drawn by a dry run: nothing starts before its input is there."""
        placed = layout(read_fixture(ZBV_COMMS))
        ends = {str(c.action): c.start + c.length for c in placed.entries}
        starts = {str(c.action): c.start for c in placed.entries}

        assert "time" == placed.unit
        assert starts["1F0"] >= ends["0F0"]
        assert starts["0I0"] >= ends["1I0"]
        for rank in range(2):
            row = [c for c in placed.entries if c.rank == rank and c.action.kind not in RECEIVES]
            assert all(a.start + a.length <= b.start for a, b in pairwise(row))

    @pytest.mark.parametrize("seed", range(30))
    def test_waiting_at_the_use_is_never_later(self, seed: int) -> None:
        """A run that waits where a message is used ends, and no entry of it ends later."""
        index = index_of(random_schedule(seed))
        blocking, drawn = simulate(index), simulate(index, blocking=False)

        assert () == blocking.waits == drawn.waits
        assert blocking.finish.keys() == drawn.finish.keys()
        assert all(drawn.finish[entry] <= blocking.finish[entry] for entry in drawn.finish)

    def test_receives_lie_where_they_arrive(self) -> None:
        """A receive that was posted early is drawn when its message comes."""
        rows = [["0F0", "0F1", "0SEND_F0", "0SEND_F1"], ["1RECV_F0", "1RECV_F1", "1F0", "1F1"]]
        entries = {str(c.action): c for c in layout(from_actions(rows)).entries}

        assert (2, 2, 2, 3) == tuple(
            entries[c].start for c in ("1RECV_F0", "1RECV_F1", "1F0", "1F1")
        )

    def test_backward_takes_two(self) -> None:
        """B takes as long as I and W."""
        entries = {str(c.action): c.length for c in layout(read_fixture(LOOP_COMMS)).entries}

        assert (1, 2, 0) == (entries["0F0"], entries["0B0"], entries["0SEND_F0"])

    def test_deadlock_marks_what_did_not_run(self) -> None:
        """Behind the stop nothing ran."""
        schedule, found = deadlock()
        entries = [c for c in layout(schedule).entries if c.rank == found.rank]

        assert [c.step < (found.step or 0) for c in entries] == [c.ran for c in entries]


class TestTrace:
    def test_every_action_is_a_slice_of_its_rank(self) -> None:
        """Every entry is a slice of its rank's process, with its place as arguments."""
        schedule = read_fixture(ZBV_COMMS)
        events = trace(schedule)["traceEvents"]
        slices = [e for e in events if e["ph"] == "X"]

        assert schedule.num_actions == len(slices)
        assert {0, 1} == {e["pid"] for e in slices}
        one = next(e for e in slices if e["name"] == "2I3")
        assert (1, 2, 3, "dgrad") == (
            one["pid"],
            one["args"]["stage"],
            one["args"]["microbatch"],
            one["cat"],
        )
        assert all(e["dur"] > 0 for e in slices)

    def test_flows_join_messages(self) -> None:
        """Each send has an arrow to its receive on the other rank."""
        events = trace(read_fixture(ZBV_COMMS))["traceEvents"]
        starts = {e["id"]: e for e in events if e["ph"] == "s"}
        ends = {e["id"]: e for e in events if e["ph"] == "f"}

        assert 16 == len(starts)
        assert starts.keys() == ends.keys()
        for number, start in starts.items():
            assert start["pid"] != ends[number]["pid"]
            assert start["ts"] <= ends[number]["ts"]

    def test_only_the_refused_slice_carries_the_clause(self, mismatch: Finding) -> None:
        """The refused slice and an instant event carry the clause, and nothing else does."""
        events = trace(read_fixture(ZBV), mismatch)["traceEvents"]
        marked = [e for e in events if "refused" in e["args"]]
        instants = [e for e in events if e["ph"] == "i"]

        assert [("1W2", mismatch.clause)] == [(e["name"], e["args"]["refused"]) for e in marked]
        assert ["refused: ownership.wrong-key"] == [e["name"] for e in instants]
        assert mismatch.message == instants[0]["args"]["message"]

    def test_processes_and_threads_are_named(self) -> None:
        """Processes and threads are named."""
        events = trace(read_fixture(ZBV))["traceEvents"]
        names = [e["args"]["name"] for e in events if e["ph"] == "M"]

        assert "rank 0 (stage 0, 3)" in names
        assert "messages" in names

    def test_what_a_deadlock_keeps_from_running_is_marked(self) -> None:
        """What a deadlock keeps from running is marked."""
        schedule, found = deadlock()
        events = trace(schedule, found)["traceEvents"]

        assert any(e.get("args", {}).get("ran") is False for e in events)

    def test_the_text_is_the_object(self) -> None:
        """The text is the object."""
        schedule = read_fixture(ZBV)

        assert trace(schedule) == json.loads(trace_json(schedule))
