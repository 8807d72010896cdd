"""
The protocol of N ranks, as transitions over columns. The same functions run on plain memory and in
a solver.

The protocol models a rank's own contract by four numbers: its epoch, how much of it is live (in
flight or retained), whether its epoch is spoiled, and whether it is whole (final and reduced). A
separate check compares this model with the kernel (`qeffect.verification.ranks.kernel`).

Each transition has three parts. ``st.when`` says when the transition is possible at all: a process
that does not run does nothing. ``st.need`` is a named condition that the protocol checks; if any
single such condition is left out, a promise breaks. Then the transition writes the state.
Transitions neither branch on the state nor loop over it, so that the same functions run on small
memories and on Z3's arrays.

An attempt is one run of all ranks from a checkpoint. The launcher does not tell ranks which attempt
they belong to, and its store keeps the entries of earlier attempts. So the ranks of an attempt
agree on a unique name (`qeffect.gpu_runtime.ranks.attempt`) and connect under it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from attrs import frozen

from qeffect.spec.predicates import implies
from qeffect.spec.ranks import AGREED, BETWEEN, NOBODY, STEP, receiving, sending

from .stopping import publish_reason, write_cause

__all__ = ["FAULTS", "TRANSITIONS", "RankTransition", "transition_in"]


@frozen
class RankTransition:
    """
    One transition of the protocol.

    Args:
        name: The transition's name.
        run: The transition's function; it takes the state and the arguments.
        arguments: Sort of each argument, such as ``rank``.
        fault: Whether the transition is a fault instead of a step of the protocol.
    """

    name: str
    run: Callable[..., None]
    arguments: tuple[str, ...] = ()
    fault: bool = False

    @property
    def text(self) -> str:
        """A description of the transition in one sentence."""
        return " ".join((self.run.__doc__ or "").split())


def transition_in(
    found: dict[str, RankTransition], *arguments: str, fault: bool = False
) -> Callable[..., Any]:
    """Return a decorator that adds a function to a protocol's transitions."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        found[function.__name__] = RankTransition(function.__name__, function, arguments, fault)
        return function

    return enter


_FOUND: dict[str, RankTransition] = {}
_transition = partial(transition_in, _FOUND)


def _goes_on(st: Any, r: Any, phase: int) -> None:
    st.when(st.up[r] == 1)
    st.when(st.leaving[r] == 0)
    st.when(st.phase[r] == phase)


# Attempts


@_transition()
def begin_attempt(st: Any) -> None:
    """
    The launcher begins an attempt from the newest complete checkpoint, once no rank is running.
    """
    st.need("fence", st.every("rank", lambda q: st.up[q] == 0))
    st.attempt[0] = st.attempt[0] + 1
    st.base[0] = st.saved[0]
    st.again[0] = 0


@_transition()
def begin_again(st: Any) -> None:
    """
    The ranks begin an attempt in place, after all of them stopped without a crash in the same
    epoch.
    """
    st.when(st.attempt[0] > 0)
    st.need(
        "all-stopped",
        st.every(
            "rank", lambda q: (st.up[q] == 0) & (st.ended[q] == 1) & (st.life[q] == st.attempt[0])
        ),
    )
    st.need("stopped-in-one-epoch", st.every("rank", lambda q: st.epoch[q] == st.epoch[st.lead[0]]))
    st.attempt[0] = st.attempt[0] + 1
    st.base[0] = st.epoch[st.lead[0]]
    st.again[0] = 1


def _fresh(st: Any, r: Any) -> None:
    st.life[r] = st.attempt[0]
    st.up[r] = 1
    st.open[r] = 1
    st.phase[r] = BETWEEN
    st.step[r] = 0
    st.drew[r] = NOBODY
    st.name[r] = NOBODY
    st.refused[r] = NOBODY
    for column in ("live", "spoiled", "whole", "leaving", "lost", "said", "ended"):
        getattr(st, column)[r] = 0
    for column in ("sent", "sent_before", "sent_done", "taken", "taken_before", "taken_done"):
        getattr(st, column)[r] = st.zeros(column)


@_transition("rank")
def start(st: Any, r: Any) -> None:
    """A rank starts, once per attempt, and loads its part of the checkpoint."""
    st.when(st.up[r] == 0)
    st.need("one-start", st.life[r] != st.attempt[0])
    st.when((st.attempt[0] > 0) & (st.again[0] == 0))
    _fresh(st, r)
    st.epoch[r] = st.kept[r]
    st.yes[r] = st.kept[r]


