"""
Observers that raise: the call has still happened, and no part of it is lost.

A recorder on a full disk is such an observer. Wherever the observer raises, the recorded state
agrees with the memory, every ticket can be obtained again, and abort, drain and restore lead back
to the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from operator import eq, le
from typing import Any

import pytest

from qeffect import Contract, Refused, Ticket
from qeffect.ledgers.runner import Runner
from qeffect.log.recorder import Recorder
from qeffect.relations.constants import RESERVED

from .helpers import MATRICES, Rig, stage

_OPTIONS: dict[str, Any] = {"sends_output": True, "sends_gradient": True, "reduces": True}


def _rig() -> Rig:
    """Two stages of two domains, called from two streams; one domain has scales of an epoch."""
    return Rig(
        stage(0, domain="a", **_OPTIONS),
        stage(1, domain="b", receives_gradient=True, scales="epoch", **_OPTIONS),
        callers=("main", "side"),
    )


def _microbatch(rig: Rig, m: int, s: int) -> Iterator[Callable[[], Any]]:
    """A microbatch whose readers end before its dI and dW, or, if not the first, after them."""
    c, key, link = rig.contract, rig.key(m, s), rig.link(s)

    def on_tape(call: Callable[..., Any], **options: Any) -> Callable[[], Any]:
        return lambda: call(key, c.live()[key], **options)

    early, late = (on_tape(c.finish_read, gradient=g, link=link) for g in (False, True))
    yield partial(rig.forward, m, s)
    yield partial(c.wait, link)
    yield on_tape(c.read, link=link)
    if m == 0:
        yield early
        yield partial(c.join, link)
    if s:
        yield on_tape(c.post_receive, gradient=True, link=link)
        yield on_tape(c.finish_receive, gradient=True, link=link)
        yield partial(c.join, link)
    yield lambda: rig.dgrad(c.live()[key], m, s)
    yield partial(c.wait, link)
    yield on_tape(c.read, gradient=True, link=link)
    if m == 0:
        yield late
        yield partial(c.join, link)
    yield lambda: rig.wgrad(c.live()[key], m, s)
    if m != 0:
        yield early
        yield late
        yield partial(c.join, link)


def _grouped(rig: Rig) -> Ticket:
    """Check one dW for both tapes of stage 1."""
    live = rig.contract.live()
    (first, ref), other = ((key, live[key]) for key in (rig.key(0, 1), rig.key(1, 1)))
    return rig.contract.check_wgrad(first, ref, link=rig.link(1), group=[other])


def _whole(rig: Rig) -> None:
    """A whole epoch of every stage, up to its update."""
    for s in (0, 1):
        for m in (0, 1):
            rig.microbatch(m, s)
    for s in (0, 1):
        rig.finish(s)


def _everything(rig: Rig) -> Iterator[Callable[[], Any]]:
    """Every call that the observer hears of, each accepted in its turn."""
    c = rig.contract
    saved = c.checkpoint()
    yield lambda: c.submit("main")
    yield lambda: c.join(rig.link(0))
    yield lambda: c.join(rig.link(1))
    tickets: dict[str, Ticket] = {}

    def check(name: str, call: Callable[[], Ticket]) -> Callable[[], Any]:
        return lambda: tickets.update({name: call()})

    def back() -> None:
        c.drain()
        c.restore(saved)

    # A refresh that fails, and each kind of action that fails, in epochs that are given up.
    yield check("refresh", lambda: c.check_refresh(0, rig.link(0)))
    yield lambda: c.abort(tickets["refresh"])
    yield lambda: c.drain()
    yield lambda: c.restore(saved)
    yield check("F", lambda: rig.check_forward(0))
    yield lambda: c.abort(tickets["F"])
    yield back
    yield lambda: rig.forward(0)
    yield check("dI", lambda: rig.check_dgrad(c.live()[rig.key(0)], 0))
    yield lambda: c.abort(tickets["dI"])
    yield back
    yield lambda: rig.forward(0)
    yield lambda: rig.dgrad(c.live()[rig.key(0)], 0)
    yield check("dW", lambda: rig.check_wgrad(c.live()[rig.key(0)], 0))
    yield lambda: c.abort(tickets["dW"])
    yield back
    yield lambda: rig.forward(0)
    yield check("evidence", lambda: rig.check_dgrad(c.live()[rig.key(0)], 0))

    def wrong() -> None:
        with pytest.raises(Refused, match="work-not-queued") as caught:
            c.commit(tickets["evidence"], MATRICES[:1])
        if caught.value.__cause__ is not None:
            raise caught.value.__cause__

    yield wrong
    yield back
    # A grouped dW that fails, and one that does not.
    for ends in ("abort", "commit"):
        for m in (0, 1):
            yield partial(rig.forward, m, 1)
            yield lambda m=m: rig.receive(c.live()[rig.key(m, 1)], m, 1, gradient=True)
            yield lambda m=m: rig.dgrad(c.live()[rig.key(m, 1)], m, 1)
        yield check("group", lambda: _grouped(rig))
        evidence = (MATRICES,) if ends == "commit" else ()
        yield lambda ends=ends, evidence=evidence: getattr(c, ends)(tickets["group"], *evidence)
        yield back
    # Reservations, a tape and a whole epoch that are given up.
    yield lambda: c.reserve(rig.key(1))
    yield lambda: c.drop(rig.key(1), c.live()[rig.key(1)])
    yield back
    yield lambda: c.reserve(rig.key(0), 1)
    yield lambda: rig.forward(0)
    yield lambda: c.reserve(rig.key(1))
    yield lambda: c.purge(0)
    yield back
    yield lambda: c.reserve(rig.key(0))
    yield back
    # A whole epoch, with readers that end before the dW and after it.
    for s in (0, 1):
        yield check("refresh", partial(c.check_refresh, s, rig.link(s)))
        yield lambda: c.commit(tickets["refresh"])
        for m in (0, 1):
            yield from _microbatch(rig, m, s)
        yield partial(c.wait, rig.link(s))
        yield partial(c.finalize, s, rig.link(s))
    yield lambda: c.start_reduction(0)
    yield lambda: c.fail_reduction(0)
    yield back
    yield lambda: c.invalidate(0)
    yield lambda: c.invalidate(1)
    yield lambda: rig.epoch()
    yield lambda: c.drain()
    yield lambda: c.checkpoint()
    # A walk, and the next one.
    yield back
    for s in (0, 1):
        for m in (0, 1):
            yield partial(rig.microbatch, m, s)
        yield partial(c.wait, rig.link(s))
        yield partial(c.finalize, s, rig.link(s))
    yield lambda: c.next_walk()
    yield lambda: c.shorten_walk(1)
    # An update that fails half way, after a whole epoch.
    yield back
    yield partial(_whole, rig)
    yield lambda: c.start_gradients_read(0, rig.link(0))
    yield lambda: c.finish_gradients_read(0, rig.link(0))
    yield check("update", c.check_update)
    yield lambda: c.move_scales(1)
    yield lambda: c.abort(tickets["update"])
    yield back
    yield lambda: c.start_weights_read(0, rig.link(0))
    yield lambda: c.finish_weights_read(0, rig.link(0))
    yield lambda: c.fail(0)
    yield back


class _FullError(OSError):
    """The disk is full."""


def _run(rig: Rig, failing: Callable[[int], bool]) -> tuple[list[str], bool]:
    """
    Run everything; return what the observer heard of, and whether it raised.

    Args:
        rig: What is run.
        failing: Whether the observer raises, given how much it has heard of before.
    """
    heard: list[str] = []

    def observer(transition: str, arguments: tuple[Any, ...], result: Any) -> None:
        heard.append(transition)
        if failing(len(heard) - 1):
            raise _FullError(transition)

    calls = _everything(rig)
    first = next(calls)
    rig.contract.observer = observer
    try:
        first()
        for call in calls:
            call()
    except _FullError:
        return heard, True
    return heard, False


def _heard() -> list[str]:
    """What is heard where nothing raises."""
    heard, raised = _run(_rig(), lambda _: False)
    assert not raised
    return heard


def _require_agreement(contract: Contract) -> None:
    """The free lists, the reservations and the tickets are what the memory says."""
    st = contract.memory
    slots = range(len(st.consumers))
    for number, own in contract._free.items():
        vacant = [
            s
            for s in slots
            if st.slot_stage[s] == number and st.consumers[s] == 0 and st.moving[s] == 0
        ]
        assert sorted(own) == vacant
    claimed = {st.cell_at[s]: s for s in slots if st.consumers[s] == RESERVED and not st.held[s]}
    assert contract._reserved == claimed
    out = {n for n in (*st.held, *st.refreshing, *st.optimizing) if n}
    assert {ticket.serial for ticket in contract.outstanding()} == out


def _recover(contract: Contract) -> None:
    """Abort all, drain, restore, whatever the observer still says."""
    left = contract.outstanding()
    for ticket in left:
        with suppress(_FullError):
            contract.abort(ticket)
        _require_agreement(contract)
    assert contract.outstanding() == ()
    for number, running in enumerate(contract.memory.reducing):
        if running:
            with suppress(_FullError):
                contract.fail_reduction(number)
    with suppress(_FullError):
        contract.drain()
    assert contract.memory.undrained == [0, 0]
    before = contract.incarnation
    with suppress(_FullError):
        contract.restore(_rig().contract.checkpoint())
    assert contract.incarnation != before
    _require_agreement(contract)
    assert contract.live() == {}


def test_the_run_has_every_transition() -> None:
    """Every transition but an evaluation's is heard of in the run that the other tests disturb."""
    evaluation = {f"{call}_evaluation" for call in ("check", "commit", "abort")}

    assert set(_heard()) == set(_rig().contract.transitions.functions) - evaluation


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for-good"])
def test_wherever_an_observer_raises_nothing_is_lost(for_good: bool) -> None:
    """
    At every accepted call: the books agree, the tickets are there, and the way back is open.

    Whether the observer raises once or from there on, a whole epoch is accepted afterwards.
    """
    total = len(_heard())
    for at in range(total):
        rig = _rig()
        heard, raised = _run(rig, partial(le if for_good else eq, at))
        assert raised, at
        assert heard[at:], at
        _require_agreement(rig.contract)
        _recover(rig.contract)
        rig.contract.observer = None
        assert rig.epoch() == 1, (at, heard[-1])
        _require_agreement(rig.contract)


