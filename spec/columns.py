"""
The columns of the contract's memory: their meanings, and the transitions that write them.

The memory consists of columns only. Each column belongs to one relation (part of the contract), and
only that relation's functions write the column. The configuration gives the configured columns, and
no transition writes them. Every transition may read every column. The kernel's modules of relations
declare the same columns again; a test compares the two declarations.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from .constants import NEVER, NO_SLOT, NO_STAGE

__all__ = ["COLUMNS", "CONFIGURED", "SORTS", "StateColumn"]

#: Meaning of each sort of index and of value.
SORTS: Final = {
    "one": "no index: the column has one entry",
    "slot": "a place for one tape, with captured graphs and buffers of its own",
    "cell": "a key without its epoch: stage, microbatch, block, invocation",
    "stage": "a pipeline stage, or virtual chunk, of this process",
    "domain": "a state domain: stages that share scaling state and one graph stream",
    "link": "a pair of a caller's stream and a domain's graph stream",
    "caller": "a stream of the training loop: its work prepares the inputs of replays and uses "
    "their results",
    "pool": "a capture memory pool",
    "buffer": "a gradient buffer",
    "bucket": "gradients that are reduced together",
    "int": "a count, or an epoch",
    "flag": "0 or 1",
    "mask": "a set of bits, one per consumer, transfer or message",
    "generation": "how often a slot was released",
    "ticket": "the serial number of a check, or 0 for none",
    "opaque": "something that is only compared for equality",
}


@frozen
class StateColumn:
    """
    One column of the contract's memory.

    Args:
        name: Name of the column in the memory.
        relation: The relation that owns the column; empty for a configured column.
        index: Sort (type) of the index, a key of ``SORTS``.
        values: Sort (type) of the values, a key of ``SORTS``.
        initial: Initial value of every entry; None if the configuration gives the value, or if no
            entry is read before it is written.
        meaning: Meaning of an entry, in words.
        writers: Names of the transitions that write the column.
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
        "consumers that have not finished with the tape: 1 dI, 2 dW, 4 a reader of the output, 8 "
        "a reader of the input gradient; only 16 from the claim of the slot until its F commits; "
        "0 while the slot is free",
        "reserve check_forward commit_forward abort_forward commit_dgrad abort_dgrad "
        "commit_wgrad abort_wgrad ungroup_wgrad finish_read drop restore",
    ),
    _state(
        "ownership",
        "moving",
        "slot -> mask",
        0,
        "transfers under way: 1 a receive of the input, 2 a receive of the output's gradient, 4 a "
        "read of the output, 8 a read of the input gradient, 32 a grouped dW (one product for "
        "several tapes) that was checked for another tape; a transfer of an aborted tape keeps "
        "the slot occupied",
        "group_wgrad ungroup_wgrad post_receive finish_receive read finish_read restore",
    ),
    _state(
        "ownership",
        "arrived",
        "slot -> mask",
        0,
        "messages that a live tape has received: 1 the input, 2 the output's gradient; 16 if a "
        "copy of the input was enqueued",
        "reserve abort_forward abort_dgrad commit_wgrad abort_wgrad ungroup_wgrad finish_receive "
        "finish_read drop restore",
    ),
    _state(
        "ownership",
        "generation",
        "slot -> generation",
        0,
        "how often the slot was released in this incarnation, that is, since the last restore",
        "abort_forward abort_dgrad commit_wgrad abort_wgrad ungroup_wgrad finish_read drop restore",
    ),
    _state(
        "ownership",
        "cell_at",
        "slot -> cell",
        None,
        "cell of the key whose tape the slot holds, or held last",
        "reserve check_forward",
    ),
    _state(
        "ownership",
        "epoch_at",
        "slot -> int",
        NEVER,
        "epoch of the key whose tape the slot holds, or held last; -1 before the first tape",
        "reserve check_forward",
    ),
    _state(
        "ownership",
        "held",
        "slot -> ticket",
        0,
        "ticket of the F, dI or dW in flight on the slot; 0 if none is",
        "check_forward commit_forward abort_forward check_dgrad commit_dgrad abort_dgrad "
        "check_wgrad commit_wgrad abort_wgrad",
    ),
    _state(
        "ownership",
        "slot_of",
        "cell -> slot",
        NO_SLOT,
        "slot of the cell's live tape; -1 if no tape of the cell is live",
        "reserve check_forward abort_forward abort_dgrad commit_wgrad abort_wgrad ungroup_wgrad "
        "finish_read drop restore",
    ),
    _state(
        "ownership",
        "forwarded",
        "cell -> int",
        NEVER,
        "epoch in which the cell's F was checked in this walk over the microbatches; -1 before "
        "that check",
        "check_forward next_walk commit_update restore",
    ),
    _state(
        "ownership",
        "skipped",
        "cell -> int",
        NEVER,
        "epoch in which a walk over the microbatches last left the cell out; -1 if none did since "
        "the latest `next_walk` or restore",
        "skip next_walk restore",
    ),
    _state(
        "ownership",
        "skips",
        "one -> int",
        0,
        "number of cells that this walk over the microbatches leaves out",
        "skip next_walk commit_update restore",
    ),
    # version
    _state(
        "version",
        "cache_epoch",
        "stage -> int",
        NEVER,
        "weight epoch of the weights in the stage's quantized cache; -1 if the cache is stale",
        "commit_refresh commit_forward invalidate restore",
    ),
    _state(
        "version",
        "refreshed",
        "domain -> stage",
        NO_STAGE,
        "stage whose cache was refreshed and whose first F must come next in the domain; -1 if "
        "there is none",
        "commit_refresh commit_forward restore",
    ),
    _state(
        "version",
        "refreshing",
        "stage -> ticket",
        0,
        "ticket of the refresh in flight; 0 if none is",
        "check_refresh commit_refresh abort_refresh",
    ),
    _state(
        "version",
        "filling",
        "stage -> ticket",
        0,
        "ticket of an F in flight that refreshes the cache itself; 0 if there is none",
        "check_forward commit_forward abort_forward",
    ),
    # order
    _state(
        "order",
        "token",
        "domain -> int",
        0,
        "the effect token: number of F and dI committed in the domain since the last restore",
        "commit_forward commit_dgrad restore",
    ),
    _state(
        "order",
        "position",
        "domain -> int",
        0,
        "number of F and dI committed in the domain in this walk over the microbatches; this "
        "number is the current position in the declared order",
        "commit_forward commit_dgrad next_walk commit_update restore",
    ),
    _state(
        "order",
        "busy",
        "domain -> ticket",
        0,
        "ticket of the F, dI, refresh or evaluation in flight in the domain; 0 if none is",
        "check_refresh commit_refresh abort_refresh check_forward commit_forward abort_forward "
        "check_evaluation commit_evaluation abort_evaluation check_dgrad commit_dgrad abort_dgrad",
    ),
    _state(
        "order",
        "poisoned",
        "domain -> flag",
        0,
        "1 after an F, dI, refresh or evaluation failed, until the next restore",
        "abort_refresh abort_forward abort_evaluation abort_dgrad restore",
    ),
    _state(
        "order",
        "forwards",
        "stage -> int",
        0,
        "number of F of the stage committed in this epoch",
        "commit_forward commit_update restore",
    ),
    _state(
        "order",
        "dgrads",
        "stage -> int",
        0,
        "number of dI of the stage committed in this walk over the microbatches, plus the cells "
        "that the walk leaves out",
        "skip commit_dgrad next_walk commit_update restore",
    ),
    _state(
        "order",
        "scaled_at",
        "slot -> int",
        0,
        "value of the domain's `rolled_at` just after F of the slot's latest tape; this value "
        "identifies the scales that the tape's dI must use",
        "commit_forward",
    ),
    _state(
        "order",
        "rolled_at",
        "domain -> int",
        0,
        "token at which the domain's current scales came into use: the token of the latest F or, "
        "if scales change once an epoch, the token at their latest change since a restore",
        "commit_forward move_scales restore",
    ),
    _state(
        "order",
        "drawn_at",
        "slot -> int",
        NEVER,
        "position of the random generator at which F of the slot's latest tape began to draw",
        "commit_forward",
    ),
    _state(
        "order",
        "drawn",
        "domain -> int",
        NEVER,
        "position of the random generator at which the domain's latest F began to draw; -1 if no "
        "F reported a position since the last restore",
        "commit_forward restore",
    ),
    _state(
        "order",
        "gathered",
        "domain -> flag",
        0,
        "if the domain's scales change once an epoch: 1 from the commit of an F until the scales "
        "change",
        "commit_forward move_scales restore",
    ),
    # arena
    _state(
        "arena",
        "bound",
        "cell -> int",
        NEVER,
        "epoch in which the cell's destination was last bound; -1 if it was not bound since the "
        "latest `next_walk` or restore",
        "bind next_walk restore",
    ),
    _state(
        "arena",
        "opened",
        "buffer -> int",
        NEVER,
        "epoch whose gradients the buffer holds; -1 if it holds none",
        "commit_wgrad restore",
    ),
    _state(
        "arena",
        "writing",
        "buffer -> ticket",
        0,
        "ticket of the dW in flight on the buffer; 0 if none is",
        "check_wgrad commit_wgrad abort_wgrad",
    ),
    # capture
    _state(
        "capture",
        "cursor",
        "pool -> int",
        0,
        "position of the pool's latest replayed graph in the pool's order of capture",
        "check_refresh check_forward check_dgrad check_wgrad",
    ),
    _state(
        "capture",
        "tenants",
        "pool -> int",
        0,
        "number of tapes that keep memory in the pool: a live tape counts from the check of its "
        "F, and an aborted tape counts while it is read or while another tape's dW uses it",
        "check_forward abort_forward abort_dgrad commit_wgrad abort_wgrad ungroup_wgrad "
        "finish_read drop restore",
    ),
    # completion
    _state(
        "completion",
        "submitted",
        "link -> int",
        0,
        "number of pieces of work that a replay must wait for: work that the caller enqueued, and "
        "ends of transfers and copies of inputs that were reported on the link",
        "reserve finish_receive finish_read submit restore",
    ),
    _state(
        "completion",
        "joined",
        "link -> int",
        0,
        "value of `submitted` when the graph stream last waited for the caller",
        "join restore",
    ),
    _state(
        "completion",
        "waited",
        "link -> int",
        0,
        "value of `replays` when the caller last waited for the graph stream",
        "wait restore",
    ),
    _state(
        "completion",
        "replays",
        "domain -> int",
        0,
        "number of replays enqueued on the domain's graph stream: every F, dI and dW, and every "
        "refresh and evaluation that succeeded",
        "commit_refresh commit_forward abort_forward commit_evaluation commit_dgrad abort_dgrad "
        "commit_wgrad abort_wgrad restore",
    ),
    _state(
        "completion",
        "undrained",
        "domain -> flag",
        0,
        "1 while the host has not yet seen all device work of the domain finish",
        "reserve commit_refresh abort_refresh commit_forward abort_forward commit_evaluation "
        "abort_evaluation commit_dgrad abort_dgrad commit_wgrad abort_wgrad post_receive read "
        "drain start_reduction start_weights_read start_gradients_read check_update commit_update "
        "abort_update",
    ),
    _state(
        "completion",
        "produced",
        "slot -> int",
        0,
        "number of the replay (as counted in `replays`) that last wrote the slot's output or "
        "input gradient",
        "commit_forward commit_dgrad restore",
    ),
    _state(
        "completion",
        "landed",
        "stage -> int",
        0,
        "number of the replay (as counted in `replays`) of the stage's latest dW",
        "commit_wgrad restore",
    ),
    _state(
        "completion",
        "vacated",
        "slot -> int",
        0,
        "number of the last replay (as counted in `replays`) that may use the slot's last tape",
        "abort_forward abort_dgrad commit_wgrad abort_wgrad ungroup_wgrad drop restore",
    ),
    _state(
        "completion",
        "ended_on",
        "slot -> link",
        None,
        "link on which the end of the slot's latest transfer, or its latest input copy, was "
        "reported; meaningless before the first report",
        "reserve finish_receive finish_read",
    ),
    _state(
        "completion",
        "ended_at",
        "slot -> int",
        0,
        "value of `submitted` of the link in `ended_on`, just after that end or copy was counted",
        "reserve finish_receive finish_read restore",
    ),
    _state(
        "completion",
        "named",
        "one -> int",
        NEVER,
        "last epoch in which a call named the stream that reads the gradients; -1 if no call did",
        "finalize finish_reduction finish_weights_read restore",
    ),
    _state(
        "completion",
        "consumer",
        "one -> caller",
        None,
        "the stream that was last named as the reader of the gradients; meaningless before the "
        "first such call",
        "finalize finish_reduction finish_weights_read",
    ),
    _state(
        "completion",
        "updater",
        "one -> caller",
        None,
        "the stream that the optimizer's latest update ran on; meaningless before the first update",
        "check_update",
    ),
    _state(
        "completion",
        "unawaited",
        "domain -> flag",
        0,
        "1 from the optimizer's latest update until the graph stream has waited for the update, "
        "or the host has seen the update finish",
        "join drain check_update commit_update abort_update",
    ),
    _state(
        "completion",
        "weights_read",
        "stage -> flag",
        0,
        "1 while a separate stream reads the stage's weights",
        "start_weights_read finish_weights_read restore",
    ),
    _state(
        "completion",
        "gradients_read",
        "stage -> flag",
        0,
        "1 while a separate stream reads the stage's gradients",
        "start_gradients_read finish_gradients_read restore",
    ),
    _state(
        "completion",
        "unseen",
        "link -> flag",
        0,
        "1 from the optimizer's latest update until the link's caller waits for the link's graph "
        "stream; the wait counts only if the graph stream has already waited for the update, or "
        "the host has seen the update finish",
        "wait check_update commit_update abort_update restore",
    ),
    _state(
        "completion",
        "unwaited",
        "domain -> flag",
        0,
        "1 after an evaluation, until the stream that reads the gradients has waited for the "
        "graph stream; also 1 after a finalize on a stream that has not yet waited for the latest "
        "replay",
        "commit_evaluation wait finalize",
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
        "last epoch in which the bucket's reduction finished; -1 if none did",
        "finish_reduction restore",
    ),
    _state(
        "reduction",
        "started",
        "one -> int",
        0,
        "number of reductions that started in this epoch",
        "start_reduction commit_update restore",
    ),
    # epoch
    _state(
        "epoch",
        "weight_epoch",
        "stage -> int",
        0,
        "number of optimizer updates that the stage's weights have had",
        "commit_update restore",
    ),
    _state(
        "epoch",
        "walk",
        "one -> int",
        0,
        "number of finished walks over the microbatches in this epoch; the buffers hold the "
        "gradients of these walks",
        "next_walk commit_update restore",
    ),
    _state(
        "epoch",
        "wgrads",
        "stage -> int",
        0,
        "number of dW of the stage committed in this walk over the microbatches, plus the cells "
        "that the walk leaves out",
        "skip commit_wgrad ungroup_wgrad next_walk commit_update restore",
    ),
    _state(
        "epoch",
        "spoiled",
        "stage -> int",
        NEVER,
        "last epoch that was spoiled for the stage, by a failure or by the loss of a weight cache "
        "in use; -1 if none was",
        "abort_forward abort_evaluation abort_dgrad abort_wgrad drop invalidate fail_reduction "
        "fail restore",
    ),
    _state(
        "epoch",
        "final",
        "stage -> int",
        NEVER,
        "last epoch in which `finalize` declared the stage's gradients complete; -1 if they are "
        "not complete in this walk over the microbatches",
        "abort_evaluation drop finalize fail_reduction next_walk fail restore",
    ),
    _state(
        "epoch",
        "optimizing",
        "one -> ticket",
        0,
        "ticket of the optimizer's update in flight; 0 if none is",
        "check_update commit_update abort_update",
    ),
    _state(
        "epoch",
        "half_updated",
        "one -> flag",
        0,
        "1 if some weights are updated and others not, or if wrong gradients updated the weights; "
        "set by a failed update or by a late fault of an epoch whose update had begun, and "
        "cleared by the next restore",
        "abort_update fail restore",
    ),
    _state(
        "epoch",
        "evaluating",
        "stage -> ticket",
        0,
        "ticket of the evaluation in flight; 0 if none is",
        "check_evaluation commit_evaluation abort_evaluation",
    ),
    _state(
        "epoch",
        "parts",
        "stage -> int",
        0,
        "total number of parts that the gradient weights of the epoch's microbatches must add up "
        "to; 0 before the epoch's first dI",
        "commit_dgrad commit_update restore",
    ),
    _state(
        "epoch",
        "unweighed",
        "stage -> int",
        0,
        "`parts` minus the sum of the gradient weights reported so far; negative if the sum is "
        "too large",
        "commit_dgrad restore",
    ),
    # persistence
    _state(
        "persistence",
        "incarnation",
        "one -> int",
        0,
        "the random number that every reference of this incarnation carries",
        "restore",
    ),
    # tickets
    _state(
        "tickets",
        "serial",
        "one -> int",
        0,
        "number of the last ticket issued; the number never decreases, not even at a restore",
        "check_refresh check_forward check_evaluation check_dgrad check_wgrad check_update",
    ),
)

