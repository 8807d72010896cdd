"""
A call in a reachable state, with a mutant's answer and the predicates that fail afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import evolve, field, frozen

from qeffect.engine.stage import TRANSITIONS, Transitions, transitions
from qeffect.keys import TapeRef
from qeffect.refusals import Refused

from ..calls import Action
from ..concrete_run import ConcreteRun, Focus
from ..process import Process
from .sites import BREAKDOWN, Mutant

__all__ = ["Probe", "about", "harm", "outcome"]

#: Calls that require a wait for the ends of transfers through their slot. The history follows the
#: link on which an end was reported.
_AFTER_ENDS: Final = ("check_forward", "check_dgrad", "finish_read", "finish_receive")


@frozen
class Probe:
    """
    One call in one reachable state.

    Args:
        process: The configuration of the process in which the call is made.
        trace: Accepted calls that lead to the state.
        transition: The transition that is called.
        arguments: The arguments of the call.
        clause: The clause by which the contract refuses the call; None if it accepts.
        focus: The slot, stage, ticket and so on that the history must follow to show the call's
            effect.
    """

    process: Process = field(repr=False)
    trace: tuple[Action, ...] = field(repr=False)
    transition: str
    arguments: tuple[Any, ...]
    clause: str | None
    focus: Focus = field(repr=False)

    def run(self, omit: Sequence[str] = (), functions: Transitions | None = None) -> ConcreteRun:
        """
        Run the trace by the contract's or the given functions; return the state with its history.
        """
        functions = functions or transitions(omit)
        run = ConcreteRun(self.process, self.focus, frozenset(functions.relations))
        for name, arguments in self.trace:
            run.take(name, functions.functions[name], arguments)
        return run


def about(run: ConcreteRun, transition: str, arguments: tuple[Any, ...]) -> Focus:
    """Return the slot, stage, ticket and so on that the history must follow to show the effect."""
    st = run.laid.memory
    named = dict(zip(TRANSITIONS[transition], arguments, strict=True))
    serial = st.serial[0] + 1 if transition.startswith("check_") else None
    focus = Focus().about(named, serial)
    if "ref" not in named:
        slot = focus.slot
        ref = TapeRef(slot, st.generation[slot], st.incarnation[0])
        focus = evolve(focus, ref=ref)
    slot = focus.slot
    if transition in _AFTER_ENDS and st.joined[st.ended_on[slot]] < st.ended_at[slot]:
        focus = evolve(focus, link=st.ended_on[slot])
    if transition == "wait" and (link := _consumer_of_evaluation(st, named["link"])) is not None:
        focus = evolve(focus, link=link)
    for stage in _gradients_of(st, transition, named):
        if st.waited[focus.link] < st.landed[stage]:
            focus = evolve(focus, stage=stage)
    return focus


def _consumer_of_evaluation(st: Any, link: int) -> int | None:
    """
    Return the link of the gradients' consumer if another stream waits for an evaluation before the
    consumer does; otherwise None.
    """
    domain = st.domain_at[link]
    if st.unwaited[domain] == 0:
        return None
    own = zip(st.domain_at, st.caller_at, strict=True)
    return next((n for n, pair in enumerate(own) if pair == (domain, st.consumer[0])), None)


def _gradients_of(st: Any, transition: str, named: Mapping[str, Any]) -> tuple[int, ...]:
    """
    Return the stages whose gradients a call reads. The history must follow one of them whose dW was
    not awaited.
    """
    if transition == "start_reduction":
        return st.stage_at[named["bucket"]], st.tied_at[named["bucket"]]
    if transition == "finalize":
        return named["stage"], st.sharer_of[named["stage"]]
    return ()


def outcome(run: ConcreteRun, probe: Probe, mutant: Mutant) -> str | None:
    """
    Run the transition of a mutant in a probe's state.

    Returns:
        The clause of the mutant's refusal, or None if it accepts.

    Raises:
        KeyError, IndexError, TypeError: The mutant raised a Python error (``BREAKDOWN``).
    """
    try:
        run.take(probe.transition, mutant.function, probe.arguments)
    except Refused as refused:
        return refused.clause
    return None


def harm(mutant: Mutant, probe: Probe) -> list[tuple[str, str]]:
    """
    Return the class and name of each predicate that fails after a mutant has accepted a call.

    The list is empty if the mutant refuses, or if the contract assumes that no caller makes this
    call.
    """
    run = probe.run(mutant.omit)
    trusted = run.trusted(probe.transition, probe.arguments)
    if not trusted or any(run.broken_invariants()):
        return []
    steps = list(run.broken_steps(probe.transition, probe.arguments))
    try:
        if outcome(run, probe, mutant) is not None:
            return []
    except BREAKDOWN:
        return []  # it raised a Python error before it did harm
    return [*run.broken_invariants(), *steps]
