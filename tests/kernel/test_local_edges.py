"""
Stages that feed other stages of the same process: F needs the F of its input first, and dI needs
the dI of the following stage first.
"""

from __future__ import annotations

from typing import Any

import pytest

from qeffect import Contract, Refused, TapeRef

from .helpers import Rig, refused, stage


def chunks(**options: Any) -> Rig:
    """Two chunks of one process; the first feeds the second."""
    return Rig(stage(0, **{"feeds": 1, **options}), stage(1))


def exchanging(**options: Any) -> Rig:
    """Two chunks of one process that exchange messages."""
    sends = {"sends_output": True, "receives_gradient": True, "slots": 1, "microbatches": 1}
    takes = {"receives_input": True, "sends_gradient": True, "slots": 1, "microbatches": 1}
    return Rig(stage(0, **{"feeds": 1, **sends, **options}), stage(1, **takes))


def prepared(rig: Rig, microbatch: int = 0) -> None:
    """Bind and wait for dI of the first chunk, so that only the edge can refuse it."""
    rig.contract.bind(rig.key(microbatch, 0))
    rig.contract.wait()


class TestTheGradientsSlot:
    """The second stage's slot holds the gradient that dI of the first stage reads."""

    def taken(self, **options: Any) -> Rig:
        """A gradient of microbatch 0 in the one slot of the second stage, its dW done."""
        rig = Rig(stage(0, feeds=1), stage(1, slots=1, **options))
        for index in (0, 1):
            self.ref = rig.forward(0, index)
        rig.dgrad(self.ref, 0, 1)
        rig.wgrad(self.ref, 0, 1)
        return rig

    def test_is_free_without_a_reader(self) -> None:
        """The caller has copied the gradient."""
        rig = self.taken()
        rig.forward(1, 0)
        rig.forward(1, 1)

    def test_is_held_for_a_declared_reader(self) -> None:
        """Until the read of the gradient has ended."""
        rig = self.taken(sends_gradient=True)
        rig.forward(1, 0)
        with refused(rig, "ownership.pool-exhausted"):
            rig.check_forward(1, 1)
        rig.send(self.ref, 0, 1, gradient=True)
        rig.forward(1, 1)


class TestTheWrongProgram:
    def test_is_accepted_without_the_declaration(self) -> None:
        """F of the consumer first, then dI in the direction of the forward: the epoch commits."""
        rig = chunks(feeds=None)
        for microbatch in (0, 1):
            taken = rig.forward(microbatch, 1)
            ref = rig.forward(microbatch, 0)
            rig.dgrad(ref, microbatch, 0)
            rig.dgrad(taken, microbatch, 1)
            rig.wgrad(ref, microbatch, 0)
            rig.wgrad(taken, microbatch, 1)
        rig.finish(0)
        rig.finish(1)

        assert rig.commit() == 1

    def test_of_forwards_is_refused_with_it(self) -> None:
        """The consumer would compute on another microbatch's output."""
        rig = chunks()
        rig.forward(0, 0)
        with refused(
            rig,
            "ownership.input-not-made",
            "F of microbatch 1 of stage 1 in epoch 0 before F of microbatch 1 of stage 0",
            "this key has no tape",
        ):
            rig.check_forward(1, 1)
        rig.forward(0, 1)

    def test_of_backwards_is_refused_with_it(self) -> None:
        """The source would take the gradient of another microbatch."""
        rig = chunks()
        ref, taken = rig.forward(0, 0), rig.forward(0, 1)
        prepared(rig)
        with refused(
            rig,
            "ownership.gradient-not-made",
            "before dI of microbatch 0 of stage 1",
            "which waits for dI and dW",
        ):
            rig.contract.check_dgrad(rig.key(0, 0), ref)
        rig.dgrad(taken, 0, 1)
        rig.dgrad(ref, 0, 0)

    def test_in_a_declared_order_is_refused_when_it_is_declared(self) -> None:
        """Before anything runs, with the first action that comes too early."""
        stages = [stage(s, microbatches=1, feeds=1 if s == 0 else None) for s in (0, 1)]
        cells = [(s, 0, 0, 0) for s in (0, 1)]
        wrong = {
            "ownership.input-not-made": [("F", 1), ("F", 0), ("dI", 1), ("dI", 0)],
            "ownership.gradient-not-made": [("F", 0), ("F", 1), ("dI", 0), ("dI", 1)],
        }
        for clause, order in wrong.items():
            declared = {0: [(kind, cells[s]) for kind, s in order]}
            with pytest.raises(Refused) as caught:
                Contract(stages, declared=declared)

            assert (caught.value.clause, caught.value.transition) == (clause, "configure")
            assert "in the declared order of domain 0" in str(caught.value.found)
        right = [("F", 0), ("F", 1), ("dI", 1), ("dI", 0)]
        declared = {0: [(kind, cells[s]) for kind, s in right]}
        Rig(*stages, declared=declared).forward(0, 0)


