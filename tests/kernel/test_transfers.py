"""
Transfers: messages that arrive before their use, readers that keep their slot, and which stream
waits.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qeffect import TapeRef

from .helpers import Rig, refused, stage

BOTH = {"receives_input": True, "receives_gradient": True}


class TestReceives:
    def test_a_whole_microbatch_of_messages(self) -> None:
        """Input and gradient are received, output and input gradient sent; the slot comes free."""
        rig = Rig(stage(slots=1, sends_output=True, sends_gradient=True, **BOTH))
        for microbatch in (0, 1):
            rig.contract.wait()
            claimed = rig.contract.reserve(rig.key(microbatch))
            rig.receive(claimed, microbatch)
            ref = rig.forward(microbatch)
            assert claimed == ref
            rig.send(ref, microbatch)
            rig.receive(ref, microbatch, gradient=True)
            rig.dgrad(ref, microbatch)
            rig.send(ref, microbatch, gradient=True)
            rig.wgrad(ref, microbatch)
        rig.finish()

        assert rig.contract.commit_epoch() == 1
        assert rig.contract.memory.arrived == [0]

    def test_no_forward_without_its_input(self) -> None:
        """F whose input was never received, into a fresh slot or a reserved one, is refused."""
        rig = Rig(stage(receives_input=True))
        rig.contract.commit(rig.contract.check_refresh(0))
        with refused(rig, "ownership.receive-missing", "no receive of the input posted"):
            rig.contract.check_forward(rig.key(0))
        rig.contract.reserve(rig.key(0))
        with refused(rig, "ownership.receive-missing", "F of microbatch 0 of stage 0"):
            rig.contract.check_forward(rig.key(0))

    def test_no_forward_before_its_input_is_there(self) -> None:
        """A receive that was posted is not yet an input."""
        rig = Rig(stage(receives_input=True))
        ref = rig.contract.reserve(rig.key(0))
        rig.contract.post_receive(rig.key(0), ref)
        with refused(rig, "ownership.transfer-in-flight", "during a receive of the input"):
            rig.check_forward(0)
        rig.contract.finish_receive(rig.key(0), ref)
        rig.contract.join()

        assert rig.forward(0) == ref

    def test_an_earlier_tenants_input_does_not_serve(self) -> None:
        """The next tape does not inherit what the slot's last tape received."""
        rig = Rig(stage(slots=1, receives_input=True))
        ref = rig.contract.reserve(rig.key(0))
        rig.receive(ref)
        rig.contract.drop(rig.key(0), ref)
        rig.contract.commit(rig.contract.check_refresh(0))

        with refused(rig, "ownership.receive-missing"):
            rig.contract.check_forward(rig.key(1))

    def test_no_dgrad_without_its_gradient(self) -> None:
        """dI waits for its output's gradient: for the receive to be posted, and to end."""
        rig = Rig(stage(receives_gradient=True))
        ref = rig.forward(0)
        with refused(rig, "ownership.receive-missing", "dI of microbatch 0 of stage 0"):
            rig.contract.check_dgrad(rig.key(0), ref)
        rig.contract.post_receive(rig.key(0), ref, gradient=True)
        with refused(rig, "ownership.transfer-in-flight", "during a receive of the output's"):
            rig.contract.check_dgrad(rig.key(0), ref)
        rig.contract.finish_receive(rig.key(0), ref, gradient=True)
        rig.contract.join()

        rig.dgrad(ref)

    def test_messages_that_nobody_configured(self) -> None:
        """A stage receives what it is configured to receive, and no more."""
        rig = Rig(stage(receives_gradient=True))
        ref = rig.contract.reserve(rig.key(0))
        with refused(rig, "ownership.no-such-receive", "receive of the input by stage 0"):
            rig.contract.post_receive(rig.key(0), ref)
        with refused(rig, "ownership.not-forwarded"):
            rig.contract.post_receive(rig.key(0), ref, gradient=True)

    def test_a_message_is_received_once(self) -> None:
        """Twice under way, twice in all, or after its use: each would overwrite what is read."""
        rig = Rig(stage(receives_input=True))
        ref = rig.contract.reserve(rig.key(0))
        rig.contract.post_receive(rig.key(0), ref)
        with refused(rig, "ownership.receive-duplicate", "another receive of the input"):
            rig.contract.post_receive(rig.key(0), ref)
        rig.contract.finish_receive(rig.key(0), ref)
        with refused(rig, "ownership.receive-duplicate", "", "arrived: receive of the input"):
            rig.contract.post_receive(rig.key(0), ref)
        rig.contract.join()
        rig.forward(0)
        with refused(rig, "ownership.receive-duplicate"):
            rig.contract.post_receive(rig.key(0), ref)

    def test_only_a_posted_receive_ends(self) -> None:
        """The end of a receive may be reported once, after the receive was posted."""
        rig = Rig(stage(receives_input=True))
        ref = rig.contract.reserve(rig.key(0))
        with refused(
            rig, "ownership.receive-not-posted", "microbatch 0 of stage 0", "under way in slot"
        ):
            rig.contract.finish_receive(rig.key(0), ref)
        rig.receive(ref)
        with refused(rig, "ownership.receive-not-posted"):
            rig.contract.finish_receive(rig.key(0), ref)


