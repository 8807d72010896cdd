"""
Ranks: what is promised of several processes together, each with a contract of its own.

The promises are predicates over the columns below, which say what happened on every rank and on
every channel between two of them. ``r`` and ``q`` are any two ranks, ``k`` any place in a channel,
``s`` and ``t`` any slots, ``n`` any attempt. Nothing here restates what the protocol asks before it
acts: that is the protocol (`qeffect.verification.ranks.protocol`), and the promises are proved of
it for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .predicates import Register, implies

__all__ = [
    "AGREED",
    "BETWEEN",
    "NOBODY",
    "RANK_COLUMNS",
    "RANK_PROMISES",
    "RANK_STEPS",
    "STEP",
    "receiving",
    "sending",
]

#: Phases of a rank: before a step, in it, and after its consent to the step's commit.
BETWEEN: Final = 0
STEP: Final = 1
AGREED: Final = 2
#: No epoch, no attempt: what a column of such holds before there is one.
NOBODY: Final = -1

#: For each column, what it is indexed by and what an entry says.
RANK_COLUMNS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "attempt": (("one",), "attempts to run the job that have begun"),
    "base": (("one",), "the epoch of the checkpoint that the newest attempt began from"),
    "saved": (("one",), "the epoch that the newest whole checkpoint is named after"),
    "saved_life": (("one",), "the attempt that wrote it; 0 before any did"),
    "life": (("rank",), "the attempt in which the rank last started"),
    "up": (("rank",), "1 while the rank's process runs"),
    "open": (("rank",), "1 while the rank's connections are open"),
    "phase": (("rank",), "between steps, in a step, or agreed to its commit"),
    "step": (("rank",), "steps that the rank has begun in its attempt"),
    "epoch": (("rank",), "the weight epoch of the rank's contract"),
    "live": (("rank",), "work of the rank's contract that is live or in flight"),
    "spoiled": (("rank",), "1 when a failure touched the rank's epoch"),
    "whole": (("rank",), "1 when all gradients of the rank's epoch are final and reduced"),
    "yes": (("rank",), "the epoch that the rank has consented to move to"),
    "refused": (("rank",), "the epoch whose commit the rank's contract refused"),
    "leaving": (("rank",), "1 once the rank cannot go on"),
    "lost": (("rank",), "1 when that is because a connection closed"),
    "said": (("rank",), "1 once the rank has published why"),
    "ended": (("rank",), "1 when the rank stopped by itself in its attempt"),
    "told": (("rank",), "the rank that it then named as the cause"),
    "halted": (("attempt",), "1 when the attempt has a cause to end"),
    "cause": (("attempt",), "the rank that is the cause"),
    "cause_lost": (("attempt",), "1 when that rank only lost a connection"),
    "gone": (("attempt",), "1 when a rank crashed in the attempt"),
    "shard": (("rank",), "the epoch of the weights in the rank's newest part of a checkpoint"),
    "shard_life": (("rank",), "the attempt in which it was written"),
    "kept": (("rank",), "the epoch of the weights in the rank's part of the whole checkpoint"),
    "kept_life": (("rank",), "the attempt in which that part was written; 0 before any was"),
    "generation": (("rank", "slot"), "releases of a slot"),
    "sent": (("rank", "rank"), "sends that the first rank posted to the second"),
    "sent_before": (("rank", "rank"), "those before its current step"),
    "sent_done": (("rank", "rank"), "those that the second rank has received"),
    "out": (("rank", "rank", "place"), "the slot that a send leaves from"),
    "out_generation": (("rank", "rank", "place"), "that slot's generation when it was posted"),
    "taken": (("rank", "rank"), "receives that the first rank posted from the second"),
    "taken_before": (("rank", "rank"), "those before its current step"),
    "taken_done": (("rank", "rank"), "those that have ended"),
    "into": (("rank", "rank", "place"), "the slot that a receive fills"),
    "into_generation": (("rank", "rank", "place"), "that slot's generation when it was posted"),
    "messages": (("rank", "rank"), "configured: messages of a step from the first to the second"),
    "total": (("rank", "rank", "place"), "configured: those of so many steps"),
}

#: Hold in every state that the protocol reaches.
RANK_PROMISES: Final = Register()
#: Hold whenever the named thing happens.
RANK_STEPS: Final = Register()


def sending(st: Any, r: Any, q: Any, k: Any) -> Any:
    """Whether the k-th send of a rank to another is under way."""
    return (st.sent_done[r, q] <= k) & (k < st.sent[r, q])


def receiving(st: Any, r: Any, q: Any, k: Any) -> Any:
    """Whether the k-th receive of a rank from another is under way."""
    return (st.taken_done[r, q] <= k) & (k < st.taken[r, q])


def _runs(st: Any, r: Any) -> Any:
    return (st.up[r] == 1) & (st.phase[r] != BETWEEN)


# One step, one epoch


@RANK_PROMISES("ranks.one-epoch-a-step", r="rank", q="rank")
def one_epoch_a_step(st: Any, r: Any, q: Any) -> Any:
    """No two ranks run actions of the same step in different epochs."""
    same = (st.life[r] == st.life[q]) & (st.step[r] == st.step[q])
    return implies(_runs(st, r) & _runs(st, q) & same, st.epoch[r] == st.epoch[q])


@RANK_PROMISES("ranks.one-attempt", r="rank", q="rank")
def one_attempt(st: Any, r: Any, q: Any) -> Any:
    """No two ranks run in different attempts."""
    return implies((st.up[r] == 1) & (st.up[q] == 1), st.life[r] == st.life[q])


# All go on or none


@RANK_PROMISES("ranks.refusal-holds-all", r="rank", q="rank")
def refusal_holds_all(st: Any, r: Any, q: Any) -> Any:
    """No rank moves the weights of an epoch whose commit another refused in the same attempt."""
    return implies(
        (st.life[r] == st.life[q]) & (st.refused[r] != NOBODY), st.epoch[q] <= st.refused[r]
    )


@RANK_PROMISES("ranks.all-consented", r="rank", q="rank")
def all_consented(st: Any, r: Any, q: Any) -> Any:
    """A rank that moved its weights in an attempt had the consent of every other one to do so."""
    moved = (st.life[r] == st.attempt[0]) & (st.epoch[r] != st.base[0])
    return implies(moved, (st.life[q] == st.attempt[0]) & (st.epoch[r] <= st.yes[q]))


@RANK_STEPS("ranks.commit-accepted", "commit")
def commit_accepted(st: Any, r: Any) -> Any:
    """When all have consented, the rank's own contract accepts the commit: nothing intervened."""
    return (st.live[r] == 0) & (st.whole[r] == 1) & (st.spoiled[r] == 0)


