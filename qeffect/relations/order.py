"""
Order: each F and dI advances its domain's effect token by one, and dW never does (paper, III-B;
Invariant 1).
"""

from __future__ import annotations

from ..refusals import Refused
from .columns import Column
from .constants import NEVER, State

#: ``busy`` is the serial of the F, dI, refresh or evaluation in flight on a domain, or 0;
#: ``position`` counts the updates of this walk, and ``dgrads`` its dI, including those left out;
#: ``forwards`` counts the F of the epoch. ``rolled_at`` is the token at which the domain's scales
#: moved last: with its latest F, or in an update; ``scaled_at`` is that token for a tape's F.
#: ``drawn_at`` is the position of the random generator at which a tape's F began to draw, ``drawn``
#: the same position for the domain's latest F. If a domain's scales move once an epoch,
#: ``gathered`` is 1 from an F of the domain until the scales move; every dI comes in between.
STATE = {
    "token": Column("domain"),
    "position": Column("domain"),
    "busy": Column("domain", "ticket"),
    "poisoned": Column("domain", "flag"),
    "forwards": Column("stage"),
    "dgrads": Column("stage"),
    "scaled_at": Column("slot"),
    "rolled_at": Column("domain"),
    "drawn_at": Column("slot", initial=NEVER),
    "drawn": Column("domain", initial=NEVER),
    "gathered": Column("domain", "flag"),
}


def check_refresh_guards(st: State, stage, link):
    d = st.domain_of[stage]
    if st.busy[d] != 0:
        raise Refused("order.in-flight")
    if st.poisoned[d] != 0:
        raise Refused("order.poisoned")


def check_refresh_writes(st: State, stage, link):
    d = st.domain_of[stage]
    ticket = st.serial[0] + 1
    st.busy[d] = ticket


def commit_refresh_writes(st: State, stage, ticket, filled, fill_epoch):
    d = st.domain_of[stage]
    st.busy[d] = 0


def abort_refresh_writes(st: State, stage, ticket):
    d = st.domain_of[stage]
    st.busy[d] = 0
    st.poisoned[d] = 1


def check_evaluation_guards(st: State, stage, link, cached):
    d = st.domain_of[stage]
    if st.busy[d] != 0:
        raise Refused("order.in-flight")
    if st.poisoned[d] != 0:
        raise Refused("order.poisoned")


def check_evaluation_writes(st: State, stage, link, cached):
    d = st.domain_of[stage]
    ticket = st.serial[0] + 1
    st.busy[d] = ticket


def commit_evaluation_guards(st: State, stage, ticket, fill_epoch, updates):
    if st.reports_updates[stage] != 0 and updates != 0:
        raise Refused("order.scaling-updates")


def commit_evaluation_writes(st: State, stage, ticket, fill_epoch, updates):
    d = st.domain_of[stage]
    st.busy[d] = 0


def abort_evaluation_writes(st: State, stage, ticket):
    d = st.domain_of[stage]
    st.busy[d] = 0
    st.poisoned[d] = 1


def check_forward_guards(st: State, key, slot, token, link, refresh):
    s = key.stage
    c = key.cell
    d = st.domain_of[s]
    if st.busy[d] != 0:
        raise Refused("order.in-flight")
    if st.poisoned[d] != 0:
        raise Refused("order.poisoned")
    if st.token[d] != token:
        raise Refused("order.token")
    if st.declared[d] != 0 and st.forward_at[c] != st.position[d]:
        raise Refused("order.reordered")


def check_forward_writes(st: State, key, slot, token, link, refresh):
    s = key.stage
    d = st.domain_of[s]
    ticket = st.serial[0] + 1
    st.busy[d] = ticket


def commit_forward_guards(st: State, slot, ticket, filled, fill_epoch, updates, draws):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    if st.reports_updates[s] != 0 and updates + st.epoch_scales[d] != 1:
        raise Refused("order.scaling-updates")
    if st.reports_draws[s] != 0 and draws <= st.drawn[d]:
        raise Refused("order.draws-again")


def commit_forward_writes(st: State, slot, ticket, filled, fill_epoch, updates, draws):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    st.busy[d] = 0
    if st.epoch_scales[d] != 0:
        st.gathered[d] = 1
        st.scaled_at[slot] = st.rolled_at[d]
    else:
        st.scaled_at[slot] = st.token[d]
        st.rolled_at[d] = st.token[d]
    st.token[d] = st.token[d] + 1
    st.position[d] = st.position[d] + 1
    st.forwards[s] = st.forwards[s] + 1
    if st.reports_draws[s] != 0:
        st.drawn_at[slot] = draws
        st.drawn[d] = draws


