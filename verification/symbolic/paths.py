"""
Enumerate every path of every transition: its condition, the state after it, and its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import z3
from attrs import evolve, frozen

from qeffect.engine.compose import source
from qeffect.engine.stage import Transitions
from qeffect.refusals import Refused

from .encoding import Encoding
from .terms import PathRun, Shared, Term, raw

__all__ = ["Path", "PathTable", "merge", "merged", "path_table", "paths"]


@frozen(slots=False)
class Path:
    """
    One path through a transition.

    The constants in the path's terms are the columns before the transition, by name, and the
    arguments, named ``arg.NAME`` (see ``encoding.flat_arguments``).

    Args:
        transition: Name of the transition.
        index: Position among the transition's paths.
        tests: The tests on the path; their conjunction is the path's condition.
        columns: The Z3 term of every column (array of the state) after the path.
        clause: Clause of the refusal; None if the call is accepted.
        returned: The result of the call; for a check, the ticket.
        before: The Z3 term of every column (array of the state) before the path.
    """

    transition: str
    index: int
    tests: tuple[Term, ...]
    columns: Mapping[str, Term]
    clause: str | None
    returned: Term | None
    before: Mapping[str, Term]

    @cached_property
    def condition(self) -> Term:
        """The condition under which this path is taken."""
        return z3.And(self.tests) if self.tests else z3.BoolVal(True)

    @cached_property
    def written(self) -> dict[str, Term]:
        """The columns (arrays of the state) that the path writes, with their terms."""
        return {n: t for n, t in self.columns.items() if not _same(t, self.before[n])}

    @cached_property
    def denied(self) -> tuple[bool, ...]:
        """For each test of the path, whether the test is a negation."""
        return tuple(z3.is_not(test) for test in self.tests)

    @property
    def label(self) -> str:
        """A short name of the path: its clause, or ``accepted``, and its position."""
        return f"{self.clause or 'accepted'}#{self.index}"


#: The paths of each transition.
PathTable = dict[str, tuple[Path, ...]]


def paths(transition: str, function: Callable[..., Any], encoding: Encoding) -> Iterator[Path]:
    """Yield every path of one composed function."""
    before = encoding.memory().terms()
    todo: list[list[bool]] = [[]]
    shared = Shared()
    index = 0
    while todo:
        run = PathRun(todo.pop(), shared=shared)
        memory = encoding.memory(run)
        clause = returned = None
        try:
            returned = raw(function(memory, *encoding.arguments(transition, run)))
        except Refused as refused:
            clause = refused.clause
        for i in range(len(run.taken) - 1, len(run.prefix) - 1, -1):
            todo.append([*run.taken[:i], not run.taken[i]])
        yield Path(
            transition, index, tuple(run.condition), memory.terms(), clause, returned, before
        )
        index += 1


def merged(table: PathTable) -> PathTable:
    """
    Join the paths of each transition that leave the same state and give the same result.

    A guard ``a and b`` forks twice, although both paths that do not refuse continue in the same
    way. After joining, a transition has one path per clause and one per set of writes, under
    equivalent conditions.
    """
    return {name: merge(found) for name, found in table.items()}


def merge(found: Sequence[Path]) -> tuple[Path, ...]:
    """Join the paths of one transition that leave the same state and give the same result."""
    return tuple(_merge(list(found)))


def _merge(found: list[Path]) -> Iterator[Path]:
    groups: list[list[Path]] = []
    for path in found:
        for group in groups:
            if _alike(group[0], path):
                group.append(path)
                break
        else:
            groups.append([path])
    for index, group in enumerate(groups):
        inside = {path.index for path in group}
        tests = _conjuncts(found, inside, 0)
        assert tests is not None
        yield evolve(group[0], index=index, tests=tuple(tests))


def _alike(one: Path, other: Path) -> bool:
    if one.clause != other.clause or (one.returned is None) != (other.returned is None):
        return False
    if one.returned is not None and not one.returned.eq(other.returned):
        return False
    return all(_same(term, other.columns[name]) for name, term in one.columns.items())


def _same(one: Term, other: Term) -> bool:
    return one is other or bool(one.eq(other))


def _conjuncts(found: list[Path], inside: set[int], depth: int) -> list[Term] | None:
    """
    Return conditions that, among the inputs of the given paths, hold exactly for the paths whose
    positions are in `inside`; None if there are no such conditions.
    """
    chosen = [path for path in found if path.index in inside]
    if not chosen:
        return None
    if len(chosen) == len(found):
        return []
    # Paths with the same decisions so far have the same next test; they differ in its decision.
    test = found[0].tests[depth]
    test = test.arg(0) if found[0].denied[depth] else test
    yes = _conjuncts([p for p in found if not p.denied[depth]], inside, depth + 1)
    no = _conjuncts([p for p in found if p.denied[depth]], inside, depth + 1)
    if yes is None:
        assert no is not None
        return [z3.Not(test), *no]
    if no is None:
        return [test, *yes]
    common = [term for term in yes if any(term.eq(other) for other in no)]
    only_yes = [term for term in yes if not any(term.eq(other) for other in common)]
    only_no = [term for term in no if not any(term.eq(other) for other in common)]
    split = []
    if only_yes:
        split.append(z3.Or(z3.Not(test), _all(only_yes)))
    if only_no:
        split.append(z3.Or(test, _all(only_no)))
    return [*split, *common]


def _all(terms: list[Term]) -> Term:
    return terms[0] if len(terms) == 1 else z3.And(terms)


def path_table(transitions: Transitions, encoding: Encoding | None = None) -> PathTable:
    """
    Return every path of every transition.

    Args:
        transitions: The composed transitions.
        encoding: The encoding of the sorts; unbounded by default.

    >>> from qeffect.engine.stage import transitions
    >>> [path.clause for path in path_table(transitions())["fail_reduction"]]
    ['reduction.not-started', None]
    """
    chosen = Encoding.sorted() if encoding is None else encoding
    return {name: _once(name, function, chosen) for name, function in transitions.functions.items()}


def _once(name: str, function: Callable[..., Any], encoding: Encoding) -> tuple[Path, ...]:
    """
    Enumerate the paths of a composed function, once for all compositions with the same source text.
    """
    key = ("paths", name, source(function))
    if key not in encoding.memo:
        encoding.memo[key] = tuple(paths(name, function, encoding))
    found: tuple[Path, ...] = encoding.memo[key]
    return found
