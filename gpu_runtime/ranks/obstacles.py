"""
Why a step cannot be one launch: the one list of obstacles, each with what to change.

`obstacles_on` lists the obstacles that are known before a worker is made, `obstacles` lists all
obstacles of a worker. If the capture itself fails, the stop of the step reports it (`fallback.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..step.nested_graphs import nesting_obstacle
from .membership import Member, all_gather
from .worker import Worker

__all__ = ["first_obstacle", "obstacles", "obstacles_on"]


def obstacles_on(device: torch.device, rule: str, walks: int = 1) -> list[str]:
    """
    Why no step on a device can be one launch: the obstacles known before its worker is made.

    Args:
        device: Where the step runs.
        rule: Where dW writes.
        walks: Walks over the table in a step.

    Returns:
        One sentence per obstacle, which says what to change; empty without obstacles.
    """
    found = []
    if rule == "copied":
        found.append(
            "rule is 'copied', which copies gradients outside of the slots' graphs: take "
            "'accumulate' or 'per_microbatch'"
        )
    if walks > 1:
        found.append(
            f"a step has {walks} walks, each with graphs of its own: take one walk over a table of "
            "all microbatches"
        )
    if (problem := nesting_obstacle(device)) is not None:
        found.append(problem)
    return found


def obstacles(worker: Worker) -> list[str]:
    """Why the step of a worker cannot be one launch, as `obstacles_on`; empty if it can."""
    runtime, found = worker.runtime, []
    if runtime.config.mode != "one launch":
        found.append(
            f"the runtime's mode is {runtime.config.mode!r}: make it with "
            "RuntimeConfig(mode='one launch')"
        )
    if not worker.optimizer.capturable:
        found.append("the update cannot be captured: make the optimizer with capturable=True")
    return [*found, *obstacles_on(runtime.domain.device, runtime.config.rule, runtime.config.walks)]


def first_obstacle(member: Member, found: Sequence[str]) -> str:
    """
    Return the obstacles of the first rank that has any, the same text on every rank.

    Every rank calls it with its own obstacles; empty if no rank has any.
    """
    return next((text for text in all_gather(member, "; ".join(found)) if text), "")
