"""
Epoch: an optimizer step is final only when whole, and a spoiled one never commits.
"""

from __future__ import annotations

from .model import Clause, Part

_STAGE = "The stage's counts and marks, and the weight epoch."
_COUNTED = "The weights, and the weight epoch; only a restore makes the counts agree again."
_UNCOUNTED = "The weights and the weight epoch; the update can be checked again with counts."

PART = Part(
    name="epoch",
    title="Epoch",
    hidden="whether an optimizer step is complete",
    without="the optimizer consumes a step that lacks a microbatch, or a step that failed in part",
    holder="per stage, a count of dW, a mark of failure and a mark that the gradients are final; "
    "an update that is checked, then committed for all stages or aborted",
    intro="""\
An epoch is one optimizer step. A stage is finalized when all its work is done. The optimizer's
update ends the epoch. The update is an action like F: `check_update` reserves the weights of every
stage, `commit_update` advances every weight epoch or none, and `abort_update` says that the update
failed. `commit_epoch` is the check and the commit in one call, for an update that was enqueued
whole. Across processes, the caller must make the update a barrier: no process updates its weights
before all have agreed.

An epoch has one *walk* over all microbatches, or several: gradients then accumulate over the walks.
When every stage is final and no reduction has started, `next_walk` begins the next walk in the same
epoch. The same keys run again, and the caller binds each key again; every dW adds to the gradients
of the earlier walks. Each walk follows the declared order, if there is one, and ends with finalize.
A reference of an earlier walk stays refused, because its tape was released. After the last walk,
the caller commits the update.

A walk may take fewer microbatches than configured, for example on the last batch of a data set.
Before the walk's first F, the caller leaves out each key that will not run (`skip`; `shorten_walk`
does so for all stages). A key that is left out has no F, dI or dW in that walk. Finalize and
reductions count such a key as done, so a stage is final after the dW of all other keys. The next
walk takes every microbatch again.

Between its check and its commit, the update may write any weight. All actions of the epoch have run
by then, so any further F, dI or dW is refused. A bind, a refresh, a second update and a restore are
refused by `epoch.in-flight`, a checkpoint by `persistence.action-in-flight`. An update that fails
half way leaves some weights updated and others not, and nothing can tell which: the weights are
*half updated*. From then on, no action is accepted until the whole process is restored.

Some faults are seen late, for example an asynchronous device error, or a wrong digest that is
compared after the tape is gone. `fail` names the stage and the epoch of the fault. A fault of the
current epoch *spoils* that epoch: the epoch can no longer commit, and must run again after a
restore. If the update of the fault's epoch is in flight, or was committed, the weights come from
wrong gradients, and count as half updated.

An evaluation is a forward without training: no dI and no dW follows, and it has no key, no slot and
no effect token. An evaluation runs in memory of its own, not in a slot whose graph updates scales.
`check_evaluation` reserves the stage and its domain; `commit_evaluation` leaves the epoch as it
was. An evaluation is accepted between any two actions of an epoch, also between the last dW and the
update. It is refused between a refresh and the stage's first F. With `cached` it reads the
quantized weight cache, which must be current; otherwise it quantizes the weights itself and leaves
the cache alone. The backend must report that the evaluation updated no scales and filled no cache.
If the evaluation updated scales, filled a cache or failed, the epoch is spoiled and the domain
poisoned.

A failed or aborted F, dI or dW spoils the stage's epoch: the stage can then not be finalized. These
also spoil the epoch: a failed evaluation, a dropped tape, a failed reduction, a fault of the
current epoch that `fail` reports, and a call of `invalidate` while the stage's cache is in use. A
failed refresh poisons its domain (`order.poisoned`).

`invalidate` reports the loss of a cache. This call is accepted even while a dI still needs the
cache. If the call were refused, the contract would treat the lost cache as fresh, and the next dI
would read it. After `invalidate` the cache is stale. Before the stage's first F, a refresh makes
the cache current again. Later in the epoch a refresh is refused, and so is every F and dI of the
stage (`version.stale-cache`); aborts, drops, drain and restore remain possible.

Each microbatch's gradient is weighted, for example by 1/M, so that the weights of one epoch add up
to one. A stage with `StageConfig(weights_sum=(1, 1))` declares this sum, and dI reports the weight
of its microbatch as a fraction. All fractions that a stage reports in an epoch must have the same
denominator n (`epoch.other-parts`). The contract counts the declared sum in *parts* of 1/n,
subtracts each reported weight, and refuses the update if the result is not zero. All arithmetic is
in integers. The weights
are added over all walks of the epoch. So the update is refused in two cases: each of several walks
divides the loss by the microbatches of that walk alone, or a shortened walk divides by the
configured number.

A contract made with `counted=True` also compares what the device ran. With every action the device
itself raises a count for the action's stage and kind, and folds the action into a digest that
depends on the order. The check of the update presents these device counts, and is refused if they
differ from the counts of the committed actions. The device's counts are compared outside the proved
transitions. So the clauses `epoch.uncounted`, `epoch.device-count` and `epoch.device-order` are
tested, not proved.""",
    clauses=(
        Clause(
            id="epoch.spoiled",
            number="8.1",
            title="A stage is never final in a spoiled epoch",
            invariant="A stage is not finalized in an epoch that was spoiled for it. An epoch is "
            "spoiled by a failed or aborted F, dI, dW or evaluation of the stage, by a dropped "
            "tape, by a failed reduction, or by a fault that `fail` reports. An epoch is spoiled "
            "too if the stage's weight cache is lost after the stage's first F and before the end "
            "of its last dI.",
            transitions=("finalize",),
            argument="stage",
            unchanged=_STAGE,
            section="IV-E",
            cause="An F, dI or dW raised, a tape was dropped or purged, or `invalidate` "
            "reported the loss of a cache that some dI still needed. A refresh after the "
            "first F would fill that cache with other values.",
            remedy="Restore the last commit and run the epoch again.",
        ),
        Clause(
            id="epoch.incomplete",
            number="8.2",
            title="A stage is finalized after all its dW",
            invariant="Finalize requires one committed dW for every cell of the stage that the "
            "walk (pass over the microbatches) does not leave out, with or without an arena.",
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
            title="A stage is finalized once per walk",
            invariant="A stage that is final in the current walk (pass over the microbatches) is "
            "not finalized again.",
            transitions=("finalize",),
            argument="stage",
            unchanged=_STAGE,
            section="IV-E",
            cause="Finalize is called in two places, or a commit or `next_walk` is missing in "
            "between.",
            remedy="Finalize once, after the last dW of the stage.",
        ),
        Clause(
            id="epoch.not-final",
            number="8.4",
            title="Every stage is final when an update begins",
            invariant="The update, or the epoch's next walk (pass over the microbatches), begins "
            "only when every stage of the process is final in that epoch. A read of gradients on "
            "another stream begins only when its stage is final.",
            transitions=("start_gradients_read", "next_walk", "check_update"),
            argument="",
            unchanged=_STAGE,
            section="IV-E",
            cause="A chunk of this rank was not finalized, or its reduction failed afterwards.",
            remedy="Finalize every stage; after a failed reduction, restore the last commit.",
        ),
        Clause(
            id="epoch.wrong-epoch",
            number="8.5",
            title="An update names the epoch that it ends",
            invariant="The check of an update, and the call that begins the next walk, name the "
            "current weight epoch, even if stages leave parts of the contract out.",
            transitions=("next_walk", "check_update"),
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
            title="An update presents the device's counts",
            invariant="If the device counts its replays, the check of an update presents the "
            "counts of every state domain. With `late=True` the counts may come later, but "
            "before the next update and before a checkpoint.",
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
            cause="A graph was replayed without a check or replayed twice, or an action was "
            "committed whose graph was not replayed.",
            remedy="Find the code that replays graphs outside the guarded actions; restore the "
            "last commit.",
        ),
        Clause(
            id="epoch.device-order",
            number="8.8",
            title="The device ran the actions in the order of their commits",
            invariant="The device ran the actions of a state domain in the order of their commits, "
            "each in its own slot. Each dW overwrote its destinations or added to them, as its "
            "check said.",
            transitions=("check_update",),
            argument="",
            unchanged=_COUNTED,
            section="design",
            cause="The graph of another slot or another stage was replayed. Or the dW graph that "
            "adds was replayed in place of the dW graph that overwrites. Or the order of commits "
            "differs from the order of launches.",
            remedy="Launch the graph of the ticket's slot. For dW, launch the graph that "
            "overwrites or adds as the check's argument `first` says. Commit in launch order.",
        ),
        Clause(
            id="epoch.in-flight",
            number="8.9",
            title="One update of the weights at a time, and no evaluation during the update",
            invariant="While an update is in flight, no further update, walk, evaluation, restore, "
            "refresh or bind begins. No other stream then begins to read weights or gradients. "
            "While an evaluation is in flight, no update, walk or restore begins, and no second "
            "evaluation of the same stage.",
            transitions=(
                "bind",
                "check_refresh",
                "start_weights_read",
                "start_gradients_read",
                "next_walk",
                "check_evaluation",
                "check_update",
                "restore",
            ),
            argument="",
            unchanged="The update or the evaluation in flight, and the weights.",
            section="design",
            cause="An update or an evaluation was checked and neither committed nor aborted.",
            remedy="Commit the update or evaluation after it was enqueued, abort it if it failed, "
            "or use `with contract.update():` and `with contract.evaluation(stage):`.",
        ),
        Clause(
            id="epoch.half-updated",
            number="8.10",
            title="Half-updated weights are not used",
            invariant="Weights are half updated after an update failed half way, or after `fail` "
            "reported a fault of an epoch whose update had already begun. Until the next restore, "
            "no reservation, bind, action, evaluation, walk or update begins, and no other stream "
            "begins to read weights or gradients.",
            transitions=(
                "reserve",
                "bind",
                "check_refresh",
                "check_forward",
                "check_dgrad",
                "check_wgrad",
                "start_weights_read",
                "start_gradients_read",
                "next_walk",
                "check_evaluation",
                "check_update",
            ),
            argument="",
            unchanged="The half-updated weights, and the tapes.",
            section="design",
            cause="`optimizer.step` raised, for example out of memory, and the loop went on; or "
            "`fail` named an epoch whose update had already begun.",
            remedy="Load the last checkpoint, or start the run again from it, then `restore` the "
            "contract.",
        ),
        Clause(
            id="epoch.unknown-ticket",
            number="8.11",
            title="The ticket of an update or an evaluation is redeemed once",
            invariant="An update is committed or aborted only with its outstanding ticket and with "
            "the epoch that its check named. An evaluation is committed or aborted only with the "
            "outstanding ticket of its stage.",
            transitions=(
                "commit_evaluation",
                "abort_evaluation",
                "commit_update",
                "abort_update",
            ),
            argument="ticket",
            unchanged="The weight epoch, and the action in flight.",
            section="design",
            cause="The action was already committed or aborted, or a restore came between its "
            "check and this call.",
            remedy="Let `with contract.update():` or `with contract.evaluation(stage):` redeem the "
            "ticket.",
        ),
        Clause(
            id="epoch.not-begun",
            number="8.12",
            title="A fault names an epoch that began",
            invariant="`fail` names the current epoch or an earlier one.",
            transitions=("fail",),
            argument="epoch",
            unchanged="The weights, and every stage's counts and marks.",
            section="design",
            cause="The caller's step counter is ahead of the contract's epoch, for example after a "
            "restore.",
            remedy="Name the epoch in which the action ran; leave the argument out for the current "
            "epoch.",
        ),
        Clause(
            id="epoch.sole-writer",
            number="8.13",
            title="Every destination keeps a writer",
            invariant="For each gradient buffer, no walk over the microbatches leaves out the "
            "first configured cell (a key without its epoch) that writes the buffer. So every "
            "walk writes every buffer.",
            transitions=("skip",),
            argument="key",
            unchanged="The destinations, and every stage's counts and marks.",
            section="design",
            cause="Each microbatch has a destination of its own, and the destination of a "
            "microbatch that is left out would keep an earlier epoch's gradient; or the first "
            "microbatch was left out.",
            remedy="Let all microbatches accumulate into one destination for each matrix, and "
            "leave out the last microbatches.",
        ),
        Clause(
            id="epoch.other-parts",
            number="8.14",
            title="The gradient weights of an epoch have one denominator",
            invariant="If the backend reports the weight of each microbatch's gradient "
            "(`StageConfig.weights_sum`), a dI commits only with a weight. All weights of a stage "
            "in one epoch have the same denominator.",
            transitions=("commit_dgrad",),
            argument="parts",
            unchanged="The token. The action has failed and is aborted, so its state domain "
            "accepts no F, dI or refresh until a restore.",
            section="design",
            cause="The backend reported no weight, or the divisor of the loss changed within the "
            "epoch: the walks or the microbatches were divided by different numbers.",
            remedy="Report `weight=(numerator, denominator)`, without reducing the fraction; use "
            "one denominator for the whole epoch. Then restore the last commit.",
        ),
        Clause(
            id="epoch.wrong-weights",
            number="8.15",
            title="The weights of an epoch's gradients have the declared sum",
            invariant="If the backend reports the weight of each microbatch's gradient "
            "(`StageConfig.weights_sum`), the update begins only if these weights, over all walks "
            "of the epoch, add up to the declared sum.",
            transitions=("check_update",),
            argument="",
            unchanged="The weights of the model, and the gradients, whose scale is wrong.",
            section="design",
            cause="The loss was not divided, or was divided by a wrong number. Usual wrong numbers "
            "are the microbatches of one walk although the epoch has several walks, the configured "
            "microbatches although a walk was shortened, and local tokens instead of all tokens. "
            "Or the loss was divided a second time by the replicas that the reduction averages "
            "over.",
            remedy="Divide each microbatch's loss by the same number, so that the weights add up "
            "to `weights_sum`; then restore the last commit and run the epoch again.",
        ),
    ),
)
