"""
Epoch: a stage is final only when its step is whole, and a spoiled epoch never commits (paper,
IV-E).
"""

from __future__ import annotations

from ..refusals import Refused
from .columns import Column
from .constants import NEVER, State

#: ``weight_epoch`` counts a stage's optimizer updates, ``walk`` the walks of the epoch that are
#: over, and ``wgrads`` the dW of the walk under way, including those left out; ``spoiled`` and
#: ``final`` are the last epoch in which a stage was spoiled or finalized. ``optimizing`` is the
#: ticket of the update in flight, or 0; ``half_updated`` is 1 from a failed update, or a late fault
#: of an epoch whose update began, until the next restore. ``evaluating`` is the ticket of a stage's
#: evaluation in flight, or 0. The weights of a stage's dI are counted in ``parts``, 0 before the
#: first dI of the epoch; ``unweighed`` counts the parts that no dI of the epoch has had yet.
#:
#: While an update is in flight, every action of the epoch ran. So other clauses refuse each F, dI
#: and dW. A refresh and a bind need guards here, for a stage that leaves out order or the arena.
STATE = {
    "weight_epoch": Column("stage"),
    "walk": Column("one"),
    "wgrads": Column("stage"),
    "spoiled": Column("stage", initial=NEVER),
    "final": Column("stage", initial=NEVER),
    "optimizing": Column("one", "ticket"),
    "half_updated": Column("one", "flag"),
    "evaluating": Column("stage", "ticket"),
    "parts": Column("stage"),
    "unweighed": Column("stage"),
}


def reserve_guards(st: State, key, slot, link):
    if st.half_updated[0] != 0:
        raise Refused("epoch.half-updated")


def bind_guards(st: State, key, destination):
    if st.optimizing[0] != 0:
        raise Refused("epoch.in-flight")
    if st.half_updated[0] != 0:
        raise Refused("epoch.half-updated")


def check_refresh_guards(st: State, stage, link):
    if st.optimizing[0] != 0:
        raise Refused("epoch.in-flight")
    if st.half_updated[0] != 0:
        raise Refused("epoch.half-updated")


def check_forward_guards(st: State, key, slot, token, link, refresh):
    if st.half_updated[0] != 0:
        raise Refused("epoch.half-updated")


def check_dgrad_guards(st: State, key, ref, token, link):
    if st.half_updated[0] != 0:
        raise Refused("epoch.half-updated")


def commit_dgrad_guards(st: State, slot, ticket, queued, updates, scales, draws, weight, parts):
    s = st.slot_stage[slot]
    if st.reports_weights[s] != 0 and (parts <= 0 or (st.parts[s] != 0 and parts != st.parts[s])):
        raise Refused("epoch.other-parts")


def commit_dgrad_writes(st: State, slot, ticket, queued, updates, scales, draws, weight, parts):
    s = st.slot_stage[slot]
    if st.reports_weights[s] != 0:
        # The first dI of the epoch adds all its parts, a later one none.
        st.unweighed[s] = st.unweighed[s] + (parts - st.parts[s]) - weight
        st.parts[s] = parts


def check_wgrad_guards(st: State, key, ref, link, destination, first):
    if st.half_updated[0] != 0:
        raise Refused("epoch.half-updated")


def commit_wgrad_writes(st: State, slot, ticket, covered):
    s = st.slot_stage[slot]
    st.wgrads[s] = st.wgrads[s] + 1


def abort_forward_writes(st: State, slot, ticket):
    s = st.slot_stage[slot]
    st.spoiled[s] = st.epoch_at[slot]


def abort_dgrad_writes(st: State, slot, ticket):
    s = st.slot_stage[slot]
    st.spoiled[s] = st.epoch_at[slot]


def ungroup_wgrad_writes(st: State, key, ref, covered):
    slot = ref.slot
    s = key.stage
    mask = st.consumers[slot]
    if mask != 0:
        st.wgrads[s] = st.wgrads[s] + 1


def abort_wgrad_writes(st: State, slot, ticket):
    s = st.slot_stage[slot]
    st.spoiled[s] = st.epoch_at[slot]


def drop_writes(st: State, key, ref):
    s = key.stage
    e = key.epoch
    st.spoiled[s] = e
    st.final[s] = NEVER


def invalidate_writes(st: State, stage):
    d = st.domain_of[stage]
    # A dI is still to come or in flight, or the first F is in flight.
    if st.forwards[stage] != 0 and st.dgrads[stage] != st.cells[stage]:
        st.spoiled[stage] = st.weight_epoch[stage]
    if st.refreshed[d] == stage and st.busy[d] != 0:
        st.spoiled[stage] = st.weight_epoch[stage]


def check_evaluation_guards(st: State, stage, link, cached):
    if st.evaluating[stage] != 0:
        raise Refused("epoch.in-flight")
    if st.optimizing[0] != 0:
        raise Refused("epoch.in-flight")
    if st.half_updated[0] != 0:
        raise Refused("epoch.half-updated")


def check_evaluation_writes(st: State, stage, link, cached):
    ticket = st.serial[0] + 1
    st.evaluating[stage] = ticket


def commit_evaluation_before_ownership_guards(st: State, stage, ticket, fill_epoch, updates):
    if st.evaluating[stage] == 0 or st.evaluating[stage] != ticket:
        raise Refused("epoch.unknown-ticket")


