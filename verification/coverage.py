"""
The refusals that the specification names, and that every search of the contract must reach.

The random machine, the explorer and the proofs take their targets from the specification's clauses
and the transitions that each clause names, never from the source of the contract. So if a guard is
deleted from the kernel, its target stays on the list and is reported as not reached. `COVERED`
lists the few refusals that no state can reach because an earlier guard of the same transition
always refuses first. The proofs check each entry.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from qeffect.spec.clauses import CLAUSES, DEVICE, INTERFACE
from qeffect.spec.transitions import TRANSITIONS

__all__ = [
    "CLAUSE_IDS",
    "COVERED",
    "GUARDS",
    "TARGETS",
    "TRANSITION_NAMES",
    "UNTAKEN",
    "Covered",
    "Target",
    "Untaken",
    "refusal_name",
]

#: A refusal to reach, as (transition, clause).
Target = tuple[str, str]


@frozen
class Covered:
    """
    A refusal that is never reached because an earlier guard of the transition refuses first.

    Args:
        transition: The transition (call of the contract) that has both guards.
        clause: The clause that never refuses the transition.
        condition: The states to which the entry applies: empty for all states, otherwise a name
            from `qeffect.verification.proofs.witnesses.CONDITIONS`.
        why: Why no state reaches the refusal, and why the code keeps the guard.
    """

    transition: str
    clause: str
    condition: str
    why: str


_RESERVED = "the reservation of the slot for this key passed the same guard"

#: Refusals of the full composition that no state meets, by clause and condition.
COVERED: Final[tuple[Covered, ...]] = (
    Covered("check_forward", "ownership.repeated-forward", "reserved", _RESERVED),
    Covered("check_forward", "ownership.generation-exhausted", "reserved", _RESERVED),
    Covered("check_forward", "ownership.skipped", "reserved", _RESERVED),
    Covered("check_forward", "version.wrong-epoch", "reserved", _RESERVED),
    Covered(
        "check_refresh",
        "epoch.in-flight",
        "",
        "every F of the epoch runs before an update, so version.late-refresh refuses first; "
        "needed without the relation order, which counts F",
    ),
    Covered(
        "check_evaluation",
        "epoch.in-flight",
        "evaluation under way",
        "an evaluation keeps its domain busy, so order.in-flight refuses first; needed without "
        "the relation order, which refuses a busy domain",
    ),
)


@frozen
class Untaken:
    """
    A path through a transition that is never taken, because no state fulfils its condition.

    Args:
        transition: The transition (call of the contract) that has the path.
        condition: The condition of the path: a name from
            `qeffect.verification.proofs.witnesses.CONDITIONS`.
        why: Why no state fulfils the condition.
    """

    transition: str
    condition: str
    why: str


_FREE = "a slot with an action in flight keeps its tape, so it is not free"
_TWICE = "two tests of one guard on this path contradict each other"

#: Paths through the transitions of the full composition that no state takes.
UNTAKEN: Final[tuple[Untaken, ...]] = (
    Untaken(
        "check_forward",
        "received in a free slot",
        "a message arrives only in a reserved slot, never in a free slot",
    ),
    Untaken("finish_read", "free slot in flight", _FREE),
    Untaken("finish_receive", "free slot in flight", _FREE),
    Untaken(
        "finish_read",
        "last reader of others",
        "a message under way belongs to a consumer that has not run yet",
    ),
    Untaken("finish_read", "contradiction", _TWICE),
    Untaken(
        "ungroup_wgrad",
        "last consumer of others",
        "a read under way belongs to a reader that the tape still waits for",
    ),
    Untaken(
        "finalize",
        "final for nobody",
        "finalize itself names the stream that reads the stage's gradients",
    ),
    Untaken(
        "invalidate",
        "first F after the last dI",
        "while the first F of a stage is in flight, none of its dI has run",
    ),
)

#: The transitions by name, in the order of an optimizer step.
TRANSITION_NAMES: Final[tuple[str, ...]] = tuple(transition.name for transition in TRANSITIONS)

_NEVER_MET = frozenset((c.transition, c.clause) for c in COVERED if not c.condition)

#: Every refusal that a caller can receive, in the normative order of the clauses. Refusals that
#: need a device's counts have separate tests.
TARGETS: Final[tuple[Target, ...]] = tuple(
    (name, clause.id)
    for clause in CLAUSES.values()
    for name in TRANSITION_NAMES
    if name in clause.transitions
    and (name, clause.id) not in _NEVER_MET
    and clause.id not in DEVICE
)

#: The targets whose guards are in the transitions. A caller that runs the transitions directly,
#: without the public interface, reaches these targets too.
GUARDS: Final[tuple[Target, ...]] = tuple(
    target for target in TARGETS if target[1] not in INTERFACE
)

#: The clauses among the targets.
CLAUSE_IDS: Final[tuple[str, ...]] = tuple(dict.fromkeys(clause for _, clause in TARGETS))


def refusal_name(transitions: tuple[str, ...], clause: str) -> str:
    """
    Return a refusal's name: the transition that must refuse, and the clause.

    Args:
        transitions: Transitions that ran one after another; one of them refused.
        clause: The clause of the refusal.

    >>> refusal_name(("check_dgrad", "commit_dgrad"), "ownership.work-not-queued")
    'commit_dgrad: ownership.work-not-queued'
    """
    owing = CLAUSES[clause].transitions if clause in CLAUSES else ()
    name = next((name for name in transitions if name in owing), transitions[0])
    return f"{name}: {clause}"
