"""Ranks agree on the name of their attempt, whatever earlier attempts left in the store."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.ranks import consent as consent_module
from qeffect.gpu_runtime.ranks.attempt import agree_on_attempt
from qeffect.gpu_runtime.ranks.bounded import bounded
from qeffect.gpu_runtime.ranks.channels import LostError
from qeffect.gpu_runtime.ranks.consent import Consent, wait_for
from qeffect.gpu_runtime.ranks.processes import stand_alone
from qeffect.schedule.tables import read_fixture

from . import bodies
from .ranks import launch

KEEPS_STORE = """
import torch.distributed as dist, time
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(120)
"""


class Round:
    """
    Ranks of one round, as threads, each with its own connection to the launcher's store.

    Args:
        world: Number of ranks.
        deadline: Timeout of their agreement, in seconds.
    """

    server = None

    def __init__(self, world: int = 2, deadline: float = 20.0) -> None:
        self.world, self.deadline = world, deadline
        self.pool = ThreadPoolExecutor()
        self.found: dict[int, Future[str]] = {}

    def start(self, *ranks: int) -> Round:
        """Start ranks."""
        for rank in ranks:
            assert Round.server is not None
            store = dist.TCPStore("127.0.0.1", Round.server.port, is_master=False)
            given = store, rank, self.world, self.deadline
            self.found[rank] = self.pool.submit(agree_on_attempt, *given)
        return self

    def name(self) -> str:
        """Wait for all ranks; they have found one name."""
        (name,) = {found.result() for found in self.found.values()}
        return name


@pytest.fixture(autouse=True)
def server() -> Iterator[dist.TCPStore]:
    """The store that an agent keeps over all rounds."""
    Round.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Round.server
    Round.server = None


def until(store: dist.TCPStore, key: str) -> str:
    """Wait for a key."""
    deadline = time.monotonic() + 20
    while not store.check([key]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return store.get(key).decode()


def test_each_round_has_a_name_of_its_own() -> None:
    """Five rounds over one store, whichever rank comes first."""
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (2, 0, 1)]
    names = {Round(3).start(*order).name() for order in orders}
    assert len(names) == 5


def test_one_rank_agrees_with_itself() -> None:
    """And what it left is not what a later pair finds."""
    assert Round(1).start(0).name() != Round(2).start(1, 0).name()


def test_an_offer_whose_rank_0_died_is_left_behind(server: dist.TCPStore) -> None:
    """A rank takes its place in that attempt, then in the next one that is offered."""
    server.set("qeffect/offer", json.dumps(["dead", 2]))
    late = Round().start(1)
    until(server, "qeffect/meet/dead/1")
    assert late.start(0).name() != "dead"


def test_an_offer_to_another_number_of_ranks_is_not_answered(server: dist.TCPStore) -> None:
    """An earlier round had three ranks."""
    server.set("qeffect/offer", json.dumps(["three", 3]))
    early = Round().start(1)
    time.sleep(0.2)
    assert early.start(0).name() != "three"
    assert not server.check(["qeffect/meet/three/1"])


def test_two_processes_of_one_rank_never_share_an_attempt(server: dist.TCPStore) -> None:
    """The second one finds its place taken, and waits for another offer."""
    first, second = Round().start(1), Round(deadline=20.0).start(1)
    name = first.start(0).found[0].result()
    found = [one.found[1] for one in (first, second)]
    deadline = time.monotonic() + 20
    while not any(one.done() for one in found):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (taken,) = [one for one in found if one.done()]
    (other,) = [one for one in found if one is not taken]
    assert taken.result() == name
    assert not other.done()
    later = Round().start(0)
    assert other.result() == later.found[0].result() != name


def test_who_is_missing_is_named() -> None:
    """Rank 0 knows who took no place; another rank knows only that rank 0 did not confirm."""
    few = Round(4, deadline=0.5).start(0, 1, 3)
    with pytest.raises(BackendError, match=r"rank 0: expected 4 ranks within 0.5 s; .*rank 2$"):
        few.found[0].result()
    with pytest.raises(BackendError, match=r"rank 3: expected 4 ranks within 0.5 s; .*rank 0"):
        few.found[3].result()


@contextmanager
def lost_store(sent: int) -> Iterator[dist.TCPStore]:
    """A connection to a store in a process that a signal was sent to."""
    with subprocess.Popen([sys.executable, "-c", KEEPS_STORE], stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(keeper.stdout.readline()), is_master=False)
        try:
            os.kill(keeper.pid, sent)
            if sent == signal.SIGKILL:
                keeper.wait()
            yield store
        finally:
            keeper.kill()
            for thread in threading.enumerate():  # those left behind return now
                if thread.name == "bounded":
                    thread.join(20)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        pytest.param(signal.SIGSTOP, "did not answer within 1 s", marks=pytest.mark.nightly),
        (signal.SIGKILL, "store is gone"),
    ],
)
def test_a_store_that_does_not_answer_ends_the_wait(sent: int, words: str) -> None:
    """A call of the library to a host that is partitioned away returns neither way."""
    with lost_store(sent) as store, pytest.raises(BackendError, match=words):
        agree_on_attempt(store, 1, 2, 1.0)


@pytest.mark.ci
def test_a_stop_whose_store_does_not_answer_has_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the verdict nor the other ranks' verdicts are waited for without end."""
    monkeypatch.setattr(consent_module, "_MARGIN_S", 1.0)
    table = read_fixture("Schedule1F1B_pp2_vpp1_m4.comms.csv")
    channels = SimpleNamespace(posted=dict, let_go=lambda: None, close=lambda: None, log=None)
    with lost_store(signal.SIGSTOP) as store:
        consent = Consent(store, None, 0, 2, (), cast(Any, channels), table, [0, 1], grace=0.5)
        began = time.monotonic()
        cause = consent.stop(RuntimeError("here"), 3, None, 0).cause
    assert time.monotonic() - began < 10
    assert (cause.kind, cause.rank, cause.recoverable) == ("lost", 0, False)
    assert "RuntimeError: here; the ranks' common store is gone (no answer within" in cause.text


