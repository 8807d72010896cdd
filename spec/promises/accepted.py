"""
Promises to the caller: what is true of the world (real work, buffers, streams) when a transition is
accepted.

Each promise names its transitions, and holds whenever one of them is accepted. In short: an
accepted action finds the work of its own key and the weights that the key names. A stage becomes
final, and the weights change, only when every gradient is complete. A checkpoint is taken only when
nothing is under way. The commit or abort of an action is accepted once.
"""

from __future__ import annotations

from ..constants import (
    ADDS,
    BACK_BIT,
    GRAD_BIT,
    GROUP_BIT,
    IN_BIT,
    INPUT_BITS,
    JOINS,
    NEVER,
    NO_SLOT,
    OPENS,
    OUT_BIT,
    RESERVED,
    SOURCE_BIT,
    TARGET_BIT,
)
from ..predicates import Register, implies
from ..world import DGRAD, DONE, EVALUATION, FORWARD, NONE, REFRESH, RUNNING, UPDATE, WGRAD
from .words import Args, History, Index, State, Truth

__all__ = ["STEPS"]

#: Proved: each predicate holds of the world whenever one of its transitions is accepted.
STEPS = Register()


# An action on a tape: the right work, weights, scaling state and destination


@STEPS(
    "ownership.right-reference",
    "check_dgrad",
    "check_wgrad",
    "group_wgrad",
    "post_receive",
    "read",
    "drop",
)
def right_reference(st: State, h: History, a: Args) -> Truth:
    """A call presents a key and a reference together. The call is accepted only if the reference
    was issued for this key. The work that the reference names must still exist."""
    mine = (
        (a.ref.slot == h.ref_slot[0])
        & (a.ref.generation == h.ref_generation[0])
        & (a.ref.incarnation == h.ref_incarnation[0])
    )
    named = (a.key.cell == h.ref_cell[0]) & (a.key.epoch == h.ref_epoch[0])
    return implies(mine, (h.issued[0] == 1) & (h.dead[0] == 0) & named)


@STEPS(
    "ownership.right-work",
    "check_dgrad",
    "check_wgrad",
    "group_wgrad",
    "post_receive",
    "read",
    "drop",
)
def right_work(st: State, h: History, a: Args) -> Truth:
    """A dI, dW, receive, read or drop is accepted only if the slot of its reference holds live work
    of its key. No action may be in flight on that slot."""
    s = a.ref.slot
    mine = (h.tenant[s] == a.key.cell) & (h.tenant_epoch[s] == a.key.epoch)
    return mine & (h.owing[s] != 0) & (h.acting[s] == 0)


@STEPS("ownership.reference-of-transfer", "finish_receive", "finish_read", "ungroup_wgrad")
def reference_of_transfer(st: State, h: History, a: Args) -> Truth:
    """Three calls end a receive, a read, or a tape's part in a grouped dW (one product for several
    tapes). Each call is accepted only with a reference that was issued for the given key. The work
    that the reference names may already be gone."""
    mine = (
        (a.ref.slot == h.ref_slot[0])
        & (a.ref.generation == h.ref_generation[0])
        & (a.ref.incarnation == h.ref_incarnation[0])
    )
    named = (a.key.cell == h.ref_cell[0]) & (a.key.epoch == h.ref_epoch[0])
    return implies(mine, (h.issued[0] == 1) & named)


@STEPS("ownership.end-of-read", "finish_read")
def end_of_read(st: State, h: History, a: Args) -> Truth:
    """The end of a read is accepted only if a read of the given buffer (output or input gradient)
    is under way in the key's slot. No action may be in flight on the slot."""
    s = a.ref.slot
    mine = (h.tenant[s] == a.key.cell) & (h.tenant_epoch[s] == a.key.epoch)
    one = (a.bit == OUT_BIT) | (a.bit == GRAD_BIT)
    return mine & one & ((h.moving[s] & a.bit) != 0) & (h.acting[s] == 0)


@STEPS("ownership.end-of-group", "ungroup_wgrad")
def end_of_group(st: State, h: History, a: Args) -> Truth:
    """A tape leaves a grouped dW (one product for several tapes) only if the tape's slot holds work
    of the given key and belongs to the group. No action may be in flight on the slot."""
    s = a.ref.slot
    mine = (h.tenant[s] == a.key.cell) & (h.tenant_epoch[s] == a.key.epoch)
    return mine & ((h.moving[s] & GROUP_BIT) != 0) & (h.acting[s] == 0)


@STEPS("ownership.end-of-receive", "finish_receive")
def end_of_receive(st: State, h: History, a: Args) -> Truth:
    """The end of a receive is accepted only if a receive of the given message is under way into the
    key's slot. No action may be in flight on the slot."""
    s = a.ref.slot
    mine = (h.tenant[s] == a.key.cell) & (h.tenant_epoch[s] == a.key.epoch)
    one = (a.message == IN_BIT) | (a.message == BACK_BIT)
    return mine & one & ((h.moving[s] & a.message) != 0) & (h.acting[s] == 0)


@STEPS("ownership.receive-once", "post_receive")
def receive_once(st: State, h: History, a: Args) -> Truth:
    """A receive is posted only if the stage is configured to receive the message, and only once per
    tape and message. The input is received before F. The output's gradient is received after F and
    before dI."""
    s, c = a.ref.slot, a.key.cell
    new = ((h.moving[s] & a.message) == 0) & ((h.arrived[s] & a.message) == 0)
    early = implies(a.message == IN_BIT, h.ran_forward[c] == 0)
    between = (h.ran_forward[c] == 1) & (h.ran_dgrad[c] == 0)
    wanted = (st.receives[a.key.stage] & a.message) != 0
    return new & early & wanted & implies(a.message == BACK_BIT, between)


@STEPS("ownership.input-arrived", "check_forward")
def input_arrived(st: State, h: History, a: Args) -> Truth:
    """Some stages receive or copy their input. The F of such a stage runs only in the slot that the
    F's key has claimed. Before F, the input must have arrived in this slot, or the copy must be
    enqueued."""
    claimed = (h.tenant[a.slot] == a.key.cell) & (h.tenant_epoch[a.slot] == a.key.epoch)
    there = ((h.arrived[a.slot] & INPUT_BITS) != 0) & claimed & (h.owing[a.slot] != 0)
    return implies((st.receives[a.key.stage] & INPUT_BITS) != 0, there)


@STEPS("ownership.gradient-arrived", "check_dgrad")
def gradient_arrived(st: State, h: History, a: Args) -> Truth:
    """If a stage receives the gradient of its output as a message, dI runs only after this gradient
    has arrived in the tape's slot."""
    there = (h.arrived[a.ref.slot] & BACK_BIT) != 0
    return implies((st.receives[a.key.stage] & BACK_BIT) != 0, there)


@STEPS("ownership.input-made", "check_forward")
def input_made(st: State, h: History, a: Args) -> Truth:
    """Suppose that stage A of the process makes the input of stage B. B's F of a microbatch then
    runs only after A's F of that microbatch."""
    fed = (st.receives[a.key.stage] & SOURCE_BIT) != 0
    return implies(fed, h.ran_forward[st.input_of[a.key.cell]] == 1)


