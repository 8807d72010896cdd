"""
What a check of a schedule reports: findings with stable clause ids, and the clauses they name.

These are the clauses about a schedule as such: they need no kernel, and what they say can be read
off the table. The contract's own clauses (`ownership.*`, `version.*`, ...) are the
specification's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from qeffect.schedule.actions import Atom


@attrs.frozen
class ScheduleClause:
    """
    One clause about schedules.

    Args:
        clause: The stable id.
        invariant: What must hold, in one sentence.
        remedy: What to do when it does not.
    """

    clause: str
    invariant: str
    remedy: str


@attrs.frozen
class Place:
    """
    A cell that has to do with a finding.

    Args:
        rank: Its rank.
        step: Its step.
        action: Its text.
        role: What it has to do with it: `first`, `needs`, `peer`, `owner`, `picked`,
            `awaited` or `waits`.
    """

    rank: int
    step: int
    action: str
    role: str


@attrs.frozen
class Finding:
    """
    One violation: where, which clause, what was expected and what was found.

    Args:
        clause: The clause id.
        rank: The rank, where one is to blame.
        step: The step of the refused cell; `None` when something is missing from the row.
        action: The refused cell's text.
        message: One sentence that says it all.
        expected: What the clause wanted here.
        found: What stands here.
        remedy: What to do.
        related: Other cells that a picture should show.
    """

    clause: str
    rank: int | None
    step: int | None
    action: str | None
    message: str
    expected: str
    found: str
    remedy: str
    related: tuple[Place, ...] = ()

    def __str__(self) -> str:
        """One line: the place, the clause, the sentence."""
        place = ""
        if self.rank is not None:
            place = f"rank {self.rank}"
            if self.step is not None:
                place += f", step {self.step} ({self.action})"
            place += ": "
        return f"{place}{self.clause}: {self.message}"

    def record(self) -> dict[str, Any]:
        """The finding as plain data, for JSON."""
        return attrs.asdict(self)


def _clause(name: str, invariant: str, remedy: str) -> tuple[str, ScheduleClause]:
    return f"schedule.{name}", ScheduleClause(f"schedule.{name}", invariant, remedy)


SCHEDULE_CLAUSES: Mapping[str, ScheduleClause] = MappingProxyType(
    dict(
        (
            _clause(
                "stage-out-of-range",
                "Every action names a stage of the pipeline.",
                "correct the cell's stage, or state the number of stages",
            ),
            _clause(
                "stage-on-wrong-rank",
                "All actions of a stage stand in the row of the one rank that holds it.",
                "move the action to the rank that holds its stage",
            ),
            _clause(
                "stage-missing",
                "Every stage of the pipeline computes on some rank.",
                "add the stage's actions, or state the number of stages",
            ),
            _clause(
                "microbatch-out-of-range",
                "Every microbatch is below the configured number.",
                "correct the cell's microbatch, or state the number of microbatches",
            ),
            _clause(
                "microbatch-missing",
                "Every stage computes F, dI and dW once for every microbatch.",
                "add the missing action",
            ),
            _clause(
                "duplicate-action",
                "No action occurs twice in one step of training.",
                "remove the second occurrence; B counts as I and W",
            ),
            _clause(
                "dgrad-before-forward",
                "The input gradient of a stage and microbatch follows its forward.",
                "move the forward before it",
            ),
            _clause(
                "wgrad-before-dgrad",
                "The weight gradient of a stage and microbatch follows its own input gradient.",
                "move the input gradient before it; the dgrad of another microbatch does not do",
            ),
            _clause(
                "use-before-receive",
                "A computation follows the arrival of its input on its rank.",
                "move the receive, or the neighbour stage's computation on this rank, before it",
            ),
            _clause(
                "send-before-compute",
                "A result is sent after it has been computed.",
                "move the send after the computation",
            ),
            _clause(
                "send-without-receive",
                "Every send has its receive on the neighbour stage's rank.",
                "add the receive on the other rank, or remove the send",
            ),
            _clause(
                "receive-without-send",
                "Every receive has its send on the neighbour stage's rank.",
                "add the send on the other rank, or remove the receive",
            ),
            _clause(
                "message-misplaced",
                "Messages go between neighbour stages on different ranks.",
                "remove it: stages at the pipeline's ends, or on one rank, exchange nothing there",
            ),
            _clause(
                "message-order",
                "Between two ranks, messages of a queue are received in the order of their sends.",
                "put the pair's sends and receives into one order (NCCL matches by order): do not "
                "defer receives, or give activations and gradients a process group each",
            ),
            _clause(
                "wait-without-start",
                "Every wait stands in the row of the send or reduction that it ends.",
                "add the send or the REDUCE_GRAD, or remove the wait",
            ),
            _clause(
                "wait-before-start",
                "A send or reduction is awaited after it was started.",
                "move the wait behind the send or the REDUCE_GRAD",
            ),
            _clause(
                "wait-twice",
                "A send or reduction is awaited once.",
                "remove the second wait; after the first one there is nothing left to wait for",
            ),
            _clause(
                "wait-missing",
                "If a table says where any send (or reduction) ends, it says so of every one.",
                "add the wait, no later than where the slot or the gradients are needed again",
            ),
            _clause(
                "outstanding-sends",
                "A rank has at most max_outstanding_sends sends posted and not awaited at once.",
                "move a wait before the send, or allow more",
            ),
            _clause(
                "sharding-order",
                "A stage is unsharded before it is resharded, and neither twice in a row.",
                "remove the second UNSHARD or RESHARD, or add the one missing between",
            ),
            _clause(
                "use-while-resharded",
                "A stage computes only while its parameters are unsharded.",
                "unshard the stage before it computes, or reshard it later",
            ),
            _clause(
                "reduction-before-settled",
                "A stage's gradients are reduced after its last weight gradient.",
                "move REDUCE_GRAD behind the stage's last W or B",
            ),
            _clause(
                "action-after-reduction",
                "A stage computes nothing after its gradients are reduced.",
                "move the action before the stage's REDUCE_GRAD",
            ),
            _clause(
                "reduction-missing",
                "If any stage's gradients are reduced by the table, every stage's are.",
                "add REDUCE_GRAD for the stage",
            ),
            _clause(
                "deadlock",
                "Ranks that run their rows in order, blocking on receives, all reach the end.",
                "reorder one of the ranks so that the shown cycle is broken",
            ),
            _clause(
                "binding-mismatch",
                "The retained work that a weight gradient consumes is that of its own microbatch.",
                "bind retained work by key, not by the order in which it was left",
            ),
            _clause(
                "capture-order",
                "Graphs that share a memory pool are replayed in the order of their capture.",
                "give every slot its own memory pool",
            ),
        )
    )
)


def finding(
    name: str,
    message: str,
    *,
    rank: int | None,
    atom: Atom | None = None,
    expected: str,
    found: str,
    related: tuple[Place, ...] = (),
) -> Finding:
    """
    A finding of the clause `schedule.<name>`, with the clause's remedy.

    Args:
        name: The clause without its leading "schedule.".
        message: One sentence.
        rank: The rank to blame.
        atom: The refused action, or `None` when something is missing.
        expected: What the clause wanted here.
        found: What stands here.
        related: Other cells that a picture should show.
    """
    clause = SCHEDULE_CLAUSES[f"schedule.{name}"]
    return Finding(
        clause=clause.clause,
        rank=rank,
        step=None if atom is None else atom.step,
        action=None if atom is None else str(atom.action),
        message=message,
        expected=expected,
        found=found,
        remedy=clause.remedy,
        related=related,
    )


def place(rank: int, atom: Atom, role: str) -> Place:
    """The place of an indivisible step."""
    return Place(rank, atom.step, str(atom.action), role)
