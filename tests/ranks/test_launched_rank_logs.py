"""
The rank logs of steps that are one launch, and logs that describe something else.

The logs come from real ranks, over a stand-in for a device's graphs (`tests.ranks.recorded`). A
forged log has one edit, and digests that match the edit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from qeffect.gpu_runtime.ranks.job import Job
from qeffect.verification.ranks.replay import replay_ranks
from tests.ranks import recorded_bodies
from tests.ranks.ranks import launch
from tests.ranks.test_rank_logs import (
    Edit,
    Lines,
    at,
    before,
    changed,
    doubled,
    dropped,
    lines_of,
    write,
)

PIPE = Job(schedule="zbv", pp=2, microbatches=2)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Launches; a device of rank 0 that counted otherwise; a rebuild in place, and launches."""
    folder = tmp_path_factory.mktemp("launches")
    faults = [(4, 0, "miscounted", "")]
    said = launch(2, folder, recorded_bodies.recovering, PIPE, 7, {}, faults)
    assert said.codes == [0, 0]
    return said.logs


def without_a_capture(logs: list[Lines]) -> None:
    """Rank 1 never consents to the captured step."""
    del logs[1][at(logs[1], "consent", 1)]


def began_elsewhere(logs: list[Lines]) -> None:
    """Both ranks begin again behind an update that both devices skipped."""
    for log in logs:
        place = at(log, "report")
        log[place]["epoch"] += 1
        assert log[place + 1]["event"] == "rebuilt"
        log[place + 1]["epoch"] += 1


def said_yes(logs: list[Lines]) -> None:
    """Both hosts read a yes of the device that counted otherwise, and go on as they did."""
    for log in logs:
        [no] = [line for line in log if any(line.get("votes", ()))]
        no["votes"] = [0, 0]


def never_launched(logs: list[Lines]) -> None:
    """Rank 1 was killed before a launch; rank 0 went on, as though it had heard its yes."""
    del logs[1][at(logs[1], "launch", 2) :]


def killed(logs: list[Lines]) -> None:
    """Rank 0 was killed while its vote was under way: its own device has moved, the other not."""
    own, other = logs
    del own[at(own, "votes", 2) + 1 :]
    place = at(other, "votes", 2)
    other[place]["votes"] = [1, 0]
    del other[place + 1 : at(other, "stop")]
    other[at(other, "end")].update(cause=1, kind="disagreed")
    other[at(other, "report")]["epoch"] = 3
    del other[at(other, "report") + 1 :]


def rebuilt_apart(logs: list[Lines]) -> None:
    """As that, but rank 0 lives, and both begin again."""
    whole = [list(log) for log in logs]
    killed(logs)
    own = whole[0]
    stop, again = at(own, "stop"), at(own, "rebuilt")
    logs[0] += [dict(line) for line in own[stop : again + 1]]
    logs[0][at(logs[0], "stop")]["kind"] = "raised"
    logs[1].append(dict(own[again]))
    for log in logs:
        log[at(log, "end")].update(cause=0, kind="raised")


def saved_among(logs: list[Lines]) -> None:
    """Rank 1 saves while its last launch is under way."""
    logs[1].insert(at(logs[1], "leave"), {"seq": 0, "event": "write_shard", "epoch": 7})


def exchanged(logs: list[Lines], *, everywhere: bool = False) -> None:
    """Rank 0 captured two sends in the other order; so did rank 1 its receives, if everywhere."""
    first, second = [0, 0, False], [0, 1, False]
    names = {"0SEND_F0": "0SEND_F1", "1RECV_F0": "1RECV_F1"}
    names |= {other: name for name, other in names.items()}
    for log in logs if everywhere else logs[:1]:
        for line in log[at(log, "capture") : at(log, "captured")]:
            if line.get("message") in (first, second):
                line["message"] = second if line["message"] == first else first
            if "action" in line:
                line["action"] = names.get(line["action"], line["action"])


def captured_otherwise(logs: list[Lines]) -> None:
    """Both ends captured the same messages, in another order than their graphs post them."""
    exchanged(logs, everywhere=True)


def launched_otherwise(logs: list[Lines]) -> None:
    """Both ends of a channel launched the same messages, which are not the captured ones."""
    for log in logs:
        [messages] = log[at(log, "order", 2)]["messages"]
        messages[1:] = [7, 7]


