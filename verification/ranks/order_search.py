"""
The search for an order of the events of all logs in which each is a transition of the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Final

import attrs

from qeffect.log.rank_log import RankLines
from qeffect.refusals import Refused

from .concrete_state import Impossible
from .replayed_state import ReplayedState, UnlikeError

__all__ = ["LoggedStep", "OrderSearch", "Unexplained"]

#: Orders of the events that stop ranks; only these are tried in more than one order.
_MOST_ORDERS: Final = 20_000
#: Events that take possibilities from other ranks, or give them new ones.
_CHOSEN: Final = frozenset({"say", "close", "end", "gone"})


@attrs.frozen
class LoggedStep:
    """
    One step that a log tells of.

    Args:
        name: The transition, or what is looked at.
        run: Takes it, and raises `Refused`, `Impossible` or `UnlikeError`.
        log: The log.
        event: The event; None for the end of the log.
    """

    name: str
    run: Callable[[], None]
    log: RankLines
    event: Mapping[str, Any] | None


@attrs.frozen
class Unexplained:
    """
    A step that no order explains.

    Args:
        step: The step.
        error: Why it could not be taken.
    """

    step: LoggedStep
    error: Exception


class OrderSearch:
    """
    The search for an order of some rows of steps.

    Args:
        rows: The steps; those of a row have the row's order.
        settle: Takes what is not logged, after each step.
        state: The state of all ranks.
    """

    def __init__(
        self, rows: Sequence[Sequence[LoggedStep]], settle: Callable[[], None], state: ReplayedState
    ) -> None:
        self.rows, self.settle, self.state = rows, settle, state
        self.at = [0] * len(rows)
        self._orders = count()
        self._seen: set[Any] = set()
        self._furthest = -1
        self._blocked: list[Unexplained] = []
        self._asked: dict[int, Unexplained] = {}  # by step, what the protocol once asked for it

    def run(self) -> Unexplained | None:
        """Return None if an order was found, else an event that none explains."""
        if self._search(0):
            return None
        asked = [self._asked[id(f.step)] for f in self._blocked if id(f.step) in self._asked]
        return (asked or self._blocked)[0]

    def _search(self, depth: int) -> bool:
        blocked = self._advance()
        if all(at == len(row) for at, row in zip(self.at, self.rows, strict=True)):
            return True
        if sum(self.at) > self._furthest:
            self._furthest, self._blocked = sum(self.at), blocked
        seen = (*self.at, *sorted(self.state.cause.entries.items()))
        if seen in self._seen or next(self._orders) > _MOST_ORDERS:
            return False
        self._seen.add(seen)
        mark, at = self.state.mark(), list(self.at)
        tried = 0
        for row, ops in enumerate(self.rows):
            if at[row] == len(ops) or ops[at[row]].name not in _CHOSEN:
                continue
            if (error := self._try(row)) is not None:
                blocked.append(Unexplained(ops[at[row]], error))
                continue
            tried += 1
            if self._search(depth + 1):
                return True
            self.state.back(mark)
            self.at = list(at)
        if not tried and sum(at) == self._furthest:
            self._blocked = blocked
        return False

    def _try(self, row: int) -> Exception | None:
        mark = self.state.mark()
        try:
            self.rows[row][self.at[row]].run()
        except (Refused, Impossible, UnlikeError) as error:
            self.state.back(mark)
            if not isinstance(error, Impossible):
                op = self.rows[row][self.at[row]]
                self._asked[id(op)] = Unexplained(op, error)
            return error
        self.at[row] += 1
        self.settle()
        return None

    def _advance(self) -> list[Unexplained]:
        """Take what takes nothing from others, as far as that goes; return what is held."""
        moved = True
        while moved:
            moved = False
            held: list[Unexplained] = []
            for row, ops in enumerate(self.rows):
                while self.at[row] < len(ops) and ops[self.at[row]].name not in _CHOSEN:
                    op = ops[self.at[row]]
                    if (error := self._try(row)) is not None:
                        held.append(Unexplained(op, error))
                        break
                    moved = True
        return held
