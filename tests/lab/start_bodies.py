"""What the ranks run in the tests of starts."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.lab.runner.rank_process import Findings
from qeffect.gpu_runtime.ranks.consent import Cause, StoppedError
from qeffect.gpu_runtime.ranks.membership import all_gather, join


def profiler(findings: Findings) -> None:
    """Report this process, and the result of an attempt to profile."""
    import torch

    said: dict[str, Any] = {"pid": os.getpid(), "parent": os.getppid(), "used": True}
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            torch.zeros(1) + 1
    except RuntimeError as error:
        said["used"] = str(error)
    try:
        import qeffect.gpu_runtime.lab.runner.profiler  # noqa: F401

        said["imported"] = True
    except ImportError:
        said["imported"] = False
    findings.note("looked")
    findings.add(said)


def meeting(findings: Findings) -> None:
    """Collect the process ids of all ranks."""
    member = join("cpu")
    findings.add({"rank": member.rank, "pids": all_gather(member, os.getpid())})


def profiler_and_meeting(findings: Findings) -> None:
    """Report the results of `profiler` and `meeting`, in this order."""
    profiler(findings)
    meeting(findings)


def unusable(findings: Findings) -> None:
    """A rank that cannot run the request."""
    findings.add("before")
    raise BackendError("not today")


def stopped(findings: Findings) -> None:
    """A rank that was stopped."""
    raise StoppedError(Cause("refused", 1, 0, "0F0", "order.token", "no more", True))


def forever(folder: str, findings: Findings) -> None:
    """A rank that never ends."""
    Path(folder, "pid").write_text(str(os.getpid()))
    time.sleep(600)
