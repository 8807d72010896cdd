"""
A call in a reachable state, what a mutant answers to it, and what harm that does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import evolve, field, frozen

from qeffect.engine.stage import TRANSITIONS, Transitions, transitions
from qeffect.keys import TapeRef
from qeffect.refusals import Refused

from ..concrete import Arbitrary, Setup, World
from ..walks.rehearsal import Action
from .sites import BREAKDOWN, Mutant

__all__ = ["Probe", "about", "harm", "outcome"]

#: Calls before which ends of transfers through their slot have to be awaited, on whichever link
#: they were told: the history follows that link.
_AFTER_ENDS: Final = ("check_forward", "check_dgrad", "finish_read", "finish_receive")


@frozen
class Probe:
    """
    One call in one reachable state.

    Args:
        setup: The process.
        trace: Accepted calls that lead to the state.
        transition: The transition called.
        arguments: Its arguments.
        clause: What the contract answers: the clause of its refusal, or None.
        arbitrary: What the history should follow to see what the call does.
    """

    setup: Setup = field(repr=False)
    trace: tuple[Action, ...] = field(repr=False)
    transition: str
    arguments: tuple[Any, ...]
    clause: str | None
    arbitrary: Arbitrary = field(repr=False)

    def world(self, omit: Sequence[str] = (), functions: Transitions | None = None) -> World:
        """Return the state, with its history, as the contract's or other functions reach it."""
        functions = functions or transitions(omit)
        world = World(self.setup, self.arbitrary, frozenset(functions.relations))
        for name, arguments in self.trace:
            world.run(name, functions.functions[name], arguments)
        return world


def about(world: World, transition: str, arguments: tuple[Any, ...]) -> Arbitrary:
    """Return what the history should follow to see what a call does in a state."""
    st = world.laid.memory
    named = dict(zip(TRANSITIONS[transition], arguments, strict=True))
    serial = st.serial[0] + 1 if transition.startswith("check_") else None
    arbitrary = Arbitrary().about(named, serial)
    if "ref" not in named:
        slot = arbitrary.slot
        ref = TapeRef(slot, st.generation[slot], st.incarnation[0])
        arbitrary = evolve(arbitrary, ref=ref)
    slot = arbitrary.slot
    if transition in _AFTER_ENDS and st.joined[st.ended_on[slot]] < st.ended_at[slot]:
        arbitrary = evolve(arbitrary, link=st.ended_on[slot])
    for stage in _gradients_of(st, transition, named):
        if st.waited[arbitrary.link] < st.landed[stage]:
            arbitrary = evolve(arbitrary, stage=stage)
    return arbitrary


def _gradients_of(st: Any, transition: str, named: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the stages whose gradients a call reads; the history follows one not awaited."""
    if transition == "start_reduction":
        return st.stage_at[named["bucket"]], st.tied_at[named["bucket"]]
    if transition == "finalize":
        return named["stage"], st.sharer_of[named["stage"]]
    return ()


def outcome(world: World, probe: Probe, mutant: Mutant) -> str | None:
    """
    Run a broken transition in a probe's state.

    Returns:
        The clause of its refusal, or None when it accepts.

    Raises:
        KeyError, IndexError, TypeError: It broke down (``BREAKDOWN``).
    """
    try:
        world.run(probe.transition, mutant.function, probe.arguments)
    except Refused as refused:
        return refused.clause
    return None


def harm(mutant: Mutant, probe: Probe) -> list[tuple[str, str]]:
    """
    Return what fails, by class and name, when a mutant accepts a call; nothing otherwise.

    A call that the caller is trusted not to make, or a state that one led to, shows nothing.
    """
    world = probe.world(mutant.omit)
    trusted = world.trusted(probe.transition, probe.arguments)
    if not trusted or any(world.broken_invariants()):
        return []
    steps = list(world.broken_steps(probe.transition, probe.arguments))
    try:
        if outcome(world, probe, mutant) is not None:
            return []
    except BREAKDOWN:
        return []  # it broke down before it did harm
    return [*world.broken_invariants(), *steps]
