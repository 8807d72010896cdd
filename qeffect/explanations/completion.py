"""
Texts of found and expected values, for refusals by the clauses of completion and capture memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..text import counted
from .words import Arguments, Explanation, asked, domain_of, other_indices, slot_of, stages_of

__all__ = ["EXPLANATIONS"]


def _end(st: Any, a: Arguments) -> tuple[int, int, int]:
    """
    Return the link on which a slot's latest transfer ended, the number of that end in the caller's
    work, and how many pieces of that work the graph stream has waited for.
    """
    slot = slot_of(a)
    on = st.ended_on[slot]
    return on, st.ended_at[slot], st.joined[on]


def _captured(st: Any, a: Arguments) -> tuple[str, int, int]:
    """Return words for the graph to replay, its position in capture order, and its memory pool."""
    if a["transition"] == "check_refresh":
        return asked(a), st.refresh_rank[a["stage"]], st.refresh_pool[a["stage"]]
    ranks = {"check_forward": "forward_rank", "check_dgrad": "dgrad_rank"}
    slot, column = slot_of(a), ranks.get(a["transition"], "wgrad_rank")
    return f"{a['key']} in slot {slot}", getattr(st, column)[slot], st.pool_of[slot]


def _out_of_order(st: Any, a: Arguments) -> str:
    """Return text: which graph would be replayed, and which graph was replayed before it."""
    what, place, pool = _captured(st, a)
    return (
        f"{what}, the graph captured at position {place}, after the graph captured at position "
        f"{st.cursor[pool]}"
    )


def _replay(st: Any, a: Arguments) -> int:
    """Return the replay that a consumer must wait for."""
    if "ref" in a:
        return int(st.produced[a["ref"].slot])
    return int(max(st.landed[s] for s in stages_of(st, a)))


def _updaters_link(st: Any, domain: int) -> int:
    """Return the link of the optimizer's stream and a domain's graph stream."""
    pairs = zip(st.caller_at, st.domain_at, strict=True)
    return next(link for link, pair in enumerate(pairs) if pair == (st.updater[0], domain))


def _what(a: Arguments) -> str:
    """Return what a reader reads: weights or gradients."""
    return "gradients" if "gradients" in a["transition"] else "weights"


def _unwaited_links(st: Any) -> list[int]:
    """Return the consumer's links to the domains whose evaluations it has not yet waited for."""
    pairs = enumerate(zip(st.caller_at, st.domain_at, strict=True))
    return [link for link, (caller, d) in pairs if caller == st.consumer[0] and st.unwaited[d] != 0]


#: For each clause, the function that returns what was found and what was expected.
EXPLANATIONS: Final[Mapping[str, Explanation]] = {
    "capture.out-of-order": lambda st, a: (
        _out_of_order(st, a),
        "graphs of one memory pool replayed in the order of capture while the pool has a live tape",
    ),
    "completion.wrong-stream": lambda st, a: (
        f"link {a['link']} of domain {st.domain_at[a['link']]}",
        f"a link of domain {domain_of(st, a)}",
    ),
    "completion.caller-to-graph": lambda st, a: (
        f"a replay whose graph stream waited for {st.joined[a['link']]} of the caller's "
        f"{counted(st.submitted[a['link']], 'piece')} of work",
        "a wait for all these pieces of work",
    ),
    "completion.graph-to-caller": lambda st, a: (
        f"a consumer whose stream waited up to replay {st.waited[a['link']]}",
        f"a wait at or after replay {_replay(st, a)}",
    ),
    "completion.transfer-to-graph": lambda st, a: (
        f"a replay on slot {slot_of(a)}, whose last transfer or copy was on link {_end(st, a)[0]}, "
        f"as piece {_end(st, a)[1]} of the work of this link's caller",
        f"a join of link {_end(st, a)[0]} after this piece; the graph stream has waited for pieces "
        f"up to {_end(st, a)[2]}",
    ),
    "completion.two-ends": lambda st, a: (
        f"the end of a transfer, or a copy, on link {a['link']}, after an earlier end or copy on "
        f"link {_end(st, a)[0]}",
        f"a join of link {_end(st, a)[0]} in between; the graph stream has waited for "
        f"{_end(st, a)[2]} of the {_end(st, a)[1]} pieces of work of this link's caller",
    ),
    "completion.slot-not-awaited": lambda st, a: (
        f"a caller that waited up to replay {st.waited[a['link']]}",
        f"a wait at or after replay {st.vacated[slot_of(a)]}, the last replay of slot "
        f"{slot_of(a)}'s last tape",
    ),
    "completion.wrong-consumer": lambda st, a: (
        f"link {a['link']}, of caller {st.caller_at[a['link']]}",
        f"a link of caller {st.consumer[0]}, the stream of this epoch's gradients and update",
    ),
    "completion.update-stream": lambda st, a: (
        f"an update on the stream of caller {a['caller']}",
        f"an update on the stream of caller {st.consumer[0]}, which waited for the gradients",
    ),
    "completion.weights-in-use": lambda st, a: (
        f"an update while the weights of stages {other_indices(st.weights_read)} are being read",
        "the end of every read, on the update's stream",
    ),
    "completion.gradients-in-use": lambda st, a: (
        f"{asked(a)} while the gradients of stages {other_indices(st.gradients_read)} are being "
        "read",
        "the end of every read, on the update's stream and the graph streams",
    ),
    "completion.evaluation-not-awaited": lambda st, a: (
        f"an update before caller {a['caller']} waited for the graph streams of domains "
        f"{other_indices(st.unwaited)}, where an evaluation may still read the weights",
        f"a wait on links {', '.join(map(str, _unwaited_links(st)))} after the evaluation",
    ),
    "completion.second-reader": lambda st, a: (
        f"another read of the {_what(a)} of stage {a['stage']}",
        f"one read of a stage's {_what(a)} at a time",
    ),
    "completion.not-reading": lambda st, a: (
        f"the end of a read of the {_what(a)} of stage {a['stage']}, which nothing reads",
        "a read that was started; under way: stages "
        f"{other_indices(getattr(st, _what(a) + '_read'))}",
    ),
    "completion.update-to-reader": lambda st, a: (
        f"a read after the work of caller {st.caller_at[a['link']]}, which has not waited for the "
        f"optimizer's update on the stream of caller {st.updater[0]}",
        f"a join of link {_updaters_link(st, domain_of(st, a))} after the commit, then a wait on "
        f"link {a['link']}",
    ),
    "completion.update-to-graph": lambda st, a: (
        f"{asked(a)} before the graph stream of domain {domain_of(st, a)} waited for the "
        f"optimizer's update, which ran on the stream of caller {st.updater[0]}",
        f"a join of link {_updaters_link(st, domain_of(st, a))} after the commit",
    ),
}