@STEPS("ownership.gradient-made", "check_dgrad")
def gradient_made(st: State, h: History, a: Args) -> Truth:
    """Suppose that stage A of the process makes the input of stage B. A's dI of a microbatch then
    runs only after B's dI of that microbatch."""
    feeds = (st.receives[a.key.stage] & TARGET_BIT) != 0
    return implies(feeds, h.ran_dgrad[st.gradient_of[a.key.cell]] == 1)


@STEPS("ownership.read-before-arrival", "finish_receive")
def read_before_arrival(st: State, h: History, a: Args) -> Truth:
    """One stage of the process may send a message to another. The receive of such a message ends on
    a live tape only after the sending stage has begun to read the message from its own slot."""
    c, needs = a.key.cell, st.receives[a.key.stage]
    alive = h.owing[a.ref.slot] != 0
    forward = alive & (a.message == IN_BIT) & ((needs & SOURCE_BIT) != 0)
    back = alive & (a.message == BACK_BIT) & ((needs & TARGET_BIT) != 0)
    return implies(forward, h.output_read[st.input_of[c]] == 1) & implies(
        back, h.gradient_read[st.gradient_of[c]] == 1
    )


@STEPS("ownership.nothing-moves", "reserve", "check_forward")
def nothing_moves(st: State, h: History, a: Args) -> Truth:
    """A slot is reserved, or given to an F, only while no transfer is under way on the slot.
    Transfers are receives, reads and grouped dW (one product for several tapes)."""
    return h.moving[a.slot] == 0


@STEPS("ownership.no-gradient-moves", "check_dgrad")
def no_gradient_moves(st: State, h: History, a: Args) -> Truth:
    """No dI runs in a slot while the gradient of the slot's output is being received, or while its
    input gradient is being read."""
    return (h.moving[a.ref.slot] & (BACK_BIT | GRAD_BIT)) == 0


@STEPS("ownership.right-consumer", "read")
def right_consumer(st: State, h: History, a: Args) -> Truth:
    """A read of an output begins only after F, and a read of an input gradient only after dI. The
    reader must be configured, and it reads each of these buffers only once per tape."""
    s = a.ref.slot
    one = ((a.bit == OUT_BIT) | (a.bit == GRAD_BIT)) & ((h.moving[s] & a.bit) == 0)
    there = implies(a.bit == GRAD_BIT, h.ran_dgrad[a.key.cell] == 1)
    return one & ((h.owing[s] & a.bit) != 0) & (h.ran_forward[a.key.cell] == 1) & there


@STEPS("ownership.dgrad-after-forward", "check_dgrad")
def dgrad_after_forward(st: State, h: History, a: Args) -> Truth:
    """A key's dI runs only if, in this walk over the microbatches, the key's F has succeeded and
    its dI has not."""
    return (h.ran_forward[a.key.cell] == 1) & (h.ran_dgrad[a.key.cell] == 0)


@STEPS("ownership.wgrad-after-dgrad", "check_wgrad", "group_wgrad")
def wgrad_after_dgrad(st: State, h: History, a: Args) -> Truth:
    """A dW takes a key's work only if, in this walk over the microbatches, the key's dI has
    succeeded and its dW has not. The dI has queued work for every matrix of the stage."""
    once = (h.ran_dgrad[a.key.cell] == 1) & (h.ran_wgrad[a.key.cell] == 0)
    return once & (h.queued[a.ref.slot] == st.matrices[a.key.stage])


@STEPS("ownership.one-dw-takes-it", "check_wgrad", "group_wgrad")
def one_dw_takes_it(st: State, h: History, a: Args) -> Truth:
    """One dW may take several tapes (a grouped dW). A dW takes a tape only if no other dW has taken
    that tape already."""
    return (h.moving[a.ref.slot] & GROUP_BIT) == 0


@STEPS("ownership.never-preempted", "reserve", "check_forward")
def never_preempted(st: State, h: History, a: Args) -> Truth:
    """A reservation or an F gets either a free slot of its key's stage or the slot that its key has
    already claimed."""
    claimed = (h.owing[a.slot] == RESERVED) & (h.tenant[a.slot] == a.key.cell)
    own = claimed & (h.tenant_epoch[a.slot] == a.key.epoch)
    vacant = (h.owing[a.slot] == 0) | own
    return (a.slot != NO_SLOT) & vacant & (st.slot_stage[a.slot] == a.key.stage)


@STEPS("ownership.claimed-once", "reserve")
def claimed_once(st: State, h: History, a: Args) -> Truth:
    """A reservation claims only a free slot."""
    return h.owing[a.slot] == 0


@STEPS("ownership.forward-once", "reserve", "check_forward")
def forward_once(st: State, h: History, a: Args) -> Truth:
    """A key gets a slot, or runs F, only if no F of the key has succeeded in this walk over the
    microbatches. Clause `ownership.repeated-forward` also refuses a key whose F was aborted."""
    return h.ran_forward[a.key.cell] == 0


@STEPS("ownership.left-out-stays-out", "reserve", "skip", "check_forward")
def left_out_stays_out(st: State, h: History, a: Args) -> Truth:
    """`skip` leaves a key out of the current walk (pass over the microbatches). For this walk, the
    contract then refuses to reserve a slot for the key, to run the key's F, and to skip the key
    again."""
    return h.skipped[a.key.cell] == 0


@STEPS("ownership.left-out-first", "skip", c="cell")
def left_out_first(st: State, h: History, a: Args, c: Index) -> Truth:
    """A key can be left out of a walk over the microbatches only while no F of that walk has
    succeeded."""
    return h.ran_forward[c] == 0


@STEPS(
    "version.weights-of-the-key",
    "reserve",
    "skip",
    "bind",
    "check_forward",
    "check_dgrad",
    "check_wgrad",
    "group_wgrad",
)
def weights_of_the_key(st: State, h: History, a: Args) -> Truth:
    """A reservation, skip, bind, F, dI or dW is accepted only if its key names the epoch of the
    current weights."""
    return a.key.epoch == h.weights[0]


@STEPS("version.cache-of-the-key", "check_forward")
def cache_of_the_key(st: State, h: History, a: Args) -> Truth:
    """If an F does not refresh its stage's weight cache, that cache holds the weights of the epoch
    that the F's key names."""
    return implies(a.refresh == 0, h.cached[a.key.stage] == a.key.epoch)


@STEPS("version.evaluation-of-these-weights", "check_evaluation")
def evaluation_of_these_weights(st: State, h: History, a: Args) -> Truth:
    """If an evaluation reads its stage's weight cache, that cache holds the current weights."""
    return implies(a.cached != 0, h.cached[a.stage] == h.weights[0])


@STEPS("version.no-evaluation-after-fill", "check_evaluation", needs="order", g="stage")
def no_evaluation_after_fill(st: State, h: History, a: Args, g: Index) -> Truth:
    """No evaluation begins while some stage of the same domain has a current weight cache but has
    not yet begun its first F of the epoch."""
    waits = (st.domain_of[g] == st.domain_of[a.stage]) & (h.fill_of_epoch[g] == NEVER)
    return implies(waits, h.cached[g] != h.weights[0])


