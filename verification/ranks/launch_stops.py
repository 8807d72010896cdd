"""
Stops of launched steps in fewer transitions. Explorations use them if the order of stops does not
matter.

A rank publishes its reason and cuts its connections in one transition. It names the cause in one
transition with its report or its end; if the round has no cause yet, the rank chooses the first
cause that the protocol allows. Each transition of this module is a sequence of transitions of the
protocol. It does not write the columns of reasons and causes, since no other transition reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import evolve

from qeffect.refusals import Refused

from .launches import LAUNCHES
from .protocol import RankTransition

__all__ = ["AT_ONCE", "REASONS", "STOPS"]

#: The transitions that the steps below contain, and a transition of reasons alone.
STOPS: Final = frozenset({"publish_why", "choose_cause", "name_cause", "refuse_counts"})
#: Writes that are left out, as in a mutant.
REASONS: Final = frozenset(
    f"{column} ="
    for column in (
        *("lost", "read_no", "miscounted", "failed", "failed_rank", "reasoned", "reason"),
        *("gone", "told", "cause", "cause_lost", "cause_no"),
    )
)


def _cut(st: Any, r: Any) -> None:
    """A rank publishes its reason, and aborts its connections."""
    LAUNCHES["publish_why"].run(st, r)
    LAUNCHES["cut_connections"].run(st, r)


def _name(st: Any, r: Any) -> None:
    if st.dead[r] == 0 and st.cut[r] == 1 and st.halted[st.round[r]] == 0:
        for p in st.members["rank"]:
            try:
                LAUNCHES["choose_cause"].run(st, r, p)
            except Refused:
                continue
            break
    LAUNCHES["name_cause"].run(st, r)


def _report(st: Any, r: Any) -> None:
    """A rank names the cause, and reports the epoch of its weights."""
    _name(st, r)
    LAUNCHES["report_epoch"].run(st, r)


def _end(st: Any, r: Any) -> None:
    """A rank that has not named the cause yet names the cause. Then the rank ends its process."""
    if st.ended[r] == 0:
        _name(st, r)
    LAUNCHES["end_launched"].run(st, r)


#: The steps, by the name of the transition that each replaces.
AT_ONCE: Final[Mapping[str, RankTransition]] = {
    name: evolve(LAUNCHES[name], run=run)
    for name, run in {
        "cut_connections": _cut,
        "report_epoch": _report,
        "end_launched": _end,
    }.items()
}