class TestAbortedTapes:
    @pytest.mark.parametrize("how", ["drop", "purge", "abort dI", "abort dW"])
    def test_a_slot_that_is_read_takes_no_tenant(self, how: str) -> None:
        """An aborted tape's slot is nobody's until the send that reads it has ended."""
        rig = Rig(stage(slots=1, sends_output=True))
        ref = rig.forward(0)
        rig.contract.wait()
        rig.contract.read(rig.key(0), ref)
        abort(rig, ref, how)
        assert rig.contract.live() == {}
        with refused(rig, "ownership.pool-exhausted"):
            rig.contract.reserve(rig.key(1))
        with refused(
            rig, "ownership.transfer-in-flight", "reserve of microbatch 1 of stage 0", "finished"
        ):
            rig.contract.reserve(rig.key(1), slot=0)
        if how != "abort dI":
            with refused(rig, "ownership.transfer-in-flight", "a read of the output"):
                rig.contract.check_forward(rig.key(1), slot=0)
        with refused(rig, "ownership.stale-reference"):
            rig.contract.drop(rig.key(0), ref)

        rig.contract.finish_read(rig.key(0), ref)
        with refused(rig, "ownership.stale-reference"):
            rig.contract.finish_read(rig.key(0), ref)
        rig.contract.wait()
        assert rig.contract.reserve(rig.key(1)).slot == ref.slot

    def test_a_posted_receive_keeps_its_slot(self) -> None:
        """The message of a dropped reservation arrives before the slot is given to another."""
        rig = Rig(stage(slots=1, receives_input=True))
        ref = rig.contract.reserve(rig.key(0))
        rig.contract.post_receive(rig.key(0), ref)
        rig.contract.drop(rig.key(0), ref)
        with refused(rig, "ownership.transfer-in-flight", "receive of the input"):
            rig.contract.reserve(rig.key(1), slot=0)

        rig.contract.finish_receive(rig.key(0), ref)
        assert rig.contract.memory.arrived == [0]
        again = rig.contract.reserve(rig.key(1))
        assert again == TapeRef(0, 1, rig.contract.incarnation)

    def test_another_key_does_not_end_it(self) -> None:
        """The end of a transfer is reported with the key and the reference with which the transfer
        began."""
        rig = Rig(stage(slots=1, sends_output=True))
        ref = rig.forward(0)
        rig.contract.wait()
        rig.contract.read(rig.key(0), ref)
        rig.contract.drop(rig.key(0), ref)
        with refused(rig, "ownership.wrong-key"):
            rig.contract.finish_read(rig.key(1), ref)
        with refused(rig, "ownership.stale-reference"):
            rig.contract.finish_read(rig.key(0), ref, gradient=True)

    def test_a_restore_waits_for_transfers(self) -> None:
        """A message under way is device work until the host has seen it end."""
        rig = Rig(stage(receives_input=True))
        start = rig.contract.checkpoint()
        ref = rig.contract.reserve(rig.key(0))
        rig.contract.post_receive(rig.key(0), ref)
        with refused(rig, "persistence.device-work"):
            rig.contract.restore(start)
        rig.contract.drain()
        rig.contract.restore(start)

        assert rig.contract.memory.moving == [0, 0]
        rig.contract.reserve(rig.key(0))


def abort(rig: Rig, ref: TapeRef, how: str) -> None:
    """End a tape whose output is being read."""
    if how == "purge":
        assert rig.contract.purge(0) == 1
    elif how == "drop":
        rig.contract.drop(rig.key(0), ref)
    elif how == "abort dI":
        rig.contract.abort(rig.check_dgrad(ref))
    else:
        rig.dgrad(ref)
        rig.contract.abort(rig.check_wgrad(ref))


