"""
Lemmas that the proofs of launched steps need besides the promises. In such a step, each rank runs
the whole step as one launch of a CUDA graph.

An attempt is one run of all ranks from a checkpoint. A rank's round begins when the rank starts or
rebuilds in place. Each device votes yes or no on each step, and updates its weights after a yes
from every rank. A channel is all messages from one rank to another.
"""

from __future__ import annotations

from typing import Any, Final

from qeffect.spec.predicates import Register, implies
from qeffect.spec.ranks import NOBODY

__all__ = ["LAUNCH_LEMMAS"]

#: Proved beside the promises.
LAUNCH_LEMMAS: Final = Register()


@LAUNCH_LEMMAS("launches.host-order", r="rank")
def host_order(st: Any, r: Any) -> Any:
    """A host reads votes only on committed steps, and commits only launched steps."""
    return (
        (st.begin[r] >= 0)
        & (st.begin[r] <= st.known[r])
        & (st.known[r] <= st.booked[r])
        & (st.booked[r] <= st.known[r] + 1)
        & (st.booked[r] <= st.launched[r])
        & (st.launched[r] <= st.booked[r] + 1)
    )


@LAUNCH_LEMMAS("launches.device-order", r="rank")
def device_order(st: Any, r: Any) -> Any:
    """A device votes on a step after the step's launch, and ends the step after its vote."""
    return (
        (st.begin[r] <= st.weights[r])
        & (st.weights[r] <= st.ran[r])
        & (st.ran[r] <= st.voted[r])
        & (st.voted[r] <= st.ran[r] + 1)
        & (st.voted[r] <= st.launched[r])
        & (st.vote[r] <= st.voted[r])
        & (st.weights[r] <= st.vote[r])
        & (st.vote[r] <= st.weights[r] + 1)
    )


@LAUNCH_LEMMAS("launches.read-moved", r="rank")
def read_moved(st: Any, r: Any) -> Any:
    """If a host has read a yes vote from every rank, its device has made the update."""
    return st.known[r] <= st.weights[r]


@LAUNCH_LEMMAS("launches.yes-without-gap", r="rank")
def yes_without_gap(st: Any, r: Any) -> Any:
    """If a device voted yes on its current step, it has made every earlier update."""
    return implies(st.vote[r] > st.ran[r], st.weights[r] == st.ran[r])


@LAUNCH_LEMMAS("launches.words-were-said", r="rank", q="rank")
def words_were_said(st: Any, r: Any, q: Any) -> Any:
    """A device has received only votes that were given in its round."""
    return (st.word[r, q] >= 0) & implies(st.round[r] == st.round[q], st.word[r, q] <= st.vote[q])


@LAUNCH_LEMMAS("launches.words-not-ahead", r="rank", q="rank")
def words_not_ahead(st: Any, r: Any, q: Any) -> Any:
    """A device has received no vote on a step after its current step."""
    return (st.word[r, q] <= st.heard[r, q]) & (st.heard[r, q] <= st.ran[r] + 1)


@LAUNCH_LEMMAS("launches.reports-past", r="rank", n="attempt")
def reports_past(st: Any, r: Any, n: Any) -> Any:
    """No rank has reported in a future round, and rounds are counted from 0."""
    return (st.round[r] >= 0) & implies(n > st.round[r], st.report[n, r] == NOBODY)


@LAUNCH_LEMMAS("launches.reported-is-settled", r="rank")
def reported_is_settled(st: Any, r: Any) -> Any:
    """
    A rank that reported in its round has ended every launch, and its weights no longer change.
    """
    n = st.round[r]
    settled = (st.ran[r] == st.launched[r]) & (st.report[n, r] == st.weights[r])
    stopped = (st.quits[r] == 1) | (st.dead[r] == 1)
    return implies(st.report[n, r] != NOBODY, settled & stopped & (st.cut[r] == 1))


@LAUNCH_LEMMAS("launches.begun-as-reported", r="rank", q="rank")
def begun_as_reported(st: Any, r: Any, q: Any) -> Any:
    """A rank that rebuilt restarted in the epoch that every rank had reported."""
    n = st.round[r]
    rebuilt = n > st.opened[0]
    return implies(rebuilt, (st.report[n - 1, q] == st.begin[r]) & (st.begin[r] != NOBODY))


