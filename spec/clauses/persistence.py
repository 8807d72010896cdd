"""
Persistence: a checkpoint is taken only when nothing is live, and a restore begins a new
incarnation.
"""

from __future__ import annotations

from .model import Clause, Part

_WITHHELD = "Everything. No checkpoint is taken."
_RUNNING = "Everything. The current incarnation continues."

PART = Part(
    name="persistence",
    title="Persistence",
    hidden="process-local handles in the saved state",
    without="a resumed run trusts addresses, tokens or caches of a process that is gone",
    holder="checkpoints only when nothing is live; a new incarnation and stale caches after a "
    "restore",
    intro="""\
A checkpoint is taken directly after a commit, when no tape is live, no action or reduction is in
flight, and no weights are half updated. The host must also have seen all device work finish. For a
restore, the caller loads the numerical state first. Then the contract begins a new *incarnation*:
every slot is free, every generation is zero, every weight cache is stale, and every earlier
reference is refused. References are refused even if one checkpoint is restored twice, because each
incarnation is a new random number that is never saved.""",
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
            cause="The checkpoint hook ran within a step. Or a delayed dW, or a read of a tape's "
            "output or input gradient, has not finished.",
            remedy="Take the checkpoint directly after `commit_epoch`.",
        ),
        Clause(
            id="persistence.mid-epoch",
            number="9.2",
            title="No checkpoint within an epoch",
            invariant="A checkpoint is taken only if no forward and no dW was committed in the "
            "current epoch, and if no refresh was committed that still waits for its stage's "
            "first forward.",
            transitions=("checkpoint",),
            argument="",
            unchanged=_WITHHELD,
            section="III-E",
            cause="A step has begun, so scales and gradients belong to a half-finished step.",
            remedy="Take the checkpoint directly after `commit_epoch`, before the next refresh or "
            "forward.",
        ),
        Clause(
            id="persistence.action-in-flight",
            number="9.3",
            title="No checkpoint with an action in flight",
            invariant="A checkpoint is taken only if no F, dI, refresh, evaluation or update is "
            "in flight. A checkpoint is also refused between the check of a whole step "
            "(`check_step`) and its commit or withdrawal.",
            transitions=("checkpoint",),
            argument="",
            unchanged=_WITHHELD,
            section="III-E",
            cause="An action was checked, but neither committed nor aborted. Or a whole step was "
            "checked in one call (`check_step`), and its launch may still write the weights.",
            remedy="Commit or abort the action, then take the checkpoint. For a whole step, call "
            "`commit_step` first, or `withdraw_step` if the step was not launched.",
        ),
        Clause(
            id="persistence.device-work",
            number="9.4",
            title="No checkpoint or restore before all device work has finished",
            invariant="A checkpoint or a restore is accepted only after the host has seen all "
            "enqueued device work finish.",
            transitions=("checkpoint", "restore"),
            argument="",
            unchanged="Everything. The checkpoint or restore does not happen.",
            section="III-E",
            cause="Replays were enqueued after the host last synchronised with the device. So the "
            "numerical state could still change while it is saved or loaded.",
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
            cause="The caller started an asynchronous all-reduce, and did not wait for it.",
            remedy="Finish the reduction, commit the epoch, then take the checkpoint.",
        ),
        Clause(
            id="persistence.same-incarnation",
            number="9.6",
            title="A restore begins a new incarnation",
            invariant="A restore takes a new incarnation number, which differs from the current "
            "number and from every earlier number of the contract.",
            transitions=("restore",),
            argument="incarnation",
            unchanged=_RUNNING,
            section="design",
            cause="The caller saved an incarnation number and passed it again, or derived the "
            "number from a seed or a rank.",
            remedy="Leave the argument `incarnation` out. The contract then draws a new random "
            "number.",
        ),
        Clause(
            id="persistence.configuration",
            number="9.7",
            title="A checkpoint fits the configuration that restores it",
            invariant="A checkpoint is restored only into the configuration that saved it. The "
            "two configurations must agree in the stages, the parts of the contract, the callers, "
            "the capture order, the declared order, the last generation of a slot "
            "(`generation_max`), and the treatment of weight caches.",
            transitions=("restore",),
            argument="checkpoint",
            unchanged=_RUNNING,
            section="III-E",
            cause="The stages, microbatches, slots, destinations or parts of the contract changed "
            "between save and load. A checkpoint cannot be restored into another pipeline layout.",
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
            cause="`optimizer.step` raised an exception, and then the training loop or an exit "
            "hook saved a checkpoint.",
            remedy="Keep the last checkpoint from before the failed update, and start the run "
            "again from it.",
        ),
    ),
)
