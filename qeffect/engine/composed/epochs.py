"""
The composed transitions from finalize to commit_epoch.

Written by ``python -m qeffect.engine``; edit ``qeffect.relations`` and write it again.
"""

from __future__ import annotations

from ...refusals import Refused
from ...relations.constants import NEVER

__all__ = ["commit_epoch", "fail_reduction", "finalize", "finish_reduction", "start_reduction"]


def finalize(st, stage, link):
    """
    After a stage's last dW: declares its gradients whole.

    Guards: order, arena, completion, epoch.
    Writes: completion, epoch.
    """
    # order.finalize_guards
    d = st.domain_of[stage]
    if st.poisoned[d] != 0:
        raise Refused("order.poisoned")
    if st.dgrads[stage] != st.cells[stage]:
        raise Refused("order.incomplete")
    # arena.finalize_guards
    t = st.sharer_of[stage]
    if st.spoiled[stage] == st.weight_epoch[stage] or st.spoiled[t] == st.weight_epoch[t]:
        raise Refused("arena.spoiled")
    if st.wgrads[stage] != st.cells[stage] or st.wgrads[t] != st.cells[t]:
        raise Refused("arena.incomplete")
    # completion.finalize_guards
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.waited[link] < st.landed[stage] or st.waited[link] < st.landed[t]:
        raise Refused("completion.graph-to-caller")
    if st.named[0] == st.weight_epoch[stage] and st.consumer[0] != st.caller_at[link]:
        raise Refused("completion.wrong-consumer")
    # epoch.finalize_guards
    if st.spoiled[stage] == st.weight_epoch[stage]:
        raise Refused("epoch.spoiled")
    if st.wgrads[stage] != st.cells[stage]:
        raise Refused("epoch.incomplete")
    if st.final[stage] == st.weight_epoch[stage]:
        raise Refused("epoch.already-final")
    # completion.finalize_writes
    st.named[0] = st.weight_epoch[stage]
    st.consumer[0] = st.caller_at[link]
    # epoch.finalize_writes
    st.final[stage] = st.weight_epoch[stage]


def start_reduction(st, bucket, link):
    """
    After the last dW of the bucket's stages, when a caller's stream enqueues the reduction.

    Guards: reduction, completion.
    Writes: completion, reduction.
    """
    # reduction.start_reduction_before_completion_guards
    s = st.stage_at[bucket]
    t = st.tied_at[bucket]
    if st.spoiled[s] == st.weight_epoch[s] or st.spoiled[t] == st.weight_epoch[t]:
        raise Refused("reduction.spoiled")
    if st.wgrads[s] != st.cells[s] or st.wgrads[t] != st.cells[t]:
        raise Refused("reduction.incomplete")
    if st.reducing[bucket] != 0:
        raise Refused("reduction.in-flight")
    if st.reduced[bucket] == st.weight_epoch[s]:
        raise Refused("reduction.duplicate")
    if st.ordered[0] != 0 and st.reduce_at[bucket] != st.started[0]:
        raise Refused("reduction.out-of-order")
    # completion.start_reduction_guards
    d = st.domain_of[s]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.waited[link] < st.landed[s] or st.waited[link] < st.landed[t]:
        raise Refused("completion.graph-to-caller")
    # completion.start_reduction_writes
    st.undrained[d] = 1
    # reduction.start_reduction_writes
    st.reducing[bucket] = 1
    st.started[0] = st.started[0] + 1


def finish_reduction(st, bucket, link):
    """
    When the caller's stream, which will read the gradients, waits for the reduction.

    Guards: reduction, completion.
    Writes: completion, reduction.
    """
    # reduction.finish_reduction_before_completion_guards
    if st.reducing[bucket] == 0:
        raise Refused("reduction.not-started")
    # completion.finish_reduction_guards
    s = st.stage_at[bucket]
    d = st.domain_of[s]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.named[0] == st.weight_epoch[s] and st.consumer[0] != st.caller_at[link]:
        raise Refused("completion.wrong-consumer")
    # completion.finish_reduction_writes
    st.named[0] = st.weight_epoch[s]
    st.consumer[0] = st.caller_at[link]
    # reduction.finish_reduction_writes
    st.reducing[bucket] = 0
    st.reduced[bucket] = st.weight_epoch[s]


def fail_reduction(st, bucket):
    """
    After a reduction failed: spoils its stages' epoch.

    Guards: reduction.
    Writes: reduction, epoch.
    """
    # reduction.fail_reduction_guards
    if st.reducing[bucket] == 0:
        raise Refused("reduction.not-started")
    s = st.stage_at[bucket]
    t = st.tied_at[bucket]
    # reduction.fail_reduction_writes
    st.reducing[bucket] = 0
    # epoch.fail_reduction_writes
    st.spoiled[s] = st.weight_epoch[s]
    st.spoiled[t] = st.weight_epoch[t]
    st.final[s] = NEVER
    st.final[t] = NEVER


def commit_epoch(st, epoch, caller):
    """
    With the optimizer's update, on the caller's stream: starts every stage's next epoch.

    Guards: ownership, version, epoch, completion, reduction.
    Writes: order, completion, reduction, epoch.
    """
    # ownership.commit_epoch_guards
    if not st.every(st.consumers, 0):
        raise Refused("ownership.live-tape")
    # version.commit_epoch_guards
    if not st.every(st.refreshing, 0):
        raise Refused("version.in-flight")
    # epoch.commit_epoch_guards
    if not st.every(st.weight_epoch, epoch):
        raise Refused("epoch.wrong-epoch")
    if not st.every(st.final, epoch):
        raise Refused("epoch.not-final")
    # completion.commit_epoch_before_persistence_guards
    if st.consumer[0] != caller:
        raise Refused("completion.update-stream")
    # reduction.commit_epoch_before_persistence_guards
    if not st.every(st.reducing, 0):
        raise Refused("reduction.in-flight")
    if not st.every(st.reduced, epoch):
        raise Refused("reduction.missing")
    # order.commit_epoch_writes
    st.fill(st.position, 0)
    st.fill(st.forwards, 0)
    st.fill(st.dgrads, 0)
    # completion.commit_epoch_writes
    st.updater[0] = caller
    st.fill(st.unawaited, 1)
    st.fill(st.undrained, 1)
    # reduction.commit_epoch_writes
    st.started[0] = 0
    # epoch.commit_epoch_writes
    st.fill(st.weight_epoch, epoch + 1)
    st.fill(st.wgrads, 0)