@STEPS("version.cache-for-dgrad", "check_dgrad", needs="order")
def cache_for_dgrad(st: State, h: History, a: Args) -> Truth:
    """When a dI begins, its stage's weight cache holds the weights of the epoch that the dI's key
    names. The cache has not been filled again since the tape's F read it."""
    same = h.fill_read[a.ref.slot] == h.fills[a.key.stage]
    return same & (h.cached[a.key.stage] == a.key.epoch)


@STEPS("version.only-stale-filled", "check_refresh", needs="order")
def only_stale_filled(st: State, h: History, a: Args) -> Truth:
    """A refresh begins only if the stage's weight cache lacks the current weights, and only before
    the stage's first F of the epoch begins."""
    return (h.cached[a.stage] != h.weights[0]) & (h.fill_of_epoch[a.stage] == NEVER)


@STEPS("version.only-stale-filled-by-forward", "check_forward", needs="order")
def only_stale_filled_by_forward(st: State, h: History, a: Args) -> Truth:
    """An F refreshes its stage's weight cache only if the cache lacks the current weights and this
    F is the stage's first of the epoch."""
    s = a.key.stage
    stale = (h.cached[s] != h.weights[0]) & (h.fill_of_epoch[s] == NEVER)
    return implies(a.refresh != 0, stale)


@STEPS("version.filled-just-before", "check_forward", needs="order")
def filled_just_before(st: State, h: History, a: Args) -> Truth:
    """Suppose that a stage's first F of an epoch does not refresh the weight cache itself. Then no
    F or dI of the domain has succeeded since the latest refresh of the cache."""
    s = a.key.stage
    first = (a.refresh == 0) & (h.fill_of_epoch[s] == NEVER)
    return implies(first, h.filled_after[s] == h.updates[st.domain_of[s]])


@STEPS("order.threaded", "check_forward", "check_dgrad")
def threaded(st: State, h: History, a: Args) -> Truth:
    """The token that the caller presents with an F or a dI equals the domain's count of F and dI
    that have succeeded since the last restore. Each F or dI counts as often as it updated scales.
    If scales change only once an epoch, each counts once."""
    d = st.domain_of[a.key.stage]
    return a.token == h.updates[d]


@STEPS("order.declared-forward", "check_forward")
def declared_forward(st: State, h: History, a: Args) -> Truth:
    """If a domain declares the order of its F and dI, each F runs at its declared position. In this
    walk over the microbatches, exactly as many F and dI have run as the order puts before this
    F."""
    d = st.domain_of[a.key.stage]
    return implies(st.declared[d] != 0, st.forward_at[a.key.cell] == h.updates_of_walk[d])


@STEPS("order.declared-dgrad", "check_dgrad")
def declared_dgrad(st: State, h: History, a: Args) -> Truth:
    """If a domain declares the order of its F and dI, each dI runs at its declared position. In
    this walk over the microbatches, exactly as many F and dI have run as the order puts before this
    dI."""
    d = st.domain_of[a.key.stage]
    return implies(st.declared[d] != 0, st.dgrad_at[a.key.cell] == h.updates_of_walk[d])


@STEPS("order.live-scales", "check_dgrad")
def live_scales(st: State, h: History, a: Args) -> Truth:
    """A dI that reads live scales (the domain's current scales) runs only if its own tape's F was
    the domain's latest F. If the domain's scales change once an epoch, they must not have changed
    since that F."""
    d = st.domain_of[a.key.stage]
    return implies(st.live_scales[a.key.stage] != 0, h.rolls_seen[a.ref.slot] == h.rolls[d])


@STEPS("order.own-scales", "commit_dgrad")
def own_scales(st: State, h: History, a: Args) -> Truth:
    """If tapes carry the scales of their F, a dI commits only if it reports that it used the scales
    of its own tape's F."""
    carried = st.carried_scales[st.slot_stage[a.slot]] != 0
    return implies(carried, a.scales == h.scaled_by[a.slot])


@STEPS("order.scales-of-the-epoch", "check_forward", "check_dgrad")
def scales_of_the_epoch(st: State, h: History, a: Args) -> Truth:
    """The scales of some domains change once an epoch. In such a domain, an F or a dI runs only if
    the scales have changed exactly once per update committed since the last restore. So all F and
    dI of an epoch use the same scales."""
    d = st.domain_of[a.key.stage]
    return implies(st.epoch_scales[d] != 0, h.moves[d] == h.commits[0])


@STEPS("order.scales-of-the-epoch-of-stage", "check_refresh", "check_evaluation")
def scales_of_the_epoch_of_stage(st: State, h: History, a: Args) -> Truth:
    """The scales of some domains change once an epoch. In such a domain, a refresh or an evaluation
    runs only if the scales have changed exactly once per update committed since the last
    restore."""
    d = st.domain_of[a.stage]
    return implies(st.epoch_scales[d] != 0, h.moves[d] == h.commits[0])


@STEPS("capture.taken-in-order", "group_wgrad", needs="capture")
def taken_in_order(st: State, h: History, a: Args) -> Truth:
    """A dW takes a further tape only if the graph that the tape's capture pool replayed last was
    captured before the dW graph of the tape's slot. A graph captured later could have used the
    tape's memory as scratch memory."""
    s = a.ref.slot
    return h.last_rank[st.pool_of[s]] < st.wgrad_rank[s]


@STEPS("order.one-set-of-scales", "group_wgrad", needs="order")
def one_set_of_scales(st: State, h: History, a: Args) -> Truth:
    """A dW takes a further tape only if that tape's F ran with the same scales as the F of the dW's
    first tape."""
    return h.scaled_by[a.ref.slot] == h.scaled_by[a.leader]


@STEPS("order.moved-in-the-update", "move_scales")
def moved_in_the_update(st: State, h: History, a: Args) -> Truth:
    """`move_scales` is accepted only in a domain whose scales change once an epoch, only during an
    update, and at most once per update. An F or dI must have gathered maxima (amax) since the
    scales last changed. No F, dI, refresh or evaluation of the domain may be in flight."""
    d = st.domain_of[a.stage]
    due = (h.moves[d] == h.commits[0]) & (0 < h.gathers[d]) & (st.epoch_scales[d] != 0)
    return due & (h.optimizing[0] == 1) & (h.running[d] == 0)


@STEPS("order.moved-once", "commit_update", g="stage")
def moved_once(st: State, h: History, a: Args, g: Index) -> Truth:
    """The scales of some domains change once an epoch. In such a domain, an update commits only if
    the scales have changed exactly once per update since the last restore, this update included. No
    F or dI has gathered maxima (amax) since the scales last changed."""
    d = st.domain_of[g]
    moved = (h.moves[d] == h.commits[0] + 1) & (h.gathers[d] == 0)
    return implies(st.epoch_scales[d] != 0, moved)


@STEPS("order.saved-scales", "checkpoint", g="stage")
def saved_scales(st: State, h: History, a: Args, g: Index) -> Truth:
    """The scales of some domains change once an epoch. In such a domain, a checkpoint is taken only
    if the scales have changed exactly once per update committed since the last restore. No F or dI
    has gathered maxima (amax) since the scales last changed."""
    d = st.domain_of[g]
    saved = (h.moves[d] == h.commits[0]) & (h.gathers[d] == 0)
    return implies(st.epoch_scales[d] != 0, saved)


