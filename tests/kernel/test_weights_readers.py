"""
Reads of the weights on other streams start after the latest update and end before the next update.
"""

from __future__ import annotations

from typing import Any

import pytest

from .helpers import Rig, refused, stage


def pair(**options: Any) -> Rig:
    """One stage of one microbatch, called from two streams."""
    return Rig(stage(microbatches=1), callers=("main", "save"), **options)


def whole(rig: Rig) -> None:
    """Run the epoch up to its update."""
    rig.contract.join()
    rig.microbatch()
    rig.finish()


class TestUpdate:
    """The update waits for every reader of the weights."""

    def test_a_save_still_reads(self) -> None:
        """The update would write the weights that an asynchronous save copies."""
        rig = pair()
        rig.contract.start_weights_read(0)
        whole(rig)

        for call in (rig.contract.check_update, rig.contract.commit_epoch):
            with refused(rig, "completion.weights-in-use", "stages 0"):
                call()
        rig.contract.finish_weights_read(0)
        assert rig.contract.commit_epoch() == 1

    def test_its_end_on_another_stream_is_refused(self) -> None:
        """The optimizer's stream did not wait for the reader."""
        rig = pair()
        rig.contract.start_weights_read(0)
        whole(rig)

        with refused(rig, "completion.wrong-consumer", "caller 1", "caller 0"):
            rig.contract.finish_weights_read(0, rig.link(0, "save"))

    def test_the_stream_of_its_end_runs_the_update(self) -> None:
        """Where the read ends first, another stream does not finalize."""
        rig = pair()
        rig.contract.start_weights_read(0)
        rig.contract.finish_weights_read(0, rig.link(0, "save"))
        rig.contract.join()
        rig.microbatch()
        rig.contract.wait()

        with refused(rig, "completion.wrong-consumer"):
            rig.contract.finalize(0)

    def test_actions_go_on_beside_it(self) -> None:
        """F, dI and dW read weights or write gradients: a reader does not disturb them."""
        rig = pair()
        rig.contract.start_weights_read(0)
        whole(rig)
        rig.contract.finish_weights_read(0)
        rig.contract.commit_epoch()
        rig.contract.join()
        rig.contract.check_refresh(0)

    def test_no_checkpoint_before_the_host_saw_its_end(self) -> None:
        """The read is device work."""
        rig = pair()
        rig.contract.checkpoint()
        rig.contract.start_weights_read(0)

        with refused(rig, "persistence.device-work"):
            rig.contract.checkpoint()
        rig.contract.drain()
        rig.contract.checkpoint()

    def test_a_restore_forgets_it(self) -> None:
        """The host saw it finish; the next update need not wait."""
        rig = pair()
        start = rig.contract.checkpoint()
        rig.contract.start_weights_read(0)
        rig.contract.drain()
        rig.contract.restore(start)
        whole(rig)
        assert rig.contract.commit_epoch() == 1


class TestStart:
    """A reader starts behind a stream that ran or awaited the latest update."""

    def test_behind_a_stream_that_did_not_wait(self) -> None:
        """The copy would hold weights of two epochs."""
        rig = pair()
        whole(rig)
        rig.contract.commit_epoch()
        save = rig.link(0, "save")

        with refused(rig, "completion.update-to-reader", "caller 1", "a join of link 0"):
            rig.contract.start_weights_read(0, save)
        rig.contract.wait(save)  # the graph stream itself has not waited yet
        with refused(rig, "completion.update-to-reader"):
            rig.contract.start_weights_read(0, save)
        rig.contract.join()
        rig.contract.wait(save)
        rig.contract.start_weights_read(0, save)

    def test_behind_the_streams_own_update(self) -> None:
        """The stream that ran the update needs no wait."""
        rig = pair()
        whole(rig)
        rig.contract.commit_epoch()
        rig.contract.start_weights_read(0)

    def test_after_the_host_saw_the_update_finish(self) -> None:
        """The stream still waits by its own call, as everywhere after a drain."""
        rig = pair()
        whole(rig)
        rig.contract.commit_epoch()
        rig.contract.drain()
        rig.contract.wait(rig.link(0, "save"))
        rig.contract.start_weights_read(0, rig.link(0, "save"))

    def test_a_wait_during_the_update_does_not_count(self) -> None:
        """Part of the update may be enqueued after it."""
        rig = pair()
        whole(rig)
        save = rig.link(0, "save")
        with rig.contract.update():
            rig.contract.join()
            rig.contract.wait(save)

        with refused(rig, "completion.update-to-reader"):
            rig.contract.start_weights_read(0, save)

    def test_not_during_an_update(self) -> None:
        """Not even on the update's own stream: the update is enqueued bit by bit."""
        rig = pair()
        whole(rig)
        ticket = rig.contract.check_update()

        with refused(rig, "epoch.in-flight", "a read during the update"):
            rig.contract.start_weights_read(0)
        rig.contract.abort(ticket)
        with refused(rig, "epoch.half-updated", "a read over half-updated weights"):
            rig.contract.start_weights_read(0)

    def test_one_at_a_time(self) -> None:
        """A second reader of the stage waits for the end of the first."""
        rig = pair()
        rig.contract.start_weights_read(0)

        with refused(rig, "completion.second-reader", "stage 0"):
            rig.contract.start_weights_read(0)

    def test_only_a_read_that_was_started_ends(self) -> None:
        """Nor does it end twice."""
        rig = pair()
        with refused(rig, "completion.not-reading", "stage 0", "under way: stages none"):
            rig.contract.finish_weights_read(0)
        rig.contract.start_weights_read(0)
        rig.contract.finish_weights_read(0)
        with refused(rig, "completion.not-reading"):
            rig.contract.finish_weights_read(0)

    @pytest.mark.parametrize("call", ["start_weights_read", "finish_weights_read"])
    def test_a_link_of_another_domain(self, call: str) -> None:
        """The link's caller waited for another graph stream."""
        rig = Rig(stage(0), stage(1, domain="b"))
        if call == "finish_weights_read":
            rig.contract.start_weights_read(1, rig.link(1))

        with refused(rig, "completion.wrong-stream"):
            getattr(rig.contract, call)(1, rig.link(0))

    @pytest.mark.parametrize("call", ["start_weights_read", "finish_weights_read"])
    @pytest.mark.parametrize("given", [(7,), (0, 9), (0, -1)])
    def test_stages_and_links_that_are_not_there(self, call: str, given: tuple[int, ...]) -> None:
        """Nothing changes."""
        rig = pair()
        before = rig.contract.snapshot()
        with pytest.raises(ValueError, match=f"^{call}: "):
            getattr(rig.contract, call)(*given)
        assert before == rig.contract.snapshot()
