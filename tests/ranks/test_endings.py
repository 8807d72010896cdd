"""
How connections end after a stop: all at once, and only after the kernels that use them have ended.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.ranks import channels
from qeffect.gpu_runtime.ranks.channels import ChannelEnds, Channels, LostError, end_groups
from qeffect.gpu_runtime.ranks.consent import Cause, Consent, StoppedError
from qeffect.gpu_runtime.ranks.membership import Limits, Member
from qeffect.gpu_runtime.ranks.replicas import Replicas
from qeffect.gpu_runtime.ranks.ties import Reducers
from qeffect.gpu_runtime.ranks.worker import Worker
from qeffect.gpu_runtime.step.streams import HostHandoff


class _Group:
    """A group whose abort ends when the function `ends` returns."""

    def __init__(self, ends: Any) -> None:
        self._ends = ends
        self.ended = False

    def size(self) -> int:
        return 2

    def abort(self) -> None:
        self._ends()
        self.ended = True


@pytest.fixture(name="destroyed")
def _destroyed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(channels.dist, "destroy_process_group", found.append)
    return found


def test_groups_are_aborted_all_at_once(destroyed: list[Any]) -> None:
    """A graph ends when the kernels of all its communicators were let go, not of the first."""
    together = threading.Barrier(3)
    groups = [_Group(lambda: together.wait(5.0)) for _ in range(3)]
    end_groups([*groups], abort=True)

    assert [True] * 3 == [group.ended for group in groups]
    assert {id(group) for group in groups} == {id(group) for group in destroyed}


def test_what_a_graph_still_holds_is_left(
    destroyed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for it would be for ever; the others end."""
    monkeypatch.setattr(channels, "_ABORT_S", 0.2)
    never = threading.Event()
    held, free = _Group(never.wait), _Group(lambda: None)
    end_groups([held, free], abort=True)

    assert [free] == destroyed
    never.set()


def test_a_graph_is_dropped_before_its_connections_are_closed(destroyed: list[Any]) -> None:
    """A communicator waits for it; dropped behind the close, both would wait for ever."""
    dropped = threading.Event()
    group = _Group(lambda: dropped.wait(5.0))
    order: list[str] = []

    class Noted(Channels):
        def close(self, *, abort: bool = True) -> None:
            order.append("closed")
            end_groups([group], abort=abort)

    consent = Consent(
        None, None, 0, 1, (), Noted(0, {}, host=False), None, (0,)  # type: ignore[arg-type]
    )  # fmt: skip

    def release() -> None:
        order.append("released")
        dropped.set()

    consent.release = release
    consent.close()
    consent.close()

    assert order == ["released", "closed", "closed"]
    assert dropped.is_set()
    assert group.ended


def test_a_graph_is_dropped_when_every_group_of_its_kernels_was_let_go(
    destroyed: list[Any],
) -> None:
    """Dropping one that runs may wait for it, and it waits in whichever group was not."""
    let_go = threading.Semaphore(0)
    dropped = threading.Event()

    def aborted() -> None:
        let_go.release()
        dropped.wait(5.0)

    groups = [_Group(aborted) for _ in range(4)]
    own = Channels(0, {ChannelEnds(0, 1): groups[0], ChannelEnds(1, 0): groups[1]}, host=False)
    replicas, copies = (Replicas(group, host=False, deadline=1.0) for group in groups[2:])
    consent = Consent(
        None, None, 0, 1, (), own, None, (0,),  # type: ignore[arg-type]
        replicas=Reducers(replicas, {"table": copies, "both here": None}),
    )  # fmt: skip

    def release() -> None:
        assert all(let_go.acquire(timeout=5.0) for _ in groups)
        dropped.set()

    consent.release = release
    consent.close()

    assert dropped.is_set()
    assert [True] * 4 == [group.ended for group in groups]
    assert {id(group) for group in groups} == {id(group) for group in destroyed}
    for bucket in (0, "table"):  # which would be sums over all ranks
        with pytest.raises(LostError, match="REDUCE_GRAD with all ranks lost its connection"):
            consent.replicas(bucket, {"w": torch.ones(2)})  # type: ignore[misc]


def test_replicas_whose_group_has_ended_reduce_nothing(destroyed: list[Any]) -> None:
    """No group means the group of all ranks to torch: its other members would be waited for."""
    replicas = Replicas(_Group(lambda: None), host=False, deadline=1.0)
    replicas.close(abort=False)
    assert len(destroyed) == 1
    for begin in (
        lambda: replicas(3, {"w": torch.ones(2)}),
        lambda: replicas.largest(torch.ones(2, dtype=torch.int32)),
    ):
        with pytest.raises(LostError, match="REDUCE_GRAD with all ranks lost its connection"):
            begin()


@pytest.mark.parametrize("ends", [True, False])
def test_a_device_that_comes_to_no_end_is_waited_for_as_long_as_a_rank(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A communicator that cannot be let go holds it; the other ranks have given this one up."""
    asked: list[bool] = []

    class Event:
        def record(self) -> None:
            """Behind all that was given."""

        def query(self) -> bool:
            asked.append(ends)
            return ends and len(asked) > 2

    monkeypatch.setattr(torch.cuda, "Event", Event)
    worker = object.__new__(Worker)
    worker.limits = Limits(start=0.05)
    worker.member = Member(1, 2, 1, torch.device("cuda"), None)
    worker.runtime = SimpleNamespace(handoff=HostHandoff())  # type: ignore[assignment]
    if ends:
        worker.settle()
        assert len(asked) == 3
        return
    cause = Cause("raised", 0, None, None, None, "why", True)
    for begin_again in (worker.settle, lambda: worker.rebuild(StoppedError(cause))):
        with pytest.raises(BackendError, match="device work of rank 1 did not finish within"):
            begin_again()
