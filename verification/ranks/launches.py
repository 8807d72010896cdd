"""
The protocol of launched steps, as transitions over columns. Each rank runs such a step as one
launch of a CUDA graph.

The host of a rank launches a step, reads the votes on the previous step, and then commits the step
in its contract. The device runs behind the host. It votes, receives the votes of all ranks one by
one, and updates its weights if every vote is a yes for this step. A vote may reach some devices and
not others, since a rank can end at any point. Then some ranks have updated their weights and others
have not. If all ranks are still alive, they report the epoch of their weights, and rebuild only if
all report the same epoch.

A launch replays the graph that its rank captured. In each channel (from one rank to another), the
graph has sends or receives in a fixed order. The transport pairs them by this order alone. The
ranks compare both ends of every channel once, before the first launch of a round. A device votes on
a step when the messages of its launch have ended. So no launch meets messages of another launch.
The model leaves out which computation waits for which message; `qeffect check` decides for each
table whether the ranks can wait for each other in a circle.

For a checkpoint, a host leaves the launches: it reads the votes on the last step, and waits for its
device. Then the host copies the weights and may resume the launches, while the files are written.
The checkpoint gets its name when every rank has written its part. If a rank dies, the other ranks
end, and the launcher starts all ranks from the newest whole checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from qeffect.spec.predicates import choose, implies
from qeffect.spec.ranks import NOBODY

from .protocol import RankTransition, transition_in
from .stopping import publish_reason, spoken, write_cause

__all__ = ["LAUNCHES"]

_FOUND: dict[str, RankTransition] = {}
_transition = partial(transition_in, _FOUND)
#: The columns that begin in the epoch of a round.
_EPOCHS: Final = ("begin", "booked", "launched", "known", "voted", "vote", "ran")


def _goes_on(st: Any, r: Any) -> None:
    st.when((st.dead[r] == 0) & (st.quits[r] == 0))


# The capture


@_transition("rank", "rank", "message")
def capture_send(st: Any, r: Any, q: Any, m: Any) -> None:
    """Before its first launch, a rank captures its next send to another rank in its graph."""
    _goes_on(st, r)
    st.when((r != q) & (st.launched[r] == st.begin[r]))
    st.when(st.graph_sends[r, q] < st.messages[r, q])
    place = st.graph_sends[r, q]
    st.graph_out[r, q, place] = m
    st.graph_sends[r, q] = place + 1


@_transition("rank", "rank", "message")
def capture_receive(st: Any, r: Any, q: Any, m: Any) -> None:
    """Before its first launch, a rank captures its next receive from another rank in its graph."""
    _goes_on(st, r)
    st.when((r != q) & (st.launched[r] == st.begin[r]))
    st.when(st.graph_receives[r, q] < st.messages[q, r])
    place = st.graph_receives[r, q]
    st.graph_into[r, q, place] = m
    st.graph_receives[r, q] = place + 1


def _captured(st: Any, r: Any, q: Any, p: Any) -> Any:
    """Return whether both ranks of a channel have captured its messages in the round of a rank."""
    here = (st.round[q] == st.round[r]) & (st.round[p] == st.round[r])
    sends = st.graph_sends[q, p] == st.messages[q, p]
    both = sends & (st.graph_receives[p, q] == st.messages[q, p])
    return implies(st.messages[q, p] > 0, here & both)


@_transition("rank", "rank", "rank", "entry")
def disagree_captured(st: Any, r: Any, q: Any, p: Any, k: Any) -> None:
    """
    Before its first launch, a rank finds that the two ends of a channel captured different
    messages; it cannot continue.
    """
    _goes_on(st, r)
    st.when(st.launched[r] == st.begin[r])
    st.when(st.every("rank rank", lambda a, b: _captured(st, r, a, b)))
    st.when((0 <= k) & (k < st.messages[q, p]))
    st.when(st.graph_out[q, p, k] != st.graph_into[p, q, k])
    st.quits[r] = 1


# The host


@_transition("rank")
def launch(st: Any, r: Any) -> None:
    """
    The host launches a step after the contract has checked the guards of the step. Before the first
    launch of a round, all ranks have captured the step, and both ends of each channel captured the
    same messages in the same order.
    """
    _goes_on(st, r)
    st.when(st.launched[r] == st.booked[r])
    st.need("resumed-first", st.paused[r] == 0)
    first = st.launched[r] == st.begin[r]
    all_captured = st.every("rank rank", lambda q, p: _captured(st, r, q, p))
    st.need("captured-by-all", implies(first, all_captured))
    same = st.every(
        "rank rank entry",
        lambda q, p, k: implies(
            (0 <= k) & (k < st.messages[q, p]),
            st.graph_out[q, p, k] == st.graph_into[p, q, k],
        ),
    )
    st.need("same-order", implies(first, same))
    st.launched[r] = st.launched[r] + 1


@_transition("rank")
def read_votes(st: Any, r: Any) -> None:
    """The host reads the votes on the last committed step, and all of them are yes."""
    _goes_on(st, r)
    st.when((st.known[r] < st.booked[r]) & (st.ran[r] >= st.booked[r]))
    st.need("all-yes", st.weights[r] >= st.booked[r])
    st.known[r] = st.booked[r]


@_transition("rank")
def read_a_no(st: Any, r: Any) -> None:
    """
    The host finds a no vote or a missing vote on the last committed step, and cannot continue.
    """
    _goes_on(st, r)
    st.when((st.known[r] < st.booked[r]) & (st.ran[r] >= st.booked[r]))
    st.when(st.weights[r] < st.booked[r])
    st.quits[r] = 1
    st.read_no[r] = 1


@_transition("rank")
def refuse_counts(st: Any, r: Any) -> None:
    """
    After a host has read a no vote of its own device, the contract refuses the device's counts.
    """
    st.when((st.dead[r] == 0) & (st.read_no[r] == 1) & (st.said[r] == 0))
    st.when(st.vote[r] < st.booked[r])
    st.read_no[r] = 0


@_transition("rank")
def commit_launched(st: Any, r: Any) -> None:
    """The contract commits the launched step; the device may not have reached the update yet."""
    _goes_on(st, r)
    st.when(st.launched[r] == st.booked[r] + 1)
    st.need("votes-first", st.known[r] == st.booked[r])
    st.booked[r] = st.booked[r] + 1


# The messages on the device


def _inside(st: Any, r: Any) -> Any:
    """Return whether a device is in a launch, before its vote, with open connections."""
    runs = (st.dead[r] == 0) & (st.cut[r] == 0) & (st.ran[r] < st.launched[r])
    return runs & (st.voted[r] == st.ran[r])


@_transition("rank", "rank")
def transfer_launched(st: Any, r: Any, q: Any) -> None:
    """The next send in the launch of a rank meets the next receive in the launch of another."""
    st.when((r != q) & (st.round[r] == st.round[q]))
    st.when(_inside(st, r) & _inside(st, q))
    st.when(st.sends_run[r, q] < st.graph_sends[r, q])
    st.when(st.receives_run[q, r] < st.graph_receives[q, r])
    st.sends_run[r, q] = st.sends_run[r, q] + 1
    st.receives_run[q, r] = st.receives_run[q, r] + 1


def _ended(st: Any, r: Any, q: Any) -> Any:
    """Return whether the current launch of a rank has ended its messages with another rank."""
    sent = st.sends_run[r, q] == st.graph_sends[r, q]
    return sent & (st.receives_run[r, q] == st.graph_receives[r, q])


def _messages_ended(st: Any, r: Any) -> Any:
    """
    Return whether no message in the current launch of a rank is still to come: every message has
    ended, or the rank at its other end has closed its connections.
    """

    def closed(q: Any) -> Any:
        return (st.cut[r] == 0) & (st.round[q] == st.round[r]) & (st.cut[q] == 1)

    return st.every("rank", lambda q: _ended(st, r, q) | closed(q))


# The gate on the device


@_transition("rank")
def vote_yes(st: Any, r: Any) -> None:
    """The device's counters are as expected, so it votes yes with the number of the step."""
    st.when((st.dead[r] == 0) & (st.voted[r] == st.ran[r]) & (st.voted[r] < st.launched[r]))
    st.need("no-yes-after-skip", st.weights[r] == st.ran[r])
    st.need("messages-ended", _messages_ended(st, r))
    st.voted[r] = st.voted[r] + 1
    st.vote[r] = st.voted[r]


