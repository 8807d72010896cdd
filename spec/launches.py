"""
Launches: promises about ranks that run each step as one launch and decide updates on the devices.

A *launch* replays a whole step, which was captured as one CUDA graph. A host launches a step before
it knows whether the device applied the previous step's update. So the rank's contract is one step
ahead of the votes that the host has read. A rank's *round* begins when the rank starts from a
checkpoint or rebuilds in place. Epochs are counted from the epoch in which the job first launched.
`spec/ranks.py` states how the ranks of an attempt meet. ``r`` and ``q`` are any ranks.

The graph of a launch was captured in the same round. The graph has the rank's sends and receives of
one step, in a fixed order for each channel. Each message is named by its stage, microbatch and
direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .predicates import Register, implies
from .ranks import RANK_COLUMNS

__all__ = ["LAUNCH_COLUMNS", "LAUNCH_PROMISES", "LAUNCH_STEPS"]

#: Columns of stops that launches share with guarded steps; a round counts as an attempt.
_OF_STOPS: Final = (
    *("said", "lost", "ended", "told"),
    *("reasoned", "reason", "halted", "cause", "cause_lost", "gone"),
)
#: Sorts of the indices and meaning of an entry, by column.
LAUNCH_COLUMNS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "round": (
        ("rank",),
        "the number of the rank's round; each start from a checkpoint and each rebuild in place "
        "begins a round",
    ),
    "newest": (("one",), "the newest round that a rank has begun"),
    "opened": (("one",), "the first round of the launcher's newest attempt"),
    "born": (("rank",), "the round in which the rank's process started"),
    "begin": (("rank",), "the epoch in which the rank's round began"),
    "booked": (("rank",), "the epoch of the rank's contract"),
    "launched": (("rank",), "the epoch that follows the step launched last"),
    "known": (("rank",), "the epoch after the last step whose votes the host has read"),
    "voted": (
        ("rank",),
        "the epoch after the last step on which the rank's device has voted, yes or no",
    ),
    "vote": (("rank",), "the epoch after the last step to which the rank's device has voted yes"),
    "heard": (
        ("rank", "rank"),
        "the epoch after the step of the latest vote (yes or no) that the first device received "
        "from the second",
    ),
    "word": (
        ("rank", "rank"),
        "the epoch after the step of the latest yes that the first device received from the second",
    ),
    "ran": (
        ("rank",),
        "the epoch after the last step that the device has ended, with or without an update",
    ),
    "weights": (("rank",), "the epoch of the weights on the device"),
    "quits": (("rank",), "1 once the host cannot continue"),
    "cut": (("rank",), "1 once the rank's connections are closed or aborted"),
    "dead": (("rank",), "1 once the rank's process has ended"),
    "report": (
        ("attempt", "rank"),
        "the epoch of its weights that the rank reported before a rebuild; the first index is the "
        "round",
    ),
    "paused": (
        ("rank",),
        "1 after the host has left the launches (`leave`), until it resumes them",
    ),
    "part": (
        ("rank",),
        "the epoch of the weights that the rank copied into its newest part of a checkpoint",
    ),
    "part_epoch": (
        ("rank",),
        "the epoch of the rank's contract when the rank wrote its newest part of a checkpoint",
    ),
    "part_round": (("rank",), "the round in which the rank wrote its newest part of a checkpoint"),
    "named": (("one",), "the epoch that the newest whole checkpoint of launches is named after"),
    "named_round": (
        ("one",),
        "the round in which the newest whole checkpoint of launches was written",
    ),
    "held": (
        ("rank",),
        "the epoch of the weights in the rank's part of the newest whole checkpoint",
    ),
    "held_round": (
        ("rank",),
        "the round in which the rank wrote its part of the newest whole checkpoint",
    ),
    "loaded": (("one",), "the epoch of the checkpoint from which the newest attempt began"),
    "read_no": (
        ("rank",),
        "1 if the rank stops because it read a no vote, or because a vote was missing",
    ),
    "miscounted": (("attempt",), "1 once a device of the round has voted no"),
    "failed": (
        ("attempt",),
        "1 once a rank of the round has published that its host failed or its contract refused",
    ),
    "failed_rank": (
        ("attempt",),
        "the first rank of the round that published that its host failed or its contract refused",
    ),
    "cause_no": (
        ("attempt",),
        "1 if the rank that the round's cause names stopped only because it read a no vote",
    ),
    "graph_sends": (
        ("rank", "rank"),
        "number of sends to the second rank in the graph that the first rank captured in its round",
    ),
    "graph_receives": (
        ("rank", "rank"),
        "number of receives from the second rank in the graph that the first rank captured in its "
        "round",
    ),
    "graph_out": (
        ("rank", "rank", "entry"),
        "the message that the first rank's graph sends to the second rank; one number encodes its "
        "stage, microbatch and direction; entry is the number of the send in the graph",
    ),
    "graph_into": (
        ("rank", "rank", "entry"),
        "the message that the first rank's graph expects from the second rank; one number encodes "
        "its stage, microbatch and direction; entry is the number of the receive in the graph",
    ),
    "sends_run": (
        ("rank", "rank"),
        "number of sends to the second rank that have ended in the first rank's current launch",
    ),
    "receives_run": (
        ("rank", "rank"),
        "number of receives from the second rank that have ended in the first rank's current "
        "launch",
    ),
    "messages": RANK_COLUMNS["messages"],
    **{name: RANK_COLUMNS[name] for name in _OF_STOPS},
}

#: Promises that hold in every state that the protocol reaches.
LAUNCH_PROMISES: Final = Register()
#: Promises that hold whenever the named transition of the protocol happens.
LAUNCH_STEPS: Final = Register()


@LAUNCH_PROMISES("launches.moved-by-all", r="rank", q="rank")
def moved_by_all(st: Any, r: Any, q: Any) -> Any:
    """A device updates its weights in a step only if the devices of all ranks voted yes to that
    step."""
    return implies(st.round[r] == st.round[q], st.weights[r] <= st.vote[q])


@LAUNCH_PROMISES("launches.one-ahead", r="rank")
def one_ahead(st: Any, r: Any) -> Any:
    """The epoch of a rank's contract and the epoch of its weights differ by at most one."""
    return (st.booked[r] <= st.weights[r] + 1) & (st.weights[r] <= st.booked[r] + 1)


