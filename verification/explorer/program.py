"""
Compile Z3 terms to a small NumPy program over many states: each term becomes one shared node.

The terms are integers, six-bit masks, and arrays of these. A node's value is a plain number if
all states have the same value; otherwise it is an array with one entry per state. So a value that
depends only on a move's fixed arguments and the configuration is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import z3
from attrs import define, field, frozen

__all__ = ["Bundle", "Entries", "Evaluation", "Node", "Program", "Value", "select"]

#: A number or truth value: one for all states, or one per state.
Value = Any


class Entries(Protocol):
    """Access to entries of the columns (arrays of the state) of many states."""

    def entry(self, column: str, index: int) -> Value: ...

    def width(self, column: str) -> int: ...


def select(condition: Value, yes: Value, no: Value) -> Value:
    """Return ``yes`` where the condition holds, else ``no``."""
    if isinstance(condition, bool):
        return yes if condition else no
    if yes is no:
        return yes
    if _is_truth(yes) or _is_truth(no):
        return disjoin(conjoin(condition, yes), conjoin(negate(condition), no))
    ones = -condition.view(np.int8)
    return no ^ ((yes ^ no) & ones)


def _is_truth(value: Value) -> bool:
    return isinstance(value, bool) or getattr(value, "dtype", None) == np.bool_


def equal(one: Value, other: Value) -> Value:
    """Return whether two values are equal."""
    return True if one is other else one == other


def negate(truth: Value) -> Value:
    """Return the negation of a truth value."""
    return (not truth) if isinstance(truth, bool) else ~truth


def conjoin(one: Value, other: Value) -> Value:
    """Return the conjunction of two truth values."""
    if isinstance(one, bool):
        return other if one else False
    if isinstance(other, bool):
        return one if other else False
    return one & other


def disjoin(one: Value, other: Value) -> Value:
    """Return the disjunction of two truth values."""
    return negate(conjoin(negate(one), negate(other)))


@frozen(eq=False, slots=True)
class Node:
    """
    One operation of the program.

    Args:
        number: Position in the program.
        run: Function that computes the value from an evaluation and the node.
        children: The nodes of the operands.
        arguments: Names of the call arguments that the value depends on.
        name: Name of the column (array of the state), argument or variable, if the node is a leaf.
    """

    number: int
    run: Callable[[Evaluation, Node], Value]
    children: tuple[Node, ...]
    arguments: tuple[str, ...]
    name: str = ""


@frozen(eq=False, slots=True)
class Bundle:
    """A column (an array of the state) after some writes; it may first have been filled with one
    value."""

    column: str
    changed: Mapping[int, Value]
    filled: Value = None

    def entry(self, states: Entries, index: int) -> Value:
        """Return the current value of an entry."""
        if index in self.changed:
            return self.changed[index]
        return states.entry(self.column, index) if self.filled is None else self.filled


@define
class Program:
    """
    The nodes of all compiled terms; equal terms share one node.

    Args:
        columns: Names of the columns. A constant with another name is an argument of a call or a
            variable of a predicate.
    """

    columns: frozenset[str]
    _nodes: dict[int, Node] = field(factory=dict)
    _terms: list[Any] = field(factory=list)  # keeps the terms alive, so that their ids stay unique

    def node(self, term: Any) -> Node:
        """Return the node of a term."""
        known = self._nodes.get(term.get_id())
        if known is None:
            known = self._make(term)
            self._nodes[term.get_id()] = known
            self._terms.append(term)
        return known

    def _make(self, term: Any) -> Node:
        number = len(self._terms)
        if z3.is_int_value(term) or z3.is_bv_value(term):
            value = term.as_long()
            return Node(number, lambda *_: value, (), ())
        kind = term.decl().kind()
        if kind in (z3.Z3_OP_TRUE, z3.Z3_OP_FALSE):
            truth = kind == z3.Z3_OP_TRUE
            return Node(number, lambda *_: truth, (), ())
        name = term.decl().name()
        children = tuple(self.node(child) for child in term.children())
        if kind == z3.Z3_OP_UNINTERPRETED and not children:
            if name not in self.columns:
                return Node(number, _argument, (), (name,), name)
            return Node(number, _column if z3.is_array(term) else _scalar, (), (), name)
        run: Callable[[Evaluation, Node], Value] | None
        if kind == z3.Z3_OP_UNINTERPRETED and name == "every":
            run = _every
        elif kind in _SIZED:
            run = _SIZED[kind](term)
        else:
            run = _RUN.get(kind)
        if run is None:
            raise NotImplementedError(f"cannot compile {name} in {term} to NumPy")
        arguments = sorted({a for child in children for a in child.arguments})
        return Node(len(self._terms), run, children, tuple(arguments), name)


class Evaluation:
    """
    Computes the values of nodes for some states and one choice of arguments.

    Args:
        states: The states.
        arguments: Value of every argument.
        names: A hashable name for the value of each argument.
        known: Cache of the values that were already computed for these states, by node and by the
            names of the argument values that the node depends on.
    """

    __slots__ = ("arguments", "known", "names", "states")

    def __init__(
        self,
        states: Entries,
        arguments: Mapping[str, Value],
        names: Mapping[str, Any],
        known: dict[Any, Value],
    ) -> None:
        self.states = states
        self.arguments = arguments
        self.names = names
        self.known = known

    def value(self, node: Node) -> Value:
        """Return a node's value."""
        if node.arguments:
            key = (node.number, *[self.names[a] for a in node.arguments])
        else:
            key = (node.number,)
        try:
            return self.known[key]
        except KeyError:
            value = self.known[key] = node.run(self, node)
            return value


