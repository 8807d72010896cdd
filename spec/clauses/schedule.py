"""
Schedules: rules for a table of actions, checked before any action runs.

To add a clause, add an entry to ``_CLAUSES``. The clause then has a number, appears in the
contract, and can be named by a finding of `qeffect check`.
"""

from __future__ import annotations

from typing import Final

from .model import Clause, Part

__all__ = ["PART"]

#: Number of the part: it comes after the parts whose clauses refuse a call or a log.
_NUMBER: Final = 11

#: Name, title, invariant, likely cause, remedy.
_CLAUSES: Final[tuple[tuple[str, str, str, str, str], ...]] = (
    (
        "stage-out-of-range",
        "Stages exist",
        "Every action names a stage of the pipeline.",
        "The table belongs to a longer pipeline, or counts stages from one.",
        "Correct the entry's stage, or state the right number of stages.",
    ),
    (
        "stage-on-wrong-rank",
        "A stage lives on one rank",
        "All actions of a stage are in one row: the row of the rank that holds the stage.",
        "A looped placement was read as a V-shaped placement (or the reverse), or rows were "
        "swapped.",
        "Move the action to the rank that holds its stage.",
    ),
    (
        "stage-missing",
        "Every stage computes",
        "Every stage of the pipeline has computations in some rank's row.",
        "A row was lost, or the stated number of stages belongs to another pipeline.",
        "Add the stage's actions, or state the right number of stages.",
    ),
    (
        "microbatch-out-of-range",
        "Microbatches exist",
        "Every microbatch number in the table is below the number of microbatches.",
        "The table was made for more microbatches, or counts microbatches from one.",
        "Correct the entry's microbatch, or state the right number of microbatches.",
    ),
    (
        "microbatch-missing",
        "Every microbatch is computed",
        "Every stage computes F, dI and dW once for every microbatch. A whole backward B counts "
        "as both dI and dW.",
        "An entry was lost, or a dW was deferred beyond the end of the row.",
        "Add the missing action.",
    ),
    (
        "duplicate-action",
        "No action occurs twice",
        "No action occurs twice in one training step.",
        "An entry was copied, or a whole backward B stands beside the I and W that it consists of.",
        "Remove the second occurrence; B counts as I and W.",
    ),
    (
        "dgrad-before-forward",
        "Input gradients follow their forwards",
        "The input gradient of a stage and microbatch comes after its forward.",
        "Two entries of a row were swapped.",
        "Move the forward before the input gradient.",
    ),
    (
        "wgrad-before-dgrad",
        "Weight gradients follow their own input gradients",
        "The weight gradient of a stage and microbatch comes after its own input gradient.",
        "A dW was moved into an idle gap (bubble) before its dI.",
        "Move the microbatch's own input gradient before the weight gradient; the input gradient "
        "of another microbatch does not count.",
    ),
    (
        "use-before-receive",
        "Inputs arrive before they are used",
        "A computation comes after its input has arrived on the rank.",
        "A receive stands too late in the row, or was left out.",
        "Move the receive, or the neighbour stage's computation on this rank, before the "
        "computation that uses the input.",
    ),
    (
        "send-before-compute",
        "Results are computed before they are sent",
        "A result is sent only after it has been computed.",
        "A send stands too early in the row.",
        "Move the send after the computation.",
    ),
    (
        "send-without-receive",
        "Every send is received",
        "Every send has its receive on the neighbour stage's rank.",
        "The receive was lost, or stands in the row of another rank.",
        "Add the receive on the other rank, or remove the send.",
    ),
    (
        "receive-without-send",
        "Every receive is sent",
        "Every receive has its send on the neighbour stage's rank.",
        "The send was lost, or stands in the row of another rank.",
        "Add the send on the other rank, or remove the receive.",
    ),
    (
        "message-misplaced",
        "Messages go between neighbours",
        "Messages go between neighbour stages on different ranks.",
        "The table has a message beyond the first or last stage, or between two stages of one "
        "rank.",
        "Remove the message. The first and the last stage have one neighbour each, and stages on "
        "one rank need no messages.",
    ),
    (
        "message-order",
        "Messages keep their order",
        "Two ranks receive the messages of a queue in the order in which they were sent.",
        "Only one of the two ranks' rows was reordered, for example because its receives were "
        "deferred.",
        "Put the sends and receives of the two ranks into the same order, because NCCL matches "
        "them by order. For this, do not defer receives, or give activations and gradients "
        "separate process groups.",
    ),
    (
        "wait-without-start",
        "A wait belongs to a started send or reduction",
        "Every wait is in the same row as the send or reduction that it waits for.",
        "The send or reduction was lost, or the wait is in the row of another rank.",
        "Add the send or REDUCE_GRAD, or remove the wait.",
    ),
    (
        "wait-before-start",
        "Waits follow their start",
        "A send or reduction is awaited only after it was started.",
        "Two entries of a row were swapped.",
        "Move the wait after the send or the REDUCE_GRAD.",
    ),
    (
        "wait-twice",
        "No wait occurs twice",
        "Each send or reduction is awaited at most once.",
        "An entry of the table was copied.",
        "Remove the second wait: the first already ended the send or reduction.",
    ),
    (
        "wait-missing",
        "All sends are awaited, or none",
        "If a table waits for one send, it waits for every send. The same holds for reductions.",
        "A wait was lost from the table.",
        "Add the wait before the slot or the gradients are needed again.",
    ),
    (
        "outstanding-sends",
        "Outstanding sends are bounded",
        "At any time, at most `max_outstanding_sends` sends of a rank are posted and not yet "
        "awaited.",
        "The table was made for a higher limit.",
        "Move a wait before the send, or raise the limit.",
    ),
    (
        "sharding-order",
        "Unshard and reshard alternate",
        "For each stage, UNSHARD and RESHARD alternate, and UNSHARD comes first.",
        "A stage has two UNSHARDs or two RESHARDs in a row, or begins with a RESHARD.",
        "Remove the extra action, or add the missing one.",
    ),
    (
        "use-while-resharded",
        "A stage computes on whole parameters",
        "A stage computes only while its parameters are unsharded.",
        "The stage is resharded too early, or is never unsharded.",
        "Unshard the stage before it computes, or reshard it later.",
    ),
    (
        "reduction-before-settled",
        "Reductions come last",
        "A stage's gradients are reduced after its last weight gradient.",
        "A dW was deferred past the stage's REDUCE_GRAD.",
        "Move REDUCE_GRAD after the stage's last W or B.",
    ),
    (
        "action-after-reduction",
        "Nothing is computed after the reduction",
        "A stage computes nothing after its gradients are reduced.",
        "An action was moved after the stage's REDUCE_GRAD.",
        "Move the action before the stage's REDUCE_GRAD.",
    ),
    (
        "reduction-missing",
        "All stages reduce, or none",
        "If the table reduces the gradients of one stage, it reduces the gradients of every stage.",
        "One stage's REDUCE_GRAD was lost.",
        "Add REDUCE_GRAD for the stage.",
    ),
    (
        "deadlock",
        "Every rank reaches the end",
        "All ranks reach the end of their rows. The check assumes that each rank runs its row in "
        "order and blocks on receives, and on sends if the transport is configured to block on "
        "them.",
        "Ranks wait for one another in a cycle: each rank first waits for a message, and only "
        "later sends the message that the next rank waits for.",
        "Reorder one rank's row so that the shown cycle no longer exists.",
    ),
)