@LAUNCH_PROMISES("launches.one-apart", r="rank", q="rank")
def one_apart(st: Any, r: Any, q: Any) -> Any:
    """The weights of two ranks in the same round are at most one step apart, even after a stop."""
    return implies(st.round[r] == st.round[q], st.weights[r] <= st.weights[q] + 1)


@LAUNCH_PROMISES("launches.one-beginning", r="rank", q="rank")
def one_beginning(st: Any, r: Any, q: Any) -> Any:
    """A round lasts from a start or rebuild to the next one. All ranks of a round began the round
    in the same epoch."""
    return implies(st.round[r] == st.round[q], st.begin[r] == st.begin[q])


@LAUNCH_PROMISES("launches.one-attempt", r="rank", q="rank")
def one_attempt(st: Any, r: Any, q: Any) -> Any:
    """All ranks whose processes run belong to the same attempt."""
    return implies((st.dead[r] == 0) & (st.dead[q] == 0), st.born[r] == st.born[q])


@LAUNCH_PROMISES("launches.checkpoint-of-one-epoch", r="rank")
def checkpoint_of_one_epoch(st: Any, r: Any) -> Any:
    """A whole checkpoint is named after an epoch. Every rank's part of it holds the weights of that
    epoch. So no step is in some parts and missing in others."""
    return st.held[r] == st.named[0]


@LAUNCH_PROMISES("launches.checkpoint-of-one-round", r="rank")
def checkpoint_of_one_round(st: Any, r: Any) -> Any:
    """All ranks wrote their parts of a whole checkpoint in the same round (the time from a start or
    rebuild to the next)."""
    return st.held_round[r] == st.named_round[0]


@LAUNCH_PROMISES("launches.checkpoint-kept", r="rank")
def checkpoint_kept(st: Any, r: Any) -> Any:
    """In the newest attempt, every rank's weights are at least as new as the newest whole
    checkpoint."""
    return implies(st.round[r] >= st.opened[0], st.named[0] <= st.weights[r])


@LAUNCH_PROMISES("launches.one-cause", r="rank", q="rank")
def one_cause(st: Any, r: Any, q: Any) -> Any:
    """All ranks that stop in a round (from a start or rebuild to the next) name the same cause."""
    both = (st.ended[r] == 1) & (st.ended[q] == 1) & (st.round[r] == st.round[q])
    return implies(both, st.told[r] == st.told[q])


@LAUNCH_PROMISES("launches.tells-the-cause", r="rank")
def tells_the_cause(st: Any, r: Any) -> Any:
    """A rank that stops by itself has published its reason, and names the recorded cause of its
    round."""
    n = st.round[r]
    told = (st.halted[n] == 1) & (st.told[r] == st.cause[n])
    return implies(st.ended[r] == 1, (st.said[r] == 1) & told)


