"""Functions with which the ranks of a guarded pipeline restart an epoch together."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

from .meeting import MeetingError, meet

__all__ = ["UNFINISHED", "PipelineRanks"]

#: Numbers the guards of a process. All ranks must put their guards on in the same order.
_NUMBERS = count()
#: What an unfinished step leaves in a schedule and in its stages, by microbatch.
UNFINISHED = (
    "_internal_losses",
    "fwd_cache",  # before torch 2.15
    "_forward_chunk_states",  # from torch 2.15 on
    "bwd_cache",
    "backward_state",
    "dw_runner",
    "saved_values_for_backward_weight_cache",  # of TorchTitan's GraphPP
)


class PipelineRanks:
    """
    Lets one rank of a pipeline agree with the other ranks on the epoch (optimizer step) to restart.

    Args:
        schedule: The schedule of this rank.
        stages: The schedule's stages on this rank.
    """

    def __init__(self, schedule: Any, stages: list[Any]) -> None:
        self._schedule, self._stages = schedule, stages
        self._number, self._rebuilds = next(_NUMBERS), 0

    def rank(self) -> int:
        """Return this process's rank in the pipeline."""
        rank = getattr(self._schedule, "rank", None)
        return int(self._stages[0].group_rank if rank is None else rank)

    def ranks(self) -> list[int]:
        """Return the ranks of the pipeline's process group."""
        from torch import distributed

        if not distributed.is_initialized():
            return []
        return distributed.get_process_group_ranks(getattr(self._stages[0], "group", None))

    def folder(self, log: Path | None) -> Path | None:
        """
        Return the folder of this process's logs. If there are several pipelines, each has its own
        folder.
        """
        ranks = self.ranks()
        if log is None or not ranks:
            return log
        from torch import distributed

        alone = len(ranks) == distributed.get_world_size()
        return log if alone else log / f"pipeline{min(ranks)}"

    def agree(self, own: Mapping[str, Any], timeout_s: float) -> int:
        """
        Return the lowest epoch (optimizer step) that any rank is in. Every rank must call this
        method after its step has ended.

        Args:
            own: This rank's state: its ``epoch``; ``posted``, the number of messages that its step
                has posted; ``of``, the number of messages in a whole step; and ``whole``, whether
                the step ended before its first message or after its last message.
            timeout_s: How long to wait for the other ranks, in seconds.

        Raises:
            MeetingError: A rank did not call in time, or its step ended between two messages.
        """
        ranks = self.ranks()
        if len(ranks) < 2:
            return int(own["epoch"])
        words = self._meet(ranks, own, timeout_s)
        if cut := {rank: word for rank, word in words.items() if not word["whole"]}:
            rank, word = min(cut.items())
            raise MeetingError(
                f"rebuild: the step ended on rank {rank} after {word['posted']} of "
                f"{word['of']} messages; relaunch the ranks from their checkpoint"
            )
        self._drain(timeout_s)
        return min(int(word["epoch"]) for word in words.values())

    def _meet(self, ranks: list[int], own: Mapping[str, Any], timeout_s: float) -> dict[int, Any]:
        """Exchange with the other ranks how each rank's step ended."""
        from torch import distributed

        place = f"qeffect/rebuild/{'-'.join(map(str, ranks))}/{self._number}/{self._rebuilds}"
        self._rebuilds += 1
        store: Any = distributed.distributed_c10d._get_default_store()
        try:
            return meet(store, place, distributed.get_rank(), ranks, own, timeout_s=timeout_s)
        except MeetingError as error:
            raise MeetingError(
                f"rebuild: {error}; every rank of the pipeline has to call rebuild, after its own "
                "step has ended"
            ) from None

    def _drain(self, timeout_s: float) -> None:
        """Wait for receives that torch has posted and not awaited; all were sent."""
        for posted in ("fwd_recv_ops", "bwd_recv_ops"):
            left = getattr(self._schedule, posted, {})
            for works in left.values():
                for work in works:
                    work.wait(timedelta(seconds=timeout_s))
            left.clear()

    def drop_unfinished(self) -> None:
        """
        Drop the data of an unfinished step from the schedule and its stages.

        All receives must have ended before this call.
        """
        for owner in (self._schedule, *self._stages):
            for name in UNFINISHED:
                getattr(owner, name, {}).clear()
        for stage in self._stages:
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                for info in infos:
                    if hasattr(info, "take_buffer"):  # from torch 2.15 on, a buffer of one receive
                        info.buffer = None
