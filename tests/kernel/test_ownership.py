"""Ownership: one key has one slot and one generation; every consumer runs once and in order."""

from __future__ import annotations

import pytest
from attrs import evolve

from qeffect import TapeKey, TapeRef
from qeffect.relations.constants import GENERATION_MAX

from .helpers import MATRICES, Rig, refused, refused_evidence, stage


def require_not_repeated(rig: Rig) -> None:
    """Microbatch 0 gets neither a second F in this walk nor a slot for it."""
    with refused(
        rig,
        "ownership.repeated-forward",
        "microbatch 0 of stage 0 in epoch 0",
        "once per walk",
    ):
        rig.check_forward(0)
    with refused(rig, "ownership.repeated-forward"):
        rig.contract.reserve(rig.key(0))


class TestSlots:
    def test_slots_are_injective(self) -> None:
        """Two live keys are in two slots, and each reference names its own."""
        rig = Rig()
        first, second = rig.forward(0), rig.forward(1)

        assert first.slot != second.slot
        assert {rig.key(0): first, rig.key(1): second} == rig.contract.live()

    def test_an_occupied_slot_is_never_preempted(self) -> None:
        """An occupied slot is never preempted: with none free F is refused."""
        rig = Rig(stage(microbatches=3))
        rig.forward(0)
        rig.forward(1)

        with refused(
            rig,
            "ownership.pool-exhausted",
            "microbatch 2 of stage 0 in epoch 0",
            "a free slot of stage 0",
        ):
            rig.check_forward(2)

    def test_pool_exhausted_for_a_reservation(self) -> None:
        """A reservation takes a slot like a forward, so it needs a free one too."""
        rig = Rig(stage(slots=1))
        rig.forward(0)

        with refused(rig, "ownership.pool-exhausted", "microbatch 1 of stage 0 in epoch 0"):
            rig.contract.reserve(rig.key(1))

    def test_a_key_goes_into_a_slot_of_its_own_stage(self) -> None:
        """A key goes into a slot of its own stage."""
        rig = Rig(stage(0), stage(1))

        with refused(rig, "ownership.foreign-slot", "slot 2", "slot 2 belongs to stage 1"):
            rig.check_forward(0, slot=2)
        with refused(rig, "ownership.foreign-slot", "slot 0", "slot 0 belongs to stage 0"):
            rig.contract.reserve(rig.key(0, stage=1), slot=0)

    def test_a_slot_that_holds_a_tape_takes_no_other(self) -> None:
        """A slot that holds a tape takes no other; the message says whose it is."""
        rig = Rig()
        ref = rig.forward(0)

        with refused(
            rig,
            "ownership.slot-busy",
            "microbatch 1 of stage 0 in epoch 0",
            "holding microbatch 0 of stage 0 in epoch 0",
        ):
            rig.check_forward(1, slot=ref.slot)
        with refused(
            rig, "ownership.slot-busy", "microbatch 1 of stage 0 in epoch 0", "waits for dI and dW"
        ):
            rig.contract.reserve(rig.key(1), slot=ref.slot)

    def test_a_live_key_is_not_forwarded_again(self) -> None:
        """A live key is not forwarded again into another slot."""
        rig = Rig()
        ref = rig.forward(0)

        with refused(
            rig,
            "ownership.key-live",
            "microbatch 0 of stage 0 in epoch 0",
            f"this key has one in slot {ref.slot}",
        ):
            rig.check_forward(0)
        with refused(rig, "ownership.key-live", "microbatch 0 of stage 0 in epoch 0"):
            rig.contract.reserve(rig.key(0))

    def test_key_live_in_a_full_pool(self) -> None:
        """With no slot left the refusal of a live key names the slot where it lives."""
        rig = Rig(stage(slots=1))
        rig.forward(0)

        with refused(
            rig,
            "ownership.slot-busy",
            "microbatch 0 of stage 0 in epoch 0",
            "holding microbatch 0 of stage 0 in epoch 0",
        ):
            rig.check_forward(0)

    def test_a_key_is_forwarded_once_per_walk(self) -> None:
        """A key is forwarded once per walk, even if its tape was released or dropped."""
        rig = Rig()
        rig.microbatch(0)
        require_not_repeated(rig)

        other = rig.forward(1)
        rig.contract.drop(rig.key(1), other)
        with refused(rig, "ownership.repeated-forward", "microbatch 1 of stage 0 in epoch 0"):
            rig.check_forward(1)

    def test_an_aborted_forward_is_not_repeated(self) -> None:
        """A key whose F was aborted gets no slot and no second F in the same walk."""
        rig = Rig()
        rig.contract.abort(rig.check_forward(0))
        require_not_repeated(rig)

    def test_next_epoch_forwards_again(self) -> None:
        """The same cell is forwarded again under the next weights."""
        rig = Rig()
        rig.epoch()

        assert rig.forward(0).generation > 0


