"""
The physical history: the real effects of actions, recorded independently of the contract.

Each function in this module states the physical effect of one accepted transition: which work ran,
what a buffer or a cache now holds, which stream has waited for which. The effect depends on the
action, its arguments and the configuration, never on the contract's own state or a guard. A
property of the history is therefore a claim about the physical world, not a repeated guard. (Only a
reference's generation and incarnation are read from the memory, because the caller receives them
from there.) Timing is conservative: from its check to its commit, an action may touch the device at
any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from qeffect.spec.constants import (
    COPY_BIT,
    DGRAD_BIT,
    GRAD_BIT,
    GROUP_BIT,
    NEVER,
    NO_RANK,
    OUT_BIT,
    RESERVED,
    WGRAD_BIT,
)
from qeffect.spec.predicates import choose
from qeffect.spec.promises.words import domain_of_slot
from qeffect.spec.world import (
    DGRAD,
    DONE,
    EVALUATION,
    FORWARD,
    NONE,
    REFRESH,
    RUNNING,
    UPDATE,
    WGRAD,
)

from .effects import (
    begin,
    begin_update,
    break_update,
    content,
    copied,
    end,
    end_group,
    end_scaling,
    end_update,
    enqueue,
    enter_pool,
    forget_epoch,
    forget_walk,
    issue,
    key_in,
    move,
    overwrite,
    redeem,
    replay,
    replayed_on,
    reserve_ticket,
    trade,
    transferred,
    vacate,
    visit,
    write,
)
from .ghosts import History, State

__all__ = ["ADVANCE", "advance"]


# The effect of each accepted transition


def reserve(st: State, h: History, key: Any, slot: Any, link: Any) -> None:
    h.tenant[slot] = key.cell
    h.tenant_epoch[slot] = key.epoch
    h.owing[slot] = RESERVED
    copies = (st.receives[key.stage] & COPY_BIT) != 0
    copied(h, slot, link, st.domain_of[key.stage], copies)
    issue(st, h, key, slot)


def skip(st: State, h: History, key: Any) -> None:
    """The cells that a walk leaves out get the first positions in their stage's order."""
    s = key.stage
    trade(h.place, h.placed, s, key.cell, h.num_skipped[s])
    h.skipped[key.cell] = h.skipped[key.cell] + 1
    h.num_skipped[s] = h.num_skipped[s] + 1
    h.left_out[0] = h.left_out[0] + 1


def bind(st: State, h: History, key: Any, destination: Any) -> None:
    h.binds[key.cell] = h.binds[key.cell] + 1
    h.bound_to[key.cell] = destination


def check_refresh(st: State, h: History, stage: Any, link: Any, ticket: Any) -> None:
    d = st.domain_of[stage]
    begin_update(h, d)
    h.device[d] = 1
    h.toucher[d] = stage
    h.refresher[d] = stage
    h.cached[stage] = NEVER
    h.lost[stage] = 0
    pool, rank = st.refresh_pool[stage], st.refresh_rank[stage]
    overwrite(st, h, pool, rank, rank != NO_RANK)
    h.last_refreshed[pool] = choose(rank != NO_RANK, stage, h.last_refreshed[pool])
    reserve_ticket(h, ticket, REFRESH, h.ticket_slot[0], stage)


def commit_refresh(
    st: State, h: History, stage: Any, ticket: Any, filled: Any, fill_epoch: Any
) -> None:
    d = st.domain_of[stage]
    h.running[d] = h.running[d] - 1
    h.device[d] = 1
    enqueue(h, d)
    h.cached[stage] = choose(h.lost[stage] == 0, content(st, h, stage, filled, fill_epoch), NEVER)
    h.fills[stage] = h.fills[stage] + 1
    h.filled_after[stage] = h.updates[d]
    redeem(h, ticket)


def abort_refresh(st: State, h: History, stage: Any, ticket: Any) -> None:
    d = st.domain_of[stage]
    break_update(h, d)
    h.device[d] = 1
    redeem(h, ticket)