class TestTheInput:
    def test_is_not_there_while_its_forward_runs(self) -> None:
        """A check alone does not make an output."""
        rig = chunks()
        ticket = rig.check_forward(0, 0)
        with refused(rig, "ownership.input-not-made", "", "which waits for its forward"):
            rig.check_forward(0, 1)
        rig.contract.commit(ticket)
        rig.contract.commit(rig.contract.check_refresh(1))
        rig.forward(0, 1)

    def test_is_gone_with_its_tape(self) -> None:
        """The slot of a dropped tape may hold anything."""
        rig = chunks()
        ref = rig.forward(0, 0)
        rig.contract.drop(rig.key(0, 0), ref)
        with refused(rig, "ownership.input-not-made", "tape was lost", "stage 0 is spoiled"):
            rig.check_forward(0, 1)

    def test_of_the_last_epoch_does_not_serve(self) -> None:
        """Each epoch's F needs that epoch's input."""
        rig = chunks()
        for microbatch in (0, 1):
            both(rig, microbatch)
        rig.finish(0)
        rig.finish(1)
        rig.commit()
        with refused(rig, "ownership.input-not-made"):
            rig.check_forward(0, 1)


def both(rig: Rig, microbatch: int) -> tuple[TapeRef, TapeRef]:
    """Run a microbatch through two chunks and back."""
    ref, taken = rig.forward(microbatch, 0), rig.forward(microbatch, 1)
    rig.dgrad(taken, microbatch, 1)
    rig.wgrad(taken, microbatch, 1)
    rig.dgrad(ref, microbatch, 0)
    rig.wgrad(ref, microbatch, 0)
    return ref, taken


class TestTheGradient:
    def test_stays_made_after_the_targets_tape_is_done(self) -> None:
        """dW of the target may free its slot before dI of the source."""
        rig = chunks()
        both(rig, 0)
        both(rig, 1)
        rig.finish(0)
        rig.finish(1)

        assert rig.commit() == 1

    def test_is_not_made_while_its_dgrad_runs(self) -> None:
        """Neither a check alone nor an aborted dI makes a gradient."""
        rig = Rig(stage(0, feeds=1), stage(1), omit=("order", "completion"))
        ref, taken = rig.forward(0, 0), rig.forward(0, 1)
        ticket = rig.check_dgrad(taken, 0, 1)
        prepared(rig)
        with refused(rig, "ownership.gradient-not-made"):
            rig.contract.check_dgrad(rig.key(0, 0), ref)
        rig.contract.abort(ticket)
        with refused(rig, "ownership.gradient-not-made", "", "stage 1 is spoiled"):
            rig.contract.check_dgrad(rig.key(0, 0), ref)

    def test_of_a_forward_in_flight_is_not_made(self) -> None:
        """The target has not even run its F."""
        rig = Rig(stage(0, feeds=1), stage(1), omit=("order", "completion"))
        ref = rig.forward(0, 0)
        prepared(rig)
        with refused(rig, "ownership.gradient-not-made", "", "this key has no tape"):
            rig.contract.check_dgrad(rig.key(0, 0), ref)
        rig.check_forward(0, 1)
        with refused(rig, "ownership.gradient-not-made", "", "which waits for its forward"):
            rig.contract.check_dgrad(rig.key(0, 0), ref)


