"""
Programs that the contract's second edition accepted completely, although they are wrong on a
machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qeffect import Refused

from .helpers import Rig, refused, stage


def whole() -> Rig:
    """A whole epoch of one stage, ready for its update."""
    rig = Rig(stage(microbatches=1))
    rig.microbatch()
    rig.finish()
    return rig


class TestUpdate:
    """The optimizer's update is checked, then committed or aborted."""

    def test_an_update_that_raises_leaves_no_checkpoint(self) -> None:
        """`optimizer.step` raises half way; the second edition had committed before it."""
        rig = whole()
        with pytest.raises(MemoryError), rig.contract.update():
            raise MemoryError
        rig.contract.drain()

        with refused(rig, "persistence.half-updated"):
            rig.contract.checkpoint()
        assert rig.contract.half_updated
        assert rig.contract.epoch == 0

    @pytest.mark.parametrize(
        ("clause", "call"),
        [
            ("epoch.half-updated", lambda rig: rig.contract.check_update()),
            ("epoch.half-updated", lambda rig: rig.contract.commit_epoch()),
            ("version.already-fresh", lambda rig: rig.contract.check_refresh(0)),
            ("ownership.repeated-forward", lambda rig: rig.contract.check_forward(rig.key())),
            ("ownership.repeated-forward", lambda rig: rig.contract.reserve(rig.key())),
            ("arena.duplicate-bind", lambda rig: rig.contract.bind(rig.key())),
            ("epoch.already-final", lambda rig: rig.contract.finalize(0)),
        ],
    )
    def test_after_it_nothing_but_a_restore(self, clause: str, call: Callable[[Rig], Any]) -> None:
        """Every call that would use or change the weights is refused; a restore is accepted."""
        rig = whole()
        start = Rig(stage(microbatches=1)).contract.checkpoint()
        rig.contract.abort(rig.contract.check_update())
        rig.contract.join()

        with refused(rig, clause):
            call(rig)

        rig.contract.drain()
        rig.contract.restore(start)
        assert not rig.contract.half_updated
        assert rig.epoch() == 1

    @pytest.mark.parametrize(
        ("clause", "call"),
        [
            ("persistence.action-in-flight", lambda rig: rig.contract.checkpoint()),
            ("epoch.in-flight", lambda rig: rig.contract.check_update()),
            ("version.already-fresh", lambda rig: rig.contract.check_refresh(0)),
            ("version.late-refresh", lambda rig: _lost(rig).check_refresh(0)),
            ("ownership.repeated-forward", lambda rig: rig.contract.check_forward(rig.key())),
            ("arena.duplicate-bind", lambda rig: rig.contract.bind(rig.key())),
        ],
    )
    def test_while_it_is_in_flight(self, clause: str, call: Callable[[Rig], Any]) -> None:
        """From its check to its commit, also once a graph stream and the host waited."""
        rig = whole()
        ticket = rig.contract.check_update()
        rig.contract.join()
        rig.contract.drain()

        with pytest.raises(Refused) as caught:
            call(rig)
        assert caught.value.clause == clause
        rig.contract.commit(ticket)
        assert rig.contract.epoch == 1

    def test_no_restore_while_it_is_in_flight(self) -> None:
        """The update would go on to write the weights that were restored."""
        rig = whole()
        start = Rig(stage(microbatches=1)).contract.checkpoint()
        ticket = rig.contract.check_update()
        rig.contract.drain()

        with refused(rig, "epoch.in-flight"):
            rig.contract.restore(start)
        rig.contract.abort(ticket)

    def test_what_it_enqueued_after_a_join_is_awaited_too(self) -> None:
        """The graph stream waited in the middle of the update, not for its end."""
        rig = whole()
        with rig.contract.update():
            rig.contract.join()
            rig.contract.drain()

        with refused(rig, "completion.update-to-graph"):
            rig.contract.check_refresh(0)
        with refused(rig, "persistence.device-work"):
            rig.contract.checkpoint()

    def test_its_ticket_is_redeemed_once(self) -> None:
        """By a commit or by an abort."""
        rig = whole()
        ticket = rig.contract.check_update()
        assert rig.contract.outstanding() == (ticket,)
        rig.contract.commit(ticket)
        assert rig.contract.outstanding() == ()

        for redeem in (rig.contract.commit, rig.contract.abort):
            with refused(rig, "epoch.unknown-ticket"):
                redeem(ticket)

    def test_in_one_call(self) -> None:
        """`commit_epoch` is the check and the commit of an update that was enqueued whole."""
        told: list[str] = []
        rig = whole()
        rig.contract.observer = lambda name, *_: told.append(name)

        assert rig.contract.commit_epoch() == 1
        assert told == ["check_update", "commit_update"]


def _lost(rig: Rig) -> Any:
    """The contract, after a stage's weight cache was lost."""
    rig.contract.invalidate(0)
    return rig.contract


class TestDrain:
    """What a drain says of streams and transfers: nothing but that the host saw work finish."""

    def test_it_is_no_streams_wait(self) -> None:
        """A stream that has not waited for a replay still has to, although the host has."""
        rig = Rig(stage(microbatches=1))
        ref = rig.forward()
        rig.contract.bind(rig.key())
        rig.contract.drain()

        with refused(rig, "completion.graph-to-caller"):
            rig.contract.check_dgrad(rig.key(), ref)
        rig.contract.wait()
        rig.contract.check_dgrad(rig.key(), ref)

    def test_it_ends_no_transfer(self) -> None:
        """A read that has begun keeps its slot until its own end."""
        rig = Rig(stage(microbatches=1, sends_output=True))
        ref = rig.forward()
        rig.contract.wait()
        rig.contract.read(rig.key(), ref)
        rig.contract.drain()

        with refused(rig, "ownership.read-duplicate"):
            rig.contract.read(rig.key(), ref)
        rig.contract.finish_read(rig.key(), ref)
