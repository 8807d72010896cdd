"""
When a check must be accepted. This is the converse of the promises: it shows that no guard is too
strong.

Each predicate states one condition of a legal action, in terms of the world (what really happened
on the device; `spec/world.py`), the configuration and the arguments. If all predicates of a
transition hold, every guard accepts the transition. Legality is defined without the guards: by what
ran, what buffers and caches hold, and which streams waited for which. So the proof finds every
guard that is stronger than necessary, and no test is needed for this.
"""

from __future__ import annotations

from ..constants import (
    ADDS,
    BACK_BIT,
    GROUP_BIT,
    INPUT_BITS,
    JOINS,
    NEVER,
    NO_RANK,
    NO_SLOT,
    OPENS,
    RESERVED,
    SOURCE_BIT,
    TARGET_BIT,
)
from ..predicates import Register, implies
from ..world import WGRAD
from .words import Args, History, Index, State, Truth

__all__ = ["LEGAL"]

#: Proved: a transition is accepted if all its predicates here hold.
LEGAL = Register()


# The work, and the slot that it is in


@LEGAL("ownership.good-reference", "check_dgrad", "check_wgrad", "group_wgrad")
def good_reference(st: State, h: History, a: Args) -> Truth:
    """The reference was issued for the given key, and the work that the reference names still
    exists."""
    mine = (
        (a.ref.slot == h.ref_slot[0])
        & (a.ref.generation == h.ref_generation[0])
        & (a.ref.incarnation == h.ref_incarnation[0])
    )
    named = (a.key.cell == h.ref_cell[0]) & (a.key.epoch == h.ref_epoch[0])
    return mine & named & (h.issued[0] == 1) & (h.dead[0] == 0)


@LEGAL("ownership.dgrad-next", "check_dgrad")
def dgrad_next(st: State, h: History, a: Args) -> Truth:
    """In this walk over the microbatches, the key's F has succeeded and its dI has not."""
    return (h.ran_forward[a.key.cell] == 1) & (h.ran_dgrad[a.key.cell] == 0)


@LEGAL("ownership.wgrad-next", "check_wgrad", "group_wgrad")
def wgrad_next(st: State, h: History, a: Args) -> Truth:
    """In this walk over the microbatches, the key's dI has succeeded and its dW has not. No other
    dW has taken the key's tape."""
    alone = (h.moving[a.ref.slot] & GROUP_BIT) == 0
    return (h.ran_dgrad[a.key.cell] == 1) & (h.ran_wgrad[a.key.cell] == 0) & alone


@LEGAL("ownership.vacant-slot", "check_forward")
def vacant_slot(st: State, h: History, a: Args) -> Truth:
    """The slot belongs to the key's stage, and no action is in flight on it. The slot is free, or
    the key has claimed it."""
    claimed = (h.owing[a.slot] == RESERVED) & (h.tenant[a.slot] == a.key.cell)
    own = claimed & (h.tenant_epoch[a.slot] == a.key.epoch)
    ours = (a.slot != NO_SLOT) & (st.slot_stage[a.slot] == a.key.stage)
    return ours & (h.acting[a.slot] == 0) & ((h.owing[a.slot] == 0) | own)


@LEGAL("ownership.lives-once", "check_forward", s="slot")
def lives_once(st: State, h: History, a: Args, s: Index) -> Truth:
    """No other slot holds live work of the key's cell (a key without its epoch)."""
    return implies((h.owing[s] != 0) & (h.tenant[s] == a.key.cell), s == a.slot)


@LEGAL("ownership.forward-next", "check_forward")
def forward_next(st: State, h: History, a: Args) -> Truth:
    """In this walk over the microbatches, the key's F has not run and the key is not left out.
    Neither a failure nor the loss of a weight cache in use has spoiled the epoch of the key's
    stage."""
    sound = (h.spoiled[a.key.stage] != a.key.epoch) & (h.lost_in_use[a.key.stage] != a.key.epoch)
    return (h.ran_forward[a.key.cell] == 0) & (h.skipped[a.key.cell] == 0) & sound


