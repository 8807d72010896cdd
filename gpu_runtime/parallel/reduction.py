"""
Gradients of a stage summed over its replicas, started when the stage is whole.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from qeffect.gpu_runtime.parallel.channels import LostError, end_group

__all__ = ["Replicas"]


class _Started:
    """A bucket's collectives."""

    def __init__(self, owner: Replicas, bucket: int | str, works: list[Any]) -> None:
        self.owner, self.bucket, self.works = owner, bucket, works

    def wait(self) -> None:
        """The host waits (gloo), or the current stream does (NCCL)."""
        try:
            while self.works:
                work = self.works.pop()
                if self.owner.host:
                    work.wait(self.owner.deadline)
                else:
                    work.wait()
        except RuntimeError as error:
            work = None
            raise self.lost(error) from None

    def lost(self, error: RuntimeError) -> LostError:
        """What the library's error means."""
        library = str(error)
        error.__traceback__ = None  # its frames hold the group, and that its connections
        name = f"{self.bucket}REDUCE_GRAD"
        return LostError(name, -1, "imed out" in library, library)


class Replicas:
    """
    The replicas of this rank's stages: a `Runtime`'s reducer.

    Every replica walks the same row, so that all start their reductions in the same order.

    Args:
        group: A process group of the ranks that hold the same stages.
        host: Whether the host waits for a collective (gloo).
        deadline: Seconds that a wait of the host may take.
    """

    def __init__(self, group: Any, *, host: bool, deadline: float) -> None:
        self.group = group
        self.host = host
        self.deadline = datetime.timedelta(seconds=deadline)
        self._started: list[_Started] = []

    def __call__(self, bucket: int | str, gradients: Mapping[str, Tensor]) -> _Started:
        """Begin to sum a bucket's gradients in place."""
        started = _Started(self, bucket, [])
        self._started = [s for s in self._started if s.works] + [started]
        try:
            for gradient in gradients.values():
                work = dist.all_reduce(gradient, group=self.group, async_op=True)
                started.works.append(work)
        except RuntimeError as error:
            raise started.lost(error) from None
        return started

    def close(self, *, abort: bool = True) -> None:
        """End the group; replicas that wait on it wake up. `abort` as for `Channels.close`."""
        for started in self._started:  # they hold connections open
            started.works.clear()
        group, self.group = self.group, None
        if group is not None:
            end_group(group, abort=abort and not self.host)
