"""
A rank's contract as the protocol sees it is how the composed kernel behaves.

The protocol knows four numbers of a contract: its epoch, whether anything is live, whether its
epoch is spoiled, and whether it is whole. Here they are read off the kernel's memory, and every
move of every reachable state of a small scope, wrong moves included, must do to them what the
protocol says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from attrs import frozen

from qeffect.engine.stage import Transitions

from ..explorer import standard_scopes
from ..explorer.plain import explore
from ..explorer.scopes import Scope
from ..explorer.walker import Walker

__all__ = ["KERNEL_SCOPES", "Matched", "RankView", "match", "seen"]

#: Scopes in which epochs begin, are spoiled, reduced, committed and restored.
KERNEL_SCOPES: Final = ("stage-epochs", "stage-readers")
#: What counts as live: a tape, an action in flight, a reduction that runs.
_LIVE: Final = ("consumers", "refreshing", "busy", "reducing", "optimizing")
#: The two transitions of an update that did not fail.
_UPDATE: Final = ("check_update", "commit_update")
#: The epochs in which stages were finalized and buckets reduced.
_WHOLE: Final = ("final", "reduced")


@frozen
class RankView:
    """What the protocol knows of a contract."""

    epoch: int
    live: bool
    spoiled: bool
    whole: bool


@frozen
class Matched:
    """
    What a comparison found.

    Args:
        scope: The scope.
        states: Reachable states of the kernel.
        moves: Moves tried in them, accepted or refused.
        commits: Commits accepted.
        difference: The first move that the protocol does not allow, or empty.
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
    """Return what the protocol knows of a kernel's memory."""
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
    """The entries of a column: by index in a list, by stage in a dictionary."""
    return list(column.values() if isinstance(column, Mapping) else column)


def match(
    scope: Scope | None = None, name: str = "stage-epochs", composed: Transitions | None = None
) -> Matched:
    """
    Compare every move of a scope with the protocol.

    Args:
        scope: The scope.
        name: The name of a standard one, if none is given.
        composed: Transitions to run; the scope's own by default. A test gives wrong ones.
    """
    scope = standard_scopes()[name] if scope is None else scope
    walker = Walker(
        scope, composed, also=(*_LIVE, *_WHOLE, "spoiled", "half_updated", "weight_epoch")
    )
    states = explore(walker).parents
    counts: Counter[str] = Counter()
    for state in states:
        walker.memory.thaw(state)
        before = seen(walker.memory)
        for index, clause, after_state in walker.edges(state):
            move = walker.moves[index]
            counts["moves"] += 1
            walker.memory.thaw(after_state)
            after = seen(walker.memory)
            wrong = _wrong(move.steps, move.right, clause, before, after)
            walker.memory.thaw(state)
            if wrong:
                told = f"{move.label} ({clause or 'accepted'}), {before} to {after}: {wrong}"
                return Matched(scope.name, len(states), counts["moves"], counts["commits"], told)
            counts["commits"] += clause is None and move.steps == _UPDATE
    return Matched(scope.name, len(states), counts["moves"], counts["commits"])


def _wrong(
    steps: Iterable[str], right: bool, clause: str | None, before: RankView, after: RankView
) -> str:
    """What the protocol does not allow of a move; nothing if it does."""
    if after.whole and after.spoiled:
        return "whole and spoiled"
    if clause is not None and after != before:
        return "a refusal changed it"
    if tuple(steps) == _UPDATE:
        may = before.whole and not before.live
        if right and may != (clause is None):
            return "a commit is accepted if the epoch is whole and nothing is live, and only then"
        if clause is None and after != RankView(before.epoch + 1, False, False, False):
            return "a commit begins the next epoch, with nothing in it"
    elif tuple(steps) == ("restore",):
        if clause is None and (after.live or after.spoiled or after.whole):
            return "a restore begins with nothing live, spoiled or whole"
    elif after.epoch != before.epoch:
        return "only a commit and a restore move the epoch"
    elif before.spoiled and not after.spoiled:
        return "a spoiled epoch stays so"
    if tuple(steps) == ("checkpoint",) and clause is None and before.live:
        return "a checkpoint with something live"
    return ""
