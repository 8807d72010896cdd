"""
Completion: a replay waits for its caller, and a consumer waits for the replay (paper, II-C and
IV-D).
"""

from __future__ import annotations

from ..refusals import Refused
from .columns import Column
from .constants import BACK_BIT, COPY_BIT, NEVER, State

#: A link is a pair of a caller's stream and a domain's graph stream.
#: ``submitted`` counts the caller's work, and ``joined`` how much of this work the graph stream has
#: waited for. ``replays`` counts the graph stream's work, ``waited`` how much of this work the
#: caller has waited for, and ``undrained`` is 1 until the host has seen the work finish. A failed
#: action may have enqueued work, so it counts as a replay.
#: ``produced`` is the number of the replay that last wrote a slot, ``landed`` the number of a
#: stage's latest dW, and ``vacated`` the number of the last replay of the slot's last tenant.
#: ``ended_on`` is the link on which the slot's latest transfer ended, or its input's copy was
#: enqueued; ``ended_at`` is the number of that end in the link's ``submitted``.
#: ``consumer`` is the caller whose stream reads the gradients, ``named`` the last epoch in which a
#: call named that stream. ``updater`` is the caller whose stream ran the latest optimizer update,
#: and ``unawaited`` is 1 until the graph stream has waited for that update. ``unseen`` is 1 until
#: the link's caller has waited for the graph stream after that.
#: ``gradients_read`` is 1 while a separate stream reads a stage's gradients. The consumer and the
#: stage's graph stream wait for its end.
#: ``unwaited`` is 1 from an evaluation until the consumer has waited for the graph stream; a
#: ``finalize`` of one of the domain's stages sets it again, for the consumer that the call names.
#: ``weights_read`` is 1 while a separate stream reads a stage's weights. The stream of the update
#: waits for the end of that read; ``consumer`` and ``named`` record it like the stream that reads
#: the gradients.
STATE = {
    "submitted": Column("link"),
    "joined": Column("link"),
    "waited": Column("link"),
    "replays": Column("domain"),
    "undrained": Column("domain", "flag"),
    "produced": Column("slot"),
    "landed": Column("stage"),
    "vacated": Column("slot"),
    "ended_on": Column("slot", "link", None),
    "ended_at": Column("slot"),
    "named": Column("one", initial=NEVER),
    "consumer": Column("one", "caller", None),
    "updater": Column("one", "caller", None),
    "unawaited": Column("domain", "flag"),
    "weights_read": Column("stage", "flag"),
    "gradients_read": Column("stage", "flag"),
    "unseen": Column("link", "flag"),
    "unwaited": Column("domain", "flag"),
}


def submit_writes(st: State, link):
    st.submitted[link] = st.submitted[link] + 1


def join_writes(st: State, link):
    st.joined[link] = st.submitted[link]
    if st.caller_at[link] == st.updater[0]:
        st.unawaited[st.domain_at[link]] = 0


def wait_writes(st: State, link):
    d = st.domain_at[link]
    st.waited[link] = st.replays[d]
    if st.unawaited[d] == 0:
        st.unseen[link] = 0
    if st.caller_at[link] == st.consumer[0]:
        st.unwaited[d] = 0


def drain_writes(st: State, domain):
    st.undrained[domain] = 0
    st.unawaited[domain] = 0


def require_join(st: State, d, link):
    """Require that the graph stream has waited for all work that this caller submitted."""
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.joined[link] != st.submitted[link]:
        raise Refused("completion.caller-to-graph")


def require_update_awaited(st: State, d):
    """Require that the graph stream has waited for the latest update, or the host saw it finish."""
    if st.unawaited[d] != 0:
        raise Refused("completion.update-to-graph")


def replayed(st: State, d):
    """Count a replay that was enqueued on the domain's graph stream."""
    replay = st.replays[d] + 1
    st.replays[d] = replay
    st.undrained[d] = 1


def require_vacated(st: State, slot, d, link):
    """Require that the caller's stream has waited for the work of the slot's last tape."""
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.waited[link] < st.vacated[slot]:
        raise Refused("completion.slot-not-awaited")


def require_one_end(st: State, slot, d, link):
    """Require that the slot's last transfer ended on this link, or the graph stream awaited it."""
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.ended_on[slot] != link and st.joined[st.ended_on[slot]] < st.ended_at[slot]:
        raise Refused("completion.two-ends")


def transferred(st: State, slot, link):
    """Count the end of a transfer on the caller's stream; later replays must come after it."""
    end = st.submitted[link] + 1
    st.submitted[link] = end
    st.ended_on[slot] = link
    st.ended_at[slot] = end


