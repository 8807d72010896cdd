"""
Symbolic values that plain Python code computes with: operators build Z3 terms, ``bool`` forks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import z3
from attrs import define, field

__all__ = ["Array", "Run", "Scalar", "Sym", "UndecidedError", "lift", "raw"]

Term = Any  # a z3.ExprRef; z3 ships no type information


class UndecidedError(TypeError):
    """A symbolic value was asked for its truth outside of a run that forks on it."""


@define
class Run:
    """
    One execution of a transition: which way each test that it met was decided.

    Args:
        prefix: Decisions to replay; later tests are decided ``True`` first.
        taken: Decision of each test that the path conditions do not already settle.
        condition: The tests as decided; their conjunction is the path's condition.
        plain: Tests met by any run, simplified, by the id of the term that it keeps alive.
    """

    prefix: list[bool] = field(factory=list)
    taken: list[bool] = field(factory=list)
    condition: list[Term] = field(factory=list)
    plain: dict[int, tuple[Term, Term | None, bool]] = field(factory=dict)
    _known: dict[int, bool] = field(factory=dict)
    _values: list[tuple[Term, Term]] = field(factory=list)

    def decide(self, test: Term) -> bool:
        """Return this run's decision of a test, and remember it as part of the condition."""
        found = self.plain.get(test.get_id())
        if found is None:
            found = self.plain[test.get_id()] = (test, *_plain(z3.simplify(test)))
        _, test, negated = found
        if test is None:
            return not negated
        decided = self._settled(test)
        if decided is not None:
            return decided is not negated
        position = len(self.taken)
        outcome = self.prefix[position] if position < len(self.prefix) else True
        self.taken.append(outcome)
        holds = outcome is not negated
        # The condition keeps the term alive, so that its id stays its own.
        self.condition.append(test if holds else z3.Not(test))
        self._known[test.get_id()] = holds
        if holds and z3.is_eq(test):
            self._values += [
                (term, value)
                for term, value in (test.children(), reversed(test.children()))
                if _is_value(value)
            ]
        return outcome

    def _settled(self, test: Term) -> bool | None:
        """Return what earlier decisions say of a test: the same one, or a term's value."""
        known = self._known.get(test.get_id())
        if known is not None or not self._values:
            return known
        under = z3.simplify(z3.substitute(test, *self._values))
        return True if z3.is_true(under) else False if z3.is_false(under) else None


def _plain(test: Term) -> tuple[Term | None, bool]:
    """Return a test without negations, None for truth, and whether it is denied."""
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
    """Return the Z3 term of a symbolic value, and any other value as it is."""
    return value.term if isinstance(value, Sym) else value


def lift(value: Any, sort: Any, constants: Constants) -> Term:
    """
    Return a value as a term of a sort.

    Raises:
        KeyError: A plain value has no meaning in the sort.
    """
    value = raw(value)
    if isinstance(value, z3.ExprRef):
        return value
    kind = sort.kind()
    if kind == z3.Z3_BV_SORT:
        return z3.BitVecVal(value, sort.size())
    if kind == z3.Z3_INT_SORT:
        return z3.IntVal(value)
    if kind == z3.Z3_BOOL_SORT:
        return z3.BoolVal(value)
    return constants[sort.name(), value]


class Sym:
    """
    A symbolic value; comparisons and arithmetic give new ones.

    Args:
        term: Its Z3 term.
        constants: What plain values mean in uninterpreted sorts.
        run: The run that decides ``bool(self)``; without one it raises.
    """

    __hash__ = None  # type: ignore[assignment]  # equality builds a term
    __slots__ = ("constants", "run", "term")

    def __init__(self, term: Term, constants: Constants, run: Run | None = None) -> None:
        self.term = term
        self.constants = constants
        self.run = run

    def _with(self, other: Any, build: Callable[[Term, Term], Term]) -> Sym:
        lifted = lift(other, self.term.sort(), self.constants)
        return Sym(build(self.term, lifted), self.constants, self.run)

    def __eq__(self, other: Any) -> Sym:  # type: ignore[override]
        return self._with(other, lambda a, b: a == b)

    def __ne__(self, other: Any) -> Sym:  # type: ignore[override]
        return self._with(other, lambda a, b: a != b)

    def __lt__(self, other: Any) -> Sym:
        return self._with(other, _less)

    def __le__(self, other: Any) -> Sym:
        return self._with(other, _at_most)

    def __gt__(self, other: Any) -> Sym:
        return self._with(other, lambda a, b: _less(b, a))

    def __ge__(self, other: Any) -> Sym:
        return self._with(other, lambda a, b: _at_most(b, a))

    def __add__(self, other: Any) -> Sym:
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other: Any) -> Sym:
        return self._with(other, lambda a, b: a - b)

    def __and__(self, other: Any) -> Sym:
        return self._with(other, lambda a, b: z3.And(a, b) if z3.is_bool(a) else a & b)

    def __or__(self, other: Any) -> Sym:
        return self._with(other, lambda a, b: z3.Or(a, b) if z3.is_bool(a) else a | b)

    __radd__, __rand__, __ror__ = __add__, __and__, __or__

    def __invert__(self) -> Sym:
        term = z3.Not(self.term) if z3.is_bool(self.term) else ~self.term
        return Sym(term, self.constants, self.run)

    def choose(self, yes: Any, no: Any) -> Sym:
        """Return ``yes`` where this holds, else ``no``."""
        given = raw(yes) if isinstance(raw(yes), z3.ExprRef) else raw(no)
        sort = given.sort() if isinstance(given, z3.ExprRef) else z3.IntSort()
        either = [lift(value, sort, self.constants) for value in (yes, no)]
        return Sym(z3.If(self.term, *either), self.constants, self.run)

    def __bool__(self) -> bool:
        if self.run is None:
            raise UndecidedError(
                f"the truth of {self.term} is not a plain bool here; use & | implies"
            )
        return self.run.decide(self.term)

    def __repr__(self) -> str:
        return f"Sym({self.term})"


def _less(a: Term, b: Term) -> Term:
    return z3.ULT(a, b) if z3.is_bv(a) else a < b


def _at_most(a: Term, b: Term) -> Term:
    """``a <= b``; between truth values that is implication, as between Python's bools."""
    if z3.is_bool(a):
        return z3.Implies(a, b)
    return z3.ULE(a, b) if z3.is_bv(a) else a <= b


class Array:
    """A column as a Z3 array: reading selects, assigning stores; a pair indexes one of two."""

    __slots__ = ("constants", "run", "term")

    def __init__(self, term: Term, constants: Constants, run: Run | None = None) -> None:
        self.term = term
        self.constants = constants
        self.run = run

    def __getitem__(self, index: Any) -> Sym:
        term = self.term
        for one in index if isinstance(index, tuple) else (index,):
            term = z3.Select(term, lift(one, term.sort().domain(), self.constants))
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
    """A column of one entry as a plain Z3 term, whatever its index."""

    __slots__ = ("constants", "run", "term")

    def __init__(self, term: Term, constants: Constants, run: Run | None = None) -> None:
        self.term = term
        self.constants = constants
        self.run = run

    def __getitem__(self, index: Any) -> Sym:
        return Sym(self.term, self.constants, self.run)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.term = lift(value, self.term.sort(), self.constants)
