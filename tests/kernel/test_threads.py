"""
Threads: calls take turns, and two simultaneous calls are detected before either call does harm.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from qeffect import ConcurrentCallError, Contract, Refused, TapeKey

from .helpers import MATRICES, Rig, stage
from .test_observers import _require_agreement

#: Trials of two threads each.
TRIALS = 300


class _Open(Contract):
    """A contract without the look at who is inside."""

    _entered = property(lambda self: False, lambda self, value: None)


@pytest.fixture
def hostile() -> Iterator[None]:
    """Let the interpreter change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _together(*works: Callable[[], None]) -> list[BaseException]:
    """Run in threads that begin together; return what they raised."""
    raised: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        barrier.wait()
        try:
            work()
        except BaseException as error:  # the test looks at each
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


class _Turns:
    """Calls of one thread; one that met another thread inside is tried again."""

    def __init__(self) -> None:
        self.met = 0

    def __call__(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        while True:
            try:
                return call(*args, **options)
            except ConcurrentCallError:
                self.met += 1


def _stage_of_its_own(rig: Rig, number: int, turn: _Turns) -> None:
    """Every call of one stage's epoch, whose domain is its own, so that nothing is refused."""
    c, link = rig.contract, rig.link(number)
    turn(c.commit, turn(c.check_refresh, number, link))
    for microbatch in (0, 1):
        key = TapeKey(0, number, microbatch)
        if microbatch:
            turn(c.wait, link)
            turn(c.reserve, key, link=link)
        ref = turn(c.commit, turn(c.check_forward, key, link=link))
        turn(c.bind, key)
        turn(c.wait, link)
        turn(c.read, key, ref, link=link)
        turn(c.finish_read, key, ref, link=link)
        turn(c.join, link)
        turn(c.commit, turn(c.check_dgrad, key, ref, link=link), MATRICES)
        turn(c.commit, turn(c.check_wgrad, key, ref, link=link), MATRICES)
    turn(c.wait, link)
    turn(c.finalize, number, link)


def test_two_threads_at_once_corrupt_nothing(hostile: None) -> None:
    """
    Two threads over one contract, under a hostile switch interval.

    Each drives its own stage, so that every refusal but being two at once would be spurious. The
    books agree with the memory after every trial, and the epoch commits.
    """
    met = 0
    for _ in range(TRIALS):
        rig = Rig(*(stage(n, domain=n, sends_output=True) for n in (0, 1)))
        turns = [_Turns(), _Turns()]
        raised = _together(
            *(partial(_stage_of_its_own, rig, n, turn) for n, turn in enumerate(turns))
        )
        assert raised == []
        _require_agreement(rig.contract)
        assert rig.contract.commit_epoch() == 1
        met += sum(turn.met for turn in turns)
    assert met > 0  # the threads did meet


def _claims(contract: Contract, microbatch: int, turn: _Turns) -> None:
    """Claim any slot and give it up again, a few times; two slots are enough for two threads."""
    key = TapeKey(0, 0, microbatch)
    for _ in range(4):
        turn(contract.drop, key, turn(contract.reserve, key))


def test_two_threads_over_one_pool(hostile: None) -> None:
    """Where both take from one free list, no claim is refused and no slot is lost."""
    met = 0
    for _ in range(TRIALS):
        contract, turns = Contract([stage()]), [_Turns(), _Turns()]
        raised = _together(*(partial(_claims, contract, m, t) for m, t in enumerate(turns)))
        assert raised == []
        assert contract.live() == {}
        _require_agreement(contract)
        met += sum(turn.met for turn in turns)
    assert met > 0


class _Between:
    """A transition during which another thread makes a call of the contract, to its end."""

    def __init__(self, contract: Contract, name: str, other: Callable[[], Any]) -> None:
        self.transition = getattr(contract, name)
        self.other, self.raised = other, []  # type: ignore[var-annotated]
        setattr(contract, name, self)

    def __call__(self, *arguments: Any) -> Any:
        thread, self.other = self.other, lambda: None
        self.raised += _together(thread)
        return self.transition(*arguments)


def _overtaken(kind: type[Contract]) -> tuple[Contract, list[BaseException]]:
    """A forward takes the last free slot; before its check runs, another thread asks for it."""
    contract = kind([stage(0, slots=1)], omit=("version",))
    keys = [TapeKey(0, 0, m) for m in (0, 1)]
    between = _Between(contract, "_check_forward", lambda: contract.check_forward(keys[1], slot=0))
    try:
        contract.check_forward(keys[0])
    except Refused as refused:
        between.raised.append(refused)
    return contract, between.raised


def test_a_call_during_another_is_found_at_once() -> None:
    """The second call is refused before it did anything; the first one is accepted."""
    contract, (error,) = _overtaken(Contract)

    assert isinstance(error, ConcurrentCallError)
    assert str(error).startswith("check_forward while another call of this contract is under way")
    assert [t.key for t in contract.outstanding()] == [TapeKey(0, 0, 0)]
    _require_agreement(contract)


def test_without_the_look_the_same_calls_corrupt_the_free_list() -> None:
    """The same two calls where nobody looks: a slot is taken, and is in the free list too."""
    contract, errors = _overtaken(_Open)

    assert not any(isinstance(error, ConcurrentCallError) for error in errors)
    assert errors
    with pytest.raises(AssertionError):
        _require_agreement(contract)


#: Every call that changes something, with arguments that it looks at only when it is alone.
_CALLS: dict[str, tuple[Any, ...]] = {
    "check_refresh": (0,),
    "check_forward": (None,),
    "check_evaluation": (0,),
    "check_dgrad": (None, None),
    "check_wgrad": (None, None),
    "commit": (None,),
    "abort": (None,),
    "reserve": (None,),
    "bind": (None,),
    "read": (None, None),
    "finish_read": (None, None),
    "post_receive": (None, None),
    "finish_receive": (None, None),
    "drop": (None, None),
    "purge": (0,),
    "invalidate": (0,),
    "submit": (),
    "enter": (),
    "join": (),
    "wait": (),
    "drain": (),
    "finalize": (0,),
    "start_reduction": (0,),
    "finish_reduction": (0,),
    "fail_reduction": (0,),
    "start_weights_read": (0,),
    "finish_weights_read": (0,),
    "start_gradients_read": (0,),
    "finish_gradients_read": (0,),
    "fail": (0,),
    "next_walk": (),
    "skip": (None,),
    "shorten_walk": (0,),
    "check_commit": (),
    "check_update": (),
    "move_scales": (0,),
    "commit_epoch": (),
    "present_counts": ({},),
    "record_step": (),
    "check_step": (None,),
    "withdraw_step": (),
    "commit_step": (None,),
    "check_checkpoint": (),
    "checkpoint": (),
    "restore": (None,),
}


@pytest.mark.parametrize("call", _CALLS)
def test_every_call_looks(call: str) -> None:
    """Each call from within another one, by its observer, is found; the outer one goes on."""
    found: list[str] = []

    def observer(*_: Any) -> None:
        before = contract.snapshot()
        with pytest.raises(ConcurrentCallError) as caught:
            getattr(contract, call)(*_CALLS[call])
        assert contract.snapshot() == before
        found.append(caught.value.args[0])

    contract = Contract([stage()], observer=observer)
    contract.submit()
    contract.observer = None

    assert found == [call]
    contract.join()  # and the way is free again


@pytest.mark.parametrize("call", _CALLS)
def test_a_commit_after_any_call_compares_the_state_again(call: str) -> None:
    """A call ends what an accepted `check_step` has shown, even if the call raises."""
    contract = Contract([stage(reduces=True)])
    contract._entered = None  # as an accepted `check_step` leaves it
    with suppress(Refused, TypeError, ValueError):
        getattr(contract, call)(*_CALLS[call])

    assert contract._entered is False


@pytest.mark.parametrize("call", _CALLS)
def test_a_call_that_raises_lets_the_next_one_in(call: str) -> None:
    """After any error or refusal the contract can be called."""
    contract = Contract([stage(reduces=True)])
    wrong = tuple("junk" for _ in _CALLS[call]) or ("junk",)
    with pytest.raises((Refused, TypeError, ValueError)):
        getattr(contract, call)(*wrong)

    contract.submit()


def test_every_transition_is_made_by_a_call_that_looks() -> None:
    """No public call is left out: each takes part above, or changes nothing."""
    reads = {
        "live",
        "outstanding",
        "reference",
        "snapshot",
        "step_state",
        "token",
        "link",
        "first_writer",
        "first_of_tied",
        "default_reader",
        "refresh",
        "forward",
        "evaluation",
        "dgrad",
        "wgrad",
        "update",
        "half_updated",
        "observer",
        "configuration",
        "committed_counts",
        "counts_awaited",
        "epoch",
        "incarnation",
    }
    own = {name for part in Contract.__mro__[:-1] for name in vars(part)}
    public = {name for name in own if not name.startswith("_")}
    assert public - reads == set(_CALLS)


def test_threads_may_take_turns() -> None:
    """Calls of one step from different threads, one after another, as autograd's are."""
    rig = Rig(stage(microbatches=1))
    c, key, refs = rig.contract, rig.key(0), []
    steps: list[Callable[[], Any]] = [
        lambda: refs.append(rig.forward(0)),
        lambda: rig.dgrad(refs[0], 0),
        lambda: rig.wgrad(refs[0], 0),
        lambda: rig.finish(),
        lambda: c.commit_epoch(),
    ]
    for step in steps:
        assert _together(step) == []

    assert (c.epoch, key.epoch) == (1, 0)
