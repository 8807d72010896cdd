"""
Rank logs of launches with checkpoints and a stop among them, and logs that tell something else.

The logs are of real ranks, over the stand-in for a device's graphs (`tests.ranks.recorded`); a
forged log has one edit, and digests that fit the edit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from qeffect.gpu_runtime.ranks.job import Job
from qeffect.verification.ranks.replay import replay_ranks
from tests.ranks.ranks import launch
from tests.ranks.test_rank_logs import Edit, Lines, at, changed, dropped, lines_of, write
from tests.verification import launched_save_bodies

PIPE = Job(schedule="zbv", pp=2, microbatches=2)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """
    Launches that are saved in epochs 4 and 6, with a stop and a rebuild in place after the first
    save; then new processes that load the second checkpoint, launch, and save in epoch 9.
    """
    folder = tmp_path_factory.mktemp("saves")
    checkpoints = str(folder / "checkpoints")
    found = []
    for name, *plan in (("saved", 7, [4, 6], 4, False), ("resumed", 10, [9], -1, True)):
        place = folder / name
        place.mkdir()
        said = launch(2, place, launched_save_bodies.saving, PIPE, checkpoints, *plan)
        assert said.codes == [0, 0]
        found += said.logs
    return found


def unread(logs: list[Lines]) -> None:
    """Rank 0 leaves the launches without reading the votes of its last step."""
    leaves = at(logs[0], "leave")
    votes = [n for n, line in enumerate(logs[0][:leaves]) if line.get("event") == "votes"]
    del logs[0][votes[-1]]


def died_before_its_part(logs: list[Lines]) -> None:
    """Rank 1 was killed before its part of the last checkpoint, which rank 0 published."""
    del logs[3][at(logs[3], "write_shard") :]


def blamed_a_loser(logs: list[Lines]) -> None:
    """Both ranks name rank 1, which only lost its connection to the stopped rank 0."""
    own = logs[1]
    [no] = [n for n, line in enumerate(own) if any(line.get("votes", ()))]
    del own[no]
    own[at(own, "stop")].update(kind="lost", peer=0)
    for log in logs[:2]:
        log[at(log, "end")].update(cause=1, kind="lost")


FORGED: dict[str, tuple[Edit, str]] = {
    "a launch before the launches are resumed": (dropped(0, "resume", 0), "ranks.resumed-first"),
    "a part after votes that were not read": (unread, "ranks.votes-first"),
    "a part among launches": (dropped(0, "leave", 0), "ranks.as-recorded"),
    "a part that is missing": (dropped(1, "write_shard", 0), "ranks.part-of-this-epoch"),
    "a part of a rank that died before": (died_before_its_part, "ranks.part-of-this-epoch"),
    "a checkpoint under another epoch": (changed(0, "publish", 0, epoch=5), "ranks.as-recorded"),
    "a refusal of counts by a rank whose device voted yes": (
        changed(1, "stop", 0, kind="refused"),
        "ranks.order",
    ),
    "a cause that names a rank that lost a connection": (blamed_a_loser, "ranks.precedence"),
    "another cause on each rank": (changed(1, "end", 0, cause=1), "ranks.as-recorded"),
    "a rank that rebuilt without a cause": (dropped(1, "end", 0), "ranks.cause-first"),
    "connections that were cut before the reason": (dropped(0, "say", 0), "ranks.said-first"),
    "a start from a checkpoint that nobody saved": (
        changed(2, "load", 0, epoch=7),
        "ranks.as-recorded",
    ),
}


def replayed(folder: Path, logs: list[Lines]) -> tuple[str | None, int, str]:
    """The clause, the number of whole checkpoints, and the summary of a replay of some lines."""
    paths = [write(folder / f"{n}.jsonl", log) for n, log in enumerate(logs)]
    report = replay_ranks(paths)
    return report.clause, report.checkpoints, report.summary()


def test_saves_among_launches_a_rebuild_and_a_restart(logs: list[Path]) -> None:
    """The model accepts what the ranks did."""
    report = replay_ranks(logs)

    assert report.clause is None, report.summary()
    assert (3, 3, 2) == (report.attempts, report.checkpoints, report.stops)


def test_processes_that_died_after_their_parts(logs: list[Path], tmp_path: Path) -> None:
    """Both wrote their parts, and were killed before the checkpoint got its name."""
    lines = [lines_of(path) for path in logs[:2]]
    for log in lines:
        del log[at(log, "write_shard", 1) + 1 :]
    clause, checkpoints, summary = replayed(tmp_path, lines)

    assert (None, 1) == (clause, checkpoints), summary


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_log_is_refused(name: str, logs: list[Path], tmp_path: Path) -> None:
    """One edit, and the protocol takes no order of all events."""
    edit, clause = FORGED[name]
    lines = [lines_of(path) for path in logs]
    edit(lines)
    found, _, summary = replayed(tmp_path, lines)

    assert clause == found, summary
