"""
An exchange of messages among all ranks, with a timeout. Either all ranks continue or no rank
continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

__all__ = ["MeetingError", "Store", "meet"]


class MeetingError(RuntimeError):
    """A rank did not take part in an operation that needs every rank."""


class Store(Protocol):
    """The methods of a `torch.distributed` store that a meeting calls."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Wait until a key is set, and return its value."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter. Return the counter's new value."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        """
        If `expected` is empty and the key has no value yet, set the key. Return the key's value.
        """

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys are set. Raises an error at the timeout."""


_MET = "met"


def meet(
    store: Store, place: str, rank: int, ranks: Sequence[int], word: Any, *, timeout_s: float
) -> dict[int, Any]:
    """
    Exchange one message with every rank. Each rank must call this function within the timeout.

    Args:
        store: A store that all ranks share.
        place: A name for this meeting, which the ranks use only once.
        rank: This rank.
        ranks: All ranks.
        word: This rank's message, as JSON data.
        timeout_s: How long to wait for the other ranks, in seconds.

    Returns:
        The messages of all ranks.

    Raises:
        MeetingError: A rank did not call in time. Then no rank continues: a rank that calls later
            gets the same error at once.
    """
    verdict = f"{place}/verdict"
    store.set(f"{place}/{rank}", json.dumps(word))
    if store.add(f"{place}/arrived", 1) == len(ranks):
        store.compare_set(verdict, "", _MET)
    began = time.monotonic()
    try:
        store.wait([verdict], timedelta(seconds=timeout_s))
    except Exception as error:  # each kind of store has an error of its own
        if time.monotonic() - began < timeout_s / 2:
            raise MeetingError(f"the store of the ranks does not answer: {error}") from error
        late = [other for other in ranks if not store.check([f"{place}/{other}"])]
        said = f"rank {rank} waited {timeout_s:g} s for ranks {late}"
        store.compare_set(verdict, "", said)  # unless the last one came in the meantime
    if (found := store.get(verdict).decode()) != _MET:
        raise MeetingError(found)
    return {other: json.loads(store.get(f"{place}/{other}")) for other in ranks}
