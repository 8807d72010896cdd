"""CSV tables: both formats, every way in which a file can be unusable, and the shipped tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from qeffect.schedule import tables
from qeffect.schedule.actions import ScheduleError
from qeffect.schedule.ranks import check_ranks
from qeffect.schedule.tables import (
    fixture_names,
    parse_table,
    read_fixture,
    read_table,
    write_table,
)


class TestFormats:
    def test_a_compute_only_table_keeps_its_idle_places(self) -> None:
        """A compute-only table keeps its idle entries."""
        schedule = parse_table("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")

        assert "compute_only" == schedule.format
        assert schedule.rows[0][2] is None
        assert schedule.rows[1][0] is None

    def test_a_table_with_messages_is_told_apart_by_them(self) -> None:
        """A table with messages is recognized by these messages."""
        schedule = parse_table("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")

        assert "compute_comms" == schedule.format
        assert 8 == schedule.num_actions

    def test_the_semicolon_of_an_overlap_separates_no_columns(self) -> None:
        """An overlap is one entry; its semicolon separates no columns."""
        schedule = parse_table("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")

        assert 3 == len(schedule.rows[0])

    @pytest.mark.parametrize("newline", ["\n", "\r\n"])
    def test_newlines_and_last_line(self, newline: str) -> None:
        """Both kinds of newline are accepted, and blank lines at the end do not count as ranks."""
        text = newline.join(["0F0,0B0", "1F0,1B0", "", ""])

        assert 2 == parse_table(text).num_ranks

    def test_quotes_of_a_spreadsheet_are_taken_off(self) -> None:
        """A spreadsheet's quotes are CSV's business."""
        assert 1 == parse_table('"0F0","0B0"\n').num_microbatches


class TestRoundTrip:
    @pytest.mark.parametrize("name", fixture_names())
    def test_writing_a_shipped_table_gives_what_was_read(self, name: str) -> None:
        """Writing a shipped table gives what was read, and says its format and size."""
        schedule = read_fixture(name)
        again = parse_table(write_table(schedule))
        _, ranks, chunks, microbatches = name.split(".")[0].split("_")

        assert schedule.rows == again.rows
        assert ("compute_comms" if ".comms." in name else "compute_only") == schedule.format
        assert int(ranks[2:]) == schedule.num_ranks
        assert int(ranks[2:]) * int(chunks[3:]) == schedule.num_stages
        assert int(microbatches[1:]) == schedule.num_microbatches

    def test_a_rank_without_any_action_survives_being_written(self) -> None:
        """A rank without any entry survives being written."""
        schedule = parse_table("0F0,0B0\n,\n")

        assert 2 == parse_table(write_table(schedule)).num_ranks


class TestFixtures:
    def test_all_classes_are_there(self) -> None:
        """Every schedule class of torch has tables in both formats."""
        from qeffect.schedule.torch_tables import CLASSES

        names = fixture_names()
        for cls in CLASSES:
            assert any(n.startswith(f"{cls}_") and n.endswith(".compute.csv") for n in names)
            assert any(n.startswith(f"{cls}_") and n.endswith(".comms.csv") for n in names)

    def test_the_drawn_table_of_1f1b_is_refused_on_the_last_rank(self) -> None:
        """The table that torch draws of 1F1B is shipped apart, and refused on the last rank."""
        names = fixture_names(refused=True)
        found = check_ranks(read_fixture(names[0]))

        assert ("Schedule1F1B_pp4_vpp1_m8.drawn.csv",) == names
        assert not set(names) & set(fixture_names())
        assert ("schedule.microbatch-out-of-range", 3, 14) == (
            found[0].clause,
            found[0].rank,
            found[0].step,
        )

    def test_an_unknown_table_is_refused_with_the_known_ones(self) -> None:
        """An unknown table is refused with the list of known ones."""
        with pytest.raises(
            ScheduleError, match="no shipped table 'nope'; expected one of Schedule1F1B"
        ):
            read_fixture("nope")


class TestUnusable:
    @pytest.mark.parametrize(
        ("data", "said"),
        [
            (b"", "empty"),
            (b" \n\n", "empty"),
            (b"\x00\x01\x02", "binary data"),
            (b"0F0,\x00\n", "binary data"),
            (b"\xff\xfe0F0", "byte 0 is not UTF-8"),
            (b"\x89PNG\r\n\x1a\n", "byte 0 is not UTF-8"),
            (b"0F0,0B0xyz\n", "rank 0, step 1: entry '0B0xyz' is not an action"),
            (b"0F0\n1F0,hello\n", "rank 1, step 1: entry 'hello' is not an action"),
            (b"rank,step\n0F0,0B0\n", "rank 0, step 0: entry 'rank' is not an action"),
            (b"0F0,0B0\n\n1F0,1B0\n", "rank 1: .*blank line between ranks"),
            (b",,,\n,,\n", "nothing is computed"),
            (b'"0F0,0B0\n', "not a CSV table"),
            (b'"0F0"x,0B0\n', "not a CSV table"),
            (b'{"a": 1}', "is not an action"),
        ],
    )
    def test_unusable_contents_are_one_line(self, tmp_path: Path, data: bytes, said: str) -> None:
        """Unusable contents give one line that says what was expected or found."""
        path = tmp_path / "table.csv"
        path.write_bytes(data)

        with pytest.raises(ScheduleError, match=said) as caught:
            read_table(path)

        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400

    def test_place_is_kept(self) -> None:
        """The error carries rank, step and entry, not only their text."""
        with pytest.raises(ScheduleError) as caught:
            parse_table("0F0\n1F0,oops\n")

        assert (1, 1, "oops") == (caught.value.rank, caught.value.step, caught.value.entry)

    def test_byte_order_mark(self, tmp_path: Path) -> None:
        """A spreadsheet's byte order mark is not read as part of the first entry."""
        path = tmp_path / "table.csv"
        path.write_bytes(b"\xef\xbb\xbf0F0,0B0\n")

        assert 2 == read_table(path).num_actions

    def test_missing_and_directory(self, tmp_path: Path) -> None:
        """The message says why a path cannot be read."""
        with pytest.raises(ScheduleError, match=r"none\.csv: cannot be read: No such file"):
            read_table(tmp_path / "none.csv")
        with pytest.raises(ScheduleError, match="cannot be read: Is a directory"):
            read_table(str(tmp_path))
        with pytest.raises(ScheduleError, match=r"cannot be read: .*null"):
            read_table("a\0b")

    def test_a_file_above_the_limit_is_not_parsed(self, tmp_path: Path) -> None:
        """A file above the limit is refused without being parsed, and names the limit."""
        path = tmp_path / "huge.csv"
        with path.open("wb") as stream:
            stream.truncate(tables.MAX_BYTES + 1)

        with pytest.raises(ScheduleError, match="larger than the limit of 16 MiB"):
            read_table(path)

    def test_an_endless_file_is_read_up_to_the_limit(self) -> None:
        """A file without an end is read up to the limit only."""
        with pytest.raises(ScheduleError, match="larger than the limit of 16 MiB"):
            read_table("/dev/zero")

    def test_too_many_entries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A table above the limit of entries is refused while it is read."""
        monkeypatch.setattr(tables, "MAX_ENTRIES", 4)

        with pytest.raises(ScheduleError, match=r"more than the limits of .* ranks or 4 entries"):
            parse_table("0F0,0B0\n1F0,1B0\n2F0,2B0\n")

    def test_stated_microbatches_reach_the_schedule(self, tmp_path: Path) -> None:
        """What the caller states reaches the schedule."""
        path = tmp_path / "table.csv"
        path.write_text("0F0,0B0\n")
        schedule = read_table(path, num_microbatches=4, num_stages=2)

        assert (4, 2) == (schedule.num_microbatches, schedule.num_stages)