@LEGAL("ownership.generation-left", "check_forward")
def generation_left(st: State, h: History, a: Args) -> Truth:
    """The slot's generation (count of releases) is below the configured maximum."""
    return st.generation[a.slot] != st.generation_max[0]


@LEGAL("ownership.input-there", "check_forward")
def input_there(st: State, h: History, a: Args) -> Truth:
    """No transfer is under way in the slot. If F needs an input, the input has arrived in the slot
    or its copy was enqueued."""
    arrived = (h.arrived[a.slot] & INPUT_BITS) != 0
    wanted = (st.receives[a.key.stage] & INPUT_BITS) != 0
    return (h.moving[a.slot] == 0) & implies(wanted, arrived)


@LEGAL("ownership.input-in-source", "check_forward")
def input_in_source(st: State, h: History, a: Args) -> Truth:
    """If stage A of the process makes the input of the key's stage, A has run the F of the same
    microbatch but not the dI. No failure has spoiled A's epoch."""
    c, fed = st.input_of[a.key.cell], (st.receives[a.key.stage] & SOURCE_BIT) != 0
    sound = h.spoiled[st.stage_of[c]] != a.key.epoch
    return implies(fed, (h.ran_forward[c] == 1) & (h.ran_dgrad[c] == 0) & sound)


@LEGAL("ownership.gradient-from-target", "check_dgrad")
def gradient_from_target(st: State, h: History, a: Args) -> Truth:
    """If the key's stage makes the input of stage B of the process, B has run the dI of the same
    microbatch. Neither a failure nor the loss of a weight cache in use has spoiled B's epoch."""
    c, feeds = st.gradient_of[a.key.cell], (st.receives[a.key.stage] & TARGET_BIT) != 0
    g = st.target_of[a.key.stage]
    sound = (h.spoiled[g] != a.key.epoch) & (h.lost_in_use[g] != a.key.epoch)
    return implies(feeds, (h.ran_dgrad[c] == 1) & sound)


@LEGAL("ownership.gradient-there", "check_dgrad")
def gradient_there(st: State, h: History, a: Args) -> Truth:
    """No receive of the output's gradient is under way. If dI needs this gradient, it has
    arrived."""
    s = a.ref.slot
    wanted = (st.receives[a.key.stage] & BACK_BIT) != 0
    return ((h.moving[s] & BACK_BIT) == 0) & implies(wanted, (h.arrived[s] & BACK_BIT) != 0)


# The weights and their caches


@LEGAL("version.of-these-weights", "check_forward")
def of_these_weights(st: State, h: History, a: Args) -> Truth:
    """The key names the epoch of the current weights."""
    return a.key.epoch == h.weights[0]


@LEGAL(
    "epoch.on-whole-weights",
    "check_refresh",
    "check_forward",
    "check_dgrad",
    "check_wgrad",
)
def whole_weights(st: State, h: History, a: Args) -> Truth:
    """No update is in flight, and no weights are half updated."""
    return (h.optimizing[0] == 0) & (h.half_updated[0] == 0)


@LEGAL("version.cache-read-or-filled", "check_forward")
def cache_read_or_filled(st: State, h: History, a: Args) -> Truth:
    """Either the stage's weight cache holds the current weights, and F does not refresh it. Or the
    cache lacks the current weights, and F is the stage's first of the epoch and refreshes the
    cache."""
    s = a.key.stage
    current = h.cached[s] == h.weights[0]
    filled = (h.fill_of_epoch[s] == NEVER) & (h.forwards_of_epoch[s] == 0)
    return (current & (a.refresh == 0)) | (
        (h.cached[s] != h.weights[0]) & (a.refresh != 0) & filled
    )


@LEGAL("version.cache-of-dgrad", "check_dgrad")
def cache_of_dgrad(st: State, h: History, a: Args) -> Truth:
    """The stage's weight cache holds the current weights."""
    return h.cached[a.key.stage] == h.weights[0]


