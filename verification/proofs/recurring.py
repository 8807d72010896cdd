"""
Proof that a recorded step may be repeated without its guards: increasing the counters (a move)
changes no guard's decision and commutes with every write.

A contract commits a recorded step in one call (`qeffect.steps`) if the entries that the step reads
equal the recorded entries after a move. In a move, all numbers of one family (such as epochs)
increase by as much as the family's counter. This comparison can replace the guards only if every
transition of a step, from a moved state with moved arguments, takes the same path and leaves the
moved result. The proof covers every path of every transition that a recorded step may contain, one
family at a time; a move of several families is a sequence of such moves. The sorts are unbounded,
so the proof holds for any number of slots, stages, links and epochs, and for any increase.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import z3
from attrs import field, frozen

from qeffect.engine.stage import STATE, TRANSITIONS
from qeffect.steps.counters import BASES, COUNTERS, Counter
from qeffect.steps.recorded_step import RECUR

from ..claims import MANDATORY
from ..symbolic import Encoding, Path, flat_arguments
from ..symbolic.encoding import STAGE_OF
from ..symbolic.terms import Term
from .goals import Goal, Obligation
from .obligations import Composition

__all__ = ["MEMBERS", "MOVED", "NAME", "recurring"]

#: The claim about each path and family: the promise of a step in one call.
NAME: Final = "steps.moved-alike"

#: The columns that a move changes within a step: those of a recorded step, and the tickets that are
#: outstanding between a check and its commit. A recorded step has no evaluation, and its
#: transitions only test whether an evaluation is in flight, so the ticket of an evaluation does not
#: move.
MOVED: Final[Mapping[str, Counter]] = {
    **COUNTERS,
    **{
        name: Counter("ticket", None, 0)
        for name, column in STATE.items()
        if column.values == "ticket" and name != "evaluating"
    },
}

#: The sort of each family's members; every other family has a single member.
MEMBERS: Final[Mapping[str, str]] = {
    family: STATE[name].index
    for family, name in BASES.items()
    if family != "epoch" and STATE[name].index != "one"
}

#: The relations whose lemmas say that the numbers of a family count from zero.
_COUNTED: Final[Mapping[str, frozenset[str]]] = {
    "epoch": frozenset({"version", "reduction"}),
    "ticket": frozenset({"order", "version", "arena"}),
    "token": frozenset({"order", "version"}),
    "replay": frozenset({"completion"}),
    "work": frozenset({"completion"}),
}


def recurring(
    composition: Composition,
    moved: Mapping[str, Counter] = MOVED,
    families: Iterable[str] = tuple(BASES),
) -> Iterator[Obligation | Goal]:
    """
    Yield, for each path of a step's transitions and each family of numbers, the goal that a move of
    the family commutes with the path.

    If the path's terms do not mention the family, both sides are the same term.

    Args:
        composition: The transitions.
        moved: For each column (array of the state), the counter with which its numbers increase; a
            mutant lacks an entry.
        families: The families of numbers (numbers that increase together) to move, one family at a
            time.
    """
    chosen = tuple(families)
    for transition in (name for name in TRANSITIONS if name in RECUR):
        for family in chosen:
            move = Move(composition.encoding, composition.vocabulary.before.state, family, moved)
            arguments = move.arguments(transition)
            facts = (*composition.vocabulary.assumed(transition), *move.facts(transition))
            for path in composition.paths[transition]:
                differences = list(move.differences(path, arguments))
                if differences:
                    relations = MANDATORY | _COUNTED.get(family, frozenset())
                    given = (*path.tests, *facts)
                    name = f"{NAME}: {family}"
                    denied = differences[0] if len(differences) == 1 else z3.Or(differences)
                    yield Goal(name, "recurring", transition, path.label, relations, given, denied)
                else:
                    yield Obligation(
                        f"{NAME}: {family}",
                        "recurring",
                        composition.name,
                        transition,
                        path.label,
                        "syntax",
                        "unsat",
                        0.0,
                    )


@frozen
class Move:
    """
    A move of one family of numbers: each of its counters increases by an arbitrary amount.

    Args:
        encoding: The encoding of the sorts.
        before: The Z3 term of every column (array of the state) before a transition.
        family: The family of numbers (numbers that increase together) that moves.
        moved: For each column, the counter with which its numbers move.
    """

    encoding: Encoding
    before: Mapping[str, Term] = field(repr=False)
    family: str
    moved: Mapping[str, Counter] = field(repr=False)

    def amount(self, member: Term | None = None) -> Term:
        """Return the amount by which the counter of a member (such as a slot) moves."""
        if self.family not in MEMBERS:
            return self.encoding.const(f"move.{self.family}", "int")
        amounts = self.encoding.array(f"move.{self.family}", (MEMBERS[self.family],), "int")
        return z3.Select(amounts, member)

    def entry(
        self, name: str, columns: Mapping[str, Term], index: Term | None, value: Term
    ) -> Term:
        """Return the moved entry of a column."""
        counter = self.moved.get(name)
        if counter is None or counter.family != self.family:
            return value
        member = index
        for through in counter.through or ():
            member = z3.Select(columns[through], member)
        higher = value + self.amount(None if counter.through is None else member)
        return higher if counter.none is None else z3.If(value == counter.none, value, higher)

    def column(self, name: str) -> Term:
        """Return the moved column before a transition."""
        term = self.before[name]
        if not z3.is_array(term):
            return self.entry(name, self.before, None, term)
        index = z3.Const(f"moved!{name}", term.sort().domain())
        return z3.Lambda([index], self.entry(name, self.before, index, z3.Select(term, index)))

    def arguments(self, transition: str) -> list[tuple[Term, Term]]:
        """Return each column and argument that moves, with its moved term."""
        own = [name for name, counter in self.moved.items() if counter.family == self.family]
        pairs = [(self.before[name], self.column(name)) for name in own]
        given = {
            n: self.encoding.const(f"arg.{n}", s) for n, s in flat_arguments(transition).items()
        }
        for name, value in given.items():
            moved = self._argument(name, value, given)
            if moved is not None:
                pairs.append((value, moved))
        return pairs

    def _argument(self, name: str, value: Term, given: Mapping[str, Term]) -> Term | None:
        """Return the moved argument; None if the family does not move it."""
        at, select = self.before, z3.Select
        if self.family == "epoch" and name in ("key.epoch", "epoch"):
            return value + self.amount()
        if self.family == "epoch" and name == "fill_epoch":
            return z3.If(value >= 0, value + self.amount(), value)
        if self.family == "ticket" and name == "ticket":
            return value + self.amount()
        if self.family == "generation" and name == "ref.generation":
            return value + self.amount(given["ref.slot"])
        if self.family == "token" and name == "token":
            stage = select(self.encoding.array(STAGE_OF, ("cell",), "stage"), given["key.cell"])
            return value + self.amount(select(at["domain_of"], stage))
        if self.family == "token" and name == "scales":
            domain = select(at["domain_of"], select(at["slot_stage"], given["slot"]))
            return z3.If(value >= 0, value + self.amount(domain), value)
        return None

    def facts(self, transition: str) -> Iterator[Term]:
        """
        Yield the assumptions that a recorded step makes about the move and the arguments.

        Counters never decrease, keys name an epoch, and no slot reaches its last generation.
        """
        sort = MEMBERS.get(self.family)
        if sort is None:
            yield self.amount() >= 0
        else:
            member = self.encoding.const("var.m", sort)
            yield from self.encoding.close({"var.m": sort}, self.amount(member) >= 0)
            if self.family == "generation":
                highest = z3.Select(self.before["generation"], member) + self.amount(member)
                below = highest < self.before["generation_max"]
                yield from self.encoding.close({"var.m": sort}, below)
        if "key.epoch" in flat_arguments(transition):
            yield self.encoding.const("arg.key.epoch", "int") >= 0

    def differences(self, path: Path, pairs: list[tuple[Term, Term]]) -> Iterator[Term]:
        """Yield the conditions under which a path from the moved state misses the moved result."""
        for test in path.tests:
            moved = self._from_moved(test, pairs)
            if not moved.eq(self._simple(test)):
                yield z3.Not(moved)
        if path.clause is not None:
            return
        for name, after in path.columns.items():
            through = self.moved[name].through if name in self.moved else None
            if name not in path.written and not any(t in path.written for t in through or ()):
                continue
            index = None
            ran, left = self._from_moved(after, pairs), after
            if z3.is_array(after):
                sort = STATE[name].index
                index = self.encoding.const(f"at.{sort}", sort)
                ran, left = self._simple(z3.Select(ran, index)), z3.Select(after, index)
            wanted = self._simple(self.entry(name, path.columns, index, left))
            if not ran.eq(wanted):
                yield ran != wanted
        if path.returned is not None:
            wanted = path.returned + self.amount() if self.family == "ticket" else path.returned
            ran, wanted = self._from_moved(path.returned, pairs), self._simple(wanted)
            if not ran.eq(wanted):
                yield ran != wanted

    def _from_moved(self, term: Term, pairs: list[tuple[Term, Term]]) -> Term:
        """Return a path's term with the moved state and arguments in place of the original ones."""
        memo = self.encoding.memo
        key = ("moved", self.family, id(self.moved), term.get_id(), *(p.get_id() for p, _ in pairs))
        if key not in memo:
            memo[key] = (self._simple(z3.substitute(term, *pairs)), term)
        found: Term = memo[key][0]
        return found

    def _simple(self, term: Term) -> Term:
        known = self.encoding.memo.setdefault("without lambdas", {})
        simple = z3.simplify(term)
        return z3.simplify(_without_lambdas(simple, known))