class TestReservation:
    def test_reserved_slot_is_used(self) -> None:
        """A reserved slot goes to the forward of its key, by default and when named."""
        for named in (False, True):
            rig = Rig()
            ref = rig.contract.reserve(rig.key(1))

            assert ref == rig.forward(1, slot=ref.slot if named else None)

    def test_reserved_slot_is_kept(self) -> None:
        """No other key takes a reserved slot, and no consumer visits it before its forward."""
        rig = Rig()
        ref = rig.contract.reserve(rig.key(1))
        with refused(
            rig,
            "ownership.slot-busy",
            "microbatch 0 of stage 0 in epoch 0",
            "waits for its forward",
        ):
            rig.check_forward(0, slot=ref.slot)
        rig.contract.bind(rig.key(1))
        with refused(rig, "ownership.not-forwarded", "microbatch 1 of stage 0 in epoch 0"):
            rig.contract.check_dgrad(rig.key(1), ref)
        with refused(rig, "ownership.not-forwarded", "microbatch 1 of stage 0 in epoch 0"):
            rig.contract.check_wgrad(rig.key(1), ref)
        with refused(rig, "ownership.no-such-reader"):
            rig.contract.read(rig.key(1), ref)
        with refused(rig, "ownership.no-such-reader"):
            rig.contract.finish_read(rig.key(1), ref)

    def test_reserved_key_keeps_its_slot(self) -> None:
        """A key that reserved one slot does not go into another."""
        rig = Rig()
        ref = rig.contract.reserve(rig.key(0))

        with refused(rig, "ownership.key-live"):
            rig.check_forward(0, slot=1 - ref.slot)

    def test_a_reservation_can_be_dropped(self) -> None:
        """A dropped reservation frees its slot; its reference is stale."""
        rig = Rig(stage(slots=1))
        ref = rig.contract.reserve(rig.key(0))
        rig.contract.drop(rig.key(0), ref)

        assert rig.forward(1).slot == ref.slot
        with refused(rig, "ownership.stale-reference"):
            rig.contract.drop(rig.key(0), ref)

    def test_a_caller_may_choose_the_slot(self) -> None:
        """A caller may choose the slot to reserve."""
        rig = Rig(stage(slots=4))

        assert rig.contract.reserve(rig.key(0), slot=2).slot == 2
        assert rig.forward(1, slot=0).slot == 0
        assert {0, 2} == {ref.slot for ref in rig.contract.live().values()}