@LEGAL("version.stale-cache", "check_refresh")
def stale_cache(st: State, h: History, a: Args) -> Truth:
    """
    The stage's weight cache lacks the current weights, and the stage has run no F in this epoch.
    """
    return (h.cached[a.stage] != h.weights[0]) & (h.forwards_of_epoch[a.stage] == 0)


@LEGAL("version.no-fill-waits", "check_forward", "check_dgrad", g="stage")
def no_fill_waits(st: State, h: History, a: Args, g: Index) -> Truth:
    """Each other stage of the domain satisfies one of two conditions. It has begun its first F of
    the epoch. Or its weight cache still lacks the current weights, and was not lost since its
    latest fill."""
    other = (st.domain_of[g] == st.domain_of[a.key.stage]) & (g != a.key.stage)
    return implies(
        other & (h.fill_of_epoch[g] == NEVER), (h.cached[g] != h.weights[0]) & (h.lost[g] == 0)
    )


@LEGAL("version.no-fill-waits-for-refresh", "check_refresh", g="stage")
def no_fill_waits_for_refresh(st: State, h: History, a: Args, g: Index) -> Truth:
    """Each other stage of the domain satisfies one of two conditions. It has begun its first F of
    the epoch. Or its weight cache still lacks the current weights, and was not lost since its
    latest fill."""
    other = (st.domain_of[g] == st.domain_of[a.stage]) & (g != a.stage)
    return implies(
        other & (h.fill_of_epoch[g] == NEVER), (h.cached[g] != h.weights[0]) & (h.lost[g] == 0)
    )


@LEGAL("version.evaluation-finds-cache", "check_evaluation")
def evaluation_finds_cache(st: State, h: History, a: Args) -> Truth:
    """If the evaluation reads the stage's weight cache, this cache holds the current weights."""
    return implies(a.cached != 0, h.cached[a.stage] == h.weights[0])


@LEGAL("version.no-fill-waits-for-evaluation", "check_evaluation", g="stage")
def no_fill_waits_for_evaluation(st: State, h: History, a: Args, g: Index) -> Truth:
    """Each stage of the domain satisfies one of two conditions. It has begun its first F of the
    epoch. Or its weight cache still lacks the current weights, and was not lost since its latest
    fill."""
    waits = (st.domain_of[g] == st.domain_of[a.stage]) & (h.fill_of_epoch[g] == NEVER)
    return implies(waits, (h.cached[g] != h.weights[0]) & (h.lost[g] == 0))


# The update of the weights


@LEGAL("epoch.nothing-updates", "check_evaluation")
def nothing_updates(st: State, h: History, a: Args) -> Truth:
    """No update of the weights is in flight, no weights are half updated, and no other evaluation
    of the stage is in flight."""
    whole = (h.optimizing[0] == 0) & (h.half_updated[0] == 0)
    return whole & (h.evaluating[a.stage] == 0)


# Scaling state


@LEGAL("order.whole-and-idle", "check_forward", "check_dgrad")
def whole_and_idle(st: State, h: History, a: Args) -> Truth:
    """In the domain, no F, dI, refresh or evaluation is in flight. None of them has failed since
    the last restore. The presented token counts all F and dI of the domain since that restore."""
    d = st.domain_of[a.key.stage]
    return (h.broken[d] == 0) & (h.running[d] == 0) & (a.token == h.updates[d])


@LEGAL("order.whole-and-idle-for-refresh", "check_refresh", "check_evaluation")
def whole_and_idle_for_refresh(st: State, h: History, a: Args) -> Truth:
    """In the domain, no F, dI, refresh or evaluation is in flight. None of them has failed since
    the last restore."""
    d = st.domain_of[a.stage]
    return (h.broken[d] == 0) & (h.running[d] == 0)


@LEGAL("order.forward-in-place", "check_forward")
def forward_in_place(st: State, h: History, a: Args) -> Truth:
    """If the domain declares the order of its F and dI, this F is next in that order."""
    d = st.domain_of[a.key.stage]
    return implies(st.declared[d] != 0, st.forward_at[a.key.cell] == h.updates_of_walk[d])