class TestStreams:
    @pytest.mark.parametrize("how", ["dW", "drop", "abort dW"])
    def test_a_slot_is_filled_after_its_last_tenant(self, how: str) -> None:
        """Nobody fills a buffer that an enqueued replay may still read."""
        rig = Rig(stage(slots=1, receives_input=True), callers=("main", "wire"))
        wire = rig.link(caller="wire")
        ref = rig.contract.reserve(rig.key(0))
        rig.receive(ref)
        rig.forward(0)
        rig.contract.wait(wire)
        rig.dgrad(ref)
        if how == "drop":
            rig.contract.drop(rig.key(0), ref)
        elif how == "dW":
            rig.wgrad(ref)
        else:
            rig.contract.abort(rig.check_wgrad(ref))
        with refused(rig, "completion.slot-not-awaited", "waited up to replay"):
            rig.contract.reserve(rig.key(1), link=wire)
        rig.contract.wait()
        claimed = rig.contract.reserve(rig.key(1))
        with refused(rig, "completion.slot-not-awaited", "", "slot 0's last tape"):
            rig.contract.post_receive(rig.key(1), claimed, link=wire)
        rig.contract.wait(wire)
        rig.contract.post_receive(rig.key(1), claimed, link=wire)

    def test_the_end_of_a_read_is_work_that_the_next_forward_must_see(self) -> None:
        """F writes what a send read, so it comes after the send, told on whichever link."""
        rig = Rig(stage(slots=1, sends_output=True), callers=("main", "wire"))
        wire = rig.link(caller="wire")
        ref = rig.forward(0)
        rig.dgrad(ref)
        rig.wgrad(ref)
        rig.contract.wait(wire)
        rig.contract.read(rig.key(0), ref, link=wire)
        rig.contract.finish_read(rig.key(0), ref, link=wire)
        with refused(rig, "completion.transfer-to-graph", "was on link 1", "a join of link 1"):
            rig.contract.check_forward(rig.key(1))
        with refused(rig, "completion.caller-to-graph"):
            rig.contract.check_forward(rig.key(1), link=wire)
        rig.contract.join(wire)

        rig.forward(1)

    def test_the_end_of_a_receive_is_work_that_dgrad_must_see(self) -> None:
        """A gradient that arrived on another stream is not there before that stream is joined."""
        rig = Rig(stage(receives_gradient=True), callers=("main", "wire"))
        wire = rig.link(caller="wire")
        ref = rig.forward(0)
        rig.contract.post_receive(rig.key(0), ref, gradient=True, link=wire)
        rig.contract.finish_receive(rig.key(0), ref, gradient=True, link=wire)
        rig.contract.bind(rig.key(0))
        rig.contract.wait()
        with refused(rig, "completion.transfer-to-graph", "was on link 1"):
            rig.contract.check_dgrad(rig.key(0), ref)
        rig.contract.join(wire)

        rig.check_dgrad(ref)

    def test_a_reader_elsewhere_does_not_hold_up_dgrad(self) -> None:
        """dI of a stage that receives nothing reads no message and waits for none."""
        rig = Rig(stage(sends_output=True), callers=("main", "wire"))
        wire = rig.link(caller="wire")
        ref = rig.forward(0)
        rig.contract.wait(wire)
        rig.contract.read(rig.key(0), ref, link=wire)
        rig.contract.finish_read(rig.key(0), ref, link=wire)

        rig.dgrad(ref)

    def test_two_ends_on_two_streams(self) -> None:
        """The contract remembers one end of a slot, so the first is joined or on the same link."""
        rig = Rig(stage(sends_output=True, sends_gradient=True), callers=("main", "wire"))
        wire = rig.link(caller="wire")
        ref = rig.forward(0)
        rig.dgrad(ref)
        for link in (0, wire):
            rig.contract.wait(link)
        rig.contract.read(rig.key(0), ref, link=wire)
        rig.contract.read(rig.key(0), ref, gradient=True)
        rig.contract.finish_read(rig.key(0), ref, link=wire)
        with refused(
            rig, "completion.two-ends", "after an earlier end or copy on link 1", "a join of link 1"
        ):
            rig.contract.finish_read(rig.key(0), ref, gradient=True)
        rig.contract.join(wire)

        rig.contract.finish_read(rig.key(0), ref, gradient=True)

    @pytest.mark.parametrize(
        "call",
        [
            lambda rig, ref, link: rig.contract.reserve(rig.key(1), link=link),
            lambda rig, ref, link: rig.contract.post_receive(rig.key(0), ref, link=link),
            lambda rig, ref, link: rig.contract.finish_receive(rig.key(0), ref, link=link),
        ],
    )
    def test_a_link_of_another_domain(self, call: Callable[[Rig, TapeRef, int], object]) -> None:
        """A wait for another domain's graph stream does not count for this domain."""
        rig = Rig(stage(0, receives_input=True), stage(1, domain="other"))
        ref = rig.contract.reserve(rig.key(0))
        if "finish" in str(call.__code__.co_names):
            rig.contract.post_receive(rig.key(0), ref)

        with refused(rig, "completion.wrong-stream", "link 1 of domain 1"):
            call(rig, ref, rig.link(1))