#: Results by the id of a term, with the term, so that the id is not used again.
_Known = dict[int, tuple[Term, Term]]


def _without_lambdas(term: Term, known: _Known) -> Term:
    """
    Replace each read of a moved column by the term of the entry, since other solvers do not support
    the lambdas of moved columns.
    """
    if not z3.is_app(term) or term.num_args() == 0:
        return term
    number = term.get_id()
    if number not in known:
        if z3.is_select(term):
            found = _read(term.arg(0), _without_lambdas(term.arg(1), known), known)
        else:
            parts = term.children()
            made = [_without_lambdas(part, known) for part in parts]
            same = all(one is other for one, other in zip(parts, made, strict=True))
            found = term if same else term.decl()(*made)
        known[number] = term, found
    return known[number][1]


def _read(array: Term, index: Term, known: _Known) -> Term:
    """Return the entry at an index of an array that is a column with stores."""
    if z3.is_quantifier(array) and array.is_lambda():
        return z3.substitute_vars(array.body(), index)
    if z3.is_store(array):
        before, at, value = array.children()
        at, value = _without_lambdas(at, known), _without_lambdas(value, known)
        return z3.If(index == at, value, _read(before, index, known))
    if z3.is_K(array):
        return _without_lambdas(array.arg(0), known)
    return z3.Select(array, index)
