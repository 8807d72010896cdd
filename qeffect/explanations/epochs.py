"""
Found and expected for the clauses of reductions, of the end of an epoch, and of persistence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..relations.constants import NO_STAGE
from ..text import counted
from .words import Arguments, Explanation, nonzero_entries, other_indices, stages_of

__all__ = ["EXPLANATIONS"]


def _waiting(st: Any) -> str:
    return ", ".join(f"stage {stage}" for stage in st.refreshed if stage != NO_STAGE)


def _bucket(st: Any, a: Arguments) -> str:
    """Say which bucket a reduction is of."""
    return f"bucket {a['bucket']} of stage {' and '.join(map(str, stages_of(st, a)))}"


def _asked(a: Arguments) -> str:
    """Say what was asked for during an update."""
    return "a restore" if a["transition"] == "restore" else "another update"


def _values(column: Any) -> Any:
    return column.values() if isinstance(column, dict) else column


#: By clause.
EXPLANATIONS: Final[Mapping[str, Explanation]] = {
    "reduction.incomplete": lambda st, a: (
        ", ".join(f"{st.wgrads[s]} weight gradients of stage {s}" for s in stages_of(st, a)),
        ", ".join(f"{st.cells[s]}" for s in stages_of(st, a)),
    ),
    "reduction.spoiled": lambda st, a: (
        ", ".join(f"stage {s}, spoiled in epoch {st.spoiled[s]}" for s in stages_of(st, a)),
        "an epoch in which no action failed",
    ),
    "reduction.in-flight": lambda st, a: (
        f"buckets with a reduction in flight: {other_indices(st.reducing)}",
        "no reduction in flight",
    ),
    "reduction.duplicate": lambda st, a: (
        f"another reduction of {_bucket(st, a)}",
        "one reduction of a bucket in an epoch",
    ),
    "reduction.out-of-order": lambda st, a: (
        f"{_bucket(st, a)}, at place {st.reduce_at[a['bucket']]} of the declared order",
        f"the bucket at place {st.started[0]}",
    ),
    "reduction.not-started": lambda st, a: (
        f"the end of a reduction of {_bucket(st, a)}, which has no reduction in flight",
        f"a reduction that was started; in flight: buckets {other_indices(st.reducing)}",
    ),
    "reduction.missing": lambda st, a: (
        f"buckets not yet reduced: {other_indices(st.reduced, a['epoch'])}",
        "every configured reduction finished",
    ),
    "epoch.spoiled": lambda st, a: (
        f"stage {a['stage']}, spoiled in epoch {st.spoiled[a['stage']]}",
        "an epoch in which no action failed",
    ),
    "epoch.incomplete": lambda st, a: (
        f"{st.wgrads[a['stage']]} weight gradients",
        f"{st.cells[a['stage']]}",
    ),
    "epoch.already-final": lambda st, a: (f"stage {a['stage']} again", "one finalize in an epoch"),
    "epoch.not-final": lambda st, a: (
        f"stages that are not final: {other_indices(st.final, a['epoch'])}",
        f"every stage finalized in epoch {a['epoch']}",
    ),
    "epoch.wrong-epoch": lambda st, a: (
        f"epoch {a['epoch']}",
        f"the weight epochs {st.weight_epoch}",
    ),
    "epoch.in-flight": lambda st, a: (
        f"{_asked(a)} during the update with ticket {st.optimizing[0]}",
        "no update in flight",
    ),
    "epoch.half-updated": lambda st, a: (
        "another update of half-updated weights",
        "weights that a restore has made whole",
    ),
    "epoch.unknown-ticket": lambda st, a: (
        f"update ticket {a['ticket']} of epoch {a['epoch']}",
        f"ticket {st.optimizing[0]} of the weight epochs {st.weight_epoch}"
        if st.optimizing[0]
        else "no update in flight",
    ),
    "persistence.live-tape": lambda st, a: (
        f"live tapes in slots {[slot for slot, mask in enumerate(st.consumers) if mask]}",
        "no live tape",
    ),
    "persistence.action-in-flight": lambda st, a: (
        f"in flight (domain: ticket) {nonzero_entries(st.busy) or 'none'}; refreshes in flight "
        f"(stage: ticket) {nonzero_entries(st.refreshing) or 'none'}; update in flight (ticket) "
        f"{st.optimizing[0] or 'none'}",
        "no action in flight",
    ),
    "persistence.half-updated": lambda st, a: (
        "weights of which an update failed half way",
        "weights that a restore has made whole",
    ),
    "persistence.mid-epoch": lambda st, a: (
        f"an epoch with {counted(sum(_values(st.forwards)), 'forward')} and "
        f"{counted(sum(_values(st.wgrads)), 'weight gradient')} done, "
        f"refreshed but not yet forwarded: {_waiting(st) or 'no stage'}",
        "a checkpoint directly after a commit",
    ),
    "persistence.device-work": lambda st, a: (
        f"domains with device work not known to be finished: {other_indices(st.undrained)}",
        "every domain drained",
    ),
    "persistence.reduction-in-flight": lambda st, a: (
        f"buckets with a reduction in flight: {other_indices(st.reducing)}",
        "no reduction in flight",
    ),
    "persistence.same-incarnation": lambda st, a: (
        f"incarnation {a['incarnation']:016x}",
        "a new random incarnation",
    ),
}
