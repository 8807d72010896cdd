"""
The transitions of the contract: their arguments, and when they are called.
"""

from __future__ import annotations

from attrs import frozen

__all__ = ["TRANSITIONS", "Transition"]


@frozen
class Transition:
    """
    One transition.

    Args:
        name: Its name; ``check_*`` reserves, ``commit_*`` redeems after success, ``abort_*``
            after failure.
        arguments: Its arguments, in order.
        when: When it is called, and what it changes.
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
    _transition("reserve(key, slot, link)", "Before a receive: claim a slot for a key's forward."),
    _transition("bind(key, destination)", "Before dI: bind the destinations of its gradients."),
    _transition(
        "check_refresh(stage, link)", "Before a stage's weights are quantized again.", "version"
    ),
    _transition(
        "commit_refresh(stage, ticket, filled, fill_epoch)",
        "After: the cache has the weight epoch; `filled` is what was filled, of which weights.",
        "version",
    ),
    _transition(
        "abort_refresh(stage, ticket)", "After it failed: the domain is poisoned.", "version"
    ),
    _transition("check_forward(key, slot, token, link, refresh)", "Before F: claim slot, domain."),
    _transition(
        "commit_forward(slot, ticket, filled, fill_epoch, updates)",
        "After F: the tape is live, the token advances; a refreshing F makes the cache current; "
        "`updates` is how often scales were updated.",
    ),
    _transition(
        "abort_forward(slot, ticket)",
        "After F failed: tape released, domain poisoned, epoch spoiled.",
    ),
    _transition("check_dgrad(key, ref, token, link)", "Before dI: reserve tape and domain."),
    _transition(
        "commit_dgrad(slot, ticket, queued, updates, scales)",
        "After dI: the token advances, the tape waits for dW; `queued` is the deferred work, "
        "`scales` the token of the F whose scales dI used.",
    ),
    _transition(
        "abort_dgrad(slot, ticket)",
        "After dI failed: tape released, domain poisoned, epoch spoiled.",
    ),
    _transition(
        "check_wgrad(key, ref, link, destination, first)",
        "Before dW: reserve tape and destinations; `first` says that it overwrites.",
    ),
    _transition(
        "commit_wgrad(slot, ticket, covered)",
        "After dW: the write counts; `covered` is what was written. The last consumer releases.",
    ),
    _transition(
        "abort_wgrad(slot, ticket)",
        "After dW failed: tape released, the stage's epoch spoiled.",
    ),
    _transition(
        "post_receive(key, ref, message, link)",
        "Before a stream receives into a tape's slot: its input, or its output's gradient.",
    ),
    _transition(
        "finish_receive(key, ref, message, link)",
        "After: it has arrived, and the link's caller has waited for it.",
    ),
    _transition("read(key, ref, bit, link)", "Before a stream reads an output or input gradient."),
    _transition(
        "finish_read(key, ref, bit, link)",
        "After: the reader is done, and the link's caller knows; the last one releases.",
    ),
    _transition("drop(key, ref)", "Abort one tape; purge drops every tape of an epoch."),
    _transition(
        "invalidate(stage)",
        "The weight cache was lost; it is stale. Where its F have begun and some dI is to come, "
        "the epoch is spoiled.",
        "version",
    ),
    _transition("submit(link)", "The caller enqueued work that later replays must see."),
    _transition("join(link)", "The graph stream waits for all that the caller submitted."),
    _transition("wait(link)", "The caller waits for all that was replayed."),
    _transition("drain(domain)", "The host has seen the domain's device work finish."),
    _transition("finalize(stage, link)", "After a stage's last dW: its gradients are whole."),
    _transition(
        "start_reduction(bucket, link)",
        "After the last dW of its stages: a bucket's reduction is enqueued behind a caller's work.",
    ),
    _transition(
        "finish_reduction(bucket, link)",
        "The stream that will read the gradients, the caller's, waits for the reduction.",
    ),
    _transition("fail_reduction(bucket)", "It failed: the epoch of its stages is spoiled."),
    _transition(
        "commit_epoch(epoch, caller)",
        "With the optimizer's update, which the caller's stream runs: every stage's next epoch.",
    ),
    _transition("checkpoint()", "Before anything is saved."),
    _transition(
        "restore(epoch, incarnation)",
        "After the numerical state was loaded: a new incarnation with stale caches.",
    ),
)
