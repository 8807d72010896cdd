"""
Texts of found and expected values, for refusals by the clauses of reduction, epoch and persistence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..relations.constants import NO_STAGE
from ..text import counted
from .words import (
    Arguments,
    Explanation,
    asked,
    nonzero_entries,
    other_indices,
    stages_of,
    with_skipped,
)

__all__ = ["EXPLANATIONS"]


def _waiting(st: Any) -> str:
    return ", ".join(f"stage {stage}" for stage in st.refreshed if stage != NO_STAGE)


def _bucket(st: Any, a: Arguments) -> str:
    """Name the bucket of a reduction, and the stages that write it."""
    return f"bucket {a['bucket']} of stage {' and '.join(map(str, stages_of(st, a)))}"


def _asked(a: Arguments) -> str:
    """Name the call that was made during an update, or over half-updated weights."""
    return _ASKED.get(a["transition"], "an action")


#: By transition, what the call requests; all other transitions request an action.
_ASKED: Final[Mapping[str, str]] = {
    "restore": "a restore",
    "next_walk": "another walk",
    "check_evaluation": "an evaluation",
    "check_update": "another update",
    "check_refresh": "a refresh",
    "bind": "a bind",
    "reserve": "a slot for an action",
    "start_weights_read": "a read",
    "start_gradients_read": "a read",
}


def _epoch(st: Any, a: Arguments) -> int:
    """Return the epoch that a call names, or the epoch of its stage's weights."""
    return int(a["epoch"] if "epoch" in a else st.weight_epoch[a["stage"]])


def _under_way(st: Any) -> str:
    """Return text: which update or which evaluations are in flight."""
    if st.optimizing[0]:
        return f"the update with ticket {st.optimizing[0]}"
    return f"an evaluation in flight (stage: ticket) {nonzero_entries(st.evaluating)}"


def _unknown_ticket(st: Any, a: Arguments) -> tuple[str, str]:
    """Return text: the presented ticket of an evaluation or update, and the ticket in flight."""
    if "stage" in a:
        expected = st.evaluating[a["stage"]]
        return (
            f"evaluation ticket {a['ticket']} of stage {a['stage']}",
            f"ticket {expected}" if expected else "no evaluation in flight",
        )
    return (
        f"update ticket {a['ticket']} of epoch {a['epoch']}",
        f"ticket {st.optimizing[0]} of the weight epochs {st.weight_epoch}"
        if st.optimizing[0]
        else "no update in flight",
    )


def _walks(st: Any) -> str:
    return f"{counted(st.walk[0], 'earlier walk')}, " if st.walk[0] else ""


def _values(column: Any) -> Any:
    return column.values() if isinstance(column, dict) else column


def _unweighed(st: Any) -> tuple[str, str]:
    """Return text: for which stages the gradient weights do not add up, and what they add up to."""
    entries = st.unweighed.items() if isinstance(st.unweighed, dict) else enumerate(st.unweighed)
    odd = [(s, st.parts[s] - left, st.parts[s]) for s, left in entries if left]
    return (
        "microbatch weights that add up to "
        + ", ".join(f"{sum_} of {parts} parts (stage {s})" for s, sum_, parts in odd),
        "microbatch weights that add up to all parts, over all walks of the epoch",
    )


def _parts(st: Any, a: Arguments) -> tuple[str, str]:
    """Return text: a weight and its number of parts, and the parts of the earlier weights."""
    counted_in = st.parts[st.slot_stage[a["slot"]]]
    return (
        f"a microbatch weight of {a['weight']} of {counted(a['parts'], 'part')}"
        if a["parts"] > 0
        else "no readable microbatch weight in the report of dI",
        f"a microbatch weight of {counted(counted_in, 'part')}, like the epoch's earlier weights"
        if counted_in
        else "(numerator, denominator), with numerator >= 0 and denominator >= 1",
    )


