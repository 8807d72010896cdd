"""Schedule tables: entries and the actions that they describe."""

from __future__ import annotations

import pytest

from qeffect.schedule.actions import Action, Kind, Schedule, ScheduleError, shorten
from qeffect.schedule.infer import from_actions, schedule_of

ENTRIES = (
    "0F0",
    "12I345",
    "3W7",
    "1B2",
    "0SEND_F1",
    "1RECV_F1",
    "2SEND_B0",
    "3RECV_B9",
    "0UNSHARD",
    "0RESHARD",
    "7REDUCE_GRAD",
    "0WAIT_SEND_F0",
    "12WAIT_SEND_B345",
    "7WAIT_REDUCE_GRAD",
    "(0F3;3B1)OVERLAP_F_B",
    "(0F3;3I1;3W1)OVERLAP_F_B",
)

NOT_ENTRIES = (
    "0F0xyz",
    "x0F0",
    "0F",
    "F0",
    "0",
    "0f0",
    "0X0",
    "0F-1",
    "-1F0",
    "00F0",
    "0F01",
    "0F 0",
    "0F0 0F1",
    "0F0;0F1",
    "0UNSHARD3",
    "0SEND_F",
    "0OVERLAP_F_B",
    "0WAIT_SEND_F",
    "0WAIT_SEND0",
    "0WAIT_REDUCE_GRAD0",
    "0WAIT_RECV_F0",
    "(0F3;0WAIT_SEND_F1)OVERLAP_F_B",
    "\u0663F0",
    "0F1000000",
    "(0F3;3B1)",
    "(0F3)OVERLAP_F_B",
    "()OVERLAP_F_B",
    "(0F3;)OVERLAP_F_B",
    "(0F3;3SEND_B1)OVERLAP_F_B",
    "(0F3;(1F1;2B2)OVERLAP_F_B)OVERLAP_F_B",
    "(0F3;3B1)OVERLAP_F_Bx",
)


class TestParse:
    @pytest.mark.parametrize("entry", ENTRIES)
    def test_what_is_read_prints_as_it_stood(self, entry: str) -> None:
        """An entry that is read prints as it stood."""
        assert entry == str(Action.parse(entry))

    @pytest.mark.parametrize("entry", NOT_ENTRIES)
    def test_anything_but_one_action_is_refused_with_its_text(self, entry: str) -> None:
        """What is not exactly one action is refused, with the entry in the error."""
        with pytest.raises(ScheduleError) as caught:
            Action.parse(entry)

        assert caught.value.entry is not None
        assert caught.value.entry in entry
        assert "\n" not in str(caught.value)

    def test_blanks_around_an_action_do_not_matter(self) -> None:
        """Blanks around an entry do not matter, as in torch."""
        assert Action(Kind.FORWARD, 1, 2) == Action.parse("  1F2 ")

    def test_long_garbage_is_shortened(self) -> None:
        """An error about a huge entry stays one short line."""
        with pytest.raises(ScheduleError) as caught:
            Action.parse("A" * 100_000)

        assert len(str(caught.value)) < 300

    def test_torch_is_laxer(self) -> None:
        """torch reads an entry with a tail as if the tail were not there."""
        from torch.distributed.pipelining.schedules import _Action

        assert "0F0" == str(_Action.from_str("0F0xyz"))


class TestAtoms:
    def test_backward_is_two(self) -> None:
        """B is I then W."""
        atoms = [(a.kind, a.stage, a.microbatch) for a in Action.parse("2B3").atoms(5)]

        assert [(Kind.DGRAD, 2, 3), (Kind.WGRAD, 2, 3)] == atoms

    def test_overlap_is_flat(self) -> None:
        """An overlap is its parts in order, all at its own step and under its own entry."""
        action = Action.parse("(0F3;3B1)OVERLAP_F_B")
        atoms = list(action.atoms(7))

        assert ["F", "I", "W"] == [a.kind.value for a in atoms]
        assert {7} == {a.step for a in atoms}
        assert {"(0F3;3B1)OVERLAP_F_B"} == {str(a.action) for a in atoms}


