"""
Completion: a replay waits for its caller, and a consumer waits for the replay (paper, II-C and
IV-D).
"""

from __future__ import annotations

from ..refusals import Refused
from .columns import Column
from .constants import NEVER, State

#: A link is one pair of a caller stream and a domain's graph stream. ``submitted`` counts the
#: caller's work, ``joined`` how much of it the graph stream has waited for; ``replays`` counts
#: the graph stream's work, ``waited`` how much of it the caller has waited for, ``undrained``
#: whether the host has yet to see it finish; a failed action may have enqueued some. ``produced``
#: and ``landed`` say which replay wrote a slot and a stage's gradients. ``consumer`` is the link
#: of the stream that reads a stage's gradients, ``named`` the epoch in which it was first named.
STATE = {
    "submitted": Column("link"),
    "joined": Column("link"),
    "waited": Column("link"),
    "replays": Column("domain"),
    "undrained": Column("domain", "flag"),
    "produced": Column("slot"),
    "landed": Column("stage"),
    "named": Column("stage", initial=NEVER),
    "consumer": Column("stage", "link", None),
}


def submit_writes(st: State, link):
    st.submitted[link] = st.submitted[link] + 1


def join_writes(st: State, link):
    st.joined[link] = st.submitted[link]


def wait_writes(st: State, link):
    d = st.domain_at[link]
    st.waited[link] = st.replays[d]


def drain_writes(st: State, domain):
    st.undrained[domain] = 0


def require_join(st: State, d, link):
    """The graph stream has waited for everything this caller submitted."""
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.joined[link] != st.submitted[link]:
        raise Refused("completion.caller-to-graph")


def replayed(st: State, d):
    """One more replay was enqueued on the domain's graph stream."""
    replay = st.replays[d] + 1
    st.replays[d] = replay
    st.undrained[d] = 1


def check_refresh_guards(st: State, stage, link):
    d = st.domain_of[stage]
    require_join(st, d, link)


def commit_refresh_writes(st: State, stage, ticket, filled, fill_epoch):
    d = st.domain_of[stage]
    replayed(st, d)


def check_forward_guards(st: State, key, slot, token, link, refresh):
    s = key.stage
    d = st.domain_of[s]
    require_join(st, d, link)


def commit_forward_writes(st: State, slot, ticket, filled, fill_epoch, updates):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    replay = st.replays[d] + 1
    st.produced[slot] = replay
    replayed(st, d)


def check_dgrad_guards(st: State, key, ref, token, link):
    slot = ref.slot
    s = key.stage
    d = st.domain_of[s]
    require_join(st, d, link)
    if st.waited[link] < st.produced[slot]:
        raise Refused("completion.graph-to-caller")


def commit_dgrad_writes(st: State, slot, ticket, queued, updates, scales):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    replay = st.replays[d] + 1
    st.produced[slot] = replay
    replayed(st, d)


def check_wgrad_guards(st: State, key, ref, link, destination, first):
    s = key.stage
    d = st.domain_of[s]
    require_join(st, d, link)


def commit_wgrad_writes(st: State, slot, ticket, covered):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    replay = st.replays[d] + 1
    st.landed[s] = replay
    replayed(st, d)


def abort_refresh_writes(st: State, stage, ticket):
    d = st.domain_of[stage]
    st.undrained[d] = 1


def abort_forward_writes(st: State, slot, ticket):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    st.undrained[d] = 1


def abort_dgrad_writes(st: State, slot, ticket):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    st.undrained[d] = 1


def abort_wgrad_writes(st: State, slot, ticket):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    st.undrained[d] = 1


def read_guards(st: State, key, ref, bit, link):
    slot = ref.slot
    s = key.stage
    d = st.domain_of[s]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.waited[link] < st.produced[slot]:
        raise Refused("completion.graph-to-caller")


def finalize_guards(st: State, stage, link):
    d = st.domain_of[stage]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.waited[link] < st.landed[stage]:
        raise Refused("completion.graph-to-caller")
    if st.named[stage] == st.weight_epoch[stage] and st.consumer[stage] != link:
        raise Refused("completion.wrong-consumer")


def finalize_writes(st: State, stage, link):
    st.named[stage] = st.weight_epoch[stage]
    st.consumer[stage] = link


def start_reduction_guards(st: State, bucket, link):
    s = st.stage_at[bucket]
    t = st.tied_at[bucket]
    d = st.domain_of[s]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.waited[link] < st.landed[s] or st.waited[link] < st.landed[t]:
        raise Refused("completion.graph-to-caller")


def start_reduction_writes(st: State, bucket, link):
    s = st.stage_at[bucket]
    d = st.domain_of[s]
    st.undrained[d] = 1


def finish_reduction_guards(st: State, bucket, link):
    s = st.stage_at[bucket]
    t = st.tied_at[bucket]
    d = st.domain_of[s]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.named[s] == st.weight_epoch[s] and st.consumer[s] != link:
        raise Refused("completion.wrong-consumer")
    if st.named[t] == st.weight_epoch[t] and st.consumer[t] != link:
        raise Refused("completion.wrong-consumer")


def finish_reduction_writes(st: State, bucket, link):
    s = st.stage_at[bucket]
    t = st.tied_at[bucket]
    st.named[s] = st.weight_epoch[s]
    st.named[t] = st.weight_epoch[t]
    st.consumer[s] = link
    st.consumer[t] = link


def restore_writes(st: State, epoch, incarnation):
    st.fill(st.submitted, 0)
    st.fill(st.joined, 0)
    st.fill(st.waited, 0)
    st.fill(st.replays, 0)
    st.fill(st.produced, 0)
    st.fill(st.landed, 0)
    st.fill(st.named, NEVER)
