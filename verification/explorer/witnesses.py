"""
Witnesses: a shortest schedule for every transition and refusal that occurs in an exploration.

An exploration that never accepts a transition, or never reaches a clause, would agree with any
claim about it. So what must *sometimes* happen is checked like what must always hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import define, field

from qeffect.engine.stage import transitions

from ..coverage import GUARDS, TRANSITION_NAMES, refusal_name
from .findings import Occurrence
from .report import ExploreReport
from .walker import Step, Walker

__all__ = ["Guide", "unwitnessed"]


@define
class Guide:
    """
    Finds the moves that lead from state to state, and remembers them.

    Args:
        walker: The scope's memory and moves.
        canonical: Brings the memory's state to its orbit's representative; None without symmetry.
    """

    walker: Walker
    canonical: Callable[[], None] | None = None
    _known: dict[bytes, tuple[tuple[Step, ...], bytes]] = field(factory=dict)

    def schedule(self, chain: Sequence[bytes]) -> tuple[tuple[Step, ...], bytes]:
        """
        Return moves along a chain of representatives, and the state that they lead to.

        Args:
            chain: The initial state's representative, then representatives one move apart.

        Raises:
            ValueError: No move leads from one to the next.
        """
        last = chain[-1]
        known = self._known.get(last)
        if known is not None:
            return known
        if len(chain) == 1:
            found: tuple[tuple[Step, ...], bytes] = ((), self.walker.initial)
        else:
            steps, state = self.schedule(chain[:-1])
            step, after = self.edge(state, lambda _, clause, after: self.same(clause, after, last))
            found = ((*steps, step), after)
        self._known[last] = found
        return found

    def texts(self, seen: Occurrence) -> list[str]:
        """Return the schedule of an occurrence, step by step."""
        steps, state = self.schedule(seen.chain)
        if seen.move is None:
            return [str(step) for step in steps]
        if self.canonical is None:
            self.walker.memory.thaw(state)
            return [str(step) for step in (*steps, self.walker.step(seen.move))]
        move = self.walker.moves[seen.move]
        step, _ = self.edge(
            state,
            lambda index, clause, _: (
                clause == seen.clause and self.walker.moves[index].label == move.label
            ),
        )
        return [str(step) for step in (*steps, step)]

    def same(self, clause: str | None, after: bytes, representative: bytes) -> bool:
        """Whether an accepted move led to a state of the representative's orbit."""
        return clause is None and self.representative(after) == representative

    def representative(self, state: bytes) -> bytes:
        """Return the representative of a state's orbit."""
        if self.canonical is None:
            return state
        self.walker.memory.thaw(state)
        self.canonical()
        return self.walker.memory.freeze()

    def edge(
        self, state: bytes, wanted: Callable[[int, str | None, bytes], bool]
    ) -> tuple[Step, bytes]:
        """
        Return the first wanted move from a state, and the state it leads to.

        Raises:
            ValueError: No move leads from one state to the next.
        """
        for index, clause, after in self.walker.edges(state):
            if wanted(index, clause, after):
                self.walker.memory.thaw(state)
                return self.walker.step(index), after
        raise ValueError(f"scope {self.walker.scope.name}: no such move")


def unwitnessed(reports: Iterable[ExploreReport]) -> list[str]:
    """
    Return the names that some report must witness and none does: transitions, their accepting paths
    where a batch reading reports paths, and refusals, as ``transition: clause``.

    The names come from the specification, not from the functions that ran.

    A path that no state and arguments can take, such as one on which a reader is two readers,
    needs no witness.
    """
    seen: set[str] = set()
    for report in reports:
        seen |= report.witnesses.keys()
    wanted = [*TRANSITION_NAMES, *(refusal_name((name,), clause) for name, clause in GUARDS)]
    missing = [name for name in wanted if name not in seen]
    if any("#" in name for name in seen):
        missing += [name for name in _accepting_paths() if name not in seen]
    return missing


def _accepting_paths() -> Mapping[str, None]:
    """Return the names of the accepting paths that something can take."""
    import z3

    from ..symbolic import Encoding, path_table

    found: dict[str, None] = {}
    for paths in path_table(transitions(), Encoding.integers()).values():
        for path in paths:
            if path.clause is None:
                solver = z3.Solver()
                solver.add(*path.tests)
                if solver.check() != z3.unsat:
                    found[f"{path.transition}#{path.index}"] = None
    return found
