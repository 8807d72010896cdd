"""
Transformer Engine's `_order` lists.
"""

from __future__ import annotations

import pytest

from qeffect.schedule.actions import ScheduleError
from qeffect.schedule.check import check
from qeffect.schedule.ranks import check_ranks
from qeffect.schedule.te_order import te_order

# Rank 1 of ZB-V at PP=2 with four microbatches: chunk 1 is stage 1, chunk 2 is stage 2.
ZBV_RANK_1 = "1,2,1,2,-2,-2.5,1,-1,-1.5,2,-2,-2.5,1,-1,-1.5,2,-2,-2.5,-1,-2,-1,-1.5,-2.5,-1.5"


def entries(order: str | list[float]) -> str:
    """The entries of an order list."""
    return " ".join(map(str, te_order(order).rows[0]))


class TestReading:
    def test_without_deferral_a_backward_is_whole(self) -> None:
        """Without deferred weight gradients a backward is B."""
        assert "0F0 0F1 0B0 0B1" == entries([1, 1, -1, -1])

    def test_with_deferral_a_backward_is_two_halves(self) -> None:
        """With deferred weight gradients a backward is I, and -chunk-0.5 is W."""
        assert "0F0 0F1 0I0 0I1 0W0 0W1" == entries([1, 1, -1, -1, -1.5, -1.5])

    def test_deferred_in_one_chunk_only(self) -> None:
        """Deferral is a property of the chunk."""
        assert "0F0 1F0 1B0 0I0 0W0" == entries([1, 2, -2, -1, -1.5])

    @pytest.mark.parametrize(
        "text", ["1,1,-1,-1", " [1, 1, -1, -1] ", "1 1 -1 -1", "1.0,1,-1.0,-1"]
    )
    def test_commas_blanks_brackets_and_floats_all_do(self, text: str) -> None:
        """Commas, blanks, brackets and floats all do."""
        assert "0F0 0F1 0B0 0B1" == entries(text)

    def test_is_one_rank(self) -> None:
        """What other ranks send is not in the list, so it is not missed."""
        schedule = te_order(ZBV_RANK_1)

        assert not schedule.complete
        assert (1, 2, 4) == (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches)
        assert () == check_ranks(schedule)

    def test_latest_pairing_fails_on_it(self) -> None:
        """Bound as Transformer Engine binds it, the order pairs one weight gradient wrongly."""
        found = check(te_order(ZBV_RANK_1), "latest").finding

        assert found is not None
        assert ("ownership.wrong-key", "0W2") == (found.clause, found.action)
        assert "0W2 presents the reference of 0I3 instead of 0I2" in found.message

    def test_wgrad_before_its_dgrad(self) -> None:
        """A list that defers a weight gradient before its input gradient is refused."""
        found = check_ranks(te_order("1,-1.5,-1"))

        assert ["schedule.wgrad-before-dgrad"] == [f.clause for f in found]


class TestUnusable:
    @pytest.mark.parametrize(
        ("order", "said"),
        [
            ("", "empty"),
            ("[]", "empty"),
            ("1,x,-1", "step 1: entry 'x' is not [+]chunk, -chunk"),
            ("1,0,-1", "step 1: entry '0' is not [+]chunk, -chunk"),
            ("1,nan", "entry 'nan'"),
            ("1,inf", "entry 'inf'"),
            ("1,-1.25", "entry '-1.25' is not [+]chunk, -chunk"),
            ("1.5,-1", "entry '1.5' is not [+]chunk, -chunk"),
            ("1,,-1", "step 1: entry '' is not [+]chunk, -chunk"),
            ("1,-0.5", "must name a chunk between 1 and"),
            ("99999,-99999", "must name a chunk between 1 and"),
            ("-1", "no forward entry"),
            ("1,1,-1", "chunk 1 has unequal numbers of entries: [+]1: 2, -1: 1"),
            ("1,-1,-1", "chunk 1 has unequal numbers of entries: [+]1: 1, -1: 2"),
            ("1,1,-1,-1,-1.5", "chunk 1 has unequal numbers of entries: [+]1: 2, -1.5: 1"),
            ("1,-1.5", "chunk 1 has no backward -1"),
            ("1,2,-1", "chunk 2 has no backward -2"),
            ("1,-1,-2", "chunk 2 has unequal numbers of entries: [+]2: 0, -2: 1"),
        ],
    )
    def test_an_unusable_list_names_the_entry_or_the_chunk(self, order: str, said: str) -> None:
        """An unusable list is one line that names the entry or the chunk."""
        with pytest.raises(ScheduleError, match=said) as caught:
            te_order(order)

        assert "\n" not in str(caught.value)

    def test_a_list_above_the_limit_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A list above the limit is refused."""
        monkeypatch.setattr("qeffect.schedule.te_order.MAX_ENTRIES", 3)

        with pytest.raises(ScheduleError, match="more than the limit of 3 entries"):
            te_order([1, 1, -1, -1])
