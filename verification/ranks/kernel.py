"""
Check that a rank's contract behaves as the ranks' protocol assumes.

The protocol models a contract by four numbers: its epoch, whether anything is live, whether its
epoch is spoiled, and whether it is whole (final and reduced). This module reads them from the
kernel's memory. Every move in every reachable state of a small scope, including wrong moves, must
change these numbers as the protocol says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from qeffect.engine.stage import Transitions

from ..explorer import standard_scopes
from ..explorer.drafts import Chunk
from ..explorer.engine import Engine
from ..explorer.exploration import chunks, explore
from ..explorer.packing import Words
from ..explorer.scopes import Scope
from ..explorer.space import Space
from ..explorer.tally import Tally

__all__ = ["KERNEL_SCOPES", "Matched", "RankView", "match", "seen"]

#: Scopes in which epochs begin, are spoiled, reduced, committed and restored.
KERNEL_SCOPES: Final = ("stage-epochs", "stage-readers")
#: Columns of live work: a tape, an action in flight, a running reduction, an update in flight.
_LIVE: Final = ("consumers", "refreshing", "evaluating", "busy", "reducing", "optimizing")
#: The two transitions of a successful update. The protocol's commit stands for both. In a scope
#: that holds tickets they are two moves: the first decides, the second changes the epoch, and in
#: between the update is live.
_CHECK, _COMMIT = _UPDATE = ("check_update", "commit_update")
#: The epochs in which stages were finalized and buckets reduced.
_WHOLE: Final = ("final", "reduced")


@frozen
class RankView:
    """The four numbers by which the protocol models a contract."""

    epoch: int
    live: bool
    spoiled: bool
    whole: bool


@frozen
class Matched:
    """
    The result of comparing the kernel with the protocol.

    Args:
        scope: Name of the explored scope.
        states: Number of reachable states of the kernel.
        moves: Number of moves tried in these states, accepted or refused.
        commits: Number of accepted commits.
        difference: The first move that the protocol does not allow; empty if all are allowed.
    """

    scope: str
    states: int
    moves: int
    commits: int
    difference: str = ""

    def record(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "scope": self.scope,
            "states": self.states,
            "moves": self.moves,
            "commits": self.commits,
            "difference": self.difference or None,
        }


def seen(st: Any) -> RankView:
    """Read the protocol's four numbers from a kernel's memory."""
    epochs = _entries(st.weight_epoch)
    half = any(_entries(st.half_updated))
    assert len(set(epochs)) == 1, "a commit is atomic over the stages of a process"
    return RankView(
        epoch=epochs[0],
        live=any(any(_entries(getattr(st, name))) for name in _LIVE if hasattr(st, name)),
        spoiled=half or any(s == e for s, e in zip(_entries(st.spoiled), epochs, strict=True)),
        whole=not half
        and all(
            epoch == epochs[0]
            for name in _WHOLE
            if hasattr(st, name)
            for epoch in _entries(getattr(st, name))
        ),
    )


def _entries(column: Any) -> list[Any]:
    """Return the entries of a column, which is a list or a dictionary."""
    return list(column.values() if isinstance(column, Mapping) else column)


def match(
    scope: Scope | None = None, name: str = "stage-epochs", composed: Transitions | None = None
) -> Matched:
    """
    Compare every move of a scope with the protocol.

    Args:
        scope: The scope to explore; None for the standard scope `name`.
        name: Name of a standard scope, used if `scope` is None.
        composed: Transitions to run; by default those of the scope. A test passes faulty
            transitions.
    """
    scope = standard_scopes()[name] if scope is None else scope
    found = explore(Space(scope, composed, also=_viewed()))
    tally, commits = found.tally, _positions(found.engine, _COMMIT, -1)
    told = "" if tally.broken is None else tally.broken[0]
    parts = (words for level in found.levels for words in chunks(level))
    return Matched(
        scope.name,
        len(found.seen),
        tally.accepted.total() + tally.refused.total(),
        sum(tally.accepted[index] for index in commits),
        told or next(filter(None, (_difference(found.engine, words) for words in parts)), ""),
    )


def _positions(engine: Engine, step: str, place: int) -> list[int]:
    """Return the positions of the moves whose first (0) or last (-1) transition is `step`."""
    return [i for i, move in enumerate(engine.moves) if move.steps[place] == step]


def _difference(engine: Engine, words: Words) -> str:
    """Return the first move from these states that the protocol does not allow; empty if none."""
    chunk = Chunk(engine.packing, words)
    views = _Views(chunk)
    # A refusal changes no state, so only a check can refuse wrongly.
    for index in _positions(engine, _CHECK, 0):
        refused = np.broadcast_to(engine.candidates(chunk, index)[0], chunk.size).copy()
        for arrival in engine.expand(words, Tally(), check=False, moves=[index]):
            refused[slice(None) if arrival.rows is None else arrival.rows] = False
        rows = np.flatnonzero(refused)
        told = _told(engine, index, "refused", views.pairs(rows, views, rows))
        if told:
            return told
    for arrival in engine.expand(words, Tally(), check=False):
        rows = np.arange(chunk.size) if arrival.rows is None else arrival.rows
        after = _Views(Chunk(engine.packing, arrival.words))
        told = _told(engine, arrival.move, None, views.pairs(rows, after))
        if told:
            return told
    return ""


def _told(
    engine: Engine, index: int, clause: str | None, pairs: Iterable[tuple[RankView, RankView]]
) -> str:
    move = engine.moves[index]
    for before, after in pairs:
        wrong = _wrong(move.steps, move.right, clause, before, after)
        if wrong:
            return f"{move.label} ({clause or 'accepted'}), {before} to {after}: {wrong}"
    return ""


def _viewed() -> tuple[str, ...]:
    """Return the columns from which the protocol's four numbers are read."""
    return (*_LIVE, *_WHOLE, "spoiled", "half_updated", "weight_epoch")


