"""
Version: every action sees the weights, and the quantized weight cache, of its key's epoch
(paper, III-C; Invariant 3).
"""

from __future__ import annotations

from ..refusals import Refused
from .columns import Column
from .constants import NEVER, NO_STAGE, State

#: ``refreshed`` names the stage whose first forward must come next in the domain, or NO_STAGE;
#: ``refreshing`` is the ticket of the refresh in flight on a stage, ``filling`` the ticket of the F
#: in flight that refreshes the cache itself, or 0.
STATE = {
    "cache_epoch": Column("stage", initial=NEVER),
    "refreshed": Column("domain", "stage", NO_STAGE),
    "refreshing": Column("stage", "ticket"),
    "filling": Column("stage", "ticket"),
}


def left_out(st: State):
    """Refuse this relation's own transitions, because the contract leaves the relation out."""
    raise Refused("version.left-out")


def reserve_guards(st: State, key, slot, link):
    s = key.stage
    e = key.epoch
    if e != st.weight_epoch[s]:
        raise Refused("version.wrong-epoch")


def check_refresh_guards(st: State, stage, link):
    d = st.domain_of[stage]
    if st.refreshing[stage] != 0 or st.filling[stage] != 0:
        raise Refused("version.in-flight")
    if st.cache_epoch[stage] == st.weight_epoch[stage]:
        raise Refused("version.already-fresh")
    if st.forwards[stage] != 0:
        raise Refused("version.late-refresh")
    if st.refreshed[d] != NO_STAGE and st.refreshed[d] != stage:
        raise Refused("version.refresh-interrupted")


def check_refresh_writes(st: State, stage, link):
    ticket = st.serial[0] + 1
    st.refreshing[stage] = ticket


def commit_refresh_guards(st: State, stage, ticket, filled, fill_epoch):
    if st.refreshing[stage] == 0 or st.refreshing[stage] != ticket:
        raise Refused("version.unknown-ticket")
    if st.reports_fills[stage] != 0 and filled != st.matrices[stage]:
        raise Refused("version.fill-missing")
    if st.reports_fills[stage] != 0 and fill_epoch != st.weight_epoch[stage]:
        raise Refused("version.wrong-fill")


def commit_refresh_writes(st: State, stage, ticket, filled, fill_epoch):
    d = st.domain_of[stage]
    st.refreshing[stage] = 0
    st.cache_epoch[stage] = st.weight_epoch[stage]
    st.refreshed[d] = stage


def abort_refresh_guards(st: State, stage, ticket):
    if st.refreshing[stage] == 0 or st.refreshing[stage] != ticket:
        raise Refused("version.unknown-ticket")


def abort_refresh_writes(st: State, stage, ticket):
    st.refreshing[stage] = 0


def check_forward_guards(st: State, key, slot, token, link, refresh):
    s = key.stage
    e = key.epoch
    d = st.domain_of[s]
    cached = st.cache_epoch[s]
    waiting = st.refreshed[d]
    if e != st.weight_epoch[s]:
        raise Refused("version.wrong-epoch")
    if refresh != 0 and (st.refreshing[s] != 0 or st.filling[s] != 0):
        raise Refused("version.in-flight")
    if refresh == 0 and cached != e:
        raise Refused("version.stale-cache")
    if refresh != 0 and cached == e:
        raise Refused("version.already-fresh")
    if refresh != 0 and st.forwards[s] != 0:
        raise Refused("version.late-refresh")
    if waiting != NO_STAGE and waiting != s:
        raise Refused("version.refresh-interrupted")


def check_forward_writes(st: State, key, slot, token, link, refresh):
    s = key.stage
    ticket = st.serial[0] + 1
    if refresh != 0:
        st.filling[s] = ticket


def commit_forward_guards(st: State, slot, ticket, filled, fill_epoch, updates, draws):
    s = st.slot_stage[slot]
    reports = st.reports_fills[s]
    if reports != 0 and st.filling[s] == ticket and filled != st.matrices[s]:
        raise Refused("version.fill-missing")
    if reports != 0 and st.filling[s] == ticket and fill_epoch != st.weight_epoch[s]:
        raise Refused("version.wrong-fill")
    if reports != 0 and st.filling[s] != ticket and fill_epoch != NEVER:
        raise Refused("version.fill-unasked")


def commit_forward_writes(st: State, slot, ticket, filled, fill_epoch, updates, draws):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    if st.filling[s] == ticket:
        st.cache_epoch[s] = st.epoch_at[slot]
        st.filling[s] = 0
    st.refreshed[d] = NO_STAGE


def abort_forward_writes(st: State, slot, ticket):
    s = st.slot_stage[slot]
    if st.filling[s] == ticket:
        st.filling[s] = 0


def check_evaluation_guards(st: State, stage, link, cached):
    d = st.domain_of[stage]
    if cached != 0 and st.cache_epoch[stage] != st.weight_epoch[stage]:
        raise Refused("version.stale-cache")
    if st.refreshed[d] != NO_STAGE:
        raise Refused("version.refresh-interrupted")


def commit_evaluation_guards(st: State, stage, ticket, fill_epoch, updates):
    if st.reports_fills[stage] != 0 and fill_epoch != NEVER:
        raise Refused("version.fill-unasked")


def check_dgrad_guards(st: State, key, ref, token, link):
    s = key.stage
    e = key.epoch
    d = st.domain_of[s]
    # The key names a live tape (ownership.wrong-key), and no tape outlives its weight epoch.
    if st.cache_epoch[s] != e:
        raise Refused("version.stale-cache")
    if st.refreshed[d] != NO_STAGE:
        raise Refused("version.refresh-interrupted")


def bind_guards(st: State, key, destination):
    s = key.stage
    e = key.epoch
    if e != st.weight_epoch[s]:
        raise Refused("version.wrong-epoch")


def skip_guards(st: State, key):
    s = key.stage
    e = key.epoch
    if e != st.weight_epoch[s]:
        raise Refused("version.wrong-epoch")


def invalidate_guards(st: State, stage):
    if st.refreshing[stage] != 0 or st.filling[stage] != 0:
        raise Refused("version.in-flight")


def invalidate_writes(st: State, stage):
    st.cache_epoch[stage] = NEVER


def check_update_guards(st: State, epoch, caller):
    if not st.every(st.refreshing, 0):
        raise Refused("version.in-flight")


def restore_guards(st: State, epoch, incarnation):
    if not st.every(st.refreshing, 0):
        raise Refused("version.in-flight")


def restore_writes(st: State, epoch, incarnation):
    st.fill(st.cache_epoch, NEVER)
    st.fill(st.refreshed, NO_STAGE)
