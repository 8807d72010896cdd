"""Version: every action sees the weights and the quantized weight cache of the epoch in its key."""

from __future__ import annotations

from attrs import evolve

from .helpers import Rig, refused, stage


class TestEpoch:
    def test_wrong_epoch_of_a_forward(self) -> None:
        """A key of a past or future epoch is refused, before anything is reserved."""
        rig = Rig(epoch=1)
        for epoch in (0, 2):
            key = evolve(rig.key(0), epoch=epoch)
            with refused(
                rig,
                "version.wrong-epoch",
                f"microbatch 0 of stage 0 in epoch {epoch}",
                "weight epoch 1",
            ):
                rig.contract.check_forward(key, refresh=True)
            with refused(
                rig,
                "version.wrong-epoch",
                f"microbatch 0 of stage 0 in epoch {epoch}",
                "weight epoch 1",
            ):
                rig.contract.reserve(key)
            with refused(
                rig,
                "version.wrong-epoch",
                f"microbatch 0 of stage 0 in epoch {epoch}",
                "weight epoch 1",
            ):
                rig.contract.bind(key)

    def test_a_past_key_that_was_forwarded(self) -> None:
        """A key that ran in its own epoch is refused; the message says the epoch is over."""
        rig = Rig()
        rig.epoch()

        with refused(
            rig,
            "version.wrong-epoch",
            "epoch 0",
            "epoch 1",
        ):
            rig.contract.check_forward(evolve(rig.key(0), epoch=0), refresh=True)

    def test_wrong_epoch_of_a_commit(self) -> None:
        """A commit names the epoch it ends; another one is refused."""
        rig = Rig(stage(microbatches=1))
        rig.microbatch(0)
        rig.finish()

        with refused(rig, "epoch.wrong-epoch", "epoch 1", "weight epochs [0]"):
            rig.contract.commit_epoch(1)
        assert rig.contract.commit_epoch(0) == 1

    def test_every_stage_advances_at_once(self) -> None:
        """Commit is atomic over the stages of a process, whatever their domains."""
        rig = Rig(stage(0), stage(1), stage(2, domain="b"))
        rig.epoch()

        assert [1, 1, 1] == rig.contract.memory.weight_epoch
        assert rig.contract.epoch == 1


class TestCache:
    def test_the_first_forward_refreshes(self) -> None:
        """With a stale cache F is refused unless it refreshes; afterwards it must not."""
        rig = Rig()
        with refused(rig, "version.stale-cache", "of no known epoch", "of epoch 0"):
            rig.check_forward(0, refresh=False)
        rig.forward(0, refresh=True)
        with refused(rig, "version.already-fresh", "refresh of stage 0", "already holds epoch 0"):
            rig.check_forward(1, refresh=True)

        assert rig.forward(1, refresh=False).slot == 1

    def test_stale_after_a_commit(self) -> None:
        """The optimizer's update makes every stage's cache stale."""
        rig = Rig(stage(0), stage(1))
        rig.epoch()
        for index in (0, 1):
            with refused(rig, "version.stale-cache", "of epoch 0", "of epoch 1"):
                rig.check_forward(0, index, refresh=False)

    def test_stale_after_a_restore(self) -> None:
        """A restart makes every cache stale, even at the same epoch in the same process."""
        rig = Rig()
        checkpoint = rig.contract.checkpoint()
        rig.contract.commit(rig.contract.check_refresh(0))
        rig.contract.drain()
        rig.contract.restore(checkpoint)

        with refused(rig, "version.stale-cache", "of no known epoch"):
            rig.check_forward(0, refresh=False)

    def test_refresh_as_an_action(self) -> None:
        """A refresh of its own makes the first forward an ordinary one."""
        rig = Rig()
        rig.contract.commit(rig.contract.check_refresh(0))

        assert rig.forward(0, refresh=False).slot == 0

    def test_a_fresh_cache_is_not_refreshed_again(self) -> None:
        """A fresh cache is not refreshed again."""
        rig = Rig()
        rig.contract.commit(rig.contract.check_refresh(0))

        with refused(rig, "version.already-fresh", "refresh of stage 0", "epoch 0"):
            rig.contract.check_refresh(0)

    def test_an_aborted_refresh_leaves_it_stale(self) -> None:
        """A failed refresh, alone or in an F, leaves the cache stale."""
        for own in (True, False):
            rig = Rig()
            rig.contract.abort(
                rig.contract.check_refresh(0) if own else rig.check_forward(0, refresh=True)
            )
            assert rig.contract.memory.cache_epoch == [-1]


