"""
Tied weights of a pipeline. A tied weight has two copies, and both copies get the sum of their
gradients.

Each copy has its own gradient, summed over the microbatches of its stage, then over the replicas.
Once a rank has reduced all its other gradients, the two copies' gradients are added, and both
copies get the result. A single addition commutes, so both ranks get the same bits. AdamW then
updates both copies in the same way, and the copies stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from qeffect.sharing import require_tied_ranks
from qeffect.stage_config import Bucket, StageConfig

from ..backends.protocol import BackendError
from ..step.memory.tied_weights import Place
from .replicas import Replicas

__all__ = ["Reducers", "Tie", "require_declared"]


@attrs.frozen
class Tie:
    """
    One weight and its two copies.

    Args:
        name: The weight's name in the model and in a checkpoint, and the name of its bucket.
        copies: For each of the two copies, its stage and its name within the stage. Gradients are
            added in this order. The norm of all gradients counts only the first copy.

    Raises:
        BackendError: The tie does not have exactly two different copies.
    """

    name: str
    copies: tuple[Place, ...]

    def __attrs_post_init__(self) -> None:
        if len(set(self.copies)) != 2 or len(self.copies) != 2:
            raise BackendError(
                f"{self.name!r} is tied: expected two different copies, found {self.copies}"
            )

    def of(self, stages: Sequence[int]) -> tuple[Place, ...]:
        """Return the copies that are in the given stages."""
        return tuple(place for place in self.copies if place[0] in stages)


def require_declared(
    said: Sequence[Sequence[Tie]], homes: Mapping[int, int], ranks: Sequence[int]
) -> None:
    """
    Raise an error unless every rank of a pipeline declares the same ties. Called before the first
    step.

    Args:
        said: By rank, the ties that the rank declares.
        homes: By stage, the rank within the pipeline that holds the stage.
        ranks: By rank within the pipeline, its global rank.

    Raises:
        Refused: ``arena.overlapping-destinations``: a rank declares a tie with a copy on another
            rank, but the other rank does not declare this tie.
        BackendError: A tie names a missing stage, or ranks declare different ties.
    """
    for name in dict.fromkeys(tie.name for ties in said for tie in ties):
        claimed: dict[int, set[str]] = {}
        for ties in said:
            for stage, local in (p for tie in ties if tie.name == name for p in tie.copies):
                claimed.setdefault(stage, set()).add(local)
        if absent := sorted(claimed.keys() - homes.keys()):
            raise BackendError(
                f"{name!r} is tied in stage {absent[0]}, but the pipeline has no such stage"
            )
        stages: list[list[StageConfig]] = [[] for _ in ranks]
        for stage, names in sorted(claimed.items()):
            own = [tie for tie in said[ranks[homes[stage]]] if tie.name == name]
            stages[homes[stage]].append(_described(stage, names, name, own))
        require_tied_ranks(stages)
    for rank, ties in enumerate(said):
        if tuple(ties) != tuple(said[0]):
            raise BackendError(
                f"ties are {list(said[0])} on rank 0 and {list(ties)} on rank {rank}; declare the "
                "same ties on every rank"
            )


def _described(stage: int, names: set[str], weight: str, own: Sequence[Tie]) -> StageConfig:
    """
    Return the copies of a stage in the form of a contract's configuration, to compare them between
    ranks.

    In this form an embedding counts as a matrix. The stage's own configuration does not list the
    embedding as a matrix, because dI computes its gradient. The embedding's gradient is reduced in
    the same bucket.
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
    The reducer of a rank that has a copy of a tied weight. It computes sums over replicas and sums
    over the weight's copies.

    The sum over a weight's copies starts after the sum over replicas, and later sums wait for the
    sum over copies. If sums of two process groups ran at the same time, each device would choose
    their order. A weight's copies and its replicas are on different ranks, so ranks with different
    orders could wait for each other forever.

    Args:
        replicas: Computes the sum over replicas; None with one replica.
        pairs: For each tied weight with a copy on this rank, the object that adds the gradients of
            both copies; None if this rank has both copies.
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
        """
        Begin to replace int32 numbers by their maximum over all replicas. With one replica, nothing
        has to be done.
        """
        return None if self.replicas is None else self.replicas.largest(words)

    def let_go(self) -> None:
        """Begin to abort all groups at the same time, but do not wait; `close` waits."""
        for held in self._held():
            held.let_go()

    def close(self, *, abort: bool = True) -> None:
        """End the groups. Ranks that wait in a group stop waiting."""
        for held in self._held():
            held.close(abort=abort)

    def _held(self) -> list[Replicas]:
        return [held for held in (self.replicas, *self.pairs.values()) if held is not None]
