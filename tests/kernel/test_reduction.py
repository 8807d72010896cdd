"""
Reduction: each bucket is reduced once, after its last dW, in the declared order, between streams
that wait for each other.
"""

from __future__ import annotations

from typing import Any

import pytest

from qeffect import Bucket, Contract, StageConfig

from .helpers import Rig, refused, stage


def _whole(**options: Any) -> Rig:
    """A process whose one stage has all its gradients and is not final."""
    rig = Rig(stage(microbatches=1, reduces=True, **options))
    rig.microbatch(0)
    rig.contract.wait()
    return rig


def _final(**options: Any) -> Rig:
    """A process whose one stage is final and owes a reduction."""
    rig = _whole(**options)
    rig.contract.finalize(0)
    return rig


def _tied(**options: Any) -> Rig:
    """Two stages that share a bucket; one has another of its own."""
    return Rig(
        stage(
            0,
            microbatches=1,
            matrices=("w", "v"),
            reduces=True,
            buckets=(Bucket("tied", ("w",)), Bucket("own", ("v",))),
        ),
        stage(1, microbatches=1, matrices=("w",), reduces=True, buckets=(Bucket("tied", ("w",)),)),
        **options,
    )


class TestOneBucket:
    def test_finalize_reduce_commit_epoch_after_epoch(self) -> None:
        """Finalize, reduce, commit: epoch after epoch."""
        rig = Rig(stage(reduces=True), stage(1))

        assert [1, 2] == [rig.epoch(), rig.epoch()]

    def test_a_bucket_starts_at_its_last_dgrad_and_wgrad(self) -> None:
        """Gradients that are not whole are not reduced; finalize is not needed for it."""
        rig = Rig(stage(microbatches=2, reduces=True))
        rig.microbatch(0)
        ref = rig.forward(1)
        rig.dgrad(ref, 1)
        rig.contract.wait()

        with refused(rig, "reduction.incomplete", "1 weight gradients of stage 0", "2"):
            rig.contract.start_reduction(0)
        rig.wgrad(ref, 1)
        rig.contract.wait()
        rig.contract.start_reduction(0)
        rig.contract.finish_reduction(0)
        rig.contract.finalize(0)

        assert 1 == rig.contract.commit_epoch()

    def test_one_reduction_at_a_time(self) -> None:
        """One reduction of a bucket at a time, and none at the commit."""
        rig = _final()
        rig.contract.start_reduction(0)

        with refused(rig, "reduction.in-flight", "in flight: 0", "no reduction"):
            rig.contract.start_reduction(0)
        with refused(rig, "reduction.in-flight", "in flight: 0"):
            rig.contract.commit_epoch()

    def test_once_in_an_epoch(self) -> None:
        """A bucket is reduced once per epoch, and again in the next."""
        rig = _final()
        rig.contract.start_reduction(0)
        rig.contract.finish_reduction(0)

        with refused(rig, "reduction.duplicate", "bucket 0 of stage 0", "one reduction"):
            rig.contract.start_reduction(0)
        rig.commit()
        assert 2 == rig.epoch()

    @pytest.mark.parametrize("call", ["start_reduction", "finish_reduction", "fail_reduction"])
    @pytest.mark.parametrize("name", [1, "0", None, 0.0, True, [0]])
    def test_a_bucket_that_is_not_configured(self, call: str, name: Any) -> None:
        """A name that no bucket has is named with those that there are."""
        rig = Rig(stage(microbatches=1, reduces=True))
        before = rig.contract.snapshot()

        with pytest.raises(
            ValueError, match=rf"^{call}: no bucket .* is reduced; expected one of \[0\]"
        ):
            getattr(rig.contract, call)(name)
        assert before == rig.contract.snapshot()

    def test_a_stage_that_is_not_configured_to_reduce(self) -> None:
        """A stage that does not reduce has no bucket."""
        with pytest.raises(ValueError, match="no bucket 0 is reduced"):
            Rig(stage()).contract.start_reduction(0)

    @pytest.mark.parametrize("end", ["finish_reduction", "fail_reduction"])
    def test_only_a_reduction_in_flight_ends(self, end: str) -> None:
        """Only a reduction in flight finishes or fails."""
        rig = _final()

        with refused(rig, "reduction.not-started", "bucket 0 of stage 0", "in flight"):
            getattr(rig.contract, end)(0)

    def test_no_commit_before_every_bucket(self) -> None:
        """An epoch does not commit while a bucket is not reduced; the message names it."""
        rig = _tied()
        for index in (0, 1):
            rig.microbatch(0, index)
        for index in (0, 1):
            rig.contract.wait()
            rig.contract.finalize(index)
        rig.contract.start_reduction("tied")
        rig.contract.finish_reduction("tied")

        with refused(rig, "reduction.missing", "not yet reduced: 1", "every configured reduction"):
            rig.contract.commit_epoch()
        rig.contract.start_reduction("own")
        rig.contract.finish_reduction("own")
        assert 1 == rig.contract.commit_epoch()


