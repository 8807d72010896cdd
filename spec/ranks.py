"""
Ranks: promises about several processes together, each with a contract of its own.

The promises are predicates over the columns below. The columns record what happened on every rank
and on every channel (the messages from one rank to another). ``r``, ``q`` and ``p`` are any ranks,
``k`` and ``j`` any message numbers in a channel, ``n`` any attempt, and ``a`` and ``b`` any names
of attempts. Nothing here restates the guards of the protocol
(`qeffect.verification.ranks.protocol`). Proofs show that the protocol keeps these promises for any
number of ranks.
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
#: No epoch, rank or attempt yet: the value before the first one.
NOBODY: Final = -1

#: Sorts of the indices and meaning of an entry, by column.
RANK_COLUMNS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "attempt": (("one",), "number of attempts (common runs of all ranks) that have begun"),
    "base": (("one",), "the epoch from which the newest attempt began"),
    "again": (("one",), "1 if the newest attempt began in place, not from a checkpoint"),
    "saved": (("one",), "the epoch that the newest whole checkpoint is named after"),
    "saved_life": (
        ("one",),
        "the attempt that wrote the newest whole checkpoint; 0 before the first",
    ),
    "lead": (("one",), "configured: the rank that draws an attempt's name"),
    "offered": (
        ("one",),
        "the name that the launcher's store offers now; it may belong to an earlier attempt",
    ),
    "drawn_in": (("name",), "the attempt in which the name was drawn"),
    "seat": (
        ("name", "rank"),
        "the attempt in which the rank took its seat under the name, that is, the rank's one "
        "entry in the store",
    ),
    "confirmed": (
        ("name",),
        "1 once every rank has taken its seat under the name and the name was confirmed",
    ),
    "life": (("rank",), "the attempt in which the rank last started"),
    "drew": (("rank",), "the name that the rank drew in its attempt"),
    "name": (("rank",), "the name under which the rank connected"),
    "up": (("rank",), "1 while the rank's process runs"),
    "open": (("rank",), "1 while the rank's connections are open"),
    "phase": (
        ("rank",),
        "0 between steps, 1 in a step, 2 after the rank consented to the step's commit",
    ),
    "step": (("rank",), "number of steps that the rank has begun in its attempt"),
    "epoch": (("rank",), "the weight epoch of the rank's contract"),
    "live": (("rank",), "number of live tapes and actions in flight in the rank's contract"),
    "spoiled": (("rank",), "1 if a failure touched the rank's epoch"),
    "whole": (("rank",), "1 if all gradients of the rank's epoch are final and reduced"),
    "yes": (
        ("rank",),
        "the epoch to which the rank last consented to move its weights",
    ),
    "refused": (("rank",), "the epoch whose commit the rank's contract refused"),
    "leaving": (("rank",), "1 once the rank cannot continue"),
    "lost": (("rank",), "1 if the rank stops because a connection closed"),
    "said": (("rank",), "1 once the rank has published its reason for stopping"),
    "ended": (("rank",), "1 if the rank stopped by itself in its attempt"),
    "told": (("rank",), "the rank that this rank named as the cause when it stopped"),
    "reasoned": (
        ("attempt",),
        "1 once a rank of the attempt has published a reason of its own "
        "(more than a lost connection)",
    ),
    "reason": (("attempt",), "the first rank of the attempt that published a reason of its own"),
    "halted": (("attempt",), "1 once a rank has recorded the cause of the attempt's end"),
    "cause": (("attempt",), "the rank that the attempt's cause names"),
    "cause_lost": (("attempt",), "1 if the rank that the cause names only lost a connection"),
    "gone": (
        ("attempt",),
        "1 once a rank of the attempt has crashed, run into a deadline or been ended by the "
        "launcher",
    ),
    "shard": (("rank",), "the epoch of the weights in the rank's newest part of a checkpoint"),
    "shard_life": (
        ("rank",),
        "the attempt in which the rank's newest part of a checkpoint was written",
    ),
    "kept": (("rank",), "the epoch of the weights in the rank's part of the whole checkpoint"),
    "kept_life": (
        ("rank",),
        "the attempt in which the rank's part of the whole checkpoint was "
        "written; 0 before the first",
    ),
    "generation": (("rank", "slot"), "how often the rank's slot was released"),
    "sent": (("rank", "rank"), "number of sends that the first rank posted to the second"),
    "sent_before": (
        ("rank", "rank"),
        "number of sends that the first rank posted to the second before the first rank's current "
        "step",
    ),
    "sent_done": (
        ("rank", "rank"),
        "number of sends of the first rank that the second has received",
    ),
    "out": (
        ("rank", "rank", "place"),
        "the slot that the first rank's send to the second reads; place is the number of the send",
    ),
    "out_generation": (
        ("rank", "rank", "place"),
        "the generation of the send's slot when the send was posted",
    ),
    "out_message": (
        ("rank", "rank", "place"),
        "the message that was sent; one number encodes its stage, microbatch and direction",
    ),
    "taken": (("rank", "rank"), "number of receives that the first rank posted from the second"),
    "taken_before": (
        ("rank", "rank"),
        "number of receives that the first rank posted from the second before the first rank's "
        "current step",
    ),
    "taken_done": (
        ("rank", "rank"),
        "number of receives of the first rank from the second that have ended",
    ),
    "into": (
        ("rank", "rank", "place"),
        "the slot that the first rank's receive from the second fills; place is the number of the "
        "receive",
    ),
    "into_generation": (
        ("rank", "rank", "place"),
        "the generation of the receive's slot when the receive was posted",
    ),
    "into_message": (
        ("rank", "rank", "place"),
        "the message that the receive expects; one number encodes its stage, microbatch and "
        "direction",
    ),
    "messages": (
        ("rank", "rank"),
        "configured: number of messages per step from the first rank to the second",
    ),
    "total": (
        ("rank", "rank", "place"),
        "configured: number of messages from the first rank to the second in the first `place` "
        "steps",
    ),
}

#: Promises that hold in every state that the protocol reaches.
RANK_PROMISES: Final = Register()
#: Promises that hold whenever the named transition of the protocol happens.
RANK_STEPS: Final = Register()


def sending(st: Any, r: Any, q: Any, k: Any) -> Any:
    """Whether the k-th send from one rank to another is under way."""
    return (st.sent_done[r, q] <= k) & (k < st.sent[r, q])


def receiving(st: Any, r: Any, q: Any, k: Any) -> Any:
    """Whether the k-th receive of one rank from another is under way."""
    return (st.taken_done[r, q] <= k) & (k < st.taken[r, q])


def _runs(st: Any, r: Any) -> Any:
    return (st.up[r] == 1) & (st.phase[r] != BETWEEN)


# One step, one epoch


@RANK_PROMISES("ranks.one-epoch-a-step", r="rank", q="rank")
def one_epoch_a_step(st: Any, r: Any, q: Any) -> Any:
    """Two ranks that run actions of the same step of an attempt are in the same epoch."""
    same = (st.life[r] == st.life[q]) & (st.step[r] == st.step[q])
    return implies(_runs(st, r) & _runs(st, q) & same, st.epoch[r] == st.epoch[q])


@RANK_PROMISES("ranks.one-attempt", r="rank", q="rank")
def one_attempt(st: Any, r: Any, q: Any) -> Any:
    """All ranks whose processes run belong to the same attempt."""
    return implies((st.up[r] == 1) & (st.up[q] == 1), st.life[r] == st.life[q])


@RANK_PROMISES("ranks.name-of-one-attempt", r="rank", q="rank")
def name_of_one_attempt(st: Any, r: Any, q: Any) -> Any:
    """Two ranks that connected under the same name started in the same attempt."""
    return implies((st.name[r] == st.name[q]) & (st.name[r] != NOBODY), st.life[r] == st.life[q])


@RANK_PROMISES("ranks.one-name", r="rank", q="rank")
def one_name(st: Any, r: Any, q: Any) -> Any:
    """All ranks that connect in one attempt connect under the same name."""
    both = (st.name[r] != NOBODY) & (st.name[q] != NOBODY)
    return implies(both & (st.life[r] == st.life[q]), st.name[r] == st.name[q])


@RANK_PROMISES("ranks.all-came", r="rank", q="rank")
def all_came(st: Any, r: Any, q: Any) -> Any:
    """While a rank that has connected runs, every rank has started in that rank's attempt."""
    return implies((st.up[r] == 1) & (st.name[r] != NOBODY), st.life[q] == st.life[r])


