"""
Whether the process that started this rank still runs.

torchrun's agent starts the ranks of its host. If the agent is killed, nothing ends its ranks: they
would train on beside the run that is started next.
"""

from __future__ import annotations

import os

from .causes import TerminatedError

__all__ = ["Launcher"]


class Launcher:
    """
    The agent of torchrun that started this process, if there is one.

    Attributes:
        pid: Its process; None if torchrun did not start this process.
    """

    def __init__(self) -> None:
        self.pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def require(self) -> None:
        """
        Require that the launcher still runs; costs one system call.

        Raises:
            TerminatedError: The launcher has ended.
        """
        if self.pid is not None and os.getppid() != self.pid:
            raise TerminatedError(f"its launcher, process {self.pid}, has ended")
