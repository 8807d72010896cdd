"""
Check whether torchrun's agent, which started this rank, still runs.

torchrun's agent starts the ranks of its host. If the agent is killed, its ranks continue to run.
Without this check these ranks would still train while the next run has already started.
"""

from __future__ import annotations

import os

from qeffect.launched import ORPHANED, PARENT

from .causes import TerminatedError

__all__ = ["TorchrunAgent", "shared_store_warning"]


class TorchrunAgent:
    """
    The torchrun agent that started this process, if there is one.

    Attributes:
        pid: The agent's process id, read when this process first imports qeffect, seconds before
            the first step; None if torchrun did not start this process.
        orphaned: True if torchrun started this process, but this process's parent is not torchrun's
            agent. In this case the agent ended before the first import.
    """

    def __init__(self) -> None:
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        self.pid = PARENT[0] if launched else None
        self.orphaned = launched and ORPHANED[0]

    def require(self) -> None:
        """
        Raise an error if the launcher has ended. The check costs one system call.

        Raises:
            TerminatedError: The launcher has ended.
        """
        if self.orphaned:
            raise TerminatedError(
                f"its launcher had ended before this process began: its parent, process {self.pid},"
                " is neither torchrun's agent nor a script of the agent"
            )
        if self.pid is not None and os.getppid() != self.pid:
            raise TerminatedError(f"its launcher, process {self.pid}, has ended")


def shared_store_warning() -> str:
    """
    Return a warning if a torchrun agent that is restarted could not join the run again; otherwise
    return an empty text.

    By default, the agents of several hosts share one store over all restarts of their ranks. torch
    2.13 gives agents the store's address only in the first round.
    """
    told = os.environ.get
    restarts = int(told("GROUP_WORLD_SIZE", "1")) > 1 and told("TORCHELASTIC_MAX_RESTARTS") != "0"
    if not restarts or told("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return (
        "an agent of torchrun that is killed and started again cannot join this run; set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for all agents"
    )
