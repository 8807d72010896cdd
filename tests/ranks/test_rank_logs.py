"""
The model of ranks accepts what ranks really did, and refuses each log that describes something
else.

The logs come from real runs. A forged log has one edit, and digests that match the edit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from qeffect.cli import main
from qeffect.gpu_runtime.ranks import channels as channels_module
from qeffect.gpu_runtime.ranks.channels import ChannelEnds, Channels, Message
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.membership import Limits
from qeffect.log.checker import LogError
from qeffect.log.format import DIGEST_BYTES, compact
from qeffect.log.rank_log import RankLines, RankLog
from qeffect.log.recorder import seal
from qeffect.spec.rank_log import RANK_EVENTS, RANK_HEADER
from qeffect.verification.ranks.messages_of_logs import reached
from qeffect.verification.ranks.replay import RankReport, replay_ranks
from tests.ranks import bodies
from tests.ranks.ranks import launch
from tests.training import bodies as training

Lines = list[dict[str, Any]]
Edit = Callable[[list[Lines]], None]

LIMITS = Limits(start=60.0, message=30.0, commit=30.0, grace=4.0)
JOB = Job(schedule="zbv", pp=2, microbatches=4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Logs of real ranks: of a run that stopped and restarted in place, and of a run that saved,
    ended and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    places = [folder / name for name in ("stopped", "saved", "resumed")]
    for place in places:
        place.mkdir()
    stopped = launch(2, places[0], bodies.recovering, JOB, [(1, ("raising", "2W1"))], LIMITS)
    checkpoints = str(folder / "checkpoints")
    saved = launch(2, places[1], training.started, JOB, checkpoints, {"until": 2, "save_at": (1,)})
    resumed = launch(2, places[2], training.gone_on, JOB, checkpoints, {"until": 3})
    return {
        "stopped": stopped.logs[:2],
        "undisturbed": stopped.logs[2:],
        "resumed": [*saved.logs, *resumed.logs],
        "saved": saved.logs,
        "after": resumed.logs,
    }


def lines_of(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, lines: Lines) -> Path:
    """Write a log with digests and numbers that fit its lines."""
    chain = blake2b(digest_size=DIGEST_BYTES)
    text = []
    for number, line in enumerate(lines):
        body = {name: value for name, value in line.items() if name != "digest"}
        if number:
            body["seq"] = number
        text.append(seal(compact(body)[:-1], chain))
    path.write_text("".join(text))
    return path


def at(lines: Lines, event: str, number: int = 0) -> int:
    """The place of an event."""
    return [place for place, line in enumerate(lines) if line.get("event") == event][number]


def dropped(log: int, event: str, number: int = 0) -> Edit:
    """An event is missing."""

    def edit(logs: list[Lines]) -> None:
        del logs[log][at(logs[log], event, number)]

    return edit


def changed(log: int, event: str, number: int = 0, **fields: Any) -> Edit:
    """A field of an event has another value."""

    def edit(logs: list[Lines]) -> None:
        line = logs[log][at(logs[log], event, number)]
        assert all(line[name] != value for name, value in fields.items())
        line.update(fields)

    return edit


def doubled(log: int, event: str, number: int = 0) -> Edit:
    """An event stands twice."""

    def edit(logs: list[Lines]) -> None:
        place = at(logs[log], event, number)
        logs[log].insert(place, dict(logs[log][place]))

    return edit


def before(log: int, event: str, other: str, number: int = 0) -> Edit:
    """An event stands before another one."""

    def edit(logs: list[Lines]) -> None:
        line = logs[log].pop(at(logs[log], event, number))
        logs[log].insert(at(logs[log], other, number), line)

    return edit


def renamed(logs: list[Lines]) -> None:
    """Rank 0 sends another microbatch than rank 1 receives, and commits."""
    post = logs[0][at(logs[0], "post_send", -8)]
    assert [0, 0, False] == post["message"]
    post["message"] = [0, 9, False]
    [sent] = [line for line in logs[0][-20:] if line.get("action") == "0SEND_F0"]
    sent["action"] = "0SEND_F9"


FORGED: dict[str, tuple[str, Edit, str]] = {
    "a commit without the consent of rank 1": (
        "stopped",
        dropped(1, "consent"),
        "ranks.consent-of-all",
    ),
    "a seat that nobody took": ("stopped", dropped(1, "take_seat"), "ranks.all-seats"),
    "a name that rank 0 did not confirm": ("stopped", dropped(0, "confirm"), "ranks.order"),
    "a send too many": ("stopped", doubled(0, "post_send", -1), "ranks.planned-sends"),
    "a receive too many": ("stopped", doubled(0, "post_receive", -1), "ranks.planned-receives"),
    "a message of another microbatch": (
        "stopped",
        renamed,
        "ranks.same-messages",
    ),
    "a message that arrived before its receive": (
        "stopped",
        before(0, "received", "post_receive"),
        "ranks.as-recorded",
    ),
    "a step in another epoch": ("stopped", changed(1, "begin_step", epoch=1), "ranks.as-recorded"),
    "a commit before the consent": (
        "stopped",
        before(1, "commit", "consent"),
        "ranks.consent-of-all",
    ),
    "gradients that were never final": ("stopped", dropped(1, "finish"), "ranks.consent-of-all"),
    "a connection that closed before its reason": (
        "stopped",
        dropped(1, "say"),
        "ranks.said-first",
    ),
    "another cause on each rank": ("stopped", changed(0, "end", cause=0), "ranks.as-recorded"),
    "a loss that nobody caused": (
        "stopped",
        changed(1, "stop", kind="lost", peer=0),
        "ranks.order",
    ),
    "an attempt in place while a rank runs": ("stopped", dropped(0, "end"), "ranks.all-stopped"),
    "an attempt in place from other weights": (
        "stopped",
        changed(0, "rebuilt", epoch=1),
        "ranks.as-recorded",
    ),
    "a slot that went back": (
        "stopped",
        changed(0, "post_send", -1, generation=0),
        "ranks.as-recorded",
    ),
    "a part of a checkpoint that is missing": (
        "resumed",
        dropped(1, "write_shard"),
        "ranks.part-of-this-epoch",
    ),
    "a part of another epoch": (
        "resumed",
        changed(1, "write_shard", epoch=0),
        "ranks.part-of-this-epoch",
    ),
    "a checkpoint that nobody saved": ("resumed", changed(2, "load", epoch=2), "ranks.as-recorded"),
}


class TestRealRuns:
    def test_a_stop_and_what_went_on_in_place(self, runs: dict[str, list[Path]]) -> None:
        report = replay_ranks(runs["stopped"])

        assert (None, 2, 2, 2) == (report.clause, report.attempts, report.commits, report.stops)
        assert report.messages > 20

    def test_a_checkpoint_and_the_resume_from_it(self, runs: dict[str, list[Path]]) -> None:
        report = replay_ranks(runs["resumed"])

        assert (None, 2, 1) == (report.clause, report.attempts, report.checkpoints)
        assert 2 * (2 + 2) == report.commits

    def test_any_order_of_the_files_will_do(self, runs: dict[str, list[Path]]) -> None:
        assert replay_ranks(runs["resumed"][::-1]) == replay_ranks(runs["resumed"])

    def test_a_log_that_merely_ends_is_of_a_process_that_died(
        self, runs: dict[str, list[Path]], tmp_path: Path
    ) -> None:
        """Both were killed as soon as they had met; a half line behind that is left out."""
        cut = [lines_of(path)[:4] for path in runs["resumed"][:2]]
        logs = [write(tmp_path / f"{n}.ranks.jsonl", lines) for n, lines in enumerate(cut)]
        with logs[1].open("a") as file:
            file.write('{"seq":4,"event":"begin_')
        report = replay_ranks(logs)

        assert (None, 1, 0) == (report.clause, report.attempts, report.commits)


class TestForgedLogs:
    @pytest.mark.parametrize("name", FORGED)
    def test_is_refused(self, name: str, runs: dict[str, list[Path]], tmp_path: Path) -> None:
        """One edit, and no order of all events is one that the protocol takes."""
        run, edit, clause = FORGED[name]
        logs = [lines_of(path) for path in runs[run]]
        edit(logs)
        report = replay_ranks([write(tmp_path / f"{n}.jsonl", log) for n, log in enumerate(logs)])

        assert clause == report.clause, report.summary()
        assert report.rank in (0, 1)
        assert report.line == report.step + 1

    def test_that_only_changed_is_unusable(
        self, runs: dict[str, list[Path]], tmp_path: Path
    ) -> None:
        """Digests show an edit that did not take them along."""
        damaged = tmp_path / "0.ranks.jsonl"
        text = runs["stopped"][0].read_text()
        damaged.write_text(text.replace('"epoch":0', '"epoch":1', 1))
        with pytest.raises(LogError, match="line 1: the digest"):
            RankLines.read(damaged)


def queued(logs: list[Lines]) -> None:
    """The hosts queued work behind their messages, as on GPUs, and did not wait themselves."""
    names = {"sent": "behind_send", "received": "behind_receive"}
    for line in (line for log in logs for line in log[1:]):
        line["event"] = names.get(line["event"], line["event"])


def killed_behind(logs: list[Lines], events: int) -> None:
    """
    Rank 1 is killed in its last step, after a number of events; rank 0's host was far ahead.

    It came to its consent, and lost rank 1 there.
    """
    own, other = logs
    del other[at(other, "begin_step", -1) + 1 + events :]
    del own[at(own, "consent", -1) + 1 :]
    stop = {"event": "stop", "kind": "lost", "peer": -1, "in_row": False}
    own += [stop, {"event": "say"}, {"event": "close"}]
    own.append({"event": "end", "cause": 1, "kind": "gone"})


def committed(logs: list[Lines]) -> None:
    """Rank 0 committed, although rank 1 was killed."""
    own = logs[0]
    epoch = own[at(own, "begin_step", -1)]["epoch"]
    own.insert(at(own, "stop"), {"event": "commit", "epoch": epoch})


def waited(logs: list[Lines]) -> None:
    """Rank 0's host waited itself for a message that never came."""
    own = logs[0]
    own[at(own, "behind_receive", -1)]["event"] = "received"