def abort_forward_writes(st: State, slot, ticket):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    st.busy[d] = 0
    st.poisoned[d] = 1


def check_dgrad_guards(st: State, key, ref, token, link):
    s = key.stage
    c = key.cell
    d = st.domain_of[s]
    if st.busy[d] != 0:
        raise Refused("order.in-flight")
    if st.poisoned[d] != 0:
        raise Refused("order.poisoned")
    if st.token[d] != token:
        raise Refused("order.token")
    if st.declared[d] != 0 and st.dgrad_at[c] != st.position[d]:
        raise Refused("order.reordered")
    if st.live_scales[s] != 0 and st.scaled_at[ref.slot] != st.rolled_at[d]:
        raise Refused("order.scales-moved")


def check_dgrad_writes(st: State, key, ref, token, link):
    s = key.stage
    d = st.domain_of[s]
    ticket = st.serial[0] + 1
    st.busy[d] = ticket


def commit_dgrad_guards(st: State, slot, ticket, queued, updates, scales, draws, weight, parts):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    if st.reports_updates[s] != 0 and updates + st.epoch_scales[d] != 1:
        raise Refused("order.scaling-updates")
    if st.carried_scales[s] != 0 and scales != st.scaled_at[slot]:
        raise Refused("order.wrong-scales")
    if st.recomputes_draws[s] != 0 and draws != st.drawn_at[slot]:
        raise Refused("order.wrong-draws")


def commit_dgrad_writes(st: State, slot, ticket, queued, updates, scales, draws, weight, parts):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    st.busy[d] = 0
    st.token[d] = st.token[d] + 1
    st.position[d] = st.position[d] + 1
    st.dgrads[s] = st.dgrads[s] + 1


def abort_dgrad_writes(st: State, slot, ticket):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    st.busy[d] = 0
    st.poisoned[d] = 1


def group_wgrad_guards(st: State, key, ref, leader, ticket, link, destination):
    if st.scaled_at[ref.slot] != st.scaled_at[leader]:
        raise Refused("order.unequal-scales")


def finalize_guards(st: State, stage, link):
    d = st.domain_of[stage]
    if st.poisoned[d] != 0:
        raise Refused("order.poisoned")
    # Every dI follows its F, so the count of dI implies the count of F.
    if st.dgrads[stage] != st.cells[stage]:
        raise Refused("order.incomplete")


def skip_guards(st: State, key):
    d = st.domain_of[key.stage]
    if st.declared[d] != 0:
        raise Refused("order.declared")


def skip_writes(st: State, key):
    s = key.stage
    st.dgrads[s] = st.dgrads[s] + 1


def next_walk_writes(st: State, epoch):
    st.fill(st.position, 0)
    st.fill(st.dgrads, 0)


def move_scales_guards(st: State, stage, updates):
    d = st.domain_of[stage]
    if st.optimizing[0] == 0:
        raise Refused("order.moves-outside-update")
    if st.gathered[d] == 0:
        raise Refused("order.nothing-gathered")
    if st.reports_updates[stage] != 0 and updates != 1:
        raise Refused("order.scaling-updates")


def move_scales_writes(st: State, stage, updates):
    d = st.domain_of[stage]
    st.gathered[d] = 0
    st.rolled_at[d] = st.token[d]


def commit_update_before_persistence_guards(st: State, epoch, ticket):
    if not st.every(st.gathered, 0):
        raise Refused("order.scales-not-moved")


def commit_update_writes(st: State, epoch, ticket):
    st.fill(st.position, 0)
    st.fill(st.forwards, 0)
    st.fill(st.dgrads, 0)


def checkpoint_guards(st: State):
    if not st.every(st.poisoned, 0):
        raise Refused("order.poisoned")


def restore_writes(st: State, epoch, incarnation):
    st.fill(st.token, 0)
    st.fill(st.position, 0)
    st.fill(st.poisoned, 0)
    st.fill(st.forwards, 0)
    st.fill(st.dgrads, 0)
    st.fill(st.drawn, NEVER)
    st.fill(st.rolled_at, 0)
    st.fill(st.gathered, 0)