class TestFailure:
    @pytest.mark.parametrize("final", [False, True])
    def test_a_failed_reduction(self, final: bool) -> None:
        """A failed one spoils the epoch: neither reduced again nor finalized nor committed."""
        rig = _final() if final else _whole()
        rig.contract.start_reduction(0)
        rig.contract.fail_reduction(0)

        with refused(rig, "reduction.spoiled", "stage 0, spoiled in epoch 0", "no action failed"):
            rig.contract.start_reduction(0)
        with refused(rig, "arena.spoiled", "spoiled in epoch 0"):
            rig.contract.finalize(0)
        with refused(rig, "epoch.not-final"):
            rig.contract.commit_epoch()

    def test_it_spoils_both_stages_of_a_bucket(self) -> None:
        """A failed reduction of a shared bucket spoils both stages, and a restore heals both."""
        rig = _tied()
        checkpoint = rig.contract.checkpoint()
        for index in (0, 1):
            rig.microbatch(0, index)
        rig.contract.wait()
        rig.contract.start_reduction("tied")
        rig.contract.fail_reduction("tied")

        for index in (0, 1):
            with refused(rig, "arena.spoiled", "spoiled in epoch 0"):
                rig.contract.finalize(index)
        rig.contract.drain()
        rig.contract.restore(checkpoint)
        for index in (0, 1):
            rig.microbatch(0, index)
        rig.contract.wait()
        rig.contract.start_reduction("tied")

    def test_no_checkpoint_or_restore(self) -> None:
        """A reduction in flight is live work: nothing is saved or restored under it."""
        rig = _final()
        checkpoint = Rig(stage(microbatches=1, reduces=True)).contract.checkpoint()
        rig.contract.start_reduction(0)
        with refused(rig, "persistence.device-work"):
            rig.contract.restore(checkpoint)
        rig.contract.drain()

        with refused(rig, "persistence.reduction-in-flight", "in flight: 0", "no reduction"):
            rig.contract.checkpoint()
        with refused(rig, "reduction.in-flight", "in flight: 0"):
            rig.contract.restore(checkpoint)

    def test_a_drop_meanwhile(self) -> None:
        """A tape that waits for a reader alone may be given up; the epoch is then spoiled."""
        rig = Rig(stage(microbatches=1, reduces=True, sends_output=True))
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        rig.wgrad(ref, 0)
        rig.contract.wait()
        rig.contract.finalize(0)
        rig.contract.start_reduction(0)
        rig.contract.drop(rig.key(0), ref)
        rig.contract.finish_reduction(0)

        with refused(rig, "epoch.not-final"):
            rig.contract.commit_epoch()

    def test_a_dropped_tape(self) -> None:
        """A tape given up after its dW spoils gradients that are whole by the count."""
        rig = Rig(stage(microbatches=1, reduces=True, sends_output=True))
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        rig.wgrad(ref, 0)
        rig.contract.wait()
        rig.contract.drop(rig.key(0), ref)

        with refused(rig, "reduction.spoiled"):
            rig.contract.start_reduction(0)