@LAUNCH_LEMMAS("launches.first-round", r="rank")
def first_round(st: Any, r: Any) -> Any:
    """A rank of the newest attempt that never rebuilt began in the checkpoint's epoch."""
    return implies(st.round[r] == st.opened[0], st.begin[r] == st.loaded[0])


@LAUNCH_LEMMAS("launches.cut-stops", r="rank")
def cut_stops(st: Any, r: Any) -> Any:
    """A rank whose connections were cut does not continue."""
    return implies(st.cut[r] == 1, (st.quits[r] == 1) | (st.dead[r] == 1))


@LAUNCH_LEMMAS("launches.first-back-waits", r="rank", q="rank")
def first_back_waits(st: Any, r: Any, q: Any) -> Any:
    """
    While a rank waits for another rank to rebuild too, it has no vote from the other rank, and its
    weights do not change.
    """
    return implies(st.round[r] > st.round[q], (st.word[r, q] == 0) & (st.weights[r] == st.begin[r]))


# Messages


def _silent(st: Any, r: Any, q: Any) -> Any:
    """Return whether a step has no message between two ranks."""
    return (st.messages[r, q] == 0) & (st.messages[q, r] == 0)


@LAUNCH_LEMMAS("launches.graph-counts", r="rank", q="rank")
def graph_counts(st: Any, r: Any, q: Any) -> Any:
    """A graph has no more messages than planned, and a launch ends no more than its graph has."""
    return (
        (st.sends_run[r, q] >= 0)
        & (st.sends_run[r, q] <= st.graph_sends[r, q])
        & (st.graph_sends[r, q] <= st.messages[r, q])
        & (st.receives_run[r, q] >= 0)
        & (st.receives_run[r, q] <= st.graph_receives[r, q])
        & (st.graph_receives[r, q] <= st.messages[q, r])
    )


@LAUNCH_LEMMAS("launches.launched-as-captured", r="rank", q="rank")
def launched_as_captured(st: Any, r: Any, q: Any) -> Any:
    """
    A rank that has launched in its round has captured all its messages. Another rank that exchanges
    messages with this rank is in the same round and has captured these messages, or is in a later
    round.
    """
    whole = (
        (st.graph_sends[r, q] == st.messages[r, q])
        & (st.graph_receives[r, q] == st.messages[q, r])
        & implies(
            st.round[r] == st.round[q],
            (st.graph_receives[q, r] == st.messages[r, q])
            & (st.graph_sends[q, r] == st.messages[q, r]),
        )
    )
    launched = st.launched[r] > st.begin[r]
    return implies(launched, whole & (_silent(st, r, q) | (st.round[q] >= st.round[r])))


@LAUNCH_LEMMAS("launches.captured-alike", r="rank", q="rank", k="entry")
def captured_alike(st: Any, r: Any, q: Any, k: Any) -> Any:
    """
    If a rank has launched in its round, both ends of its channels captured the same messages in the
    same order.
    """
    both = (st.launched[r] > st.begin[r]) & (st.round[r] == st.round[q])
    to = (0 <= k) & (k < st.messages[r, q])
    back = (0 <= k) & (k < st.messages[q, r])
    return implies(both & to, st.graph_out[r, q, k] == st.graph_into[q, r, k]) & implies(
        both & back, st.graph_out[q, r, k] == st.graph_into[r, q, k]
    )


def _messages_ended(st: Any, r: Any, q: Any) -> Any:
    sent = st.sends_run[r, q] == st.messages[r, q]
    return sent & (st.receives_run[r, q] == st.messages[q, r])


@LAUNCH_LEMMAS("launches.messages-of-one-step", r="rank", q="rank")
def messages_of_one_step(st: Any, r: Any, q: Any) -> Any:
    """
    In the same step, both ends of a channel have ended the same messages. A device that is ahead of
    another device has ended no message of its step with that device.
    """
    alike = (st.sends_run[r, q] == st.receives_run[q, r]) & (
        st.receives_run[r, q] == st.sends_run[q, r]
    )
    none = (st.sends_run[r, q] == 0) & (st.receives_run[r, q] == 0)
    return implies(
        st.round[r] == st.round[q],
        implies(st.ran[r] == st.ran[q], alike) & implies(st.ran[r] > st.ran[q], none),
    )


