"""
Theorems that the induction does not cover: initial states, refusals, tickets, capture order,
restores, and the width of generations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import z3

from qeffect.engine.stage import STATE
from qeffect.relations.constants import NEVER, NO_RANK
from qeffect.spec.world import DGRAD, EVALUATION, FORWARD, REFRESH, UPDATE, WGRAD

from ..claims import MANDATORY
from ..induction.ghosts import GHOSTS
from ..symbolic import Path, flat_arguments
from ..symbolic.terms import Term, lift
from .goals import Claim, Goal, Obligation
from .obligations import Composition
from .vocabulary import Moment

__all__ = [
    "beginning",
    "capture_in_own_pool",
    "initial",
    "refusals",
    "restored",
    "tickets",
    "widths",
]

_KINDS = {
    "forward": FORWARD,
    "dgrad": DGRAD,
    "wgrad": WGRAD,
    "refresh": REFRESH,
    "update": UPDATE,
    "evaluation": EVALUATION,
}

#: The claims about generations: invariants, and the step that compares generations.
_SPEAKING = frozenset({"ownership.generation-bounded", "ownership.reference"})
_REFERENCE = "ownership.right-reference"

#: The one clause of a commit that is neither about its ticket nor about its arguments.
_LATE = "order.scales-not-moved"

#: The greatest generation of a 64-bit counter.
_LAST = (1 << 64) - 1


def beginning(composition: Composition) -> tuple[Moment, list[Term]]:
    """
    Return the initial memory and history of every run, and the assumptions about them.

    The contract's own choices (incarnation, first epoch) and the initial ghosts (columns of the
    history) are arbitrary, within the assumptions of the origin predicates.
    """
    words, enc = composition.vocabulary, composition.encoding
    epoch = enc.const("first_epoch", "int")
    state = dict(words.before.state)
    for name, column in STATE.items():
        if column.initial is not None and name != "incarnation":
            state[name] = _filled(composition, state[name], column.initial)
    state["weight_epoch"] = _filled(composition, state["weight_epoch"], epoch)
    history = dict(words.before.history)
    for name, ghost in GHOSTS.items():
        if ghost.initial is not None:
            history[name] = _filled(composition, history[name], ghost.initial)
    history["weights"] = epoch
    origin = [term for claim in words.origin() for term in words.close(claim)]
    return Moment(state, history), [epoch >= 0, *words.arbitrary(), *origin]


def initial(composition: Composition) -> Iterator[Goal]:
    """Yield goals for: a fresh memory satisfies every invariant, for any first epoch."""
    words = composition.vocabulary
    moment, facts = beginning(composition)
    for claim in words.invariants(moment):
        yield Goal(claim.name, "initial", "", "", None, tuple(facts), words.denied(claim))


def _filled(composition: Composition, term: Term, value: Any) -> Term:
    sort = term.sort()
    if not z3.is_array(term):
        return lift(value, sort, composition.encoding.constants)
    return z3.K(sort.domain(), lift(value, sort.range(), composition.encoding.constants))


def refusals(composition: Composition) -> Iterator[Obligation | Goal]:
    """Yield goals for: every path that refuses leaves every column (array of the state)
    unchanged."""
    for transition, paths in composition.every_path.items():
        for path in paths:
            if path.clause is None:
                continue
            changed = [path.before[n] != term for n, term in path.written.items()]
            if changed:
                yield Goal(
                    "refusal changes nothing",
                    "refusal",
                    transition,
                    path.label,
                    MANDATORY,
                    path.tests,
                    z3.Or(changed),
                )
            else:
                yield Obligation(
                    "refusal changes nothing",
                    "refusal",
                    composition.name,
                    transition,
                    path.label,
                    "syntax",
                    "unsat",
                    0.0,
                )


def tickets(composition: Composition) -> Iterator[Goal]:
    """
    Yield goals for: no commit or abort refuses an outstanding ticket with complete evidence.

    A ticket is outstanding from the check that returned it to its commit or abort, regardless of
    the transitions that were accepted in between. The history's ``outstanding`` records this.
    """
    enc, words = composition.encoding, composition.vocabulary
    h = words.history(words.before)
    for transition, paths in composition.paths.items():
        verb, _, action = transition.partition("_")
        if verb not in ("commit", "abort") or action not in _KINDS:
            continue
        facts = [
            h.outstanding[0].term == _KINDS[action],
            enc.const("arg.ticket", "ticket") == h.ticket[0].term,
            *words.assumed(transition),
        ]
        if action == "update":
            facts.append(enc.const("arg.epoch", "int") == h.weights[0].term)
            if transition == "commit_update":
                # All scales that move once per epoch have moved.
                domain = enc.const("own.d", "domain")
                facts += enc.close({"own.d": "domain"}, h.gathers[enc.sym(domain)].term == 0)
        else:
            place = "stage" if action in ("refresh", "evaluation") else "slot"
            facts.append(enc.const(f"arg.{place}", place) == getattr(h, f"ticket_{place}")[0].term)
            facts += _whole(composition, transition)
        for path in paths:
            if path.clause is not None:
                about = {"version", "order"} if path.clause == _LATE else {"version"}
                yield _never("a ticket is honoured", "commit", path, facts, about)


def _whole(composition: Composition, transition: str) -> list[Term]:
    """
    Return the condition that a commit's evidence is complete: the evidence is what the check
    requested, and is true.
    """
    enc, words = composition.encoding, composition.vocabulary
    st, h = words.state(words.before), words.history(words.before)
    evaluates = transition.endswith("evaluation")
    by_stage = evaluates or transition.endswith("refresh")
    at = enc.sym(enc.const(*(("arg.stage", "stage") if by_stage else ("arg.slot", "slot"))))
    stage = at if by_stage else st.slot_stage[at]
    filling = None if by_stage else h.filling[at].term != 0
    fresh = h.weights[0].term
    right = {
        "queued": st.matrices[stage].term,
        "covered": st.matrices[stage].term,
        "filled": st.matrices[stage].term,
        "fill_epoch": fresh if filling is None else z3.If(filling, fresh, NEVER),
        "updates": z3.IntVal(0) if evaluates else 1 - st.epoch_scales[st.domain_of[stage]].term,
        "scales": None if by_stage else h.scaled_by[at].term,
        "draws": None if by_stage else _drawn(transition, st, h, at, stage),
        "parts": z3.If(h.counted_in[stage].term == 0, 1, h.counted_in[stage].term),
    }
    if evaluates:
        right["fill_epoch"] = z3.IntVal(NEVER)
    return [
        enc.const(f"arg.{name}", sort) == right[name]
        for name, sort in flat_arguments(transition).items()
        if name in right and transition.startswith("commit_")
    ]


def _drawn(transition: str, st: Any, h: Any, slot: Any, stage: Any) -> Term:
    """
    Return the random generator's position at which an action must draw: for dI the position of its
    F; for F a position after every earlier F.
    """
    if transition == "commit_dgrad":
        return h.drew_at[slot].term
    return h.drew_last[st.domain_of[stage]].term + 1


def capture_in_own_pool(composition: Composition) -> Iterator[Goal]:
    """
    Yield goals for: no replay is out of capture order if each slot has its own pool, captured as F,
    dI, dW, and each refresh has its own pool.
    """
    words = composition.vocabulary
    st = words.state(words.before)
    a, b = (composition.encoding.const(f"own.{n}", "slot") for n in "ab")
    sym = composition.encoding.sym
    apart = st.pool_of[sym(a)].term == st.pool_of[sym(b)].term
    close = composition.encoding.close
    ordered = z3.And(
        st.forward_rank[sym(a)].term < st.dgrad_rank[sym(a)].term,
        st.dgrad_rank[sym(a)].term < st.wgrad_rank[sym(a)].term,
    )
    facts = [
        *close({"own.a": "slot", "own.b": "slot"}, z3.Implies(apart, a == b)),
        *close({"own.a": "slot"}, ordered),
    ]
    seated = next(c for c in words.invariants(words.before) if c.name == "capture.every-seat-taken")
    for transition, paths in composition.paths.items():
        for path in paths:
            if path.clause == "capture.out-of-order" and transition == "check_refresh":
                stage = sym(composition.encoding.const("arg.stage", "stage"))
                alone = st.refresh_rank[stage].term == NO_RANK
                yield _never("one pool per slot", "capture", path, [alone], {"capture"})
            elif path.clause == "capture.out-of-order":
                name = "arg.slot" if transition == "check_forward" else "arg.ref.slot"
                pool = st.pool_of[sym(composition.encoding.const(name, "slot"))].term
                # If the pool has a tape, its first seat names a slot with a tape: an instance of
                # the lemma.
                first = z3.substitute(
                    seated.body,
                    (composition.encoding.const("var.p", "pool"), pool),
                    (composition.encoding.const("var.i", "place"), z3.IntVal(0)),
                )
                # No refresh was replayed in the pool: of the condition on refreshes, this instance
                # is enough.
                refreshed = words.history(words.before).last_refreshed[sym(pool)]
                own = st.refresh_rank[refreshed].term == NO_RANK
                known = [*facts, first, own, *words.assumed(transition)]
                yield _never("one pool per slot", "capture", path, known, {"capture"})


def restored(composition: Composition) -> Iterator[Goal]:
    """
    Yield goals for: a restore ends every issued reference forever.

    The restore ends the reference, no transition revives it, and no transition accepts it. The
    proof assumes that no two incarnations are equal (``persistence.fresh-incarnation``).
    """
    words, enc = composition.vocabulary, composition.encoding
    h = words.history(words.before)
    dead, issued = h.dead[0].term == 1, h.issued[0].term == 1
    for transition, paths in composition.paths.items():
        facts = words.assumed(transition)
        for path in paths:
            if path.clause is not None:
                continue
            after = words.history(words.after(path))
            if transition == "restore":
                yield _goal("a restore ends every reference", path, [*facts, issued], _gone(after))
            if not after.dead.term.eq(h.dead.term):
                yield _goal("an ended reference stays ended", path, [*facts, dead], _gone(after))
            if "ref.slot" in flat_arguments(transition):
                offered = [
                    enc.const(f"arg.ref.{part}", sort) == getattr(h, f"ref_{part}")[0].term
                    for part, sort in (
                        ("slot", "slot"),
                        ("generation", "generation"),
                        ("incarnation", "int"),
                    )
                ]
                given = [*facts, *offered, dead]
                if (
                    transition in _ENDS
                ):  # it reports the end of a transfer and does not use the tape
                    slot = enc.sym(enc.const("arg.ref.slot", "slot"))
                    given.append((h.owing[slot] != 0).term)
                yield _never("an ended reference is refused", "restore", path, given, set())


#: Transitions that accept an ended reference: the ends of transfers that outlive their tape.
_ENDS: Final = frozenset({"finish_receive", "finish_read", "ungroup_wgrad"})


def widths(composition: Composition, like: Composition) -> Iterator[Goal]:
    """
    Yield goals for: generations of 64 bits never wrap around. The goals are the claims about
    generations, with 64-bit integers in place of unbounded ones.

    Args:
        composition: A composition whose encoding has generations of 64 bits.
        like: The same functions in an encoding whose paths are already enumerated. Transitions that
            do not use generations there are not enumerated again.
    """
    words, enc = composition.vocabulary, composition.encoding
    last = enc.const("generation_max", "generation") == z3.BitVecVal(_LAST, 64)
    before = {c.name: c for c in words.invariants(words.before)}
    slot = enc.const("var.s", "slot")
    for transition in (name for name in like.paths if _counts_generations(like, name)):
        for path in composition.paths_of(transition):
            if path.clause is not None:
                continue
            facts = (*path.tests, *words.assumed(transition), last)
            found = [(c, before[c.name].body) for c in words.disturbed(words.after(path))]
            for claim, earlier in found:
                if claim.name in _SPEAKING and not claim.body.eq(earlier):
                    yield _width(claim.name, path, (*facts, earlier), words.denied(claim))
            for claim in words.steps(transition):
                if claim.name == _REFERENCE:
                    yield _width(claim.name, path, facts, words.denied(claim))
            old, new = path.before["generation"], path.columns["generation"]
            if not new.eq(old) and transition != "restore":
                grows = z3.ULE(z3.Select(old, slot), z3.Select(new, slot))
                claim = Claim("generations only rise", frozenset(), {"s": "slot"}, grows)
                yield _width(claim.name, path, facts, words.denied(claim))


def _counts_generations(composition: Composition, transition: str) -> bool:
    """
    Return whether a transition counts or compares a generation, or writes a column that a claim
    about generations reads.
    """
    words = composition.vocabulary
    if any(claim.name == _REFERENCE for claim in words.steps(transition)):
        return True
    accepted = [path for path in composition.paths[transition] if path.clause is None]
    return any(
        not path.columns["generation"].eq(path.before["generation"])
        or any(claim.name in _SPEAKING for claim in words.disturbed(words.after(path)))
        for path in accepted
    )


def _width(name: str, path: Path, facts: tuple[Term, ...], denied: Term) -> Goal:
    relations = MANDATORY | {"version"}
    return Goal(name, "width", path.transition, path.label, relations, facts, denied)


def _gone(history: Any) -> Term:
    return history.dead[0].term != 1


def _goal(name: str, path: Path, facts: list[Term], denied: Term) -> Goal:
    given = (*path.tests, *facts)
    return Goal(name, "restore", path.transition, path.label, MANDATORY, given, denied)


def _never(name: str, kind: str, path: Path, facts: list[Term], relations: set[str]) -> Goal:
    return Goal(
        name,
        kind,
        path.transition,
        path.label,
        MANDATORY | relations,
        tuple(facts),
        path.condition,
    )