@_transition("rank")
def start_again(st: Any, r: Any) -> None:
    """A rank that stopped restarts in place, from its own weights."""
    st.when((st.up[r] == 0) & (st.life[r] != st.attempt[0]))
    st.when(st.again[0] == 1)
    _fresh(st, r)
    st.yes[r] = st.epoch[r]


@_transition("rank", "name")
def offer(st: Any, r: Any, a: Any) -> None:
    """The leading rank draws a name for its attempt, and offers it in the launcher's store."""
    st.when((st.up[r] == 1) & (st.leaving[r] == 0))
    st.when((r == st.lead[0]) & (st.drew[r] == NOBODY) & (a != NOBODY))
    st.need("drawn-name", st.drawn_in[a] == NOBODY)
    st.drawn_in[a] = st.life[r]
    st.drew[r] = a
    st.offered[0] = a
    st.seat[a, r] = st.life[r]


@_transition("rank", "name")
def take_seat(st: Any, r: Any, a: Any) -> None:
    """A rank joins under the name that the store offers, even if the offer is old."""
    st.when((st.up[r] == 1) & (st.leaving[r] == 0) & (st.name[r] == NOBODY))
    st.when((a == st.offered[0]) & (a != NOBODY) & (r != st.lead[0]))
    st.when(st.seat[a, r] != st.life[r])
    st.need("first-come", st.seat[a, r] == NOBODY)
    st.seat[a, r] = st.life[r]


@_transition("rank", "name")
def confirm(st: Any, r: Any, a: Any) -> None:
    """The rank that drew a name confirms it."""
    st.when((st.up[r] == 1) & (st.leaving[r] == 0))
    st.when((st.drew[r] == a) & (a != NOBODY) & (st.confirmed[a] == 0))
    st.need("all-seats", st.every("rank", lambda q: st.seat[a, q] != NOBODY))
    st.confirmed[a] = 1


@_transition("rank", "name")
def connect(st: Any, r: Any, a: Any) -> None:
    """A rank connects to the others under a confirmed name."""
    st.when((st.up[r] == 1) & (st.leaving[r] == 0) & (st.name[r] == NOBODY))
    st.when((a != NOBODY) & (st.confirmed[a] == 1))
    st.need("own-seat", st.seat[a, r] == st.life[r])
    st.name[r] = a


# A step


@_transition("rank")
def begin_step(st: Any, r: Any) -> None:
    """A rank with connections begins its next step."""
    _goes_on(st, r, BETWEEN)
    st.when(st.name[r] != NOBODY)
    st.phase[r] = STEP
    st.step[r] = st.step[r] + 1
    st.sent_before[r] = st.sent[r]
    st.taken_before[r] = st.taken[r]


@_transition("rank")
def act(st: Any, r: Any) -> None:
    """The rank's contract accepts an action; the action is then live."""
    st.when(st.up[r] == 1)
    st.when(st.phase[r] != BETWEEN)
    st.when(st.leaving[r] == 0)
    st.need("no-action-after-consent", st.phase[r] == STEP)
    st.live[r] = st.live[r] + 1


@_transition("rank")
def end_act(st: Any, r: Any) -> None:
    """A live action of the rank is released."""
    _goes_on(st, r, STEP)
    st.when(st.live[r] > 0)
    st.live[r] = st.live[r] - 1


@_transition("rank", fault=True)
def fail(st: Any, r: Any) -> None:
    """An action fails, which spoils its epoch."""
    _goes_on(st, r, STEP)
    st.when(st.live[r] > 0)
    st.live[r] = st.live[r] - 1
    st.spoiled[r] = 1
    st.whole[r] = 0


@_transition("rank")
def finish(st: Any, r: Any) -> None:
    """The rank's stages are final and reduced."""
    _goes_on(st, r, STEP)
    st.when(st.spoiled[r] == 0)
    st.whole[r] = 1


# Messages


@_transition("rank", "rank", "slot", "message")
def post_send(st: Any, r: Any, q: Any, s: Any, m: Any) -> None:
    """A rank posts its next send to another rank: a message from a slot."""
    _goes_on(st, r, STEP)
    st.when(r != q)
    st.need("planned-sends", st.sent[r, q] < st.sent_before[r, q] + st.messages[r, q])
    st.need(
        "send-after-receive",
        st.every("rank place", lambda p, k: implies(receiving(st, r, p, k), st.into[r, p, k] != s)),
    )
    place = st.sent[r, q]
    st.out[r, q, place] = s
    st.out_generation[r, q, place] = st.generation[r, s]
    st.out_message[r, q, place] = m
    st.sent[r, q] = place + 1


