"""
Symbolic values with which ordinary Python code can compute: operators build Z3 terms, and ``bool``
forks the run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import z3
from attrs import define, field

__all__ = ["Array", "PathRun", "Scalar", "Shared", "Sym", "UndecidedError", "lift", "raw"]

Term = Any  # a z3.ExprRef; z3 ships no type information


class UndecidedError(TypeError):
    """A symbolic value was used as a bool outside a symbolic run, which could follow both cases."""


@define
class PathRun:
    """
    One symbolic execution of a transition, with the decision of each test on its path.

    Args:
        prefix: Decisions to replay; later tests are first decided as ``True``.
        taken: Decision of each test that earlier decisions do not already imply.
        condition: The tests as they were decided; their conjunction is the path's condition.
        shared: Cache of terms and tests that all runs of one transition share.
    """

    prefix: list[bool] = field(factory=list)
    taken: list[bool] = field(factory=list)
    condition: list[Term] = field(factory=list)
    shared: Shared = field(factory=lambda: Shared())
    _known: dict[int, bool] = field(factory=dict)
    _values: list[tuple[int, Term, Term]] = field(factory=list)

    def decide(self, test: Term) -> bool:
        """Return this run's decision of a test, and add the decision to the condition."""
        plain, negated = self.shared.plain(test)
        if plain is None:
            return not negated
        decided = self._settled(plain)
        if decided is not None:
            return decided is not negated
        position = len(self.taken)
        outcome = self.prefix[position] if position < len(self.prefix) else True
        self.taken.append(outcome)
        holds = outcome is not negated
        self.condition.append(plain.term if holds else plain.denied)
        self._known[plain.number] = holds
        if holds:
            self._values += plain.values
        return outcome

    def _settled(self, test: Test) -> bool | None:
        """
        Return the result that earlier decisions imply for a test, because they decided the same
        test or fixed the value of a term; None if they do not imply it.
        """
        known = self._known.get(test.number)
        if known is not None:
            return known
        values = [value for value in self._values if value[0] in test.parts]
        return test.under(values) if values else None


@define(eq=False)
class Test:
    """
    A test that a run decides. It is neither a negation nor a constant.

    Args:
        term: The Z3 term of the test.
        number: The id of the term.
        denied: The negation of the term.
        values: If the test says that a term equals a value: the term's id, the term and the value.
        parts: Ids of the terms that occur in the test.
    """

    term: Term
    number: int
    denied: Term
    values: list[tuple[int, Term, Term]]
    parts: frozenset[int]
    _under: dict[tuple[int, ...], tuple[bool | None, list[Any]]] = field(factory=dict)

    @classmethod
    def of(cls, term: Term) -> Test:
        """Return the test of a term."""
        sides = term.children() if z3.is_eq(term) else []
        values = [
            (one.get_id(), one, value)
            for one, value in zip(sides, reversed(sides), strict=True)
            if _is_value(value)
        ]
        return cls(term, term.get_id(), z3.Not(term), values, _parts(term))

    def under(self, values: list[tuple[int, Term, Term]]) -> bool | None:
        """Return the test's truth for given values of some terms; None if they do not decide it."""
        key = tuple(part for number, _, value in values for part in (number, value.get_id()))
        found = self._under.get(key)
        if found is None:
            pairs = [(term, value) for _, term, value in values]
            under = z3.simplify(z3.substitute(self.term, *pairs))
            decided = True if z3.is_true(under) else False if z3.is_false(under) else None
            found = self._under[key] = (decided, pairs)  # the pairs keep their ids
        return found[0]


@define(eq=False)
class Shared:
    """
    Cache of terms and tests that were built before; runs of one transition share most of them.

    Every entry keeps the terms of its key alive, so that Z3 does not reuse their ids.
    """

    _tests: dict[int, tuple[Term, Test | None, bool]] = field(factory=dict)
    _plain: dict[int, Test] = field(factory=dict)
    _built: dict[tuple[Any, ...], tuple[Term, Any]] = field(factory=dict)

    def plain(self, test: Term) -> tuple[Test | None, bool]:
        """Return a term's test without negations (None for True), and whether it was negated."""
        number = test.get_id()
        found = self._tests.get(number)
        if found is None:
            term, negated = _plain(z3.simplify(test))
            plain = None
            if term is not None:
                plain = self._plain.get(term.get_id())
                if plain is None:
                    plain = self._plain[term.get_id()] = Test.of(term)
            found = self._tests[number] = (test, plain, negated)
        return found[1], found[2]

    def once(self, how: Callable[..., Term], term: Term, *given: Any) -> Term:
        """Return the result of a function on a term and further arguments, computed once."""
        key = (how, term.get_id(), *(_key(part) for part in given))
        found = self._built.get(key)
        if found is None:
            found = self._built[key] = (how(term, *given), (term, given))
        return found[0]


