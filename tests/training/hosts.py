"""
Two hosts on one machine: network namespaces joined by a virtual cable that can be cut.

The addresses of the hosts exist only inside these namespaces, and the hosts cannot reach anything
outside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from .test_interrupts import begun

#: Addresses for documentation (RFC 5737), one per host.
ADDRESSES = ("192.0.2.1", "192.0.2.2")
PORT = 29400
#: Keeps the ranks' common store, as the launcher of the first host does.
_STORE = f"""
import torch.distributed as dist
store = dist.TCPStore("{ADDRESSES[0]}", {PORT}, is_master=True, wait_for_workers=False)
print("ready", flush=True)
input()
"""


class NotPermittedError(Exception):
    """This machine does not permit network namespaces; the message says why."""


def _ip(*words: str) -> None:
    ended = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise NotPermittedError(f"ip {' '.join(words)}: {ended.stderr.strip()}")


class Hosts:
    """
    Two hosts, and the store on the first.

    Raises:
        NotPermittedError: Namespaces cannot be made here; any part that was made is removed.
    """

    def __init__(self) -> None:
        self._store: subprocess.Popen[str] | None = None
        if shutil.which("ip") is None:
            raise NotPermittedError("the program ip (iproute2) is not installed")
        self.names = tuple(f"qeffect-{os.getpid()}-{n}" for n in range(2))
        try:
            for name in self.names:
                _ip("netns", "add", name)
            first, second = self.names
            _ip("link", "add", "cable", "netns", first, "type", "veth",
                "peer", "name", "cable", "netns", second)  # fmt: skip
            for n, (name, address) in enumerate(zip(self.names, ADDRESSES, strict=True)):
                _ip("-n", name, "addr", "add", f"{address}/30", "dev", "cable")
                _ip("-n", name, "link", "set", "lo", "up")
                self.plug(n)
        except NotPermittedError:
            self.close()
            raise

    def cut(self, host: int) -> None:
        """
        Unplug the cable at one host: its sends fail, and the sends of the other host are lost.
        """
        _ip("-n", self.names[host], "link", "set", "cable", "down")

    def plug(self, host: int) -> None:
        """Put the cable back."""
        _ip("-n", self.names[host], "link", "set", "cable", "up")

    def start_store(self) -> None:
        """Start the store on the first host, and wait until it answers."""
        self._store = begun([*self._on(0), sys.executable, "-c", _STORE], {}, reads=True)
        assert self._store.stdout is not None
        assert self._store.stdout.readline() == "ready\n"

    def start(self, host: int, program: Sequence[str]) -> subprocess.Popen[str]:
        """Start a rank on a host: rank 0 on the first, rank 1 on the second."""
        environment = {
            **{"RANK": str(host), "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
            **{"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)},
            **{"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "cable"},
            **{"SLOW": "", "SLEEPERS": ""},
        }
        return begun([*self._on(host), sys.executable, *program], environment)

    def _on(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[host]]

    def close(self) -> None:
        """End the store, and remove both hosts with their cable."""
        if self._store is not None:
            self._store.kill()
            self._store.communicate()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