@_transition("rank")
def vote_after_skip(st: Any, r: Any) -> None:
    """A device that skipped an update votes no on each later step of its round."""
    st.when((st.dead[r] == 0) & (st.voted[r] == st.ran[r]) & (st.voted[r] < st.launched[r]))
    st.when(st.weights[r] < st.ran[r])
    st.need("messages-ended", _messages_ended(st, r))
    st.voted[r] = st.voted[r] + 1


@_transition("rank")
def vote_unheard(st: Any, r: Any) -> None:
    """
    A device whose connections were aborted reaches its vote without the missing messages; the vote
    reaches no device.
    """
    st.when((st.dead[r] == 0) & (st.voted[r] == st.ran[r]) & (st.voted[r] < st.launched[r]))
    whole = st.every("rank", lambda q: _ended(st, r, q))
    st.when((st.cut[r] == 1) & implies(whole, st.cut[r] == 0))
    st.voted[r] = st.voted[r] + 1


@_transition("rank", fault=True)
def vote_no(st: Any, r: Any) -> None:
    """The device's counters are unexpected, or two runs of the step differ, so it votes no."""
    st.when((st.dead[r] == 0) & (st.voted[r] == st.ran[r]) & (st.voted[r] < st.launched[r]))
    st.need("messages-ended", _messages_ended(st, r))
    st.voted[r] = st.voted[r] + 1
    st.miscounted[st.round[r]] = 1


