"""
Actions as context managers: checked on entry, committed or aborted on exit.
"""

from __future__ import annotations

from typing import Any

from ..action_blocks import Dgrad, Evaluation, Forward, Refresh, Update, Wgrad
from ..keys import TapeKey, TapeRef
from .checks import Checks
from .epochs import EpochCalls
from .redemption import Redemption

__all__ = ["Blocks"]


class Blocks(Checks, EpochCalls, Redemption):
    """The actions as context managers (classes of `qeffect.action_blocks`)."""

    def refresh(self, stage: int, link: int = 0) -> Refresh:
        """Guard a refresh of a stage's weight cache: ``with contract.refresh(stage): ...``."""
        return Refresh(self, stage, link)

    def evaluation(self, stage: int, **options: Any) -> Evaluation:
        """
        Guard an evaluation (a forward without training): ``with contract.evaluation(stage) as e:
        ...``.

        The options are those of `check_evaluation`.
        """
        return Evaluation(self, stage, options)

    def forward(self, key: TapeKey, **options: Any) -> Forward:
        """Guard F (a forward): ``with contract.forward(key) as f: ...``, then ``f.ref``."""
        return Forward(self, key, options)

    def dgrad(self, key: TapeKey, ref: TapeRef, **options: Any) -> Dgrad:
        """
        Guard dI (an input gradient): ``with contract.dgrad(key, ref) as i: ...; i.queued =
        matrices``.
        """
        return Dgrad(self, key, ref, options)

    def wgrad(self, key: TapeKey, ref: TapeRef, **options: Any) -> Wgrad:
        """
        Guard dW (a weight gradient): ``with contract.wgrad(key, ref) as w: ...; w.covered =
        matrices``.
        """
        return Wgrad(self, key, ref, options)

    def update(self, **options: Any) -> Update:
        """
        Guard the optimizer's update: ``with contract.update(): optimizer.step()``.

        If the block raises, the weights count as half updated: actions and checkpoints are refused
        until a `restore`. The options are those of `check_update`.
        """
        return Update(self, options)
