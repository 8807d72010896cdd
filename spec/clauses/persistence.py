"""
Persistence: a checkpoint is taken only when nothing is live, and a restore begins a new
incarnation.
"""

from __future__ import annotations

from .model import Clause, Part

_WITHHELD = "Everything; no checkpoint is taken."
_RUNNING = "Everything; the running incarnation continues."

PART = Part(
    name="persistence",
    title="Persistence",
    hidden="process-local handles in the saved state",
    without="a resumed run trusts addresses, tokens or caches of a process that is gone",
    holder="checkpoints only when nothing is live; a new incarnation and stale caches after a "
    "restore",
    intro="""\
A checkpoint is taken directly after a commit, when nothing is live: no tape, no action in flight,
no reduction and no half-updated weights. The host has also seen all device work finish. A restore
loads the numerical state first, then begins a new *incarnation*: every slot is free, every
generation is zero, every earlier reference is refused, and every weight cache is stale. This holds
even if one checkpoint is restored twice, because the incarnation is a new random number that is
never saved.""",
    clauses=(
        Clause(
            id="persistence.live-tape",
            number="9.1",
            title="No checkpoint with a live tape",
            invariant="A checkpoint is taken only if every slot is free.",
            transitions=("checkpoint",),
            argument="",
            unchanged=_WITHHELD,
            section="III-E",
            cause="The checkpoint hook ran within a step, or a delayed dW or a reader has not "
            "finished.",
            remedy="Take the checkpoint directly after `commit_epoch`.",
        ),
        Clause(
            id="persistence.mid-epoch",
            number="9.2",
            title="No checkpoint within an epoch",
            invariant="A checkpoint is taken only if no forward and no dW was committed in the "
            "current epoch, and no refreshed cache waits for its stage's first forward.",
            transitions=("checkpoint",),
            argument="",
            unchanged=_WITHHELD,
            section="III-E",
            cause="The step has begun: the scaling state and the gradients are between two "
            "optimizer steps.",
            remedy="Take the checkpoint directly after `commit_epoch`, before the next refresh or "
            "forward.",
        ),
        Clause(
            id="persistence.action-in-flight",
            number="9.3",
            title="No checkpoint with an action in flight",
            invariant="A checkpoint is taken only if no F, dI, refresh, evaluation or update is in "
            "flight, and no step that was checked as a whole (`check_step`) is still open.",
            transitions=("checkpoint",),
            argument="",
            unchanged=_WITHHELD,
            section="III-E",
            cause="An action was checked and neither committed nor aborted. Or a whole step was "
            "checked in one call (`check_step`), and its launch may be writing the weights.",
            remedy="Commit or abort the action, or call `commit_step`, then take the checkpoint. "
            "Call `withdraw_step` if the step was not run.",
        ),
        Clause(
            id="persistence.device-work",
            number="9.4",
            title="Device work is live until the host has seen it finish",
            invariant="A checkpoint or a restore is accepted only after the host has seen all "
            "enqueued device work finish.",
            transitions=("checkpoint", "restore"),
            argument="",
            unchanged="Everything; the checkpoint or restore does not happen.",
            section="III-E",
            cause="Replays were enqueued after the last device synchronisation, so the numerical "
            "state could still change while it is saved or loaded.",
            remedy="Synchronise the device, then call `drain`.",
        ),
        Clause(
            id="persistence.reduction-in-flight",
            number="9.5",
            title="No checkpoint with a reduction in flight",
            invariant="A checkpoint is taken only if no reduction is in flight.",
            transitions=("checkpoint",),
            argument="",
            unchanged=_WITHHELD,
            section="III-E",
            cause="An asynchronous all-reduce was started and not waited for.",
            remedy="Finish the reduction, commit the epoch, then take the checkpoint.",
        ),
        Clause(
            id="persistence.same-incarnation",
            number="9.6",
            title="A restore begins a new incarnation",
            invariant="The incarnation given to a restore differs from the current incarnation "
            "and from every earlier incarnation of the contract.",
            transitions=("restore",),
            argument="incarnation",
            unchanged=_RUNNING,
            section="design",
            cause="An incarnation was saved and passed again, or derived from a seed or a rank.",
            remedy="Leave `incarnation` out: the contract draws a new random number.",
        ),
        Clause(
            id="persistence.configuration",
            number="9.7",
            title="A checkpoint fits the configuration that restores it",
            invariant="A checkpoint is restored only into the configuration that saved it. These "
            "must be equal: stages, parts of the contract, callers, capture order, declared order, "
            "last generation of a slot, treatment of weight caches.",
            transitions=("restore",),
            argument="checkpoint",
            unchanged=_RUNNING,
            section="III-E",
            cause="The number of stages, microbatches or slots, the destinations or the chosen "
            "relations changed between save and load; a checkpoint cannot be restored into "
            "another topology.",
            remedy="Restore with the configuration of the run that saved the checkpoint.",
        ),
        Clause(
            id="persistence.half-updated",
            number="9.8",
            title="No checkpoint of half-updated weights",
            invariant="No checkpoint is taken while weights are half updated. Weights are half "
            "updated after an update failed half way, or after `fail` reported a fault of an epoch "
            "whose update had begun. A restore ends this state.",
            transitions=("checkpoint",),
            argument="",
            unchanged=_WITHHELD,
            section="design",
            cause="`optimizer.step` raised, and the loop or an exit hook saved a checkpoint.",
            remedy="Keep the last checkpoint that was saved before the failed update, and start "
            "again from it.",
        ),
    ),
)