# The computation of each kind of term


def _argument(e: Evaluation, node: Node) -> Value:
    return e.arguments[node.name]


def _column(e: Evaluation, node: Node) -> Bundle:
    return Bundle(node.name, {})


def _scalar(e: Evaluation, node: Node) -> Value:
    return e.states.entry(node.name, 0)


def _constant_array(e: Evaluation, node: Node) -> Bundle:
    return Bundle("", {}, e.value(node.children[0]))


def _select(e: Evaluation, node: Node) -> Value:
    bundle, index = (e.value(child) for child in node.children)
    if isinstance(index, int):
        if index < 0:
            index += e.states.width(bundle.column)
        return bundle.entry(e.states, index)
    last = e.states.width(bundle.column) - 1
    found = bundle.entry(e.states, last)  # also for -1, as in a list
    for position in range(last):
        found = select(index == position, bundle.entry(e.states, position), found)
    return found


def _store(e: Evaluation, node: Node) -> Bundle:
    bundle, index, value = (e.value(child) for child in node.children)
    if isinstance(index, int) and index >= 0:
        return Bundle(bundle.column, {**bundle.changed, index: value}, bundle.filled)
    changed = {}
    width = e.states.width(bundle.column)
    for position in range(width):
        here = index == position
        if position == width - 1:
            here = disjoin(here, index == -1)
        changed[position] = select(here, value, bundle.entry(e.states, position))
    return Bundle(bundle.column, changed, bundle.filled)


def _every(e: Evaluation, node: Node) -> Value:
    bundle, value = (e.value(child) for child in node.children)
    truth: Value = True
    for position in range(e.states.width(bundle.column)):
        truth = conjoin(truth, equal(bundle.entry(e.states, position), value))
    return truth


def _fold(combine: Callable[[Value, Value], Value]) -> Callable[[Evaluation, Node], Value]:
    def run(e: Evaluation, node: Node) -> Value:
        values: Sequence[Value] = [e.value(child) for child in node.children]
        result = values[0]
        for value in values[1:]:
            result = combine(result, value)
        return result

    return run


def _equal(e: Evaluation, node: Node) -> Value:
    one, other = (e.value(child) for child in node.children)
    if isinstance(one, Bundle):
        raise NotImplementedError("cannot compare whole columns in NumPy; compare their entries")
    return equal(one, other)


def _ite(e: Evaluation, node: Node) -> Value:
    return select(*(e.value(child) for child in node.children))


_RUN: Final[Mapping[int, Callable[[Evaluation, Node], Value]]] = {
    z3.Z3_OP_SELECT: _select,
    z3.Z3_OP_STORE: _store,
    z3.Z3_OP_CONST_ARRAY: _constant_array,
    z3.Z3_OP_EQ: _equal,
    z3.Z3_OP_DISTINCT: lambda e, node: negate(_equal(e, node)),
    z3.Z3_OP_ITE: _ite,
    z3.Z3_OP_NOT: lambda e, node: negate(e.value(node.children[0])),
    z3.Z3_OP_AND: _fold(conjoin),
    z3.Z3_OP_OR: _fold(disjoin),
    z3.Z3_OP_IMPLIES: _fold(lambda a, b: disjoin(negate(a), b)),
    z3.Z3_OP_ADD: _fold(lambda a, b: a + b),
    z3.Z3_OP_SUB: _fold(lambda a, b: a - b),
    z3.Z3_OP_UMINUS: lambda e, node: -e.value(node.children[0]),
    z3.Z3_OP_LE: _fold(lambda a, b: a <= b),
    z3.Z3_OP_LT: _fold(lambda a, b: a < b),
    z3.Z3_OP_GE: _fold(lambda a, b: a >= b),
    z3.Z3_OP_GT: _fold(lambda a, b: a > b),
    z3.Z3_OP_BAND: _fold(lambda a, b: a & b),
    z3.Z3_OP_BOR: _fold(lambda a, b: a | b),
}


# Simplified terms split masks into bits and join them again


def _invert(term: Any) -> Callable[[Evaluation, Node], Value]:
    ones = (1 << term.size()) - 1
    return lambda e, node: ~e.value(node.children[0]) & ones


def _extract(term: Any) -> Callable[[Evaluation, Node], Value]:
    high, low = term.params()
    ones = (1 << (high - low + 1)) - 1
    return lambda e, node: (e.value(node.children[0]) >> low) & ones


def _concat(term: Any) -> Callable[[Evaluation, Node], Value]:
    sizes = [child.size() for child in term.children()]

    def run(e: Evaluation, node: Node) -> Value:
        result: Value = 0
        for size, child in zip(sizes, node.children, strict=True):
            result = (result << size) | e.value(child)
        return result

    return run


_SIZED: Final[Mapping[int, Callable[[Any], Callable[[Evaluation, Node], Value]]]] = {
    z3.Z3_OP_BNOT: _invert,
    z3.Z3_OP_EXTRACT: _extract,
    z3.Z3_OP_CONCAT: _concat,
}