# No rank commits before all agree


@RANK_PROMISES("ranks.refusal-holds-all", r="rank", q="rank")
def refusal_holds_all(st: Any, r: Any, q: Any) -> Any:
    """If a rank's contract refuses the commit of an epoch, no other rank of the attempt commits
    that epoch."""
    return implies(
        (st.life[r] == st.life[q]) & (st.refused[r] != NOBODY), st.epoch[q] <= st.refused[r]
    )


@RANK_PROMISES("ranks.all-consented", r="rank", q="rank")
def all_consented(st: Any, r: Any, q: Any) -> Any:
    """A rank has updated its weights in an attempt only with the consent of every rank."""
    moved = (st.life[r] == st.attempt[0]) & (st.epoch[r] != st.base[0])
    return implies(moved, (st.life[q] == st.attempt[0]) & (st.epoch[r] <= st.yes[q]))


@RANK_STEPS("ranks.commit-accepted", "commit")
def commit_accepted(st: Any, r: Any) -> Any:
    """When all ranks have consented to a commit, each rank's own contract accepts that commit."""
    return (st.live[r] == 0) & (st.whole[r] == 1) & (st.spoiled[r] == 0)


# Messages


@RANK_STEPS("ranks.message-meets-its-own", "transfer")
def message_meets_its_own(st: Any, r: Any, q: Any) -> Any:
    """A message is received in the step, epoch and attempt in which it was sent. The messages of a
    channel arrive in the order in which they were sent."""
    sent = st.sent_done[r, q] - st.sent_before[r, q]
    taken = st.taken_done[q, r] - st.taken_before[q, r]
    return (
        (st.life[r] == st.life[q])
        & (st.step[r] == st.step[q])
        & (st.epoch[r] == st.epoch[q])
        & (sent == taken)
    )