@LEGAL("order.dgrad-in-place", "check_dgrad")
def dgrad_in_place(st: State, h: History, a: Args) -> Truth:
    """If the domain declares the order of its F and dI, this dI is next in that order."""
    d = st.domain_of[a.key.stage]
    return implies(st.declared[d] != 0, st.dgrad_at[a.key.cell] == h.updates_of_walk[d])


@LEGAL("order.scales-of-now", "check_dgrad")
def scales_of_now(st: State, h: History, a: Args) -> Truth:
    """If dI reads live scales (the domain's current scales), these are still the scales of its own
    tape's F. No later F and no update has changed them."""
    d = st.domain_of[a.key.stage]
    return implies(st.live_scales[a.key.stage] != 0, h.rolls_seen[a.ref.slot] == h.rolls[d])


@LEGAL("order.gathered-in-update", "move_scales")
def gathered_in_update(st: State, h: History, a: Args) -> Truth:
    """An update is in flight, and an F or dI has gathered maxima (amax) since the scales last
    changed."""
    return (h.optimizing[0] == 1) & (h.gathers[st.domain_of[a.stage]] != 0)


@LEGAL("order.one-movement", "move_scales")
def one_movement(st: State, h: History, a: Args) -> Truth:
    """If the backend reports how often the scales changed, it reports exactly one change."""
    return implies(st.reports_updates[a.stage] != 0, a.updates == 1)


# Destinations


@LEGAL("arena.bound", "check_dgrad")
def bound(st: State, h: History, a: Args) -> Truth:
    """The key's gradient destination was bound exactly once in this walk over the microbatches."""
    return h.binds[a.key.cell] == 1


@LEGAL("arena.own-destination", "check_wgrad")
def own_destination(st: State, h: History, a: Args) -> Truth:
    """The destination is the key's configured one. No other dW is writing the stage's own buffer or
    the shared buffer. The dW adds to a buffer that holds gradients of the key's epoch, and
    overwrites any other buffer."""
    c = a.key.cell
    own, shared = st.buffer_of[c], st.shared_of[st.buffer_of[c]]
    adds = (a.first == ADDS) | (a.first == OPENS)
    joins = (a.first == ADDS) | (a.first == JOINS)
    fresh = (adds == (h.content[own] == a.key.epoch)) & (
        joins == (h.content[shared] == a.key.epoch)
    )
    idle = (h.writers[own] == 0) & (h.writers[shared] == 0)
    return (a.destination == st.destination_of[c]) & idle & fresh


@LEGAL("arena.with-its-leader", "group_wgrad")
def with_its_leader(st: State, h: History, a: Args) -> Truth:
    """The ticket belongs to a dW in flight on the first tape of the group. The first tape and the
    further tape belong to one stage and one gradient buffer. The destination is the key's
    configured one, and no action is in flight on the further tape."""
    running = (h.outstanding[0] == WGRAD) & (a.ticket == h.ticket[0]) & (a.ticket != 0)
    idle = h.acting[a.ref.slot] == 0
    here = (h.ticket_slot[0] == a.leader) & (st.slot_stage[a.leader] == a.key.stage)
    same = st.buffer_of[h.tenant[a.leader]] == st.buffer_of[a.key.cell]
    return running & idle & here & same & (a.destination == st.destination_of[a.key.cell])


@LEGAL("order.with-its-scales", "group_wgrad")
def with_its_scales(st: State, h: History, a: Args) -> Truth:
    """The F of the further tape and the F of the group's first tape ran with the same scales."""
    return h.scaled_by[a.ref.slot] == h.scaled_by[a.leader]


@LEGAL("arena.epoch-sound", "check_wgrad", "group_wgrad")
def epoch_sound(st: State, h: History, a: Args) -> Truth:
    """No failure has spoiled the stage's epoch, and the stage's weight cache was not lost in this
    epoch while the stage still needed it."""
    return (h.spoiled[a.key.stage] != a.key.epoch) & (h.lost_in_use[a.key.stage] != a.key.epoch)


# Capture memory


