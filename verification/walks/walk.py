"""
A random walk: a sequence of random calls of one process, in which a number chooses each step.
"""

from __future__ import annotations

from typing import Any

from qeffect import Checkpoint

from ..calls import Call
from .proposals import (
    Pick,
    Plan,
    chooser,
    damage,
    progress,
    recover,
    support,
)
from .shadow import Shadow

__all__ = ["RandomWalk"]

#: Upper bounds, out of 256, of the shares of steps: progress while nothing is in flight; progress
#: while something is in flight or broken; refused calls; support. Damage has the rest.
_QUIET, _BUSY, _AIMED, _SUPPORT = 176, 128, 216, 251
_KEPT_CHECKPOINTS = 4


class RandomWalk:
    """
    Chooses the steps of a random walk; a subclass makes the calls.

    Args:
        shadow: The shadow (record of calls) of a process that has just started.

    Attributes:
        shadow: The record of all calls so far.
        checkpoints: The first checkpoint and the latest checkpoints.
    """

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow
        self.checkpoints: list[Checkpoint] = []
        self.incarnations = 0

    def call(self, call: Call) -> Any:
        """Make a call and return its result."""
        raise NotImplementedError  # each walker has its own

    def aim(self, pick: Pick) -> None:
        """Attempt calls that are refused; a walk with only legal calls attempts none."""

    def start(self) -> None:
        """Begin in a known incarnation, and take a first checkpoint to restore later."""
        self.call(Call("checkpoint"))
        self.run(recover(self.shadow, chooser(0), self.checkpoints, self.fresh()))

    def step(self, number: int) -> None:
        """
        Take the step that a number chooses: advance the epoch, attempt a refused call, make a
        supporting call, or let an action fail.

        Zero chooses no step, so that a schedule shrinks by losing irrelevant steps.
        """
        if number == 0:
            return
        pick = chooser(number - 1)
        kind = pick(256)
        if kind < (_QUIET if self.shadow.quiet else _BUSY):
            self.advance(pick)
        elif kind < _AIMED:
            self.aim(pick)
        elif kind < _SUPPORT:
            self.run(support(self.shadow, pick))
        else:
            self.run(damage(self.shadow, pick))

    def advance(self, pick: Pick) -> None:
        """Advance the epoch. If no legal call does so, attempt a refused call, then restart."""
        plan = progress(self.shadow, pick)
        if plan is None:
            self.aim(pick)
            plan = recover(self.shadow, pick, self.checkpoints, self.fresh())
        self.run(plan)

    def fresh(self) -> int:
        """Return an incarnation that was never used."""
        self.incarnations += 1
        return self.incarnations

    def run(self, plan: Plan | None) -> None:
        """Make every call of a plan."""
        if plan is None:
            return
        result = None
        try:
            while True:
                result = self.call(plan.send(result))
        except StopIteration:
            pass

    def happened(self, call: Call, result: Any) -> None:
        """Record an accepted call."""
        self.shadow.happened(call, result)
        if call.transition == "checkpoint":
            first, *later = [*self.checkpoints, result]
            self.checkpoints = [first, *later[-_KEPT_CHECKPOINTS:]]
