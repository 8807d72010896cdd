"""
The gradient destinations of several contracts of one process, which must not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from .destinations import Destination, first_overlap, overlap_refused
from .refusals import refused
from .sharing import written_once
from .stage_config import StageConfig

__all__ = ["DestinationRegistry"]


class _Claim(NamedTuple):
    """A contract's destinations with an address or length, and the names of those with neither."""

    placed: tuple[Destination, ...]
    names: frozenset[str]


class DestinationRegistry:
    """
    The gradient destinations of all contracts that share the registry.

    Two contracts of one process do not know each other. If both write to the same gradient buffer,
    each overwrites the other's sums. If both are constructed with one registry, the second contract
    refuses destinations that overlap the first contract's. To replay an event log, or to compare
    runs over the same memory, construct a contract without the registry.

    A contract holds its destinations until `release`, or until it is no longer referenced.

    >>> from qeffect import Contract, Destination, StageConfig
    >>> registry = DestinationRegistry()
    >>> buffer = Destination("w", device="cuda:0", address=4096, nbytes=64)
    >>> stages = [StageConfig(0, 1, 1, matrices=("w",), destinations=(buffer,))]
    >>> first = Contract(stages, registry=registry)
    >>> Contract(stages, registry=registry)
    Traceback (most recent call last):
    ...
    qeffect.refusals.Refused: arena.overlapping-destinations in configure: found ...
    >>> registry.release(first)
    >>> len(Contract(stages, registry=registry).stages)
    1
    """

    def __init__(self) -> None:
        self._claims: WeakKeyDictionary[object, _Claim] = WeakKeyDictionary()

    def claim(self, owner: object, stages: Sequence[StageConfig]) -> None:
        """
        Record the destinations of a contract's stages; `Contract` calls this method.

        Destinations with an address or a length are compared by their bytes. A named destination
        without address and length is compared by its name.

        Args:
            owner: The contract. A contract holds its destinations as long as the contract is
                referenced.
            stages: The contract's stages, whose destinations are recorded.

        Raises:
            Refused: ``arena.overlapping-destinations``; then nothing is recorded.
        """
        own = _Claim(
            tuple(d for d in written_once(stages) if d.address or d.nbytes),
            frozenset(_unplaced(stages)),
        )
        for other in self._claims.values():
            overlap = first_overlap((*other.placed, *own.placed))
            if overlap is not None:
                raise overlap_refused(*overlap, "of a contract that shares the registry")
            if both := sorted(other.names & own.names):
                raise refused(
                    "arena.overlapping-destinations",
                    "configure",
                    f"the destination {both[0]!r}, which another contract of the same registry "
                    "writes",
                    "a destination that no other contract writes",
                )
        self._claims[owner] = own

    def release(self, owner: object) -> None:
        """Forget the destinations, if any, of a contract that will not run again."""
        self._claims.pop(owner, None)

    def __len__(self) -> int:
        """Return the number of contracts that hold destinations."""
        return len(self._claims)


def _unplaced(stages: Iterable[StageConfig]) -> Iterator[str]:
    """Yield the names of destinations that have neither an address nor a length."""
    for config in stages:
        placed = {d.matrix for d in config.destinations if d.address or d.nbytes}
        yield from (name for matrix, name in config.buffers if matrix not in placed)
