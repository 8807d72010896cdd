"""
Calls about streams: they record enqueued work, and which stream waits for which other stream.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..threads import ConcurrentCallError, exclusive_call
from .parts import ContractParts

__all__ = ["StreamCalls"]


class StreamCalls(ContractParts):
    """
    Record enqueued work and waits between streams, for the completion guards (which check such
    waits). A link is a pair of streams: a caller's stream, and the stream on which the graphs of a
    state domain (stages whose FP8 scales are updated together) run.
    """

    def submit(self, caller: Hashable = "main") -> None:
        """
        Record that a caller stream enqueued work that later replays must wait for.

        Raises:
            ValueError: No caller has that name.
        """
        if self._entered:
            raise ConcurrentCallError("submit")
        self._entered = True
        try:
            self._streams.submit(caller)
        finally:
            self._entered = False

    def enter(self, link: int = 0) -> None:
        """
        Record that the link's caller enqueued work, and that the graph stream waits for this work.

        The call equals `submit` of the caller, then `join` of the link. Call `enter` before each
        guarded replay.
        """
        if self._entered:
            raise ConcurrentCallError("enter")
        self._entered = True
        try:
            self._enter(link)
        finally:
            self._entered = False

    def join(self, link: int = 0) -> None:
        """
        Record that the graph stream waits for all work that the caller submitted.

        The submitted work includes the optimizer's update, if the update ran on this caller's
        stream.
        """
        if self._entered:
            raise ConcurrentCallError("join")
        self._entered = True
        try:
            self._join(link)
        finally:
            self._entered = False

    def wait(self, link: int = 0) -> None:
        """Record that the caller waits for all replays enqueued on the graph stream so far."""
        if self._entered:
            raise ConcurrentCallError("wait")
        self._entered = True
        try:
            self._wait(link)
        finally:
            self._entered = False

    @exclusive_call
    def drain(self) -> None:
        """
        Record that the host has seen all device work of every state domain finish.

        A drain permits a checkpoint and a restore, and replaces the graph streams' wait for the
        optimizer's update. A drain does not replace `wait`, `finish_read` or `finish_receive`: the
        contract does not know on which stream a transfer was enqueued, or whether the host waited
        for that stream. End every transfer before a `restore`, because `restore` forgets transfers
        that are still under way.
        """
        self._streams.drain()