class TestReferences:
    def test_after_release_every_reference_is_refused_everywhere(self) -> None:
        """After release every reference to the slot's tenant is refused, everywhere."""
        rig = Rig()
        ref = rig.microbatch(0)

        calls = (
            lambda: rig.contract.check_dgrad(rig.key(0), ref),
            lambda: rig.contract.check_wgrad(rig.key(0), ref),
            lambda: rig.contract.read(rig.key(0), ref),
            lambda: rig.contract.finish_read(rig.key(0), ref),
            lambda: rig.contract.drop(rig.key(0), ref),
        )
        for call in calls:
            with refused(rig, "ownership.stale-reference", str(ref), "free"):
                call()

    def test_stale_reference_to_a_reused_slot(self) -> None:
        """The slot's next tenant is not mistaken for the last: its generation has risen (ABA)."""
        rig = Rig(stage(slots=1))
        old = rig.microbatch(0)
        new = rig.forward(1)

        assert (old.slot, old.generation + 1) == (new.slot, new.generation)
        with refused(rig, "ownership.stale-reference", "generation 0", "generation 1 holding"):
            rig.check_wgrad(old, 0)

    def test_a_generation_that_was_never_issued_is_stale(self) -> None:
        """A generation that was never issued is as stale as a past one."""
        rig = Rig()
        ref = rig.forward(0)

        with refused(rig, "ownership.stale-reference", "generation 1", "generation 0"):
            rig.contract.drop(rig.key(0), evolve(ref, generation=1))

    def test_a_reference_of_another_contract_is_refused(self) -> None:
        """A reference that another contract issued is refused, whatever its slot."""
        rig, other = Rig(), Rig()
        rig.forward(0)
        foreign = other.forward(0)

        with refused(rig, "ownership.foreign-incarnation", f"{foreign.incarnation:016x}"):
            rig.contract.drop(rig.key(0), foreign)

    def test_a_reference_goes_with_the_key_it_was_issued_for(self) -> None:
        """A reference goes with the key it was issued for: dW's microbatch and slot agree."""
        rig = Rig()
        first, second = rig.forward(0), rig.forward(1)
        rig.dgrad(first, 0)
        rig.dgrad(second, 1)

        with refused(
            rig,
            "ownership.wrong-key",
            "microbatch 0 of stage 0 in epoch 0 in slot",
            "holding microbatch 1 of stage 0 in epoch 0",
        ):
            rig.contract.check_wgrad(rig.key(0), second)
        with refused(rig, "ownership.wrong-key"):
            rig.contract.check_dgrad(rig.key(1), first)
        with refused(rig, "ownership.wrong-key"):
            rig.contract.drop(evolve(rig.key(0), epoch=1), first)

    def test_another_block_is_another_key(self) -> None:
        """Blocks and invocations of one microbatch have tapes of their own."""
        rig = Rig(stage(blocks=2, invocations=2, slots=8, microbatches=1))
        refs = {
            (b, i): rig.contract.commit(
                rig.contract.check_forward(
                    rig.key(0, block=b, invocation=i), refresh=(b, i) == (0, 0)
                )
            )
            for b in (0, 1)
            for i in (0, 1)
        }

        assert len({ref.slot for ref in refs.values() if ref}) == 4
        with refused(rig, "ownership.wrong-key"):
            rig.contract.drop(rig.key(0, block=1), refs[0, 1])  # type: ignore[arg-type]


