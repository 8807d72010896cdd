"""
Lemmas that the proofs of the ranks need besides the promises.

Most lemmas are about ranks of the newest attempt, ``now``. Only the launcher reads what ranks of
older attempts left behind. An attempt is one run of all ranks, from a checkpoint or after a restart
in place. The ranks of an attempt connect under a name that one rank draws. A rank consents to a
commit before any rank updates its weights.
"""

from __future__ import annotations

from typing import Any, Final

from qeffect.spec.predicates import Register, implies
from qeffect.spec.ranks import AGREED, BETWEEN, NOBODY, STEP

__all__ = ["CONFIGURATION", "LEMMAS"]

#: Assumed of a configuration.
CONFIGURATION: Final = Register()
#: Proved beside the promises.
LEMMAS: Final = Register()


def _now(st: Any, r: Any) -> Any:
    return st.life[r] == st.attempt[0]


@CONFIGURATION("ranks.some-messages", r="rank", q="rank")
def some_messages(st: Any, r: Any, q: Any) -> Any:
    """
    A step has zero or more messages from a rank to another rank, and none from a rank to itself.
    """
    return (st.messages[r, q] >= 0) & implies(r == q, st.messages[r, q] == 0)


@CONFIGURATION("ranks.no-steps-no-messages", r="rank", q="rank")
def no_steps_no_messages(st: Any, r: Any, q: Any) -> Any:
    """Zero steps have zero messages."""
    return st.total[r, q, 0] == 0


@CONFIGURATION("ranks.messages-add-up", r="rank", q="rank", k="count")
def messages_add_up(st: Any, r: Any, q: Any, k: Any) -> Any:
    """Each step adds its messages to the total."""
    return implies(k > 0, st.total[r, q, k] == st.total[r, q, k - 1] + st.messages[r, q])


# Attempts


@LEMMAS("ranks.lives", r="rank")
def lives(st: Any, r: Any) -> Any:
    """No rank belongs to a future attempt or to attempt zero."""
    alive = (st.life[r] == NOBODY) | (st.life[r] > 0)
    return (st.attempt[0] >= 0) & (st.life[r] <= st.attempt[0]) & alive


@LEMMAS("ranks.up-now", r="rank")
def up_now(st: Any, r: Any) -> Any:
    """A rank that runs belongs to the newest attempt."""
    return implies(st.up[r] == 1, _now(st, r))


@LEMMAS("ranks.flags", r="rank")
def flags(st: Any, r: Any) -> Any:
    """A process runs or does not; a phase is one of three; no count is below zero."""
    return (
        ((st.up[r] == 0) | (st.up[r] == 1))
        & ((st.whole[r] == 0) | (st.whole[r] == 1))
        & ((st.lost[r] == 0) | (st.lost[r] == 1))
        & (st.phase[r] >= BETWEEN)
        & (st.phase[r] <= AGREED)
        & (st.step[r] >= 0)
        & (st.live[r] >= 0)
        & (st.epoch[r] >= 0)
        & (st.kept[r] >= 0)
        & (st.shard[r] >= 0)
        & (st.base[0] >= 0)
    )


@LEMMAS("ranks.nothing-published-before-all-started", r="rank")
def nothing_published_before_all_started(st: Any, r: Any) -> Any:
    """
    Until every rank has started, the newest checkpoint is the checkpoint from which the attempt
    began.
    """
    from_checkpoint = (st.life[r] != st.attempt[0]) & (st.again[0] == 0)
    return implies(from_checkpoint, st.saved[0] == st.base[0])


@LEMMAS("ranks.again-waits", r="rank")
def again_waits(st: Any, r: Any) -> Any:
    """Before a rank restarts in place, it keeps the weights with which all ranks stopped."""
    waits = (st.life[r] != st.attempt[0]) & (st.again[0] == 1)
    began = (st.again[0] == 0) | ((st.again[0] == 1) & (st.attempt[0] > 0))
    return began & implies(waits, st.epoch[r] == st.base[0])


