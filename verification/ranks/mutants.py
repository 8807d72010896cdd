"""
Mutants of the protocol, each with one rule left out or changed. A mutant is caught in two ways: a
proof fails, and a shortest trace of a few ranks shows the violation.

Every condition that a transition requires (``st.need``) is left out in turn. So is every write that
makes other ranks wait or stop, or that gives them information.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from attrs import evolve, frozen

from qeffect.spec.ranks import NOBODY

from .explore import SCOPES, explore
from .launches import LAUNCHES
from .protocol import TRANSITIONS, RankTransition
from .prove import prove
from .symbolic_state import asked

__all__ = ["BY_COUNT", "WRITES", "Caught", "ProtocolMutant", "caught", "mutants"]

#: Writes that are left out in turn, by transition and column, with the behaviour of a runtime
#: without the write.
WRITES: Final[Mapping[tuple[str, str], str]] = {
    ("start", "epoch"): "a rank starts from its current weights instead of a checkpoint",
    ("start", "name"): "a rank that starts keeps the name of the previous attempt",
    ("begin_step", "sent_before"): "a rank does not reset its count of messages when a step begins",
    ("consent", "phase"): "a rank consents and continues its step",
    ("refuse", "leaving"): "a rank whose contract refused does not stop",
    ("publish", "kept"): "a checkpoint is published without its parts",
    ("close", "open"): "a rank ends without waking the others",
    ("end", "told"): "a rank ends without reading the cause",
    ("name_cause", "told"): "a rank stops its launches without reading the cause",
    ("publish_parts", "held"): "a checkpoint of launches is published without its parts",
    ("disagree_captured", "quits"): "a rank whose graph differs from another rank's does not stop",
    ("rebuild", "word"): "a device keeps the votes of the previous round",
    ("start_anew", "weights"): "a rank starts from its current weights instead of a checkpoint",
}


#: Conditions about the messages of launches; the scopes that have such messages.
_OF_MESSAGES: Final = frozenset({"captured-by-all", "same-order", "messages-ended"})
_WITH_MESSAGES: Final = tuple(
    scope.name for scope in SCOPES.values() if scope.size.launches and scope.size.messages
)


@frozen
class ProtocolMutant:
    """
    A protocol with one rule left out or changed.

    Args:
        transition: The transition that is changed.
        without: The name of the condition left out, or ``COLUMN =`` for a write left out.
        says: The meaning of the change in words.
        instead: Transitions that replace those with the same name.
        scopes: The scopes to explore.
    """

    transition: str
    without: str
    says: str = ""
    instead: Mapping[str, RankTransition] = {}
    scopes: tuple[str, ...] = tuple(SCOPES)

    @property
    def name(self) -> str:
        """The mutant's name."""
        return f"{self.transition} {'by' if self.instead else 'without'} {self.without}"


def _start_counted(st: Any, r: Any) -> None:
    """A rank starts under the number of restarts that its agent counts."""
    counted = st.drew[r]
    TRANSITIONS["start"].run(st, r)
    st.drew[r] = counted


def _crash_counted(st: Any, r: Any) -> None:
    """A rank's process dies; its own agent counts the restart, and no other agent does."""
    TRANSITIONS["crash"].run(st, r)
    st.drew[r] = st.drew[r] + 1


def _connect_by_count(st: Any, r: Any, a: Any) -> None:
    """Once all ranks have started, a rank connects under its agent's count of restarts."""
    st.when((st.up[r] == 1) & (st.leaving[r] == 0) & (st.name[r] == NOBODY))
    st.when(st.every("rank", lambda q: st.life[q] == st.life[r]))
    st.when(a == st.drew[r] + 1)  # the column begins at -1
    st.name[r] = a


def _never(st: Any, _r: Any, _a: Any) -> None:
    """Never possible."""
    st.when(st.attempt[0] < 0)


_COUNTED: Final[Mapping[str, Callable[..., None]]] = {
    "start": _start_counted,
    "crash": _crash_counted,
    "connect": _connect_by_count,
    **dict.fromkeys(("offer", "take_seat", "confirm"), _never),
}

#: Two agents that each count restarts separately; attempts were named by this count before.
BY_COUNT: Final = ProtocolMutant(
    "connect",
    "count",
    "each agent names the attempt by its own count of restarts",
    {name: evolve(TRANSITIONS[name], run=run) for name, run in _COUNTED.items()},
    ("two-ranks",),
)


@frozen
class Caught:
    """
    How a mutant of the protocol was caught.

    Args:
        mutant: The mutant.
        open: The claims that cannot be proved for the mutant.
        scope: The scope whose exploration finds a violation; empty if no exploration does.
        violation: The violation; empty without one.
        trace: The transitions that lead to the violation.
    """

    mutant: ProtocolMutant
    open: tuple[str, ...]
    scope: str
    violation: str
    trace: tuple[str, ...]

    @property
    def killed(self) -> bool:
        """Whether, in some scope, the ranks break a promise or cannot reach the end."""
        return bool(self.violation)

    def record(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "mutant": self.mutant.name,
            "says": self.mutant.says,
            "not_proved": list(self.open),
            "scope": self.scope or None,
            "violation": self.violation or None,
            "trace": list(self.trace),
        }


def mutants() -> Iterator[ProtocolMutant]:
    """Yield every mutant."""
    for transition in (*TRANSITIONS.values(), *LAUNCHES.values()):
        for name in asked(transition):
            yield ProtocolMutant(
                transition.name,
                name,
                f"`{transition.name}` does not check {name}",
                scopes=_WITH_MESSAGES if name in _OF_MESSAGES else tuple(SCOPES),
            )
    for (transition_name, column), says in WRITES.items():
        yield ProtocolMutant(transition_name, f"{column} =", says)
    yield BY_COUNT


def caught(mutant: ProtocolMutant, progress: Callable[[str], None] | None = None) -> Caught:
    """Prove and explore a mutant."""
    if progress is not None:
        progress(f"Mutants: {mutant.name}")
    without = frozenset({mutant.without})
    left = tuple(
        obligation.name
        for obligation in prove(
            transition=mutant.transition, without=without, thorough=False, instead=mutant.instead
        )
        if not obligation.proved
    )
    for scope in (SCOPES[name] for name in mutant.scopes):
        if mutant.transition not in {t.name for t in scope.transitions}:
            continue
        found = explore(
            scope,
            transition=mutant.transition,
            without=without,
            lemmas=False,
            instead=mutant.instead,
        )
        if found.violation:
            return Caught(mutant, left, scope.name, found.violation, found.trace)
    return Caught(mutant, left, "", "", ())
