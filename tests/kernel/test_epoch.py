"""
Epoch: an optimizer step becomes final only when it is complete, and a spoiled step never commits.
"""

from __future__ import annotations

import pytest

from qeffect import Refused

from .helpers import Rig, refused, stage


class TestFinalize:
    def test_a_stage_is_finalized_once_in_an_epoch(self) -> None:
        """A stage is finalized once per walk."""
        rig = Rig(stage(microbatches=1))
        rig.microbatch(0)
        rig.finish()

        with refused(rig, "epoch.already-final", "another finalize of stage 0", "one finalize"):
            rig.contract.finalize(0)

    def test_incomplete_without_an_arena(self) -> None:
        """Where no arena counts the writes the epoch does."""
        rig = Rig(omit={"arena"})
        rig.microbatch(0)
        ref = rig.forward(1)
        rig.contract.wait()
        rig.contract.commit(rig.contract.check_dgrad(rig.key(1), ref), rig.matrices())

        with refused(rig, "epoch.incomplete", "1 weight gradients", "2"):
            rig.contract.finalize(0)

    def test_spoiled_without_an_arena(self) -> None:
        """Without an arena too."""
        rig = Rig(stage(microbatches=1), omit={"arena"})
        ref = rig.forward(0)
        rig.contract.drop(rig.key(0), ref)

        with refused(rig, "order.incomplete"):
            rig.contract.finalize(0)
        rig = Rig(stage(microbatches=1), omit={"arena", "order"})
        ref = rig.forward(0)
        rig.contract.drop(rig.key(0), ref)
        with refused(rig, "epoch.spoiled", "stage 0, spoiled in epoch 0", "no action failed"):
            rig.contract.finalize(0)


class TestCommit:
    def test_an_epoch_commits_only_when_every_stage_is_final(self) -> None:
        """An epoch commits only when every stage is final."""
        rig = Rig(stage(0, microbatches=1), stage(1, microbatches=1))
        rig.microbatch(0, 0)
        rig.finish(0)

        with refused(rig, "epoch.not-final", "are not final: 1", "finalized in epoch 0"):
            rig.contract.commit_epoch()

    def test_an_epoch_in_which_nothing_ran_is_not_final(self) -> None:
        """An epoch in which nothing ran is not final."""
        with refused(rig := Rig(), "epoch.not-final", "are not final: 0"):
            rig.contract.commit_epoch()

    @pytest.mark.parametrize("how", ["drop", "purge", "abort F", "abort dI", "abort dW"])
    def test_an_aborted_epoch(self, how: str) -> None:
        """Once a tape was aborted the epoch cannot commit until it is rebuilt."""
        rig = Rig(stage(0, microbatches=1), stage(1, domain="b", microbatches=1))
        checkpoint = rig.contract.checkpoint()
        rig.microbatch(0, 1)
        rig.finish(1)
        if how == "abort F":
            rig.contract.abort(rig.check_forward(0))
        else:
            ref = rig.forward(0)
            if how == "abort dI":
                rig.contract.abort(rig.check_dgrad(ref, 0))
            elif how == "abort dW":
                rig.dgrad(ref, 0)
                rig.contract.abort(rig.check_wgrad(ref, 0))
            elif how == "drop":
                rig.contract.drop(rig.key(0), ref)
            else:
                assert rig.contract.purge(0) == 1

        with refused(rig, "epoch.not-final", "are not final: 0"):
            rig.contract.commit_epoch()
        rig.contract.drain()
        rig.contract.restore(checkpoint)
        assert rig.epoch() == 1

    def test_a_drop_after_finalize(self) -> None:
        """A tape that is dropped after its stage was final takes the finality with it."""
        rig = Rig(stage(microbatches=1, sends_output=True))
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        rig.wgrad(ref, 0)
        rig.finish()
        rig.contract.drop(rig.key(0), ref)

        with refused(rig, "epoch.not-final"):
            rig.contract.commit_epoch()

    def test_starts_in_any_epoch(self) -> None:
        """A contract may begin in a later epoch; what is negative or no number is refused."""
        rig = Rig(epoch=7)

        assert rig.epoch() == 8
        for wrong in (-1, "0", None, 1.5):
            with pytest.raises(ValueError, match=r"epoch must be a non-negative integer, got"):
                Rig(epoch=wrong)


class TestConsent:
    def test_a_commit_that_would_be_accepted_is_said_so_and_changes_nothing(self) -> None:
        """Asking first is free of effects, so that every rank can ask before any moves."""
        events: list[str] = []
        rig = Rig(stage(microbatches=1))
        rig.microbatch(0)
        rig.finish()
        rig.contract.observer = lambda transition, arguments, result: events.append(transition)
        before = rig.contract.snapshot()

        rig.contract.check_commit()
        rig.contract.check_commit(0)

        assert rig.contract.snapshot() == before
        assert events == []
        assert rig.contract.commit_epoch() == 1

    @pytest.mark.parametrize("epoch", [None, 0, 7])
    def test_the_answer_is_what_the_commit_would_say(self, epoch: int | None) -> None:
        """The clause, what was found and what was expected are those of the commit itself."""
        rig = Rig(stage(microbatches=1), stage(1, microbatches=1))
        rig.microbatch(0)
        rig.finish()
        before = rig.contract.snapshot()
        records = []
        for call in (rig.contract.check_commit, rig.contract.commit_epoch):
            with pytest.raises(Refused) as refusal:
                call(epoch)
            records.append(refusal.value.record())

        assert records[0] == records[1]
        assert records[0].clause == ("epoch.wrong-epoch" if epoch == 7 else "epoch.not-final")
        assert rig.contract.snapshot() == before

    def test_a_checkpoint_can_be_asked_about_first(self) -> None:
        """A rank that could not save reports this before another rank has saved."""
        rig = Rig(stage(microbatches=1))
        rig.contract.check_checkpoint()
        ref = rig.forward(0)
        before = rig.contract.snapshot()
        with pytest.raises(Refused, match=r"persistence\.live-tape in checkpoint: found"):
            rig.contract.check_checkpoint()
        assert rig.contract.snapshot() == before
        rig.contract.drop(rig.key(0), ref)
        with pytest.raises(Refused, match=r"persistence\.device-work"):
            rig.contract.check_checkpoint()
