"""
Instantiate lemmas without quantifiers: each lemma for the slots, stages and so on that a goal
names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Final

import z3

from ..symbolic import Encoding
from ..symbolic.terms import Term
from .goals import Claim, Goal

__all__ = ["smallest_instances"]

#: A lemma is instantiated for at most this many of a goal's smallest terms per sort.
_TERMS: Final = 6


def smallest_instances(lemmas: Iterable[Claim], goal: Goal, encoding: Encoding) -> Iterator[Term]:
    """Yield the given lemmas, each instantiated with the smallest terms of a goal."""
    terms = _smallest([goal.denied, *goal.facts])
    for claim in lemmas:
        members = [encoding.const(f"var.{n}", sort) for n, sort in claim.variables.items()]
        instance = claim.at_hand(encoding)
        for chosen in product(*(terms.get(m.sort().name(), ()) for m in members)):
            yield z3.substitute(instance, *zip(members, chosen, strict=True))


def _smallest(formulas: Sequence[Term]) -> dict[str, list[Term]]:
    """Return the smallest ground terms of some formulas, by the name of their sort."""
    sizes: dict[int, tuple[int, Term]] = {}

    def size(term: Term) -> int:
        found = sizes.get(term.get_id())
        if found is None:
            parts = [] if z3.is_quantifier(term) else term.children()
            found = sizes[term.get_id()] = (1 + sum(size(part) for part in parts), term)
        return found[0]

    for formula in formulas:
        size(formula)
    made: dict[str, list[Term]] = defaultdict(list)
    for _, term in sorted(sizes.values(), key=lambda found: found[0]):
        kept = made[term.sort().name()]
        if len(kept) < _TERMS:
            kept.append(term)
    return made