def test_told_before_the_books_are_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the observer is called before the state is updated, the tests above notice the
    difference."""

    def told_first(self: Runner, transition: str, *arguments: Any) -> Any:
        result = self.transitions.functions[transition](self.memory, *arguments)
        if self.observer is not None:
            self.observer(transition, arguments, result)
        return result

    monkeypatch.setattr(Runner, "apply", told_first)
    monkeypatch.setattr(Runner, "tell", lambda *_: None)
    disagreements = set()
    for at in range(len(_heard())):
        rig = _rig()
        heard, _ = _run(rig, partial(eq, at))
        try:
            _require_agreement(rig.contract)
        except AssertionError:
            disagreements.add(heard[-1])
    assert disagreements == {"reserve", "drop", "ungroup_wgrad", "restore"}


def test_work_is_submitted_on_every_link_whoever_was_told() -> None:
    """The second of a caller's links is not forgotten where the observer of the first raises."""
    rig = _rig()

    def full(*_: Any) -> None:
        raise _FullError

    rig.contract.observer = full
    with pytest.raises(_FullError):
        rig.contract.submit("main")
    links = [rig.link(s) for s in (0, 1)]

    assert [rig.contract.memory.submitted[link] for link in links] == [1, 1]


def test_a_refusal_of_evidence_is_not_lost() -> None:
    """Where the observer raises at the abort, the refusal is raised, from the observer's error."""
    rig = Rig()
    ticket = rig.check_dgrad(rig.forward(0), 0)

    def full(*_: Any) -> None:
        raise _FullError

    rig.contract.observer = full
    with pytest.raises(
        Refused, match=r"ownership\.work-not-queued.*expected deferred work for"
    ) as caught:
        rig.contract.commit(ticket, MATRICES[:1])

    assert isinstance(caught.value.__cause__, _FullError)
    assert rig.contract.outstanding() == ()
    assert rig.contract.live() == {}
    _require_agreement(rig.contract)