@STEPS("order.new-draws", "commit_forward")
def new_draws(st: State, h: History, a: Args) -> Truth:
    """An F may have to report the position of the random generator at which it began to draw. Such
    an F commits only if the position is at least zero and beyond the last position that the domain
    reported since the last restore."""
    s = st.slot_stage[a.slot]
    after = (0 <= a.draws) & (h.drew_last[st.domain_of[s]] < a.draws)
    return implies(st.reports_draws[s] != 0, after)


@STEPS("order.own-draws", "commit_dgrad")
def own_draws(st: State, h: History, a: Args) -> Truth:
    """A dI that recomputes F may have to report the position of the random generator at which the
    recomputation began to draw. Such a dI commits only if its own tape's F began to draw at the
    same position."""
    recomputed = st.recomputes_draws[st.slot_stage[a.slot]] != 0
    return implies(recomputed, a.draws == h.drew_at[a.slot])


@STEPS("order.sound-state", "check_forward", "check_dgrad")
def sound_state(st: State, h: History, a: Args) -> Truth:
    """An F or a dI begins only if no F, dI, refresh or evaluation of its domain is in flight. None
    of them has failed since the last restore."""
    d = st.domain_of[a.key.stage]
    return (h.broken[d] == 0) & (h.running[d] == 0)


@STEPS("order.sound-state-of-stage", "check_refresh", "check_evaluation")
def sound_state_of_stage(st: State, h: History, a: Args) -> Truth:
    """A refresh or an evaluation begins only if no F, dI, refresh or evaluation of its domain is in
    flight. None of them has failed since the last restore."""
    d = st.domain_of[a.stage]
    return (h.broken[d] == 0) & (h.running[d] == 0)


@STEPS("order.sound-at-finalize", "finalize")
def sound_at_finalize(st: State, h: History, a: Args) -> Truth:
    """A stage is finalized only if all its F and dI have succeeded, except those that the walk over
    the microbatches leaves out. No F, dI, refresh or evaluation of the stage's domain has failed
    since the last restore."""
    n = st.cells[a.stage] - h.num_skipped[a.stage]
    ran = (h.num_forwards[a.stage] == n) & (h.num_dgrads[a.stage] == n)
    return ran & (h.broken[st.domain_of[a.stage]] == 0)


@STEPS("order.declared-whole", "finalize")
def declared_whole(st: State, h: History, a: Args) -> Truth:
    """A domain may declare the order of its F and dI. A stage of such a domain is finalized only
    after every cell (microbatch, block, invocation) of the stage has run F in this walk over the
    microbatches."""
    whole = h.num_forwards[a.stage] == st.cells[a.stage]
    return implies(st.declared[st.domain_of[a.stage]] != 0, whole)


@STEPS("arena.bound-destination", "check_dgrad")
def bound_destination(st: State, h: History, a: Args) -> Truth:
    """A dI runs only if its key was bound to its configured gradient destination exactly once in
    this walk over the microbatches."""
    c = a.key.cell
    return (h.binds[c] == 1) & (h.bound_to[c] == st.destination_of[c])


@STEPS("arena.right-destination", "check_wgrad")
def right_destination(st: State, h: History, a: Args) -> Truth:
    """A dW writes to the destination that was bound for its key. The destination may lie in two
    buffers: the stage's own buffer, and a buffer that another stage shares. The dW adds to a buffer
    that already holds gradients of the key's epoch, and overwrites a buffer that does not."""
    buffer = st.buffer_of[a.key.cell]
    own, shared = h.content[buffer], h.content[st.shared_of[buffer]]
    adds = (a.first == ADDS) | (a.first == OPENS)
    joins = (a.first == ADDS) | (a.first == JOINS)
    fresh = (adds == (own == a.key.epoch)) & (joins == (shared == a.key.epoch))
    return (a.destination == h.bound_to[a.key.cell]) & fresh


@STEPS("arena.one-product", "group_wgrad")
def one_product(st: State, h: History, a: Args) -> Truth:
    """A dW in flight takes a further tape only if the tape belongs to the dW's own stage. The
    destination bound for the tape lies in a buffer that the dW writes, and no other dW is writing
    this buffer."""
    b, own = st.buffer_of[a.key.cell], st.buffer_of[h.tenant[a.leader]]
    writes = (h.writers[b] == 1) & ((own == b) | (st.shared_of[own] == b))
    here = (st.slot_stage[a.leader] == a.key.stage) & (h.acting[a.leader] == 1)
    return (a.destination == h.bound_to[a.key.cell]) & writes & here


@STEPS("arena.product-ran", "ungroup_wgrad")
def product_ran(st: State, h: History, a: Args) -> Truth:
    """A tape leaves a grouped dW (one product for several tapes) only after the dW has ended. If
    the tape is still live, the dW has succeeded and the tape's buffers hold gradients of its epoch.
    No dW is then writing the stage's own buffer."""
    s, b = a.ref.slot, st.buffer_of[a.key.cell]
    mine = s == h.slot[0]
    ended = implies(mine, h.grouped[0] != RUNNING)
    ran = implies(mine, h.grouped[0] == DONE)
    held = (h.content[b] == a.key.epoch) & (h.content[st.shared_of[b]] == a.key.epoch)
    return ended & implies(h.owing[s] != 0, ran & held & (h.writers[b] == 0))


@STEPS("arena.alone", "check_wgrad")
def written_alone(st: State, h: History, a: Args) -> Truth:
    """A dW begins only if no other dW is writing its stage's own gradient buffer, or the buffer
    that the stage shares with another stage."""
    buffer = st.buffer_of[a.key.cell]
    return (h.writers[buffer] == 0) & (h.writers[st.shared_of[buffer]] == 0)


@STEPS("arena.not-spoiled", "bind", "check_wgrad", "group_wgrad")
def bound_or_written_unspoiled(st: State, h: History, a: Args) -> Truth:
    """A gradient destination is bound or written only if no failure has spoiled the stage's epoch.
    No failed dW may have left the stage's gradients half written in this epoch."""
    return (h.spoiled[a.key.stage] != a.key.epoch) & (h.half_written[a.key.stage] != a.key.epoch)


@STEPS("arena.bound-once", "bind")
def bind_once(st: State, h: History, a: Args) -> Truth:
    """A cell (a key without its epoch) is bound only to its configured gradient destination, and at
    most once per walk over the microbatches."""
    c = a.key.cell
    return (h.binds[c] == 0) & (a.destination == st.destination_of[c])


# A stage is final


def _done(h: History, cell: Index) -> Truth:
    """Whether a cell's dW ran, or the walk over the microbatches leaves the cell out."""
    return (h.ran_wgrad[cell] == 1) | (h.skipped[cell] == 1)


@STEPS("epoch.whole", "finalize", c="cell")
def whole(st: State, h: History, a: Args, c: Index) -> Truth:
    """When a stage is finalized, each cell (microbatch, block, invocation) that the walk over the
    microbatches includes has run F, dI and dW exactly once. A cell that the walk leaves out has run
    none of the three. Each dW that ran covered every matrix."""
    once = (h.ran_forward[c] == 1) & (h.ran_dgrad[c] == 1) & (h.ran_wgrad[c] == 1)
    none = (h.ran_forward[c] == 0) & (h.ran_dgrad[c] == 0) & (h.ran_wgrad[c] == 0)
    ours = st.stage_of[c] == a.stage
    whole = once & (h.covered[c] == st.matrices[a.stage]) & (h.skipped[c] == 0)
    return implies(ours, whole | (none & (h.skipped[c] == 1)))