@LEMMAS("ranks.shard-lives", r="rank")
def shard_lives(st: Any, r: Any) -> Any:
    """No part of a checkpoint was written in an attempt that its rank has not started in."""
    return st.shard_life[r] <= st.life[r]


# Names


@LEMMAS("ranks.names-of-leads", a="name")
def names_of_leads(st: Any, a: Any) -> Any:
    """A name is drawn only in an attempt in which the leading rank has started."""
    return (st.drawn_in[a] == NOBODY) | (
        (st.drawn_in[a] > 0) & (st.drawn_in[a] <= st.life[st.lead[0]])
    )


@LEMMAS("ranks.draw-remembered", a="name", r="rank")
def draw_remembered(st: Any, a: Any, r: Any) -> Any:
    """A rank remembers the name that it drew in its attempt, and no other name."""
    drawn_now = (st.drawn_in[a] != NOBODY) & (st.drawn_in[a] == st.life[r]) & (r == st.lead[0])
    drew = (st.drew[r] == a) & (a != NOBODY)
    by_it = (st.drawn_in[a] == st.life[r]) & (r == st.lead[0])
    return implies(drawn_now, (st.drew[r] == a) & (a != NOBODY)) & implies(drew, by_it)


@LEMMAS("ranks.one-draw", a="name", b="name")
def one_draw(st: Any, a: Any, b: Any) -> Any:
    """In an attempt at most one name is drawn."""
    return implies((st.drawn_in[a] == st.drawn_in[b]) & (st.drawn_in[a] != NOBODY), a == b)


@LEMMAS("ranks.seats-after-draw", a="name", r="rank")
def seats_after_draw(st: Any, a: Any, r: Any) -> Any:
    """
    A seat (a rank's entry under a name) was taken by a started rank, in the attempt that drew the
    name or in a later attempt.
    """
    return implies(
        st.seat[a, r] != NOBODY,
        (st.drawn_in[a] != NOBODY)
        & (st.seat[a, r] >= st.drawn_in[a])
        & (st.seat[a, r] <= st.life[r]),
    )


@LEMMAS("ranks.offer-drawn")
def offer_drawn(st: Any) -> Any:
    """The name that the store offers was drawn."""
    return implies(st.offered[0] != NOBODY, st.drawn_in[st.offered[0]] != NOBODY)


@LEMMAS("ranks.confirmed-seats", a="name", r="rank")
def confirmed_seats(st: Any, a: Any, r: Any) -> Any:
    """Every seat under a confirmed name was taken in the attempt that drew the name."""
    return implies(
        st.confirmed[a] == 1,
        (st.drawn_in[a] != NOBODY) & (st.seat[a, r] == st.drawn_in[a]),
    )


@LEMMAS("ranks.connected-by-name", r="rank")
def connected_by_name(st: Any, r: Any) -> Any:
    """A rank's connections are under a confirmed name of its own attempt."""
    a = st.name[r]
    return implies(a != NOBODY, (st.confirmed[a] == 1) & (st.drawn_in[a] == st.life[r]))


@LEMMAS("ranks.steps-are-connected", r="rank")
def steps_are_connected(st: Any, r: Any) -> Any:
    """A rank that has begun a step or has written a part of a checkpoint has connections."""
    began = (st.phase[r] != BETWEEN) | (st.step[r] > 0)
    wrote = st.shard_life[r] == st.life[r]
    return implies(_now(st, r) & (began | wrote), st.name[r] != NOBODY)


# Steps and epochs


@LEMMAS("ranks.epoch-of-step", r="rank")
def epoch_of_step(st: Any, r: Any) -> Any:
    """A rank is as many epochs after the attempt's checkpoint as it has ended steps."""
    between = st.phase[r] == BETWEEN
    return implies(
        _now(st, r),
        implies(between, st.epoch[r] == st.base[0] + st.step[r])
        & (between | ((st.epoch[r] + 1 == st.base[0] + st.step[r]) & (st.step[r] > 0))),
    )


