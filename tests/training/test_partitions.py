"""
A rank that loses its connections to the store and to its peer ends within its limits, and reports
why.

A proxy before the store stops forwarding, and the peer process is stopped. Both keep their
connections open, as in a network partition.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.cli.test_interrupts import processes as processes
from tests.profiles import few
from tests.ranks.rank_logs import replayed_run

from .test_interrupts import begun, configured, reached, wait

#: The sum of all limits and of the library's margins is below this.
LIMIT_S = 60
LIMITS = """[limits]
start_s = {start}
message_s = 2
commit_s = 2
grace_s = 1
save_s = 4
"""


class Proxy:
    """Passes bytes on between clients and a server, until it stops."""

    def __init__(self, port: int) -> None:
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.stopped = threading.Event()
        self._held: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                self._held += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if self.stopped.is_set():
                    return  # the data is lost, the connection stays
                target.sendall(data)

    def close(self) -> None:
        """End every connection."""
        for one in (self._listener, *self._held):
            one.close()


@pytest.fixture
def proxy() -> Iterator[tuple[int, Proxy]]:
    """A store's port, and a proxy before it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = Proxy(store.port)
    yield store.port, made
    made.close()
    del store


@pytest.mark.parametrize("place", few(["start", "step", "evaluation", "save"], (), [1]))
def test_a_rank_that_is_cut_off_ends_with_a_cause(
    place: str,
    proxy: tuple[int, Proxy],
    tmp_path: Path,
    processes: list[subprocess.Popen[str]],
) -> None:
    """Wherever it waits: for a message, in an evaluation, for the files of a save, in the start."""
    port, before = proxy
    limits = LIMITS.format(start=4 if place == "start" else 15)
    cut = 0 if place == "start" else 1  # in the start rank 1 is the one that does not come
    program = [sys.executable, *configured(tmp_path, place, 2, limits)]
    for rank in range(2):
        address = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(before.port if rank == cut else port),
        }
        places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        slow = {"SLOW": place, "SLEEPERS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        processes.append(begun(program, {**address, **places, **slow}))
    own, peer = processes[cut], processes[1 - cut]
    wait(own, reached(tmp_path, place))

    before.stopped.set()
    os.kill(peer.pid, signal.SIGSTOP)
    try:
        out, err = own.communicate(timeout=LIMIT_S)
    finally:
        os.kill(peer.pid, signal.SIGCONT)
        peer.kill()

    said = f"{out}\n{err}"
    assert 2 == own.returncode, said
    if place == "start":
        assert "qeffect: rank 0: the launcher's store did not answer within 4 s" in err, said
    else:
        assert "Every rank stopped: rank 1, step " in out, said
        assert "; the ranks' common store is gone (no answer within " in out, said
        replayed_run(tmp_path / "logs", 0 if place == "step" else 2)
    assert "internal error" not in said