@STEPS("epoch.written", "finalize", c="cell")
def written(st: State, h: History, a: Args, c: Index) -> Truth:
    """Each gradient buffer has a keeper: one cell (microbatch, block, invocation) that writes the
    buffer in every walk over the microbatches. When a stage is finalized, the keeper of each of the
    stage's buffers has run dW in this walk."""
    first = st.keeper_of[st.buffer_of[c]]
    return implies(st.stage_of[c] == a.stage, h.ran_wgrad[first] == 1)


@STEPS("arena.tied-whole", "finalize", needs="arena", c="cell", k="cell")
def tied_whole(st: State, h: History, a: Args, c: Index, k: Index) -> Truth:
    """When a stage is finalized, every cell (microbatch, block, invocation) that writes one of the
    stage's destinations has run dW or was left out. This includes cells of another stage that
    shares the destination. No failed dW has left the gradients of either stage half written."""
    onto = (st.stage_of[c] == a.stage) & (
        st.shared_of[st.buffer_of[k]] == st.shared_of[st.buffer_of[c]]
    )
    sound = h.half_written[st.stage_of[k]] != h.weights[0]
    return implies(onto, _done(h, k) & sound)


@STEPS("epoch.not-spoiled", "finalize")
def not_spoiled(st: State, h: History, a: Args) -> Truth:
    """A stage is finalized only if no failure has spoiled its epoch. No failed dW has left the
    stage's gradients half written in this epoch."""
    return (h.spoiled[a.stage] != h.weights[0]) & (h.half_written[a.stage] != h.weights[0])


@STEPS("version.never-lost-in-use", "finalize", needs="order")
def never_lost_in_use(st: State, h: History, a: Args) -> Truth:
    """A stage is finalized only if its weight cache was not lost in use in this epoch. The cache is
    in use from the start of the stage's first F until the last dI of the walk over the microbatches
    has succeeded."""
    return h.lost_in_use[a.stage] != h.weights[0]


@STEPS("epoch.final-once", "finalize")
def final_once(st: State, h: History, a: Args) -> Truth:
    """A stage is finalized at most once per walk over the microbatches."""
    return h.finals[a.stage] == 0


# The graph stream and the streams that wait for it


@STEPS(
    "completion.replay-after-caller", "check_forward", "check_dgrad", "check_wgrad", "group_wgrad"
)
def replay_after_caller(st: State, h: History, a: Args) -> Truth:
    """An F, dI or dW is accepted only with a link (a caller's stream paired with a graph stream) of
    its stage's domain. The graph stream must have waited for all work that the caller enqueued."""
    here = st.domain_at[a.link] == st.domain_of[a.key.stage]
    return here & (h.behind[a.link] == 0)


@STEPS("completion.refresh-after-caller", "check_refresh", "check_evaluation")
def refresh_after_caller(st: State, h: History, a: Args) -> Truth:
    """A refresh or an evaluation is accepted only with a link (a caller's stream paired with a
    graph stream) of its stage's domain. The graph stream must have waited for all work that the
    caller enqueued."""
    here = st.domain_at[a.link] == st.domain_of[a.stage]
    return here & (h.behind[a.link] == 0)


@STEPS("completion.filled-after-former-work", "reserve")
def filled_after_former_work(st: State, h: History, a: Args) -> Truth:
    """A slot is reserved only with a link (a caller's stream paired with a graph stream) of its
    stage's domain. The link's caller must have waited for every replay of the slot's previous
    tape."""
    mine = (a.link == h.link[0]) & (a.slot == h.slot[0])
    here = st.domain_at[a.link] == st.domain_of[a.key.stage]
    return here & implies(mine, h.clear[0] == 1)


@STEPS("completion.received-after-former-work", "post_receive")
def received_after_former_work(st: State, h: History, a: Args) -> Truth:
    """A receive is posted only with a link (a caller's stream paired with a graph stream) of its
    stage's domain. The link's caller must have waited for every replay of the slot's previous
    tape."""
    mine = (a.link == h.link[0]) & (a.ref.slot == h.slot[0])
    here = st.domain_at[a.link] == st.domain_of[a.key.stage]
    return here & implies(mine, h.clear[0] == 1)


@STEPS("completion.forward-after-transfers", "check_forward")
def forward_after_transfers(st: State, h: History, a: Args) -> Truth:
    """An F begins only after the graph stream has waited for every transfer that ended in the F's
    slot and for every copy enqueued into the slot. It does not matter which link reported the
    transfer or copy."""
    return implies(a.slot == h.slot[0], h.trailing[0] == 0)


@STEPS("completion.dgrad-after-transfers", "check_dgrad")
def dgrad_after_transfers(st: State, h: History, a: Args) -> Truth:
    """Some stages receive the gradient of their output. The dI of such a stage begins only after
    the graph stream has waited for every transfer that ended in the tape's slot and for every copy
    enqueued into the slot."""
    mine = (a.ref.slot == h.slot[0]) & ((st.receives[a.key.stage] & BACK_BIT) != 0)
    return implies(mine, h.trailing[0] == 0)


@STEPS("completion.consumer-after-replay", "check_dgrad", "read")
def consumer_after_replay(st: State, h: History, a: Args) -> Truth:
    """A dI or a read begins only after the stream of its link's caller has waited for the tape's
    latest F or dI."""
    mine = (a.link == h.link[0]) & (a.ref.slot == h.slot[0])
    return implies(mine, h.seen[0] == 1)


@STEPS("completion.gradients-after-replay", "finalize")
def gradients_after_replay(st: State, h: History, a: Args) -> Truth:
    """A stage is finalized only with a link whose caller has waited for the stage's latest dW. If
    another stage shares a gradient destination with it, the caller has also waited for that stage's
    latest dW."""
    writes = (a.stage == h.stage[0]) | (st.sharer_of[a.stage] == h.stage[0])
    return implies((a.link == h.link[0]) & writes, h.seen_gradients[0] == 1)


@STEPS("completion.reduction-after-replay", "start_reduction", needs="reduction")
def reduction_after_replay(st: State, h: History, a: Args) -> Truth:
    """A reduction starts only with a link whose caller has waited for the latest dW of every stage
    that writes the bucket."""
    mine = (a.link == h.link[0]) & _writes(st, a.bucket, h.stage[0])
    return implies(mine, h.seen_gradients[0] == 1)


@STEPS("completion.consumer-after-reduction", "check_update", needs="reduction", b="bucket")
def consumer_after_reduction(st: State, h: History, a: Args, b: Index) -> Truth:
    """When an update begins, the stream that finalized a bucket's stages is also the stream that
    waited for the bucket's reduction."""
    waiter = st.caller_at[h.awaited_by[b]]
    first = st.caller_at[h.finalized_by[st.stage_at[b]]] == waiter
    return first & (st.caller_at[h.finalized_by[st.tied_at[b]]] == waiter)


@STEPS("completion.update-after-gradients", "check_update")
def update_after_gradients(st: State, h: History, a: Args) -> Truth:
    """An update begins only on the stream that finalized every stage, and only after this stream
    has waited for each stage's latest dW."""
    finalizer = h.finalized_by[h.stage[0]]
    waited = implies(finalizer == h.link[0], h.seen_gradients[0] == 1)
    return waited & (st.caller_at[finalizer] == a.caller)