@LEMMAS("ranks.yes-is-next", r="rank")
def yes_is_next(st: Any, r: Any) -> Any:
    """A rank has consented up to its current epoch or, in phase AGREED, up to the next epoch."""
    agreed = st.phase[r] == AGREED
    return implies(
        _now(st, r),
        implies(agreed, st.yes[r] == st.epoch[r] + 1) & (agreed | (st.yes[r] == st.epoch[r])),
    )


@LEMMAS("ranks.moved-by-consent", r="rank", q="rank")
def moved_by_consent(st: Any, r: Any, q: Any) -> Any:
    """A rank is only in an epoch to which every other rank has consented."""
    return implies(_now(st, r) & _now(st, q), st.epoch[r] <= st.yes[q])


@LEMMAS("ranks.moved-by-all", r="rank", q="rank")
def moved_by_all(st: Any, r: Any, q: Any) -> Any:
    """Until every rank has started, no rank has changed its weights."""
    return implies(_now(st, r) & (st.life[q] != st.attempt[0]), st.epoch[r] == st.base[0])


@LEMMAS("ranks.agreed-is-settled", r="rank")
def agreed_is_settled(st: Any, r: Any) -> Any:
    """If a rank has consented, its contract has nothing live and is whole."""
    agreed = _now(st, r) & (st.phase[r] == AGREED)
    return implies(agreed, (st.live[r] == 0) & (st.whole[r] == 1))


@LEMMAS("ranks.whole-is-not-spoiled", r="rank")
def whole_is_not_spoiled(st: Any, r: Any) -> Any:
    """An epoch that is whole is not spoiled."""
    return implies(st.whole[r] == 1, st.spoiled[r] == 0)


@LEMMAS("ranks.refused-leaves", r="rank")
def refused_leaves(st: Any, r: Any) -> Any:
    """A rank whose contract refused a commit stays in that epoch and step, and is stopping."""
    said = _now(st, r) & (st.refused[r] != NOBODY)
    here = (st.refused[r] == st.epoch[r]) & (st.phase[r] == STEP) & (st.leaving[r] == 1)
    return implies(said, here)


@LEMMAS("ranks.refusals-past", r="rank", q="rank")
def refusals_past(st: Any, r: Any, q: Any) -> Any:
    """If a rank refused to commit an epoch, no rank of its attempt is in a later epoch."""
    same = (st.life[r] == st.life[q]) & (st.refused[r] != NOBODY)
    return implies(same, st.epoch[q] <= st.refused[r])


# Channels


@LEMMAS("ranks.channel-counts", r="rank", q="rank")
def channel_counts(st: Any, r: Any, q: Any) -> Any:
    """Every message that has ended was posted before; no count is below zero."""
    return (
        (st.sent_done[r, q] >= 0)
        & (st.sent_done[r, q] <= st.sent[r, q])
        & (st.taken_done[r, q] >= 0)
        & (st.taken_done[r, q] <= st.taken[r, q])
        & (st.sent_before[r, q] <= st.sent[r, q])
        & (st.taken_before[r, q] <= st.taken[r, q])
    )


@LEMMAS("ranks.posted-by-then", r="rank", q="rank", p="rank")
def posted_by_then(st: Any, r: Any, q: Any, p: Any) -> Any:
    """If a rank has updated its weights, every rank has posted the messages of all steps so far."""
    ended = st.epoch[p] - st.base[0]
    return implies(
        _now(st, r) & _now(st, p),
        (st.total[r, q, ended] <= st.sent[r, q]) & (st.total[q, r, ended] <= st.taken[r, q]),
    )


@LEMMAS("ranks.ends-agree", r="rank", q="rank")
def ends_agree(st: Any, r: Any, q: Any) -> Any:
    """
    Both ends of a channel count the same messages as ended; the count is zero until both ranks have
    started.
    """
    both = _now(st, r) & _now(st, q)
    return implies(both, st.sent_done[r, q] == st.taken_done[q, r]) & implies(
        st.life[r] != st.life[q],
        implies(_now(st, r), (st.sent_done[r, q] == 0) & (st.taken_done[r, q] == 0)),
    )