@LAUNCH_LEMMAS("launches.ahead-has-ended", r="rank", q="rank")
def ahead_has_ended(st: Any, r: Any, q: Any) -> Any:
    """
    If device A is ahead of device B and both have open connections, B has ended the messages of its
    step with A. If they exchange messages, A is at most one step ahead.
    """
    both = (st.round[r] == st.round[q]) & (st.cut[r] == 0) & (st.cut[q] == 0)
    return implies(both & (st.ran[r] > st.ran[q]), _messages_ended(st, q, r)) & implies(
        both & (st.ran[r] > st.ran[q] + 1), _silent(st, r, q)
    )


@LAUNCH_LEMMAS("launches.yes-after-messages", r="rank", q="rank")
def yes_after_messages(st: Any, r: Any, q: Any) -> Any:
    """
    Rank A has open connections and has not ended the step on which rank B last voted yes. Then A
    has ended the messages of its current step with B.
    """
    here = (st.round[r] == st.round[q]) & (st.cut[r] == 0)
    return implies(here & (st.vote[q] > st.ran[r]), _messages_ended(st, r, q)) & implies(
        here & (st.vote[q] > st.ran[r] + 1), _silent(st, r, q)
    )


@LAUNCH_LEMMAS("launches.first-back-has-no-message", r="rank", q="rank")
def first_back_has_no_message(st: Any, r: Any, q: Any) -> Any:
    """A rank that began its round before another rank has ended no message with that rank."""
    return implies(
        st.round[r] > st.round[q], (st.sends_run[r, q] == 0) & (st.receives_run[r, q] == 0)
    )


# Attempts


@LAUNCH_LEMMAS("launches.rounds", r="rank")
def rounds(st: Any, r: Any) -> Any:
    """A rank's round is not older than its process, and not a future round."""
    return (
        (st.born[r] >= 0)
        & (st.born[r] <= st.round[r])
        & (st.round[r] <= st.newest[0])
        & (st.born[r] <= st.opened[0])
        & (st.opened[0] <= st.newest[0])
    )


@LAUNCH_LEMMAS("launches.alive-now", r="rank")
def alive_now(st: Any, r: Any) -> Any:
    """A rank runs, or is in a round of the newest attempt, only if it started in that attempt."""
    now = (st.dead[r] == 0) | (st.round[r] >= st.opened[0])
    return ((st.dead[r] == 0) | (st.dead[r] == 1)) & implies(now, st.born[r] == st.opened[0])


# Checkpoints


@LAUNCH_LEMMAS("launches.paused-is-settled", r="rank")
def paused_is_settled(st: Any, r: Any) -> Any:
    """A host that has left the launches has read a yes of all ranks on each launched step."""
    settled = (st.launched[r] == st.booked[r]) & (st.known[r] == st.booked[r])
    return implies(st.paused[r] == 1, settled)


@LAUNCH_LEMMAS("launches.part-named", r="rank")
def part_named(st: Any, r: Any) -> Any:
    """A rank's checkpoint part has the weights of the epoch that its contract recorded for it."""
    return (st.part[r] == st.part_epoch[r]) & (st.part_round[r] <= st.round[r])


@LAUNCH_LEMMAS("launches.part-not-ahead", r="rank")
def part_not_ahead(st: Any, r: Any) -> Any:
    """
    A checkpoint part that was written in the newest attempt is not older than the whole checkpoint,
    and the rank's weights are not older than that part.
    """
    now = st.part_round[r] >= st.opened[0]
    return implies(now, (st.named[0] <= st.part_epoch[r]) & (st.part[r] <= st.weights[r]))


@LAUNCH_LEMMAS("launches.nothing-named-before-all-started", r="rank")
def nothing_named_before_all_started(st: Any, r: Any) -> Any:
    """
    Until every rank has started, the newest checkpoint is the checkpoint from which the attempt
    began.
    """
    return (st.named[0] >= 0) & implies(st.round[r] < st.opened[0], st.named[0] == st.loaded[0])


# Stops


def _explained(st: Any, n: Any) -> Any:
    """Return whether a round has a reason to stop: a no, a failed host, or a rank that is gone."""
    return (st.failed[n] == 1) | (st.miscounted[n] == 1) | (st.gone[n] == 1)


def _reasoned(st: Any, n: Any) -> Any:
    return (st.reasoned[n] == 1) | (st.gone[n] == 1)


