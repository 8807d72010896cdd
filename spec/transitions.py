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
        name: Name; ``check_*`` reserves and issues a ticket, ``commit_*`` redeems the ticket after
            success, ``abort_*`` after failure.
        arguments: Names of the arguments, in order.
        when: When to call the transition, and what it changes.
        relation: The relation that the transition needs; empty if it needs none.
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
        "Before the first F of a walk that takes fewer microbatches than configured: leaves out "
        "the key's F, dI and dW.",
    ),
    _transition(
        "bind(key, destination)", "Before dI: binds the key to the destination of its gradients."
    ),
    _transition("check_refresh(stage, link)", "Before a refresh: reserves the domain.", "version"),
    _transition(
        "commit_refresh(stage, ticket, filled, fill_epoch)",
        "After a refresh: the cache is current. `filled` names the matrices whose caches were "
        "filled, and `fill_epoch` the epoch of the weights that they were filled from.",
        "version",
    ),
    _transition(
        "abort_refresh(stage, ticket)",
        "After a refresh failed: poisons the state domain until a restore.",
        "version",
    ),
    _transition(
        "check_forward(key, slot, token, link, refresh)",
        "Before F: reserves slot and domain. "
        "`refresh` is true if F fills the weight cache itself, and false if F reads the cache as "
        "it is.",
    ),
    _transition(
        "commit_forward(slot, ticket, filled, fill_epoch, updates, draws)",
        "After F: the tape is live and the token advances; an F that refreshes makes the cache "
        "current. `updates` counts how often F updated the scales, and `draws` says where F began "
        "to draw random numbers.",
    ),
    _transition(
        "abort_forward(slot, ticket)",
        "After F failed: releases the tape, poisons the domain and spoils the epoch.",
    ),
    _transition(
        "check_evaluation(stage, link, cached)",
        "Before a forward that trains nothing: reserves the stage and its domain. `cached` is true "
        "if the evaluation reads the weight cache, and false if it quantizes the weights itself.",
    ),
    _transition(
        "commit_evaluation(stage, ticket, fill_epoch, updates)",
        "After an evaluation: leaves the epoch unchanged. `fill_epoch` names the epoch of the "
        "weights if the evaluation filled the cache, and `updates` counts how often it updated "
        "the scales.",
    ),
    _transition(
        "abort_evaluation(stage, ticket)",
        "After an evaluation failed: poisons the domain and spoils the epoch.",
    ),
    _transition("check_dgrad(key, ref, token, link)", "Before dI: reserves tape and domain."),
    _transition(
        "commit_dgrad(slot, ticket, queued, updates, scales, draws, weight, parts)",
        "After dI: the token advances, and the tape waits for dW. `queued` is the deferred work, "
        "`scales` the token of the F whose scales dI used, and `draws` says where dI began to draw "
        "when it recomputed F. The fraction `weight`/`parts` is the microbatch's share of the "
        "epoch's gradient.",
    ),
    _transition(
        "abort_dgrad(slot, ticket)",
        "After dI failed: releases the tape, poisons the domain and spoils the epoch.",
    ),
    _transition(
        "check_wgrad(key, ref, link, destination, first)",
        "Before dW: reserves tape and destination. `first` says which buffers dW overwrites.",
    ),
    _transition(
        "commit_wgrad(slot, ticket, covered)",
        "After dW: counts the write. `covered` names the matrices written. The tape's last "
        "consumer releases the slot.",
    ),
    _transition(
        "abort_wgrad(slot, ticket)",
        "After dW failed: releases the tape and spoils the stage's epoch.",
    ),
    _transition(
        "group_wgrad(key, ref, leader, ticket, link, destination)",
        "After the check of a dW and before its commit: the same product takes this tape too. "
        "`leader` is the slot, and `ticket` the ticket, of the dW that was checked.",
        "arena",
    ),
    _transition(
        "ungroup_wgrad(key, ref, covered)",
        "After a grouped dW ended: counts the dW of this tape. `covered` names the matrices "
        "written. The tape's last consumer releases the slot.",
        "arena",
    ),
    _transition(
        "post_receive(key, ref, message, link)",
        "Before a stream receives the tape's input, or its output's gradient, into the slot: the "
        "receive is then under way.",
    ),
    _transition(
        "finish_receive(key, ref, message, link)",
        "After the message has arrived and the link's caller has waited for the receive: ends the "
        "receive.",
    ),
    _transition(
        "read(key, ref, bit, link)",
        "Before a stream reads the output or the input gradient: the read is then under way.",
    ),
    _transition(
        "finish_read(key, ref, bit, link)",
        "After the read has ended and the link's caller has waited for it: records the end of the "
        "read. The tape's last consumer releases the slot.",
    ),
    _transition("drop(key, ref)", "Aborts one tape. A purge drops every tape of an epoch."),
    _transition(
        "invalidate(stage)",
        "After the weight cache was lost: marks the cache stale. If the stage's F have begun and "
        "a dI is still to come, spoils the epoch.",
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
        "After the host has seen the domain's device work finish: records this. Ends no transfer "
        "and makes no stream wait.",
    ),
    _transition(
        "finalize(stage, link)", "After a stage's last dW: declares the stage's gradients complete."
    ),
    _transition(
        "start_reduction(bucket, link)",
        "After the last dW of the bucket's stages, when a caller's stream enqueues the reduction: "
        "the bucket is then in flight.",
    ),
    _transition(
        "finish_reduction(bucket, link)",
        "When the caller's stream, which will read the gradients, waits for the reduction: the "
        "bucket is then reduced.",
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
        "When the caller's stream, which will run the update, waits for that read: ends the read.",
    ),
    _transition(
        "start_gradients_read(stage, link)",
        "Before another stream reads the stage's final, reduced gradients, for example for a norm "
        "or a save. The call records that this stream first waits for the caller's stream of the "
        "link.",
    ),
    _transition(
        "finish_gradients_read(stage, link)",
        "When the caller's stream, which will run the update, and the stage's graph stream wait "
        "for that read: ends the read.",
    ),
    _transition(
        "next_walk(epoch)",
        "After every stage was finalized and before any reduction: begins the next walk, which "
        "adds to the same gradients, with the same keys.",
    ),
    _transition(
        "check_update(epoch, caller)",
        "Before the optimizer's update, on the caller's stream: reserves the weights of every "
        "stage.",
    ),
    _transition(
        "move_scales(stage, updates)",
        "In an update, after the scales of the stage's domain moved: records their movement. The "
        "call is accepted only if these scales move once an epoch. `updates` counts how often they "
        "moved.",
    ),
    _transition(
        "commit_update(epoch, ticket)",
        "After the whole update was enqueued: starts every stage's next epoch.",
    ),
    _transition(
        "abort_update(epoch, ticket)",
        "After the update failed: the weights are half updated until a restore.",
    ),
    _transition(
        "fail(stage, epoch)",
        "When a fault of an earlier action is seen late. A fault of the current epoch spoils that "
        "epoch; after a fault of an epoch that was committed, or whose update is in flight, the "
        "weights are half updated until a restore.",
    ),
    _transition("checkpoint()", "Before anything is saved: only checks, and changes nothing."),
    _transition(
        "restore(epoch, incarnation)",
        "After the numerical state was loaded: starts a new incarnation with stale caches.",
    ),
)