#: The columns that a configuration gives. No transition writes them.
CONFIGURED: Final[tuple[StateColumn, ...]] = (
    _configured(
        "generation_max",
        "one -> generation",
        "the last generation that a slot may reach; a slot that has reached it takes no new tape",
    ),
    _configured("slot_stage", "slot -> stage", "stage that the slot belongs to"),
    _configured("domain_of", "stage -> domain", "state domain of the stage"),
    _configured(
        "domain_at",
        "link -> domain",
        "state domain whose graph stream the link connects to a caller",
    ),
    _configured("caller_at", "link -> caller", "caller's stream of the link"),
    _configured("owes", "stage -> mask", "consumers that a fresh tape waits for"),
    _configured(
        "receives",
        "stage -> mask",
        "messages, or the copy of the input, that a tape's F and dI need, with bits as in "
        "`arrived`; also 4 if another stage of the process makes the input, and 8 if another "
        "stage of the process makes the output's gradient",
    ),
    _configured("matrices", "stage -> opaque", "matrices that a dW must cover, each exactly once"),
    _configured(
        "cells",
        "stage -> int",
        "number of the stage's cells, which is also the number of its tapes per walk over the "
        "microbatches",
    ),
    _configured(
        "target_of",
        "stage -> stage",
        "the target: the stage of this process whose input is this stage's output; the stage "
        "itself if there is no target",
    ),
    _configured(
        "input_of",
        "cell -> cell",
        "cell of the source stage whose F makes the input of this cell's F; the cell itself if "
        "the stage has no source in this process",
    ),
    _configured(
        "gradient_of",
        "cell -> cell",
        "cell of the target stage (`target_of`) whose dI makes the gradient that this cell's dI "
        "uses; the cell itself if there is no target",
    ),
    _configured(
        "declared", "domain -> flag", "1 if the order of the domain's F and dI is declared"
    ),
    _configured(
        "epoch_scales",
        "domain -> flag",
        "1 if the domain's scales change once an epoch, in the update, and not with F and dI",
    ),
    _configured("forward_at", "cell -> int", "declared position of the cell's F"),
    _configured("dgrad_at", "cell -> int", "declared position of the cell's dI"),
    _configured(
        "destination_of",
        "cell -> opaque",
        "gradient destination of the cell, compared for equality",
    ),
    _configured("buffer_of", "cell -> buffer", "buffer that contains the cell's destination"),
    _configured(
        "keeper_of",
        "buffer -> cell",
        "cell that writes the buffer in every walk over the microbatches; no walk leaves this cell "
        "out",
    ),
    _configured(
        "shared_of",
        "buffer -> buffer",
        "buffer of the tied destinations: dW of the stage and dW of its sharer both write this "
        "buffer; the buffer itself if the stage has no sharer",
    ),
    _configured(
        "sharer_of",
        "stage -> stage",
        "the sharer: the other stage that writes the stage's tied destinations; the stage itself "
        "if there is no sharer",
    ),
    _configured("pool_of", "slot -> pool", "capture pool of the slot's graphs"),
    _configured(
        "forward_rank",
        "slot -> int",
        "position of the slot's F graph in its pool's order of capture",
    ),
    _configured(
        "dgrad_rank",
        "slot -> int",
        "position of the slot's dI graph in its pool's order of capture",
    ),
    _configured(
        "wgrad_rank",
        "slot -> int",
        "position of the slot's dW graph in its pool's order of capture",
    ),
    _configured(
        "refresh_pool",
        "stage -> pool",
        "capture pool of the graph of the stage's refresh; the pool of the stage's first slot if "
        "`refresh_rank` is -1",
    ),
    _configured(
        "refresh_rank",
        "stage -> int",
        "position of the stage's refresh graph in the capture order of `refresh_pool`; -1 if the "
        "graph was captured in a pool of its own",
    ),
    _configured(
        "reports_fills",
        "stage -> flag",
        "1 if the backend reports which matrices' caches a refresh filled, and from which weights",
    ),
    _configured(
        "reports_updates",
        "stage -> flag",
        "1 if the backend reports how often an F or dI updated scales",
    ),
    _configured(
        "live_scales",
        "stage -> flag",
        "1 if dI reads live scales: the scales that its domain has when dI runs",
    ),
    _configured(
        "carried_scales",
        "stage -> flag",
        "1 if a tape carries the scales of its F, and dI reports which scales it used",
    ),
    _configured(
        "reports_draws",
        "stage -> flag",
        "1 if the backend reports where F began to draw random numbers",
    ),
    _configured(
        "recomputes_draws",
        "stage -> flag",
        "1 if dI recomputes F, and the backend reports where the recomputation began to draw",
    ),
    _configured(
        "reports_weights",
        "stage -> flag",
        "1 if the backend reports the weight of each microbatch's gradient",
    ),
    _configured(
        "stage_at",
        "bucket -> stage",
        "stage whose gradients the bucket holds; buckets that are never reduced have no entry",
    ),
    _configured(
        "tied_at",
        "bucket -> stage",
        "the other stage that writes the bucket; the stage in `stage_at` if there is no other",
    ),
    _configured(
        "reduce_at",
        "bucket -> int",
        "declared position of the bucket's reduction among the reductions of an epoch",
    ),
    _configured("ordered", "one -> flag", "1 if the order of reductions is declared"),
)