class TestInference:
    def test_stages_and_microbatches_come_from_the_table(self) -> None:
        """Stages, microbatches and homes come from the table."""
        schedule = from_actions(
            [["0F0", "0F1", "", "0B0", "0B1"], [None, "1F0", "1F1", "1B0", "1B1"]]
        )

        assert (2, 2, {0: 0, 1: 1}) == (
            schedule.num_stages,
            schedule.num_microbatches,
            schedule.stage_to_rank,
        )
        assert schedule.complete
        assert schedule.rows[1][0] is None
        assert (5, 8) == (schedule.num_steps, schedule.num_actions)

    def test_one_wrong_microbatch_does_not_move_the_count(self) -> None:
        """A single absurd microbatch is an outlier, not a new number of microbatches."""
        schedule = from_actions(
            [["0F0", "0F1", "0F999", "0B0", "0B1", "0B2"], ["1F0", "1F1", "1F2"]]
        )

        assert 3 == schedule.num_microbatches

    def test_one_wrong_stage_does_not_move_the_count(self) -> None:
        """A single absurd stage is an outlier, not a new number of stages."""
        row = ["0F0", "0F1", "0F2", "0B0", "0B1", "99B2"]
        schedule = from_actions([row, ["1F0", "1F1", "1F2", "1B0", "1B1", "1B2"]])

        assert 2 == schedule.num_stages
        assert 99 not in schedule.stage_to_rank

    def test_home_is_where_most_actions_are(self) -> None:
        """One action on the wrong rank does not move its stage there."""
        schedule = from_actions([["0F0", "1B1", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0"]])

        assert {0: 0, 1: 1} == schedule.stage_to_rank

    def test_single_row_of_a_larger_pipeline(self) -> None:
        """A row whose stages are not 0, 1, ... is one rank, and its neighbours are not checked."""
        schedule = from_actions(["1F0", "2F0", "2B0", "1B0"])

        assert not schedule.complete
        assert 3 == schedule.num_stages
        assert (1, 2) == schedule.stages_of(0)

    def test_stated_counts_win(self) -> None:
        """What the caller states is not inferred."""
        schedule = from_actions(
            [["0F0", "0B0"]], num_stages=3, num_microbatches=5, stage_to_rank={0: 0}, complete=True
        )

        assert (3, 5, True) == (schedule.num_stages, schedule.num_microbatches, schedule.complete)


class TestFromActions:
    def test_every_way_to_write_a_entry(self) -> None:
        """Texts, tuples, actions, torch's actions and idle entries mean the same."""
        from torch.distributed.pipelining.schedules import _Action, _ComputationType

        rows = [["0F0", (0, "F", 1), Action.parse("0F2"), None, ""]]
        rows[0].append(_Action(0, _ComputationType.FULL_BACKWARD, 0))
        schedule = from_actions(rows)

        assert ["0F0", "0F1", "0F2", "None", "None", "0B0"] == [str(a) for a in schedule.rows[0]]

    def test_a_mapping_is_read_in_the_order_of_ranks(self) -> None:
        """A mapping from rank to row is read in rank order."""
        schedule = from_actions({1: ["1F0", "1B0"], 0: ["0F0", "0B0"]})

        assert "0F0" == str(schedule.rows[0][0])

    @pytest.mark.parametrize(
        ("rows", "said"),
        [
            ([["0F0", "what"]], "rank 0, step 1: entry 'what' is not an action"),
            ({1: ["0F0"]}, "ranks must be 0, 1, 2"),
            ([["0F0"], "1F0"], "rank 1: .*expected a list of entries"),
            ([["0F0"], 3], "rank 1: .*expected a list of entries, found 3"),
            ([], "nothing is computed"),
            ([[None, ""]], "nothing is computed"),
            ([["0UNSHARD"]], "nothing is computed"),
        ],
    )
    def test_what_cannot_be_a_schedule_is_refused_with_its_place(
        self, rows: object, said: str
    ) -> None:
        """What cannot be a schedule is refused with its place."""
        with pytest.raises(ScheduleError, match=said):
            from_actions(rows)  # type: ignore[arg-type]

    def test_more_than_the_limit_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """More entries than the limit are refused."""
        monkeypatch.setattr("qeffect.schedule.infer.MAX_ENTRIES", 3)

        with pytest.raises(ScheduleError, match="1 ranks with 4 entries are too many"):
            from_actions(["0F0", "0F1", "0B0", "0B1"])

    @pytest.mark.parametrize("microbatches", [0, -1, 10**9])
    def test_a_stated_number_of_microbatches_must_be_one(self, microbatches: int) -> None:
        """A stated number of microbatches must be one."""
        with pytest.raises(ScheduleError, match="expected between 1 and"):
            from_actions([["0F0", "0B0"]], num_microbatches=microbatches)

    @pytest.mark.parametrize("homes", [{0: 1}, {5: 0}, {-1: 0}])
    def test_stage_map_within_range(self, homes: dict[int, int]) -> None:
        """A stated stage map names stages and ranks that exist."""
        with pytest.raises(ScheduleError, match="the stage map puts stage"):
            schedule_of([[Action.parse("0F0")]], source="t", stage_to_rank=homes)


class TestSchedule:
    def test_a_place_outside_a_row_is_idle(self) -> None:
        """A place outside a row is idle."""
        schedule: Schedule = from_actions([["0F0", "0B0"]])

        assert "0B0" == str(schedule.entry(0, 1))
        assert schedule.entry(0, 2) is None
        assert schedule.entry(0, -1) is None

    def test_messages_or_sharding_make_a_table_one_of_communication(self) -> None:
        """Messages or sharding make a table one with communication; a reduction does not."""
        assert "compute_only" == from_actions([["0F0", "0B0", "0REDUCE_GRAD"]]).format
        assert "compute_comms" == from_actions([["0UNSHARD", "0F0", "0B0"]]).format

    def test_short_texts_are_kept(self) -> None:
        """Short texts are kept."""
        assert "abc" == shorten("abc")
        assert 60 == len(shorten("a" * 61))
