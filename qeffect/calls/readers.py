"""
Calls for reads of weights and gradients by other streams, concurrently with the step.
"""

from __future__ import annotations

from ..threads import exclusive_call
from .parts import ContractParts

__all__ = ["ReaderCalls"]


class ReaderCalls(ContractParts):
    """Record when a separate stream begins and ends a read of a stage's weights or gradients."""

    @exclusive_call
    def start_weights_read(self, stage: int, link: int = 0) -> None:
        """
        Record that a separate stream begins to read a stage's weights.

        Call `start_weights_read` for an asynchronous save or a broadcast of parameters. The
        reader's stream first waits for the link's caller stream. This caller stream must have
        waited for the optimizer's latest update. No update may begin before `finish_weights_read`.

        Args:
            stage: The stage whose weights are read; only one read of them may be under way.
            link: Link of the caller stream that the reader's stream first waits for.

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
        self._epochs.other_stream("start_weights_read", stage, link)

    @exclusive_call
    def finish_weights_read(self, stage: int, link: int = 0) -> None:
        """
        Record that a caller's stream waits for the read of a stage's weights.

        The same caller must then finalize every stage and run the update. If the host has seen the
        read finish, ``link`` may name any caller.

        Args:
            stage: The stage whose weights were read.
            link: Link of the stream that will run the update.

        Raises:
            Refused: ``completion.wrong-stream``, ``completion.not-reading`` or
                ``completion.wrong-consumer``.
            TypeError, ValueError: No stage or link has that number.
        """
        self._epochs.other_stream("finish_weights_read", stage, link)

    @exclusive_call
    def start_gradients_read(self, stage: int, link: int = 0) -> None:
        """
        Record that a separate stream begins to read a stage's gradients.

        Call `start_gradients_read` when another stream computes a gradient norm, or saves
        gradients, while the step continues. The stage must be final and every bucket reduced. The
        reader's stream first waits for the stream of the caller that finalized the stage. No update
        and no further walk (pass over the microbatches) may begin before `finish_gradients_read`,
        because both may write the gradients.

        Args:
            stage: The stage whose gradients are read; only one read of them may be under way.
            link: Link of the caller stream that the reader's stream first waits for.

        Raises:
            Refused: ``epoch.not-final``, ``reduction.missing``, ``completion.wrong-consumer``,
                ``completion.second-reader``, ``completion.wrong-stream``, ``epoch.in-flight`` or
                ``epoch.half-updated``.
            TypeError, ValueError: No stage or link has that number.

        >>> from qeffect import Contract, StageConfig
        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)])
        >>> contract.start_gradients_read(0)
        Traceback (most recent call last):
        ...
        qeffect.refusals.Refused: epoch.not-final in start_gradients_read: found ...
        """
        self._epochs.other_stream("start_gradients_read", stage, link)

    @exclusive_call
    def finish_gradients_read(self, stage: int, link: int = 0) -> None:
        """
        Record that a caller's stream and the graph stream wait for the read of gradients.

        The caller must have finalized the stage, and must run the update. Make the stage's
        graph stream wait for the reader too, because the stage's next dW writes the gradients.

        Args:
            stage: The stage whose gradients were read.
            link: Link of the stream that will run the update.

        Raises:
            Refused: ``completion.wrong-stream``, ``completion.not-reading`` or
                ``completion.wrong-consumer``.
            TypeError, ValueError: No stage or link has that number.
        """
        self._epochs.other_stream("finish_gradients_read", stage, link)
