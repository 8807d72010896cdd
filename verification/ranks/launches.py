"""
The protocol of steps that are one launch each, as transitions over columns.

The host of a rank launches a step, reads the votes of the step before, and then commits the step in
its contract. The device runs behind the host. It votes, receives the votes of all ranks one by one,
and updates its weights if every vote is a yes for this step. A vote may reach some devices and not
others, since a rank can end at any point. Then some ranks have updated their weights and others
have not. If all ranks are still alive, they report the epoch of their weights, and rebuild only if
all report the same epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from qeffect.spec.predicates import Register, choose, implies
from qeffect.spec.ranks import NOBODY

from .protocol import RankTransition

__all__ = ["LAUNCHES", "LAUNCH_LEMMAS"]

_FOUND: dict[str, RankTransition] = {}
#: Proved beside the promises.
LAUNCH_LEMMAS: Final = Register()


def _transition(*arguments: str, fault: bool = False) -> Callable[..., Any]:
    def enter(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__
        _FOUND[name] = RankTransition(name, function, arguments, fault)
        return function

    return enter


def _goes_on(st: Any, r: Any) -> None:
    st.when((st.dead[r] == 0) & (st.quits[r] == 0))


# The host


@_transition("rank")
def launch(st: Any, r: Any) -> None:
    """The host launches a step whose guards its contract has checked."""
    _goes_on(st, r)
    st.when(st.launched[r] == st.booked[r])
    st.launched[r] = st.launched[r] + 1


@_transition("rank")
def read_votes(st: Any, r: Any) -> None:
    """The host reads the votes of the last committed step, and all of them are yes."""
    _goes_on(st, r)
    st.when((st.known[r] < st.booked[r]) & (st.ran[r] >= st.booked[r]))
    st.need("all-yes", st.weights[r] >= st.booked[r])
    st.known[r] = st.booked[r]


@_transition("rank")
def read_a_no(st: Any, r: Any) -> None:
    """The host finds a no or a missing vote for the last committed step, and cannot go on."""
    _goes_on(st, r)
    st.when((st.known[r] < st.booked[r]) & (st.ran[r] >= st.booked[r]))
    st.when(st.weights[r] < st.booked[r])
    st.quits[r] = 1


@_transition("rank")
def commit_launched(st: Any, r: Any) -> None:
    """The contract commits the launched step, whose update the device may not have reached."""
    _goes_on(st, r)
    st.when(st.launched[r] == st.booked[r] + 1)
    st.need("votes-first", st.known[r] == st.booked[r])
    st.booked[r] = st.booked[r] + 1


# The gate on the device


@_transition("rank")
def vote_yes(st: Any, r: Any) -> None:
    """The device's counters are as expected, so it votes yes with the number of the step."""
    st.when((st.dead[r] == 0) & (st.voted[r] == st.ran[r]) & (st.voted[r] < st.launched[r]))
    st.need("no-yes-after-skip", st.weights[r] == st.ran[r])
    st.voted[r] = st.voted[r] + 1
    st.vote[r] = st.voted[r]


@_transition("rank")
def vote_after_skip(st: Any, r: Any) -> None:
    """A device that skipped an update votes no on every later step of its round."""
    st.when((st.dead[r] == 0) & (st.voted[r] == st.ran[r]) & (st.voted[r] < st.launched[r]))
    st.when(st.weights[r] < st.ran[r])
    st.voted[r] = st.voted[r] + 1


@_transition("rank", fault=True)
def vote_no(st: Any, r: Any) -> None:
    """The device's counters are unexpected, or two runs of the step differ, so it votes no."""
    st.when((st.dead[r] == 0) & (st.voted[r] == st.ran[r]) & (st.voted[r] < st.launched[r]))
    st.voted[r] = st.voted[r] + 1


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
    """The device has a yes from every rank for this step, and updates its weights."""
    st.when((st.dead[r] == 0) & (st.voted[r] == st.ran[r] + 1))
    st.need("yes-of-all", st.every("rank", lambda q: st.word[r, q] == st.ran[r] + 1))
    st.ran[r] = st.ran[r] + 1
    st.weights[r] = st.weights[r] + 1


