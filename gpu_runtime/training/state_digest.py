"""
One SHA-256 of a run's weights, AdamW state and scaling state. The tensors are ordered by their
names in a checkpoint.

With `[model] scales = "epoch"` two runs have the same digest if their model, recipe, number of
microbatches and number of replicas are the same. Their schedule and mapping onto ranks may differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from torch import Tensor

from ..backends.protocol import BackendError
from ..ranks.membership import all_gather
from ..ranks.worker import Worker
from ..step.memory.numerical_state import raw_bits
from .state import NUMERICAL, Naming, PersistentTensors

__all__ = ["digest_of", "state_digest", "tensor_hashes"]


def tensor_hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return one string per tensor, with its dtype, its shape, and the SHA-256 of its raw bits."""
    return {
        name: f"{tensor.dtype}{list(tensor.shape)}:"
        + hashlib.sha256(raw_bits(tensor).cpu().numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def digest_of(hashes: Mapping[str, str]) -> str:
    """
    Return the SHA-256 of all tensors' hashes, in the order of their names.

    >>> digest_of({"b": "2", "a": "1"}) == digest_of({"a": "1", "b": "2"})
    True
    """
    return hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()


def state_digest(worker: Worker, naming: Naming) -> str:
    """
    Return the digest of a run's state. Every rank must call this function, between the same two
    steps.

    States of random generators are left out, because each process has its own random state.

    Args:
        worker: This rank.
        naming: How checkpoints name each tensor of the model.

    Raises:
        BackendError: A tensor differs between two ranks that both have it, or between two copies of
            a tied weight. Every rank raises the same error.
    """
    worker.runtime.drain()
    place = worker.member.rank % worker.pp
    held = PersistentTensors.of(worker.runtime, worker.optimizer, naming, worker.replica, place)
    held.require_alike()
    own = tensor_hashes({name: one for name, one in held.tensors.items() if not _of_process(name)})
    merged: dict[str, str] = {}
    for rank, said in enumerate(all_gather(worker.member, own)):
        for name, word in said.items():
            if merged.setdefault(name, word) != word:
                raise BackendError(
                    f"{name} of rank {rank} differs from the same tensor of a lower rank, so the "
                    "run has no digest: the replicas drifted apart"
                )
    return digest_of(merged)


def _of_process(name: str) -> bool:
    kind, _, rest = name.partition(".")
    return kind == NUMERICAL and rest.partition(".")[2].startswith("process")