@LEMMAS("ranks.channel-settled", r="rank", q="rank")
def channel_settled(st: Any, r: Any, q: Any) -> Any:
    """A rank has no unfinished message outside its current step."""
    outside = _now(st, r) & (st.phase[r] != STEP)
    ended = (st.sent_done[r, q] == st.sent[r, q]) & (st.taken_done[r, q] == st.taken[r, q])
    return implies(outside, ended)


@LEMMAS("ranks.channel-of-step", r="rank", q="rank")
def channel_of_step(st: Any, r: Any, q: Any) -> Any:
    """A rank has posted all messages of its ended steps, and perhaps some of the current step."""
    n = st.step[r]
    in_step = (st.sent_before[r, q] == st.total[r, q, n - 1]) & (
        st.taken_before[r, q] == st.total[q, r, n - 1]
    )
    all_posted = (st.sent[r, q] == st.total[r, q, n]) & (st.taken[r, q] == st.total[q, r, n])
    between = st.phase[r] == BETWEEN
    return implies(
        _now(st, r),
        implies(st.phase[r] != STEP, all_posted) & (between | in_step),
    )


# Stopping


@LEMMAS("ranks.halted-or-not", n="attempt")
def halted_or_not(st: Any, n: Any) -> Any:
    """For each attempt, the marks of its cause and of its reason are 0 or 1."""
    return ((st.halted[n] == 0) | (st.halted[n] == 1)) & (
        (st.reasoned[n] == 0) | (st.reasoned[n] == 1)
    )


@LEMMAS("ranks.said-leaves", r="rank")
def said_leaves(st: Any, r: Any) -> Any:
    """A rank publishes a reason only if it cannot continue."""
    return implies(st.said[r] == 1, st.leaving[r] == 1)


@LEMMAS("ranks.closed-said", r="rank")
def closed_said(st: Any, r: Any) -> Any:
    """If a running rank has closed its connections, it has published the reason."""
    return implies((st.up[r] == 1) & (st.open[r] == 0), st.said[r] == 1)


@LEMMAS("ranks.reasons-count", r="rank")
def reasons_count(st: Any, r: Any) -> Any:
    """If a rank published a reason of its own, its attempt is marked as having a reason."""
    said = (st.life[r] != NOBODY) & (st.said[r] == 1) & (st.lost[r] == 0)
    return implies(said, st.reasoned[st.life[r]] == 1)


@LEMMAS("ranks.reason-stands")
def reason_stands(st: Any) -> Any:
    """The first rank with a reason of its own in the newest attempt has not restarted."""
    n = st.attempt[0]
    w = st.reason[n]
    return implies(
        (n > 0) & (st.reasoned[n] == 1), (st.life[w] == n) & (st.said[w] == 1) & (st.lost[w] == 0)
    )


@LEMMAS("ranks.nothing-of-attempts-to-come", n="attempt")
def nothing_of_attempts_to_come(st: Any, n: Any) -> Any:
    """No reason was published in an attempt that has not begun."""
    return implies(n > st.attempt[0], st.reasoned[n] == 0)


@LEMMAS("ranks.closed-for-a-reason", r="rank")
def closed_for_a_reason(st: Any, r: Any) -> Any:
    """Connections are closed because a rank of the attempt crashed, or had a reason of its own."""
    n = st.life[r]
    closed = (n != NOBODY) & (st.open[r] == 0)
    return implies(closed, (st.reasoned[n] == 1) | (st.gone[n] == 1))


@LEMMAS("ranks.lost-for-a-reason", r="rank")
def lost_for_a_reason(st: Any, r: Any) -> Any:
    """A rank lost a connection because a rank was gone or late, or had a reason of its own."""
    n = st.life[r]
    return implies(st.lost[r] == 1, (st.reasoned[n] == 1) | (st.gone[n] == 1))