@_transition("rank", "rank")
def deliver(st: Any, r: Any, q: Any) -> None:
    """A device receives the vote of one rank on its current step."""
    step = st.ran[r] + 1
    st.when((st.dead[r] == 0) & (st.cut[r] == 0) & (st.round[r] == st.round[q]))
    st.when((st.voted[r] == step) & (st.voted[q] >= step) & (st.heard[r, q] < step))
    st.heard[r, q] = step
    st.word[r, q] = choose(st.vote[q] >= step, step, st.word[r, q])


@_transition("rank")
def move(st: Any, r: Any) -> None:
    """The device has received a yes from every rank on this step, and updates its weights."""
    st.when((st.dead[r] == 0) & (st.voted[r] == st.ran[r] + 1))
    st.need("yes-of-all", st.every("rank", lambda q: st.word[r, q] == st.ran[r] + 1))
    st.ran[r] = st.ran[r] + 1
    st.weights[r] = st.weights[r] + 1
    _next_launch(st, r)


@_transition("rank")
def skip(st: Any, r: Any) -> None:
    """
    A yes is missing, and either every vote has arrived or a connection was cut. So the device skips
    the update.
    """
    step = st.ran[r] + 1
    st.when((st.dead[r] == 0) & (st.voted[r] == step))
    whole = st.every("rank", lambda q: implies(st.round[q] == st.round[r], st.cut[q] == 0))
    st.when(implies(whole, st.every("rank", lambda q: st.heard[r, q] == step)))
    st.when(implies(st.every("rank", lambda q: st.word[r, q] == step), st.ran[r] != st.ran[r]))
    st.ran[r] = step
    _next_launch(st, r)


def _next_launch(st: Any, r: Any) -> None:
    """The device ends a launch; the messages of its next launch are all still to come."""
    st.sends_run[r] = st.zeros("sends_run")
    st.receives_run[r] = st.zeros("receives_run")


# Checkpoints


@_transition("rank")
def leave_launches(st: Any, r: Any) -> None:
    """
    Between two steps, the host has read a yes of all ranks on the last step, and leaves the
    launches.
    """
    _goes_on(st, r)
    st.when((st.launched[r] == st.booked[r]) & (st.paused[r] == 0))
    st.need("votes-first", st.known[r] == st.booked[r])
    st.paused[r] = 1