def check_forward(
    st: State,
    h: History,
    key: Any,
    slot: Any,
    token: Any,
    link: Any,
    refresh: Any,
    ticket: Any,
) -> None:
    s = key.stage
    d = st.domain_of[s]
    fills = refresh != 0
    begin(st, h, slot)
    begin_update(h, d)
    h.toucher[d] = s
    h.updater[d] = slot
    h.tenant[slot] = key.cell
    h.tenant_epoch[slot] = key.epoch
    h.owing[slot] = RESERVED
    h.filling[slot] = refresh
    h.cached[s] = choose(fills, NEVER, h.cached[s])
    h.lost[s] = choose(fills, 0, h.lost[s])
    h.fills[s] = choose(fills, h.fills[s] + 1, h.fills[s])
    h.fill_read[slot] = h.fills[s]
    h.fill_of_epoch[s] = choose(h.fill_of_epoch[s] == NEVER, h.fills[s], h.fill_of_epoch[s])
    replay(st, h, slot, st.forward_rank[slot])
    enter_pool(st, h, slot)
    reserve_ticket(h, ticket, FORWARD, slot, h.ticket_stage[0])


def commit_forward(
    st: State,
    h: History,
    slot: Any,
    ticket: Any,
    filled: Any,
    fill_epoch: Any,
    updates: Any,
    draws: Any,
) -> None:
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    told = st.reports_draws[s] != 0
    again = told & (draws == h.number[0])
    h.drew_at[slot] = choose(told, draws, h.drew_at[slot])
    h.drew_last[d] = choose(told, draws, h.drew_last[d])
    h.repeats[d] = h.repeats[d] + choose(again, 1, 0)
    cell = h.tenant[slot]
    end(st, h, slot)
    enqueue(h, st.domain_of[s])
    replayed_on(h, slot)
    h.rolled_after[d] = choose(st.epoch_scales[d] != 0, h.rolled_after[d], h.updates[d])
    h.scaled_by[slot] = h.rolled_after[d]
    h.rolls[d] = h.rolls[d] + choose(st.epoch_scales[d] != 0, 0, 1)
    h.rolls_seen[slot] = h.rolls[d]
    end_scaling(st, h, s, updates)
    trade(h.place, h.placed, s, cell, h.num_skipped[s] + h.num_forwards[s])
    h.ran_forward[cell] = h.ran_forward[cell] + 1
    h.num_forwards[s] = h.num_forwards[s] + 1
    h.forwards_of_epoch[s] = h.forwards_of_epoch[s] + 1
    asked = h.filling[slot] != 0
    now = choose(h.lost[s] == 0, content(st, h, s, filled, fill_epoch), NEVER)
    h.cached[s] = choose(asked, now, h.cached[s])
    unasked = (st.reports_fills[s] != 0) & (h.filling[slot] == 0) & (fill_epoch != NEVER)
    h.fills[s] = choose(unasked, h.fills[s] + 1, h.fills[s])
    h.owing[slot] = st.owes[s]
    h.seen[0] = choose(slot == h.slot[0], 0, h.seen[0])
    issue(st, h, key_in(h, slot), slot)
    redeem(h, ticket)


def abort_forward(st: State, h: History, slot: Any, ticket: Any) -> None:
    s = st.slot_stage[slot]
    end(st, h, slot)
    enqueue(h, st.domain_of[s])
    replayed_on(h, slot)
    break_update(h, st.domain_of[s])
    h.spoiled[s] = h.tenant_epoch[slot]
    vacate(st, h, slot)
    redeem(h, ticket)


def check_evaluation(
    st: State, h: History, stage: Any, link: Any, cached: Any, ticket: Any
) -> None:
    """A forward that reads scaling state and does not change it."""
    d = st.domain_of[stage]
    h.evaluating[stage] = h.evaluating[stage] + 1
    h.evaluator[d] = stage
    h.running[d] = h.running[d] + 1
    h.device[d] = 1
    reserve_ticket(h, ticket, EVALUATION, h.ticket_slot[0], stage)


def commit_evaluation(
    st: State, h: History, stage: Any, ticket: Any, fill_epoch: Any, updates: Any
) -> None:
    d = st.domain_of[stage]
    h.evaluating[stage] = h.evaluating[stage] - 1
    moved = choose(st.reports_updates[stage] != 0, updates, 0)
    end_update(h, d, moved)
    move(h, d, moved)
    h.device[d] = 1
    enqueue(h, d)
    unasked = (st.reports_fills[stage] != 0) & (fill_epoch != NEVER)
    h.fills[stage] = choose(unasked, h.fills[stage] + 1, h.fills[stage])
    h.seen_evaluation[0] = choose(stage == h.stage[0], 0, h.seen_evaluation[0])
    redeem(h, ticket)


