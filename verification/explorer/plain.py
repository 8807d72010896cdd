"""
The plain reading: breadth first over every reachable state, running the composed functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from attrs import define, field

from qeffect.refusals import Refused

from .walker import Ready, Walker, broken_promise

__all__ = ["Exploration", "explore"]

_REPORT: Final = 1 << 10  # states between two chances to show progress

Progress = Callable[[str], None]

#: What holds of every state; returns the name of an invariant that does not, or None.
Check = Callable[[object], str | None]


@define
class Exploration:
    """
    Everything a plain exploration saw.

    Args:
        walker: The memory and moves that it ran.
        parents: Every state in normal form, with the state that first led to it.
        accepted: Number of acceptances of each move.
        refused: Number of refusals by (move, clause).
        first_accepted: First state in which each move was accepted.
        first_refused: First state in which each (move, clause) was refused.
        depth: Levels below the initial state.
        violation: The violation, the state, the move if a move broke it, and the clause if a
            refusal broke it; or None.
    """

    walker: Walker
    parents: dict[bytes, bytes]
    accepted: list[int]
    refused: Counter[tuple[int, str]] = field(factory=Counter)
    first_accepted: dict[int, bytes] = field(factory=dict)
    first_refused: dict[tuple[int, str], bytes] = field(factory=dict)
    depth: int = 0
    violation: tuple[str, bytes, int | None, str | None] | None = None

    def chain(self, state: bytes) -> list[bytes]:
        """Return the states on a shortest path to a state, the initial state first."""
        found = [state]
        while self.parents[found[-1]] != found[-1]:
            found.append(self.parents[found[-1]])
        return found[::-1]


def explore(
    walker: Walker,
    *,
    check: Check | None = None,
    canonical: Callable[[], None] | None = None,
    progress: Progress | None = None,
) -> Exploration:
    """
    Walk every reachable state, breadth first, and stop at the first violation.

    Args:
        walker: The scope's memory and moves.
        check: Returns the invariant that a state breaks; called once per distinct state.
        canonical: Brings the memory's state to the representative of its orbit, in place.
        progress: Called with a progress line.
    """
    memory = walker.memory
    buffer, frozen = memory.buffer, memory.buffer.tobytes
    found = Exploration(walker, {}, [0] * len(walker.moves))
    parents, accepted, refused = found.parents, found.accepted, found.refused
    owed = [move.right and "ticket" in move.arguments for move in walker.moves]
    start = walker.initial
    if canonical is not None:
        memory.thaw(start)
        canonical()
        start = memory.freeze()
    parents[start] = start
    frontier = [start]
    tried = 0
    memory.thaw(start)
    broken = check(memory) if check else None
    if broken:
        found.violation = (broken, start, None, None)
        return found
    while frontier:
        following: list[bytes] = []
        for state in frontier:
            buffer[:] = state
            for group in walker.ready():
                for ready in group:
                    waiting: Ready | None = ready
                    while waiting is not None:
                        index, first, arguments, last, place, evidence, rules, waiting = waiting
                        try:
                            ticket = first(memory, *arguments)
                            if last is not None:
                                last(memory, place, ticket, *evidence)
                        except Refused as refusal:
                            what = index, refusal.clause
                            if what in refused:
                                refused[what] += 1
                            else:
                                refused[what] = 1
                                found.first_refused[what] = state
                            if frozen() != state or owed[index]:
                                broken = broken_promise(walker, index, refusal.clause, state)
                                if broken:
                                    found.violation = (broken, state, index, refusal.clause)
                                    return found
                            break
                        if not accepted[index]:
                            found.first_accepted[index] = state
                        accepted[index] += 1
                        for rule in rules:
                            rule()
                        if canonical is not None:
                            canonical()
                        after = frozen()
                        if after not in parents:
                            parents[after] = state
                            following.append(after)
                            if check is not None:
                                broken = check(memory)
                                if broken:
                                    found.violation = (broken, state, index, None)
                                    return found
                        buffer[:] = state
            tried += 1
            if progress is not None and tried % _REPORT == 0:
                progress(
                    f"Exploring. states={len(parents):,} transitions={sum(accepted):,} "
                    f"depth={found.depth}"
                )
        found.depth += bool(following)
        frontier = following
    return found
