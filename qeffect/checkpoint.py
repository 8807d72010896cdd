"""
The persistent part of a contract, which a checkpoint holds (paper, III-E).
"""

from __future__ import annotations

from typing import Any, Literal

from attrs import Attribute, field, frozen

from .configuration import Configuration
from .refusals import refused
from .stage_config import StageConfig
from .text import shown

__all__ = ["Caches", "Checkpoint", "cache_semantics", "require_same"]

#: State of weight caches after a restore. ``stale``: every stage must refresh its cache before its
#: first forward. ``unguarded``: the version relation is left out, and caches are not checked.
Caches = Literal["stale", "unguarded"]


def cache_semantics(configuration: Configuration) -> Caches:
    """
    Return the state of weight caches after a restore with this configuration.

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

    A checkpoint does not contain the state that each process rebuilds: counters (effect tokens,
    slot generations), streams, events, addresses and cache contents.

    Args:
        epoch: Weight epoch of the process.
        configuration: The contract's configuration, without addresses and devices of destinations,
            which each process sets.
        state: Handle of the numerical state (weights, optimizer, scales), for example a file name.
            The caller saves that state.
        recipe: Precision recipe of the run, any JSON value.
        caches: State of weight caches after a restore; by default derived from the configuration.

    Raises:
        TypeError: The configuration is not a `Configuration`.
        ValueError: The epoch is not a non-negative integer.

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
        """Configuration of the stages, without addresses and devices of destinations."""
        return self.configuration.stages

    @property
    def relations(self) -> tuple[str, ...]:
        """Names of the relations (groups of guards) that the contract checks."""
        return self.configuration.relations

    def summary(self) -> str:
        """
        Return one line that names the stages and the relations (groups of guards).

        >>> from qeffect import Contract, StageConfig
        >>> Contract([StageConfig(0, microbatches=2, slots=1)]).checkpoint().summary()
        'stages 0 (M=2, 1 slot) under ...'
        """
        return self.configuration.summary()


def require_same(checkpoint: Checkpoint, own: Configuration) -> None:
    """
    Require that a checkpoint has the same configuration as a contract, and the same state of weight
    caches after a restore.

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
            f"a checkpoint of {checkpoint.summary()}, with {part}: {saved}",
            f"a checkpoint of {own.summary()}, with {part}: {ours}",
        )
