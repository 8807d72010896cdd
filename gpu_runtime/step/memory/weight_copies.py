"""
Copies of one weight, each a parameter with a gradient of its own, whose gradients become one sum.

Two matrices that are one `torch.nn.Parameter` are `tied.py`'s. Copies are
for what has no memory in common: stages on two ranks, or an embedding, whose gradient comes out of
dI, and a head, whose gradient comes out of dW. They begin with the same bits, get the same sum and
the same update, and so stay the same weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qeffect.config import Bucket

from ...backends.protocol import BackendError, StageBackend, matrices, parameters
from .tied_weights import Place

__all__ = ["Copies", "buckets_of", "names_of", "require_copies"]


Copies = Mapping[str, Sequence[Place]]
"""The copies that a process has: by the weight's name, each by stage and name there."""


def names_of(copies: Copies, stage: int) -> dict[str, str]:
    """
    Names of the weights that a stage has copies of, by the copies' own names.

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
    Require copies that this process has, and something that makes their gradients one.

    Args:
        stages: The process's stages.
        copies: The copies.
        buckets: Those that are configured.
        reduces: Whether anything reduces.

    Raises:
        BackendError: A copy is not there, two of one weight have different forms, its stage has
            buckets of its own, or nothing reduces.
    """
    for name, places in copies.items():
        if places and not reduces:
            raise BackendError(
                f"{name!r} has copies, and nothing makes their gradients one: pass a reducer"
            )
        forms = set()
        for stage, local in places:
            own = parameters(stages[stage]) if stage in stages else {}
            if local not in own:
                raise BackendError(f"no parameter {local!r} of stage {stage} is there to be a copy")
            if stage in buckets:
                raise BackendError(
                    f"stage {stage} has a copy of {name!r} and buckets of its own; leave its "
                    "buckets out: a copy leaves in a bucket of the weight's name"
                )
            forms.add((tuple(own[local].shape), own[local].dtype))
        if len(forms) > 1:
            raise BackendError(f"the copies of {name!r} differ in shape or type: {sorted(forms)}")


def buckets_of(stage: StageBackend, copies: Copies) -> tuple[Bucket, ...]:
    """
    Buckets of a stage that has copies: the rest of it, and one of each weight's name.

    The bucket of a copy that is no matrix holds none: it is whole when the stage is.
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