@RANK_PROMISES("ranks.messages-in-place", r="rank", q="rank", p="rank", k="place")
def messages_in_place(st: Any, r: Any, q: Any, p: Any, k: Any) -> Any:
    """Up to the last step in which a rank updated its weights, every receive of the attempt was
    paired with the right send: the send of the same stage, microbatch and direction."""
    taken = st.total[q, p, st.epoch[r] - st.base[0]]
    return implies(
        (st.life[r] == st.attempt[0]) & (0 <= k) & (k < taken),
        st.out_message[q, p, k] == st.into_message[p, q, k],
    )


@RANK_PROMISES("ranks.sender-keeps-buffer", r="rank", q="rank", k="place")
def sender_keeps_buffer(st: Any, r: Any, q: Any, k: Any) -> Any:
    """While a send is under way, the slot that it reads is not released."""
    return implies(
        sending(st, r, q, k), st.out_generation[r, q, k] == st.generation[r, st.out[r, q, k]]
    )


@RANK_PROMISES("ranks.receiver-keeps-buffer", r="rank", q="rank", k="place")
def receiver_keeps_buffer(st: Any, r: Any, q: Any, k: Any) -> Any:
    """While a receive is under way, the slot that it fills is not released."""
    return implies(
        receiving(st, r, q, k), st.into_generation[r, q, k] == st.generation[r, st.into[r, q, k]]
    )