@STEPS("completion.reader-after-update", "start_weights_read")
def reader_after_update(st: State, h: History, a: Args) -> Truth:
    """The call that starts a read of a stage's weights on another stream names a link of the
    stage's domain. The stream of the link's caller either ran the optimizer's latest update or has
    waited for that update."""
    here = st.domain_at[a.link] == st.domain_of[a.stage]
    return here & ((h.behind_update[a.link] == 0) | (st.caller_at[a.link] == h.updated_on[0]))


@STEPS("completion.one-reader", "start_weights_read")
def one_reader(st: State, h: History, a: Args) -> Truth:
    """A read of a stage's weights on a separate stream starts only if no other such read of this
    stage is under way."""
    return h.weights_reader[a.stage] != RUNNING


@STEPS("completion.reader-running", "finish_weights_read")
def reader_running(st: State, h: History, a: Args) -> Truth:
    """The end of a read of weights is accepted only while a read of the stage's weights is under
    way. The call must name a link of the stage's domain."""
    here = st.domain_at[a.link] == st.domain_of[a.stage]
    return here & (h.weights_reader[a.stage] == RUNNING)


@STEPS("completion.update-after-readers", "check_update", g="stage")
def update_after_readers(st: State, h: History, a: Args, g: Index) -> Truth:
    """An update begins only while no separate stream is reading weights. The update's stream must
    have waited for every read of weights that has ended."""
    ours = st.caller_at[h.reader_awaited_by[g]] == a.caller
    return (h.weights_reader[g] != RUNNING) & implies(h.weights_reader[g] == DONE, ours)


@STEPS("completion.one-gradients-reader", "start_gradients_read")
def one_gradients_reader(st: State, h: History, a: Args) -> Truth:
    """A read of a stage's gradients on a separate stream starts only if no other such read of this
    stage is under way."""
    return h.gradients_reader[a.stage] != RUNNING


@STEPS("completion.gradients-reader-running", "finish_gradients_read")
def gradients_reader_running(st: State, h: History, a: Args) -> Truth:
    """The end of a read of gradients is accepted only while a read of the stage's gradients is
    under way. The call must name a link of the stage's domain."""
    here = st.domain_at[a.link] == st.domain_of[a.stage]
    return here & (h.gradients_reader[a.stage] == RUNNING)


@STEPS("completion.whole-gradients-read", "start_gradients_read", c="cell")
def whole_gradients_read(st: State, h: History, a: Args, c: Index) -> Truth:
    """A read of a stage's gradients starts only when every cell (microbatch, block, invocation) of
    the stage is done. A cell is done if it ran dW once, over all matrices of the stage, or if the
    walk over the microbatches leaves it out."""
    once = (h.ran_wgrad[c] == 1) & (h.covered[c] == st.matrices[a.stage])
    return implies(st.stage_of[c] == a.stage, once | (h.skipped[c] == 1))


@STEPS("completion.reader-after-gradients", "start_gradients_read")
def reader_after_gradients(st: State, h: History, a: Args) -> Truth:
    """The call that starts a read of a stage's gradients names a link of the stage's domain. The
    link's caller has finalized the stage, and has waited for the stage's latest dW."""
    finalizer = h.finalized_by[a.stage]
    mine = (finalizer == h.link[0]) & (a.stage == h.stage[0])
    here = st.domain_at[a.link] == st.domain_of[a.stage]
    waited = implies(mine, h.seen_gradients[0] == 1)
    return here & waited & (st.caller_at[finalizer] == st.caller_at[a.link])


@STEPS("completion.reduced-gradients-read", "start_gradients_read", needs="reduction", b="bucket")
def reduced_gradients_read(st: State, h: History, a: Args, b: Index) -> Truth:
    """A read of a stage's gradients starts only if the reductions of these gradients are done. The
    caller of the read's link must be the caller that waited for these reductions."""
    ours = st.caller_at[h.awaited_by[b]] == st.caller_at[a.link]
    return implies(_writes(st, b, a.stage), (h.reduction[b] == DONE) & ours)


@STEPS("completion.gradients-not-rewritten", "check_wgrad", "group_wgrad")
def gradients_not_rewritten(st: State, h: History, a: Args) -> Truth:
    """No dW begins while a separate stream reads the gradients of the dW's stage."""
    return h.gradients_reader[a.key.stage] != RUNNING


@STEPS(
    "completion.shared-gradients-not-rewritten",
    "check_wgrad",
    "group_wgrad",
    needs="arena",
    g="stage",
)
def shared_gradients_not_rewritten(st: State, h: History, a: Args, g: Index) -> Truth:
    """No dW begins while a separate stream reads the gradients of a stage that shares a destination
    with the dW's stage."""
    return implies(st.sharer_of[g] == a.key.stage, h.gradients_reader[g] != RUNNING)


@STEPS("completion.read-not-reduced", "start_reduction", needs="reduction", g="stage")
def read_not_reduced(st: State, h: History, a: Args, g: Index) -> Truth:
    """No reduction starts while a separate stream is reading gradients that the reduction would
    write."""
    return implies(_writes(st, a.bucket, g), h.gradients_reader[g] != RUNNING)


@STEPS("completion.after-gradients-readers", "next_walk", "check_update", g="stage")
def after_gradients_readers(st: State, h: History, a: Args, g: Index) -> Truth:
    """The next walk over the microbatches, or an update, begins only if no separate stream is
    reading gradients."""
    return h.gradients_reader[g] != RUNNING


@STEPS("completion.update-after-gradients-readers", "check_update", g="stage")
def update_after_gradients_readers(st: State, h: History, a: Args, g: Index) -> Truth:
    """An update begins only after the update's stream has waited for every read of gradients that
    has ended."""
    ours = st.caller_at[h.gradients_awaited_by[g]] == a.caller
    return implies(h.gradients_reader[g] == DONE, ours)


@STEPS("completion.update-after-evaluations", "check_update")
def update_after_evaluations(st: State, h: History, a: Args) -> Truth:
    """An update begins only after the update's stream has waited for each stage's latest
    evaluation."""
    return implies(st.caller_at[h.link[0]] == a.caller, h.seen_evaluation[0] == 1)


@STEPS("completion.forward-after-update", "check_forward")
def forward_after_update(st: State, h: History, a: Args) -> Truth:
    """While the optimizer is still writing weights, no F reads these weights or fills a cache from
    them."""
    return h.updating[st.domain_of[a.key.stage]] == 0


@STEPS("completion.refresh-after-update", "check_refresh", "check_evaluation")
def refresh_after_update(st: State, h: History, a: Args) -> Truth:
    """While the optimizer is still writing weights, no refresh and no evaluation reads these
    weights."""
    return h.updating[st.domain_of[a.stage]] == 0


# A reduction


def _writes(st: State, bucket: Index, stage: Index) -> Truth:
    """Whether a bucket holds gradients of a stage."""
    return (st.stage_at[bucket] == stage) | (st.tied_at[bucket] == stage)