@_transition("rank", "rank", "slot", "message")
def post_receive(st: Any, r: Any, q: Any, s: Any, m: Any) -> None:
    """A rank posts its next receive from another rank: a message into a slot."""
    _goes_on(st, r, STEP)
    st.when(r != q)
    st.need("planned-receives", st.taken[r, q] < st.taken_before[r, q] + st.messages[q, r])
    st.need(
        "receive-after-receive",
        st.every("rank place", lambda p, k: implies(receiving(st, r, p, k), st.into[r, p, k] != s)),
    )
    st.need(
        "receive-after-send",
        st.every("rank place", lambda p, k: implies(sending(st, r, p, k), st.out[r, p, k] != s)),
    )
    place = st.taken[r, q]
    st.into[r, q, place] = s
    st.into_generation[r, q, place] = st.generation[r, s]
    st.into_message[r, q, place] = m
    st.taken[r, q] = place + 1


@_transition("rank", "rank")
def transfer(st: Any, r: Any, q: Any) -> None:
    """The oldest unfinished send of a rank meets the oldest receive that waits for that rank."""
    st.when((st.up[r] == 1) & (st.up[q] == 1))
    st.when((st.open[r] == 1) & (st.open[q] == 1))
    st.when((st.name[r] == st.name[q]) & (st.name[r] != NOBODY))
    st.when(r != q)
    st.when(st.sent_done[r, q] < st.sent[r, q])
    st.when(st.taken_done[q, r] < st.taken[q, r])
    st.sent_done[r, q] = st.sent_done[r, q] + 1
    st.taken_done[q, r] = st.taken_done[q, r] + 1


@_transition("rank", "slot")
def release(st: Any, r: Any, s: Any) -> None:
    """A rank releases a slot for the next tape."""
    st.when(st.up[r] == 1)
    st.need(
        "release-after-send",
        st.every("rank place", lambda p, k: implies(sending(st, r, p, k), st.out[r, p, k] != s)),
    )
    st.need(
        "release-after-receive",
        st.every("rank place", lambda p, k: implies(receiving(st, r, p, k), st.into[r, p, k] != s)),
    )
    st.generation[r, s] = st.generation[r, s] + 1


# Consent and commit


@_transition("rank")
def consent(st: Any, r: Any) -> None:
    """
    A rank consents to the commit: its contract would accept the commit, and its messages have
    ended.
    """
    _goes_on(st, r, STEP)
    st.need("contract-accepts", (st.live[r] == 0) & (st.whole[r] == 1))
    st.need(
        "sends-ended",
        st.every(
            "rank",
            lambda q: (
                (st.sent[r, q] == st.sent_before[r, q] + st.messages[r, q])
                & (st.sent_done[r, q] == st.sent[r, q])
            ),
        ),
    )
    st.need(
        "receives-ended",
        st.every(
            "rank",
            lambda q: (
                (st.taken[r, q] == st.taken_before[r, q] + st.messages[q, r])
                & (st.taken_done[r, q] == st.taken[r, q])
            ),
        ),
    )
    st.yes[r] = st.epoch[r] + 1
    st.phase[r] = AGREED


@_transition("rank", fault=True)
def refuse(st: Any, r: Any) -> None:
    """A rank's contract refuses the commit; the rank cannot continue."""
    _goes_on(st, r, STEP)
    st.when((st.live[r] != 0) | (st.whole[r] == 0))
    st.refused[r] = st.epoch[r]
    st.leaving[r] = 1


@_transition("rank")
def commit(st: Any, r: Any) -> None:
    """
    A rank updates its weights, since every rank of its attempt has consented, and both ends of each
    channel posted the same messages in the same order.
    """
    _goes_on(st, r, AGREED)
    st.need(
        "consent-of-all",
        st.every("rank", lambda q: (st.name[q] == st.name[r]) & (st.yes[q] > st.epoch[r])),
    )
    ended = st.step[r]
    st.need(
        "same-messages",
        st.every(
            "rank rank place",
            lambda q, p, k: implies(
                (0 <= k) & (k < st.total[q, p, ended]),
                st.out_message[q, p, k] == st.into_message[p, q, k],
            ),
        ),
    )
    st.epoch[r] = st.epoch[r] + 1
    st.whole[r] = 0
    st.phase[r] = BETWEEN


