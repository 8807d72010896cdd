"""
What a checkpoint of the contract holds, and as importantly what it never holds (paper, III-E).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

if TYPE_CHECKING:
    from .config import StageConfig

__all__ = ["Checkpoint"]


def _without_places(stages: Iterable[StageConfig]) -> tuple[StageConfig, ...]:
    """Configurations without the addresses and devices of their destinations."""
    return tuple(
        evolve(
            config,
            destinations=tuple(evolve(d, address=0, device="") for d in config.destinations),
        )
        for config in stages
    )


@frozen
class Checkpoint:
    """
    The persistent part of a contract.

    It has no tokens, streams, events, generations, addresses or cache contents: those belong to
    a process and are rebuilt. Weight caches are stale after every restore.

    Args:
        epoch: Weight epoch of the process.
        stages: Configuration of its stages, without where their destinations are: addresses are
            made anew in every process.
        relations: Relations that its transitions were composed from.
        state: Handle of the numerical state, saved by the caller.
        recipe: Precision recipe.

    >>> from qeffect import Contract, StageConfig
    >>> saved = Contract([StageConfig(0, microbatches=1, slots=1)]).checkpoint(state="step-0.pt")
    >>> saved.epoch, saved.state
    (0, 'step-0.pt')
    """

    epoch: int
    stages: tuple[StageConfig, ...] = field(converter=_without_places)
    relations: tuple[str, ...]
    state: Any = None
    recipe: Any = None

    def summary(self) -> str:
        """
        Say in a line what was checkpointed.

        >>> from qeffect import Contract, StageConfig
        >>> Contract([StageConfig(0, microbatches=2, slots=1)]).checkpoint().summary()
        'stages 0 (M=2, 1 slots) under ...'
        """
        stages = ", ".join(f"{c.stage} (M={c.microbatches}, {c.slots} slots)" for c in self.stages)
        return f"stages {stages} under {', '.join(self.relations)}"