@STEPS("reduction.of-whole-gradients", "start_reduction", c="cell")
def of_whole_gradients(st: State, h: History, a: Args, c: Index) -> Truth:
    """A reduction starts only when every cell (microbatch, block, invocation) that writes the
    bucket is done. A cell is done if it ran dW once, over all matrices of its stage, or if the walk
    over the microbatches leaves it out."""
    ours = _writes(st, a.bucket, st.stage_of[c])
    once = (h.ran_wgrad[c] == 1) & (h.covered[c] == st.matrices[st.stage_of[c]])
    return implies(ours, once | (h.skipped[c] == 1))


@STEPS("reduction.of-written-buffers", "start_reduction", needs="arena", c="cell")
def of_written_buffers(st: State, h: History, a: Args, c: Index) -> Truth:
    """When a reduction starts, every buffer of the stages that write the bucket holds gradients of
    the current epoch."""
    ours = _writes(st, a.bucket, st.stage_of[c])
    return implies(ours, h.content[st.buffer_of[c]] == h.weights[0])


@STEPS("reduction.alone", "start_reduction", s="slot")
def alone(st: State, h: History, a: Args, s: Index) -> Truth:
    """When a reduction starts, no F, dI or dW of a stage that writes the bucket is in flight."""
    return implies(_writes(st, a.bucket, st.slot_stage[s]), h.acting[s] == 0)


@STEPS("reduction.once", "start_reduction")
def reduced_once(st: State, h: History, a: Args) -> Truth:
    """A bucket's reduction starts only if it is neither running nor done in this epoch. No failure
    may have spoiled the epoch of a stage that writes the bucket."""
    s, t = st.stage_at[a.bucket], st.tied_at[a.bucket]
    sound = (h.spoiled[s] != h.weights[0]) & (h.spoiled[t] != h.weights[0])
    return (h.reduction[a.bucket] == NONE) & sound


@STEPS("reduction.declared-order", "start_reduction")
def declared_order(st: State, h: History, a: Args) -> Truth:
    """If an order of reductions is declared, each reduction of an epoch starts only at its declared
    place in that order."""
    return implies(st.ordered[0] != 0, st.reduce_at[a.bucket] == h.begun[0])


@STEPS("reduction.running", "finish_reduction", "fail_reduction")
def reduction_running(st: State, h: History, a: Args) -> Truth:
    """The end or the failure of a reduction is accepted only while the reduction is running."""
    return h.reduction[a.bucket] == RUNNING


@STEPS("reduction.never-rewritten", "check_wgrad", "group_wgrad", b="bucket")
def never_rewritten(st: State, h: History, a: Args, b: Index) -> Truth:
    """
    No dW of a stage begins after a reduction of the stage's gradients has begun in this epoch.
    """
    return implies(_writes(st, b, a.key.stage), h.reduction[b] == NONE)


@STEPS("reduction.never-rebound", "bind", needs="arena", b="bucket")
def never_rebound(st: State, h: History, a: Args, b: Index) -> Truth:
    """Once a reduction of a stage's gradients has begun, `bind` accepts only those keys of the
    stage that the walk over the microbatches leaves out. This holds until the epoch ends."""
    runs = _writes(st, b, a.key.stage) & (h.skipped[a.key.cell] == 0)
    return implies(runs, h.reduction[b] == NONE)


@STEPS("reduction.undisturbed", "drop", b="bucket")
def undisturbed(st: State, h: History, a: Args, b: Index) -> Truth:
    """If a tape is dropped after a reduction of its stage's gradients has begun, the tape's dW has
    already run."""
    begun = _writes(st, b, a.key.stage) & (h.reduction[b] != NONE)
    return implies(begun, h.ran_wgrad[a.key.cell] == 1)


# The weights change


@STEPS("epoch.commit", "check_update", c="cell", g="stage", s="slot")
def commit(st: State, h: History, a: Args, c: Index, g: Index, s: Index) -> Truth:
    """An update begins only if it names the current epoch and no failure has spoiled this epoch.
    Every cell (microbatch, block, invocation) has run dW, or the walk over the microbatches leaves
    it out. No tape is live, and no action is in flight on a slot."""
    ran = _done(h, c)
    idle = (h.owing[s] == 0) & (h.acting[s] == 0)
    return ran & idle & (h.spoiled[g] != h.weights[0]) & (a.epoch == h.weights[0])


@STEPS("epoch.one-denominator", "commit_dgrad")
def one_denominator(st: State, h: History, a: Args) -> Truth:
    """A stage may report the weight of each microbatch's gradient as a fraction: a number of parts
    of a total. Every dI of an epoch then reports the same total, which is at least one part."""
    s = st.slot_stage[a.slot]
    first = (h.counted_in[s] == 0) & (0 < a.parts)
    return implies(st.reports_weights[s] != 0, first | (a.parts == h.counted_in[s]))


@STEPS("epoch.weights-add-up", "check_update", g="stage")
def weights_add_up(st: State, h: History, a: Args, g: Index) -> Truth:
    """A stage may report the weight of each microbatch's gradient as a fraction: a number of parts
    of a total. An update then begins only if the parts reported in all walks of the epoch add up to
    the total."""
    return implies(st.reports_weights[g] != 0, h.weighed[g] == h.counted_in[g])


@STEPS("epoch.walk-whole", "next_walk", c="cell", g="stage", s="slot")
def walk_whole(st: State, h: History, a: Args, c: Index, g: Index, s: Index) -> Truth:
    """The next walk over the microbatches begins only if the call names the current epoch and no
    failure has spoiled this epoch. Every cell (microbatch, block, invocation) has run dW, or the
    walk that ends leaves it out. No tape is live, and no action is in flight on a slot."""
    ran = _done(h, c)
    idle = (h.owing[s] == 0) & (h.acting[s] == 0)
    return ran & idle & (h.spoiled[g] != h.weights[0]) & (a.epoch == h.weights[0])


@STEPS("order.walk-whole", "next_walk", d="domain")
def walk_in_order(st: State, h: History, a: Args, d: Index) -> Truth:
    """The next walk over the microbatches begins only if no F, dI, refresh or evaluation is in
    flight."""
    return h.running[d] == 0


@STEPS("reduction.after-every-walk", "next_walk", b="bucket")
def reduced_after_every_walk(st: State, h: History, a: Args, b: Index) -> Truth:
    """The next walk over an epoch's microbatches begins only if no reduction has begun in the
    epoch."""
    return h.reduction[b] == NONE


@STEPS("epoch.commit-whole", "commit_update", "abort_update", c="cell", s="slot")
def commit_whole(st: State, h: History, a: Args, c: Index, s: Index) -> Truth:
    """When an update commits or fails, every cell (microbatch, block, invocation) has run dW, or
    the walk over the microbatches leaves it out. No tape is live, and no action is in flight on a
    slot. The call names the epoch of the weights that the update replaces."""
    idle = (h.owing[s] == 0) & (h.acting[s] == 0)
    return _done(h, c) & idle & (a.epoch == h.weights[0])


@STEPS("order.commit", "check_update", "commit_update", d="domain")
def commit_in_order(st: State, h: History, a: Args, d: Index) -> Truth:
    """No F, dI, refresh or evaluation is in flight when an update begins, or when it commits."""
    return h.running[d] == 0


@STEPS("reduction.commit", "check_update", "commit_update", b="bucket")
def commit_reduced(st: State, h: History, a: Args, b: Index) -> Truth:
    """The reduction of every bucket is done when an update begins, and when it commits."""
    return h.reduction[b] == DONE