@pytest.mark.ci
def test_a_device_wait_whose_store_does_not_answer_ends_at_its_deadline() -> None:
    """A rank away from the store, whose device cannot finish either, names rank and limit."""
    table = read_fixture("Schedule1F1B_pp2_vpp1_m4.comms.csv")
    channels = SimpleNamespace(posted=dict, let_go=lambda: None, close=lambda: None, log=None)
    unfinished = SimpleNamespace(query=lambda: False)
    with lost_store(signal.SIGSTOP) as store:
        consent = Consent(store, None, 1, 2, (), cast(Any, channels), table, [0, 1])
        failed = bounded(lambda: raised_by(unfinished, consent), 5.0)
    assert failed.late
    assert str(failed).startswith("commit: rank 1 waited 0.5 s for its device; meanwhile")
    assert "store did not answer" in str(failed)


def raised_by(done: Any, consent: Consent) -> LostError:
    """Return the error of a wait for a device."""
    with pytest.raises(LostError) as caught:
        wait_for(done, consent, deadline=0.5, grace=0.5)
    return caught.value


def test_a_rank_that_does_not_connect_is_a_cause(tmp_path: Path) -> None:
    """The library's own error names no rank; its first line stays in the message."""
    said = launch(2, tmp_path, bodies.connected_alone, 1.0)
    assert said.codes == [0, 0]
    assert said.words[0].startswith(
        "rank 0: ranks [0, 1] did not connect within 1 s (wait timeout after 1000ms"
    )


def test_a_single_rank_keeps_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other process can take the port before the rank connects."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "")
    stand_alone()
    port = int(os.environ["MASTER_PORT"])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    store, rank, world = next(dist.rendezvous("env://"))
    store.set("key", "value")
    assert (b"value", 0, 1) == (store.get("key"), rank, world)