def commit_evaluation_writes(st: State, stage, ticket, fill_epoch, updates):
    st.evaluating[stage] = 0


def abort_evaluation_guards(st: State, stage, ticket):
    if st.evaluating[stage] == 0 or st.evaluating[stage] != ticket:
        raise Refused("epoch.unknown-ticket")


def abort_evaluation_writes(st: State, stage, ticket):
    st.evaluating[stage] = 0
    st.spoiled[stage] = st.weight_epoch[stage]
    st.final[stage] = NEVER


def finalize_guards(st: State, stage, link):
    if st.spoiled[stage] == st.weight_epoch[stage]:
        raise Refused("epoch.spoiled")
    if st.wgrads[stage] != st.cells[stage]:
        raise Refused("epoch.incomplete")
    if st.final[stage] == st.weight_epoch[stage]:
        raise Refused("epoch.already-final")


def finalize_writes(st: State, stage, link):
    st.final[stage] = st.weight_epoch[stage]


def fail_reduction_writes(st: State, bucket):
    s = st.stage_at[bucket]
    t = st.tied_at[bucket]
    st.spoiled[s] = st.weight_epoch[s]
    st.spoiled[t] = st.weight_epoch[t]
    st.final[s] = NEVER
    st.final[t] = NEVER


def start_weights_read_guards(st: State, stage, link):
    if st.optimizing[0] != 0:
        raise Refused("epoch.in-flight")
    if st.half_updated[0] != 0:
        raise Refused("epoch.half-updated")


def start_gradients_read_guards(st: State, stage, link):
    if st.optimizing[0] != 0:
        raise Refused("epoch.in-flight")
    if st.half_updated[0] != 0:
        raise Refused("epoch.half-updated")
    if st.final[stage] != st.weight_epoch[stage]:
        raise Refused("epoch.not-final")


def skip_guards(st: State, key):
    c = key.cell
    if st.keeper_of[st.buffer_of[c]] == c:
        raise Refused("epoch.sole-writer")


def skip_writes(st: State, key):
    s = key.stage
    st.wgrads[s] = st.wgrads[s] + 1


def next_walk_guards(st: State, epoch):
    if st.optimizing[0] != 0:
        raise Refused("epoch.in-flight")
    if not st.every(st.evaluating, 0):
        raise Refused("epoch.in-flight")
    if st.half_updated[0] != 0:
        raise Refused("epoch.half-updated")
    if not st.every(st.weight_epoch, epoch):
        raise Refused("epoch.wrong-epoch")
    if not st.every(st.final, epoch):
        raise Refused("epoch.not-final")


def next_walk_writes(st: State, epoch):
    st.walk[0] = st.walk[0] + 1
    st.fill(st.wgrads, 0)
    st.fill(st.final, NEVER)


def check_update_guards(st: State, epoch, caller):
    if st.optimizing[0] != 0:
        raise Refused("epoch.in-flight")
    if not st.every(st.evaluating, 0):
        raise Refused("epoch.in-flight")
    if st.half_updated[0] != 0:
        raise Refused("epoch.half-updated")
    if not st.every(st.weight_epoch, epoch):
        raise Refused("epoch.wrong-epoch")
    if not st.every(st.final, epoch):
        raise Refused("epoch.not-final")
    if not st.every(st.unweighed, 0):
        raise Refused("epoch.wrong-weights")


def check_update_writes(st: State, epoch, caller):
    ticket = st.serial[0] + 1
    st.optimizing[0] = ticket


def commit_update_guards(st: State, epoch, ticket):
    if st.optimizing[0] == 0 or st.optimizing[0] != ticket:
        raise Refused("epoch.unknown-ticket")
    if not st.every(st.weight_epoch, epoch):
        raise Refused("epoch.unknown-ticket")


def commit_update_writes(st: State, epoch, ticket):
    st.optimizing[0] = 0
    st.fill(st.weight_epoch, epoch + 1)
    st.walk[0] = 0
    st.fill(st.wgrads, 0)
    st.fill(st.parts, 0)


def abort_update_guards(st: State, epoch, ticket):
    if st.optimizing[0] == 0 or st.optimizing[0] != ticket:
        raise Refused("epoch.unknown-ticket")
    if not st.every(st.weight_epoch, epoch):
        raise Refused("epoch.unknown-ticket")


def abort_update_writes(st: State, epoch, ticket):
    st.optimizing[0] = 0
    st.half_updated[0] = 1


def fail_guards(st: State, stage, epoch):
    if epoch > st.weight_epoch[stage]:
        raise Refused("epoch.not-begun")


def fail_writes(st: State, stage, epoch):
    if epoch == st.weight_epoch[stage]:
        st.spoiled[stage] = epoch
        st.final[stage] = NEVER
    if epoch != st.weight_epoch[stage] or st.optimizing[0] != 0:
        st.half_updated[0] = 1


def restore_before_ownership_guards(st: State, epoch, incarnation):
    if st.optimizing[0] != 0:
        raise Refused("epoch.in-flight")
    if not st.every(st.evaluating, 0):
        raise Refused("epoch.in-flight")


def restore_writes(st: State, epoch, incarnation):
    st.fill(st.weight_epoch, epoch)
    st.walk[0] = 0
    st.fill(st.wgrads, 0)
    st.fill(st.parts, 0)
    st.fill(st.unweighed, 0)
    st.fill(st.spoiled, NEVER)
    st.fill(st.final, NEVER)
    st.half_updated[0] = 0