@LAUNCH_PROMISES("launches.cause-before-loss", n="attempt")
def cause_before_loss(st: Any, n: Any) -> Any:
    """
    If the cause names a rank that only lost a connection, then some rank died, ran into a deadline
    or was ended by the launcher.
    """
    return implies((st.halted[n] == 1) & (st.cause_lost[n] == 1), st.gone[n] == 1)


@LAUNCH_PROMISES("launches.cause-before-no", n="attempt")
def cause_before_no(st: Any, n: Any) -> Any:
    """A rank may stop only because it read a no vote. If the cause names such a rank, then a device
    voted no, or some rank died, ran into a deadline or was ended by the launcher."""
    found = (st.miscounted[n] == 1) | (st.gone[n] == 1)
    return implies((st.halted[n] == 1) & (st.cause_no[n] == 1), found)


# Messages


def _messages_ended(st: Any, r: Any, q: Any) -> Any:
    """Whether a launch of the first rank has ended every message of its step with the second."""
    sent = st.sends_run[r, q] == st.messages[r, q]
    return sent & (st.receives_run[r, q] == st.messages[q, r])


@LAUNCH_PROMISES("launches.messages-before-vote", r="rank", q="rank")
def messages_before_vote(st: Any, r: Any, q: Any) -> Any:
    """A device votes on a step only after its launch has sent and received every message of the
    step. Messages with a rank whose connections are closed do not count."""
    both_open = (st.round[r] == st.round[q]) & (st.cut[r] == 0) & (st.cut[q] == 0)
    return implies((st.voted[r] > st.ran[r]) & both_open, _messages_ended(st, r, q))


@LAUNCH_PROMISES("launches.messages-before-update", r="rank", q="rank")
def messages_before_update(st: Any, r: Any, q: Any) -> Any:
    """When a device has received a rank's yes to the current step, all messages of the step between
    this device and that rank have ended. So no device updates its weights while a message is
    missing."""
    yes = (st.word[r, q] == st.ran[r] + 1) & (st.round[r] == st.round[q])
    return implies(yes, _messages_ended(st, r, q))


@LAUNCH_STEPS("launches.message-meets-its-own", "transfer_launched")
def message_meets_its_own(st: Any, r: Any, q: Any) -> Any:
    """In a launch, every receive is paired with the right send: the send of the same stage,
    microbatch and direction, in the same step and round."""
    k = st.sends_run[r, q]
    return (
        (st.graph_out[r, q, k] == st.graph_into[q, r, k])
        & (k == st.receives_run[q, r])
        & (st.ran[r] == st.ran[q])
        & (st.round[r] == st.round[q])
    )


@LAUNCH_STEPS("launches.commit-confirmed", "commit_launched")
def commit_confirmed(st: Any, r: Any) -> Any:
    """A contract commits a launched step only if the rank's device has applied the previous step's
    update."""
    return st.weights[r] >= st.booked[r]


@LAUNCH_STEPS("launches.no-gap", "move")
def no_gap(st: Any, r: Any) -> Any:
    """A device updates its weights only if it has applied every earlier update of its round."""
    return st.weights[r] == st.ran[r]


@LAUNCH_STEPS("launches.rebuilt-from-weights", "rebuild")
def rebuilt_from_weights(st: Any, r: Any) -> Any:
    """A rank rebuilds from the epoch of its own weights."""
    return st.report[st.round[r], r] == st.weights[r]


@LAUNCH_STEPS("launches.rebuilt-after-cause", "rebuild")
def rebuilt_after_cause(st: Any, r: Any) -> Any:
    """A rank rebuilds only after it has named the cause of the stop."""
    return (st.ended[r] == 1) & (st.halted[st.round[r]] == 1)


@LAUNCH_STEPS("launches.part-is-settled", "write_part")
def part_is_settled(st: Any, r: Any) -> Any:
    """A rank writes its part of a checkpoint only when its device has ended every launch. The
    device has then applied the update of every step that the rank's contract committed."""
    return (st.ran[r] == st.launched[r]) & (st.weights[r] == st.booked[r])


@LAUNCH_STEPS("launches.checkpoints-advance", "publish_parts")
def checkpoints_advance(st: Any, r: Any) -> Any:
    """A checkpoint never replaces a checkpoint of a later epoch."""
    return st.named[0] <= st.part_epoch[r]


@LAUNCH_STEPS("launches.starts-from-one-checkpoint", "start_anew")
def starts_from_one_checkpoint(st: Any, r: Any) -> Any:
    """If an attempt begins from a checkpoint, every rank starts from that checkpoint."""
    return st.held[r] == st.loaded[0]