class TestStreams:
    def _rig(self) -> Rig:
        rig = Rig(stage(microbatches=1, reduces=True), callers=("main", "communication"))
        rig.microbatch(0)
        return rig

    def test_the_communication_stream_waits_for_the_last_wgrad(self) -> None:
        """That another stream waited does not order the communication stream behind the dW."""
        rig = self._rig()
        main, communication = rig.link(0), rig.link(0, "communication")
        rig.contract.wait(main)

        with refused(rig, "completion.graph-to-caller", "waited up to", "at or after replay 3"):
            rig.contract.start_reduction(0, communication)
        rig.contract.wait(communication)
        rig.contract.start_reduction(0, communication)

    def test_the_optimizers_stream_waits_for_the_reduction(self) -> None:
        """That the communication stream waited for it does not order the optimizer behind it."""
        rig = self._rig()
        main, communication = rig.link(0), rig.link(0, "communication")
        for link in (main, communication):
            rig.contract.wait(link)
        rig.contract.start_reduction(0, communication)
        rig.contract.finalize(0, main)

        with refused(rig, "completion.wrong-consumer", "link 1", "caller 0"):
            rig.contract.finish_reduction(0, communication)
        rig.contract.finish_reduction(0, main)
        assert 1 == rig.contract.commit_epoch()

    def test_it_may_be_named_by_the_reduction_first(self) -> None:
        """A reduction that ends before finalize names the optimizer's stream."""
        rig = self._rig()
        main, communication = rig.link(0), rig.link(0, "communication")
        for link in (main, communication):
            rig.contract.wait(link)
        rig.contract.start_reduction(0, communication)
        rig.contract.finish_reduction(0, communication)

        with refused(rig, "completion.wrong-consumer", "link 0", "caller 1"):
            rig.contract.finalize(0, main)
        rig.contract.finalize(0, communication)
        rig.commit("communication")
        assert 2 == rig.epoch()

    def test_by_default_it_is_the_stream_that_finalized(self) -> None:
        """Whoever finalized a stage waits for its reduction, where nothing else is said."""
        rig = self._rig()
        communication = rig.link(0, "communication")
        rig.contract.wait(communication)
        rig.contract.finalize(0, communication)
        rig.contract.start_reduction(0)
        rig.contract.finish_reduction(0)

        assert 1 == rig.contract.commit_epoch(caller="communication")

    @pytest.mark.parametrize("call", ["start_reduction", "finish_reduction"])
    def test_of_another_domain(self, call: str) -> None:
        """A link of another domain says nothing about this one's replays."""
        rig = Rig(
            stage(microbatches=1, reduces=True), stage(1, microbatches=1, domain=1, reduces=True)
        )
        rig.microbatch(0)
        rig.contract.wait()
        if call == "finish_reduction":
            rig.contract.start_reduction(0)

        with refused(rig, "completion.wrong-stream", "link 1 of domain 1", "a link of domain 0"):
            getattr(rig.contract, call)(0, rig.link(1))

    @pytest.mark.parametrize("call", ["start_reduction", "finish_reduction"])
    @pytest.mark.parametrize("wrong", [1, -1, 99])
    def test_a_link_that_is_not_configured(self, call: str, wrong: int) -> None:
        """A wrong link is named."""
        with pytest.raises(
            ValueError, match=f"^{call}: link {wrong} is not configured; links are 0 to 0$"
        ):
            getattr(_final().contract, call)(0, wrong)

    def test_a_reduction_is_device_work(self) -> None:
        """A drain before the reduction says nothing about it."""
        rig = _final()
        checkpoint = Rig(stage(microbatches=1, reduces=True)).contract.checkpoint()
        rig.contract.drain()
        rig.contract.start_reduction(0)
        rig.contract.finish_reduction(0)

        with refused(rig, "persistence.device-work"):
            rig.contract.restore(checkpoint)
        rig.contract.drain()
        rig.contract.restore(checkpoint)


class TestOrder:
    def test_out_of_the_declared_order(self) -> None:
        """A bucket that is whole waits for those declared before it."""
        rig = _tied(reductions=("tied", "own"))
        rig.microbatch(0, 0)
        rig.contract.wait()

        with refused(rig, "reduction.out-of-order", "at position 1", "at position 0"):
            rig.contract.start_reduction("own")
        rig.microbatch(0, 1)
        rig.contract.wait()
        rig.contract.start_reduction("tied")
        rig.contract.start_reduction("own")

    def test_every_epoch_begins_anew(self) -> None:
        """The declared order holds in each epoch, and after a restore."""
        rig = Rig(
            stage(0, microbatches=1, reduces=True),
            stage(1, microbatches=1, reduces=True),
            reductions=(0, 1),
        )

        assert [1, 2] == [rig.epoch(), rig.epoch()]
        rig.contract.drain()
        checkpoint = rig.contract.checkpoint()
        rig.microbatch(0, 0)
        rig.contract.wait()
        rig.contract.start_reduction(0)
        rig.contract.fail_reduction(0)
        rig.contract.drain()
        rig.contract.restore(checkpoint)
        assert 3 == rig.epoch()

    def test_without_a_declared_order_any_will_do(self) -> None:
        """Stages reduce in any order where none is declared."""
        rig = Rig(stage(0, microbatches=1, reduces=True), stage(1, microbatches=1, reduces=True))
        for index in (0, 1):
            rig.microbatch(0, index)
        rig.contract.wait()
        rig.contract.start_reduction(1)
        rig.contract.start_reduction(0)

    @pytest.mark.parametrize("order", [("own",), ("own", "own", "tied"), ("own", "tied", "x")])
    def test_an_order_names_every_bucket_once(self, order: tuple[str, ...]) -> None:
        """An order that leaves one out, or names one twice, is refused when it is declared."""
        with pytest.raises(ValueError, match="must name every bucket once"):
            _tied(reductions=order)


