"""
Waits for a device, and for connections between devices: each wait has a limit, and the cause of a
stop names the wait.

In these tests, a device that does not finish is a call that blocks until the test ends.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qeffect.gpu_runtime import ranks
from qeffect.gpu_runtime.ranks import channels as channels_module
from qeffect.gpu_runtime.ranks.channels import ChannelEnds, Channels, device_group
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.lost import LostError, UnansweredError
from qeffect.gpu_runtime.ranks.membership import Limits, Member
from tests.ranks import bodies
from tests.ranks.ranks import launch

GPU = torch.device("cuda", 1)
#: Seconds of a wait that runs out; nothing depends on how long it really takes.
SHORT = 0.05


@pytest.fixture
def hangs() -> Iterator[Callable[..., Any]]:
    """A call that does not return before the test ends."""
    over = threading.Event()

    def call(*_: object, **__: object) -> Any:
        over.wait()

    yield call
    over.set()


def test_a_device_that_does_not_finish_is_named_with_rank_and_step(
    hangs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", hangs)
    member = Member(3, 4, 1, GPU, None)
    with pytest.raises(UnansweredError) as told:
        member.synchronize(SHORT, action="step log", step=7)
    assert str(told.value) == "rank 3, step 7, step log: waited 0.05 s for cuda:1"
    assert told.value.late


def test_a_device_that_finishes_or_fails_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    Member(0, 1, 0, GPU, None).synchronize(60.0)
    Member(0, 1, 0, torch.device("cpu"), None).synchronize(60.0)
    assert asked == [GPU]

    def fail(_: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        Member(0, 1, 0, GPU, None).synchronize(60.0)


@pytest.mark.parametrize(("source", "word"), [(2, "to"), (5, "from")])
def test_a_connection_that_does_not_come_up_is_named(
    source: int, word: str, hangs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL blocks the host in its first transfer until the other end is there."""
    for name in ("isend", "irecv"):
        monkeypatch.setattr(channels_module.dist, name, hangs)
    ends = ChannelEnds(source, 7 - source)
    made = Channels(2, {ends: object()}, host=False, deadline=SHORT)
    with pytest.raises(LostError) as told:
        made.meet(torch.zeros(1))
    assert str(told.value) == f"rank 2, connect: waited 0.05 s for a connection {word} rank 5"
    assert (told.value.peer, told.value.action, told.value.late) == (5, "connect", True)


def test_a_group_on_devices_has_a_limit(
    hangs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both where the ranks' store is asked, and in the first collective."""
    dist = channels_module.dist
    monkeypatch.setattr(channels_module, "_MARGIN_S", 0.0)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "new_group", hangs)
    with pytest.raises(UnansweredError, match=r"rank 1, connect: .* store, to make a group of ran"):
        device_group([0, 1], GPU, SHORT)
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: object())
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "device", hangs)
    with pytest.raises(UnansweredError, match=r"waited 0.05 s for a connection of ranks \[0, 1\]"):
        device_group([0, 1], GPU, SHORT)
    assert device_group([0, 2], GPU, SHORT) is not None  # others meet in it


def test_between_two_steps_a_device_that_hangs_stops_every_rank(tmp_path: Path) -> None:
    """A checkpoint waits for it: all ranks end with one cause, which names the rank."""
    job = Job(schedule="zbv", pp=2, microbatches=2)
    limits = Limits(start=60.0, message=30.0, commit=30.0, grace=4.0)
    said = launch(2, tmp_path, bodies.hanging_device, job, 1, limits)
    assert said.codes == [0, 0]
    texts = {word["cause"] for word in said.words.values()}
    assert len(texts) == 1
    (text,) = texts
    assert "rank 1, step 1, drain: waited 1 s for cpu" in text


#: Waits for a device without a limit, by file: nothing in them waits for another rank.
UNBOUNDED = {
    "ranks/membership.py": "within `Member.synchronize`, for measurements",
    "training/balance.py": "times of a stage alone, before ranks connect",
}


def test_ranks_and_training_wait_for_devices_with_limits_only() -> None:
    root = Path(ranks.__file__).parents[1]
    found = set()
    for room in ("ranks", "training"):
        for path in (root / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    named = node.func.attr == "synchronize"
                    device = ast.unparse(node.func) == "torch.cuda.synchronize"
                    if named and (device or not node.args):
                        found.add(path.relative_to(root).as_posix())
    assert found - {"ranks/channels.py"} == UNBOUNDED.keys()  # there, inside `within`
