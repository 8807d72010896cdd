"""
Grounding: convert terms of a finite encoding to plain bit vectors, so that a query is a Boolean
problem.

A column becomes one bit vector per index (such as a slot), a slot or a stage becomes a number, and
an integer becomes six bits with sign. No count leaves this range within the few steps of a bounded
proof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import z3

from ..symbolic import Encoding
from ..symbolic.terms import Term

__all__ = ["BITS", "Grounding", "Known", "Value"]

#: Width of an integer.
BITS = 6

#: A ground value: a bit vector or a truth value; for an array, one such value per index.
Value = Any

#: Terms and their values, by the terms' ids.
Known = dict[int, tuple[Term, Value]]

_LOGIC = {
    z3.Z3_OP_AND: z3.And,
    z3.Z3_OP_OR: z3.Or,
}


class Grounding:
    """
    Evaluates terms of a finite encoding for given values of their constants.

    Args:
        encoding: A finite encoding.
    """

    def __init__(self, encoding: Encoding) -> None:
        self.places = [term.as_long() for term in encoding.members["place"]]
        self._numbers: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        for name, sort in encoding.sorts.items():
            if sort.kind() == z3.Z3_DATATYPE_SORT and name in encoding.members:
                self._sizes[sort.name()] = sort.num_constructors()
                for number in range(sort.num_constructors()):
                    self._numbers[sort.constructor(number).name()] = number

    # Values

    def fresh(self, name: str, sort: Any) -> Value:
        """Return new variables for a constant of a sort."""
        if sort.kind() == z3.Z3_ARRAY_SORT:
            return {
                key: self.fresh(f"{name}[{key}]", sort.range()) for key in self._keys(sort.domain())
            }
        if sort.kind() == z3.Z3_BOOL_SORT:
            return z3.Bool(name)
        return z3.BitVec(name, self._width(sort))

    def possible(self, value: Value, sort: Any) -> list[Term]:
        """Return the condition that variables of a finite sort have a valid value."""
        if isinstance(value, dict):
            return [fact for entry in value.values() for fact in self.possible(entry, sort.range())]
        size = self._sizes.get(sort.name(), 0)
        return [z3.ULT(value, size)] if size and size < 1 << value.size() else []

    def same(self, one: Value, other: Value) -> list[Term]:
        """Return the condition that two values are equal."""
        if isinstance(one, dict):
            return [fact for key in one for fact in self.same(one[key], other[key])]
        return [one == other]

    def _width(self, sort: Any) -> int:
        if sort.kind() == z3.Z3_BV_SORT:
            return int(sort.size())
        if sort.kind() == z3.Z3_INT_SORT:
            return BITS
        return max(1, (self._sizes[sort.name()] - 1).bit_length())

    def _keys(self, sort: Any) -> Sequence[int]:
        if sort.kind() == z3.Z3_INT_SORT:
            return self.places
        return range(self._sizes[sort.name()])

    # Evaluation

    def value(self, term: Term, given: Mapping[str, Value], known: Known) -> Value:
        """
        Return a term's ground value.

        Args:
            term: The term.
            given: Values of the term's constants, by name.
            known: Cache of the values of terms for the same constants, by the term's id; this call
                adds to it.
        """
        found = known.get(term.get_id())
        if found is None:
            # Keep the term as well, so that its id is not used again.
            found = known[term.get_id()] = (term, self._value(term, given, known))
        return found[1]

    def _value(self, term: Term, given: Mapping[str, Value], known: Known) -> Value:
        kind = term.decl().kind()
        if z3.is_int_value(term):
            return z3.BitVecVal(term.as_long(), BITS)
        if z3.is_bv_value(term) or z3.is_true(term) or z3.is_false(term):
            return term
        if kind == z3.Z3_OP_DT_CONSTRUCTOR:
            return z3.BitVecVal(self._numbers[term.decl().name()], self._width(term.sort()))
        if kind == z3.Z3_OP_UNINTERPRETED:
            return given[term.decl().name()]
        parts = [self.value(part, given, known) for part in term.children()]
        return self._apply(term, kind, parts)

    def _apply(self, term: Term, kind: int, parts: list[Value]) -> Value:
        if kind in _LOGIC:
            return _LOGIC[kind](*parts)
        if kind == z3.Z3_OP_NOT:
            return z3.Not(parts[0])
        if kind == z3.Z3_OP_IMPLIES:
            return z3.Implies(parts[0], parts[1])
        if kind == z3.Z3_OP_EQ:
            return z3.And(self.same(parts[0], parts[1]))
        if kind == z3.Z3_OP_DISTINCT:
            return z3.Not(z3.And(self.same(parts[0], parts[1])))
        if kind == z3.Z3_OP_ITE:
            return _choose(parts[0], parts[1], parts[2])
        if kind == z3.Z3_OP_SELECT:
            return self._select(parts[0], parts[1])
        if kind == z3.Z3_OP_STORE:
            return self._store(parts[0], parts[1], parts[2])
        if kind == z3.Z3_OP_CONST_ARRAY:
            return dict.fromkeys(self._keys(term.sort().domain()), parts[0])
        if kind in (z3.Z3_OP_LE, z3.Z3_OP_GE, z3.Z3_OP_LT, z3.Z3_OP_GT):
            return _COMPARE[kind](parts[0], parts[1])
        if kind == z3.Z3_OP_ADD:
            return sum(parts[1:], parts[0])
        if kind == z3.Z3_OP_SUB:
            return parts[0] - parts[1]
        if kind == z3.Z3_OP_MUL:  # by a constant: a solver's normal form of a difference
            return parts[0] * parts[1]
        return term.decl()(*parts)  # an operation on consumer masks

    def _select(self, array: Value, index: Term) -> Value:
        keys = list(array)
        chosen = array[keys[-1]]
        for key in keys[-2::-1]:
            chosen = _choose(index == key, array[key], chosen)
        return chosen

    def _store(self, array: Value, index: Term, value: Value) -> Value:
        return {key: _choose(index == key, value, entry) for key, entry in array.items()}


def _choose(test: Term, yes: Value, no: Value) -> Value:
    if isinstance(yes, dict):
        return {key: _choose(test, yes[key], no[key]) for key in yes}
    if yes.eq(no):
        return yes
    test = z3.simplify(test)
    if z3.is_true(test):
        return yes
    if z3.is_false(test):
        return no
    return z3.If(test, yes, no)


_COMPARE = {
    z3.Z3_OP_LE: lambda a, b: a <= b,
    z3.Z3_OP_GE: lambda a, b: a >= b,
    z3.Z3_OP_LT: lambda a, b: a < b,
    z3.Z3_OP_GT: lambda a, b: a > b,
}
