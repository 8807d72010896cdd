"""
What a checkpoint of the contract holds, and as importantly what it never holds (paper, III-E).
"""

from __future__ import annotations

from typing import Any, Literal

from attrs import Attribute, field, frozen

from .config import StageConfig
from .configuration import Configuration
from .refusals import refused
from .text import shown

__all__ = ["Caches", "Checkpoint", "cache_semantics", "require_same"]

#: What a restore makes of weight caches: ``stale`` has every stage refresh its cache before its
#: first forward, ``unguarded`` leaves caches alone, because the version relation is left out.
Caches = Literal["stale", "unguarded"]


def cache_semantics(configuration: Configuration) -> Caches:
    """
    Return what a contract of this configuration makes of weight caches at a restore.

    >>> cache_semantics(Configuration((), ("ownership", "version")))
    'stale'
    """
    return "stale" if "version" in configuration.relations else "unguarded"


def _weight_epoch(checkpoint: Any, attribute: Attribute[Any], value: Any) -> None:
    if value.__class__ is not int or value < 0:
        raise ValueError(
            f"the epoch of a checkpoint must be a non-negative int, got {shown(value)}"
        )


def _without_places(configuration: Configuration) -> Configuration:
    if not isinstance(configuration, Configuration):
        raise TypeError(
            f"the configuration of a checkpoint must be a Configuration, got {shown(configuration)}"
        )
    return configuration.without_places()


@frozen
class Checkpoint:
    """
    The persistent part of a contract.

    It has no tokens, streams, events, generations, addresses or cache contents: those belong to
    a process and are rebuilt.

    Args:
        epoch: Weight epoch of the process.
        configuration: What the contract was built from, without where its destinations are:
            addresses are made anew in every process.
        state: Handle of the numerical state, saved by the caller.
        recipe: Precision recipe.
        caches: Cache semantics: what a restore makes of weight caches; by default what the
            configuration says.

    Raises:
        TypeError, ValueError: The epoch is not a non-negative integer, or the configuration is
            none.

    >>> from qeffect import Contract, StageConfig
    >>> saved = Contract([StageConfig(0, microbatches=1, slots=1)]).checkpoint(state="step-0.pt")
    >>> saved.epoch, saved.state, saved.caches
    (0, 'step-0.pt', 'stale')
    """

    epoch: int = field(validator=_weight_epoch)
    configuration: Configuration = field(converter=_without_places)
    state: Any = None
    recipe: Any = None
    caches: Caches = field()

    @caches.default
    def _caches(self) -> Caches:
        return cache_semantics(self.configuration)

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """Configuration of the stages, without where their destinations are."""
        return self.configuration.stages

    @property
    def relations(self) -> tuple[str, ...]:
        """Relations that the contract's transitions were composed from."""
        return self.configuration.relations

    def summary(self) -> str:
        """
        Say in a line what was checkpointed.

        >>> from qeffect import Contract, StageConfig
        >>> Contract([StageConfig(0, microbatches=2, slots=1)]).checkpoint().summary()
        'stages 0 (M=2, 1 slots) under ...'
        """
        return self.configuration.summary()


def require_same(checkpoint: Checkpoint, own: Configuration) -> None:
    """
    Require that a checkpoint is of a contract's own configuration and cache semantics.

    Raises:
        Refused: ``persistence.configuration``, naming the first part that differs.
    """
    found = checkpoint.configuration.difference(own.without_places())
    if found is None and checkpoint.caches != cache_semantics(own):
        found = "caches", repr(checkpoint.caches), repr(cache_semantics(own))
    if found is not None:
        part, saved, ours = found
        raise refused(
            "persistence.configuration",
            "restore",
            f"a checkpoint of {checkpoint.summary()}, with another {part}: {saved}",
            f"one of {own.summary()}, with {part}: {ours}",
        )
