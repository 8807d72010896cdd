"""
Free ports of this machine for processes that a test starts.
"""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]

_HELD: list[socket.socket] = []


def free_port() -> int:
    """
    Return a port on which nobody listens, below the range from which systems assign ports.

    The UDP port of this number stays bound, so while this process lives, no other call of this
    function, in any process, returns the same port.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            held.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        _HELD.append(held)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