class TestTickets:
    @pytest.mark.parametrize("action", ["refresh", "F", "dI", "dW"])
    def test_a_ticket_made_again_is_the_one_that_was_lost(self, action: str) -> None:
        """What is listed equals what the check would have returned, and commits."""
        rig = Rig(stage(sends_output=True))
        c = rig.contract
        if action == "refresh":
            issued = c.check_refresh(0)
        else:
            if action == "F":
                issued = rig.check_forward(0)
            else:
                ref = rig.forward(0)
                issued = rig.check_dgrad(ref, 0)
                if action == "dW":
                    c.commit(issued, MATRICES)
                    issued = rig.check_wgrad(ref, 0)
        (listed,) = c.outstanding()
        assert listed == issued
        assert listed is not issued
        c.commit(listed, MATRICES)

        assert c.outstanding() == ()
        with pytest.raises(Refused, match="unknown-ticket"):
            c.commit(issued, MATRICES)

    def test_oldest_first(self) -> None:
        """Tickets of several domains are listed in the order of their checks."""
        rig = _rig()
        c = rig.contract
        issued = [c.check_refresh(1, rig.link(1)), rig.check_forward(0, 0)]

        assert c.outstanding() == tuple(issued)

    def test_a_block_whose_check_was_not_heard(self) -> None:
        """A ``with`` block that the observer kept from being entered leaves its ticket here."""
        rig = Rig()

        def full(*_: Any) -> None:
            raise _FullError

        rig.contract.observer = full
        with pytest.raises(_FullError), rig.contract.forward(rig.key(0), refresh=True):
            raise AssertionError("the block was entered")
        rig.contract.observer = None
        (ticket,) = rig.contract.outstanding()
        rig.contract.abort(ticket)

        assert rig.contract.live() == {}


def test_a_recorder_on_a_full_disk() -> None:
    """The recorder is such an observer: its error is the caller's, and the ticket is not lost."""

    class Full:
        written = 0

        def write(self, line: bytes) -> int:
            Full.written += 1
            if Full.written == 2:
                raise OSError(28, "No space left on device")
            return len(line)

        def flush(self) -> None:
            """Nothing is buffered."""

    rig = Rig(stage(microbatches=1))
    Recorder(rig.contract, Full())  # type: ignore[arg-type]
    with pytest.raises(OSError, match="No space left"):
        rig.check_forward(0)
    (ticket,) = rig.contract.outstanding()
    rig.contract.observer = None
    rig.contract.commit(ticket)

    assert rig.contract.live() == {rig.key(0): ticket.ref}