class TestInvalidate:
    def test_before_the_first_forward(self) -> None:
        """A lost cache is refreshed again while the stage has no forward in the epoch."""
        rig = Rig()
        rig.contract.commit(rig.contract.check_refresh(0))
        rig.contract.invalidate(0)
        with refused(rig, "version.stale-cache"):
            rig.check_forward(0, refresh=False)

        rig.contract.commit(rig.contract.check_refresh(0))
        assert rig.forward(0, refresh=False).slot == 0

    def test_in_mid_epoch(self) -> None:
        """A cache lost in mid-epoch cannot be refreshed: microbatches would see two versions."""
        rig = Rig()
        ref = rig.forward(0)
        rig.contract.bind(rig.key(0))
        rig.contract.wait()
        rig.contract.invalidate(0)

        with refused(rig, "version.late-refresh", "after 1 forward", "first forward"):
            rig.contract.check_refresh(0)
        with refused(rig, "version.late-refresh", "after 1 forward"):
            rig.check_forward(1, refresh=True)
        with refused(
            rig, "version.stale-cache", "microbatch 0 of stage 0 in epoch 0", "of epoch 0"
        ):
            rig.contract.check_dgrad(rig.key(0), ref)

    def test_in_mid_epoch_it_spoils_the_epoch(self) -> None:
        """A loss is a fact: told while the cache is in use it is accepted; the epoch is lost."""
        rig = Rig(stage(microbatches=1))
        checkpoint = rig.contract.checkpoint()
        ref = rig.forward(0)
        rig.contract.invalidate(0)

        assert [rig.contract.epoch] == rig.contract.memory.spoiled
        with refused(rig, "arena.spoiled", "spoiled in epoch 0"):
            rig.contract.bind(rig.key(0))
        rig.contract.drop(rig.key(0), ref)
        rig.contract.drain()
        rig.contract.restore(checkpoint)
        assert 1 == rig.epoch()

    def test_under_the_last_dgrad(self) -> None:
        """The last dI may have read what was lost: its gradients do not count."""
        rig = Rig(stage(microbatches=1))
        ref = rig.forward(0)
        ticket = rig.check_dgrad(ref, 0)
        rig.contract.invalidate(0)
        rig.contract.commit(ticket, rig.matrices())

        with refused(rig, "arena.spoiled", "spoiled in epoch 0"):
            rig.check_wgrad(ref, 0)
        with refused(rig, "arena.spoiled"):
            rig.contract.finalize(0)

    def test_under_the_first_forward(self) -> None:
        """So may the first F, which is in flight."""
        rig = Rig()
        rig.contract.commit(rig.contract.check_refresh(0))
        ticket = rig.check_forward(0)
        rig.contract.invalidate(0)
        rig.contract.commit(ticket)

        assert [0] == rig.contract.memory.spoiled

    def test_after_the_last_dgrad(self) -> None:
        """No dW reads the cache: a loss after the last dI does not spoil the epoch."""
        rig = Rig(stage(microbatches=1))
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        rig.contract.invalidate(0)
        rig.wgrad(ref, 0)
        rig.finish()

        assert 1 == rig.commit()

    def test_of_another_stage(self) -> None:
        """Another stage of the domain, whose F are to come, refreshes its own cache again."""
        rig = Rig(stage(0, microbatches=1), stage(1, microbatches=1))
        ticket = rig.check_forward(0, 0)
        rig.contract.invalidate(1)
        rig.contract.commit(ticket)

        assert [-1, -1] == rig.contract.memory.spoiled
        assert 0 == rig.forward(0, 1, slot=2).generation

    def test_not_forgotten_by_a_forward_in_flight(self) -> None:
        """A forward that was checked before the loss does not make the cache fresh again."""
        rig = Rig()
        rig.forward(0)
        ticket = rig.check_forward(1)
        rig.contract.invalidate(0)
        rig.contract.commit(ticket)

        assert rig.contract.memory.cache_epoch == [-1]