@_transition("rank")
def write_part(st: Any, r: Any) -> None:
    """A host that has left the launches copies its device's weights as its checkpoint part."""
    _goes_on(st, r)
    st.need("left-first", st.paused[r] == 1)
    st.part[r] = st.weights[r]
    st.part_epoch[r] = st.booked[r]
    st.part_round[r] = st.round[r]


@_transition("rank")
def resume_launches(st: Any, r: Any) -> None:
    """The host resumes the launches; meanwhile the files of its part may still be written."""
    _goes_on(st, r)
    st.when(st.paused[r] == 1)
    st.paused[r] = 0


@_transition("rank")
def publish_parts(st: Any, r: Any) -> None:
    """
    The process that wrote a part publishes all parts as the whole checkpoint. Since the parts were
    copied, the ranks may have launched further steps, or stopped and rebuilt.
    """
    st.when((st.dead[r] == 0) & (st.part_round[r] >= st.born[r]))
    st.need("part-of-this-epoch", st.every("rank", lambda q: st.part_epoch[q] == st.part_epoch[r]))
    st.need("part-of-this-round", st.every("rank", lambda q: st.part_round[q] == st.part_round[r]))
    st.named[0] = st.part_epoch[r]
    st.named_round[0] = st.part_round[r]
    st.held[...] = st.part
    st.held_round[...] = st.part_round


# Stopping, and the rebuild in place


@_transition("rank", fault=True)
def fail_host(st: Any, r: Any) -> None:
    """The contract refuses a step, or the host fails; the rank cannot continue."""
    _goes_on(st, r)
    st.quits[r] = 1


@_transition("rank", "rank")
def wake_launched(st: Any, r: Any, q: Any) -> None:
    """
    A rank cannot continue because another rank has closed its connections, or died before it
    rebuilt.
    """
    _goes_on(st, r)
    died = (st.born[r] == st.born[q]) & (st.round[q] < st.round[r]) & (st.dead[q] == 1)
    st.when(((st.round[r] == st.round[q]) & (st.cut[q] == 1)) | died)
    st.gone[st.round[r]] = choose(died, 1, st.gone[st.round[r]])
    st.quits[r] = 1
    st.lost[r] = 1


@_transition("rank", fault=True)
def run_out(st: Any, r: Any) -> None:
    """A rank cannot continue: a deadline passed, or the launcher ends it."""
    _goes_on(st, r)
    st.gone[st.round[r]] = 1
    st.quits[r] = 1
    st.lost[r] = 1


@_transition("rank")
def publish_why(st: Any, r: Any) -> None:
    """A rank publishes why it cannot continue."""
    st.when((st.dead[r] == 0) & (st.quits[r] == 1) & (st.said[r] == 0))
    n = st.round[r]
    first = (st.lost[r] == 0) & (st.read_no[r] == 0) & (st.failed[n] == 0)
    st.failed_rank[n] = choose(first, r, st.failed_rank[n])
    st.failed[n] = choose(first, 1, st.failed[n])
    publish_reason(st, r, n)


@_transition("rank")
def cut_connections(st: Any, r: Any) -> None:
    """A rank that cannot continue aborts its connections, also on the device."""
    st.when((st.dead[r] == 0) & (st.quits[r] == 1) & (st.cut[r] == 0))
    st.need("said-first", st.said[r] == 1)
    st.cut[r] = 1


@_transition("rank", "rank")
def choose_cause(st: Any, r: Any, p: Any) -> None:
    """
    A stopping rank writes which rank is the cause, once it has heard from all ranks or its grace
    period is over. The cause is a rank whose host failed or whose contract refused; otherwise a
    rank that read a no, a rank that published nothing, or a rank that lost a connection, in this
    order.
    """
    n = st.round[r]
    st.when((st.dead[r] == 0) & (st.said[r] == 1) & (st.cut[r] == 1))

    def here(q: Any) -> Any:
        return st.round[q] == n

    def read(q: Any) -> Any:
        return spoken(st, q, here) & (st.read_no[q] == 1)

    failed = st.every(
        "rank",
        lambda q: implies(spoken(st, q, here) & (st.lost[q] == 0), st.read_no[q] == 1),
    )
    st.need("failure-before-no", implies(read(p), failed))
    write_cause(st, p, n, here)
    st.cause_no[n] = choose(read(p), 1, 0)


