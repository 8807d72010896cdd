"""
Find the reasons why a worker's step cannot be one launch, on this rank or on any rank.

`one_launch_obstacles` in `runtime/step_mode.py` lists the reasons for a configuration. This module
reads the configuration from a worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..runtime import one_launch_obstacles
from ..step.launch_executor import LaunchExecutor
from .membership import Member, all_gather
from .worker import Worker

__all__ = ["first_obstacle", "obstacles"]


def obstacles(worker: Worker) -> list[str]:
    """
    Return why the step of a worker cannot be one launch (one CUDA graph): one sentence per reason.
    The list is empty if the step can be one launch.
    """
    config = worker.runtime.config
    found = one_launch_obstacles(
        worker.runtime.domain.device,
        config.rule,
        config.walks,
        mode=config.mode,
        capturable=worker.optimizer.capturable,
        keeps_gradients=any(m.kept is not None for m in worker.runtime.memories.values()),
        draws=any(stage.reports.draws is not False for stage in worker.runtime.stages.values()),
    )
    if not found and not isinstance(worker.runtime.executor, LaunchExecutor):
        found.append("the runtime replays single actions since replay_actions: make a new worker")
    return found


def first_obstacle(member: Member, found: Sequence[str]) -> str:
    """
    Return the obstacles of the lowest rank that has obstacles; the result is the same on every
    rank.

    Every rank calls this function with its own obstacles. The result is empty if no rank has an
    obstacle.
    """
    return next((text for text in all_gather(member, "; ".join(found)) if text), "")