@_transition("rank")
def skip(st: Any, r: Any) -> None:
    """
    The device has received every vote, or a connection was cut, but a yes is missing: it skips the
    update.
    """
    step = st.ran[r] + 1
    st.when((st.dead[r] == 0) & (st.voted[r] == step))
    whole = st.every("rank", lambda q: implies(st.round[q] == st.round[r], st.cut[q] == 0))
    st.when(implies(whole, st.every("rank", lambda q: st.heard[r, q] == step)))
    st.when(implies(st.every("rank", lambda q: st.word[r, q] == step), st.ran[r] != st.ran[r]))
    st.ran[r] = step


# Stopping, and the rebuild in place


@_transition("rank", fault=True)
def fail_host(st: Any, r: Any) -> None:
    """The contract refuses a step, or the host fails; the rank cannot go on."""
    _goes_on(st, r)
    st.quits[r] = 1


@_transition("rank", "rank")
def wake_launched(st: Any, r: Any, q: Any) -> None:
    """A rank finds that another rank has closed its connections, and cannot go on."""
    _goes_on(st, r)
    st.when((st.round[r] == st.round[q]) & (st.cut[q] == 1))
    st.quits[r] = 1


@_transition("rank")
def cut_connections(st: Any, r: Any) -> None:
    """A rank that cannot go on aborts its connections, on the device as well."""
    st.when((st.dead[r] == 0) & (st.quits[r] == 1) & (st.cut[r] == 0))
    st.cut[r] = 1


@_transition("rank")
def report_epoch(st: Any, r: Any) -> None:
    """A stopped rank whose device has ended every launch reports the epoch of its weights."""
    st.when((st.dead[r] == 0) & (st.cut[r] == 1))
    st.when(st.report[st.round[r], r] == NOBODY)
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
    for column in ("begin", "booked", "launched", "known", "voted", "vote", "ran"):
        getattr(st, column)[r] = st.report[n, r]
    st.heard[r] = st.zeros("heard")
    st.word[r] = st.zeros("word")
    st.quits[r] = 0
    st.cut[r] = 0
    st.round[r] = n + 1


@_transition("rank", fault=True)
def die(st: Any, r: Any) -> None:
    """A rank's process ends, at any moment; the system closes its connections."""
    st.when(st.dead[r] == 0)
    st.dead[r] = 1
    st.cut[r] = 1


LAUNCHES: Final[Mapping[str, RankTransition]] = dict(_FOUND)


@LAUNCH_LEMMAS("launches.host-order", r="rank")
def host_order(st: Any, r: Any) -> Any:
    """A host reads no further than it committed, and commits no further than it launched."""
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
    """A device ends no step before its vote, and votes on no step before its launch."""
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
    """If a host has read a yes from every rank, its device has made the update."""
    return st.known[r] <= st.weights[r]


@LAUNCH_LEMMAS("launches.yes-without-gap", r="rank")
def yes_without_gap(st: Any, r: Any) -> Any:
    """A device that voted yes on its current step has made every earlier update."""
    return implies(st.vote[r] > st.ran[r], st.weights[r] == st.ran[r])


@LAUNCH_LEMMAS("launches.words-were-said", r="rank", q="rank")
def words_were_said(st: Any, r: Any, q: Any) -> Any:
    """A device holds only votes that were given in its round."""
    return (st.word[r, q] >= 0) & implies(st.round[r] == st.round[q], st.word[r, q] <= st.vote[q])


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
    return implies(n > 0, (st.report[n - 1, q] == st.begin[r]) & (st.begin[r] != NOBODY))


@LAUNCH_LEMMAS("launches.first-round", r="rank")
def first_round(st: Any, r: Any) -> Any:
    """A rank that never rebuilt began in epoch 0."""
    return implies(st.round[r] == 0, st.begin[r] == 0)


@LAUNCH_LEMMAS("launches.cut-stops", r="rank")
def cut_stops(st: Any, r: Any) -> Any:
    """A rank whose connections were cut does not go on."""
    return implies(st.cut[r] == 1, (st.quits[r] == 1) | (st.dead[r] == 1))


@LAUNCH_LEMMAS("launches.first-back-waits", r="rank", q="rank")
def first_back_waits(st: Any, r: Any, q: Any) -> Any:
    """
    A rank that rebuilt before another rank has no vote from that rank, and its weights do not
    change.
    """
    return implies(st.round[r] > st.round[q], (st.word[r, q] == 0) & (st.weights[r] == st.begin[r]))
