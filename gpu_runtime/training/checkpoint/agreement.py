"""
Before a checkpoint, all ranks check that they are at the same epoch (optimizer step) and have no
unfinished work or messages. If a check fails on a rank, all ranks stop with the same cause.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ...backends.protocol import BackendError
from ...ranks.channels import LostError, end_group, gloo_group
from ...ranks.late_faults import record_fault
from ...ranks.worker import Worker

__all__ = ["RankGroup", "SharedError", "consent", "lost", "raise_first", "stop"]


class RankGroup:
    """
    The process group of all ranks that checkpoints use.

    Only checkpoints use this group, because the thread of an asynchronous save may use it at any
    time.

    Attributes:
        handle: torch's process group; None before the first use and after `end`.
    """

    def __init__(self) -> None:
        self.handle: Any = None
        self._made_for: tuple[int, int] | None = None

    def gather(self, worker: Worker, own: Any) -> list[Any]:
        """Gather one object from every rank, ordered by rank. Every rank must call this method."""
        made_for = worker.name, worker.attempt
        if self.handle is None or self._made_for != made_for:
            self.end()  # some ranks may have ended theirs when all stopped
            self.handle = gloo_group(list(range(worker.member.world)), worker.limits.save)
            self._made_for = made_for
        found: list[Any] = [None] * worker.member.world
        dist.all_gather_object(found, own, group=self.handle)
        return found

    def end(self) -> None:
        """End the group, if it exists."""
        handle, self.handle = self.handle, None
        if handle is not None:
            end_group(handle, abort=False)


class SharedError(BackendError):
    """
    An error that every rank raises at the same point, because all ranks have exchanged the data
    that caused it.

    Then no rank waits for another rank, so each rank can simply raise the error. Other errors may
    occur on only one rank; `stop` reports them to the other ranks.
    """


def consent(worker: Worker) -> None:
    """
    Check that this rank's contract permits a checkpoint, and that all ranks are at the same epoch.

    If this function raises any error, the caller must pass the error to `stop`, which stops all
    ranks.

    Raises:
        BackendError: An optimizer update failed halfway on this rank.
        Exception: This rank's contract refuses, this rank's device failed, or a rank is gone or at
            another epoch.
    """
    runtime = worker.runtime
    if runtime.actions.broken is not None:
        raise BackendError(runtime.actions.broken)
    runtime.confirm()
    runtime.drain()
    runtime.contract.check_checkpoint()
    worker.consent.agree(runtime.epoch)


def stop(
    worker: Worker, error: Exception, group: RankGroup | None, at: str = "checkpoint"
) -> Exception:
    """
    Stop all ranks with the same cause, and return the error that this rank must raise.

    Args:
        worker: This rank.
        error: The error on this rank. A `SharedError` is returned unchanged, because every rank
            raises it.
        group: The process group to end, so that no other rank waits in this group. None while an
            asynchronous save of an earlier epoch still uses the group.
        at: Name of the operation between two steps, for the text of the cause.
    """
    if isinstance(error, SharedError):
        return error
    error.__traceback__ = error.__context__ = error.__cause__ = None
    for passage in worker.pipeline.passages.values():
        passage.forget()
    if group is not None:
        group.end()
    record_fault(worker.runtime, error, worker.runtime.epoch, worker.member.rank)
    if worker.runtime.actions.broken is not None:
        error.unrecoverable = True  # type: ignore[attr-defined]
    stopped = worker.consent.stop(error, worker.runtime.epoch, None, 0, at=at)
    worker.runtime.abort()
    return stopped


def lost(error: Exception, at: str = "checkpoint", peer: int = -1) -> Exception:
    """
    Convert a plain `RuntimeError` of torch to a `LostError`. Return other errors unchanged.

    Args:
        error: The error that was raised.
        at: What the ranks were doing.
        peer: The rank at the other end; -1 for a collective.
    """
    if isinstance(error, BackendError) or not isinstance(error, RuntimeError):
        return error
    if isinstance(error, LostError):
        return LostError(at, peer, error.late, error.library)
    library = str(error)
    return LostError(at, peer, "imed out" in library, library)


def raise_first(said: list[dict[str, Any]]) -> None:
    """
    Raise an error if a rank has a problem. The error describes the problem of the lowest such rank.

    Raises:
        SharedError: A rank has a problem.
    """
    for one in said:
        if one["problem"]:
            raise SharedError(one["problem"])
