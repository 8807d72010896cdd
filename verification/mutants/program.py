"""
Write a counterexample as a program: it makes the calls that lead to a state, and shows the effect
of a mutant in this state.
"""

from __future__ import annotations

from typing import Any

from attrs import evolve

from qeffect.engine.stage import TRANSITIONS, transitions
from qeffect.refusals import Refused

from ..calls import Action
from .probes import Probe, about, harm
from .sites import BREAKDOWN
from .verdicts import MutantVerdict

__all__ = ["program", "shortest"]

_TEXT = '''\
"""
{title}

{story}
"""

import ast

from qeffect.stage_config import Bucket, StageConfig
from qeffect.keys import TapeKey, TapeRef
from qeffect.destinations import Destination
from qeffect.refusals import Refused
from qeffect.engine.stage import transitions
from qeffect.verification.concrete_run import ConcreteRun, Focus
from qeffect.verification.process import Process

LEFT_OUT = {omit!r}
BROKEN = {{
{halves}
}}
contract = transitions(LEFT_OUT)
broken = transitions(LEFT_OUT, {{n: ast.parse(text).body[0] for n, text in BROKEN.items()}})

PROCESS = Process(
    {name!r},
    ({stages}),
    **{options!r},
)
FOCUS = {focus!r}
LEADING = [
{leading}
]
CALL, ARGUMENTS = {call}


def outcome(functions):
    """Return the answer to a call, and the predicates that fail after an accepted call."""
    run = ConcreteRun(PROCESS, FOCUS, frozenset(contract.relations))
    for name, arguments in LEADING:
        run.take(name, {leader}.functions[name], arguments)
    steps = {{name for _, name in run.broken_steps(CALL, ARGUMENTS)}}
    try:
        run.take(CALL, functions.functions[CALL], ARGUMENTS)
    except Refused as refused:
        return refused.clause, set()
    return "accepted", steps | {{name for _, name in run.broken_invariants()}}


ours, fine = outcome(contract)
theirs, failing = outcome(broken)
print("the contract: ", ours)
print("the mutant:   ", theirs, *sorted(failing))
assert not fine
assert {claim}
'''


def program(verdict: MutantVerdict) -> str:
    """
    Return a program that shows why the code that a mutant lacks is needed.

    Args:
        verdict: A verdict with a probe: a kill, or an equivalent mutant, which is shown together
            with the guard that covers it.

    Raises:
        ValueError: The verdict has no probe.
    """
    if verdict.probe is None:
        raise ValueError(f"no call was found that shows the effect of {verdict.mutant.site}")
    mutant = verdict.shown
    probe = shortest(verdict)
    found = sorted(name for _, name in _harm(verdict, probe))
    accepts = f'theirs == "accepted" and {found[0]!r} in failing' if found else ""
    return _TEXT.format(
        title=f"Without {mutant.deleted[0]}.",
        story=f"{verdict.kind}: {verdict.by}.",
        omit=mutant.omit,
        leader="functions" if verdict.kind == "legal" else "contract",
        halves="\n".join(f"    {n!r}: '''\n{text}\n'''," for n, text in mutant.source().items()),
        name=probe.process.name,
        stages="".join(f"{config!r}, " for config in probe.process.stages),
        options=probe.process.options,
        focus=probe.focus,
        leading="\n".join(f"    {action!r}," for action in probe.trace),
        call=(probe.transition, probe.arguments),
        claim=accepts or "ours != theirs",
    )


def shortest(verdict: MutantVerdict) -> Probe:
    """Shorten the calls of a verdict's probe as far as its effect stays the same."""
    assert verdict.probe is not None
    probe = verdict.probe
    wanted = _shown(verdict, probe)
    shrunk = True
    while shrunk:
        shrunk = False
        for position in reversed(range(len(probe.trace))):
            if position >= len(probe.trace):
                continue
            shorter = _without(verdict, probe, position)
            if shorter is not None and _shown(verdict, shorter) == wanted:
                probe, shrunk = shorter, True
    return probe


def _harm(verdict: MutantVerdict, probe: Probe) -> list[tuple[str, str]]:
    """
    Return the predicates that fail. For a refused legal schedule the list is empty, since the
    refusal itself is the harm.
    """
    return [] if verdict.kind == "legal" else harm(verdict.shown, probe)


def _shown(verdict: MutantVerdict, probe: Probe) -> Any:
    """Return the difference that a probe shows: the predicates that fail, or the two answers."""
    broken = sorted(_harm(verdict, probe))
    if broken:
        return broken[0]
    mutant = verdict.shown
    answers = []
    own = transitions(mutant.omit)
    for functions in (own, mutant.functions):
        leading = functions if verdict.kind == "legal" else own
        try:
            run = probe.run(mutant.omit, leading)
            run.take(probe.transition, functions.functions[probe.transition], probe.arguments)
            answers.append("accepted")
        except Refused as refused:
            answers.append(refused.clause)
        except BREAKDOWN as error:
            answers.append(repr(error))
    return answers


def _without(verdict: MutantVerdict, probe: Probe, position: int) -> Probe | None:
    """
    Return a probe without one leading call, or without a check and its commit or abort; None if the
    probe needs these calls.
    """
    trace = list(probe.trace)
    name, _ = trace.pop(position)
    arguments = probe.arguments
    if name.startswith("check_"):
        serial = 1 + sum(n.startswith("check_") for n, _ in trace[:position])
        trace = [a for a in trace if not (_redeems(a) and a[1][_ticket_at(a)] == serial)]
        trace = [_renumbered(action, serial) for action in trace]
        _, arguments = _renumbered((probe.transition, arguments), serial)
    shorter = evolve(probe, trace=tuple(trace), arguments=arguments)
    try:
        run = shorter.run(verdict.shown.omit)
    except (Refused, *BREAKDOWN):
        return None
    return evolve(shorter, focus=about(run, probe.transition, arguments))


def _redeems(action: Action) -> bool:
    verb, _, rest = action[0].partition("_")
    return verb in ("commit", "abort", "group") and rest in (
        "forward",
        "dgrad",
        "wgrad",
        "refresh",
        "evaluation",
        "update",
    )


def _renumbered(action: Action, removed: int) -> Action:
    """Return an action with renumbered tickets, after one check was removed before it."""
    at = _ticket_at(action)
    if not _redeems(action) or action[1][at] <= removed:
        return action
    name, given = action
    return name, (*given[:at], given[at] - 1, *given[at + 1 :])


def _ticket_at(action: Action) -> int:
    """Return the position of a transition's ticket among its arguments; 1 if it has none."""
    names = TRANSITIONS[action[0]]
    return names.index("ticket") if "ticket" in names else 1
