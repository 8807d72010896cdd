"""
Reads of gradients on other streams start when gradients are final, and end before the next write.
"""

from __future__ import annotations

from typing import Any

import pytest

from .helpers import Rig, refused, stage


def final(*stages: Any, **options: Any) -> Rig:
    """Stages of one microbatch each, final and not reduced."""
    rig = Rig(*(stages or (stage(microbatches=1),)), callers=("main", "norm"), **options)
    for config in rig.contract.stages:
        rig.microbatch(0, config.stage)
    for config in rig.contract.stages:
        rig.contract.wait(rig.link(config.stage))
        rig.contract.finalize(config.stage, rig.link(config.stage))
    return rig


class TestWriters:
    """What writes gradients waits for their reader."""

    def test_an_update_may_scale_them_in_place(self) -> None:
        """A norm on another stream would read gradients that are clipped meanwhile."""
        rig = final()
        rig.contract.start_gradients_read(0)

        for call in (rig.contract.check_update, rig.contract.commit_epoch):
            with refused(rig, "completion.gradients-in-use", "stages 0", "graph streams"):
                call()
        rig.contract.finish_gradients_read(0)
        assert rig.contract.commit_epoch() == 1

    def test_the_next_walk_adds_to_them(self) -> None:
        """Its dW would write what the reader reads."""
        rig = final()
        rig.contract.start_gradients_read(0)

        with refused(rig, "completion.gradients-in-use", "next_walk"):
            rig.contract.next_walk()
        rig.contract.finish_gradients_read(0)
        rig.contract.next_walk()
        rig.microbatch(0)
        rig.finish()
        assert rig.contract.commit_epoch() == 1

    def test_readers_of_two_stages(self) -> None:
        """Each stage has its own."""
        rig = final(stage(0, microbatches=1), stage(1, domain="b", microbatches=1))
        for index in (0, 1):
            rig.contract.start_gradients_read(index, rig.link(index))
        rig.contract.finish_gradients_read(0, rig.link(0))

        with refused(rig, "completion.gradients-in-use", "stages 1"):
            rig.contract.check_update()
        rig.contract.finish_gradients_read(1, rig.link(1))
        assert rig.contract.commit_epoch() == 1

    def test_no_checkpoint_before_the_host_saw_its_end(self) -> None:
        """The read is device work, also behind the update."""
        rig = final()
        rig.contract.drain()
        rig.contract.start_gradients_read(0)
        assert rig.contract.memory.undrained == [1]

    def test_a_restore_forgets_it(self) -> None:
        """The host saw it finish."""
        rig = Rig(stage(microbatches=1))
        start = rig.contract.checkpoint()
        rig.microbatch(0)
        rig.finish()
        rig.contract.start_gradients_read(0)
        rig.contract.drain()
        rig.contract.restore(start)
        rig.contract.join()
        rig.microbatch(0)
        rig.finish()
        assert rig.contract.commit_epoch() == 1


class TestStart:
    """A reader starts behind the stream that waited for final gradients."""

    def test_before_the_stage_is_final(self) -> None:
        """A dW may still write."""
        rig = Rig(stage(microbatches=1))
        rig.microbatch(0)
        rig.contract.wait()
        with refused(rig, "epoch.not-final", "not final: 0", "the stage finalized in epoch 0"):
            rig.contract.start_gradients_read(0)

    def test_before_or_during_the_reduction(self) -> None:
        """The reduction would write what the reader reads."""
        rig = final(stage(microbatches=1, reduces=True))
        with refused(rig, "reduction.missing", "buckets not yet reduced: 0"):
            rig.contract.start_gradients_read(0)
        rig.contract.start_reduction(0)
        with refused(rig, "reduction.missing"):
            rig.contract.start_gradients_read(0)
        rig.contract.finish_reduction(0)
        rig.contract.start_gradients_read(0)

    def test_behind_a_stream_that_did_not_wait(self) -> None:
        """Another stream waited for the gradients."""
        rig = final()
        with refused(rig, "completion.wrong-consumer", "caller 1", "caller 0"):
            rig.contract.start_gradients_read(0, rig.link(0, "norm"))

    def test_during_an_update_and_over_half_of_one(self) -> None:
        """The update may be writing them."""
        rig = final()
        ticket = rig.contract.check_update()
        with refused(rig, "epoch.in-flight", "a read during the update"):
            rig.contract.start_gradients_read(0)
        rig.contract.abort(ticket)
        with refused(rig, "epoch.half-updated", "a read over half-updated weights"):
            rig.contract.start_gradients_read(0)

    def test_one_at_a_time(self) -> None:
        """A second reader waits for the end of the first."""
        rig = final()
        rig.contract.start_gradients_read(0)
        with refused(rig, "completion.second-reader", "gradients of stage 0"):
            rig.contract.start_gradients_read(0)

    def test_beside_a_reader_of_the_weights(self) -> None:
        """They read different memory."""
        rig = final()
        rig.contract.start_weights_read(0)
        rig.contract.start_gradients_read(0)
        rig.contract.finish_weights_read(0)
        rig.contract.finish_gradients_read(0)
        assert rig.contract.commit_epoch() == 1


class TestEnd:
    """The stream of the update waits for a reader that was started."""

    def test_on_another_stream(self) -> None:
        """The optimizer's stream did not wait."""
        rig = final()
        rig.contract.start_gradients_read(0)
        with refused(rig, "completion.wrong-consumer", "caller 1", "caller 0"):
            rig.contract.finish_gradients_read(0, rig.link(0, "norm"))

    def test_only_a_read_that_was_started_ends(self) -> None:
        """Nor does it end twice; a reader of the weights is another."""
        rig = final()
        rig.contract.start_weights_read(0)
        with refused(rig, "completion.not-reading", "gradients of stage 0", "stages none"):
            rig.contract.finish_gradients_read(0)
        rig.contract.start_gradients_read(0)
        rig.contract.finish_gradients_read(0)
        with refused(rig, "completion.not-reading"):
            rig.contract.finish_gradients_read(0)

    @pytest.mark.parametrize("call", ["start_gradients_read", "finish_gradients_read"])
    def test_a_link_of_another_domain(self, call: str) -> None:
        """The link's caller waited for another graph stream."""
        rig = final(stage(0, microbatches=1), stage(1, domain="b", microbatches=1))
        if call == "finish_gradients_read":
            rig.contract.start_gradients_read(1, rig.link(1))
        with refused(rig, "completion.wrong-stream"):
            getattr(rig.contract, call)(1, rig.link(0))

    @pytest.mark.parametrize("call", ["start_gradients_read", "finish_gradients_read"])
    @pytest.mark.parametrize("given", [(7,), (0, 9), (0, -1)])
    def test_stages_and_links_that_are_not_there(self, call: str, given: tuple[int, ...]) -> None:
        """Nothing changes."""
        rig = final()
        before = rig.contract.snapshot()
        with pytest.raises(ValueError, match=f"^{call}: "):
            getattr(rig.contract, call)(*given)
        assert before == rig.contract.snapshot()
