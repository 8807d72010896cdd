"""
Rank logs in several files: all files together contain what one file contains, and the newest files
alone can be checked too.

The logs come from real runs and are written again with a rotation. A forged log has one edit, and
digests that match the edit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from qeffect.gpu_runtime.ranks.job import Job
from qeffect.log.beside import compare_beside
from qeffect.log.checker import LogError
from qeffect.log.format import DIGEST_BYTES, compact
from qeffect.log.rank_log import RankLines, RankLog
from qeffect.log.rank_series import joined
from qeffect.log.recorder import seal
from qeffect.log.rotation import Rotation
from qeffect.spec.rank_log import RANK_HEADER
from qeffect.verification.ranks.replay import replay_ranks
from tests.ranks import bodies, recorded_bodies
from tests.ranks.ranks import launch
from tests.ranks.test_rank_logs import LIMITS, Lines, at, lines_of
from tests.training import bodies as training

pytestmark = pytest.mark.ci

ZBV = Job(schedule="zbv", pp=2, microbatches=2)
#: Edits by what they forge: the run, the edit of the newest file's lines by rank, the clause.
Forgery = tuple[str, Callable[[list[Lines]], None], str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Logs of both ranks: guarded steps with a save; launches with a stop and what went on."""
    folder = tmp_path_factory.mktemp("runs")
    places = [folder / name for name in ("saved", "stopped", "launched")]
    for place in places:
        place.mkdir()
    options = {"until": 5, "save_at": (2, 4)}
    saved = launch(2, places[0], training.started, ZBV, str(folder / "checkpoints"), options)
    stopped = launch(2, places[1], bodies.recovering, ZBV, [(1, ("raising", "2W1"))], LIMITS)
    faults = [(4, 0, "miscounted", "")]
    launched = launch(2, places[2], recorded_bodies.recovering, ZBV, 7, {}, faults)
    return {"saved": saved.logs, "stopped": stopped.logs[:2], "launched": launched.logs}


def rotated(logs: Sequence[Path], folder: Path, steps: int, keep: int = 0) -> list[list[Path]]:
    """The files of each log, written again with a rotation; oldest first."""
    folder.mkdir(exist_ok=True)
    found = []
    for path in logs:
        header, *events = lines_of(path)
        rank = header["rank"]
        given = {name: header[name] for name in RANK_HEADER if name != "began"}
        log = RankLog(Rotation(folder / f"{rank}.ranks.jsonl", steps, keep), **given)
        for event in events:
            fields = {k: v for k, v in event.items() if k not in ("seq", "event", "digest")}
            log(event["event"], **fields)
        assert log._file is not None
        log._file.close()  # some runs were killed, and their logs have no last event
        found.append(sorted(folder.glob(f"{rank}.ranks*"), key=lambda p: (len(p.name), p.name)))
    return found


def sealed(path: Path, lines: Lines) -> None:
    """Write a file with digests that fit its lines."""
    chain = blake2b(digest_size=DIGEST_BYTES)
    bodies = [{k: v for k, v in line.items() if k != "digest"} for line in lines]
    for number, body in enumerate(bodies[1:]):
        body["seq"] = lines[0].get("continues", {"events": 0})["events"] + 1 + number
    path.write_text("".join(seal(compact(body)[:-1], chain) for body in bodies))


@pytest.mark.parametrize(
    ("run", "steps"),
    [("saved", 1), ("saved", 2), ("stopped", 1), ("launched", 1), ("launched", 3)],
)
def test_all_files_tell_what_one_file_tells(
    run: str, steps: int, runs: dict[str, list[Path]], tmp_path: Path
) -> None:
    files = rotated(runs[run], tmp_path, steps)
    paths = [path for own in files for path in own]

    assert min(map(len, files)) > 1
    assert replay_ranks(paths[::-1]).asdict() == replay_ranks(runs[run]).asdict()
    for log, whole in zip(joined(paths), map(RankLines.read, runs[run]), strict=True):
        assert [e["event"] for e in log.events] == [e["event"] for e in whole.events]