def abort_evaluation(st: State, h: History, stage: Any, ticket: Any) -> None:
    d = st.domain_of[stage]
    h.evaluating[stage] = h.evaluating[stage] - 1
    break_update(h, d)
    h.device[d] = 1
    h.spoiled[stage] = h.weights[0]
    redeem(h, ticket)


def check_dgrad(
    st: State, h: History, key: Any, ref: Any, token: Any, link: Any, ticket: Any
) -> None:
    d = st.domain_of[key.stage]
    begin(st, h, ref.slot)
    begin_update(h, d)
    h.updater[d] = ref.slot
    replay(st, h, ref.slot, st.dgrad_rank[ref.slot])
    reserve_ticket(h, ticket, DGRAD, ref.slot, h.ticket_stage[0])


def commit_dgrad(
    st: State,
    h: History,
    slot: Any,
    ticket: Any,
    queued: Any,
    updates: Any,
    scales: Any,
    draws: Any,
    weight: Any,
    parts: Any,
) -> None:
    s = st.slot_stage[slot]
    told = st.reports_weights[s] != 0
    h.weighed[s] = choose(told, h.weighed[s] + weight, h.weighed[s])
    h.counted_in[s] = choose(told, parts, h.counted_in[s])
    cell = h.tenant[slot]
    end(st, h, slot)
    enqueue(h, st.domain_of[s])
    replayed_on(h, slot)
    end_scaling(st, h, s, updates)
    trade(h.place, h.placed, s, cell, h.num_skipped[s] + h.num_dgrads[s])
    h.ran_dgrad[cell] = h.ran_dgrad[cell] + 1
    h.num_dgrads[s] = h.num_dgrads[s] + 1
    h.queued[slot] = queued
    h.owing[slot] = h.owing[slot] & ~DGRAD_BIT
    h.seen[0] = choose(slot == h.slot[0], 0, h.seen[0])
    redeem(h, ticket)


def abort_dgrad(st: State, h: History, slot: Any, ticket: Any) -> None:
    abort_forward(st, h, slot, ticket)


def check_wgrad(
    st: State,
    h: History,
    key: Any,
    ref: Any,
    link: Any,
    destination: Any,
    first: Any,
    ticket: Any,
) -> None:
    begin(st, h, ref.slot)
    write(st, h, key.cell, 1)
    h.writer[st.buffer_of[key.cell]] = ref.slot
    h.writer[st.shared_of[st.buffer_of[key.cell]]] = ref.slot
    replay(st, h, ref.slot, st.wgrad_rank[ref.slot])
    reserve_ticket(h, ticket, WGRAD, ref.slot, h.ticket_stage[0])


def commit_wgrad(st: State, h: History, slot: Any, ticket: Any, covered: Any) -> None:
    s = st.slot_stage[slot]
    cell = h.tenant[slot]
    end(st, h, slot)
    enqueue(h, st.domain_of[s])
    replayed_on(h, slot)
    end_group(h, slot, DONE)
    write(st, h, cell, -1)
    h.content[st.buffer_of[cell]] = h.tenant_epoch[slot]
    h.content[st.shared_of[st.buffer_of[cell]]] = h.tenant_epoch[slot]
    h.covered[cell] = covered
    trade(h.place, h.placed, s, cell, h.num_skipped[s] + h.num_wgrads[s])
    h.num_wgrads[s] = h.num_wgrads[s] + 1
    h.ran_wgrad[cell] = h.ran_wgrad[cell] + 1
    h.seen_gradients[0] = choose(s == h.stage[0], 0, h.seen_gradients[0])
    visit(st, h, slot, WGRAD_BIT)
    redeem(h, ticket)


def abort_wgrad(st: State, h: History, slot: Any, ticket: Any) -> None:
    s = st.slot_stage[slot]
    end(st, h, slot)
    enqueue(h, st.domain_of[s])
    replayed_on(h, slot)
    end_group(h, slot, NONE)
    write(st, h, h.tenant[slot], -1)
    h.half_written[s] = h.tenant_epoch[slot]
    h.spoiled[s] = h.tenant_epoch[slot]
    vacate(st, h, slot)
    redeem(h, ticket)


