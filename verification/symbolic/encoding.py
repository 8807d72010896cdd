"""
Encodings of the contract's sorts (slot, stage and so on) as Z3 sorts, and the symbolic memory and
arguments of a transition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import z3
from attrs import define, field

from qeffect.engine.stage import STATE, TRANSITIONS
from qeffect.relations.columns import CONFIG, Column

from .terms import Array, Constants, PathRun, Scalar, Sym, Term, lift, raw

__all__ = ["ARGUMENTS", "Encoding", "Memory", "flat_arguments"]

#: Sort of every parameter of every transition. A key is a cell (which determines the stage) and an
#: epoch; a reference is a slot, a generation and an incarnation.
ARGUMENTS: Mapping[str, str] = {
    "slot": "slot",
    "stage": "stage",
    "domain": "domain",
    "bucket": "bucket",
    "link": "link",
    "caller": "caller",
    "token": "int",
    "ticket": "int",
    "epoch": "int",
    "incarnation": "int",
    "refresh": "flag",
    "cached": "flag",
    "first": "flag",
    "bit": "mask",
    "message": "mask",
    "leader": "slot",
    "destination": "opaque",
    "queued": "opaque",
    "covered": "opaque",
    "key.cell": "cell",
    "key.epoch": "int",
    "filled": "opaque",
    "fill_epoch": "int",
    "updates": "int",
    "scales": "int",
    "draws": "int",
    "weight": "int",
    "parts": "int",
    "ref.slot": "slot",
    "ref.generation": "generation",
    "ref.incarnation": "int",
}

#: The stage of every cell, which ``key.stage`` reads. Configured; no transition reads the column.
STAGE_OF = "stage_of"

_INDEX_SORTS = (
    "slot",
    "cell",
    "stage",
    "domain",
    "link",
    "caller",
    "pool",
    "buffer",
    "bucket",
    "opaque",
)
_NULL = ("slot", "stage")  # sorts with a sentinel, written -1: NO_SLOT and NO_STAGE
_MASK_BITS = 6


def flat_arguments(transition: str) -> dict[str, str]:
    """
    Return the arguments of a transition with their sorts; keys and references are split into their
    fields.

    >>> flat_arguments("drop")
    {'key.cell': 'cell', 'key.epoch': 'int', 'ref.slot': 'slot', 'ref.generation': \
'generation', 'ref.incarnation': 'int'}
    """
    return {
        name: sort
        for parameter in TRANSITIONS[transition]
        for name, sort in ARGUMENTS.items()
        if name == parameter or name.startswith(f"{parameter}.")
    }


@define(eq=False)
class Encoding:
    """
    One choice of Z3 sorts for slots, cells, stages, domains, links, callers, pools, buffers,
    buckets and values.

    ``Encoding.sorted()`` is unbounded: every index sort is uninterpreted, so that a proof holds for
    any number of slots, stages and so on. ``Encoding.finite(scope)`` gives each index sort a few
    members and expands every quantifier. ``Encoding.integers()`` makes every sort an integer, for
    the NumPy compiler; in this encoding ``every(column, value)`` applies an uninterpreted predicate
    named ``every``, and ``fill`` makes a constant array.

    Counts, epochs, tickets and generations are unbounded integers; ``generation_bits`` can limit
    the width of a generation. Consumer masks are bit vectors of six bits.

    Args:
        sorts: The Z3 sort for every sort name of ``qeffect.relations.columns``, such as slot or
            stage.
        constants: Terms that represent plain Python values in uninterpreted sorts.
        members: Members of each finite index sort, without its sentinel; empty if unbounded.
        generation_bits: Width of a generation in bits, or None for an unbounded integer.
        memo: Cache of results that were computed in this encoding; each user of the cache chooses
            its own keys.
    """

    sorts: Mapping[str, Any]
    constants: Constants
    members: Mapping[str, tuple[Term, ...]] = field(factory=dict)
    generation_bits: int | None = None
    memo: dict[Any, Any] = field(factory=dict, repr=False)

    @classmethod
    def sorted(cls, generation_bits: int | None = None) -> Encoding:
        """Return an encoding with uninterpreted index sorts, in which nothing is bounded."""
        sorts = {name: z3.DeclareSort(name.capitalize()) for name in _INDEX_SORTS}
        constants = {(sorts[n].name(), -1): z3.Const(f"no_{n}", sorts[n]) for n in _NULL}
        return cls(_values(sorts, generation_bits), constants, {}, generation_bits)

    @classmethod
    def finite(cls, scope: Mapping[str, int], generation_bits: int | None = None) -> Encoding:
        """
        Return an encoding in which each index sort has a given number of members, besides its
        sentinel; a sort without a given number has one member.
        """
        sorts: dict[str, Any] = {}
        members: dict[str, tuple[Term, ...]] = {}
        constants: dict[tuple[str, Any], Term] = {}
        for name in _INDEX_SORTS:
            names = [f"{name}{i}" for i in range(scope.get(name, 1))]
            null = [f"no_{name}"] if name in _NULL else []
            label = f"{name.capitalize()}{len(names)}"
            sorts[name], values = _enumeration(label, tuple(null + names))
            members[name] = tuple(values[len(null) :])
            if null:
                constants[label, -1] = values[0]
        places = max(scope.get("cell", 1), scope.get("slot", 1))
        members["place"] = tuple(z3.IntVal(i) for i in range(places))
        return cls(_values(sorts, generation_bits), constants, members, generation_bits)

    @classmethod
    def integers(cls) -> Encoding:
        """Return an encoding in which every sort is an integer; for compilers, not for proofs."""
        return cls(_values(dict.fromkeys(_INDEX_SORTS, z3.IntSort()), None), {})

    @property
    def unbounded(self) -> bool:
        """Whether quantifiers range over uninterpreted sorts."""
        return not self.members and self.sorts["slot"].kind() == z3.Z3_UNINTERPRETED_SORT

    # Terms

    def const(self, name: str, sort: str) -> Term:
        """Return the Z3 constant with this name and sort."""
        return self.array(name, (), sort)

    def array(self, name: str, indices: tuple[str, ...], sort: str) -> Term:
        """Return the Z3 array constant with this name and these sorts of indices and values."""
        known = self.memo.get((name, indices, sort))
        if known is None:
            values = self.sorts[sort]
            for index in reversed(indices):
                values = z3.ArraySort(self.sorts[index], values)
            known = z3.Const(name, values)
            self.memo[name, indices, sort] = known
        return known

    def column(self, name: str, column: Column) -> Term:
        """Return the term of a column before a transition: an array, or a scalar if the column has
        only one entry."""
        return self.array(name, () if column.index == "one" else (column.index,), column.values)

    def view(self, term: Term, run: PathRun | None = None) -> Array | Scalar:
        """Return a column that Python code can index."""
        return (Array if z3.is_array(term) else Scalar)(term, self.constants, run)

    def sym(self, term: Term, run: PathRun | None = None) -> Sym:
        """Return a term that Python code can compute with."""
        return Sym(term, self.constants, run)

    def null(self, sort: str) -> Term | None:
        """Return the sentinel of an index sort, or None if it has none."""
        return self.constants.get((self.sorts[sort].name(), -1))

    def every(self, term: Term, value: Any) -> Term:
        """
        Return the condition that all entries of a column equal a value; the entry of the sentinel
        (such as NO_SLOT) is ignored.
        """
        if not z3.is_array(term):
            return term == lift(value, term.sort(), self.constants)
        lifted = lift(value, term.sort().range(), self.constants)
        domain = term.sort().domain()
        if domain.kind() == z3.Z3_INT_SORT:
            return z3.Function("every", term.sort(), lifted.sort(), z3.BoolSort())(term, lifted)
        null = self.constants.get((domain.name(), -1))
        for members in self.members.values():
            if members and members[0].sort() == domain:
                return z3.And([z3.Select(term, i) == lifted for i in members])
        index = z3.Const("every!", domain)
        body = z3.Select(term, index) == lifted
        return z3.ForAll([index], body if null is None else z3.Or(index == null, body))

    def close(self, variables: Mapping[str, str], body: Term, weight: int = 1) -> Iterator[Term]:
        """
        Yield a formula for all values of its variables except sentinels: as one quantified formula,
        or one formula per value if the sorts are finite.
        """
        terms = [(self.const(name, sort), sort) for name, sort in variables.items()]
        finite = [(term, self.members[sort]) for term, sort in terms if sort in self.members]
        rest = [(term, self.null(sort)) for term, sort in terms if sort not in self.members]
        spared = [term == null for term, null in rest if null is not None]
        for values in product(*(members for _, members in finite)):
            pairs = zip((term for term, _ in finite), values, strict=True)
            one = z3.substitute(body, *pairs) if finite else body
            one = z3.Or(*spared, one) if spared else one
            yield z3.ForAll([term for term, _ in rest], one, weight) if rest else one

    # Memory and arguments

    def memory(self, run: PathRun | None = None) -> Memory:
        """Return the memory before a transition."""
        return Memory(
            self, {n: self.column(n, c) for n, c in (*CONFIG.items(), *STATE.items())}, run
        )

    def arguments(self, transition: str, run: PathRun | None = None) -> tuple[Any, ...]:
        """Return a transition's symbolic arguments in the form that the composed function takes."""
        made: dict[str, Any] = {}
        for flat, sort in flat_arguments(transition).items():
            parameter, _, part = flat.partition(".")
            value = self.sym(self.const(f"arg.{flat}", sort), run)
            if part:
                setattr(made.setdefault(parameter, SimpleNamespace()), part, value)
            else:
                made[parameter] = value
        if "key" in made:
            stage_of = self.column(STAGE_OF, Column("cell", "stage"))
            stage = z3.Select(stage_of, made["key"].cell.term)
            made["key"].stage = self.sym(stage, run)
        return tuple(made[parameter] for parameter in TRANSITIONS[transition])


