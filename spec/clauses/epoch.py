"""
Epoch: an optimizer step is final only when whole, and a spoiled one never commits.
"""

from __future__ import annotations

from .model import Clause, Part

_STAGE = "The stage's ledger, and the weight epoch."
_COUNTED = "The weights, and the weight epoch; only a restore makes the counts agree again."
_UNCOUNTED = "The weights and the weight epoch; the update can be checked again with counts."

PART = Part(
    name="epoch",
    title="Epoch",
    hidden="whether an optimizer step is whole",
    without="the optimizer consumes a step that lacks a microbatch, or one that failed in part",
    holder="a count of dW, a mark of failure and a mark of finality per stage; an update that is "
    "checked, then committed for all stages or aborted",
    intro="""\
An epoch is one optimizer step. A stage is finalized when all its work is done. The optimizer's
update ends the epoch. It is an action like F: `check_update` reserves the weights of every stage,
`commit_update` advances every weight epoch or none, and `abort_update` says that the update failed.
`commit_epoch` is the check and the commit in one call, for an update that was enqueued whole.
Across processes the caller makes the update a barrier.

From its check to its commit the update may write any weight. Every action of the epoch has run
then, so each F, dI, dW, bind and refresh is refused. There is one exception: if a stage leaves out
the order relation, an `invalidate` and then a refresh are accepted. A second update, a restore and
a checkpoint have clauses of their own. An update that fails half way leaves some
weights updated and others not, and nothing can tell which: the weights are *half updated*. Only a
restore of the whole process goes on from there.

A failed or aborted F, dI or dW spoils the stage's epoch: the stage can no longer be finalized, and
only a restore begins the epoch again. A dropped tape, a failed reduction, and `invalidate` while
the stage's cache is in use also spoil it. A failed refresh poisons its domain (`order.poisoned`).

`invalidate` states a fact, so it is accepted: if it were refused, the contract would
treat a lost cache as fresh, and the next dI would read it. Afterwards every F and dI of the stage
is refused as stale; aborts, drops, drain and restore remain possible.

A contract made with `counted=True` also compares what the device ran. With every action the device
itself counts, by stage and kind, and folds the action into a digest that depends on the order. A
check of the update presents the counts, and is refused if they differ from those of the committed
actions. A ledger beside the transitions checks `epoch.uncounted`, `epoch.device-count` and
`epoch.device-order`: these clauses are tested, not proved.""",
    clauses=(
        Clause(
            id="epoch.spoiled",
            number="8.1",
            title="A spoiled epoch is never final",
            invariant="A stage is not finalized if in this epoch one of its F, dI, dW or "
            "reductions failed or was aborted, one of its tapes was dropped, or its weight cache "
            "was lost between its first F and the end of its last dI.",
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
            cause="Finalize is called in two places, or the commit between two steps is missing.",
            remedy="Finalize once, after the last dW of the stage.",
        ),
        Clause(
            id="epoch.not-final",
            number="8.4",
            title="An update finds every stage final",
            invariant="The update begins when every stage of the process is final in the epoch "
            "that the update ends.",
            transitions=("check_update",),
            argument="",
            unchanged=_STAGE,
            section="IV-E",
            cause="A chunk of this rank was not finalized, or its reduction failed afterwards.",
            remedy="Finalize every stage; after a failure restore the last commit.",
        ),
        Clause(
            id="epoch.wrong-epoch",
            number="8.5",
            title="An update names the epoch that it ends",
            invariant="An update names the weight epoch of every stage, whichever relations are "
            "left out.",
            transitions=("check_update",),
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
            title="An update brings what the device counted",
            invariant="If the device counts its replays, the check of an update presents the "
            "counts of every state domain. If the counts may come late (`late=True`), they are "
            "presented before "
            "the next update and before a checkpoint.",
            transitions=("check_update", "checkpoint"),
            argument="",
            unchanged=_UNCOUNTED,
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
            transitions=("check_update",),
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
            transitions=("check_update",),
            argument="",
            unchanged=_COUNTED,
            section="design",
            cause="The graph of another slot or another stage was replayed, or actions were "
            "committed in another order than they were launched.",
            remedy="Launch the graph of the slot that the ticket names; commit in launch order.",
        ),
        Clause(
            id="epoch.in-flight",
            number="8.9",
            title="One update of the weights at a time",
            invariant="While an update is in flight, no second update and no restore begins.",
            transitions=("check_update", "restore"),
            argument="",
            unchanged="The update in flight, and the weights.",
            section="design",
            cause="An update was checked and neither committed nor aborted.",
            remedy="Commit the update after it was enqueued, abort it if it failed, or use "
            "`with contract.update():`.",
        ),
        Clause(
            id="epoch.half-updated",
            number="8.10",
            title="Half-updated weights are not updated again",
            invariant="After an update failed half way, no update begins before a restore.",
            transitions=("check_update",),
            argument="",
            unchanged="The weights, some of which are updated and others not.",
            section="design",
            cause="`optimizer.step` raised, for example out of memory, and the loop went on.",
            remedy="Load the last checkpoint, or start the run again from it, then `restore` the "
            "contract.",
        ),
        Clause(
            id="epoch.unknown-ticket",
            number="8.11",
            title="An update's ticket is redeemed once",
            invariant="Commit and abort of an update are accepted only with the ticket in flight "
            "and the epoch of its check.",
            transitions=("commit_update", "abort_update"),
            argument="ticket",
            unchanged="The weight epoch, and the update in flight.",
            section="design",
            cause="The update was already committed or aborted, or a restore came between.",
            remedy="Let `with contract.update():` redeem the ticket.",
        ),
    ),
)