def _key(part: Any) -> Any:
    if isinstance(part, z3.AstRef):
        return part.get_id()
    return (type(part), part if isinstance(part, (bool, int, str)) else id(part))


def _parts(term: Term) -> frozenset[int]:
    """Return the ids of all terms that occur in a term."""
    found: dict[int, Term] = {}
    todo = [term]
    while todo:
        one = todo.pop()
        if one.get_id() not in found:
            found[one.get_id()] = one
            todo += one.children()
    return frozenset(found)


def _plain(test: Term) -> tuple[Term | None, bool]:
    """Return a term without its negations (None for True), and whether it was negated."""
    negated = False
    while z3.is_not(test):
        test, negated = test.arg(0), not negated
    if z3.is_true(test) or z3.is_false(test):
        return None, negated is not z3.is_false(test)
    return test, negated


def _is_value(term: Term) -> bool:
    return bool(z3.is_int_value(term) or z3.is_bv_value(term))


#: Values that plain Python writes for members of uninterpreted sorts, by (sort name, value).
Constants = Mapping[tuple[str, Any], Term]


def raw(value: Any) -> Any:
    """Return the Z3 term of a symbolic value; return any other value unchanged."""
    return value.term if isinstance(value, Sym) else value


def lift(value: Any, sort: Any, constants: Constants) -> Term:
    """
    Convert a value to a term of a sort.

    Raises:
        KeyError: The sort has no term for this plain Python value.
        ValueError: The plain value has more bits than the sort.
    """
    value = raw(value)
    if isinstance(value, z3.ExprRef):
        return value
    kind = sort.kind()
    if kind == z3.Z3_BV_SORT:
        if isinstance(value, int) and value.bit_length() > sort.size():
            raise ValueError(f"{value} does not fit into {sort.size()} bits")
        return z3.BitVecVal(value, sort.size())
    if kind == z3.Z3_INT_SORT:
        return z3.IntVal(value)
    if kind == z3.Z3_BOOL_SORT:
        return z3.BoolVal(value)
    return constants[sort.name(), value]


class Sym:
    """
    A symbolic value; comparisons and arithmetic return new symbolic values.

    Args:
        term: The Z3 term of the value.
        constants: Terms that represent plain Python values in uninterpreted sorts.
        run: The symbolic run that decides ``bool(self)``; without a run, ``bool`` raises an error.
    """

    __hash__ = None  # type: ignore[assignment]  # equality builds a term
    __slots__ = ("constants", "run", "term")

    def __init__(self, term: Term, constants: Constants, run: PathRun | None = None) -> None:
        self.term = term
        self.constants = constants
        self.run = run

    def _with(self, other: Any, build: Callable[[Term, Term], Term]) -> Sym:
        other = raw(other)
        if not isinstance(other, z3.ExprRef):
            other = self._once(_lifted, self.constants, other)
        return Sym(self._once(build, other), self.constants, self.run)

    def _once(self, how: Callable[..., Term], *given: Any) -> Term:
        """Build a term from this value; runs of one transition build it only once."""
        if self.run is None:
            return how(self.term, *given)
        return self.run.shared.once(how, self.term, *given)

    def __eq__(self, other: Any) -> Sym:  # type: ignore[override]
        return self._with(other, operator.eq)

    def __ne__(self, other: Any) -> Sym:  # type: ignore[override]
        return self._with(other, operator.ne)

    def __lt__(self, other: Any) -> Sym:
        return self._with(other, _less)

    def __le__(self, other: Any) -> Sym:
        return self._with(other, _at_most)

    def __gt__(self, other: Any) -> Sym:
        return self._with(other, _more)

    def __ge__(self, other: Any) -> Sym:
        return self._with(other, _at_least)

    def __add__(self, other: Any) -> Sym:
        return self._with(other, operator.add)

    def __sub__(self, other: Any) -> Sym:
        return self._with(other, operator.sub)

    def __and__(self, other: Any) -> Sym:
        return self._with(other, _both)

    def __or__(self, other: Any) -> Sym:
        return self._with(other, _either)

    __radd__, __rand__, __ror__ = __add__, __and__, __or__

    def __invert__(self) -> Sym:
        return Sym(self._once(_inverse), self.constants, self.run)

    def choose(self, yes: Any, no: Any) -> Sym:
        """Return ``yes`` if this condition holds, otherwise ``no``."""
        given = raw(yes) if isinstance(raw(yes), z3.ExprRef) else raw(no)
        sort = given.sort() if isinstance(given, z3.ExprRef) else z3.IntSort()
        either = [lift(value, sort, self.constants) for value in (yes, no)]
        return Sym(z3.If(self.term, *either), self.constants, self.run)

    def __bool__(self) -> bool:
        if self.run is None:
            raise UndecidedError(
                f"the truth of {self.term} is symbolic here, not a plain bool; use &, | and implies"
            )
        return self.run.decide(self.term)

    def __repr__(self) -> str:
        return f"Sym({self.term})"