def reserve_guards(st: State, key, slot, link):
    s = key.stage
    d = st.domain_of[s]
    require_vacated(st, slot, d, link)
    on = st.ended_on[slot]
    if st.receives[s] & COPY_BIT != 0 and on != link and st.joined[on] < st.ended_at[slot]:
        raise Refused("completion.two-ends")


def reserve_writes(st: State, key, slot, link):
    s = key.stage
    d = st.domain_of[s]
    end = st.submitted[link] + 1
    if st.receives[s] & COPY_BIT != 0:
        st.submitted[link] = end
        st.ended_on[slot] = link
        st.ended_at[slot] = end
        st.undrained[d] = 1


def check_refresh_guards(st: State, stage, link):
    d = st.domain_of[stage]
    require_join(st, d, link)
    require_update_awaited(st, d)


def commit_refresh_writes(st: State, stage, ticket, filled, fill_epoch):
    d = st.domain_of[stage]
    replayed(st, d)


def check_evaluation_guards(st: State, stage, link, cached):
    d = st.domain_of[stage]
    require_join(st, d, link)
    require_update_awaited(st, d)


def commit_evaluation_writes(st: State, stage, ticket, fill_epoch, updates):
    d = st.domain_of[stage]
    st.unwaited[d] = 1
    replayed(st, d)


def abort_evaluation_writes(st: State, stage, ticket):
    d = st.domain_of[stage]
    st.undrained[d] = 1


def check_forward_guards(st: State, key, slot, token, link, refresh):
    s = key.stage
    d = st.domain_of[s]
    require_join(st, d, link)
    require_update_awaited(st, d)
    if st.joined[st.ended_on[slot]] < st.ended_at[slot]:
        raise Refused("completion.transfer-to-graph")


def commit_forward_writes(st: State, slot, ticket, filled, fill_epoch, updates, draws):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    replay = st.replays[d] + 1
    st.produced[slot] = replay
    replayed(st, d)


def check_dgrad_guards(st: State, key, ref, token, link):
    slot = ref.slot
    s = key.stage
    d = st.domain_of[s]
    needs = st.receives[s]
    require_join(st, d, link)
    if st.waited[link] < st.produced[slot]:
        raise Refused("completion.graph-to-caller")
    if needs & BACK_BIT != 0 and st.joined[st.ended_on[slot]] < st.ended_at[slot]:
        raise Refused("completion.transfer-to-graph")


def commit_dgrad_writes(st: State, slot, ticket, queued, updates, scales, draws, weight, parts):
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
    st.vacated[slot] = replay
    replayed(st, d)


def group_wgrad_guards(st: State, key, ref, leader, ticket, link, destination):
    s = key.stage
    d = st.domain_of[s]
    require_join(st, d, link)


def ungroup_wgrad_writes(st: State, key, ref, covered):
    slot = ref.slot
    home = st.domain_of[st.slot_stage[slot]]
    st.vacated[slot] = st.replays[home]


def abort_refresh_writes(st: State, stage, ticket):
    d = st.domain_of[stage]
    st.undrained[d] = 1


def abort_forward_writes(st: State, slot, ticket):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    replay = st.replays[d] + 1
    st.vacated[slot] = replay
    replayed(st, d)


def abort_dgrad_writes(st: State, slot, ticket):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    replay = st.replays[d] + 1
    st.vacated[slot] = replay
    replayed(st, d)


def abort_wgrad_writes(st: State, slot, ticket):
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    replay = st.replays[d] + 1
    st.vacated[slot] = replay
    replayed(st, d)


def read_guards(st: State, key, ref, bit, link):
    slot = ref.slot
    s = key.stage
    d = st.domain_of[s]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.waited[link] < st.produced[slot]:
        raise Refused("completion.graph-to-caller")


def read_writes(st: State, key, ref, bit, link):
    s = key.stage
    d = st.domain_of[s]
    st.undrained[d] = 1


def finish_read_guards(st: State, key, ref, bit, link):
    slot = ref.slot
    s = key.stage
    d = st.domain_of[s]
    require_one_end(st, slot, d, link)


def finish_read_writes(st: State, key, ref, bit, link):
    slot = ref.slot
    transferred(st, slot, link)


def post_receive_guards(st: State, key, ref, message, link):
    slot = ref.slot
    s = key.stage
    d = st.domain_of[s]
    require_vacated(st, slot, d, link)


def post_receive_writes(st: State, key, ref, message, link):
    s = key.stage
    d = st.domain_of[s]
    st.undrained[d] = 1


def finish_receive_guards(st: State, key, ref, message, link):
    slot = ref.slot
    s = key.stage
    d = st.domain_of[s]
    require_one_end(st, slot, d, link)


def finish_receive_writes(st: State, key, ref, message, link):
    slot = ref.slot
    transferred(st, slot, link)


def drop_writes(st: State, key, ref):
    slot = ref.slot
    s = key.stage
    d = st.domain_of[s]
    st.vacated[slot] = st.replays[d]