#: Edits of logs of hosts that were ahead of their devices, when rank 1 was killed.
FORGED_AHEAD: dict[str, tuple[Edit, str]] = {
    "a commit behind a message that never came": (committed, "ranks.order"),
    "a host that waited for a message that never came": (waited, "ranks.as-recorded"),
    "work behind a receive that was not posted": (
        dropped(0, "post_receive", -8),
        "ranks.as-recorded",
    ),
    "a loss of a rank that goes on": (changed(0, "end", cause=0), "ranks.precedence"),
}


class TestHostsAheadOfTheirDevices:
    """A host on a GPU logs what it queues; behind a message that never comes nothing happened."""

    def replay(
        self, runs: dict[str, list[Path]], folder: Path, events: int, *edits: Edit
    ) -> RankReport:
        logs = [lines_of(path) for path in runs["undisturbed"]]
        killed_behind(logs, events)
        for edit in edits:
            edit(logs)
        return replay_ranks([write(folder / f"{n}.jsonl", log) for n, log in enumerate(logs)])

    def test_whole_steps(self, runs: dict[str, list[Path]], tmp_path: Path) -> None:
        """As much is asked of them as of hosts that wait."""
        logs = [lines_of(path) for path in runs["undisturbed"]]
        queued(logs)
        report = replay_ranks([write(tmp_path / f"{n}.jsonl", log) for n, log in enumerate(logs)])

        assert report == replay_ranks(runs["undisturbed"])
        assert report.clause is None

    @pytest.mark.parametrize("events", [0, 3, 9, 20])
    def test_a_killed_rank(self, events: int, runs: dict[str, list[Path]], tmp_path: Path) -> None:
        """A host that waits cannot have come as far; one that is ahead of its device can."""
        waits = self.replay(runs, tmp_path, events)
        ahead = self.replay(runs, tmp_path, events, queued)

        assert ("ranks.order", "`received`") == (waits.clause, waits.found), waits.summary()
        assert (None, 0, 1) == (ahead.clause, ahead.commits, ahead.stops), ahead.summary()

    @pytest.mark.parametrize("name", FORGED_AHEAD)
    def test_a_forged_log_is_refused(
        self, name: str, runs: dict[str, list[Path]], tmp_path: Path
    ) -> None:
        edit, clause = FORGED_AHEAD[name]
        report = self.replay(runs, tmp_path, 9, queued, edit)

        assert clause == report.clause, report.summary()

    def test_a_device_that_stands_lets_the_next_one_stand(self) -> None:
        """Rank 0 waits for rank 1, which was killed; rank 2 for what rank 0 posted behind that."""
        begin = {"event": "begin_step", "epoch": 4}
        stop = {"event": "stop", "kind": "lost"}
        message = [0, 0, False]

        def posted(event: str, peer: int) -> dict[str, Any]:
            return {"event": event, "peer": peer, "message": message}

        def behind(event: str, peer: int, action: str) -> dict[str, Any]:
            return {"event": event, "peer": peer, "action": action}

        receive = posted("post_receive", 1)
        send = posted("post_send", 2)
        other = posted("post_receive", 0)
        found = reached(
            {
                0: (begin, receive, behind("behind_receive", 1, "1RECV_F0"), send, stop),
                1: (begin,),
                2: (begin, other, behind("behind_receive", 0, "1RECV_F0"), stop),
            }
        )

        assert {0: (begin, receive, stop), 1: (begin,), 2: (begin, other, stop)} == found


