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
is in use. `invalidate` states a fact, so it is accepted: if it were refused, the contract would
treat a lost cache as fresh, and the next dI would read it. Afterwards every F and dI of the stage
is refused as stale; aborts, drops, drain and restore remain possible.

A contract made with `counted=True` also compares what the device ran. With every action the device
itself counts, by stage and kind, and folds the action into a digest that depends on the order. A
commit presents the counts, and is refused if they differ from those of the committed actions. A
ledger beside the transitions checks the last three clauses: they are tested, not proved.""",
    clauses=(
        Clause(
            id="epoch.spoiled",
            number="8.1",
            title="A spoiled epoch is never final",
            invariant="A stage with an action that failed or was aborted in this epoch, or whose "
            "weight cache was lost between its first F and the end of its last dI, is not "
            "finalized.",
            transitions=("finalize",),
            argument="stage",
            unchanged=_STAGE,
            section="IV-E",
            cause="An F, dI or dW raised, a tape was dropped or purged, or `invalidate` reported "
            "the loss of a cache that some dI still needed; a refresh after the first F could not "
            "fill it with the same values.",
            remedy="Restore the last commit and run the epoch again.",
        ),
        Clause(
            id="epoch.incomplete",
            number="8.2",
            title="A final stage has run every dW",
            invariant="Finalize requires one committed dW for every cell of the stage, with or "
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
            cause="Finalize is called in two places, or the commit between two steps is missing. "
            "After a second finalize the stage would owe its reduction again.",
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
            invariant="A commit names the weight epoch of every stage, whichever relations are "
            "left out.",
            transitions=("commit_epoch",),
            argument="epoch",
            unchanged="The weight epoch of every stage.",
            section="III-C",
            cause="The caller's step counter differs from the contract's epoch: a step was "
            "committed twice or skipped.",
            remedy="Commit `contract.epoch`, once, where the optimizer updates the parameters.",
        ),
        Clause(
            id="epoch.uncounted",
            number="8.6",
            title="A commit brings what the device counted",
            invariant="If the device counts its replays, a commit presents the counts of every "
            "state domain. If the counts may come late (`late=True`), they are presented before "
            "the next commit and before a checkpoint.",
            transitions=("commit_epoch", "checkpoint"),
            argument="",
            unchanged=_COUNTED,
            section="design",
            cause="The counters were not read back, or not passed to the commit.",
            remedy="Read the counters after the step's last dW, and pass them as `counted`.",
        ),
        Clause(
            id="epoch.device-count",
            number="8.7",
            title="The device ran each action as often as it was committed",
            invariant="For every stage, the device ran as many refreshes, F, dI and dW as were "
            "committed since the incarnation began.",
            transitions=("commit_epoch",),
            argument="",
            unchanged=_COUNTED,
            section="design",
            cause="A graph was replayed without a check, was replayed twice, or was not replayed "
            "although its action was committed.",
            remedy="Find the code that replays graphs outside the guarded actions; restore the "
            "last commit.",
        ),
        Clause(
            id="epoch.device-order",
            number="8.8",
            title="The device ran the actions in the order of their commits",
            invariant="The device ran the actions of a state domain, each in its own slot, in the "
            "order in which they were committed.",
            transitions=("commit_epoch",),
            argument="",
            unchanged=_COUNTED,
            section="design",
            cause="The graph of another slot or another stage was replayed, or actions were "
            "committed in another order than they were launched.",
            remedy="Launch the graph of the slot that the ticket names; commit in launch order.",
        ),
    ),
)
