"""
The columns of the contract's memory: what each means, and which transitions write it.

The memory is a set of columns and nothing else. Each column belongs to one relation, and only that
relation's half of a transition writes it; a configured column is written by none. Every transition
may read every column. The relations declare the same columns for the kernel; a test holds the two
together.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from .constants import NEVER, NO_SLOT, NO_STAGE

__all__ = ["COLUMNS", "CONFIGURED", "SORTS", "StateColumn"]

#: What an index or a value is one of.
SORTS: Final = {
    "one": "nothing: the column has one entry",
    "slot": "a physical place for one tape, with its graphs and buffers",
    "cell": "a key without its epoch: stage, microbatch, block, invocation",
    "stage": "a pipeline stage, or virtual chunk, of this process",
    "domain": "a state domain: what shares scaling state and one graph stream",
    "link": "a pair of a caller's stream and a domain's graph stream",
    "caller": "a stream that calls into the graph streams",
    "pool": "a capture memory pool",
    "buffer": "a gradient buffer",
    "bucket": "gradients that are reduced together",
    "int": "a count, or an epoch",
    "flag": "0 or 1",
    "mask": "consumer bits",
    "generation": "a count of releases",
    "ticket": "a serial number, or 0 for none",
    "opaque": "something that is only compared for equality",
}


@frozen
class StateColumn:
    """
    One column.

    Args:
        name: Its name in the memory.
        relation: The relation that owns it; for a configured column empty.
        index: Sort of its index, from ``SORTS``.
        values: Sort of its values.
        initial: What every entry starts with; None where a configuration, or the first write
            before any read, gives it.
        meaning: What an entry says.
        writers: The transitions whose half in that relation writes it.
    """

    name: str
    relation: str
    index: str
    values: str
    initial: int | None
    meaning: str
    writers: tuple[str, ...] = ()


def _state(
    relation: str, name: str, sorts: str, initial: int | None, meaning: str, writers: str
) -> StateColumn:
    index, _, values = sorts.partition(" -> ")
    return StateColumn(name, relation, index, values, initial, meaning, tuple(writers.split()))


def _configured(name: str, sorts: str, meaning: str) -> StateColumn:
    index, _, values = sorts.partition(" -> ")
    return StateColumn(name, "", index, values, None, meaning)


#: The columns that transitions write, by the relation that owns them.
COLUMNS: Final[tuple[StateColumn, ...]] = (
    # ownership
    _state(
        "ownership",
        "consumers",
        "slot -> mask",
        0,
        "consumers that have yet to visit the tape: 1 dI, 2 dW, 4 a reader of the output, 8 a "
        "reader of the input gradient; 16 alone while the slot is claimed and its F has not "
        "committed; 0 when the slot is free",
        "reserve check_forward commit_forward abort_forward commit_dgrad abort_dgrad "
        "commit_wgrad abort_wgrad finish_read drop restore",
    ),
    _state(
        "ownership",
        "moving",
        "slot -> mask",
        0,
        "transfers under way: 1 a receive of the input, 2 a receive of the output's gradient, 4 a "
        "read of the output, 8 a read of the input gradient; those of an aborted tape keep its "
        "slot",
        "post_receive finish_receive read finish_read restore",
    ),
    _state(
        "ownership",
        "arrived",
        "slot -> mask",
        0,
        "messages that a live tape has received: 1 the input, 2 the output's gradient",
        "abort_forward abort_dgrad commit_wgrad abort_wgrad finish_receive finish_read drop "
        "restore",
    ),
    _state(
        "ownership",
        "generation",
        "slot -> generation",
        0,
        "tenants that the slot has released in this incarnation",
        "abort_forward abort_dgrad commit_wgrad abort_wgrad finish_read drop restore",
    ),
    _state(
        "ownership",
        "cell_at",
        "slot -> cell",
        None,
        "cell of the latest tenant's key",
        "reserve check_forward",
    ),
    _state(
        "ownership",
        "epoch_at",
        "slot -> int",
        NEVER,
        "epoch of the latest tenant's key; -1 before the first",
        "reserve check_forward",
    ),
    _state(
        "ownership",
        "held",
        "slot -> ticket",
        0,
        "ticket of the F, dI or dW in flight on the slot, or 0",
        "check_forward commit_forward abort_forward check_dgrad commit_dgrad abort_dgrad "
        "check_wgrad commit_wgrad abort_wgrad",
    ),
    _state(
        "ownership",
        "slot_of",
        "cell -> slot",
        NO_SLOT,
        "slot of the cell's live tape, or -1",
        "reserve check_forward abort_forward abort_dgrad commit_wgrad abort_wgrad finish_read "
        "drop restore",
    ),
    _state(
        "ownership",
        "forwarded",
        "cell -> int",
        NEVER,
        "epoch of the cell's last forward, from its check on; -1 before the first",
        "check_forward restore",
    ),
    # version
    _state(
        "version",
        "cache_epoch",
        "stage -> int",
        NEVER,
        "weight epoch of the stage's quantized cache; -1 when stale",
        "commit_refresh commit_forward invalidate restore",
    ),
    _state(
        "version",
        "refreshed",
        "domain -> stage",
        NO_STAGE,
        "stage that was refreshed and whose first F must come next in the domain, or -1",
        "commit_refresh commit_forward restore",
    ),
    _state(
        "version",
        "refreshing",
        "stage -> ticket",
        0,
        "ticket of the refresh in flight, or 0",
        "check_refresh commit_refresh abort_refresh",
    ),
    _state(
        "version",
        "filling",
        "stage -> ticket",
        0,
        "ticket of the F in flight that refreshes the cache itself, or 0",
        "check_forward commit_forward abort_forward",
    ),
    # order
    _state(
        "order",
        "token",
        "domain -> int",
        0,
        "the effect token: F and dI that committed in the domain since the last restore",
        "commit_forward commit_dgrad restore",
    ),
    _state(
        "order",
        "position",
        "domain -> int",
        0,
        "the same since the weights last changed: the place in the declared order",
        "commit_forward commit_dgrad commit_epoch restore",
    ),
    _state(
        "order",
        "busy",
        "domain -> ticket",
        0,
        "ticket of the F, dI or refresh in flight in the domain, or 0",
        "check_refresh commit_refresh abort_refresh check_forward commit_forward abort_forward "
        "check_dgrad commit_dgrad abort_dgrad",
    ),
    _state(
        "order",
        "poisoned",
        "domain -> flag",
        0,
        "1 from a failed F, dI or refresh to the next restore",
        "abort_refresh abort_forward abort_dgrad restore",
    ),
    _state(
        "order",
        "forwards",
        "stage -> int",
        0,
        "F of the stage that committed in this epoch",
        "commit_forward commit_epoch restore",
    ),
    _state(
        "order",
        "dgrads",
        "stage -> int",
        0,
        "dI of the stage that committed in this epoch",
        "commit_dgrad commit_epoch restore",
    ),
    _state(
        "order",
        "scaled_at",
        "slot -> int",
        0,
        "token at which the F of the latest tenant ran: whose scales its dI must use",
        "commit_forward",
    ),
    _state(
        "order",
        "rolled_at",
        "domain -> int",
        0,
        "token at which the domain's latest F ran: whose scales are live now",
        "commit_forward",
    ),
    # arena
    _state(
        "arena",
        "bound",
        "cell -> int",
        NEVER,
        "epoch in which the cell's destination was last bound; -1 before the first",
        "bind restore",
    ),
    _state(
        "arena",
        "opened",
        "buffer -> int",
        NEVER,
        "epoch whose gradients the buffer holds; -1 for none",
        "commit_wgrad restore",
    ),
    _state(
        "arena",
        "writing",
        "buffer -> ticket",
        0,
        "ticket of the dW in flight on the buffer, or 0",
        "check_wgrad commit_wgrad abort_wgrad",
    ),
    # capture
    _state(
        "capture",
        "cursor",
        "pool -> int",
        0,
        "capture rank of the pool's latest replay",
        "check_forward check_dgrad check_wgrad",
    ),
    _state(
        "capture",
        "tenants",
        "pool -> int",
        0,
        "live tapes that keep memory in the pool, from the check of their F on",
        "check_forward abort_forward abort_dgrad commit_wgrad abort_wgrad finish_read drop restore",
    ),
    # completion
    _state(
        "completion",
        "submitted",
        "link -> int",
        0,
        "pieces of work that the caller enqueued, or transfers that it was told the end of; "
        "replays must see them",
        "finish_receive finish_read submit restore",
    ),
    _state(
        "completion",
        "joined",
        "link -> int",
        0,
        "how many of them the graph stream has waited for",
        "join restore",
    ),
    _state(
        "completion",
        "waited",
        "link -> int",
        0,
        "replays of the graph stream that the caller has waited for",
        "wait restore",
    ),
    _state(
        "completion",
        "replays",
        "domain -> int",
        0,
        "F, dI, dW and refreshes that were enqueued on the domain's graph stream; of refreshes "
        "only those that succeeded",
        "commit_refresh commit_forward abort_forward commit_dgrad abort_dgrad commit_wgrad "
        "abort_wgrad restore",
    ),
    _state(
        "completion",
        "undrained",
        "domain -> flag",
        0,
        "1 while the host has not seen the domain's device work finish",
        "commit_refresh abort_refresh commit_forward abort_forward commit_dgrad abort_dgrad "
        "commit_wgrad abort_wgrad post_receive read drain start_reduction commit_epoch",
    ),
    _state(
        "completion",
        "produced",
        "slot -> int",
        0,
        "the replay, counted in its domain, that last wrote the slot's output or input gradient",
        "commit_forward commit_dgrad restore",
    ),
    _state(
        "completion",
        "landed",
        "stage -> int",
        0,
        "the replay, counted in its domain, of the stage's latest dW",
        "commit_wgrad restore",
    ),
    _state(
        "completion",
        "vacated",
        "slot -> int",
        0,
        "the replay, counted in its domain, after which the slot's last tenant is done",
        "abort_forward abort_dgrad commit_wgrad abort_wgrad drop restore",
    ),
    _state(
        "completion",
        "ended_on",
        "slot -> link",
        None,
        "link whose caller was told the end of the slot's latest transfer; before the first, any",
        "finish_receive finish_read",
    ),
    _state(
        "completion",
        "ended_at",
        "slot -> int",
        0,
        "which piece of that caller's work the end was",
        "finish_receive finish_read restore",
    ),
    _state(
        "completion",
        "named",
        "one -> int",
        NEVER,
        "last epoch in which a stream was named that reads the gradients; -1 for none",
        "finalize finish_reduction restore",
    ),
    _state(
        "completion",
        "consumer",
        "one -> caller",
        None,
        "that stream",
        "finalize finish_reduction",
    ),
    _state(
        "completion",
        "updater",
        "one -> caller",
        None,
        "the stream that the optimizer's latest update ran on; before the first, any",
        "commit_epoch",
    ),
    _state(
        "completion",
        "unawaited",
        "domain -> flag",
        0,
        "1 while the graph stream has yet to wait for that update, and the host has not seen it "
        "finish",
        "join drain commit_epoch",
    ),
    # reduction
    _state(
        "reduction",
        "reducing",
        "bucket -> flag",
        0,
        "1 while the bucket's reduction is in flight",
        "start_reduction finish_reduction fail_reduction",
    ),
    _state(
        "reduction",
        "reduced",
        "bucket -> int",
        NEVER,
        "last epoch in which the bucket's reduction finished; -1 for none",
        "finish_reduction restore",
    ),
    _state(
        "reduction",
        "started",
        "one -> int",
        0,
        "reductions that started in this epoch",
        "start_reduction commit_epoch restore",
    ),
    # epoch
    _state(
        "epoch",
        "weight_epoch",
        "stage -> int",
        0,
        "optimizer updates of the stage's weights",
        "commit_epoch restore",
    ),
    _state(
        "epoch",
        "wgrads",
        "stage -> int",
        0,
        "dW of the stage that committed in this epoch",
        "commit_wgrad commit_epoch restore",
    ),
    _state(
        "epoch",
        "spoiled",
        "stage -> int",
        NEVER,
        "last epoch that a failure, or the loss of a cache in use, spoiled; -1 for none",
        "abort_forward abort_dgrad abort_wgrad drop invalidate fail_reduction restore",
    ),
    _state(
        "epoch",
        "final",
        "stage -> int",
        NEVER,
        "last epoch in which the stage's gradients were declared whole; -1 for none",
        "drop finalize fail_reduction restore",
    ),
    # persistence
    _state(
        "persistence",
        "incarnation",
        "one -> int",
        0,
        "the random number that this memory puts into the references that it issues",
        "restore",
    ),
    # tickets
    _state(
        "tickets",
        "serial",
        "one -> int",
        0,
        "the last ticket that was issued; it never falls, not even at a restore",
        "check_refresh check_forward check_dgrad check_wgrad",
    ),
)

#: The columns that a configuration gives, and no transition writes.
CONFIGURED: Final[tuple[StateColumn, ...]] = (
    _configured(
        "generation_max",
        "one -> generation",
        "the last generation of a slot; one that has reached it takes no tenant",
    ),
    _configured("slot_stage", "slot -> stage", "stage that the slot belongs to"),
    _configured("domain_of", "stage -> domain", "state domain of the stage"),
    _configured(
        "domain_at", "link -> domain", "state domain whose graph stream the link joins to a caller"
    ),
    _configured("caller_at", "link -> caller", "the link's caller"),
    _configured("owes", "stage -> mask", "consumers of a fresh tape"),
    _configured("receives", "stage -> mask", "messages that F and dI of a tape wait for"),
    _configured("matrices", "stage -> opaque", "matrices that a dW must cover, each once"),
    _configured("cells", "stage -> int", "cells of the stage: the tapes of one epoch"),
    _configured(
        "declared", "domain -> flag", "1 where the order of the domain's F and dI is declared"
    ),
    _configured("forward_at", "cell -> int", "declared position of the cell's F"),
    _configured("dgrad_at", "cell -> int", "declared position of the cell's dI"),
    _configured(
        "destination_of",
        "cell -> opaque",
        "gradient destination of the cell, compared for equality",
    ),
    _configured("buffer_of", "cell -> buffer", "buffer that the destination lies in"),
    _configured(
        "shared_of",
        "buffer -> buffer",
        "buffer of the tied destinations that is written with a stage's own, by its sharer's dW "
        "too; without a sharer the buffer itself",
    ),
    _configured(
        "sharer_of",
        "stage -> stage",
        "the other stage that writes the stage's tied destinations, or the same",
    ),
    _configured("pool_of", "slot -> pool", "capture pool of the slot's graphs"),
    _configured(
        "forward_rank", "slot -> int", "place of the slot's F graph in its pool's order of capture"
    ),
    _configured("dgrad_rank", "slot -> int", "the same of its dI graph"),
    _configured("wgrad_rank", "slot -> int", "the same of its dW graph"),
    _configured(
        "reports_fills",
        "stage -> flag",
        "1 where the backend reports what a refresh filled, and from which weights",
    ),
    _configured(
        "reports_updates",
        "stage -> flag",
        "1 where the backend reports how often an F or dI updated scales",
    ),
    _configured(
        "live_scales", "stage -> flag", "1 where dI reads the scales that its domain has by then"
    ),
    _configured(
        "carried_scales",
        "stage -> flag",
        "1 where a tape carries the scales of its F, and dI reports which it used",
    ),
    _configured(
        "stage_at",
        "bucket -> stage",
        "stage whose gradients the bucket holds; only those that are reduced have one",
    ),
    _configured(
        "tied_at", "bucket -> stage", "the other stage that writes the bucket, or the same"
    ),
    _configured(
        "reduce_at", "bucket -> int", "declared place of its reduction among those of the epoch"
    ),
    _configured("ordered", "one -> flag", "1 where the order of reductions is declared"),
)
