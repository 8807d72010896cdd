"""
Texts of found and expected values, for refusals by the clauses of version (weight caches, epochs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..relations.constants import NEVER
from ..text import counted
from .words import Explanation, asked, domain_of, nonzero_entries, stage_of

__all__ = ["EXPLANATIONS"]


def _epoch(epoch: int) -> str:
    return "no known epoch" if epoch == NEVER else f"epoch {epoch}"


def _weights(epoch: int) -> str:
    return f"the weights of epoch {epoch}" if epoch >= 0 else "weights of no known epoch"


#: For each clause, the function that returns what was found and what was expected.
EXPLANATIONS: Final[Mapping[str, Explanation]] = {
    "version.wrong-epoch": lambda st, a: (
        f"{a['key']}",
        f"a key of weight epoch {st.weight_epoch[stage_of(st, a)]}",
    ),
    "version.stale-cache": lambda st, a: (
        f"{a['key'] if 'key' in a else asked(a)} over a weight cache of "
        f"{_epoch(st.cache_epoch[stage_of(st, a)])}",
        f"a cache of epoch {a['key'].epoch if 'key' in a else st.weight_epoch[a['stage']]}",
    ),
    "version.already-fresh": lambda st, a: (
        f"a refresh of stage {stage_of(st, a)}",
        f"a stale cache; the cache already holds epoch {st.cache_epoch[stage_of(st, a)]}",
    ),
    "version.late-refresh": lambda st, a: (
        f"a refresh of stage {stage_of(st, a)} after "
        f"{counted(st.forwards[stage_of(st, a)], 'forward')}",
        "a refresh directly before the stage's first forward of the epoch",
    ),
    "version.refresh-interrupted": lambda st, a: (
        f"an action of stage {stage_of(st, a)}",
        f"the first forward of stage {st.refreshed[domain_of(st, a)]}, whose cache was refreshed",
    ),
    "version.in-flight": lambda st, a: (
        asked(a),
        "no refresh in flight, neither alone nor within an F; in flight (stage: ticket) "
        + (
            ", ".join(filter(None, (nonzero_entries(st.refreshing), nonzero_entries(st.filling))))
            or "none"
        ),
    ),
    "version.unknown-ticket": lambda st, a: (
        f"refresh ticket {a['ticket']} of stage {a['stage']}",
        f"ticket {ticket}" if (ticket := st.refreshing[a["stage"]]) else "no refresh in flight",
    ),
    "version.fill-missing": lambda st, a: (
        f"filled caches of {a['filled'] or 'no matrix'}",
        f"the cache of each of {st.matrices[stage_of(st, a)]} filled exactly once",
    ),
    "version.wrong-fill": lambda st, a: (
        f"a cache filled from {_weights(a['fill_epoch'])}",
        f"a cache filled from the weights of epoch {st.weight_epoch[stage_of(st, a)]}",
    ),
    "version.fill-unasked": lambda st, a: (
        f"a cache filled from {_weights(a['fill_epoch'])} by "
        + (f"an F in slot {a['slot']}" if "slot" in a else f"an evaluation of stage {a['stage']}"),
        "no fill: the F was checked without a refresh"
        if "slot" in a
        else "no fill: an evaluation must not change the weight cache",
    ),
    "version.left-out": lambda st, a: (
        f"{a['transition']} of stage {a['stage']}",
        "no weight-cache call: these stages leave out the relation version",
    ),
}
