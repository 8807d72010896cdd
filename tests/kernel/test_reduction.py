"""
Reduction: a stage's gradients are reduced once, after they are whole and before the commit.
"""

from __future__ import annotations

import pytest

from .helpers import Rig, refused, stage


def _final(**options: bool) -> Rig:
    """A process whose one stage is final and owes a reduction."""
    rig = Rig(stage(microbatches=1, reduces=True, **options))
    rig.microbatch(0)
    rig.contract.wait()
    rig.contract.finalize(0)
    return rig


def test_finalize_reduce_commit_epoch_after_epoch() -> None:
    """Finalize, reduce, commit: epoch after epoch."""
    rig = Rig(stage(reduces=True), stage(1))

    assert [1, 2] == [rig.epoch(), rig.epoch()]


def test_gradients_that_are_not_whole_are_not_reduced() -> None:
    """Gradients that are not whole are not reduced."""
    rig = Rig(stage(reduces=True))

    with refused(rig, "reduction.before-final", "stage 0", "finalized"):
        rig.contract.start_reduction(0)


def test_a_stage_has_one_reduction_at_a_time() -> None:
    """One reduction of a stage at a time, and none at the commit."""
    rig = _final()
    rig.contract.start_reduction(0)

    with refused(rig, "reduction.in-flight", "in flight: 0", "none in flight"):
        rig.contract.start_reduction(0)
    with refused(rig, "reduction.in-flight", "in flight: 0"):
        rig.contract.commit_epoch()


def test_a_stage_is_reduced_once_in_an_epoch() -> None:
    """A stage is reduced once in an epoch."""
    rig = _final()
    rig.contract.start_reduction(0)
    rig.contract.finish_reduction(0)

    with refused(rig, "reduction.duplicate", "stage 0", "one reduction"):
        rig.contract.start_reduction(0)


def test_a_stage_that_owes_no_reduction_is_not_reduced() -> None:
    """A stage that owes none is not reduced."""
    rig = Rig(stage(microbatches=1))
    rig.microbatch(0)
    rig.contract.wait()
    rig.contract.finalize(0)

    with refused(rig, "reduction.duplicate", "stage 0", "where configured"):
        rig.contract.start_reduction(0)


@pytest.mark.parametrize("end", ["finish_reduction", "fail_reduction"])
def test_only_a_reduction_in_flight_ends(end: str) -> None:
    """Only a reduction in flight finishes or fails."""
    rig = _final()

    with refused(rig, "reduction.not-started", "stage 0", "in flight"):
        getattr(rig.contract, end)(0)


def test_no_commit_while_a_stage_owes_its_reduction() -> None:
    """An epoch does not commit while a stage owes its reduction; the message names the stage."""
    rig = _final()

    with refused(rig, "reduction.missing", "not yet reduced: 0", "every configured reduction"):
        rig.contract.commit_epoch()


def test_a_failed_reduction() -> None:
    """A failed one spoils the epoch: neither reduced again nor committed."""
    rig = _final()
    rig.contract.start_reduction(0)
    rig.contract.fail_reduction(0)

    with refused(rig, "reduction.before-final"):
        rig.contract.start_reduction(0)
    with refused(rig, "arena.spoiled", "spoiled in epoch 0"):
        rig.contract.finalize(0)
    with refused(rig, "reduction.missing"):
        rig.contract.commit_epoch()


def test_no_checkpoint_or_restore() -> None:
    """A reduction in flight is live work: nothing is saved or restored under it."""
    rig = _final()
    checkpoint = Rig(stage(microbatches=1, reduces=True)).contract.checkpoint()
    rig.contract.drain()
    rig.contract.start_reduction(0)

    with refused(rig, "persistence.reduction-in-flight", "in flight: 0", "none in flight"):
        rig.contract.checkpoint()
    with refused(rig, "reduction.in-flight", "in flight: 0"):
        rig.contract.restore(checkpoint)


def test_no_drop_under_a_reduction() -> None:
    """A tape is not aborted while its stage's gradients are being reduced."""
    rig = Rig(stage(microbatches=1, reduces=True, sends_output=True))
    ref = rig.forward(0)
    rig.dgrad(ref, 0)
    rig.wgrad(ref, 0)
    rig.contract.wait()
    rig.contract.finalize(0)
    rig.contract.start_reduction(0)

    with refused(rig, "reduction.in-flight", "in flight: 0"):
        rig.contract.drop(rig.key(0), ref)
    with refused(rig, "reduction.in-flight", "in flight: 0"):
        rig.contract.purge(0)
    rig.contract.finish_reduction(0)
    rig.contract.drop(rig.key(0), ref)
    with refused(rig, "epoch.not-final"):
        rig.contract.commit_epoch()
