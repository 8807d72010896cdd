"""
How stopping ranks publish their reasons and choose one cause. The protocols of guarded steps and of
launched steps share this module.

The ranks of one attempt (guarded steps) or of one round (launched steps) choose a common cause.
``n`` is the number of the attempt or round, and ``here`` says whether a rank belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qeffect.spec.predicates import choose, implies

__all__ = ["publish_reason", "silent", "spoken", "write_cause"]


def publish_reason(st: Any, r: Any, n: Any) -> None:
    """A rank publishes its reason; the first rank with a reason of its own is remembered."""
    first = (st.lost[r] == 0) & (st.reasoned[n] == 0)
    st.reason[n] = choose(first, r, st.reason[n])
    st.reasoned[n] = choose(first, 1, st.reasoned[n])
    st.said[r] = 1


def spoken(st: Any, q: Any, here: Callable[[Any], Any]) -> Any:
    """Return whether a rank belongs to the attempt or round and has published its reason."""
    return here(q) & (st.said[q] == 1)


def silent(st: Any, q: Any, here: Callable[[Any], Any]) -> Any:
    """Return whether a rank does not belong to the attempt or round, or has published nothing."""
    return implies(here(q), st.said[q] == 0)


def write_cause(st: Any, p: Any, n: Any, here: Callable[[Any], Any]) -> None:
    """
    Write which rank is the cause: a rank with a reason of its own; otherwise a rank that published
    nothing; otherwise a rank that lost a connection.
    """
    st.need("first-writes", st.halted[n] == 0)
    own = spoken(st, p, here) & (st.lost[p] == 0)
    st.need(
        "precedence",
        own
        | (
            st.every("rank", lambda q: implies(spoken(st, q, here), st.lost[q] == 1))
            & (silent(st, p, here) | st.every("rank", lambda q: spoken(st, q, here)))
        ),
    )
    st.cause[n] = p
    st.cause_lost[n] = choose(silent(st, p, here), 0, st.lost[p])
    st.halted[n] = 1
