"""
Check whether torchrun's agent, which started this rank, still runs.

torchrun's agent starts the ranks of its host. If the agent is killed, nothing ends its ranks, and
without this check they would continue to train beside the next run.
"""

from __future__ import annotations

import os

from qeffect.launched import ORPHANED, PARENT

from .causes import TerminatedError

__all__ = ["TorchrunAgent", "shared_store_warning"]


class TorchrunAgent:
    """
    The agent of torchrun that started this process, if torchrun did.

    Attributes:
        pid: The agent's process id, read when this process first imports qeffect, seconds before
            the first step; None if torchrun did not start this process.
        orphaned: True if torchrun started this process, but this process's parent is not torchrun's
            agent. The agent had then ended before the first import.
    """

    def __init__(self) -> None:
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        self.pid = PARENT[0] if launched else None
        self.orphaned = launched and ORPHANED[0]

    def require(self) -> None:
        """
        Raise an error if the launcher has ended; costs one system call.

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

    Agents of several hosts that restart their ranks share one store over all restarts by default.
    torch 2.13 tells agents the store's address only in the first round.
    """
    told = os.environ.get
    restarts = int(told("GROUP_WORLD_SIZE", "1")) > 1 and told("TORCHELASTIC_MAX_RESTARTS") != "0"
    if not restarts or told("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return (
        "an agent of torchrun that is killed and started again cannot join this run; set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for all agents"
    )