@_transition("rank")
def name_cause(st: Any, r: Any) -> None:
    """A stopped rank reads the cause of its round, and reports the cause to its user."""
    st.when((st.dead[r] == 0) & (st.cut[r] == 1) & (st.said[r] == 1) & (st.ended[r] == 0))
    st.need("cause-first", st.halted[st.round[r]] == 1)
    st.told[r] = st.cause[st.round[r]]
    st.ended[r] = 1


@_transition("rank")
def report_epoch(st: Any, r: Any) -> None:
    """A stopped rank whose device has ended every launch reports the epoch of its weights."""
    st.when((st.dead[r] == 0) & (st.cut[r] == 1))
    st.when(st.report[st.round[r], r] == NOBODY)
    st.need("cause-first", st.ended[r] == 1)
    st.need("settled", st.ran[r] == st.launched[r])
    st.report[st.round[r], r] = st.weights[r]


@_transition("rank")
def rebuild(st: Any, r: Any) -> None:
    """A rank restarts in place, over new connections, in the epoch that all ranks reported."""
    n = st.round[r]
    st.when((st.dead[r] == 0) & (st.cut[r] == 1) & (st.report[n, r] != NOBODY))
    st.need("all-reported", st.every("rank", lambda q: st.report[n, q] != NOBODY))
    st.need(
        "same-epoch",
        st.every(
            "rank",
            lambda q: (st.report[n, q] == NOBODY) | (st.report[n, q] == st.report[n, r]),
        ),
    )
    for column in _EPOCHS:
        getattr(st, column)[r] = st.report[n, r]
    _over_new_connections(st, r)
    st.round[r] = n + 1
    st.newest[0] = choose(st.newest[0] > n, st.newest[0], n + 1)


def _over_new_connections(st: Any, r: Any) -> None:
    for row in ("heard", "word", "graph_sends", "graph_receives", "sends_run", "receives_run"):
        getattr(st, row)[r] = st.zeros(row)
    for column in ("quits", "cut", "paused", "said", "lost", "read_no", "ended"):
        getattr(st, column)[r] = 0


@_transition("rank", fault=True)
def die(st: Any, r: Any) -> None:
    """A rank's process ends, at any moment; the system closes its connections."""
    st.when(st.dead[r] == 0)
    st.gone[st.round[r]] = 1
    st.dead[r] = 1
    st.cut[r] = 1


# The start of all ranks from a checkpoint


@_transition("rank")
def end_launched(st: Any, r: Any) -> None:
    """A stopped rank that does not rebuild ends its process, after it named the cause."""
    st.when((st.dead[r] == 0) & (st.ended[r] == 1))
    st.dead[r] = 1


@_transition()
def begin_anew(st: Any) -> None:
    """
    The launcher begins an attempt from the newest whole checkpoint, once no rank is running.
    """
    st.need("fence", st.every("rank", lambda q: st.dead[q] == 1))
    st.newest[0] = st.newest[0] + 1
    st.opened[0] = st.newest[0]
    st.loaded[0] = st.named[0]


@_transition("rank")
def start_anew(st: Any, r: Any) -> None:
    """A rank starts, once per attempt, and loads its part of the checkpoint onto its device."""
    st.when(st.dead[r] == 1)
    st.need("one-start", st.round[r] < st.opened[0])
    for column in _EPOCHS:
        getattr(st, column)[r] = st.held[r]
    st.weights[r] = st.held[r]
    _over_new_connections(st, r)
    st.dead[r] = 0
    st.round[r] = st.opened[0]
    st.born[r] = st.opened[0]


LAUNCHES: Final[Mapping[str, RankTransition]] = dict(_FOUND)