# From the check of an update to its commit, and after an update that failed half way


@STEPS(
    "epoch.whole-weights",
    "reserve",
    "bind",
    "check_refresh",
    "check_forward",
    "check_evaluation",
    "check_dgrad",
    "check_wgrad",
    "start_weights_read",
    "start_gradients_read",
    "next_walk",
    "check_update",
    "checkpoint",
)
def whole_weights(st: State, h: History, a: Args) -> Truth:
    """While an update is in flight or weights are half updated, nothing new may begin. The contract
    then refuses reservations, binds, new actions, new reads of weights or gradients, the next walk
    over the microbatches, and checkpoints."""
    return (h.optimizing[0] == 0) & (h.half_updated[0] == 0)


@STEPS("epoch.fault-of-an-epoch", "fail")
def fault_of_an_epoch(st: State, h: History, a: Args) -> Truth:
    """`fail` reports a fault that was seen late. The call must name the epoch of the current
    weights or an earlier epoch."""
    return a.epoch <= h.weights[0]


@STEPS("epoch.restore-between-updates", "restore")
def restore_between_weight_updates(st: State, h: History, a: Args) -> Truth:
    """A restore is accepted only if no update is in flight."""
    return h.optimizing[0] == 0


@STEPS("epoch.evaluated-alone", "check_evaluation")
def evaluated_alone(st: State, h: History, a: Args) -> Truth:
    """An evaluation begins only if no other evaluation of its stage is in flight."""
    return h.evaluating[a.stage] == 0


@STEPS(
    "epoch.none-evaluates",
    "next_walk",
    "check_update",
    "commit_update",
    "abort_update",
    "checkpoint",
    "restore",
    g="stage",
)
def none_evaluates(st: State, h: History, a: Args, g: Index) -> Truth:
    """No evaluation is in flight when a walk over the microbatches ends, when an update begins or
    ends, or at a checkpoint or a restore."""
    return h.evaluating[g] == 0


# A checkpoint and a restore


@STEPS("persistence.quiescent", "checkpoint", g="stage", s="slot")
def quiescent(st: State, h: History, a: Args, g: Index, s: Index) -> Truth:
    """A checkpoint is taken only if no tape is live and no action is in flight on a slot. Since the
    weights last changed, no walk over the microbatches has ended and no dW has succeeded."""
    none = (h.num_wgrads[g] == 0) & (h.walks[0] == 0)
    return (h.owing[s] == 0) & (h.acting[s] == 0) & none


@STEPS("order.quiescent", "checkpoint", d="domain")
def quiescent_order(st: State, h: History, a: Args, d: Index) -> Truth:
    """A checkpoint is taken only if no F, dI, refresh or evaluation is in flight. None of them has
    failed since the last restore. No F, dI or refresh has begun since the weights last changed."""
    return (h.running[d] == 0) & (h.broken[d] == 0) & (h.touched[d] == 0)


@STEPS("completion.drained", "checkpoint", "restore", d="domain")
def drained_device(st: State, h: History, a: Args, d: Index) -> Truth:
    """A checkpoint or a restore is accepted only after the host has seen all device work finish.
    The call `drain` reports this to the contract. The call ends no transfer, and makes no stream
    wait."""
    return h.device[d] == 0


@STEPS("reduction.quiescent", "checkpoint", "restore", b="bucket")
def quiescent_reduction(st: State, h: History, a: Args, b: Index) -> Truth:
    """A checkpoint or a restore is accepted only if no reduction is in flight."""
    return h.reduction[b] != RUNNING


@STEPS("persistence.restore-between-actions", "restore", s="slot")
def restore_between_actions(st: State, h: History, a: Args, s: Index) -> Truth:
    """A restore is accepted only if no action is in flight on a slot."""
    return h.acting[s] == 0


@STEPS("order.restore-between-actions", "restore", d="domain")
def restore_between_updates(st: State, h: History, a: Args, d: Index) -> Truth:
    """A restore is accepted only if no F, dI, refresh or evaluation is in flight."""
    return h.running[d] == 0


# The end of an action


@STEPS("tickets.forward-redeems-its-own", "commit_forward", "abort_forward")
def forward_redeems_its_own(st: State, h: History, a: Args) -> Truth:
    """The commit or abort of an F is accepted only with the ticket that its own check issued, and
    only once."""
    mine = implies(
        a.ticket == h.ticket[0], (h.outstanding[0] == FORWARD) & (h.ticket_slot[0] == a.slot)
    )
    return mine & (h.acting[a.slot] == 1)


@STEPS("tickets.dgrad-redeems-its-own", "commit_dgrad", "abort_dgrad")
def dgrad_redeems_its_own(st: State, h: History, a: Args) -> Truth:
    """The commit or abort of a dI is accepted only with the ticket that its own check issued, and
    only once."""
    mine = implies(
        a.ticket == h.ticket[0], (h.outstanding[0] == DGRAD) & (h.ticket_slot[0] == a.slot)
    )
    return mine & (h.acting[a.slot] == 1)


@STEPS("tickets.wgrad-redeems-its-own", "commit_wgrad", "abort_wgrad")
def wgrad_redeems_its_own(st: State, h: History, a: Args) -> Truth:
    """The commit or abort of a dW is accepted only with the ticket that its own check issued, and
    only once."""
    mine = implies(
        a.ticket == h.ticket[0], (h.outstanding[0] == WGRAD) & (h.ticket_slot[0] == a.slot)
    )
    return mine & (h.acting[a.slot] == 1)


@STEPS("tickets.group-names-its-own", "group_wgrad")
def group_names_its_own(st: State, h: History, a: Args) -> Truth:
    """A dW takes a further tape only if the call presents the ticket that this dW's own check
    issued. The ticket must still be outstanding."""
    mine = (h.outstanding[0] == WGRAD) & (h.ticket_slot[0] == a.leader)
    return implies(a.ticket == h.ticket[0], mine)


@STEPS("tickets.refresh-redeems-its-own", "commit_refresh", "abort_refresh")
def refresh_redeems_its_own(st: State, h: History, a: Args) -> Truth:
    """The commit or abort of a refresh is accepted only with the ticket that its own check issued,
    and only once."""
    return implies(
        a.ticket == h.ticket[0], (h.outstanding[0] == REFRESH) & (h.ticket_stage[0] == a.stage)
    )


@STEPS("tickets.update-redeems-its-own", "commit_update", "abort_update")
def update_redeems_its_own(st: State, h: History, a: Args) -> Truth:
    """The commit or abort of an update is accepted only with the ticket that its own check issued,
    and only once."""
    return implies(a.ticket == h.ticket[0], h.outstanding[0] == UPDATE) & (h.optimizing[0] == 1)


@STEPS("tickets.evaluation-redeems-its-own", "commit_evaluation", "abort_evaluation")
def evaluation_redeems_its_own(st: State, h: History, a: Args) -> Truth:
    """The commit or abort of an evaluation is accepted only with the ticket that its own check
    issued, and only once."""
    mine = (h.outstanding[0] == EVALUATION) & (h.ticket_stage[0] == a.stage)
    return implies(a.ticket == h.ticket[0], mine) & (h.evaluating[a.stage] == 1)
