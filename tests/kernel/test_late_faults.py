"""A fault that is noticed late spoils the current epoch, or the weights that used its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .helpers import Rig, refused, stage


def second_epoch(**options: Any) -> Rig:
    """One epoch committed, and one tape of the next on each of two slots but the second's F."""
    rig = Rig(stage(), **options)
    assert rig.epoch() == 1
    rig.contract.join()
    return rig


class TestCurrentEpoch:
    """The tape may be gone when the fault is seen; the epoch is spoiled all the same."""

    def test_the_epoch_does_not_become_final(self) -> None:
        """Every dW ran and was committed, then a digest failed."""
        rig = Rig(stage(microbatches=1))
        rig.microbatch()
        rig.contract.wait()
        rig.contract.fail(0)

        with refused(rig, "arena.spoiled"):
            rig.contract.finalize(0)

    def test_a_final_stage_is_not_final_any_more(self) -> None:
        """The fault is seen after finalize and before the update."""
        rig = Rig(stage(microbatches=1))
        rig.microbatch()
        rig.finish()
        rig.contract.fail(0)

        with refused(rig, "epoch.not-final"):
            rig.contract.commit_epoch()
        assert not rig.contract.half_updated

    def test_a_restore_begins_the_epoch_again(self) -> None:
        """As after any failed action."""
        rig = Rig(stage(microbatches=1))
        start = rig.contract.checkpoint()
        rig.microbatch()
        rig.contract.fail(0, epoch=0)
        rig.contract.drain()

        rig.contract.restore(start)
        assert rig.epoch() == 1

    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_during_the_update(self, end: str) -> None:
        """The update in flight uses wrong gradients, so it ends in half-updated weights."""
        rig = Rig(stage(microbatches=1))
        rig.microbatch()
        rig.finish()
        ticket = rig.contract.check_update()
        rig.contract.fail(0)
        getattr(rig.contract, end)(ticket)

        assert rig.contract.half_updated
        assert rig.contract.epoch == (1 if end == "commit" else 0)
        rig.contract.drain()
        with refused(rig, "persistence.half-updated"):
            rig.contract.checkpoint()


class TestCommittedEpoch:
    """The weights were updated with wrong gradients: only a restore goes on."""

    @pytest.mark.parametrize(
        "call",
        [
            lambda rig: rig.contract.check_refresh(0),
            lambda rig: rig.contract.check_forward(rig.key(), refresh=True),
            lambda rig: rig.contract.reserve(rig.key()),
            lambda rig: rig.contract.bind(rig.key()),
            lambda rig: rig.contract.check_update(),
        ],
    )
    def test_at_the_beginning_of_the_next(self, call: Callable[[Rig], Any]) -> None:
        """No action begins, nothing is bound, and the weights are not updated again."""
        rig = second_epoch()
        rig.contract.fail(0, epoch=0)

        with refused(rig, "epoch.half-updated", "", "weights restored from a checkpoint"):
            call(rig)

    def test_in_the_middle_of_the_next(self) -> None:
        """A live tape runs neither its dI nor its dW; another begins no F."""
        rig = second_epoch()
        ref = rig.forward(0)
        other = rig.forward(1)
        rig.dgrad(other, 1)
        rig.contract.bind(rig.key(0))
        rig.contract.fail(0, epoch=0)

        with refused(rig, "epoch.half-updated"):
            rig.contract.check_dgrad(rig.key(0), ref)
        with refused(rig, "epoch.half-updated"):
            rig.contract.check_wgrad(rig.key(1), other)

    def test_no_checkpoint(self) -> None:
        """The checkpoint would hold the wrong weights."""
        rig = second_epoch()
        rig.contract.drain()
        rig.contract.checkpoint()
        rig.contract.fail(0, epoch=0)

        with refused(rig, "persistence.half-updated"):
            rig.contract.checkpoint()

    def test_work_in_flight_ends_and_a_restore_goes_on(self) -> None:
        """Tickets are redeemed, tapes dropped, and the epoch runs again."""
        rig = Rig(stage())
        start = rig.contract.checkpoint()
        rig.epoch()
        rig.contract.join()
        ticket = rig.check_forward()
        rig.contract.fail(0, epoch=0)
        rig.contract.commit(ticket)
        rig.contract.purge(1)
        rig.contract.drain()

        rig.contract.restore(start)
        assert not rig.contract.half_updated
        assert rig.epoch() == 1


class TestArguments:
    """A fault names a stage of the process and an epoch that began."""

    def test_an_epoch_that_never_was(self) -> None:
        """The caller counts other steps than the contract."""
        rig = second_epoch()

        with refused(rig, "epoch.not-begun", "epoch 2 in stage 0", "at most 1"):
            rig.contract.fail(0, epoch=2)

    def test_an_epoch_that_a_restore_undid(self) -> None:
        """Its update is not part of the weights."""
        rig = Rig(stage(microbatches=1))
        start = rig.contract.checkpoint()
        rig.epoch()
        rig.contract.drain()
        rig.contract.restore(start)

        with refused(rig, "epoch.not-begun"):
            rig.contract.fail(0, epoch=1)

    @pytest.mark.parametrize(
        ("given", "error", "text"),
        [
            ({"stage": 7}, ValueError, "fail: "),
            ({"stage": 0, "epoch": -1}, ValueError, "fail: epoch must be at least 0, got -1"),
            ({"stage": 0, "epoch": 0.0}, TypeError, "fail: "),
            ({"stage": 0, "epoch": True}, TypeError, "fail: "),
        ],
    )
    def test_others_are_refused_by_name(self, given: Any, error: type, text: str) -> None:
        """Nothing changes."""
        rig = Rig()
        before = rig.contract.snapshot()

        with pytest.raises(error, match=text):
            rig.contract.fail(**given)
        assert before == rig.contract.snapshot()


class TestWithoutARelation:
    """Guards that another relation has where it is not left out."""

    def test_no_bind_during_an_update_without_the_arena(self) -> None:
        """The update may still read the destinations."""
        rig = Rig(stage(microbatches=1), omit=("arena",))
        rig.microbatch()
        rig.finish()
        ticket = rig.contract.check_update()

        with refused(rig, "epoch.in-flight", "a bind during the update"):
            rig.contract.bind(rig.key())
        rig.contract.commit(ticket)
        rig.contract.bind(rig.key())

    def test_no_refresh_during_an_update_without_order(self) -> None:
        """The refresh would quantize weights that the update writes."""
        rig = Rig(stage(microbatches=1), omit=("order",))
        rig.microbatch()
        rig.finish()
        ticket = rig.contract.check_update()
        rig.contract.invalidate(0)
        rig.contract.join()

        with refused(rig, "epoch.in-flight", "a refresh during the update"):
            rig.contract.check_refresh(0)
        rig.contract.commit(ticket)
        rig.contract.join()
        rig.contract.check_refresh(0)