class TestConsumers:
    def test_dgrad_visits_a_tape_once(self) -> None:
        """dI visits a tape once."""
        rig = Rig()
        ref = rig.forward(0)
        rig.dgrad(ref, 0)

        with refused(
            rig, "ownership.duplicate-dgrad", "microbatch 0 of stage 0 in epoch 0", "waits for dW"
        ):
            rig.contract.check_dgrad(rig.key(0), ref)

    def test_wgrad_before_dgrad(self) -> None:
        """dW needs its own committed dI."""
        rig = Rig()
        ref = rig.forward(0)

        with refused(
            rig,
            "ownership.wgrad-before-dgrad",
            "microbatch 0 of stage 0 in epoch 0",
            "waits for dI and dW",
        ):
            rig.check_wgrad(ref, 0)

    def test_wgrad_visits_a_tape_once(self) -> None:
        """dW visits a tape once, also while a reader keeps it alive."""
        rig = Rig(stage(sends_output=True))
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        rig.wgrad(ref, 0)

        with refused(
            rig,
            "ownership.duplicate-wgrad",
            "microbatch 0 of stage 0 in epoch 0",
            "waits for output reader",
        ):
            rig.check_wgrad(ref, 0)

    @pytest.mark.parametrize("queued", [(), ("w0",), (*MATRICES, "w2"), ("w0", *MATRICES)])
    def test_work_not_queued(self, queued: tuple[str, ...]) -> None:
        """dI must have deferred work for every matrix; otherwise it failed, and is aborted."""
        rig = Rig()
        ticket = rig.check_dgrad(rig.forward(0), 0)

        refused_evidence(rig, "ownership.work-not-queued", ticket, queued)
        assert rig.contract.memory.poisoned == [1]

    @pytest.mark.parametrize("covered", [(), ("w1",), (*MATRICES, "w1"), ("w0", "x")])
    def test_wgrad_must_have_written_every_matrix_once(self, covered: tuple[str, ...]) -> None:
        """dW must have written every matrix exactly once; otherwise it failed, and is aborted."""
        rig = Rig()
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        ticket = rig.check_wgrad(ref, 0)

        refused_evidence(rig, "ownership.matrix-coverage", ticket, covered)
        assert rig.contract.memory.poisoned == [0]

    def test_evidence_in_any_order(self) -> None:
        """Evidence is a collection: its order does not matter, its counts do."""
        rig = Rig()
        ref = rig.forward(0)
        rig.contract.commit(rig.check_dgrad(ref, 0), ["w1", "w0"])
        rig.contract.commit(rig.check_wgrad(ref, 0), (name for name in reversed(MATRICES)))

        assert rig.contract.live() == {}

    def test_slot_is_free_after_its_last_consumer(self) -> None:
        """A tape leaves when dI, dW and every reader are done, in any order that is legal."""
        rig = Rig(stage(sends_output=True, sends_gradient=True))
        ref = rig.forward(0)
        rig.send(ref)
        rig.dgrad(ref, 0)
        rig.wgrad(ref, 0)
        assert rig.key(0) in rig.contract.live()

        rig.send(ref, gradient=True)
        assert rig.contract.live() == {}