@pytest.mark.parametrize(("run", "epochs"), [("saved", range(6)), ("launched", range(9))])
def test_the_newest_files_are_replayed_from_any_place(
    run: str, epochs: range, runs: dict[str, list[Path]], tmp_path: Path
) -> None:
    """However many of the oldest files are gone."""
    files = rotated(runs[run], tmp_path, 1)
    whole = replay_ranks(runs[run])
    left = []
    for gone in range(1, min(map(len, files))):
        report = replay_ranks([path for own in files for path in own[gone:]])
        assert (report.clause, report.attempts >= 1) == (None, True), report.summary()
        assert report.trusted_epoch in epochs
        assert "taken on trust" in report.summary()
        left.append(report.commits)
    assert left == sorted(left, reverse=True)
    assert left[0] in (whole.commits - 2, whole.commits - 1)


def test_old_files_are_removed_when_all_ranks_have_newer_ones(
    runs: dict[str, list[Path]], tmp_path: Path
) -> None:
    """Wherever a rank was killed, the files that stay have a place in common."""
    whole = [lines_of(path) for path in runs["launched"]]
    commits = [number for number, line in enumerate(whole[0]) if line.get("event") == "commit"]
    for place in commits[2:]:
        folder = tmp_path / str(place)
        folder.mkdir()
        cut = []
        # The last line of the other rank without which rank 0 could not have committed.
        epoch = whole[0][place]["epoch"]
        other = [
            number
            for number, line in enumerate(whole[1])
            if line.get("event") in ("launch", "consent") and line["epoch"] == epoch - 1
        ][-1]
        for rank, end in ((0, place), (1, other)):
            cut.append(folder / f"{rank}.cut")
            sealed(cut[-1], whole[rank][: end + 1])
        files = rotated(cut, folder / "files", 1, keep=1)
        assert max(map(len, files)) <= 5
        assert not files[0][0].name.endswith("0.ranks.jsonl")
        report = replay_ranks([path for own in files for path in own])
        assert report.trusted_epoch is not None


def test_a_killed_rank_lets_the_other_begin_earlier(
    runs: dict[str, list[Path]], tmp_path: Path
) -> None:
    """Rank 1 has fewer files left; what rank 0 logged before their beginning is not replayed."""
    mine, other = rotated(runs["saved"], tmp_path, 1)
    report = replay_ranks([*mine[1:], *other[3:]])

    assert (report.clause, report.trusted_epoch) == (None, 3)
    with pytest.raises(LogError, match="expected a commit of this or a later epoch"):
        replay_ranks([*mine[:3], *other[4:]])


def test_newest_files_are_compared_with_the_event_log_beside_them(
    runs: dict[str, list[Path]], tmp_path: Path
) -> None:
    """Whose beginning is there; an event log that tells of another commit is refused."""
    files = rotated(runs["saved"], tmp_path, 1)
    for rank, path in enumerate(runs["saved"]):
        events = path.with_name(path.name.replace(".ranks.", ".events."))
        assert compare_beside([[events]], files[rank][3:]) is None
        lines = lines_of(files[rank][3])
        lines[at(lines, "commit")]["epoch"] += 1
        sealed(files[rank][3], lines)
        unlike = compare_beside([[events]], files[rank][3:4])
        assert unlike is not None
        assert (unlike.rank, unlike.clause) == (rank, "epoch.wrong-epoch")


def continued(rank: int, **fields: Any) -> Callable[[list[Lines]], None]:
    """The newest file of a rank says something else of its beginning."""

    def edit(logs: list[Lines]) -> None:
        continues = logs[rank][0]["continues"]
        assert all(continues[name] != value for name, value in fields.items())
        continues.update(fields)

    return edit


def without(rank: int, event: str, number: int = 0) -> Callable[[list[Lines]], None]:
    def edit(logs: list[Lines]) -> None:
        del logs[rank][at(logs[rank], event, number)]

    return edit