class TestTied:
    @pytest.mark.parametrize("first", [0, 1])
    def test_the_last_writer_of_both_stages_ends_it(self, first: int) -> None:
        """A shared bucket is whole after the last dW of both stages, whichever is last."""
        rig = _tied()
        rig.microbatch(0, first)
        rig.contract.wait()

        with refused(rig, "reduction.incomplete", f"0 weight gradients of stage {1 - first}"):
            rig.contract.start_reduction("tied")
        rig.microbatch(0, 1 - first)
        with refused(rig, "completion.graph-to-caller"):
            rig.contract.start_reduction("tied")
        rig.contract.wait()
        rig.contract.start_reduction("tied")

    def test_a_bucket_beside_it_need_not_wait(self) -> None:
        """A bucket of one stage alone starts while the other stage has not begun."""
        rig = _tied()
        rig.microbatch(0, 0)
        rig.contract.wait()
        rig.contract.start_reduction("own")

    def test_both_stages_name_one_reader(self) -> None:
        """The reader of a shared bucket is the stream that its stages named."""
        rig = _tied(callers=("main", "side"))
        for index in (0, 1):
            rig.microbatch(0, index)
        main, side = rig.link(0), rig.link(0, "side")
        for link in (main, side):
            rig.contract.wait(link)
        rig.contract.finalize(1, side)
        rig.contract.start_reduction("tied", main)

        with refused(rig, "completion.wrong-consumer", "link 0", "caller 1"):
            rig.contract.finish_reduction("tied", main)
        rig.contract.finish_reduction("tied", side)
        with refused(rig, "completion.wrong-consumer", "link 0", "caller 1"):
            rig.contract.finalize(0, main)

    @pytest.mark.parametrize(
        ("stages", "why"),
        [
            ([(0, 0, "b"), (1, 0, "b"), (2, 0, "b")], r"shared by the stages \[0, 1, 2\]"),
            ([(0, 0, "b"), (1, 1, "b")], "state domains differ"),
            ([(0, 0, "b"), (1, 0, None)], ""),
            ([(0, 0, 1), (1, 0, None)], "only one names it explicitly"),
        ],
    )
    def test_what_cannot_be_shared(self, stages: list[tuple[int, int, Any]], why: str) -> None:
        """Two stages of one domain share a bucket, where both name it."""
        configs = [
            StageConfig(
                index,
                1,
                1,
                domain=domain,
                matrices=("w",),
                reduces=True,
                buckets=() if name is None else (Bucket(name, ("w",)),),
            )
            for index, domain, name in stages
        ]
        if not why:
            assert Contract(configs).epoch == 0
            return
        with pytest.raises(ValueError, match=why):
            Contract(configs)


class TestConfiguration:
    @pytest.mark.parametrize(
        ("buckets", "why"),
        [
            ((Bucket("a", ("v",)),), "must hold each of its matrices once"),
            ((Bucket("a", ("v", "w")), Bucket("b", ("w",))), "must hold each of its matrices once"),
            ((Bucket("a", ("v", "w", "x")),), "must hold each of its matrices once"),
            ((Bucket("a", ("v",)), Bucket("a", ("w",))), "named once each"),
        ],
    )
    def test_every_matrix_is_in_one_bucket(self, buckets: Any, why: str) -> None:
        """Buckets hold each matrix of the stage once."""
        with pytest.raises(ValueError, match=why):
            StageConfig(0, 1, 1, matrices=("v", "w"), reduces=True, buckets=buckets)

    def test_buckets_without_a_reduction(self) -> None:
        """Buckets of a stage that does not reduce are a mistake."""
        with pytest.raises(ValueError, match="which need reduces=True"):
            StageConfig(0, 1, 1, matrices=("w",), buckets=(Bucket("a", ("w",)),))

    @pytest.mark.parametrize("name", [None, 1.5, True, ("a",)])
    def test_a_name_that_cannot_be_one(self, name: Any) -> None:
        """A bucket's name is a string or an integer."""
        with pytest.raises(TypeError, match="must be a string or an integer"):
            Bucket(name)

    def test_anything_but_a_bucket(self) -> None:
        """A value that is not a bucket is named as such."""
        with pytest.raises(TypeError, match="must be Bucket objects"):
            StageConfig(0, 1, 1, reduces=True, buckets=("a",))  # type: ignore[arg-type]

    def test_the_configuration_tells_them(self) -> None:
        """The description of a contract holds its buckets and their order."""
        plain = _tied(reductions=("tied", "own")).contract.configuration.plain()

        assert ["tied", "own"] == plain["reductions"]
        assert [{"name": "tied", "matrices": ["w"]}] == plain["stages"][1]["buckets"]
