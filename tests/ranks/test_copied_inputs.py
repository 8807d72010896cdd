"""Data that a separate stream copies into slots; the contract treats that stream as a caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.side_stream_feed import SideStreamFeed, feed_into
from qeffect.gpu_runtime.runtime import RuntimeConfig

from . import copied_input_bodies as bodies
from .ranks import launch


@pytest.mark.parametrize(
    ("job", "every"),
    [
        (Job(schedule="gpipe", pp=1, microbatches=2), 2),
        pytest.param(Job(schedule="zbv", pp=2, microbatches=4), 0, marks=pytest.mark.ci),
    ],
)
def test_the_bits_are_those_of_copies_on_the_graph_stream(
    tmp_path: Path, job: Job, every: int
) -> None:
    """The first stage alone reserves its slots for the feed; also if steps run twice."""
    said = launch(job.world, tmp_path, bodies.trained, job, 2, every)

    assert said.codes == [0] * job.world
    for words in said.words.values():
        assert words["same"]
        assert words["of"] > 20
    assert [[0], []] == said.words[0]["copies"]


@pytest.mark.parametrize(
    ("left_out", "clause"),
    [
        ("join", "completion.transfer-to-graph"),
        ("await_graph", "completion.slot-not-awaited"),
    ],
)
def test_a_wait_that_is_left_out_is_refused(tmp_path: Path, left_out: str, clause: str) -> None:
    """F before the graph stream waited for the copy; a copy before the slot's last tenant ended."""
    job = Job(schedule="gpipe", pp=1, microbatches=2, provisioning="live")
    if left_out == "await_graph":
        job = Job(schedule="1f1b", pp=1, microbatches=2, provisioning="live")
    said = launch(1, tmp_path, bodies.without, job, left_out)

    assert clause == said.words[0]


def test_data_are_made_and_copied_on_two_streams() -> None:
    """The copy is behind the data; the data wait for no slot."""
    told: list[Any] = []

    class _Data:
        def record_stream(self, stream: Any) -> None:
            told.append(("kept for", stream))

    class _Inner:
        def inputs(self, *_: Any) -> Any:
            told.append("made")
            return (_Data(),)

    class _Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        @contextmanager
        def scope(self) -> Iterator[Any]:
            told.append(f"{self.name} begins")
            yield self.name
            told.append(f"{self.name} ends")

    feed = SideStreamFeed.__new__(SideStreamFeed)
    feed.inner = _Inner()  # type: ignore[assignment]
    feed.side, feed.copies = _Stream("side"), _Stream("copies")  # type: ignore[assignment]
    stage: Any = None
    feed_into(feed, lambda _: told.append("copied"), stage, 0, 0)

    assert told == [
        "side begins",
        "made",
        "side ends",
        ("kept for", "side"),
        "copies begins",
        "copied",
        "copies ends",
        ("kept for", "copies"),
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"feeder": "loader"}, "expected one of callers"),
        ({"feeder": "main", "mode": "one launch"}, "copies its data in its graph"),
    ],
)
def test_a_feeder_that_cannot_be_is_refused(options: dict[str, Any], text: str) -> None:
    """It is a caller, and a step as one launch has none."""
    with pytest.raises(BackendError, match=text):
        RuntimeConfig(**options)
