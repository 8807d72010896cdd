"""
Launches: promises about ranks whose steps are one launch each, decided on their devices.

A host launches a step before it knows whether the device took the previous step's update. Its
contract is one step ahead of the votes that the host has read. The columns below are of one
attempt; what ranks share over attempts is in `spec/ranks.py`. Epochs are counted from the epoch in
which the attempt began to launch. ``r`` and ``q`` are any ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .predicates import Register, implies

__all__ = ["LAUNCH_COLUMNS", "LAUNCH_PROMISES", "LAUNCH_STEPS"]

#: Sorts of the indices and meaning of an entry, by column.
LAUNCH_COLUMNS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "round": (("rank",), "the rank's round: how often the rank rebuilt its connections"),
    "begin": (("rank",), "the epoch in which the rank's round began"),
    "booked": (("rank",), "the epoch of the rank's contract"),
    "launched": (("rank",), "the epoch that follows the last step launched"),
    "known": (("rank",), "the epoch up to which the host has read the devices' votes"),
    "voted": (("rank",), "the epoch up to which the rank's device has voted, yes or no"),
    "vote": (("rank",), "the epoch to which the device's last yes vote moves the weights"),
    "heard": (("rank", "rank"), "the epoch of the vote that the first device last received"),
    "word": (
        ("rank", "rank"),
        "the epoch of the latest yes that the first device received from the second",
    ),
    "ran": (("rank",), "the epoch up to which the device has ended its steps, updated or not"),
    "weights": (("rank",), "the epoch of the weights on the device"),
    "quits": (("rank",), "1 once the host cannot continue"),
    "cut": (("rank",), "1 once the rank's connections are closed or aborted"),
    "dead": (("rank",), "1 once the rank's process has ended"),
    "report": (
        ("attempt", "rank"),
        "the epoch that the rank reported for the rebuild; the first index is the round",
    ),
}

#: Promises that hold in every state that the protocol reaches.
LAUNCH_PROMISES: Final = Register()
#: Promises that hold whenever the named transition of the protocol happens.
LAUNCH_STEPS: Final = Register()


@LAUNCH_PROMISES("launches.moved-by-all", r="rank", q="rank")
def moved_by_all(st: Any, r: Any, q: Any) -> Any:
    """A device updates its weights in a step only if every rank's device voted yes to that step."""
    return implies(st.round[r] == st.round[q], st.weights[r] <= st.vote[q])


@LAUNCH_PROMISES("launches.one-ahead", r="rank")
def one_ahead(st: Any, r: Any) -> Any:
    """The epochs of a rank's contract and of its weights are at most one apart."""
    return (st.booked[r] <= st.weights[r] + 1) & (st.weights[r] <= st.booked[r] + 1)


@LAUNCH_PROMISES("launches.one-apart", r="rank", q="rank")
def one_apart(st: Any, r: Any, q: Any) -> Any:
    """The weights of two ranks are at most one step apart, even after a stop."""
    return implies(st.round[r] == st.round[q], st.weights[r] <= st.weights[q] + 1)


@LAUNCH_PROMISES("launches.one-beginning", r="rank", q="rank")
def one_beginning(st: Any, r: Any, q: Any) -> Any:
    """Ranks that have rebuilt their connections equally often restarted in the same epoch."""
    return implies(st.round[r] == st.round[q], st.begin[r] == st.begin[q])


@LAUNCH_STEPS("launches.commit-confirmed", "commit_launched")
def commit_confirmed(st: Any, r: Any) -> Any:
    """A contract commits a step only if the device took the previous step's update."""
    return st.weights[r] >= st.booked[r]


@LAUNCH_STEPS("launches.no-gap", "move")
def no_gap(st: Any, r: Any) -> Any:
    """A device updates its weights only if it took every earlier update of its round."""
    return st.weights[r] == st.ran[r]


@LAUNCH_STEPS("launches.rebuilt-from-weights", "rebuild")
def rebuilt_from_weights(st: Any, r: Any) -> Any:
    """A rank rebuilds from the epoch of its own weights."""
    return st.report[st.round[r], r] == st.weights[r]
