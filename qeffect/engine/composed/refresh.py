"""
The composed transitions check_refresh, commit_refresh and abort_refresh.

Written by ``python -m qeffect.engine``; edit ``qeffect.relations`` and write it again.
"""

from __future__ import annotations

from ...refusals import Refused
from ...relations.constants import NO_STAGE

__all__ = ["abort_refresh", "check_refresh", "commit_refresh"]


def check_refresh(st, stage, link):
    """
    Before a refresh: reserves the domain.

    Guards: version, order, completion.
    Writes: version, order, tickets.
    """
    # version.check_refresh_guards
    d = st.domain_of[stage]
    if st.refreshing[stage] != 0 or st.filling[stage] != 0:
        raise Refused("version.in-flight")
    if st.cache_epoch[stage] == st.weight_epoch[stage]:
        raise Refused("version.already-fresh")
    if st.forwards[stage] != 0:
        raise Refused("version.late-refresh")
    if st.refreshed[d] != NO_STAGE and st.refreshed[d] != stage:
        raise Refused("version.refresh-interrupted")
    # order.check_refresh_guards
    if st.busy[d] != 0:
        raise Refused("order.in-flight")
    if st.poisoned[d] != 0:
        raise Refused("order.poisoned")
    # completion.check_refresh_guards
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.joined[link] != st.submitted[link]:
        raise Refused("completion.caller-to-graph")
    if st.unawaited[d] != 0:
        raise Refused("completion.update-to-graph")
    ticket = st.serial[0] + 1
    # version.check_refresh_writes
    st.refreshing[stage] = ticket
    # order.check_refresh_writes
    st.busy[d] = ticket
    # tickets.check_refresh_writes
    st.serial[0] = ticket
    return ticket


def commit_refresh(st, stage, ticket, filled, fill_epoch):
    """
    After a refresh: the cache is current. `filled` names the caches that were filled, and
    `fill_epoch` the weights they were filled from.

    Guards: version.
    Writes: version, order, completion.
    """
    # version.commit_refresh_guards
    if st.refreshing[stage] == 0 or st.refreshing[stage] != ticket:
        raise Refused("version.unknown-ticket")
    if st.reports_fills[stage] != 0 and filled != st.matrices[stage]:
        raise Refused("version.fill-missing")
    if st.reports_fills[stage] != 0 and fill_epoch != st.weight_epoch[stage]:
        raise Refused("version.wrong-fill")
    d = st.domain_of[stage]
    replay = st.replays[d] + 1
    # version.commit_refresh_writes
    st.refreshing[stage] = 0
    st.cache_epoch[stage] = st.weight_epoch[stage]
    st.refreshed[d] = stage
    # order.commit_refresh_writes
    st.busy[d] = 0
    # completion.commit_refresh_writes
    st.replays[d] = replay
    st.undrained[d] = 1


def abort_refresh(st, stage, ticket):
    """
    After a refresh failed: poisons the domain.

    Guards: version.
    Writes: version, order, completion.
    """
    # version.abort_refresh_guards
    if st.refreshing[stage] == 0 or st.refreshing[stage] != ticket:
        raise Refused("version.unknown-ticket")
    d = st.domain_of[stage]
    # version.abort_refresh_writes
    st.refreshing[stage] = 0
    # order.abort_refresh_writes
    st.busy[d] = 0
    st.poisoned[d] = 1
    # completion.abort_refresh_writes
    st.undrained[d] = 1