def earlier(logs: list[Lines]) -> None:
    """Both ranks claim an earlier beginning, and so a commit that no line tells."""
    for lines in logs:
        lines[0]["continues"]["epoch"] -= 1


def exchanged(logs: list[Lines]) -> None:
    """Rank 0 launches with other sends than rank 1 receives; the capture is in a missing file."""
    [messages] = logs[0][at(logs[0], "order")]["messages"]
    messages[1] += 1


FORGED: dict[str, Forgery] = {
    "a beginning in an earlier epoch": ("saved", earlier, "ranks.as-recorded"),
    "a later beginning of one rank": ("saved", continued(1, epoch=3), "ranks.as-recorded"),
    "a commit without a consent": ("saved", without(1, "consent"), "ranks.consent-of-all"),
    "a part of a checkpoint that nobody wrote": (
        "saved",
        without(1, "write_shard", -1),
        "ranks.part-of-this-epoch",
    ),
    "a send that is missing": ("saved", without(0, "post_send"), "ranks.order"),
    "launches on one rank alone": (
        "launched",
        continued(1, launches=False),
        "ranks.as-recorded",
    ),
    "launches that no rank captured": (
        "saved",
        lambda logs: [continued(rank, launches=True)(logs) for rank in (0, 1)],
        "ranks.as-recorded",
    ),
    "a launch that is missing": ("launched", without(0, "launch"), "ranks.order"),
    "messages exchanged in a launch": ("launched", exchanged, "ranks.as-recorded"),
    "votes of the launch under way that nobody read": (
        "launched",
        without(1, "votes"),
        "ranks.votes-first",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_log_is_refused(name: str, runs: dict[str, list[Path]], tmp_path: Path) -> None:
    run, edit, clause = FORGED[name]
    gone = 2
    files = [own[gone:] for own in rotated(runs[run], tmp_path, 2 if run == "launched" else 1)]
    files = [own[:1] for own in files] if run == "saved" else files
    logs = [lines_of(own[0]) for own in files]
    edit(logs)
    for own, lines in zip(files, logs, strict=True):
        sealed(own[0], lines)
    report = replay_ranks([own[0] for own in files])

    assert clause == report.clause, report.summary()
    assert Path(report.log or "") in [own[0] for own in files]
    line = json.loads(Path(report.log or "").read_text().splitlines()[(report.line or 0) - 1])
    assert line.get("seq", report.step) == report.step


def test_a_file_between_two_others_is_asked_for(
    runs: dict[str, list[Path]], tmp_path: Path
) -> None:
    mine, other = rotated(runs["saved"], tmp_path, 1)
    with pytest.raises(LogError, match=r"file 2 is missing between .*00001.* and .*00003"):
        replay_ranks([*mine[:2], *mine[3:], *other])


def test_a_file_that_continues_another_log_is_unusable(
    runs: dict[str, list[Path]], tmp_path: Path
) -> None:
    mine, other = rotated(runs["saved"], tmp_path, 1)
    first, *rest = lines_of(mine[2])
    first["continues"]["after"] = "0" * 16
    sealed(mine[2], [first, *rest])
    with pytest.raises(LogError, match=r"00002.* does not continue .*00001"):
        replay_ranks([*mine, *other])


@pytest.mark.parametrize(
    ("field", "value"), [("part", -1), ("after", "x"), ("again", True), ("launches", 0)]
)
def test_a_malformed_beginning_is_unusable(
    field: str, value: Any, runs: dict[str, list[Path]], tmp_path: Path
) -> None:
    [mine, _] = rotated(runs["saved"], tmp_path, 1)
    first, *rest = lines_of(mine[1])
    first["continues"][field] = value
    sealed(mine[1], [first, *rest])
    with pytest.raises(LogError, match=f"line 1: {field} is malformed"):
        RankLines.read(mine[1])