class TestReaders:
    def test_no_such_reader(self) -> None:
        """Only configured readers read, each until it is done."""
        rig = Rig()
        ref = rig.forward(0)
        with refused(
            rig, "ownership.no-such-reader", "output reader of microbatch 0 of stage 0 in epoch 0"
        ):
            rig.contract.read(rig.key(0), ref)
        with refused(rig, "ownership.no-such-reader", "gradient reader"):
            rig.contract.finish_read(rig.key(0), ref, gradient=True)

        rig = Rig(stage(sends_output=True))
        ref = rig.forward(0)
        rig.send(ref)
        with refused(rig, "ownership.no-such-reader", "output reader"):
            rig.contract.finish_read(rig.key(0), ref)

    def test_read_before_dgrad(self) -> None:
        """Before dI an input gradient does not exist."""
        rig = Rig(stage(sends_gradient=True))
        ref = rig.forward(0)
        rig.contract.wait()

        with refused(
            rig, "ownership.read-before-dgrad", "microbatch 0 of stage 0 in epoch 0", "waits for dI"
        ):
            rig.contract.read(rig.key(0), ref, gradient=True)
        with refused(rig, "ownership.read-not-begun", "read of the input gradient"):
            rig.contract.finish_read(rig.key(0), ref, gradient=True)

    def test_a_read_ends_only_where_it_began(self) -> None:
        """A send that was reported and not posted frees nothing: its neighbour waits for it."""
        rig = Rig(stage(sends_output=True))
        ref = rig.forward(0)
        rig.contract.wait()
        with refused(
            rig, "ownership.read-not-begun", "microbatch 0 of stage 0", "under way in slot"
        ):
            rig.contract.finish_read(rig.key(0), ref)
        rig.contract.read(rig.key(0), ref)

        rig.contract.finish_read(rig.key(0), ref)
        with refused(rig, "ownership.no-such-reader"):
            rig.contract.finish_read(rig.key(0), ref)

    @pytest.mark.parametrize("gradient", [False, True])
    def test_a_second_read_of_the_same_is_refused_while_the_first_is_under_way(
        self, gradient: bool
    ) -> None:
        """The first reader's end would give the slot away under the second reader."""
        rig = Rig(
            stage(slots=1, sends_output=not gradient, sends_gradient=gradient),
            callers=("main", "wire"),
        )
        wire = rig.link(caller="wire")
        key, ref = rig.key(0), rig.forward(0)
        rig.dgrad(ref)
        for link in (0, wire):
            rig.contract.wait(link)
        rig.contract.read(key, ref, gradient=gradient)
        what = "input gradient" if gradient else "output"
        for link in (0, wire):
            with refused(
                rig,
                "ownership.read-duplicate",
                f"another read of the {what} of microbatch 0 of stage 0 in epoch 0",
                f"under way in slot 0: read of the {what}",
            ):
                rig.contract.read(key, ref, gradient=gradient, link=link)
        rig.wgrad(ref)
        rig.contract.finish_read(key, ref, gradient=gradient)
        rig.contract.join()

        rig.forward(1)

    def test_an_output_and_a_dgrad_are_read_at_once(self) -> None:
        """Two readers of two buffers are each waited for, so both may be under way."""
        rig = Rig(stage(sends_output=True, sends_gradient=True))
        ref = rig.forward(0)
        rig.dgrad(ref)
        rig.contract.wait()
        rig.contract.read(rig.key(0), ref)
        rig.contract.read(rig.key(0), ref, gradient=True)
        rig.wgrad(ref)
        rig.contract.finish_read(rig.key(0), ref)
        assert rig.contract.live() != {}

        rig.contract.finish_read(rig.key(0), ref, gradient=True)
        assert rig.contract.live() == {}


class TestInFlight:
    def test_dgrad_and_wgrad_of_one_tape(self) -> None:
        """While an action is in flight on a tape nothing else touches that tape."""
        rig = Rig(stage(sends_output=True))
        ref = rig.forward(0)
        rig.check_dgrad(ref, 0)
        calls = (
            lambda: rig.contract.check_dgrad(rig.key(0), ref),
            lambda: rig.contract.check_wgrad(rig.key(0), ref),
            lambda: rig.contract.drop(rig.key(0), ref),
            lambda: rig.contract.finish_read(rig.key(0), ref),
            lambda: rig.contract.read(rig.key(0), ref),
        )
        for call in calls:
            with refused(rig, "ownership.in-flight", f"in slot {ref.slot}", "ticket 2 is"):
                call()

    def test_forward_of_a_slot_in_flight(self) -> None:
        """A slot whose forward is in flight takes no other key."""
        rig = Rig()
        ticket = rig.check_forward(0)

        with refused(rig, "ownership.in-flight", f"in slot {ticket.slot}", "ticket 1 is"):
            rig.check_forward(1, slot=ticket.slot)

    def test_restore_waits_for_actions(self) -> None:
        """A restore is refused while an action is in flight."""
        rig = Rig()
        checkpoint = rig.contract.checkpoint()
        rig.check_forward(0)

        with refused(rig, "ownership.in-flight", "a restore", "0: 1"):
            rig.contract.restore(checkpoint)