@RANK_PROMISES("ranks.one-writer", r="rank", q="rank", p="rank", k="place", j="place")
def one_writer(st: Any, r: Any, q: Any, p: Any, k: Any, j: Any) -> Any:
    """Two receives that are under way at the same time never fill the same slot."""
    both = receiving(st, r, q, k) & receiving(st, r, p, j)
    return implies(both & (st.into[r, q, k] == st.into[r, p, j]), (q == p) & (k == j))


@RANK_PROMISES("ranks.no-write-under-a-send", r="rank", q="rank", p="rank", k="place", j="place")
def no_write_under_a_send(st: Any, r: Any, q: Any, p: Any, k: Any, j: Any) -> Any:
    """No receive fills a slot while a send from that slot is under way."""
    both = sending(st, r, q, k) & receiving(st, r, p, j)
    return implies(both, st.out[r, q, k] != st.into[r, p, j])


# Checkpoints


@RANK_PROMISES("ranks.checkpoint-of-one-epoch", r="rank")
def checkpoint_of_one_epoch(st: Any, r: Any) -> Any:
    """A whole checkpoint is named after an epoch. Every rank's part of it holds the weights of that
    epoch."""
    return st.kept[r] == st.saved[0]


@RANK_PROMISES("ranks.checkpoint-of-one-attempt", r="rank")
def checkpoint_of_one_attempt(st: Any, r: Any) -> Any:
    """Every rank's part of the whole checkpoint was written in the same attempt."""
    return st.kept_life[r] == st.saved_life[0]


@RANK_STEPS("ranks.starts-again-in-one-epoch", "start_again")
def starts_again_in_one_epoch(st: Any, r: Any) -> Any:
    """If all ranks start again in place, each has the weights of the epoch in which all ranks
    stopped."""
    return st.epoch[r] == st.base[0]


@RANK_STEPS("ranks.starts-from-one-checkpoint", "start")
def starts_from_one_checkpoint(st: Any, r: Any) -> Any:
    """If an attempt begins from a checkpoint, every rank starts from that checkpoint."""
    return st.kept[r] == st.base[0]


# Stopping


@RANK_PROMISES("ranks.one-cause", r="rank", q="rank")
def one_cause(st: Any, r: Any, q: Any) -> Any:
    """All ranks that stop in an attempt name the same cause."""
    both = (st.ended[r] == 1) & (st.ended[q] == 1) & (st.life[r] == st.life[q])
    return implies(both, st.told[r] == st.told[q])


@RANK_PROMISES("ranks.tells-the-cause", r="rank")
def tells_the_cause(st: Any, r: Any) -> Any:
    """A rank that stops by itself names the recorded cause of its attempt; such a cause exists."""
    n = st.life[r]
    return implies(st.ended[r] == 1, (st.halted[n] == 1) & (st.told[r] == st.cause[n]))


@RANK_PROMISES("ranks.stop-is-explained", r="rank")
def stop_is_explained(st: Any, r: Any) -> Any:
    """A rank that stops by itself has published its reason."""
    return implies(st.ended[r] == 1, st.said[r] == 1)


@RANK_PROMISES("ranks.cause-before-loss", n="attempt")
def cause_before_loss(st: Any, n: Any) -> Any:
    """
    If the cause names a rank that only lost a connection, then some rank crashed, ran into a
    deadline or was ended by the launcher.
    """
    return implies((st.halted[n] == 1) & (st.cause_lost[n] == 1), st.gone[n] == 1)


@RANK_PROMISES("ranks.stop-wakes", r="rank")
def stop_wakes(st: Any, r: Any) -> Any:
    """A rank that stopped or crashed has no open connection. So ranks that wait for a message of
    this rank are woken."""
    return implies(st.up[r] == 0, st.open[r] == 0)
