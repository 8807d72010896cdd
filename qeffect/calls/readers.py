"""
Calls about reads of the weights on other streams: saves and broadcasts that run beside the step.
"""

from __future__ import annotations

from ..threads import exclusive_call
from .parts import ContractParts

__all__ = ["ReaderCalls"]


class ReaderCalls(ContractParts):
    """Record when a stream of its own begins and ends to read a stage's weights."""

    @exclusive_call
    def start_weights_read(self, stage: int, link: int = 0) -> None:
        """
        Record that a stream of its own begins to read a stage's weights.

        Call it for an asynchronous save or a broadcast of parameters. The reader's stream starts
        behind the link's caller, which must have waited for the optimizer's latest update. No
        update begins before `finish_weights_read`.

        Args:
            stage: The stage whose weights are read; they have one reader at a time.
            link: Link of the caller behind which the reader's stream starts.

        Raises:
            Refused: ``completion.wrong-stream``, ``completion.second-reader``,
                ``completion.update-to-reader``, ``epoch.in-flight`` or ``epoch.half-updated``.
            TypeError, ValueError: No stage or link has that number.

        >>> from qeffect import Contract, StageConfig
        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)])
        >>> contract.start_weights_read(0)
        >>> contract.start_weights_read(0)
        Traceback (most recent call last):
        ...
        qeffect.refusals.Refused: completion.second-reader in start_weights_read: found ...
        >>> contract.finish_weights_read(0)
        """
        self._epochs.weights_read("start_weights_read", stage, link)

    @exclusive_call
    def finish_weights_read(self, stage: int, link: int = 0) -> None:
        """
        Record that a caller's stream waits for the read of a stage's weights.

        The caller is then the one that must finalize every stage and run the update. If the host
        has seen the read finish, any caller may be named.

        Args:
            stage: The stage.
            link: Link of the stream that will run the update.

        Raises:
            Refused: ``completion.wrong-stream``, ``completion.not-reading`` or
                ``completion.wrong-consumer``.
            TypeError, ValueError: No stage or link has that number.
        """
        self._epochs.weights_read("finish_weights_read", stage, link)
