"""
Ports of this machine for what a test starts.
"""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]


def free_port() -> int:
    """Return a port on which nobody listens, below those that systems hand out by themselves."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