@_transition("rank", "rank", "rank", "place")
def disagree(st: Any, r: Any, q: Any, p: Any, k: Any) -> None:
    """At its consent, a rank finds that the two ends of a channel differ; it cannot continue."""
    _goes_on(st, r, AGREED)
    st.when(st.every("rank", lambda q: (st.name[q] == st.name[r]) & (st.yes[q] > st.epoch[r])))
    st.when((0 <= k) & (k < st.total[q, p, st.step[r]]))
    st.when(st.out_message[q, p, k] != st.into_message[p, q, k])
    st.leaving[r] = 1


# Checkpoints


@_transition("rank")
def write_shard(st: Any, r: Any) -> None:
    """Between steps, a rank writes its part of a checkpoint."""
    _goes_on(st, r, BETWEEN)
    st.when(st.name[r] != NOBODY)
    st.shard[r] = st.epoch[r]
    st.shard_life[r] = st.life[r]


@_transition("rank")
def publish(st: Any, r: Any) -> None:
    """
    A rank publishes the written parts as the complete checkpoint; all parts are of the same epoch
    as its own part. Meanwhile the rank may have begun another step, or be about to stop.
    """
    st.when((st.up[r] == 1) & (st.name[r] != NOBODY))
    st.need("part-of-this-epoch", st.every("rank", lambda q: st.shard[q] == st.shard[r]))
    st.need("part-of-this-attempt", st.every("rank", lambda q: st.shard_life[q] == st.life[r]))
    st.saved[0] = st.shard[r]
    st.saved_life[0] = st.life[r]
    st.kept[...] = st.shard
    st.kept_life[...] = st.shard_life


# Stopping


@_transition("rank", fault=True)
def give_up(st: Any, r: Any) -> None:
    """A rank cannot continue for a reason of its own."""
    st.when(st.up[r] == 1)
    st.when(st.leaving[r] == 0)
    st.leaving[r] = 1


@_transition("rank", "rank")
def wake(st: Any, r: Any, q: Any) -> None:
    """
    A rank cannot continue: another rank has closed its connections, or did not connect before the
    deadline.
    """
    st.when(st.up[r] == 1)
    st.when(st.leaving[r] == 0)
    st.when((st.life[q] == st.life[r]) & (st.open[q] == 0))
    st.leaving[r] = 1
    st.lost[r] = 1


@_transition("rank", fault=True)
def run_late(st: Any, r: Any) -> None:
    """A rank cannot continue: a deadline passed, or the launcher ends it."""
    st.when(st.up[r] == 1)
    st.when(st.leaving[r] == 0)
    st.gone[st.life[r]] = 1
    st.leaving[r] = 1
    st.lost[r] = 1


@_transition("rank")
def say(st: Any, r: Any) -> None:
    """A rank publishes why it cannot continue."""
    st.when((st.up[r] == 1) & (st.leaving[r] == 1) & (st.said[r] == 0))
    publish_reason(st, r, st.life[r])


@_transition("rank")
def close(st: Any, r: Any) -> None:
    """A rank that cannot continue closes its connections."""
    st.when((st.up[r] == 1) & (st.leaving[r] == 1) & (st.open[r] == 1))
    st.need("said-first", st.said[r] == 1)
    st.open[r] = 0


@_transition("rank", "rank")
def decide(st: Any, r: Any, p: Any) -> None:
    """
    A stopping rank writes which rank is the cause, once it has heard from all ranks or its grace
    period is over. The cause is a rank with a reason of its own; otherwise a rank that published
    nothing, or a rank that lost a connection, in this order.
    """
    n = st.life[r]
    st.when((st.up[r] == 1) & (st.said[r] == 1) & (st.open[r] == 0))
    write_cause(st, p, n, lambda q: st.life[q] == n)


@_transition("rank")
def end(st: Any, r: Any) -> None:
    """A rank reads the attempt's cause, reports the cause and ends."""
    st.when((st.up[r] == 1) & (st.leaving[r] == 1) & (st.open[r] == 0))
    st.need("cause-first", st.halted[st.life[r]] == 1)
    st.told[r] = st.cause[st.life[r]]
    st.ended[r] = 1
    st.up[r] = 0


@_transition("rank", fault=True)
def crash(st: Any, r: Any) -> None:
    """A rank's process dies, at any moment; the system closes its connections."""
    st.when(st.up[r] == 1)
    st.gone[st.life[r]] = 1
    st.open[r] = 0
    st.up[r] = 0


TRANSITIONS: Final[Mapping[str, RankTransition]] = dict(_FOUND)
#: The transitions that are faults, not steps of the protocol.
FAULTS: Final = frozenset(t.name for t in TRANSITIONS.values() if t.fault)
