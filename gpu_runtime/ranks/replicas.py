"""
Sum a stage's gradients over the data-parallel replicas, once the stage's gradients are complete.

Several gradients of a bucket can share one collective call. With two replicas, sharing changes no
bits, because each sum is a single addition, which commutes. With more replicas, a value's position
in the call determines the order of the additions. Then the last bits can differ from the bits of
separate calls. All replicas still get the same bits.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from .channels import Abort, LostError, end_group
from .wait_clock import WaitClock

__all__ = ["Replicas", "calls_of"]

ALONE_BYTES = 1 << 20
"""Size in bytes above which a gradient gets its own call under gloo. gloo copies the gradients of a
shared call into one buffer and back; for larger gradients, these copies cost more than a separate
call. NCCL copies nothing."""


class _BucketCollectives:
    """The running collectives of one bucket."""

    def __init__(self, owner: Replicas, bucket: int | str, gradients: Iterable[Tensor]) -> None:
        self.owner, self.bucket = owner, bucket
        self.works: list[Any] = []
        self.gradients = list(gradients)

    def wait(self) -> None:
        """Wait for the sums, on the host (gloo) or on the current stream (NCCL)."""
        try:
            while self.works:
                work = self.works.pop()
                if self.owner.host:
                    with self.owner.waits.waiting("reduction"):
                        work.wait(self.owner.deadline)
                else:
                    work.wait()
        except RuntimeError as error:
            work = None
            raise self.lost(error) from None
        gradients, self.gradients = self.gradients, []
        if self.owner.mean and gradients:
            torch._foreach_div_(gradients, float(self.owner.size))

    def lost(self, error: RuntimeError) -> LostError:
        """Convert the library's error to a `LostError`."""
        library = str(error)
        error.__traceback__ = None  # its frames hold the group, and the group its connections
        name = f"{self.bucket}REDUCE_GRAD"
        return LostError(name, -1, "imed out" in library, library)


class Replicas:
    """
    The reducer of a `Runtime`: sums gradients over the replicas of this rank's stages.

    Every replica runs the same row, so all replicas start their reductions in the same order.

    Args:
        group: A process group of the ranks that hold the same stages.
        host: Whether the host waits for a collective (gloo).
        deadline: Timeout of a host's wait, in seconds.
        mean: Whether to divide each sum by the number of replicas.
        together: Whether gradients of the same dtype in a bucket share a call. With None they share
            a call only if there are two replicas, because sharing then changes no bits.
    """

    def __init__(
        self,
        group: Any,
        *,
        host: bool,
        deadline: float,
        mean: bool = False,
        together: bool | None = None,
    ) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.mean = mean
        self.together = self.size == 2 if together is None else together
        self.host = host
        self.deadline = datetime.timedelta(seconds=deadline)
        self.waits = WaitClock()  # of the host
        self._started: list[_BucketCollectives] = []
        self._ending: Abort | None = None

    def __call__(self, bucket: int | str, gradients: Mapping[str, Tensor]) -> _BucketCollectives:
        """Begin to sum a bucket's gradients in place."""
        started = self._begun(bucket, gradients.values())
        alone = ALONE_BYTES if self.host else None
        try:
            for call in calls_of(started.gradients, together=self.together, alone=alone):
                if len(call) == 1:
                    work = dist.all_reduce(call[0], group=self.group, async_op=True)
                    started.works.append(work)
                    continue
                with _coalescing_manager(group=self.group, async_ops=True) as one:
                    for gradient in call:
                        dist.all_reduce(gradient, group=self.group)
                started.works += one.works
        except RuntimeError as error:
            raise started.lost(error) from None
        return started

    def largest(self, words: Tensor) -> _BucketCollectives:
        """Begin to replace int32 numbers in place by their maximum over all replicas."""
        started = self._begun("amax ", ())
        try:
            work = dist.all_reduce(words, dist.ReduceOp.MAX, group=self.group, async_op=True)
        except RuntimeError as error:
            raise started.lost(error) from None
        started.works.append(work)
        return started

    def _begun(self, bucket: int | str, gradients: Iterable[Tensor]) -> _BucketCollectives:
        started = _BucketCollectives(self, bucket, gradients)
        if self.group is None:  # torch would take None for the group of all ranks
            raise started.lost(RuntimeError("its connection is closed"))
        self._started = [s for s in self._started if s.works] + [started]
        return started

    def let_go(self) -> None:
        """
        Begin to abort the group, but do not wait; `close` waits.

        A graph may contain kernels of several process groups. The graph can end only when all these
        groups are aborted.
        """
        self._forget()
        group, self.group = self.group, None
        if group is not None and not self.host:
            self._ending = Abort(group)
        else:
            self.group = group

    def _forget(self) -> None:
        for started in self._started:  # works hold connections open
            started.works.clear()

    def close(self, *, abort: bool = True) -> None:
        """
        End the group; replicas that wait in the group stop waiting. `abort` says whether
        collectives may still be running.
        """
        self._forget()
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.join()
        group, self.group = self.group, None
        if group is not None:
            end_group(group, abort=abort and not self.host)


def calls_of(
    gradients: Iterable[Tensor], *, together: bool, alone: int | None
) -> list[list[Tensor]]:
    """
    Assign gradients to collective calls. Only dtype and size decide, so every replica makes the
    same calls.

    Args:
        gradients: The gradients of a bucket, in the bucket's order.
        together: Whether gradients of one dtype may share a call.
        alone: Size in bytes. A larger gradient gets its own call. None sets no limit.

    Returns:
        The gradients of each call.
    """
    found: list[list[Tensor]] = []
    of_type: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        large = alone is not None and gradient.numel() * gradient.element_size() > alone
        if not together or large:
            found.append([gradient])
        elif gradient.dtype in of_type:
            of_type[gradient.dtype].append(gradient)
        else:
            of_type[gradient.dtype] = [gradient]
            found.append(of_type[gradient.dtype])
    return found