def group_wgrad(
    st: State,
    h: History,
    key: Any,
    ref: Any,
    leader: Any,
    ticket: Any,
    link: Any,
    destination: Any,
) -> None:
    """The dW in flight on the leader's slot will read this tape too."""
    h.moving[ref.slot] = h.moving[ref.slot] | GROUP_BIT
    h.group[ref.slot] = ticket
    h.leader[0] = choose(ref.slot == h.slot[0], leader, h.leader[0])
    h.grouped[0] = choose(ref.slot == h.slot[0], RUNNING, h.grouped[0])


def ungroup_wgrad(st: State, h: History, key: Any, ref: Any, covered: Any) -> None:
    """A tape's part of a grouped dW ends; work that was lost meanwhile has no part in the dW."""
    slot, s = ref.slot, key.stage
    cell, kept = h.tenant[slot], h.owing[slot] != 0
    h.moving[slot] = h.moving[slot] & ~GROUP_BIT
    h.covered[cell] = choose(kept, covered, h.covered[cell])
    last = h.num_skipped[s] + h.num_wgrads[s]
    trade(h.place, h.placed, s, cell, choose(kept, last, h.place[cell]))
    h.num_wgrads[s] = choose(kept, h.num_wgrads[s] + 1, h.num_wgrads[s])
    h.ran_wgrad[cell] = choose(kept, h.ran_wgrad[cell] + 1, h.ran_wgrad[cell])
    visit(st, h, slot, WGRAD_BIT)
    h.clear[0] = choose(slot == h.slot[0], h.saw[0], h.clear[0])
    h.grouped[0] = choose(slot == h.slot[0], NONE, h.grouped[0])


def post_receive(st: State, h: History, key: Any, ref: Any, message: Any, link: Any) -> None:
    h.moving[ref.slot] = h.moving[ref.slot] | message
    h.device[st.domain_of[key.stage]] = 1


def finish_receive(st: State, h: History, key: Any, ref: Any, message: Any, link: Any) -> None:
    """A message that arrives for lost work is dropped."""
    h.moving[ref.slot] = h.moving[ref.slot] & ~message
    lost = h.owing[ref.slot] == 0
    h.arrived[ref.slot] = choose(lost, h.arrived[ref.slot], h.arrived[ref.slot] | message)
    transferred(h, ref.slot, link)


def read(st: State, h: History, key: Any, ref: Any, bit: Any, link: Any) -> None:
    h.output_read[key.cell] = choose(bit == OUT_BIT, 1, h.output_read[key.cell])
    h.gradient_read[key.cell] = choose(bit == GRAD_BIT, 1, h.gradient_read[key.cell])
    h.moving[ref.slot] = h.moving[ref.slot] | bit
    h.device[st.domain_of[key.stage]] = 1


def finish_read(st: State, h: History, key: Any, ref: Any, bit: Any, link: Any) -> None:
    h.moving[ref.slot] = h.moving[ref.slot] & ~bit
    visit(st, h, ref.slot, bit)
    transferred(h, ref.slot, link)


def drop(st: State, h: History, key: Any, ref: Any) -> None:
    h.spoiled[key.stage] = key.epoch
    vacate(st, h, ref.slot)


def invalidate(st: State, h: History, stage: Any) -> None:
    h.cached[stage] = NEVER
    h.lost[stage] = 1
    left = h.num_dgrads[stage] + h.num_skipped[stage] != st.cells[stage]
    needed = (h.fill_of_epoch[stage] != NEVER) & left
    h.lost_in_use[stage] = choose(needed, h.weights[0], h.lost_in_use[stage])


def submit(st: State, h: History, link: Any) -> None:
    h.behind[link] = 1


def join(st: State, h: History, link: Any) -> None:
    d = st.domain_at[link]
    ours = st.caller_at[link] == h.updated_on[0]
    h.updating[d] = choose(ours, 0, h.updating[d])
    h.behind[link] = 0
    h.heard[link] = h.told[link]
    h.trailing[0] = choose(link == h.link[0], 0, h.trailing[0])


