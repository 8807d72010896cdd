"""What the ranks run in the tests that replay the event logs of all ranks together."""

from __future__ import annotations

from pathlib import Path

from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.membership import Limits, join
from qeffect.gpu_runtime.ranks.worker_assembly import build_worker


def logged(schedules: list[str], folder: str, steps: int) -> list[int]:
    """Train under each schedule with a log of this rank; return the epochs that were reached."""
    limits = Limits(start=60.0, message=20.0, commit=20.0, grace=1.0)
    member = join("cpu", limits)
    reached = []
    for name in schedules:
        job = Job(schedule=name, pp=2, config=LayerConfig(32, 64, 2, 16))
        log = Path(folder, f"{name}{member.rank}.jsonl")
        worker = build_worker(member, job, "reference", limits=limits, event_log=log)
        for _ in range(steps):
            worker.step()
        worker.close()
        reached.append(worker.runtime.contract.epoch)
    return reached
