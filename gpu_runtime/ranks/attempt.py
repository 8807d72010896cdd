"""
The agreement of all ranks on a name for their attempt. An attempt begins when all ranks have
connected, and ends when the first rank ends.

torchrun restarts its workers in rounds. Workers do not learn the number of their round, and the
key-value store of torchrun's agents outlives all rounds. Each agent (one per host) passes its own
count of restarts to its workers. An agent does not count a restart that another agent's worker
caused, and a new agent counts from 0 again (pytorch/pytorch#135712). Therefore the counts of agents
differ and cannot identify a round. The ranks agree on a random name instead.

Rank 0 draws a name and writes it under a key that every round overwrites. Each other rank registers
under a key that begins with this name; only the first process that writes such a key is accepted.
Once all ranks are registered, rank 0 confirms the name, also under a key that begins with the name.
All registrations come after the name was drawn. Therefore a confirmed name belongs to exactly one
process per rank, and all these processes ran while rank 0 waited. Keys of an earlier round begin
with another name.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from ..backends.protocol import BackendError
from .bounded import bounded

__all__ = ["UnreachableError", "agree_on_attempt", "first_line"]

_OFFER, _CONFIRMED = "qeffect/offer", "confirmed"
#: Seconds between two queries of the store: the first number, or the second number times the number
#: of ranks if that is larger.
_POLL_S, _POLL_A_RANK_S = 0.02, 5e-4
#: Seconds past the deadline after which a store that has not answered is given up.
_MARGIN_S = 5.0


class UnreachableError(BackendError):
    """This rank cannot reach the other ranks. Therefore this rank must report the cause itself."""


def agree_on_attempt(
    store: Any,
    rank: int,
    world: int,
    deadline: float,
    events: list[tuple[str, str]] | None = None,
) -> str:
    """
    Agree with the other ranks on a unique name for this attempt.

    Args:
        store: The launcher's key-value store. Earlier attempts may have written to this store, and
            processes of these attempts may still write to it.
        rank: The global rank of this process.
        world: Number of ranks.
        deadline: Timeout in seconds for all ranks to agree.
        events: A list for the rank log, to which this function appends this rank's actions. Each
            entry is a pair: an event (`offer`, `confirm`, `take_seat` or `connect`) and the name of
            the attempt. With None nothing is recorded.

    Raises:
        BackendError: A rank did not register in time, or the store is gone or does not answer.
    """
    meeting = _Meeting(store, rank, world, [] if events is None else events)
    try:
        name = bounded(lambda: meeting.run(deadline), deadline + _MARGIN_S)
    except TimeoutError:
        raise UnreachableError(
            f"rank {rank}: the launcher's store did not answer within {deadline:g} s"
        ) from None
    except RuntimeError as error:
        what = first_line(error)
        raise UnreachableError(f"rank {rank}: the launcher's store is gone ({what})") from error
    if not name:
        raise BackendError(
            f"rank {rank}: expected {world} ranks within {deadline:g} s; missing: {meeting.missing}"
        )
    return name


class _Meeting:
    """One rank's part in the agreement on a name."""

    def __init__(self, store: Any, rank: int, world: int, events: list[tuple[str, str]]) -> None:
        self.store, self.rank, self.world, self.events = store, rank, world, events
        self.missing = "rank 0"
        self._seen: set[str] = set()
        self._taken: dict[str, Any] = {}

    def run(self, deadline: float) -> str:
        """Return the confirmed name; empty if no name was confirmed before the deadline."""
        until = time.monotonic() + deadline
        look = self._offering() if self.rank == 0 else self._accepting
        while not (name := look()) and time.monotonic() < until:
            time.sleep(max(_POLL_S, self.world * _POLL_A_RANK_S))
        if name:
            self.events.append(("connect", name))
        return name

    def _offering(self) -> Callable[[], str]:
        """
        Offer a name; return a function that confirms the name once every other rank is registered.
        """
        name = secrets.token_hex(16)
        places = PrefixStore(f"qeffect/meet/{name}", self.store)
        self.store.set(_OFFER, json.dumps([name, self.world]))
        self.events.append(("offer", name))
        missing = [*range(1, self.world)]

        def look() -> str:
            while missing and places.check([str(missing[0])]):
                del missing[0]
            self.missing = f"rank {missing[0]}" if missing else ""
            if missing:
                return ""
            places.set(_CONFIRMED, "")
            self.events.append(("confirm", name))
            return name

        return look

    def _accepting(self) -> str:
        """Register if an attempt is newly offered; return the confirmed name, or an empty text."""
        if self.store.check([_OFFER]):
            name, world = json.loads(self.store.get(_OFFER))
            if name not in self._seen and world == self.world:
                self._seen.add(name)
                places = PrefixStore(f"qeffect/meet/{name}", self.store)
                if places.add(str(self.rank), 1) == 1:
                    self._taken[name] = places
                    self.events.append(("take_seat", name))
        return next((n for n, places in self._taken.items() if places.check([_CONFIRMED])), "")


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message. The other lines are a stack trace."""
    return str(error).strip().partition("\n")[0]