def finalize_guards(st: State, stage, link):
    d = st.domain_of[stage]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    t = st.sharer_of[stage]
    if st.waited[link] < st.landed[stage] or st.waited[link] < st.landed[t]:
        raise Refused("completion.graph-to-caller")
    if st.named[0] == st.weight_epoch[stage] and st.consumer[0] != st.caller_at[link]:
        raise Refused("completion.wrong-consumer")


def finalize_writes(st: State, stage, link):
    d = st.domain_of[stage]
    st.named[0] = st.weight_epoch[stage]
    st.consumer[0] = st.caller_at[link]
    # A wait before this call may be that of another caller.
    st.unwaited[d] = 0
    if st.waited[link] != st.replays[d]:
        st.unwaited[d] = 1


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
    d = st.domain_of[s]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.named[0] == st.weight_epoch[s] and st.consumer[0] != st.caller_at[link]:
        raise Refused("completion.wrong-consumer")


def finish_reduction_writes(st: State, bucket, link):
    s = st.stage_at[bucket]
    st.named[0] = st.weight_epoch[s]
    st.consumer[0] = st.caller_at[link]


def start_weights_read_guards(st: State, stage, link):
    d = st.domain_of[stage]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.weights_read[stage] != 0:
        raise Refused("completion.second-reader")
    if st.unseen[link] != 0 and st.updater[0] != st.caller_at[link]:
        raise Refused("completion.update-to-reader")


def start_weights_read_writes(st: State, stage, link):
    d = st.domain_of[stage]
    st.weights_read[stage] = 1
    st.undrained[d] = 1


def finish_weights_read_guards(st: State, stage, link):
    d = st.domain_of[stage]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.weights_read[stage] == 0:
        raise Refused("completion.not-reading")
    if st.named[0] == st.weight_epoch[stage] and st.consumer[0] != st.caller_at[link]:
        raise Refused("completion.wrong-consumer")


def finish_weights_read_writes(st: State, stage, link):
    st.weights_read[stage] = 0
    st.named[0] = st.weight_epoch[stage]
    st.consumer[0] = st.caller_at[link]


def start_gradients_read_before_persistence_guards(st: State, stage, link):
    d = st.domain_of[stage]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.gradients_read[stage] != 0:
        raise Refused("completion.second-reader")
    # The stage is final (epoch.not-final), so the consumer is the stream of this epoch.
    if st.consumer[0] != st.caller_at[link]:
        raise Refused("completion.wrong-consumer")


def start_gradients_read_writes(st: State, stage, link):
    d = st.domain_of[stage]
    st.gradients_read[stage] = 1
    st.undrained[d] = 1


def finish_gradients_read_guards(st: State, stage, link):
    d = st.domain_of[stage]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.gradients_read[stage] == 0:
        raise Refused("completion.not-reading")
    if st.consumer[0] != st.caller_at[link]:
        raise Refused("completion.wrong-consumer")


def finish_gradients_read_writes(st: State, stage, link):
    st.gradients_read[stage] = 0


def next_walk_before_persistence_guards(st: State, epoch):
    if not st.every(st.gradients_read, 0):
        raise Refused("completion.gradients-in-use")


def check_update_before_persistence_guards(st: State, epoch, caller):
    if st.consumer[0] != caller:
        raise Refused("completion.update-stream")
    if not st.every(st.weights_read, 0):
        raise Refused("completion.weights-in-use")
    if not st.every(st.gradients_read, 0):
        raise Refused("completion.gradients-in-use")
    if not st.every(st.unwaited, 0):
        raise Refused("completion.evaluation-not-awaited")


def check_update_writes(st: State, epoch, caller):
    st.updater[0] = caller
    st.fill(st.unseen, 1)
    st.fill(st.unawaited, 1)
    st.fill(st.undrained, 1)


def commit_update_writes(st: State, epoch, ticket):
    # Part of the update may have been enqueued after a join or a drain.
    st.fill(st.unseen, 1)
    st.fill(st.unawaited, 1)
    st.fill(st.undrained, 1)


def abort_update_writes(st: State, epoch, ticket):
    st.fill(st.unseen, 1)
    st.fill(st.unawaited, 1)
    st.fill(st.undrained, 1)


def restore_writes(st: State, epoch, incarnation):
    st.fill(st.submitted, 0)
    st.fill(st.joined, 0)
    st.fill(st.waited, 0)
    st.fill(st.replays, 0)
    st.fill(st.produced, 0)
    st.fill(st.landed, 0)
    st.fill(st.vacated, 0)
    st.fill(st.ended_at, 0)
    st.fill(st.weights_read, 0)
    st.fill(st.gradients_read, 0)
    st.fill(st.unseen, 0)
    st.named[0] = NEVER
