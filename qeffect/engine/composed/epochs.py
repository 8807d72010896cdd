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
    After a stage's last dW: its gradients are whole.

    Guards: order, arena, completion, epoch.
    Writes: reduction, epoch.
    """
    # order.finalize_guards
    d = st.domain_of[stage]
    if st.poisoned[d] != 0:
        raise Refused("order.poisoned")
    if st.forwards[stage] != st.cells[stage] or st.dgrads[stage] != st.cells[stage]:
        raise Refused("order.incomplete")
    # arena.finalize_guards
    if st.spoiled[stage] == st.weight_epoch[stage]:
        raise Refused("arena.spoiled")
    if st.wgrads[stage] != st.cells[stage]:
        raise Refused("arena.incomplete")
    # completion.finalize_guards
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.waited[link] < st.landed[stage]:
        raise Refused("completion.graph-to-caller")
    # epoch.finalize_guards
    if st.spoiled[stage] == st.weight_epoch[stage]:
        raise Refused("epoch.spoiled")
    if st.wgrads[stage] != st.cells[stage]:
        raise Refused("epoch.incomplete")
    if st.final[stage] == st.weight_epoch[stage]:
        raise Refused("epoch.already-final")
    # reduction.finalize_writes
    st.unreduced[stage] = st.reduces[stage]
    # epoch.finalize_writes
    st.final[stage] = st.weight_epoch[stage]


def start_reduction(st, stage):
    """
    The stage's data-parallel reduction starts.

    Guards: reduction.
    Writes: reduction.
    """
    # reduction.start_reduction_guards
    if st.final[stage] != st.weight_epoch[stage]:
        raise Refused("reduction.before-final")
    if st.reducing[stage] != 0:
        raise Refused("reduction.in-flight")
    if st.unreduced[stage] == 0:
        raise Refused("reduction.duplicate")
    # reduction.start_reduction_writes
    st.reducing[stage] = 1


def finish_reduction(st, stage):
    """
    It finished.

    Guards: reduction.
    Writes: reduction.
    """
    # reduction.finish_reduction_guards
    if st.reducing[stage] == 0:
        raise Refused("reduction.not-started")
    # reduction.finish_reduction_writes
    st.reducing[stage] = 0
    st.unreduced[stage] = 0


def fail_reduction(st, stage):
    """
    It failed: the epoch is spoiled.

    Guards: reduction.
    Writes: reduction, epoch.
    """
    # reduction.fail_reduction_guards
    if st.reducing[stage] == 0:
        raise Refused("reduction.not-started")
    # reduction.fail_reduction_writes
    st.reducing[stage] = 0
    # epoch.fail_reduction_writes
    st.spoiled[stage] = st.weight_epoch[stage]
    st.final[stage] = NEVER


def commit_epoch(st, epoch):
    """
    With the optimizer's update: every stage's next epoch.

    Guards: ownership, version, order, reduction, epoch.
    Writes: order, epoch.
    """
    # ownership.commit_epoch_guards
    if not st.every(st.consumers, 0):
        raise Refused("ownership.live-tape")
    # version.commit_epoch_guards
    if not st.every(st.refreshing, 0):
        raise Refused("version.in-flight")
    # order.commit_epoch_guards
    if not st.every(st.busy, 0):
        raise Refused("order.in-flight")
    # reduction.commit_epoch_guards
    if not st.every(st.reducing, 0):
        raise Refused("reduction.in-flight")
    if not st.every(st.unreduced, 0):
        raise Refused("reduction.missing")
    # epoch.commit_epoch_guards
    if not st.every(st.weight_epoch, epoch):
        raise Refused("epoch.wrong-epoch")
    if not st.every(st.final, epoch):
        raise Refused("epoch.not-final")
    # order.commit_epoch_writes
    st.fill(st.position, 0)
    st.fill(st.forwards, 0)
    st.fill(st.dgrads, 0)
    # epoch.commit_epoch_writes
    st.fill(st.weight_epoch, epoch + 1)
    st.fill(st.wgrads, 0)
