"""
Epoch: a stage is final only when its step is whole, and a spoiled epoch never commits (paper,
IV-E).
"""

from __future__ import annotations

from ..refusals import Refused
from .columns import Column
from .constants import NEVER, State

#: ``weight_epoch`` counts a stage's optimizer updates; ``spoiled`` and ``final`` are the last epoch
#: in which a stage was spoiled or finalized. ``optimizing`` is the ticket of the update in flight,
#: or 0; ``half_updated`` is 1 from a failed update until the next restore.
#:
#: While an update is in flight, or failed half way, every action of the epoch ran. So other clauses
#: refuse every action: each F by ``ownership.repeated-forward``, each refresh by
#: ``version.late-refresh`` or ``version.already-fresh``. Only a second update and a restore need
#: guards here.
STATE = {
    "weight_epoch": Column("stage"),
    "wgrads": Column("stage"),
    "spoiled": Column("stage", initial=NEVER),
    "final": Column("stage", initial=NEVER),
    "optimizing": Column("one", "ticket"),
    "half_updated": Column("one", "flag"),
}


def commit_wgrad_writes(st: State, slot, ticket, covered):
    s = st.slot_stage[slot]
    st.wgrads[s] = st.wgrads[s] + 1


def abort_forward_writes(st: State, slot, ticket):
    s = st.slot_stage[slot]
    st.spoiled[s] = st.epoch_at[slot]


def abort_dgrad_writes(st: State, slot, ticket):
    s = st.slot_stage[slot]
    st.spoiled[s] = st.epoch_at[slot]


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


def check_update_guards(st: State, epoch, caller):
    if st.optimizing[0] != 0:
        raise Refused("epoch.in-flight")
    if st.half_updated[0] != 0:
        raise Refused("epoch.half-updated")
    if not st.every(st.weight_epoch, epoch):
        raise Refused("epoch.wrong-epoch")
    if not st.every(st.final, epoch):
        raise Refused("epoch.not-final")


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
    st.fill(st.wgrads, 0)


def abort_update_guards(st: State, epoch, ticket):
    if st.optimizing[0] == 0 or st.optimizing[0] != ticket:
        raise Refused("epoch.unknown-ticket")
    if not st.every(st.weight_epoch, epoch):
        raise Refused("epoch.unknown-ticket")


def abort_update_writes(st: State, epoch, ticket):
    st.optimizing[0] = 0
    st.half_updated[0] = 1


def restore_before_ownership_guards(st: State, epoch, incarnation):
    if st.optimizing[0] != 0:
        raise Refused("epoch.in-flight")


def restore_writes(st: State, epoch, incarnation):
    st.fill(st.weight_epoch, epoch)
    st.fill(st.wgrads, 0)
    st.fill(st.spoiled, NEVER)
    st.fill(st.final, NEVER)
    st.half_updated[0] = 0