@LAUNCH_LEMMAS("launches.stop-flags", r="rank")
def stop_flags(st: Any, r: Any) -> Any:
    """A rank that continues has no reason to stop, and a rank stops for only one reason."""
    on = (st.lost[r] == 0) & (st.read_no[r] == 0) & (st.said[r] == 0) & (st.ended[r] == 0)
    return (
        ((st.cut[r] == 0) | (st.cut[r] == 1))
        & ((st.lost[r] == 0) | (st.lost[r] == 1))
        & ((st.read_no[r] == 0) | (st.read_no[r] == 1))
        & ((st.said[r] == 0) | (st.said[r] == 1))
        & implies(st.quits[r] == 0, on)
        & implies(st.lost[r] == 1, st.read_no[r] == 0)
        & implies(st.ended[r] == 1, st.cut[r] == 1)
    )


@LAUNCH_LEMMAS("launches.stop-marks", n="attempt")
def stop_marks(st: Any, n: Any) -> Any:
    """The marks of a round's cause and reason are 0 or 1; no rank published in a future round."""
    return (
        ((st.halted[n] == 0) | (st.halted[n] == 1))
        & ((st.reasoned[n] == 0) | (st.reasoned[n] == 1))
        & ((st.failed[n] == 0) | (st.failed[n] == 1))
        & implies(n > st.newest[0], (st.reasoned[n] == 0) & (st.failed[n] == 0))
    )


@LAUNCH_LEMMAS("launches.cut-said", r="rank")
def cut_said(st: Any, r: Any) -> Any:
    """If a running rank has closed its connections, it has published the reason."""
    return implies((st.dead[r] == 0) & (st.cut[r] == 1), st.said[r] == 1)


@LAUNCH_LEMMAS("launches.reported-named", r="rank")
def reported_named(st: Any, r: Any) -> Any:
    """A rank that reported in its round has named the cause."""
    return implies(st.report[st.round[r], r] != NOBODY, st.ended[r] == 1)


@LAUNCH_LEMMAS("launches.reasons-count", r="rank")
def reasons_count(st: Any, r: Any) -> Any:
    """If a rank published a reason, its round is marked as having a reason."""
    n, own = st.round[r], (st.said[r] == 1) & (st.lost[r] == 0)
    return implies(own, st.reasoned[n] == 1) & implies(
        own & (st.read_no[r] == 0), st.failed[n] == 1
    )


@LAUNCH_LEMMAS("launches.reason-stands", n="attempt")
def reason_stands(st: Any, n: Any) -> Any:
    """The first rank that published a reason stays in its round until the round has a cause."""
    w, f = st.reason[n], st.failed_rank[n]
    open_round = (n >= st.opened[0]) & (st.halted[n] == 0)
    own = (st.round[w] == n) & (st.said[w] == 1) & (st.lost[w] == 0)
    failed = (st.round[f] == n) & (st.said[f] == 1) & (st.lost[f] == 0) & (st.read_no[f] == 0)
    return implies(open_round & (st.reasoned[n] == 1), own) & implies(
        open_round & (st.failed[n] == 1), failed
    )


@LAUNCH_LEMMAS("launches.stopped-for-a-reason", r="rank")
def stopped_for_a_reason(st: Any, r: Any) -> Any:
    """
    Connections are closed or lost because a rank was gone or published a reason of its own; a no is
    read because a device voted no, a host failed, or a rank was gone.
    """
    n = st.round[r]
    left = (st.cut[r] == 1) | (st.lost[r] == 1)
    return implies(left, _reasoned(st, n) & _explained(st, n)) & implies(
        st.read_no[r] == 1, _explained(st, n)
    )


@LAUNCH_LEMMAS("launches.skipped-for-a-reason", r="rank")
def skipped_for_a_reason(st: Any, r: Any) -> Any:
    """A device votes no, or skips an update, for a reason of its round."""
    no = (st.weights[r] < st.ran[r]) | (st.vote[r] < st.voted[r])
    return implies(no, _explained(st, st.round[r]))


@LAUNCH_LEMMAS("launches.no-for-a-reason", r="rank", q="rank")
def no_for_a_reason(st: Any, r: Any, q: Any) -> Any:
    """A device receives a no for a reason of its round."""
    return (st.word[r, q] <= st.heard[r, q]) & implies(
        st.word[r, q] < st.heard[r, q], _explained(st, st.round[r])
    )