@LEGAL("capture.refresh-later", "check_refresh")
def refresh_later(st: State, h: History, a: Args) -> Truth:
    """One of three conditions holds. The refresh's graph has a capture pool of its own. Or no tape
    keeps memory in the graph's pool. Or the graph was captured after the graph that the pool
    replayed last."""
    p, rank = st.refresh_pool[a.stage], st.refresh_rank[a.stage]
    return (rank == NO_RANK) | (h.tapes[p] == 0) | (h.last_rank[p] < rank)


@LEGAL("capture.forward-later", "check_forward")
def forward_later(st: State, h: History, a: Args) -> Truth:
    """Either no tape keeps memory in the slot's capture pool, or the slot's F graph was captured
    after the graph that this pool replayed last."""
    p = st.pool_of[a.slot]
    return (h.tapes[p] == 0) | (h.last_rank[p] < st.forward_rank[a.slot])


@LEGAL("capture.dgrad-later", "check_dgrad")
def dgrad_later(st: State, h: History, a: Args) -> Truth:
    """The slot's dI graph was captured after the graph that the slot's capture pool replayed
    last."""
    s = a.ref.slot
    return h.last_rank[st.pool_of[s]] < st.dgrad_rank[s]


@LEGAL("capture.wgrad-later", "check_wgrad", "group_wgrad")
def wgrad_later(st: State, h: History, a: Args) -> Truth:
    """The slot's dW graph was captured after the graph that the slot's capture pool replayed
    last."""
    s = a.ref.slot
    return h.last_rank[st.pool_of[s]] < st.wgrad_rank[s]


# Streams


@LEGAL("completion.caller-awaited", "check_forward", "check_dgrad", "check_wgrad", "group_wgrad")
def caller_awaited(st: State, h: History, a: Args) -> Truth:
    """The link belongs to the stage's domain, and this domain's graph stream has waited for all
    work of the link's caller."""
    return (st.domain_at[a.link] == st.domain_of[a.key.stage]) & (h.behind[a.link] == 0)


@LEGAL("completion.caller-awaited-for-refresh", "check_refresh", "check_evaluation")
def caller_awaited_for_refresh(st: State, h: History, a: Args) -> Truth:
    """The link belongs to the stage's domain, and this domain's graph stream has waited for all
    work of the link's caller."""
    return (st.domain_at[a.link] == st.domain_of[a.stage]) & (h.behind[a.link] == 0)


@LEGAL("completion.update-awaited", "check_forward")
def update_awaited(st: State, h: History, a: Args) -> Truth:
    """The domain's graph stream has waited for the optimizer's latest update, or the host has seen
    the update finish."""
    return h.updating[st.domain_of[a.key.stage]] == 0


@LEGAL("completion.update-awaited-for-refresh", "check_refresh", "check_evaluation")
def update_awaited_for_refresh(st: State, h: History, a: Args) -> Truth:
    """The domain's graph stream has waited for the optimizer's latest update, or the host has seen
    the update finish."""
    return h.updating[st.domain_of[a.stage]] == 0


@LEGAL("completion.transfers-awaited", "check_forward")
def transfers_awaited(st: State, h: History, a: Args) -> Truth:
    """The graph stream has waited for the end of the slot's latest transfer or for the slot's
    latest input copy, whichever came last."""
    return h.last_end[a.slot] <= h.heard[h.last_end_on[a.slot]]


@LEGAL("completion.message-awaited", "check_dgrad")
def message_awaited(st: State, h: History, a: Args) -> Truth:
    """If dI uses a received gradient, the graph stream has waited for the end of the slot's latest
    transfer or copy."""
    s = a.ref.slot
    wanted = (st.receives[a.key.stage] & BACK_BIT) != 0
    return implies(wanted, h.last_end[s] <= h.heard[h.last_end_on[s]])


@LEGAL("completion.forward-awaited", "check_dgrad")
def forward_awaited(st: State, h: History, a: Args) -> Truth:
    """The stream of the link's caller has waited for the tape's F."""
    return (a.link == h.link[0]) & (a.ref.slot == h.slot[0]) & (h.seen[0] == 1)