class _Views:
    """
    The protocol's four numbers in each of many states.

    Args:
        chunk: The states of the kernel.
    """

    def __init__(self, chunk: Chunk) -> None:
        keys = [(name, index) for name in _viewed() for index in range(chunk.width(name))]
        rows = np.stack([np.broadcast_to(chunk.entry(*key), chunk.size) for key in keys])
        different, which = np.unique(rows, axis=1, return_inverse=True)
        self.which: NDArray[np.intp] = which.reshape(-1)
        self.views = []
        for values in different.T.tolist():
            columns: dict[str, list[int]] = {name: [] for name in _viewed()}
            for (name, _), value in zip(keys, values, strict=True):
                columns[name].append(value)
            self.views.append(seen(SimpleNamespace(**columns)))

    def pairs(
        self, rows: NDArray[np.intp], after: _Views, which: NDArray[np.intp] | None = None
    ) -> Iterator[tuple[RankView, RankView]]:
        """
        Yield each distinct pair of views before and after a move.

        Args:
            rows: Row numbers of the states before the move.
            after: Views of the states after the move.
            which: Row numbers of the states after the move; by default all rows.
        """
        then = after.which if which is None else after.which[which]
        for one, other in np.unique(np.stack([self.which[rows], then]), axis=1).T.tolist():
            yield self.views[one], after.views[other]


def _wrong(
    steps: Iterable[str], right: bool, clause: str | None, before: RankView, after: RankView
) -> str:
    """Return how a move violates the protocol; empty if the protocol allows the move."""
    if after.whole and after.spoiled:
        return "whole and spoiled"
    if clause is not None and after != before:
        return "a refusal changed the contract"
    steps = tuple(steps)
    if steps[0] == _CHECK and right and (before.whole and not before.live) != (clause is None):
        return "a commit must be accepted exactly if the epoch is whole and nothing is live"
    if steps == (_CHECK,):
        if clause is None and after != evolve(before, live=True):
            return "the check of an update must add live work and change nothing else"
    elif steps[-1] == _COMMIT:
        if clause is None and steps == (_COMMIT,) and not (before.whole and before.live):
            return "an update ended without its check"
        if clause is None and after != RankView(before.epoch + 1, False, False, False):
            return "a commit must begin the next epoch, with nothing live, spoiled or whole"
    elif steps == ("restore",):
        if clause is None and (after.live or after.spoiled or after.whole):
            return "a restore must leave nothing live, spoiled or whole"
    elif after.epoch != before.epoch:
        return "only a commit or a restore may change the epoch"
    elif before.spoiled and not after.spoiled:
        return "a spoiled epoch must stay spoiled"
    if steps == ("checkpoint",) and clause is None and before.live:
        return "a checkpoint was accepted with something live"
    return ""
