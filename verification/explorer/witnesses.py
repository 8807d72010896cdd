"""
Witnesses: a shortest schedule for every transition and refusal that occurs in an exploration.

If an exploration never accepted a transition, or never reached a clause, claims about them would
hold only because nothing was tested. So the explorer also checks that each occurs at least once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from attrs import define, field

from qeffect.engine.stage import transitions

from ..coverage import GUARDS, TRANSITION_NAMES, refusal_name
from ..symbolic import Encoding, path_table
from ..symbolic.solver import answer, new_solver
from .drafts import Chunk
from .exploration import Exploration
from .report import ExploreReport
from .scopes import configuration
from .steps import Step, step_of
from .tally import Sighting, State, Tally

__all__ = ["Schedules", "occurrences", "untaken", "unwitnessed"]


def occurrences(found: Exploration) -> dict[str, Sighting]:
    """Return the first sighting of each accepted transition and of each refusal, by name."""
    named: dict[str, Sighting] = {}
    for (transition, _), sighting in found.tally.first_path.items():
        named.setdefault(transition, sighting)
    for (index, clause), sighting in found.tally.first_refused.items():
        named.setdefault(refusal_name(found.engine.moves[index].steps, clause), sighting)
    return named


@define
class Schedules:
    """
    Finds shortest schedules to the events of an exploration.

    All schedules are replayed together from the initial state, one level at a time, along the
    stored predecessors. Under symmetry a predecessor is the representative of an orbit, so the
    replay goes through other states of the same orbits.

    Args:
        found: The finished exploration.
        sightings: The events for which schedules are needed.
    """

    found: Exploration
    sightings: tuple[Sighting, ...]
    _reached: dict[State, tuple[tuple[int, ...], tuple[State, ...]]] = field(
        init=False, factory=dict
    )

    def __attrs_post_init__(self) -> None:
        start = self.found.engine.initial()
        level = [_states(self.found.representatives(start))[0]]
        self._reached[level[0]] = (), (_states(start)[0],)
        following: dict[State, set[State]] = {}
        for after, before in self.found.predecessors(self.sightings).items():
            following.setdefault(before, set()).add(after)
        while level := [state for state in level if state in following]:
            self._advance(level, following)
            level = [after for state in level for after in following[state]]

    def _advance(self, level: list[State], following: Mapping[State, set[State]]) -> None:
        """Run the moves (calls) that lead from representatives of one level to those of the next
        level."""
        engine = self.found.engine
        now = [self._reached[state][1][-1] for state in level]
        words = np.ascontiguousarray(np.array(now, np.int64).T)
        wanted = {after for state in level for after in following[state]}
        targets = np.array(sorted({state[0] for state in wanted}), np.int64)
        for moves in (engine.space.right, None):
            for row, move, after, orbit in self.found.leading_to(targets, words, moves):
                if orbit in following[level[row]] and orbit in wanted:
                    taken, through = self._reached[level[row]]
                    self._reached[orbit] = (*taken, move), (*through, after)
                    wanted.remove(orbit)
            if not wanted:
                return
        raise AssertionError(
            f"scope {engine.scope.name}: found no move to {len(wanted)} of the next representatives"
        )

    def moves(self, seen: Sighting) -> tuple[tuple[int, ...], tuple[State, ...]]:
        """Return the positions of a schedule's moves, and the packed state before each move."""
        taken, through = self._reached[seen.state]
        if seen.move is None:
            return taken, through[:-1]
        return (*taken, self._last(seen, through[-1])), through

    def _last(self, seen: Sighting, state: State) -> int:
        """Return the move (call) that does in a state what the sighted move does in its
        representative."""
        assert seen.move is not None
        if state == seen.state:
            return seen.move
        engine, tally = self.found.engine, Tally()
        label = engine.moves[seen.move].label
        alike = [index for index, move in enumerate(engine.moves) if move.label == label]
        for _ in engine.expand(np.array([state], np.int64).T, tally, check=False, moves=alike):
            pass
        for index in alike:
            if tally.accepted[index] if seen.clause is None else tally.refused[index, seen.clause]:
                return index
        raise AssertionError(
            f"scope {engine.scope.name}: found no move with the same effect as "
            "in the representative"
        )

    def steps(self, seen: Sighting) -> list[Step]:
        """Return a shortest schedule to an event, including the move of the event."""
        return [self._step(index, state) for index, state in zip(*self.moves(seen), strict=True)]

    def _step(self, index: int, state: State) -> Step:
        engine = self.found.engine
        chunk = Chunk(engine.packing, np.array([state], np.int64).T)
        stage_of = configuration(engine.scope)["stage_of"]
        return step_of(
            engine.moves[index],
            stage_of,
            lambda column, i: int(np.asarray(chunk.entry(column, i)).flat[0]),
        )


def _states(words: np.ndarray) -> list[State]:
    """Return packed states one by one."""
    return [tuple(state) for state in words.T.tolist()]


def unwitnessed(reports: Iterable[ExploreReport]) -> list[str]:
    """
    Return the names of required events that no report has a witness for. An event is an accepted
    transition, or a refusal as ``transition: clause``.

    The required names come from the specification, not from the functions that ran.
    """
    seen: set[str] = set()
    for report in reports:
        seen |= report.witnesses.keys()
    wanted = [*TRANSITION_NAMES, *(refusal_name((name,), clause) for name, clause in GUARDS)]
    return [name for name in wanted if name not in seen]


def untaken(explorations: Iterable[Exploration]) -> list[str]:
    """
    Return the accepting paths that no exploration takes, as ``transition#path``, for the contract
    with all relations.

    Impossible paths, such as a path on which one reader equals two readers, are left out.
    """
    taken = {
        path
        for found in explorations
        if not found.engine.scope.omit  # paths are numbered within one composition
        for path in found.tally.first_path
    }
    missing = []
    for paths in path_table(transitions(), Encoding.integers()).values():
        for path in paths:
            if path.clause is None and (path.transition, path.index) not in taken:
                solver = new_solver("finite")
                solver.add(*path.tests)
                if answer(solver) != "unsat":
                    missing.append(f"{path.transition}#{path.index}")
    return missing