#: For each clause, the function that returns what was found and what was expected.
EXPLANATIONS: Final[Mapping[str, Explanation]] = {
    "reduction.incomplete": lambda st, a: (
        ", ".join(f"{st.wgrads[s]} weight gradients of stage {s}" for s in stages_of(st, a))
        + with_skipped(st, stages_of(st, a)),
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
        "one reduction of each bucket per epoch",
    ),
    "reduction.out-of-order": lambda st, a: (
        f"{_bucket(st, a)}, at position {st.reduce_at[a['bucket']]} of the declared order",
        f"the bucket at position {st.started[0]}",
    ),
    "reduction.not-started": lambda st, a: (
        f"the end of a reduction of {_bucket(st, a)}, which has no reduction in flight",
        f"a reduction that was started; in flight: buckets {other_indices(st.reducing)}",
    ),
    "reduction.missing": lambda st, a: (
        f"buckets not yet reduced: {other_indices(st.reduced, _epoch(st, a))}",
        "every configured reduction finished",
    ),
    "reduction.begun": lambda st, a: (
        f"another walk (pass over the microbatches) after "
        f"{counted(st.started[0], 'reduction')} of the epoch",
        "no reduction before the last walk",
    ),
    "epoch.spoiled": lambda st, a: (
        f"stage {a['stage']}, spoiled in epoch {st.spoiled[a['stage']]}",
        "an epoch in which no action failed",
    ),
    "epoch.incomplete": lambda st, a: (
        f"{st.wgrads[a['stage']]} weight gradients{with_skipped(st, [a['stage']])}",
        f"{st.cells[a['stage']]}, one for every configured key",
    ),
    "epoch.already-final": lambda st, a: (
        f"another finalize of stage {a['stage']}",
        "one finalize of each stage per walk over the microbatches",
    ),
    "epoch.not-final": lambda st, a: (
        f"stages that are not final: {other_indices(st.final, _epoch(st, a))}",
        f"{'every stage' if 'epoch' in a else 'the stage'} finalized in epoch {_epoch(st, a)}",
    ),
    "epoch.wrong-weights": lambda st, a: _unweighed(st),
    "epoch.other-parts": _parts,
    "epoch.wrong-epoch": lambda st, a: (
        f"epoch {a['epoch']}",
        f"the weight epochs {st.weight_epoch}",
    ),
    "epoch.in-flight": lambda st, a: (
        f"{_asked(a)} during {_under_way(st)}",
        "no update and no evaluation in flight",
    ),
    "epoch.half-updated": lambda st, a: (
        f"{_asked(a)} over half-updated weights",
        "weights restored from a checkpoint after the failure",
    ),
    "epoch.sole-writer": lambda st, a: (
        asked(a),
        "a key that is not the first writer of its destinations",
    ),
    "epoch.not-begun": lambda st, a: (
        f"a fault of epoch {a['epoch']} in stage {a['stage']}",
        f"an epoch of at most {st.weight_epoch[a['stage']]}, the current epoch",
    ),
    "epoch.unknown-ticket": _unknown_ticket,
    "persistence.live-tape": lambda st, a: (
        f"live tapes in slots {[slot for slot, mask in enumerate(st.consumers) if mask]}",
        "no live tape",
    ),
    "persistence.action-in-flight": lambda st, a: (
        f"in flight (domain: ticket) {nonzero_entries(st.busy) or 'none'}; refreshes in flight "
        f"(stage: ticket) {nonzero_entries(st.refreshing) or 'none'}; evaluations in flight "
        f"(stage: ticket) {nonzero_entries(st.evaluating) or 'none'}; update in flight (ticket) "
        f"{st.optimizing[0] or 'none'}",
        "no action in flight",
    ),
    "persistence.half-updated": lambda st, a: (
        "weights that a failed update left half updated",
        "weights restored from a checkpoint after the failed update",
    ),
    "persistence.mid-epoch": lambda st, a: (
        f"an epoch with {counted(sum(_values(st.forwards)), 'forward')} and "
        f"{counted(sum(_values(st.wgrads)), 'weight gradient')} done, {_walks(st)}"
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
