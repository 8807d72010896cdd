"""
Epoch: an optimizer step is final only when whole, and a spoiled one never commits.
"""

from __future__ import annotations

from .model import Clause, Part

_STAGE = "The stage's ledger, and the weight epoch."

PART = Part(
    name="epoch",
    title="Epoch",
    hidden="whether an optimizer step is whole",
    without="the optimizer consumes a step that lacks a microbatch, or one that failed in part",
    holder="a count of dW, a mark of failure and a mark of finality per stage; an atomic commit",
    intro="""\
An epoch is one optimizer step. A stage is finalized when all its work is done, and the commit is
atomic over all stages of the process: it advances every weight epoch or none. Across processes the
caller makes it a barrier. Any failed or aborted action of a stage spoils its epoch: it can no
longer be finalized, and only a restore begins it again.""",
    clauses=(
        Clause(
            id="epoch.spoiled",
            number="8.1",
            title="A spoiled epoch is never final",
            invariant="A stage of which an action failed or was aborted in this epoch is not "
            "finalized.",
            transitions=("finalize",),
            argument="stage",
            unchanged=_STAGE,
            section="IV-E",
            cause="An F, dI or dW raised, or a tape was dropped or purged.",
            remedy="Restore the last commit and run the epoch again.",
        ),
        Clause(
            id="epoch.incomplete",
            number="8.2",
            title="A final stage has run every dW",
            invariant="Finalize wants one committed dW for every cell of the stage, with or "
            "without an arena.",
            transitions=("finalize",),
            argument="stage",
            unchanged="The stage, which is not final; the missing dW may still run.",
            section="IV-E",
            cause="A delayed dW has not run yet, or the schedule lost it.",
            remedy="Run the deferred dW.",
        ),
        Clause(
            id="epoch.already-final",
            number="8.3",
            title="A stage is finalized once in an epoch",
            invariant="A stage that is final in this epoch is not finalized again.",
            transitions=("finalize",),
            argument="stage",
            unchanged=_STAGE,
            section="IV-E",
            cause="Two places finalize, or the commit was forgotten between two steps; a second "
            "finalize would make the stage owe its reduction again.",
            remedy="Finalize once, after the last dW of the stage.",
        ),
        Clause(
            id="epoch.not-final",
            number="8.4",
            title="A commit finds every stage final",
            invariant="The commit happens when every stage of the process is final in the epoch "
            "that it ends.",
            transitions=("commit_epoch",),
            argument="",
            unchanged=_STAGE,
            section="IV-E",
            cause="A chunk of this rank was not finalized, or its reduction failed afterwards.",
            remedy="Finalize every stage; after a failure restore the last commit.",
        ),
        Clause(
            id="epoch.wrong-epoch",
            number="8.5",
            title="A commit names the epoch that it ends",
            invariant="A commit names the weight epoch of every stage, whatever is left out.",
            transitions=("commit_epoch",),
            argument="epoch",
            unchanged="The weight epoch of every stage.",
            section="III-C",
            cause="The step counter runs apart from the contract's epoch: a step was committed "
            "twice, or one was skipped.",
            remedy="Commit `contract.epoch`, once, where the optimizer updates the parameters.",
        ),
    ),
)