class TestAbort:
    def test_release_bumps_the_generation(self) -> None:
        """Release, abort, drop and purge each raise the generation once, allocation never."""
        rig = Rig(stage(microbatches=4, slots=1))
        generations = [rig.forward(0).generation]
        rig.contract.purge(0)
        ref = rig.forward(1)
        generations.append(ref.generation)
        rig.contract.drop(rig.key(1), ref)
        rig.contract.abort(rig.check_forward(2))
        generations.append(rig.contract.memory.generation[0])

        assert [0, 1, 3] == generations

    def test_purge_aborts_every_live_tape_of_an_epoch(self) -> None:
        """Purge aborts every live tape of an epoch, reservations too, and counts them."""
        rig = Rig(stage(slots=3, microbatches=3))
        rig.forward(0)
        rig.forward(1)
        rig.contract.reserve(rig.key(2))

        assert rig.contract.purge(7) == 0
        assert rig.contract.purge(0) == 3
        assert rig.contract.live() == {}

    def test_purge_is_all_or_nothing(self) -> None:
        """A purge that one tape refuses drops none."""
        rig = Rig()
        rig.forward(0)
        rig.check_dgrad(rig.forward(1), 1)

        with refused(rig, "ownership.in-flight", "microbatch 1 of stage 0 in epoch 0"):
            rig.contract.purge(0)

    def test_dropped_slot_is_used_again(self) -> None:
        """A dropped tape's slot is free for another key."""
        rig = Rig(stage(slots=1))
        ref = rig.forward(0)
        rig.contract.drop(rig.key(0), ref)

        assert rig.forward(1) == TapeRef(0, 1, ref.incarnation)


class TestGenerations:
    def test_a_slot_at_the_maximum_is_retired(self) -> None:
        """At the maximum a slot is retired: F refuses it, so that a release cannot fail."""
        rig = Rig(stage(microbatches=4, slots=1), generation_max=2)
        rig.microbatch(0)
        rig.microbatch(1)

        with refused(rig, "ownership.generation-exhausted", "generation 2", "below 2"):
            rig.check_forward(2)
        with refused(rig, "ownership.generation-exhausted", "of slot 0"):
            rig.contract.reserve(rig.key(2))

    def test_other_slots_are_used_first(self) -> None:
        """One exhausted slot does not stop a stage that has others."""
        rig = Rig(stage(microbatches=4, slots=2), generation_max=2)
        for microbatch in range(4):
            rig.microbatch(microbatch)

        assert [2, 2] == rig.contract.memory.generation

    def test_at_64_bits(self) -> None:
        """The default counter ends at 2**64 - 1; the last generation still releases."""
        rig = Rig(stage(microbatches=3, slots=1))
        rig.contract.memory.generation[0] = GENERATION_MAX - 1

        ref = rig.microbatch(0)
        assert (1 << 64) - 2 == ref.generation
        with refused(rig, "ownership.generation-exhausted", str((1 << 64) - 1)):
            rig.check_forward(1)

    def test_a_restart_begins_again(self) -> None:
        """Generations are not persisted: a restore starts them at zero under a new incarnation."""
        rig = Rig(stage(microbatches=2, slots=1), generation_max=1)
        checkpoint = rig.contract.checkpoint()
        old = rig.microbatch(0)
        rig.contract.drain()
        rig.contract.restore(checkpoint)

        new = rig.forward(0)
        assert (old.slot, old.generation) == (new.slot, new.generation)
        assert old.incarnation != new.incarnation


class TestLiveTape:
    def test_commit_with_a_live_tape(self) -> None:
        """An epoch does not commit while a tape waits for a consumer, a reader included."""
        rig = Rig(stage(microbatches=1, sends_output=True))
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        rig.wgrad(ref, 0)
        rig.finish()

        with refused(rig, "ownership.live-tape", f"slots [{ref.slot}]"):
            rig.contract.commit_epoch()
        rig.send(ref)
        assert rig.contract.commit_epoch() == 1


def test_key_of_another_configuration() -> None:
    """A key that was never configured is refused by name."""
    rig = Rig()
    with refused(
        rig,
        "ownership.unknown-key",
        "microbatch 2 of stage 0 in epoch 0",
        "stage 0: 2 microbatches",
    ):
        rig.contract.check_forward(TapeKey(0, 0, 2))