PART = Part(
    name="schedule",
    title="Schedules",
    hidden="whether a table of actions can run at all",
    without="a rank waits forever, or a mispaired dW is found in the middle of a step",
    holder="a check of the whole table, on every rank, before anything runs",
    intro="""\
A schedule is a table with one row per rank: the rank's actions in their order. The table comes from
torch's schedule classes, from Transformer Engine's `_order` lists or from a file. These clauses
depend on the table alone; `qeffect check` names the first entry that breaks a clause. If the table
passes, the check then runs each rank's row through the transitions of parts 1 to 9.

Two questions depend on the transport: whether messages keep their order, and whether every rank
reaches the end. The answers depend on which messages share a queue and on when a send ends. The
check states its assumptions: by default one queue per pair of ranks, and buffered sends. The check
also tries the alternatives. A queue may serve a pair of ranks or one direction of the pair, and it
may carry all messages or one kind (activations or gradients). For each kind of queue, the check
also tries rendezvous semantics: a send blocks its queue, or its rank, until its receive is posted.
A table that hangs under an alternative *can* deadlock. Whether it does depends on the runtime's
buffers and on which messages the runtime posts together.""",
    clauses=tuple(
        Clause(
            id=f"schedule.{name}",
            number=f"{_NUMBER}.{place}",
            title=title,
            invariant=invariant,
            transitions=("check",),
            argument="",
            unchanged="Everything; no action of the table has run.",
            section="design",
            cause=cause,
            remedy=remedy,
        )
        for place, (name, title, invariant, cause, remedy) in enumerate(_CLAUSES, 1)
    ),
)
