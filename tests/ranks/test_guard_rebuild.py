"""
`rebuild()` of a guarded schedule: either all ranks restart one epoch together, or no rank does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from qeffect.guards.meeting import MeetingError, meet
from tests.profiles import few
from tests.ranks import guard_bodies as bodies
from tests.ranks.ranks import launch

ZBV, IZB = "ScheduleZBVZeroBubble", "ScheduleInterleavedZeroBubble"


@pytest.mark.parametrize("name", [ZBV, IZB])
def test_all_ranks_rebuild(name: str, tmp_path: Path) -> None:
    """A rank alone ends within its limit; all together run the step again with its own bits."""
    said = launch(2, tmp_path, bodies.rebuilt, name).words

    assert said[0]["ended"] in ("epoch.incomplete", "order.incomplete")
    assert "passed" == said[1]["ended"]
    for rank, words in said.items():
        (error,) = words["errors"]
        assert "rank 0 waited 1 s for ranks [1]" in error, rank
        assert "every rank of the pipeline has to call rebuild" in error
        assert words["seconds"] < 10
        assert [True] * 3 == words["same"]
    # Rank 1 had committed the step that rank 0 refused, and restarts it too.
    assert [1, 1, 3] == said[0]["epochs"]
    assert [2, 1, 3] == said[1]["epochs"]


@pytest.mark.parametrize("name", few([ZBV, "Schedule1F1B"], (0,)))
def test_a_step_that_was_cut_between_messages(name: str, tmp_path: Path) -> None:
    """Nobody can go on from there: every rank gets the same error, none hangs."""
    said = launch(2, tmp_path, bodies.cut_between_messages, name).words

    assert "ownership.key-live" == said[0]["ended"]
    assert said[0]["error"] == said[1]["error"]
    assert said[0]["error"].startswith("rebuild: the step ended on rank 0 after ")
    assert said[0]["error"].endswith("relaunch the ranks from their checkpoint")


def _met(*calls: Callable[[], Any]) -> list[Any]:
    """What each rank's call returned or raised, on threads of one process."""
    found: list[Any] = [None] * len(calls)

    def call(number: int) -> None:
        try:
            found[number] = calls[number]()
        except MeetingError as error:
            found[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_a_meeting_is_all_or_none() -> None:
    """Three ranks meet; of two meetings without a third rank nobody goes on, also not later."""
    store = dist.HashStore()
    ranks = [3, 5, 8]

    def rank(n: int, place: str) -> Callable[[], Any]:
        return lambda: meet(store, place, n, ranks, f"word of {n}", timeout_s=0.3)

    words = {n: f"word of {n}" for n in ranks}
    assert [words] * 3 == _met(*(rank(n, "first") for n in ranks))
    two = _met(rank(3, "second"), rank(8, "second"))
    late = _met(rank(5, "second"))

    assert all(isinstance(error, MeetingError) for error in (*two, *late))
    assert {str(error) for error in (*two, *late)} <= {
        "rank 3 waited 0.3 s for ranks [5]",
        "rank 8 waited 0.3 s for ranks [5]",
    }
    assert 1 == len({str(error) for error in (*two, *late)})


def test_a_store_that_is_gone() -> None:
    """A store that fails at once is named, and is not taken for a late rank."""

    class Gone(dist.HashStore):
        def wait(self, *_: Any) -> None:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(MeetingError, match="does not answer: Connection reset by peer"):
        meet(Gone(), "place", 0, [0, 1], "word", timeout_s=20)
