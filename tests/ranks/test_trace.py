"""One trace of all ranks: what ran, in order, and both ends of each message."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.ranks.channels import Message
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.trace import Span, _ends, _threads, measured_durations
from tests.ranks import trace_bodies
from tests.ranks.ranks import launch

JOB = Job(schedule="zbv", pp=2, dp=2, microbatches=2)


def test_a_trace_has_every_action_of_every_rank_and_every_message(tmp_path: Path) -> None:
    """Over two replicas; a step that is traced leaves the bits of one that is not."""
    said = launch(4, tmp_path, trace_bodies.traced, JOB)
    assert said.codes == [0] * 4
    words = [said.words[rank] for rank in range(4)]
    assert all(word["differ"] == [] for word in words)
    trace = words[0]["trace"]
    assert all(word["trace"] == trace for word in words)
    events = trace["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    for rank in range(4):
        own = [e for e in slices if e["pid"] == rank]
        ran = [e["name"] for e in sorted(own, key=lambda e: e["ts"]) if e["cat"] in "FIW"]
        assert ran == [n for n in words[rank]["row"] if re.fullmatch(r"\d+[FIW]\d+", n)]
        stages = sorted({n.split("F")[0] for n in ran if "F" in n})
        refreshes = {e["name"]: e for e in own if e["cat"] == "refresh"}
        assert sorted(refreshes) == [f"{stage}REFRESH" for stage in stages]
        for stage in stages:  # before the wait for a message, and in no other slice's time
            thread = refreshes[f"{stage}REFRESH"]["tid"]
            lane = sorted((e for e in own if e["tid"] == thread), key=lambda e: e["ts"])
            names = [e["name"] for e in lane]
            before, first = names.index(f"{stage}REFRESH"), names.index(f"{stage}F0")
            waits = [f"{stage}F0 waits"] * (f"{stage}RECV_F0" in words[rank]["row"])
            assert names[before + 1 : first] == waits
        assert sum("reduction of" in e["name"] for e in own) == 2
        assert [e["name"] for e in own if "end of the step" in e["cat"]] == [
            "consent of all",
            "update",
        ]
        threads = {e["tid"] for e in own}
        for thread in threads:  # no two slices of a thread overlap
            line = sorted((e["ts"], e["ts"] + e["dur"]) for e in own if e["tid"] == thread)
            assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(line))
    starts = {e["id"]: e for e in events if e["ph"] == "s" and e["pid"] < 4}
    ends = {e["id"]: e for e in events if e["ph"] == "f" and e["pid"] < 4}
    sent = sum("SEND" in name and "WAIT" not in name for word in words for name in word["row"])
    assert len(starts) == len(ends) == sent > 0
    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"]
        assert start["pid"] // 2 == ends[number]["pid"] // 2  # within a replica
        assert start["pid"] != ends[number]["pid"]
    simulated = Counter(e["pid"] for e in slices if e["pid"] >= 4 and e["cat"] == "computation")
    assert set(simulated) == {4, 5}
    assert min(e["ts"] for e in slices) == 0.0


def test_a_message_with_one_end_is_no_trace() -> None:
    """A step that was stopped has one; it is named."""
    message = (0, 1, Message(0, 1, False).number)
    with pytest.raises(BackendError, match="only one end of 0SEND_F1 from rank 0 to 1"):
        _ends([Span("sends", "0SEND_F1", 0.0, 1.0, message=message)])


def test_what_overlaps_has_threads_of_its_own() -> None:
    """A viewer draws one slice of a thread at a time."""
    spans = [
        Span("sends", "a", 0.0, 5.0),
        Span("sends", "b", 1.0, 2.0),
        Span("sends", "c", 2.0, 3.0),
        Span("computation", "d", 0.0, 9.0),
    ]
    found, names = _threads(spans)
    assert names == ["computation", "sends", "sends, 2"]
    assert [found[span] for span in spans] == [1, 2, 2, 0]


def test_a_simulation_takes_the_medians_of_what_was_measured() -> None:
    """Of each stage's actions, without the time in which they waited."""
    message = (0, 1, Message(0, 0, False).number)
    ranks = [
        [
            Span("computation", "0F0", 0.0, 4.0, stage=0, kind="F"),
            Span("computation", "0F1", 4.0, 6.0, stage=0, kind="F"),
            Span("computation", "0F2", 6.0, 9.0, stage=0, kind="F"),
            Span("sends", "0SEND_F0", 4.0, 30.0, message=message),
            Span("end of the step", "update", 30.0, 37.0),
        ],
        [
            Span("computation", "1REFRESH", 0.0, 2.0, stage=1, kind="refresh"),
            Span("computation", "1F0 waits", 2.0, 10.0, kind="wait"),
            Span("computation", "1F0", 10.0, 15.0, stage=1, kind="F"),
            Span("receives", "1RECV_F0", 1.0, 10.0, message=message),
        ],
    ]
    durations = measured_durations(ranks)
    assert durations.stages == {0: {"F": 3.0}, 1: {"refresh": 2.0, "F": 5.0}}
    assert durations.times["message"] == 6.0
    assert durations.ranks == {0: {"update": 7.0}, 1: {"update": 0.0}}