# Messages


@RANK_STEPS("ranks.message-meets-its-own", "transfer")
def message_meets_its_own(st: Any, r: Any, q: Any) -> Any:
    """
    A message is received in the step, the epoch and the attempt that it was sent in, at its place
    in the order of its channel.
    """
    sent = st.sent_done[r, q] - st.sent_before[r, q]
    taken = st.taken_done[q, r] - st.taken_before[q, r]
    return (
        (st.life[r] == st.life[q])
        & (st.step[r] == st.step[q])
        & (st.epoch[r] == st.epoch[q])
        & (sent == taken)
    )


@RANK_PROMISES("ranks.sender-keeps-buffer", r="rank", q="rank", k="place")
def sender_keeps_buffer(st: Any, r: Any, q: Any, k: Any) -> Any:
    """While a send is under way, its slot is not released."""
    return implies(
        sending(st, r, q, k), st.out_generation[r, q, k] == st.generation[r, st.out[r, q, k]]
    )


@RANK_PROMISES("ranks.receiver-keeps-buffer", r="rank", q="rank", k="place")
def receiver_keeps_buffer(st: Any, r: Any, q: Any, k: Any) -> Any:
    """While a receive is under way, its slot is not released."""
    return implies(
        receiving(st, r, q, k), st.into_generation[r, q, k] == st.generation[r, st.into[r, q, k]]
    )


@RANK_PROMISES("ranks.one-writer", r="rank", q="rank", p="rank", k="place", j="place")
def one_writer(st: Any, r: Any, q: Any, p: Any, k: Any, j: Any) -> Any:
    """Two receives that are under way never fill one slot."""
    both = receiving(st, r, q, k) & receiving(st, r, p, j)
    return implies(both & (st.into[r, q, k] == st.into[r, p, j]), (q == p) & (k == j))


@RANK_PROMISES("ranks.no-write-under-a-send", r="rank", q="rank", p="rank", k="place", j="place")
def no_write_under_a_send(st: Any, r: Any, q: Any, p: Any, k: Any, j: Any) -> Any:
    """No receive fills a slot that a send is leaving from."""
    both = sending(st, r, q, k) & receiving(st, r, p, j)
    return implies(both, st.out[r, q, k] != st.into[r, p, j])


# Checkpoints


@RANK_PROMISES("ranks.checkpoint-of-one-epoch", r="rank")
def checkpoint_of_one_epoch(st: Any, r: Any) -> Any:
    """Every rank's part of the whole checkpoint is of the epoch that it is named after."""
    return st.kept[r] == st.saved[0]


@RANK_PROMISES("ranks.checkpoint-of-one-attempt", r="rank")
def checkpoint_of_one_attempt(st: Any, r: Any) -> Any:
    """Every rank's part of the whole checkpoint was written in the same attempt."""
    return st.kept_life[r] == st.saved_life[0]


@RANK_STEPS("ranks.starts-from-one-checkpoint", "start")
def starts_from_one_checkpoint(st: Any, r: Any) -> Any:
    """Every rank starts an attempt from the checkpoint that the attempt began from."""
    return st.kept[r] == st.base[0]


# Stopping


@RANK_PROMISES("ranks.one-cause", r="rank", q="rank")
def one_cause(st: Any, r: Any, q: Any) -> Any:
    """All ranks that stop in an attempt name the same cause."""
    both = (st.ended[r] == 1) & (st.ended[q] == 1) & (st.life[r] == st.life[q])
    return implies(both, st.told[r] == st.told[q])


@RANK_PROMISES("ranks.tells-the-cause", r="rank")
def tells_the_cause(st: Any, r: Any) -> Any:
    """A rank that stops by itself names the cause of its attempt, which has one."""
    n = st.life[r]
    return implies(st.ended[r] == 1, (st.halted[n] == 1) & (st.told[r] == st.cause[n]))


@RANK_PROMISES("ranks.cause-before-loss", n="attempt")
def cause_before_loss(st: Any, n: Any) -> Any:
    """A rank that only lost a connection is not the cause, unless a rank crashed."""
    return implies((st.halted[n] == 1) & (st.cause_lost[n] == 1), st.gone[n] == 1)


@RANK_PROMISES("ranks.stop-wakes", r="rank")
def stop_wakes(st: Any, r: Any) -> Any:
    """A rank that stopped or crashed has no connection open: whoever waits on it is woken."""
    return implies(st.up[r] == 0, st.open[r] == 0)