def _lifted(beside: Term, constants: Constants, value: Any) -> Term:
    """Convert a plain value to a term of the other operand's sort."""
    return lift(value, beside.sort(), constants)


def _both(a: Term, b: Term) -> Term:
    return z3.And(a, b) if z3.is_bool(a) else a & b


def _either(a: Term, b: Term) -> Term:
    return z3.Or(a, b) if z3.is_bool(a) else a | b


def _inverse(term: Term) -> Term:
    return z3.Not(term) if z3.is_bool(term) else ~term


def _more(a: Term, b: Term) -> Term:
    return _less(b, a)


def _at_least(a: Term, b: Term) -> Term:
    return _at_most(b, a)


def _less(a: Term, b: Term) -> Term:
    return z3.ULT(a, b) if z3.is_bv(a) else a < b


def _at_most(a: Term, b: Term) -> Term:
    """Return ``a <= b``; for truth values this is the implication, as for Python's bools."""
    if z3.is_bool(a):
        return z3.Implies(a, b)
    return z3.ULE(a, b) if z3.is_bv(a) else a <= b


def _selected(array: Term, constants: Constants, index: Any) -> Term:
    return z3.Select(array, lift(index, array.sort().domain(), constants))


class Array:
    """
    A column (an array of the state) as a Z3 array: reading an entry is a select and assigning one
    is a store. A pair as index selects from an array of arrays.
    """

    __slots__ = ("constants", "run", "term")

    def __init__(self, term: Term, constants: Constants, run: PathRun | None = None) -> None:
        self.term = term
        self.constants = constants
        self.run = run

    def __getitem__(self, index: Any) -> Sym:
        term = self.term
        for one in index if isinstance(index, tuple) else (index,):
            if self.run is None:
                term = _selected(term, self.constants, raw(one))
            else:
                term = self.run.shared.once(_selected, term, self.constants, raw(one))
        return Sym(term, self.constants, self.run)

    def __setitem__(self, index: Any, value: Any) -> None:
        given = index if isinstance(index, tuple) else (index,)
        self.term = self._stored(self.term, given, value)

    def _stored(self, term: Term, index: tuple[Any, ...], value: Any) -> Term:
        sort = term.sort()
        first = lift(index[0], sort.domain(), self.constants)
        if len(index) > 1:
            return z3.Store(term, first, self._stored(z3.Select(term, first), index[1:], value))
        return z3.Store(term, first, lift(value, sort.range(), self.constants))


class Scalar:
    """A column (an array of the state) with one entry, as a plain Z3 term; every index gives this
    entry."""

    __slots__ = ("constants", "run", "term")

    def __init__(self, term: Term, constants: Constants, run: PathRun | None = None) -> None:
        self.term = term
        self.constants = constants
        self.run = run

    def __getitem__(self, index: Any) -> Sym:
        return Sym(self.term, self.constants, self.run)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.term = lift(value, self.term.sort(), self.constants)
