"""
The paths of a transition as a decision tree, so that each test is evaluated only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import z3
from attrs import frozen

from ..symbolic import Encoding, Path
from ..symbolic.paths import paths
from .program import Evaluation, Node, Program, Value, conjoin

__all__ = ["INTEGERS", "Branch", "Leaf", "Tree", "leaves", "tree_of"]

INTEGERS: Final = Encoding.integers()


@frozen(eq=False)
class Branch:
    """A test, with one subtree for states in which it holds and one for all other states."""

    test: Node
    yes: Tree
    no: Tree


@frozen(eq=False)
class Leaf:
    """The end of a path: the path's writes and its result."""

    path: Path
    writes: Mapping[str, Node]
    returned: Node | None


Tree = Branch | Leaf


def tree_of(
    name: str, function: Callable[..., Any], program: Program, kept: frozenset[str]
) -> Tree:
    """
    Return the paths of a composed function as a tree.

    Args:
        name: Name of the transition.
        function: The composed function of the transition.
        program: The program to which the path's terms are added as nodes.
        kept: The columns (arrays of the memory) that make up a state; writes to other columns are
            left out.
    """
    return _tree(_paths(name, function), 0, program, kept)


@cache
def _paths(name: str, function: Callable[..., Any]) -> tuple[Path, ...]:
    return tuple(paths(name, function, INTEGERS))


def _tree(found: Sequence[Path], depth: int, program: Program, kept: frozenset[str]) -> Tree:
    if len(found) == 1 and len(found[0].tests) == depth:
        path = found[0]
        writes = {n: program.node(term) for n, term in path.written.items() if n in kept}
        returned = None if path.returned is None else program.node(path.returned)
        return Leaf(path, writes, returned)
    test = found[0].tests[depth]
    while z3.is_not(test):
        test = test.arg(0)
    yes = [p for p in found if p.tests[depth].eq(test)]
    no = [p for p in found if not p.tests[depth].eq(test)]
    return Branch(
        program.node(test),
        _tree(yes, depth + 1, program, kept),
        _tree(no, depth + 1, program, kept),
    )


def leaves(
    tree: Tree, evaluation: Evaluation, alive: Value, count: int
) -> Iterator[tuple[Leaf, Value, int]]:
    """Yield each leaf that some states reach, with a mask of these states and their number."""
    while isinstance(tree, Branch):
        truth = evaluation.value(tree.test)
        if isinstance(truth, bool):
            tree = tree.yes if truth else tree.no
            continue
        yes = conjoin(alive, truth)
        number = int(np.count_nonzero(yes))
        if number == count:
            tree = tree.yes
        elif number == 0:
            tree = tree.no
        else:
            yield from leaves(tree.yes, evaluation, yes, number)
            alive = ~yes if alive is True else alive ^ yes
            count -= number
            tree = tree.no
    yield tree, alive, count