class TestCommand:
    def test_says_what_it_took(
        self, runs: dict[str, list[Path]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert 0 == main(["replay", *map(str, runs["stopped"])])
        assert "accepted: 2 rank logs, 2 attempts, 2 commits" in capsys.readouterr().out

    def test_names_rank_event_clause_and_line(
        self, runs: dict[str, list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        logs = [lines_of(path) for path in runs["stopped"]]
        dropped(1, "say")(logs)
        paths = [write(tmp_path / f"{n}.jsonl", log) for n, log in enumerate(logs)]

        assert 1 == main(["replay", "--json", "--quiet", *map(str, paths)])
        said = json.loads(capsys.readouterr().out)
        assert ("refused", 1, "close", "ranks.said-first") == tuple(
            said[name] for name in ("verdict", "rank", "action", "clause")
        )
        assert said["line"] == at(logs[1], "close") + 1

    def test_a_missing_log_is_unusable(
        self, runs: dict[str, list[Path]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert 2 == main(["replay", str(runs["stopped"][0])])
        assert "the log of rank 1 in attempt" in capsys.readouterr().err


def events_of(logs: list[Path]) -> list[Path]:
    """The event logs of the workers that wrote some rank logs."""
    return [log.with_name(log.name.replace(".ranks.", ".events.")) for log in logs]


def ended(logs: list[Lines]) -> None:
    """Both rank logs end before the second step."""
    for log in logs:
        del log[at(log, "begin_step", 1) :]


def other_microbatch(logs: list[Lines]) -> None:
    """Rank 0 sends microbatch 9 instead of 0, and rank 1 receives it."""
    post = logs[0][at(logs[0], "post_send")]
    other = logs[1][at(logs[1], "post_receive")]
    assert [0, 0, False] == post["message"] == other["message"]
    post["message"] = other["message"] = [0, 9, False]
    for log, action in ((logs[0], "0SEND_F"), (logs[1], "1RECV_F")):
        next(line for line in log if line.get("action") == f"{action}0")["action"] = f"{action}9"


def unedited(logs: list[Lines]) -> None:
    """The logs as they were written."""


#: Runs of the event logs and of the rank logs, an edit of the latter, and the refusal.
UNLIKE: dict[str, tuple[str, str, Edit, str, str]] = {
    "commits that the rank logs do not have": (
        "saved",
        "saved",
        ended,
        "epoch.wrong-epoch",
        "has a commit of epoch 1; the rank log",
    ),
    "a rebuild that the rank logs do not have": (
        "stopped",
        "undisturbed",
        unedited,
        "epoch.wrong-epoch",
        "has a restore to epoch 0; the rank log",
    ),
    "a rebuild that the event logs do not have": (
        "undisturbed",
        "stopped",
        unedited,
        "epoch.wrong-epoch",
        "has a restore to epoch 0.",
    ),
    "a resume that the rank logs do not have": (
        "after",
        "saved",
        unedited,
        "epoch.wrong-epoch",
        "has a restore to epoch 1; the rank log",
    ),
    "a receive into another slot": (
        "saved",
        "saved",
        changed(0, "post_receive", slot=9),
        "ranks.as-recorded",
        "in slot 9, generation 0.",
    ),
    "a receive of another microbatch": (
        "saved",
        "saved",
        other_microbatch,
        "ranks.as-recorded",
        "microbatch 9, in slot 0, generation 0.",
    ),
}


class TestBesideEventLogs:
    """Event logs and rank logs of one run tell of the same commits, restores and receives."""

    @pytest.mark.parametrize("run", ["stopped", "undisturbed", "saved", "after"])
    def test_are_accepted_together(
        self, run: str, runs: dict[str, list[Path]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert 0 == main(["replay", *map(str, [*events_of(runs[run]), *runs[run]])])
        assert "accepted: 2 ranks together" in capsys.readouterr().out

    def test_an_event_log_fits_one_of_its_ranks_logs(self, runs: dict[str, list[Path]]) -> None:
        """The rank logs of the run before the resume are given too."""
        assert 0 == main(
            ["replay", "--quiet", *map(str, [*events_of(runs["after"]), *runs["resumed"]])]
        )

    @pytest.mark.parametrize("name", UNLIKE)
    def test_that_differ_are_refused(
        self,
        name: str,
        runs: dict[str, list[Path]],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Either is accepted by itself."""
        written, told, edit, clause, words = UNLIKE[name]
        logs = [lines_of(path) for path in runs[told]]
        edit(logs)
        forged = [str(write(tmp_path / f"{n}.jsonl", log)) for n, log in enumerate(logs)]
        events = [str(path) for path in events_of(runs[written])]

        assert 0 == main(["replay", *forged])
        assert 0 == main(["replay", *events])
        capsys.readouterr()
        assert 1 == main(["replay", "--json", "--quiet", *events, *forged])
        said = json.loads(capsys.readouterr().out)
        assert ("refused", clause) == (said["verdict"], said["clause"]), said["message"]
        assert words in said["message"]
        assert said["rank"] in (0, 1)

    def test_a_truncated_event_log_is_compared_as_far_as_it_goes(
        self, runs: dict[str, list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Rank 0 was killed. Its log is unusable, and refused beside rank logs of another run."""
        whole = events_of(runs["saved"])
        cut = tmp_path / whole[0].name
        text = whole[0].read_bytes()
        cut.write_bytes(text[: text.index(b"\n", text.index(b"commit_update")) + 40])
        events = [str(cut), str(whole[1])]

        assert 2 == main(["replay", *events, *map(str, runs["saved"])])
        assert "truncated" in capsys.readouterr().out
        assert 1 == main(["replay", *events, *map(str, runs["stopped"])])
        assert "has a commit of epoch 0; the rank log" in capsys.readouterr().out


class TestFields:
    """Every event of the table is written and read by the table."""

    #: For each kind a value of the kind, and one that is not.
    VALUES: ClassVar[dict[str, tuple[Any, Any]]] = {
        "a number": (3, -1),
        "a rank, or -1": (-1, -2),
        "a name": ("x", ""),
        "a name, or null": (None, 1),
        "true or false": (True, 1),
        "[sending stage, microbatch, true for a gradient]": ([0, 1, True], [0, 1]),
        "one number per rank: 0 (yes), 1 (no), 2 (its gradients differ from the first replica's), "
        "more than 2 (its two runs differ)": (
            [0, 2, 17],
            [-1],
        ),
        "a list of [sender, receiver, messages per step]": ([[0, 1, 2]], [[0, 1]]),
        "a list of [peer, digest of the sends to the peer, digest of the receives from the peer]": (
            [[1, 2, 3]],
            [[1, 2]],
        ),
    }

    @pytest.mark.parametrize("event", RANK_EVENTS)
    def test_of_an_event(self, event: str, tmp_path: Path) -> None:
        fields, _ = RANK_EVENTS[event]
        good = {name: self.VALUES[kind][0] for name, kind in fields.items()}
        log = RankLog(tmp_path / "a", rank=0, world=1, attempt=None, worker=0, epoch=0, channels=[])
        log(event, **good)
        log.close()
        first, *_ = RankLines.read(tmp_path / "a").events
        assert event == first["event"]
        assert good.items() <= first.items()
        for name, kind in fields.items():
            lines = lines_of(tmp_path / "a")
            lines[1][name] = self.VALUES[kind][1]
            with pytest.raises(LogError, match=f"line 2: {name} is malformed: expected"):
                RankLines.read(write(tmp_path / "b", lines))

    def test_of_the_header(self, tmp_path: Path) -> None:
        log = RankLog(tmp_path / "a", rank=0, world=1, attempt=None, worker=0, epoch=0, channels=[])
        log.close()
        for name, (kind, _) in RANK_HEADER.items():
            lines = lines_of(tmp_path / "a")
            lines[0][name] = self.VALUES[kind][1]
            with pytest.raises(LogError, match=f"line 1: {name} is malformed: expected"):
                RankLines.read(write(tmp_path / "b", lines))


class TestWriter:
    @pytest.mark.parametrize("host", [True, False], ids=["the host waits", "a stream waits"])
    def test_a_message_has_ended_only_if_the_host_waited(
        self, host: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("isend", "irecv"):
            work = SimpleNamespace(wait=lambda *_: None)
            monkeypatch.setattr(channels_module.dist, name, lambda *_, work=work, **__: work)
        group = object()
        channels = Channels(0, {ChannelEnds(0, 1): group, ChannelEnds(1, 0): group}, host=host)
        header = {"rank": 0, "world": 2, "attempt": None, "worker": 0, "epoch": 0, "channels": []}
        log = channels.log = RankLog(None, **header)
        channels.wait(channels.send(torch.ones(1), 1, Message(0, 0, False)))
        channels.wait(channels.receive(torch.ones(1), 1, Message(1, 0, True)))

        ends = ["sent", "received"] if host else ["behind_send", "behind_receive"]
        found = [json.loads(line)["event"] for line in log.lines[1:]]
        assert ["post_send", ends[0], "post_receive", ends[1]] == found

    def test_a_log_on_a_full_disk_ends_and_stops_nobody(self) -> None:
        log = RankLog("/dev/full", rank=0, world=1, attempt=None, worker=0, epoch=0, channels=[])
        log("begin_step", epoch=0)
        log.close()

        assert (True, "No space left on device") == (log.ended, log.problem)

    def test_the_end_of_a_log_is_told_once(self, tmp_path: Path) -> None:
        told: list[OSError] = []
        log = RankLog(tmp_path / "a", rank=0, world=1, attempt=None, worker=0, epoch=0, channels=[])
        assert log._file is not None
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, log._file.fileno())
        os.close(full)
        log.ends = told.append
        log("begin_step", epoch=0)
        log("begin_step", epoch=1)
        log.close()

        assert ["No space left on device"] == [error.strerror for error in told]

    def test_without_a_log_a_worker_writes_none(self, tmp_path: Path) -> None:
        """A closed log takes no more events."""
        log = RankLog(tmp_path / "a", rank=0, world=1, attempt=None, worker=0, epoch=0, channels=[])
        log.close()
        log("begin_step", epoch=0)

        assert ["closed"] == [e["event"] for e in RankLines.read(tmp_path / "a").events]