FORGED: dict[str, tuple[Edit, str]] = {
    "messages exchanged in a capture": (exchanged, "ranks.same-messages"),
    "launches of another order than the captured one": (captured_otherwise, "ranks.as-recorded"),
    "a launch of other messages at one end": (
        changed(0, "order", 2, messages=[[1, 7, 7]]),
        "ranks.as-recorded",
    ),
    "a launch of other messages at both ends": (launched_otherwise, "ranks.as-recorded"),
    "a launch whose messages are not logged": (dropped(1, "order", 1), "ranks.as-recorded"),
    "the messages of another step": (changed(0, "order", 1, epoch=7), "ranks.as-recorded"),
    "a capture to which a rank did not consent": (without_a_capture, "ranks.consent-of-all"),
    "a commit without a launch": (dropped(0, "launch", 1), "ranks.order"),
    "a launch twice": (doubled(1, "launch", 1), "ranks.order"),
    "a launch of another step": (changed(0, "launch", 1, epoch=7), "ranks.as-recorded"),
    "a commit before the votes are read": (dropped(1, "votes", 0), "ranks.votes-first"),
    "a commit before its votes": (before(0, "commit", "votes", 2), "ranks.as-recorded"),
    "votes of a step that is still to come": (
        changed(0, "votes", 1, epoch=5),
        "ranks.as-recorded",
    ),
    "a no that only one host read": (changed(1, "votes", 0, votes=[1, 0]), "ranks.order"),
    "a yes that another host read as a no": (
        changed(0, "votes", 3, votes=[0, 0]),
        "ranks.as-recorded",
    ),
    "a device that ran something else and said yes": (said_yes, "ranks.as-recorded"),
    "a yes of a rank that never launched": (never_launched, "ranks.order"),
    "votes of three ranks": (changed(0, "votes", 0, votes=[0, 0, 0]), "ranks.as-recorded"),
    "weights that are not the device's": (changed(1, "report", epoch=5), "ranks.as-recorded"),
    "a rebuild from weights that no device has": (began_elsewhere, "ranks.as-recorded"),
    "a rebuild without a report": (dropped(0, "report"), "ranks.order"),
    "a rebuild of ranks that are one step apart": (rebuilt_apart, "ranks.same-epoch"),
    "a part of a checkpoint among launches": (saved_among, "ranks.as-recorded"),
}


class TestRealRuns:
    def test_launches_a_no_and_what_went_on_in_place(self, logs: list[Path]) -> None:
        report = replay_ranks(logs)

        assert (None, 2, 2) == (report.clause, report.attempts, report.stops)
        # Of seven steps two are guarded; one launch was skipped by both devices, and one behind it.
        assert (2 * (5 + 2), 2 * (7 + 1)) == (report.launches, report.commits)
        assert "16 commits, 14 launches, 32 messages" in report.summary()

    def test_older_logs_name_the_messages_in_captures_alone(
        self, logs: list[Path], tmp_path: Path
    ) -> None:
        """Without `order`, a launch posts what was captured."""
        lines = [[x for x in lines_of(path) if x.get("event") != "order"] for path in logs]
        whole = sum(map(len, map(lines_of, logs)))
        report = replay_ranks([write(tmp_path / f"{n}.jsonl", log) for n, log in enumerate(lines)])

        assert (None, 14, 14) == (report.clause, report.launches, whole - sum(map(len, lines)))

    def test_sends_that_one_rank_captures_in_another_order(self, tmp_path: Path) -> None:
        """No rank launches; all ranks stop for it, and capture again after the rebuild."""
        faults = [(1, 0, "exchanged", "0SEND_F0 0SEND_F1")]
        said = launch(2, tmp_path, recorded_bodies.recovering, PIPE, 4, {}, faults)

        assert said.codes == [0, 0]
        assert (None, 2, 2) == (said.replay.clause, said.replay.attempts, said.replay.stops)
        for rank in (0, 1):
            [stop] = said.words[rank]["stops"]
            assert "posted 0SEND_F1, the receiver posted 1RECV_F0" in stop["cause"]["text"]
            assert (stop["again"], said.words[rank]["epoch"]) == (1, 4)

    @pytest.mark.parametrize("number", range(4))
    def test_logs_that_merely_end_are_of_processes_that_died(
        self, number: int, logs: list[Path], tmp_path: Path
    ) -> None:
        """One in its launch, the other as soon as that was under way."""
        cut = [lines_of(path) for path in logs]
        del cut[0][at(cut[0], "launch", number) + 1 :]
        del cut[1][at(cut[1], "launch", number) + 1 :]
        report = replay_ranks([write(tmp_path / f"{n}.jsonl", log) for n, log in enumerate(cut)])

        assert (None, 2 * number + 2) == (report.clause, report.launches)

    @pytest.mark.parametrize("waits", [True, False], ids=["waits", "does not wait"])
    def test_a_host_that_does_not_wait_for_its_device(self, waits: bool, tmp_path: Path) -> None:
        """It stops as though a connection were lost, which nobody ended: the model refuses that."""
        job = Job(schedule="zbv", pp=1, microbatches=2)
        clause = "" if waits else "ranks.order"
        said = launch(1, tmp_path, recorded_bodies.unconfirmed, job, waits, refused=clause)

        assert said.codes == [0]
        assert (said.words[0] == "") == waits
        assert waits or (said.replay.action, said.replay.found) == ("stop", "`fail_host`")

    def test_a_vote_that_reached_one_device_alone(self, logs: list[Path], tmp_path: Path) -> None:
        """The rank that voted was killed; the weights of the two are one step apart."""
        lines = [lines_of(path) for path in logs]
        killed(lines)
        report = replay_ranks([write(tmp_path / f"{n}.jsonl", log) for n, log in enumerate(lines)])

        assert (None, 1) == (report.clause, report.attempts), report.summary()


class TestForgedLogs:
    @pytest.mark.parametrize("name", FORGED)
    def test_is_refused(self, name: str, logs: list[Path], tmp_path: Path) -> None:
        """One edit, and no order of all events is one that the protocol takes."""
        edit, clause = FORGED[name]
        lines = [lines_of(path) for path in logs]
        edit(lines)
        report = replay_ranks([write(tmp_path / f"{n}.jsonl", log) for n, log in enumerate(lines)])

        assert clause == report.clause, report.summary()
        assert report.rank in (0, 1)
        assert report.line == report.step + 1
