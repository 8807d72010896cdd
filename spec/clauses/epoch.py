"""
Epoch: an optimizer step is final only when whole, and a spoiled one never commits.
"""

from __future__ import annotations

from .model import Clause, Part

_STAGE = "The stage's ledger, and the weight epoch."
_COUNTED = "The weights, and the weight epoch; only a restore makes the counts agree again."

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
longer be finalized, and only a restore begins it again. So does `invalidate` while a stage's cache
is in use. It tells a fact: refused, it would leave the contract to call a cache fresh that is gone,
and the next dI to read it. It is accepted, every further F and dI of the stage is refused as stale,
and the way back, by aborts, drops, drain and restore, stays open.

A contract that is made with `counted=True` also wants to know what the device ran: beside every
action the device itself counts, by stage and kind, and folds what it ran into a digest that depends
on the order. A commit brings the numbers and is refused where they are not those of the committed
actions. These three clauses are held by a ledger beside the transitions: tested, not proved.""",
    clauses=(
        Clause(
            id="epoch.spoiled",
            number="8.1",
            title="A spoiled epoch is never final",
            invariant="A stage of which an action failed or was aborted in this epoch, or whose "
            "weight cache was lost between its first F and the end of its last dI, is not "
            "finalized.",
            transitions=("finalize",),
            argument="stage",
            unchanged=_STAGE,
            section="IV-E",
            cause="An F, dI or dW raised, a tape was dropped or purged, or `invalidate` told that "
            "a cache was lost which some dI still needed, and which a refresh after the first F "
            "could not fill alike.",
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
        Clause(
            id="epoch.uncounted",
            number="8.6",
            title="A commit brings what the device counted",
            invariant="Where the device counts its replays, a commit brings the counts of every "
            "state domain; where they may come late, the next commit and a checkpoint want them "
            "presented.",
            transitions=("commit_epoch", "checkpoint"),
            argument="",
            unchanged=_COUNTED,
            section="design",
            cause="The counters were not read back, or not handed to the commit.",
            remedy="Read them after the step's last dW, and pass them as `counted`.",
        ),
        Clause(
            id="epoch.device-count",
            number="8.7",
            title="The device ran what was committed, each as often",
            invariant="Of every stage, the device ran as many refreshes, F, dI and dW as were "
            "committed since the incarnation began.",
            transitions=("commit_epoch",),
            argument="",
            unchanged=_COUNTED,
            section="design",
            cause="A graph was replayed without asking the contract, was replayed twice, or was "
            "not replayed although its action was committed.",
            remedy="Find who replays beside the guarded actions; restore the last commit.",
        ),
        Clause(
            id="epoch.device-order",
            number="8.8",
            title="The device ran what was committed, in that order",
            invariant="The device ran the actions of a state domain, each in its own slot, in the "
            "order in which they were committed.",
            transitions=("commit_epoch",),
            argument="",
            unchanged=_COUNTED,
            section="design",
            cause="Two graphs were exchanged: another slot's, or another stage's; or actions were "
            "committed in another order than they were launched in.",
            remedy="Launch the graph of the slot that the ticket names; commit in launch order.",
        ),
    ),
)
