"""
Copies of one weight: separate parameters, each updated with the sum of all copies' gradients.

Two matrices that are one `torch.nn.Parameter` are tied (`tied_weights.py`). Copies are for weights
that cannot share memory, for example weights of stages on two ranks. Another example is an
embedding and its head, because dI computes the embedding's gradient and dW computes the head's.
Copies start with the same bits, and each copy gets the same gradient sum and the same update.
Therefore they stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qeffect.stage_config import Bucket

from ...backends.protocol import BackendError, StageBackend, matrices, parameters
from .tied_weights import Place

__all__ = ["Copies", "buckets_of", "names_of", "require_copies"]


Copies = Mapping[str, Sequence[Place]]
"""A process's copies: by the weight's name, the stage and local name of each copy."""


def names_of(copies: Copies, stage: int) -> dict[str, str]:
    """
    Return, for each copy in a stage, the name of its weight. The key is the copy's name within the
    stage.

    >>> names_of({"table": [(0, "embedding"), (3, "head")]}, 3)
    {'head': 'table'}
    """
    return {
        local: name for name, places in copies.items() for owner, local in places if owner == stage
    }


def require_copies(
    stages: Mapping[int, StageBackend],
    copies: Copies,
    buckets: Mapping[int, Sequence[Bucket]],
    *,
    reduces: bool,
) -> None:
    """
    Raise an error unless the process's stages have these copies, and the runtime has a reducer that
    sums their gradients.

    Args:
        stages: The process's stages.
        copies: By the weight's name, the stage and the local name of each copy of the weight.
        buckets: The configured buckets.
        reduces: Whether the runtime has a reducer.

    Raises:
        BackendError: A copy does not exist, two copies of one weight have different shapes or
            dtypes, a copy's stage has configured buckets, or the runtime has no reducer.
    """
    for name, places in copies.items():
        if places and not reduces:
            raise BackendError(
                f"{name!r} has copies, but no reducer sums their gradients: pass a reducer"
            )
        forms = set()
        for stage, local in places:
            own = parameters(stages[stage]) if stage in stages else {}
            if local not in own:
                raise BackendError(
                    f"stage {stage} has no parameter {local!r}, which is named as a copy"
                )
            if stage in buckets:
                raise BackendError(
                    f"stage {stage} has a copy of {name!r} and configured buckets; leave the "
                    "buckets out: a copy is reduced in a bucket of the weight's name"
                )
            forms.add((tuple(own[local].shape), own[local].dtype))
        if len(forms) > 1:
            raise BackendError(f"the copies of {name!r} differ in shape or type: {sorted(forms)}")


def buckets_of(stage: StageBackend, copies: Copies) -> tuple[Bucket, ...]:
    """
    Return the buckets (gradients that are reduced together) of a stage with copies: one for each
    copied weight, with the weight's name, and one for all other gradients.

    If a copy is not a matrix, its bucket contains no matrices. Such a bucket is complete once the
    stage's gradients are complete.
    """
    own = names_of(copies, stage.index)
    if not own:
        return ()
    every = [matrix.name for matrix in matrices(stage)]
    rest = Bucket(stage.index, tuple(name for name in every if name not in own))
    held = {
        name: tuple(local for local, of in own.items() if of == name and local in every)
        for name in own.values()
    }
    return (rest, *(Bucket(name, local) for name, local in held.items()))