class TestInFlight:
    def test_a_refresh_in_flight(self) -> None:
        """While a stage's cache is refreshed nothing else refreshes or invalidates it."""
        rig = Rig()
        checkpoint = rig.contract.checkpoint()
        rig.contract.check_refresh(0)

        with refused(rig, "version.in-flight", "refresh of stage 0", "0: 1"):
            rig.contract.check_refresh(0)
        with refused(rig, "version.in-flight", "F of microbatch 0 of stage 0 in epoch 0"):
            rig.check_forward(0, refresh=True)
        with refused(rig, "version.in-flight", "invalidate of stage 0"):
            rig.contract.invalidate(0)
        with refused(rig, "version.in-flight", "restore"):
            rig.contract.restore(checkpoint)

    def test_a_refreshing_forward_in_flight(self) -> None:
        """An F that refreshes reserves the cache likewise."""
        rig = Rig()
        rig.check_forward(0, refresh=True)

        with refused(rig, "version.in-flight", "refresh of stage 0", "0: 1"):
            rig.contract.check_refresh(0)
        with refused(rig, "version.in-flight"):
            rig.contract.invalidate(0)

    def test_no_commit_of_the_epoch(self) -> None:
        """Nothing commits while a cache is refreshed for weights that are about to change."""
        rig = Rig(stage(microbatches=1), omit={"order"})
        rig.microbatch(0)
        rig.finish()
        rig.contract.invalidate(0)
        rig.contract.check_refresh(0)

        with refused(rig, "version.in-flight", "update"):
            rig.contract.commit_epoch()


class TestInterrupted:
    def test_nothing_comes_between(self) -> None:
        """After a refresh the domain's next update is that stage's forward."""
        rig = Rig(stage(0), stage(1))
        ref = rig.forward(0, 0)
        rig.contract.bind(rig.key(0))
        rig.contract.wait()
        rig.contract.commit(rig.contract.check_refresh(1))

        with refused(rig, "version.refresh-interrupted", "stage 0", "first forward of stage 1"):
            rig.check_forward(1, 0)
        with refused(rig, "version.refresh-interrupted", "stage 0", "first forward of stage 1"):
            rig.contract.check_dgrad(rig.key(0), ref)
        rig.forward(0, 1)
        rig.dgrad(ref, 0)

    def test_not_even_another_refresh(self) -> None:
        """Refreshing all chunks first rolls the amax history of each under the other."""
        rig = Rig(stage(0), stage(1))
        rig.contract.commit(rig.contract.check_refresh(0))

        with refused(rig, "version.refresh-interrupted", "stage 1", "stage 0"):
            rig.contract.check_refresh(1)

    def test_a_wgrad_may(self) -> None:
        """dW touches no scaling state, so it may come between."""
        rig = Rig(stage(0), stage(1))
        ref = rig.forward(0, 0)
        rig.dgrad(ref, 0)
        rig.contract.commit(rig.contract.check_refresh(1))
        rig.wgrad(ref, 0)

        assert rig.forward(0, 1).slot == 2

    def test_another_domain_may(self) -> None:
        """Another domain's updates are not between."""
        rig = Rig(stage(0), stage(1, domain="b"))
        rig.contract.commit(rig.contract.check_refresh(0))

        assert rig.forward(0, 1).slot == 2


class TestTickets:
    def test_unknown_refresh_ticket(self) -> None:
        """A refresh is committed or aborted with its own ticket, once."""
        rig = Rig(stage(0), stage(1, domain="b"))
        ticket = rig.contract.check_refresh(0)
        other = rig.contract.check_refresh(1, rig.link(1))
        for wrong in (evolve(ticket, serial=9), evolve(other, slot=0)):
            with refused(rig, "version.unknown-ticket", f"ticket {wrong.serial}", "ticket 1"):
                rig.contract.commit(wrong)
            with refused(rig, "version.unknown-ticket", f"ticket {wrong.serial}"):
                rig.contract.abort(wrong)

        rig.contract.commit(ticket)
        with refused(rig, "version.unknown-ticket", "ticket 1", "no refresh in flight"):
            rig.contract.commit(ticket)

    def test_not_with_the_ticket_of_a_forward(self) -> None:
        """The ticket of an F that refreshes does not commit a refresh."""
        rig = Rig()
        ticket = rig.check_forward(0, refresh=True)

        with refused(rig, "version.unknown-ticket"):
            rig.contract.commit(evolve(ticket, action="refresh", slot=0))
