"""
The search for an order of the events of all logs in which the protocol allows every event.
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

#: Events that stop ranks; only these are tried in more than one order.
_MOST_ORDERS: Final = 20_000
#: Events that remove or add possible steps of other ranks.
_CHOSEN: Final = frozenset({"say", "close", "end", "gone"})
#: The condition of a device that waits for a message.
_WAITS: Final = "ranks.messages-ended"


@attrs.frozen
class LoggedStep:
    """
    One step that a log records.

    Args:
        name: The name of the transition, or of a value that is checked.
        run: Function that takes the step; it raises `Refused`, `Impossible` or `UnlikeError` if the
            step cannot be taken.
        log: The log that records the step.
        event: The event in the log; None for the end of the log.
    """

    name: str
    run: Callable[[], None]
    log: RankLines
    event: Mapping[str, Any] | None


@attrs.frozen
class Unexplained:
    """
    A logged step for which no possible order of the events exists.

    Args:
        step: The step.
        error: The error that explains why the step could not be taken.
    """

    step: LoggedStep
    error: Exception


class OrderSearch:
    """
    A search for a possible order of the steps of several rows.

    Args:
        rows: The rows of steps; the steps of one row keep their order.
        settle: Function that is called after each step to take the transitions that are not logged.
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
        self._asked: dict[
            int, Unexplained
        ] = {}  # by step, a condition of the protocol that was once not met

    def run(self) -> Unexplained | None:
        """Return None if an order was found, otherwise a step that fits no order."""
        if self._search(0):
            return None
        asked = [self._asked[id(f.step)] for f in self._blocked if id(f.step) in self._asked]
        # A device that waits for a message waits because of another step.
        waits = {id(one.step) for one in asked if _waits(one.error)}
        reasons = [one for one in (*asked, *self._blocked) if id(one.step) not in waits]
        return (reasons or asked)[0]

    def _search(self, depth: int) -> bool:
        blocked = self._advance()
        if all(at == len(row) for at, row in zip(self.at, self.rows, strict=True)):
            return True
        if sum(self.at) > self._furthest:
            self._furthest, self._blocked = sum(self.at), blocked
        columns = self.state.cause, self.state.said
        seen = (*self.at, *(tuple(sorted(each.entries.items())) for each in columns))
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
        """
        Take all steps that cannot block another rank; return the steps that remain.
        """
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


def _waits(error: Exception) -> bool:
    return isinstance(error, Refused) and error.clause == _WAITS
