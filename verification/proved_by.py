"""
Find out which obligations prove each promise, and from which lemmas.

This module proves nothing. It calls the functions that make the obligations for `qeffect prove`,
for the contract with all relations; each obligation has the name of its promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

from qeffect.engine.stage import TRANSITIONS, transitions
from qeffect.log.replayer import replay
from qeffect.schedule.check import check
from qeffect.spec.launches import LAUNCH_PROMISES, LAUNCH_STEPS
from qeffect.spec.predicates import Predicate
from qeffect.spec.promises import CHANGES, LEGAL, MEMORY, PAPER, STEPS, WORLD
from qeffect.spec.ranks import RANK_PROMISES, RANK_STEPS
from qeffect.spec.recorded import STEP_PROMISES

from .column_reads import ColumnReads
from .induction import HISTORY, LEMMAS
from .proofs.completeness import completeness
from .proofs.goals import Goal, Obligation
from .proofs.obligations import Composition, changes
from .proofs.prove import makers
from .proofs.recurring import NAME, recurring
from .proofs.theorems import refusals, widths
from .ranks.prove import PROTOCOLS, goals
from .symbolic import Encoding

__all__ = ["callables", "lemmas", "module_of", "proofs"]

_RANKS: Final = (RANK_PROMISES, RANK_STEPS, LAUNCH_PROMISES, LAUNCH_STEPS)
#: The folders beside the kernel's, which the package holds under its own name.
_BESIDE: Final = ("spec/", "verification/", "gpu_runtime/")


def module_of(defined: Any) -> str:
    """Return the path of the module that defines an object, relative to the repository.

    >>> module_of(module_of), module_of(transitions)
    ('verification/proved_by.py', 'qeffect/engine/stage.py')
    """
    path = defined.__module__.removeprefix("qeffect.").replace(".", "/") + ".py"
    return path if path.startswith(_BESIDE) else f"qeffect/{path}"


def callables() -> dict[str, str]:
    """
    Return the modules of the functions that can raise a clause, by name: the composed function of
    each transition, the check of a schedule, and the replay of a log.
    """
    calls = {**transitions().functions, "check": check, "replay": replay}
    return {name: module_of(call) for name, call in calls.items()}


@cache
def lemmas() -> Mapping[str, str]:
    """Return the module of each lemma of the contract's proofs, by name."""
    return {lemma.name: module_of(lemma.function) for lemma in LEMMAS}


@cache
def proofs() -> Mapping[str, Mapping[str, Any]]:
    """
    Return, for each promise and theorem, how it is proved.

    Raises:
        KeyError: A promise has no obligation.

    Returns:
        For each name up to three entries; only ``obligations`` is always present.
        ``obligations``: each function that makes obligations of this name, as ``file: function``,
        with the ``kinds`` of these obligations. ``from``: the lemmas and other promises that are
        hypotheses of these obligations and read one of the history columns that the promise reads.
        ``beside``: for a promise about ranks, the modules of the protocol and of its lemmas.
    """
    found = {**_of_the_contract(), **_of_the_ranks()}
    promised = (*(MEMORY, WORLD, STEPS, CHANGES, LEGAL), *_RANKS)
    names = [predicate.name for register in promised for predicate in register]
    names += [name for invariant in PAPER.values() for name in invariant.theorems]
    names += [promise.name for promise in STEP_PROMISES if promise.proof]
    return {name: found[name] for name in dict.fromkeys(names)}


def _of_the_contract() -> dict[str, dict[str, Any]]:
    full = Composition.of((), Encoding.sorted())
    hypotheses: dict[str, set[str]] = {}
    found: dict[str, dict[str, Any]] = {}
    for make, made in _made(full):
        for one in made:
            for name in _proved(make, one):
                _enter(found, name, make, one.kind)
                if isinstance(one, Goal):
                    hypotheses.setdefault(name, set()).update(full.lemmas_of(one.relations))
    always = {p.name: _words(p, full) for p in HISTORY}
    for promise in (*WORLD, *STEPS, *LEGAL):
        usable, words = hypotheses.get(promise.name, set()), _words(promise, full)
        found[promise.name]["from"] = [
            other.name
            for other in HISTORY
            if other is not promise and other.name in usable and always[other.name] & words
        ]
    return found


def _made(
    full: Composition,
) -> Iterator[tuple[Callable[..., Any], Iterable[Goal | Obligation]]]:
    """Yield each function that makes obligations, with the obligations that it makes."""
    for make in (*makers(full), changes, recurring, refusals):
        yield make, make(full)
    yield widths, widths(Composition.of((), Encoding.sorted(generation_bits=64)), full)


def _proved(make: Callable[..., Any], made: Goal | Obligation) -> Iterator[str]:
    """
    Yield the names of the promises that an obligation helps to prove. This is the obligation's own
    name, with two exceptions. The obligation about legal checks belongs to the predicates that
    define legal. An obligation about one family of numbers belongs to the promise about all
    families.
    """
    if make is completeness:
        yield from (p.name for p in LEGAL if made.transition in p.transitions)
    elif make is recurring:
        yield NAME
    elif made.kind == "step" or made.name not in lemmas():  # a lemma may share a promise's name
        yield made.name


def _words(predicate: Predicate, full: Composition) -> set[str]:
    """Return the columns (arrays) of the history that a promise or lemma reads."""
    vocabulary = full.vocabulary
    st = vocabulary.state(vocabulary.before)
    watched = ColumnReads(vocabulary.history(vocabulary.before))
    for transition in predicate.transitions:
        arguments = zip(TRANSITIONS[transition], full.encoding.arguments(transition), strict=True)
        vocabulary.claim(predicate, st, watched, SimpleNamespace(**dict(arguments)))
    if not predicate.transitions:
        vocabulary.claim(predicate, st, watched)
    return watched.read


def _of_the_ranks() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for rules in PROTOCOLS:
        for goal in goals(rules):
            _enter(found, goal.name, goals, goal.kind)
        runs = {module_of(transition.run) for transition in rules.transitions.values()}
        stated = {module_of(predicate.function) for predicate in rules.invariants}
        beside = sorted({path for path in runs | stated if path.startswith("verification/")})
        for predicate in (*rules.invariants, *rules.steps):
            if predicate.name in found:
                found[predicate.name]["beside"] = beside
    return found


def _enter(
    found: dict[str, dict[str, Any]], name: str, make: Callable[..., Any], kind: str
) -> None:
    """Record that a function makes an obligation with a name and kind."""
    place = f"{module_of(make)}: {make.__name__}"
    kinds = found.setdefault(name, {"obligations": {}})["obligations"].setdefault(place, [])
    if kind not in kinds:
        kinds.append(kind)