def wait(st: State, h: History, link: Any) -> None:
    """The caller waits for all work enqueued on its domain's graph stream."""
    d = st.domain_at[link]
    h.behind_update[link] = choose(h.updating[d] == 0, 0, h.behind_update[link])
    mine = link == h.link[0]
    h.seen[0] = choose(mine & (domain_of_slot(st, h.slot[0]) == d), 1, h.seen[0])
    h.saw[0] = choose(mine & (domain_of_slot(st, h.slot[0]) == d), 1, h.saw[0])
    h.clear[0] = choose(mine & (domain_of_slot(st, h.slot[0]) == d), 1, h.clear[0])
    stage_there = st.domain_of[h.stage[0]] == d
    h.seen_gradients[0] = choose(mine & stage_there, 1, h.seen_gradients[0])
    same = st.caller_at[link] == st.caller_at[h.link[0]]
    h.seen_evaluation[0] = choose(same & stage_there, 1, h.seen_evaluation[0])


def drain(st: State, h: History, domain: Any) -> None:
    h.device[domain] = 0
    h.updating[domain] = 0


def finalize(st: State, h: History, stage: Any, link: Any) -> None:
    h.finals[stage] = h.finals[stage] + 1
    h.finalized_by[stage] = link


def start_reduction(st: State, h: History, bucket: Any, link: Any) -> None:
    """The caller's stream enqueues device work."""
    h.reduction[bucket] = RUNNING
    h.begun[0] = h.begun[0] + 1
    h.device[st.domain_of[st.stage_at[bucket]]] = 1


def finish_reduction(st: State, h: History, bucket: Any, link: Any) -> None:
    """The caller's stream waits for the reduction."""
    h.reduction[bucket] = DONE
    h.awaited_by[bucket] = link


def fail_reduction(st: State, h: History, bucket: Any) -> None:
    h.reduction[bucket] = NONE
    h.spoiled[st.stage_at[bucket]] = h.weights[0]
    h.spoiled[st.tied_at[bucket]] = h.weights[0]


def start_weights_read(st: State, h: History, stage: Any, link: Any) -> None:
    """A stream that waits for the caller's stream begins to read the weights."""
    h.weights_reader[stage] = RUNNING
    h.device[st.domain_of[stage]] = 1


def finish_weights_read(st: State, h: History, stage: Any, link: Any) -> None:
    """The caller's stream waits for the reader."""
    h.weights_reader[stage] = DONE
    h.reader_awaited_by[stage] = link


def start_gradients_read(st: State, h: History, stage: Any, link: Any) -> None:
    """A stream that waits for the caller's stream begins to read the gradients."""
    h.gradients_reader[stage] = RUNNING
    h.device[st.domain_of[stage]] = 1


def finish_gradients_read(st: State, h: History, stage: Any, link: Any) -> None:
    """The caller's stream and the graph stream wait for the reader."""
    h.gradients_reader[stage] = DONE
    h.gradients_awaited_by[stage] = link


def next_walk(st: State, h: History, epoch: Any) -> None:
    """The same keys run again; weights, caches, gradients and scaling state stay unchanged."""
    h.walks[0] = h.walks[0] + 1
    forget_walk(st, h)


def check_update(st: State, h: History, epoch: Any, caller: Any, ticket: Any) -> None:
    """The optimizer begins to update the weights of every stage, on one stream."""
    h.optimizing[0] = h.optimizing[0] + 1
    h.updated_on[0] = caller
    st.fill(h.updating, 1)
    st.fill(h.behind_update, 1)
    st.fill(h.device, 1)
    reserve_ticket(h, ticket, UPDATE, h.ticket_slot[0], h.ticket_stage[0])


def move_scales(st: State, h: History, stage: Any, updates: Any) -> None:
    """The scales of a domain move as often as the backend reports, or once without a report."""
    d = st.domain_of[stage]
    h.rolls[d] = h.rolls[d] + 1
    h.rolled_after[d] = h.updates[d]
    move(h, d, choose(st.reports_updates[stage] != 0, updates, 1))


