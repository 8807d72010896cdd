"""
Tied weights of a pipeline: two copies of one weight, and the sum of their gradients.

Each copy has a gradient of its own, summed over the microbatches of its stage, then over the
replicas. When all of a rank's other gradients are reduced, those of the copies are added, the first
copy's and the second's, in one addition, and every copy gets the result. One addition commutes, so
that both ranks of a pair have the same bits. AdamW then does the same to each: they stay alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from qeffect.config import Bucket, StageConfig
from qeffect.sharing import require_tied_ranks

from ..backends.protocol import BackendError
from ..step.memory.tied_weights import Place
from .replicas import Replicas

__all__ = ["Reducers", "Tie", "require_declared"]


@attrs.frozen
class Tie:
    """
    One weight, and its two copies.

    Args:
        name: The weight's name in the model: of its bucket, and in a checkpoint.
        copies: Stage, and name there, of both. The gradients are added in this order; in the norm
            of all gradients the first one counts.

    Raises:
        BackendError: There are not two copies.
    """

    name: str
    copies: tuple[Place, ...]

    def __attrs_post_init__(self) -> None:
        if len(set(self.copies)) != 2 or len(self.copies) != 2:
            raise BackendError(f"{self.name!r} is tied with the copies {self.copies}; expected two")

    def of(self, stages: Sequence[int]) -> tuple[Place, ...]:
        """The copies in some stages."""
        return tuple(place for place in self.copies if place[0] in stages)


def require_declared(
    said: Sequence[Sequence[Tie]], homes: Mapping[int, int], ranks: Sequence[int]
) -> None:
    """
    Require that every rank of a pipeline declares the same ties, before the first step.

    Args:
        said: What each rank of the world declares.
        homes: By stage, its place in a pipeline.
        ranks: Global rank of each place.

    Raises:
        Refused: ``arena.overlapping-destinations``: a rank has a copy that another rank calls
            tied, and does not declare it so.
        BackendError: A copy is of a stage that is not there, or ranks declare different ties.
    """
    for name in dict.fromkeys(tie.name for ties in said for tie in ties):
        claimed: dict[int, set[str]] = {}
        for ties in said:
            for stage, local in (p for tie in ties if tie.name == name for p in tie.copies):
                claimed.setdefault(stage, set()).add(local)
        if absent := sorted(claimed.keys() - homes.keys()):
            raise BackendError(f"{name!r} is tied in stage {absent[0]}, which is not there")
        stages: list[list[StageConfig]] = [[] for _ in ranks]
        for stage, names in sorted(claimed.items()):
            own = [tie for tie in said[ranks[homes[stage]]] if tie.name == name]
            stages[homes[stage]].append(_described(stage, names, name, own))
        require_tied_ranks(stages)
    for rank, ties in enumerate(said):
        if tuple(ties) != tuple(said[0]):
            raise BackendError(
                f"ties are {list(said[0])} on rank 0 and {list(ties)} on rank {rank}; give every "
                "rank the same"
            )


def _described(stage: int, names: set[str], weight: str, own: Sequence[Tie]) -> StageConfig:
    """
    The copies of a stage, as they are compared between ranks.

    An embedding is among them, which is no matrix of its stage's own configuration: its gradient
    comes out of dI. It leaves in the same bucket.
    """
    declared = {local for tie in own for at, local in tie.copies if at == stage}
    return StageConfig(
        stage,
        microbatches=1,
        slots=1,
        matrices=tuple(names),
        buffers=dict.fromkeys(names, weight),
        tied=tuple(names & declared),
        reduces=True,
        buckets=(Bucket(weight, tuple(names)),),
    )


class Reducers:
    """
    The reducer of a rank that has a copy: sums over replicas, and over a tied weight's copies.

    What it begins behind a weight's sum waits for it. Side by side on a device, two groups' sums
    would run in the order that each device takes, and ranks that take different ones could wait for
    each other in a circle: the copies of one weight are on other ranks than its replicas.

    Args:
        replicas: The sum over replicas; None where there is one.
        pairs: By tied weight, the sum with the other rank that has a copy; None where both copies
            are here. Only weights that have a copy here.
    """

    def __init__(self, replicas: Replicas | None, pairs: Mapping[str, Replicas | None]) -> None:
        self.replicas, self.pairs = replicas, dict(pairs)

    def __call__(self, bucket: int | str, gradients: Mapping[str, Tensor]) -> Any:
        """Begin to sum a bucket's gradients in place."""
        if not isinstance(bucket, str) or bucket not in self.pairs:
            return None if self.replicas is None else self.replicas(bucket, gradients)
        if self.replicas is not None:
            self.replicas(bucket, gradients).wait()
        pair = self.pairs[bucket]
        if pair is not None:
            pair(bucket, gradients).wait()
            return None
        first, second = gradients.values()
        first.add_(second)
        second.copy_(first)
        return None

    def largest(self, words: Tensor) -> Any:
        """As `Replicas.largest`; one replica's own are the largest."""
        return None if self.replicas is None else self.replicas.largest(words)

    def let_go(self) -> None:
        """As `Replicas.let_go`, of all groups at once."""
        for held in self._held():
            held.let_go()

    def close(self, *, abort: bool = True) -> None:
        """End the groups, as `Replicas.close`."""
        for held in self._held():
            held.close(abort=abort)

    def _held(self) -> list[Replicas]:
        return [held for held in (self.replicas, *self.pairs.values()) if held is not None]
