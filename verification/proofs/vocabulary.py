"""
The specification's predicates as solver terms, about the state before a transition or after a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from attrs import frozen

from qeffect.engine.stage import STATE, TRANSITIONS
from qeffect.relations.columns import CONFIG, Column
from qeffect.spec.predicates import Predicate, Register
from qeffect.spec.promises import ASSUMED, CHANGES, CONFIGURATION, LEGAL, STEPS

from ..claims import MANDATORY, speaks_of
from ..column_reads import ColumnReads
from ..induction import HISTORY, INVARIANTS, ORIGIN
from ..induction.ghosts import GHOSTS
from ..induction.history import advance
from ..symbolic import Encoding, Memory, Path
from ..symbolic.encoding import STAGE_OF
from ..symbolic.terms import Term, raw
from .goals import Claim

__all__ = ["Moment", "Vocabulary"]

#: Transitions whose ``slot`` may be the sentinel, which means that the caller found no free slot.
_MAY_FIND_NO_SLOT = frozenset({"reserve", "check_forward"})


@frozen
class Moment:
    """The memory and the history at one moment, as Z3 terms by the name of the column (array)."""

    state: Mapping[str, Term]
    history: Mapping[str, Term]

    def columns(self) -> Iterator[tuple[str, Term]]:
        """Yield every column of memory and history; a history column is named ``ghost.NAME``."""
        yield from self.state.items()
        for name, term in self.history.items():
            yield f"ghost.{name}", term


_OF_HISTORY = frozenset(predicate.name for predicate in HISTORY)


class Vocabulary:
    """
    The predicates of one composition in one encoding.

    Args:
        encoding: The encoding of the sorts.
        relations: The relations in use; predicates that need other relations are left out.
    """

    def __init__(self, encoding: Encoding, relations: Iterable[str]) -> None:
        self.encoding = encoding
        self.relations = frozenset(relations) | MANDATORY
        self.before = Moment(
            {n: encoding.column(n, c) for n, c in {**CONFIG, **STATE}.items()},
            {n: self._ghost(n) for n in GHOSTS},
        )
        self._stage_of = encoding.column(STAGE_OF, Column("cell", "stage"))

    def _ghost(self, name: str) -> Term:
        ghost = GHOSTS[name]
        indices = tuple(i for i in ghost.indices if i != "one")
        return self.encoding.array(f"ghost.{name}", indices, ghost.values)

    # Building terms

    def state(self, moment: Moment) -> Memory:
        """Return the memory at a moment, with the stage of every cell."""
        return Memory(self.encoding, {**moment.state, STAGE_OF: self._stage_of})

    def history(self, moment: Moment) -> Memory:
        """Return the history at a moment."""
        return Memory(self.encoding, moment.history)

    def after(self, path: Path) -> Moment:
        """Return the moment after an accepted path."""
        st, h = self.state(self.before), self.history(self.before)
        ticket = None if path.returned is None else self.encoding.sym(path.returned)
        advance(path.transition, st, h, self.encoding.arguments(path.transition), ticket)
        return Moment(dict(path.columns), h.terms())

    def claim(self, predicate: Predicate, *subjects: Any) -> Claim:
        """Return a predicate about the given memory, history and arguments as a claim."""
        return Claim.of(predicate, self.encoding, *subjects)

    def close(self, claim: Claim, weight: int = 1) -> Iterator[Term]:
        """Yield the claim for all values of its variables: with quantifiers, or value by value."""
        yield from claim.close(self.encoding, weight)

    def denied(self, claim: Claim) -> Term:
        """Return the negated claim: the claim fails for some values of its variables."""
        key = ("denied", claim.name, claim.body.get_id())
        if key not in self.encoding.memo:
            self.encoding.memo[key] = (claim.denied(self.encoding), claim.body)
        return self.encoding.memo[key][0]

    # The predicates that are claimed

    def invariants(self, moment: Moment) -> list[Claim]:
        """Return the predicates that must hold at every moment."""
        return self._at(self._invariants(), moment)

    def disturbed(self, moment: Moment) -> list[Claim]:
        """Return the invariants that read a column which has changed since the first moment."""
        before = dict(self.before.columns())
        changed = {
            n for n, term in moment.columns() if term is not before[n] and not term.eq(before[n])
        }
        return self._at((p for p in self._invariants() if self._read[p.name] & changed), moment)

    def _invariants(self) -> Iterator[Predicate]:
        return (p for p in (*INVARIANTS, *HISTORY) if speaks_of(p, self.relations))

    def _at(self, predicates: Iterable[Predicate], moment: Moment) -> list[Claim]:
        st, h = self.state(moment), self.history(moment)
        columns = dict(moment.columns())
        found = []
        for predicate in predicates:
            # Many paths, also of other compositions, leave the columns of a predicate with the same
            # terms.
            terms = [columns[name] for name in sorted(self._read[predicate.name])]
            key = ("claim", predicate.name, *(term.get_id() for term in terms))
            known = self.encoding.memo.get(key)
            if known is None:
                subjects = (st, h) if predicate.name in _OF_HISTORY else (st,)
                known = (self.claim(predicate, *subjects), terms)  # the terms keep their ids
                self.encoding.memo[key] = known
            found.append(known[0])
        return found

    @cached_property
    def _read(self) -> dict[str, set[str]]:
        """The columns (arrays of memory and history) that each invariant reads."""
        found: dict[str, set[str]] = self.encoding.memo.setdefault("read", {})
        st, h = self.state(self.before), self.history(self.before)
        for predicate in self._invariants():
            if predicate.name in found:
                continue
            memory, history = ColumnReads(st), ColumnReads(h)
            subjects = (memory, history) if predicate.name in _OF_HISTORY else (memory,)
            self.claim(predicate, *subjects)
            ghosts = {f"ghost.{name}" for name in history.read}
            found[predicate.name] = (memory.read | ghosts) - {STAGE_OF}
        return found

    def configuration(self) -> list[Claim]:
        """Return the assumptions about a configuration."""
        st = self.state(self.before)
        return [self.claim(p, st) for p in CONFIGURATION]

    def counted(self) -> list[Term]:
        """
        Return the facts that number every cell and slot of a finite scope; empty if the scope is
        unbounded.
        """
        enc, st, h = self.encoding, self.state(self.before), self.history(self.before)
        most = len(enc.members.get("place", ()))
        counts = [st.cells[enc.sym(stage)] for stage in enc.members.get("stage", ())]
        counts += [h.slots[enc.sym(pool)] for pool in enc.members.get("pool", ())]
        return [raw(count <= most) for count in counts]

    def origin(self) -> list[Claim]:
        """Return the assumptions about the initial values of the ghosts (history columns)."""
        st, h = self.state(self.before), self.history(self.before)
        return [self.claim(p, st, h) for p in ORIGIN]

    def steps(self, transition: str) -> list[Claim]:
        """Return the properties that must hold before the transition if it is accepted."""
        return self._about(STEPS, transition)

    def legal(self, transition: str) -> list[Claim]:
        """Return the conditions that together make a transition legal."""
        return self._about(LEGAL, transition)

    def changes(self, path: Path) -> list[Claim]:
        """Return the properties of the change that an accepted path makes to the state."""
        after = self.state(Moment(dict(path.columns), {}))
        return self._claims(CHANGES, path.transition, self.state(self.before), after)

    def assumed(self, transition: str) -> list[Term]:
        """Return the assumptions about a transition's arguments."""
        enc = self.encoding
        found = [c.body for c in self._about(ASSUMED, transition)]
        for parameter in TRANSITIONS[transition]:
            name = "ref.slot" if parameter == "ref" else parameter
            sort = "slot" if parameter in ("ref", "leader") else parameter
            if sort not in ("slot", "stage"):
                continue
            if parameter == "slot" and transition in _MAY_FIND_NO_SLOT:
                continue
            found.append(enc.const(f"arg.{name}", sort) != enc.null(sort))
        return found + self.arbitrary()

    def arbitrary(self) -> list[Term]:
        """
        Return the fact that the slot and stage which the history follows are real, not NO_SLOT or
        NO_STAGE.
        """
        enc = self.encoding
        return [enc.const(f"ghost.{n}", n) != enc.null(n) for n in ("slot", "stage")]

    def _about(self, register: Register, transition: str) -> list[Claim]:
        moments = self.state(self.before), self.history(self.before)
        return self._claims(register, transition, *moments)

    def _claims(self, register: Register, transition: str, *moments: Memory) -> list[Claim]:
        arguments = self.encoding.arguments(transition)
        given = SimpleNamespace(**dict(zip(TRANSITIONS[transition], arguments, strict=True)))
        return [
            self.claim(p, *moments, given)
            for p in register
            if transition in p.transitions and speaks_of(p, self.relations)
        ]
