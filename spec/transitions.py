"""
The transitions of the contract: their arguments, when to call them, and their effects.
"""

from __future__ import annotations

from attrs import frozen

__all__ = ["TRANSITIONS", "Transition"]


@frozen
class Transition:
    """
    One transition: a call that checks and changes the contract's memory.

    Args:
        name: Name of the transition. ``check_*`` reserves and issues a ticket. ``commit_*`` redeems
            the ticket after the action succeeded, ``abort_*`` after it failed.
        arguments: Names of the arguments, in order.
        when: When to call the transition, and what the transition changes, in words.
        relation: Optional part of the contract that the transition belongs to; empty if it belongs
            to no optional part.
    """

    name: str
    arguments: tuple[str, ...]
    when: str
    relation: str = ""


def _transition(signature: str, when: str, relation: str = "") -> Transition:
    name, _, rest = signature.partition("(")
    return Transition(name, tuple(a for a in rest.rstrip(")").split(", ") if a), when, relation)


#: Every transition, in the order of an optimizer step.
TRANSITIONS: tuple[Transition, ...] = (
    _transition(
        "reserve(key, slot, link)",
        "Before an input is received or copied: claims a slot for a key's F.",
    ),
    _transition(
        "skip(key)",
        "Before the first F of a walk (pass over the microbatches) that takes fewer microbatches "
        "than configured: leaves out the key's F, dI and dW.",
    ),
    _transition(
        "bind(key, destination)", "Before dI: binds the key to the destination of its gradients."
    ),
    _transition(
        "check_refresh(stage, link)",
        "Before a refresh of the stage's weight cache: reserves the stage's domain.",
        "version",
    ),
    _transition(
        "commit_refresh(stage, ticket, filled, fill_epoch)",
        "After a refresh: marks the weight cache as current. `filled` names the matrices whose "
        "caches were filled. `fill_epoch` is the epoch of the weights from which they were filled.",
        "version",
    ),
    _transition(
        "abort_refresh(stage, ticket)",
        "After a refresh failed: poisons the stage's domain until a restore.",
        "version",
    ),
    _transition(
        "check_forward(key, slot, token, link, refresh)",
        "Before F: reserves the slot and the domain. `refresh` is true if F fills the weight "
        "cache itself, and false if F reads the cache as it is.",
    ),
    _transition(
        "commit_forward(slot, ticket, filled, fill_epoch, updates, draws)",
        "After F: the tape is live and the token advances. An F that refreshes also makes the "
        "cache current. `updates` counts how often F updated the scales. `draws` is the position "
        "of the random generator at which F began to draw.",
    ),
    _transition(
        "abort_forward(slot, ticket)",
        "After F failed: releases the tape, poisons the domain and spoils the epoch.",
    ),
    _transition(
        "check_evaluation(stage, link, cached)",
        "Before an evaluation (a forward that trains nothing): reserves the stage and its domain. "
        "`cached` is true if the evaluation reads the weight cache, and false if it quantizes the "
        "weights itself.",
    ),
    _transition(
        "commit_evaluation(stage, ticket, fill_epoch, updates)",
        "After an evaluation: ends the reservation and leaves the epoch unchanged. `fill_epoch` "
        "is the epoch of the weights if the evaluation filled the cache. `updates` counts how "
        "often the evaluation updated the scales.",
    ),
    _transition(
        "abort_evaluation(stage, ticket)",
        "After an evaluation failed: poisons the domain and spoils the epoch.",
    ),
    _transition(
        "check_dgrad(key, ref, token, link)", "Before dI: reserves the tape and the domain."
    ),
    _transition(
        "commit_dgrad(slot, ticket, queued, updates, scales, draws, weight, parts)",
        "After dI: the token advances, and the tape waits for dW. `queued` is the work deferred "
        "to dW. `scales` identifies the F whose scales dI used, by the token of that F. `draws` "
        "is the position of the random generator at which dI began to draw when it recomputed F. "
        "The fraction `weight`/`parts` is the microbatch's share of the epoch's gradient.",
    ),
    _transition(
        "abort_dgrad(slot, ticket)",
        "After dI failed: releases the tape, poisons the domain and spoils the epoch.",
    ),
    _transition(
        "check_wgrad(key, ref, link, destination, first)",
        "Before dW: reserves the tape and the destination. `first` says which gradient buffers dW "
        "overwrites; dW adds to the others.",
    ),
    _transition(
        "commit_wgrad(slot, ticket, covered)",
        "After dW: counts the dW. `covered` names the matrices that dW wrote. If dW was the "
        "tape's last consumer, the slot is released.",
    ),
    _transition(
        "abort_wgrad(slot, ticket)",
        "After dW failed: releases the tape and spoils the stage's epoch.",
    ),
    _transition(
        "group_wgrad(key, ref, leader, ticket, link, destination)",
        "After the check of a dW and before its commit: adds this tape to the matrix product of "
        "that dW (a grouped dW). `leader` is the slot of the dW that was checked, and `ticket` is "
        "its ticket.",
        "arena",
    ),
    _transition(
        "ungroup_wgrad(key, ref, covered)",
        "After a grouped dW ended: counts the dW of this tape. `covered` names the matrices that "
        "dW wrote. If dW was the tape's last consumer, the slot is released.",
        "arena",
    ),
    _transition(
        "post_receive(key, ref, message, link)",
        "Before a stream receives the tape's input, or the gradient of its output, into the slot: "
        "marks the receive as under way.",
    ),
    _transition(
        "finish_receive(key, ref, message, link)",
        "After the message has arrived and the link's caller has waited for the receive: ends the "
        "receive.",
    ),
    _transition(
        "read(key, ref, bit, link)",
        "Before a stream reads the output or the input gradient from the slot: marks the read as "
        "under way.",
    ),
    _transition(
        "finish_read(key, ref, bit, link)",
        "After the read has ended and the link's caller has waited for it: records the end of the "
        "read. If the reader was the tape's last consumer, the slot is released.",
    ),
    _transition(
        "drop(key, ref)",
        "To abort one tape: releases it and spoils the epoch. A purge "
        "drops every tape of an epoch.",
    ),
    _transition(
        "invalidate(stage)",
        "After the weight cache was lost: marks the cache as stale. If the stage has begun its F "
        "and a dI is still to come, the call also spoils the epoch.",
        "version",
    ),
    _transition(
        "submit(link)",
        "After the caller enqueued work that later replays must wait for: counts that work.",
    ),
    _transition(
        "join(link)",
        "After the graph stream was made to wait for all work that the caller submitted: records "
        "the wait.",
    ),
    _transition(
        "wait(link)",
        "After the caller's stream was made to wait for all replays of the graph stream: records "
        "the wait.",
    ),
    _transition(
        "drain(domain)",
        "After the host has seen the domain's device work finish: records this fact. The call "
        "ends no transfer and makes no stream wait.",
    ),
    _transition(
        "finalize(stage, link)", "After a stage's last dW: declares the stage's gradients complete."
    ),
    _transition(
        "start_reduction(bucket, link)",
        "After the last dW of the bucket's stages, when a caller's stream enqueues the reduction: "
        "marks the reduction as in flight.",
    ),
    _transition(
        "finish_reduction(bucket, link)",
        "When the caller's stream that will read the gradients waits for the reduction: marks the "
        "bucket as reduced.",
    ),
    _transition(
        "fail_reduction(bucket)",
        "After a reduction failed: spoils the epoch of the bucket's stages.",
    ),
    _transition(
        "start_weights_read(stage, link)",
        "Before a separate stream reads the stage's weights, for example for a save or a "
        "broadcast. The call records that this stream first waits for the caller's stream of the "
        "link.",
    ),
    _transition(
        "finish_weights_read(stage, link)",
        "When the caller's stream that will run the update waits for the read of weights: ends "
        "that read.",
    ),
    _transition(
        "start_gradients_read(stage, link)",
        "Before another stream reads the stage's final, reduced gradients, for example for a norm "
        "or a save. The call records that this stream first waits for the caller's stream of the "
        "link.",
    ),
    _transition(
        "finish_gradients_read(stage, link)",
        "When two streams wait for the read of gradients, namely the stage's graph stream and the "
        "caller's stream that will run the update: ends that read.",
    ),
    _transition(
        "next_walk(epoch)",
        "After every stage was finalized and before any reduction: begins the epoch's next walk "
        "over the microbatches. This walk adds to the same gradients, and uses the same keys "
        "again.",
    ),
    _transition(
        "check_update(epoch, caller)",
        "Before the optimizer's update, on the caller's stream: reserves the weights of every "
        "stage.",
    ),
    _transition(
        "move_scales(stage, updates)",
        "During an update, after the scales of the stage's domain changed: records the change. "
        "The call is accepted only if this domain's scales change once an epoch. `updates` counts "
        "how often they changed.",
    ),
    _transition(
        "commit_update(epoch, ticket)",
        "After the whole update was enqueued: starts every stage's next epoch.",
    ),
    _transition(
        "abort_update(epoch, ticket)",
        "After the update failed: marks the weights as half updated until a restore.",
    ),
    _transition(
        "fail(stage, epoch)",
        "When a fault of an earlier action is seen late: a fault in the current epoch spoils that "
        "epoch. If the epoch was committed, or if its update is in flight, the weights count as "
        "half updated until a restore.",
    ),
    _transition(
        "checkpoint()",
        "Before anything is saved: checks that a checkpoint is allowed, and changes nothing.",
    ),
    _transition(
        "restore(epoch, incarnation)",
        "After the numerical state was loaded from a checkpoint: starts a new incarnation with "
        "free slots and stale weight caches.",
    ),
)
