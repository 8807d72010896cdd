"""
The reported cause of a stop names a rank that the model of ranks allows, even if ranks report less
than they know.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.ranks.causes import Cause, Verdicts
from qeffect.gpu_runtime.ranks.channels import ChannelEnds, Message
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.schedule.actions import SENDS
from qeffect.verification.ranks.launches import LAUNCHES
from qeffect.verification.ranks.protocol import TRANSITIONS
from qeffect.verification.ranks.replayed_state import ReplayedState
from tests.ranks import bodies as stop_bodies
from tests.ranks import cause_bodies as bodies
from tests.ranks.ranks import launch

WORLD = MESSAGES = 3
TABLE = Job(schedule="1f1b", pp=WORLD, vpp=1, microbatches=MESSAGES).table()
CHANNELS = [ChannelEnds(*ends) for ends in ((0, 1), (1, 2), (1, 0), (2, 1))]
LOSSES = ("late", "ended", "lost")
#: What a rank may publish: a kind, then what shows in its messages or the rank whose runs differ.
REASONS = [
    None,
    *product(("refused", "raised", "disagreed", *LOSSES), ("",)),
    *product(("disagreed", *LOSSES), ("exchanged",)),
    *product(LOSSES, ("dropped",)),
    *(("differs", rank) for rank in range(WORLD)),
]


def posted(rank: int, what: Any) -> tuple[int, dict[str, list[int]]]:
    """How many actions of its row a rank passed, and the messages that it posted."""
    found: dict[str, list[int]] = {}
    for ends in CHANNELS:
        if rank in ends:
            stage, gradient = ends.source, ends.to < ends.source
            found[str(ends).replace(" to ", ">")] = [
                Message(stage, m, gradient).number for m in range(MESSAGES)
            ]
    for name, numbers in found.items():
        if name.startswith(str(rank)):
            if what == "exchanged":
                numbers.reverse()
            elif what == "dropped":
                numbers.clear()
    return len(TABLE.atoms[rank]), found


def verdict(rank: int, reason: tuple[str, Any]) -> dict[str, Any]:
    """What a rank publishes for a reason."""
    kind, what = reason
    passed, messages = posted(rank, what)
    lost = kind in LOSSES
    differ = [{"rank": what, "stage": what, "name": "a", "count": 1}] if kind == "differs" else []
    return {
        "kind": kind, "epoch": 4, "stage": None, "action": "commit", "clause": None,
        "text": f"the reason of rank {rank}", "peer": -1 if lost else None,
        "awaits": "commit" if lost else None, "passed": passed, "differ": differ,
        "posted": messages, "recoverable": True, "row": rank,
    }  # fmt: skip


def allowed(said: dict[int, dict[str, Any]], cause: Cause) -> None:
    """The model's transitions that choose a cause take this one, after a step or a launch."""
    st: Any = ReplayedState(WORLD, {})
    for rank in range(WORLD):
        st.life[rank] = st.round[rank] = st.up[rank] = 1
        if rank in said:
            kind = said[rank]["kind"]
            st.said[rank] = st.cut[rank] = 1
            st.lost[rank] = kind in LOSSES
            st.read_no[rank] = kind in ("disagreed", "differs")
    for choose in (TRANSITIONS["decide"], LAUNCHES["choose_cause"]):
        mark = st.mark()
        choose.run(st, min(said), cause.rank)
        st.back(mark)


def published() -> Iterator[dict[int, dict[str, Any]]]:
    """Every combination of reasons; at least the rank that chooses has published one."""
    for reasons in product(REASONS, repeat=WORLD):
        said = {r: verdict(r, reason) for r, reason in enumerate(reasons) if reason is not None}
        if said:
            yield said


def test_the_model_allows_every_cause_that_ranks_choose() -> None:
    """Three ranks, each with any reason or none."""
    assert any(atom.kind in SENDS for atom in TABLE.atoms[0])
    kinds = set()
    for said in published():
        cause = Verdicts(said, WORLD, CHANNELS, TABLE).cause(4)
        kinds.add(cause.kind)
        try:
            allowed(said, cause)
        except Exception as error:
            raise AssertionError((cause.text, {r: v["kind"] for r, v in said.items()})) from error
    assert kinds == {
        *("refused", "raised", "differs", "dropped", "disagreed", "gone", "late", "ended", "lost")
    }


def test_a_rank_that_the_launcher_ended_is_not_named_by_a_rank_that_disagreed(
    tmp_path: Path,
) -> None:
    """Rank 0 sent the wrong message, but only rank 1 says that messages differ."""
    job = Job(schedule="zbv", pp=2, microbatches=4)
    said = launch(2, tmp_path, bodies.ended_before_it_disagrees, job)
    assert said.codes == [0, 0]
    cause = said.words[0]["cause"]
    assert said.words[1]["cause"] == cause
    assert (cause["kind"], cause["rank"], cause["action"]) == ("disagreed", 1, "commit")
    assert "channel from rank 0 to rank 1: the sender posted 0SEND_F1" in cause["text"]
    assert not cause["recoverable"]


def test_a_reason_may_be_published_and_not_logged(tmp_path: Path) -> None:
    """Both ranks find that messages differ; rank 0 is killed before it logs that it said so."""
    job = Job(schedule="zbv", pp=2, microbatches=4)
    said = launch(2, tmp_path, stop_bodies.exchange, job, "0SEND_F0", "0SEND_F1", True)
    assert said.words[1]["cause"]["rank"] == 0
    log = said.logs[0]
    lines = log.read_text().splitlines()
    stop = next(n for n, line in enumerate(lines) if json.loads(line).get("event") == "stop")
    for kept, code in ((stop + 1, 0), (stop, 1)):
        log.write_text("\n".join(lines[:kept]) + "\n")
        assert code == main(["replay", "--quiet", *map(str, said.logs)])


@pytest.mark.ci
def test_a_rank_that_was_killed_before_it_spoke_is_not_named(tmp_path: Path) -> None:
    """The two runs of rank 1 differ. Rank 0 reads this in the votes, and is the only rank that
    reports it."""
    job = Job(schedule="zbv", pp=2, microbatches=2)
    said = launch(2, tmp_path, bodies.killed_before_it_differs, job, 4)
    assert said.codes == [0, -9]
    cause = said.words[0]
    assert (cause["kind"], cause["rank"], cause["stage"]) == ("differs", 0, None)
    assert [one["rank"] for one in cause["differ"]] == [1]
    assert "two runs of the step differ: rank 1 has 1 difference" in cause["text"]
    assert not cause["recoverable"]