@cache
def _enumeration(name: str, members: tuple[str, ...]) -> tuple[Any, list[Term]]:
    """Return a finite sort with these members, made only once since Z3 allows no redeclaration."""
    sort, values = z3.EnumSort(name, [f"{name}.{member}" for member in members])
    return sort, values


def _values(index_sorts: Mapping[str, Any], generation_bits: int | None) -> dict[str, Any]:
    integer = z3.IntSort()
    generation = integer if generation_bits is None else z3.BitVecSort(generation_bits)
    return {
        **index_sorts,
        "int": integer,
        "place": integer,
        "flag": integer,
        "ticket": integer,
        "mask": z3.BitVecSort(_MASK_BITS),
        "generation": generation,
    }


class Memory:
    """
    Symbolic memory: one attribute per column (array of the contract's state), and the operations
    ``every`` and ``fill``.

    Args:
        encoding: The encoding of the sorts.
        terms: Z3 term of every column.
        run: The symbolic run that decides tests; None for predicates, which must not branch.
    """

    def __init__(
        self, encoding: Encoding, terms: Mapping[str, Term], run: PathRun | None = None
    ) -> None:
        self._encoding = encoding
        self._before = dict(terms)
        self._run = run

    def __getattr__(self, name: str) -> Any:
        """Return the view of a column, made at its first use since most columns are never used."""
        term = self.__dict__.get("_before", {}).get(name)
        if term is None:
            raise AttributeError(f"unknown column {name!r}")
        view = self._encoding.view(term, self._run)
        setattr(self, name, view)
        return view

    def every(self, column: Any, value: Any) -> Sym:
        """Return the condition that every entry of a column equals the value."""
        if self._run is None:
            return self._encoding.sym(self._encoding.every(column.term, value))
        term = self._run.shared.once(self._encoding.every, column.term, raw(value))
        return self._encoding.sym(term, self._run)

    def fill(self, column: Any, value: Any) -> None:
        """Set every entry of a column to the value."""
        if isinstance(column, Scalar):
            column[0] = value
            return
        sort = column.term.sort()
        column.term = z3.K(sort.domain(), lift(value, sort.range(), self._encoding.constants))

    def terms(self) -> dict[str, Term]:
        """Return every column's current term."""
        met = self.__dict__
        return {n: met[n].term if n in met else term for n, term in self._before.items()}