def commit_update(st: State, h: History, epoch: Any, ticket: Any) -> None:
    """Every weight of the process was updated once; part of the work was enqueued just now."""
    h.optimizing[0] = h.optimizing[0] - 1
    h.weights[0] = h.weights[0] + 1
    h.commits[0] = h.commits[0] + 1
    st.fill(h.updating, 1)
    st.fill(h.behind_update, 1)
    st.fill(h.device, 1)
    forget_epoch(st, h)
    redeem(h, ticket)


def abort_update(st: State, h: History, epoch: Any, ticket: Any) -> None:
    """Some weights were updated, others were not; part of the work was enqueued just now."""
    h.optimizing[0] = h.optimizing[0] - 1
    h.half_updated[0] = 1
    st.fill(h.updating, 1)
    st.fill(h.behind_update, 1)
    st.fill(h.device, 1)
    redeem(h, ticket)


def fail(st: State, h: History, stage: Any, epoch: Any) -> None:
    """The gradients of an epoch turn out wrong; its update may have begun or ended."""
    current = epoch == h.weights[0]
    h.spoiled[stage] = choose(current, epoch, h.spoiled[stage])
    used = (epoch != h.weights[0]) | (h.optimizing[0] != 0)
    h.half_updated[0] = choose(used, 1, h.half_updated[0])


def restore(st: State, h: History, epoch: Any, incarnation: Any) -> None:
    """Numerical state is loaded from a checkpoint; streams, events, slots and pools are new."""
    h.weights[0] = epoch
    h.half_updated[0] = 0
    forget_epoch(st, h)
    st.fill(h.cached, NEVER)
    st.fill(h.spoiled, NEVER)
    st.fill(h.lost_in_use, NEVER)
    st.fill(h.half_written, NEVER)
    st.fill(h.content, NEVER)
    st.fill(h.updates, 0)
    st.fill(h.moves, 0)
    st.fill(h.gathers, 0)
    st.fill(h.rolled_after, 0)
    h.commits[0] = 0
    st.fill(h.drew_last, NEVER)
    st.fill(h.repeats, 0)
    st.fill(h.enqueued, 0)
    st.fill(h.broken, 0)
    st.fill(h.owing, 0)
    st.fill(h.moving, 0)
    st.fill(h.arrived, 0)
    st.fill(h.in_pool, 0)
    st.fill(h.tapes, 0)
    st.fill(h.behind, 0)
    st.fill(h.behind_update, 0)
    h.seen_gradients[0] = 1
    h.seen_evaluation[0] = 1
    st.fill(h.told, 0)
    st.fill(h.heard, 0)
    st.fill(h.last_end, 0)
    h.saw[0] = 1
    h.grouped[0] = NONE
    h.clear[0] = 1
    h.trailing[0] = 0
    h.dead[0] = choose(h.issued[0] == 1, 1, h.dead[0])


#: The physical effect of each transition; a transition that is absent has none.
ADVANCE: Final[Mapping[str, Callable[..., None]]] = {
    function.__name__: function
    for function in (
        reserve,
        skip,
        bind,
        check_refresh,
        commit_refresh,
        abort_refresh,
        check_forward,
        commit_forward,
        abort_forward,
        check_evaluation,
        commit_evaluation,
        abort_evaluation,
        check_dgrad,
        commit_dgrad,
        abort_dgrad,
        check_wgrad,
        commit_wgrad,
        abort_wgrad,
        group_wgrad,
        ungroup_wgrad,
        finish_read,
        post_receive,
        finish_receive,
        read,
        drop,
        invalidate,
        submit,
        join,
        wait,
        drain,
        finalize,
        start_reduction,
        finish_reduction,
        fail_reduction,
        start_weights_read,
        finish_weights_read,
        start_gradients_read,
        finish_gradients_read,
        next_walk,
        check_update,
        move_scales,
        commit_update,
        abort_update,
        fail,
        restore,
    )
}


def advance(
    transition: str, st: State, h: History, arguments: tuple[Any, ...], ticket: Any = None
) -> None:
    """
    Advance the history by an accepted transition.

    Args:
        transition: The name of the transition.
        st: The memory before the transition.
        h: The history; this call changes it in place.
        arguments: The transition's arguments.
        ticket: The ticket that a check returned.
    """
    function = ADVANCE.get(transition)
    if function is not None:
        extra = () if ticket is None else (ticket,)
        function(st, h, *arguments, *extra)