class TestMessages:
    def test_between_two_chunks_run_a_whole_epoch(self) -> None:
        """Each message arrives after its read began; the reads end when they like."""
        rig = exchanging()
        key, other = rig.key(0, 0), rig.key(0, 1)
        ref = rig.forward(0, 0)
        rig.contract.wait()
        rig.contract.read(key, ref)
        taken = rig.contract.reserve(other)
        rig.receive(taken, 0, 1)
        rig.forward(0, 1)
        rig.dgrad(taken, 0, 1)
        rig.contract.wait()
        rig.contract.read(other, taken, gradient=True)
        rig.wgrad(taken, 0, 1)
        rig.contract.finish_read(other, taken, gradient=True)
        rig.receive(ref, 0, 0, gradient=True)
        rig.dgrad(ref, 0, 0)
        rig.wgrad(ref, 0, 0)
        rig.contract.finish_read(key, ref)
        rig.finish(0)
        rig.finish(1)

        assert rig.commit() == 1

    def test_arrive_in_silence_without_the_declaration(self) -> None:
        """Without the declaration the contract trusts the reported receive, so F may run on a
        message that never came."""
        rig = exchanging(feeds=None)
        taken = rig.contract.reserve(rig.key(0, 1))
        rig.receive(taken, 0, 1)

        assert rig.forward(0, 1) == taken

    def test_do_not_arrive_before_their_read_began(self) -> None:
        """Before the source's F, while it runs, and after it."""
        rig = exchanging()
        other = rig.key(0, 1)
        taken = rig.contract.reserve(other)
        rig.contract.post_receive(other, taken)
        clause = "ownership.receive-before-read"
        with refused(rig, clause, "receive of the input", "a read of the output of microbatch 0"):
            rig.contract.finish_receive(other, taken)
        ticket = rig.check_forward(0, 0)
        with refused(rig, clause, "", "which waits for its forward"):
            rig.contract.finish_receive(other, taken)
        ref = rig.contract.commit(ticket)
        assert ref is not None
        with refused(rig, clause, "", "output reader"):
            rig.contract.finish_receive(other, taken)
        rig.contract.wait()
        rig.contract.read(rig.key(0, 0), ref)
        rig.contract.finish_receive(other, taken)

    def test_arrive_after_their_read_ended(self) -> None:
        """A read that is over has begun."""
        rig = exchanging()
        ref = rig.forward(0, 0)
        rig.send(ref, 0, 0)
        taken = rig.contract.reserve(rig.key(0, 1))
        rig.receive(taken, 0, 1)
        rig.forward(0, 1)

    def test_with_gradients_do_not_arrive_before_their_read_began(self) -> None:
        """Before the target's F and dI, and after them."""
        rig = exchanging()
        key, other = rig.key(0, 0), rig.key(0, 1)
        ref = rig.forward(0, 0)
        rig.send(ref, 0, 0)
        rig.contract.post_receive(key, ref, gradient=True)
        clause = "ownership.receive-before-read"
        with refused(rig, clause, "the output's gradient", "a read of the input gradient of"):
            rig.contract.finish_receive(key, ref, gradient=True)
        taken = rig.contract.reserve(other)
        rig.receive(taken, 0, 1)
        rig.forward(0, 1)
        rig.dgrad(taken, 0, 1)
        with refused(rig, clause, "", "gradient reader"):
            rig.contract.finish_receive(key, ref, gradient=True)
        rig.send(taken, 0, 1, gradient=True)
        rig.contract.finish_receive(key, ref, gradient=True)

    def test_that_can_no_longer_arrive_end(self) -> None:
        """The receive of a dropped tape frees its slot, whatever the other stage does."""
        rig = exchanging()
        other = rig.key(0, 1)
        taken = rig.contract.reserve(other)
        rig.contract.post_receive(other, taken)
        rig.contract.drop(other, taken)
        rig.contract.finish_receive(other, taken)

        assert rig.contract.memory.moving == [0, 0]


class TestTheDeclaration:
    @pytest.mark.parametrize(
        ("first", "second", "message"),
        [
            ({"feeds": 0}, {}, "stage 0 feeds stage 0; expected another stage"),
            ({"feeds": 7}, {}, "stage 0 feeds stage 7; expected another stage"),
            ({"feeds": 1}, {"feeds": 0}, "feed each other in a circle"),
            ({"feeds": 1}, {"microbatches": 3}, "both must have the same number of microbatches"),
            ({"feeds": 1, "blocks": 2}, {"blocks": 2}, "one block and one invocation"),
            ({"feeds": 1}, {"copies_input": True}, "a stage gets its input in one way only"),
            ({"feeds": 1}, {"receives_input": True}, "a message is received but not sent"),
            (
                {"feeds": 1, "receives_gradient": True},
                {},
                "set receives_gradient and sends_gradient",
            ),
            ({"feeds": 1}, {"domain": "b"}, "in another state domain"),
        ],
    )
    def test_that_cannot_run_is_refused(
        self, first: dict[str, Any], second: dict[str, Any], message: str
    ) -> None:
        """Each mistake is named when the contract is made."""
        with pytest.raises(ValueError, match=message):
            Contract([stage(0, **first), stage(1, **second)])

    def test_of_two_sources_is_refused(self) -> None:
        """A stage has one input."""
        with pytest.raises(ValueError, match="stages 0 and 2 both feed stage 1"):
            Contract([stage(0, feeds=1), stage(1), stage(2, feeds=1)])

    def test_is_a_stage_index(self) -> None:
        """A truthy value is not accepted as a stage."""
        with pytest.raises(TypeError, match="feeds must be an integer"):
            stage(feeds=True)

    def test_is_written_only_where_it_is_made(self) -> None:
        """Plain data of other stages stay as older versions wrote them, and are read back."""
        own = chunks().contract.configuration
        plain = own.plain()["stages"]

        assert ["feeds" in stage for stage in plain] == [True, False]
        assert type(own).read(own.plain()).stages == own.stages
