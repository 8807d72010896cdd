"""
Epoch: an optimizer step is final only when whole, and a spoiled one never commits.
"""

from __future__ import annotations

from .model import Clause, Part

_STAGE = "The stage's counts of actions, its marks (spoiled, final), and the weight epoch."
_COUNTED = "The weights and the weight epoch. Only a restore makes the counts agree again."
_UNCOUNTED = "The weights and the weight epoch. The update can be checked again, with counts."

PART = Part(
    name="epoch",
    title="Epoch",
    hidden="whether an optimizer step is complete",
    without="the optimizer uses gradients that lack a microbatch, or that come from a step that "
    "failed in part",
    holder="per stage, a count of dW, a mark of failure and a mark that the gradients are final; "
    "an update that is checked, then committed for all stages or aborted",
    intro="""\
An epoch is one optimizer step. A stage is finalized when all its work of the epoch is done. The
optimizer's update ends the epoch. The update is an action, with a check and a commit like F.
`check_update` reserves the weights of every stage, `commit_update` advances the weight epochs of
all stages, and `abort_update` says that the update failed. `commit_epoch` is the check and the
commit in one call, for an update that is already enqueued as a whole. The contract sees one process
only. Across processes, the caller must ensure that no process updates its weights before all
processes have agreed.

An epoch has one or more *walks* (passes over all microbatches). With several walks, gradients
accumulate over the walks. When every stage is final and no reduction has started, `next_walk`
begins the next walk in the same epoch. The same keys run again, and the caller binds each key
again. Every dW adds to the gradients of the earlier walks. If an order is declared, each walk
follows it. Each walk ends with `finalize`. A reference of an earlier walk is still refused, because
its tape was released. After the last walk, the caller commits the update.

A walk may take fewer microbatches than configured, for example on the last batch of a data set.
Before the walk's first F, the caller leaves out each key that will not run. `skip` leaves out one
key, and `shorten_walk` leaves out microbatches in all stages. A key that is left out has no F, dI
or dW in that walk. `finalize` and the reductions count such a key as done, so they need only the dW
of the other keys. The next walk takes every microbatch again.

Between its check and its commit, the update may write any weight. By then, all actions of the epoch
have run, so any further F, dI or dW is refused. `epoch.in-flight` refuses a bind, a refresh, a
second update and a restore. `persistence.action-in-flight` refuses a checkpoint. If an update fails
half way, some weights are updated and others are not, and the contract cannot know which: the
weights are *half updated*. From then on, no action is accepted until the whole process is restored.

Some faults are noticed late, for example an asynchronous device error, or a wrong digest that is
compared after the tape was released. The caller reports such a fault by `fail`, with its stage and
its epoch. A fault of the current epoch *spoils* that epoch: the epoch can no longer commit, and
must run again after a restore. But if the update of the fault's epoch is in flight or was
committed, the weights come from wrong gradients, and count as half updated.

An evaluation is a forward without training: no dI and no dW follows. An evaluation has no key, no
slot and no effect token. It runs in memory of its own, not in a slot whose graph updates scales.
`check_evaluation` reserves the stage and its domain. `commit_evaluation` leaves the state of the
epoch unchanged. An evaluation is accepted between any two actions of an epoch, and also between the
last dW and the update. Between a refresh and the stage's first F, an evaluation is refused. With
`cached=True`, the evaluation reads the quantized weight cache, which must be current. With
`cached=False`, the evaluation quantizes the weights itself and does not touch the cache. The
backend must report that the evaluation updated no scales and filled no cache. If the evaluation
updated scales, filled a cache or failed, the epoch is spoiled and the domain is poisoned.

A failed or aborted F, dI or dW spoils the stage's epoch: the stage can then not be finalized. The
following events also spoil the epoch: a failed evaluation, a dropped tape, a failed reduction, a
fault of the current epoch that `fail` reports, and a call of `invalidate` while the stage's cache
is in use. A failed refresh does not spoil the epoch, but poisons its domain (`order.poisoned`).

`invalidate` reports that a weight cache was lost. This call is accepted even while a dI still needs
the cache. If it were refused, the contract would treat the lost cache as current, and the next dI
would read the cache. After `invalidate`, the cache is stale. Before the stage's first F, a refresh
makes the cache current again. Later in the epoch, a refresh is refused, and so is every F and dI of
the stage (`version.stale-cache`). Aborts, drops, `drain` and `restore` remain possible.

Each microbatch's gradient has a weight, for example 1/M with M microbatches, so that the weights of
one epoch add up to one. A stage with `StageConfig(weights_sum=(1, 1))` declares this sum. The
backend then reports, at each dI, the weight of the microbatch as a fraction. All fractions that a
stage reports in an epoch must have the same denominator n (`epoch.other-parts`). The contract
counts the declared sum in *parts* of 1/n, subtracts each reported weight, and refuses the update if
the result is not zero. The contract computes only with integers. The weights are added over all
walks of the epoch. So the contract finds two common mistakes: each of several walks divides the
loss by the number of its own microbatches, or a shortened walk divides by the configured number of
microbatches.

A contract that is built with `counted=True` also checks which actions the device really ran. At
every action, the device itself increments a count for the action's stage and kind, and updates a
digest that depends on the order of actions. The caller passes these counts and digests to the check
of the update, which compares them with the committed actions. If they differ, the check is refused.
The proofs do not cover this comparison. So the clauses `epoch.uncounted`, `epoch.device-count` and
`epoch.device-order` are tested, not proved.""",
    clauses=(
        Clause(
            id="epoch.spoiled",
            number="8.1",
            title="A stage is never final in a spoiled epoch",
            invariant="A stage cannot be finalized in a spoiled epoch. An epoch is spoiled by a "
            "failed or aborted F, dI, dW or evaluation of the stage, by a dropped tape, by a "
            "failed reduction, or by a fault that `fail` reports. The loss of the stage's weight "
            "cache also spoils the epoch, if it happens after the stage's first F and before the "
            "end of its last dI.",
            transitions=("finalize",),
            argument="stage",
            unchanged=_STAGE,
            section="IV-E",
            cause="An F, dI or dW raised an exception, or a tape was dropped or purged. Or "
            "`invalidate` reported the loss of a cache that some dI still needed. A refresh after "
            "the first F would fill that cache with other values.",
            remedy="Restore the last commit and run the epoch again.",
        ),
        Clause(
            id="epoch.incomplete",
            number="8.2",
            title="A stage is finalized after all its dW",
            invariant="`finalize` requires one committed dW for every cell (microbatch, block and "
            "invocation) of the stage, with or without an arena. It does not require the dW of "
            "cells that were left out of the walk (the pass over the microbatches).",
            transitions=("finalize",),
            argument="stage",
            unchanged="The stage. It is not final, and the missing dW may still run.",
            section="IV-E",
            cause="A delayed dW has not run yet, or is missing in the schedule.",
            remedy="Run the missing dW, then call `finalize` again.",
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
            cause="`finalize` is called in two places. Or a commit or `next_walk` is missing "
            "between two calls of `finalize`.",
            remedy="Call `finalize` once per stage and walk, after the stage's last dW.",
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
            cause="A chunk of this rank was not finalized. Or a reduction of the chunk's "
            "gradients failed after `finalize`.",
            remedy="Finalize every stage. After a failed reduction, restore the last commit.",
        ),
        Clause(
            id="epoch.wrong-epoch",
            number="8.5",
            title="An update names the epoch that it ends",
            invariant="The check of an update names the current weight epoch, and so does "
            "`next_walk`. This holds even if stages leave parts of the contract out.",
            transitions=("next_walk", "check_update"),
            argument="epoch",
            unchanged="The weight epoch of every stage.",
            section="III-C",
            cause="The caller's step counter differs from the contract's epoch, because a step "
            "was committed twice or not at all.",
            remedy="Pass `contract.epoch` as the epoch. Commit once, where the optimizer updates "
            "the parameters.",
        ),
        Clause(
            id="epoch.uncounted",
            number="8.6",
            title="An update presents the device's counts",
            invariant="If the device counts its replays, the caller passes the counts of every "
            "state domain to the check of an update. With `late=True`, the caller may pass them "
            "later, but before the next update and before a checkpoint.",
            transitions=("check_update", "checkpoint"),
            argument="",
            unchanged=_UNCOUNTED,
            section="design",
            cause="The caller did not read the device's counters, or did not pass them to the "
            "call.",
            remedy="Read the counters after the step's last dW, and pass them as the argument "
            "`counted`.",
        ),
        Clause(
            id="epoch.device-count",
            number="8.7",
            title="The device ran each action as often as it was committed",
            invariant="For every stage, the device ran exactly as many refreshes, F, dI and dW as "
            "were committed since the contract was built or last restored.",
            transitions=("check_update",),
            argument="",
            unchanged=_COUNTED,
            section="design",
            cause="A graph was replayed without a check, or replayed twice. Or an action was "
            "committed, but its graph was not replayed.",
            remedy="Find the code that replays a graph without a check and a commit. Restore the "
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
            cause="The graph of another slot or stage was replayed. Or a dW graph that adds was "
            "replayed instead of the dW graph that overwrites. Or the order of commits differs "
            "from the order of launches.",
            remedy="Launch the graph of the slot that was checked. For dW, the check's argument "
            "`first` says which buffers the launched graph must overwrite. Commit actions in the "
            "order of their launches.",
        ),
        Clause(
            id="epoch.in-flight",
            number="8.9",
            title="One update of the weights at a time, and no evaluation during the update",
            invariant="While an update is in flight, no further update, walk, evaluation, "
            "restore, refresh or bind begins, and no other stream begins to read weights or "
            "gradients. While an evaluation is in flight, no update, walk or restore begins, and "
            "no second evaluation of the same stage begins.",
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
            cause="An update or an evaluation was checked, but neither committed nor aborted.",
            remedy="Commit the update or evaluation after it was enqueued, or abort it if it "
            "failed. The context managers `contract.update()` and `contract.evaluation(stage)` do "
            "this.",
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
            cause="`optimizer.step` raised an exception, for example because memory ran out, and "
            "the training loop continued. Or `fail` named an epoch whose update had already "
            "begun.",
            remedy="Load the last checkpoint, or start the run again from it. Then call the "
            "contract's `restore`.",
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
            cause="The update or evaluation was already committed or aborted. Or a restore "
            "happened between its check and this call.",
            remedy="Use the context manager `contract.update()` or `contract.evaluation(stage)`, "
            "which redeems the ticket.",
        ),
        Clause(
            id="epoch.not-begun",
            number="8.12",
            title="A fault names an epoch that began",
            invariant="`fail` names the current epoch or an earlier epoch.",
            transitions=("fail",),
            argument="epoch",
            unchanged="The weights, and every stage's counts of actions and marks (spoiled, "
            "final).",
            section="design",
            cause="The caller's step counter is ahead of the contract's epoch, for example after a "
            "restore.",
            remedy="Name the epoch in which the failed action ran. For the current epoch, leave "
            "the argument out.",
        ),
        Clause(
            id="epoch.sole-writer",
            number="8.13",
            title="Every destination keeps a writer",
            invariant="A key cannot be left out of a walk (a pass over the microbatches) if its "
            "cell is the first configured cell that writes some gradient buffer. A cell is a key "
            "without its epoch. So every walk writes every buffer.",
            transitions=("skip",),
            argument="key",
            unchanged="The destinations, and every stage's counts of actions and marks (spoiled, "
            "final).",
            section="design",
            cause="Each microbatch has a destination of its own. The destination of a microbatch "
            "that is left out would then keep an earlier epoch's gradient. Or the caller left out "
            "the first microbatch.",
            remedy="Configure one accumulating destination per matrix for all microbatches, and "
            "leave out only the last microbatches.",
        ),
        Clause(
            id="epoch.other-parts",
            number="8.14",
            title="The gradient weights of an epoch have one denominator",
            invariant="This clause applies if the backend reports the weight of each microbatch's "
            "gradient (`StageConfig.weights_sum`). A dI then commits only if its weight is "
            "reported. All weights of a stage in one epoch have the same denominator.",
            transitions=("commit_dgrad",),
            argument="parts",
            unchanged="The effect token. The action counts as failed and is aborted. Its state "
            "domain then accepts no F, dI, refresh or evaluation until a restore.",
            section="design",
            cause="The backend reported no weight. Or the loss was divided by different numbers "
            "in different walks or microbatches of the epoch.",
            remedy="Report `weight=(numerator, denominator)` with the same denominator in the "
            "whole epoch, and do not reduce the fraction. Then restore the last commit.",
        ),
        Clause(
            id="epoch.wrong-weights",
            number="8.15",
            title="The weights of an epoch's gradients have the declared sum",
            invariant="This clause applies if the backend reports the weight of each microbatch's "
            "gradient (`StageConfig.weights_sum`). The update begins only if the weights of all "
            "microbatches, in all walks of the epoch, add up to the declared sum.",
            transitions=("check_update",),
            argument="",
            unchanged="The weights of the model, and the gradients, which have the wrong scale.",
            section="design",
            cause="The loss was not divided, or was divided by a wrong number. Often the divisor "
            "counts the microbatches of one walk although the epoch has several walks. Or it "
            "counts the configured microbatches although a walk was shortened, or local tokens "
            "instead of all tokens. Or the loss was also divided by the number of replicas, "
            "although the reduction already averages over them.",
            remedy="Divide each microbatch's loss by the same number, so that the weights add up "
            "to `weights_sum`. Then restore the last commit and run the epoch again.",
        ),
    ),
)
