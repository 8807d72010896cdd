"""Passes (walks) with fewer microbatches than configured, such as the last batch of a data set."""

from __future__ import annotations

from typing import Any

import pytest

from qeffect import Contract, Destination, Refused, StageConfig

from .helpers import MATRICES, Rig, refused, stage


def rig(*stages: StageConfig, **options: Any) -> Rig:
    """A process of four microbatches, unless said otherwise."""
    return Rig(*(stages or [stage(microbatches=4)]), **options)


def run(rig: Rig, microbatches: int) -> None:
    """Run the first microbatches of every stage and finalize the stages."""
    for config in rig.contract.stages:
        for m in range(microbatches):
            rig.microbatch(m, config.stage)
    for config in rig.contract.stages:
        rig.finish(config.stage)


def apart(microbatch: int) -> list[Destination]:
    """A destination of each matrix for one microbatch alone."""
    offsets = {name: 4096 * (2 * microbatch + place) for place, name in enumerate(MATRICES)}
    return [
        Destination(name, microbatch, (4, 4), "float32", "cuda:0", address=at, nbytes=64)
        for name, at in offsets.items()
    ]


class TestShortWalk:
    """Fewer microbatches than configured."""

    def test_without_it_a_short_walk_is_refused(self) -> None:
        """The microbatches that the batch lacks count as missing."""
        short = rig()
        for m in range(3):
            short.microbatch(m)
        short.contract.wait()
        with refused(short, "order.incomplete"):
            short.contract.finalize(0)

    def test_the_epoch_commits_after_the_microbatches_that_are_left(self) -> None:
        """Three of four."""
        short = rig()
        short.contract.shorten_walk(3)
        run(short, 3)
        assert short.commit() == 1

    def test_the_next_epoch_takes_all(self) -> None:
        """Three microbatches are then too few."""
        short = rig()
        short.contract.shorten_walk(3)
        run(short, 3)
        short.commit()
        for m in range(3):
            short.microbatch(m)
        short.contract.wait()
        with refused(short, "order.incomplete"):
            short.contract.finalize(0)
        short.microbatch(3)
        short.finish()
        assert short.commit() == 2

    @pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
    def test_every_number(self, microbatches: int) -> None:
        """From one to all, over two stages that reduce their gradients."""
        short = rig(*(stage(s, microbatches=4, reduces=True) for s in (0, 1)))
        short.contract.shorten_walk(microbatches)
        run(short, microbatches)
        assert short.commit() == 1

    def test_blocks_and_invocations_of_a_microbatch(self) -> None:
        """All of them are left out."""
        heard: list[Any] = []
        short = rig(stage(microbatches=2, blocks=2, invocations=2))
        short.contract.observer = lambda name, given, _: heard.append((name, given[0].cell))
        short.contract.shorten_walk(1)
        assert heard == [("skip", (0, 1, b, i)) for b in (0, 1) for i in (0, 1)]

    @pytest.mark.parametrize("microbatches", [0, 5, -1])
    def test_a_number_out_of_range(self, microbatches: int) -> None:
        """No walk takes no microbatch, or more than configured."""
        with pytest.raises(ValueError, match="expected 1 to 4 microbatches"):
            rig().contract.shorten_walk(microbatches)

    @pytest.mark.parametrize("microbatches", [True, 2.0, "2", None])
    def test_what_is_not_a_number(self, microbatches: Any) -> None:
        """A count is an int."""
        with pytest.raises(TypeError, match="microbatches"):
            rig().contract.shorten_walk(microbatches)


class TestBeyond:
    """What a short walk must not do."""

    def test_a_forward_beyond(self) -> None:
        """It would add a gradient that the step's loss does not count."""
        short = rig()
        short.contract.shorten_walk(3)
        with refused(short, "ownership.skipped", expected="leaves out 1 key of stage 0"):
            short.forward(3)
        run(short, 3)
        with refused(short, "ownership.skipped"):
            short.check_forward(3)

    def test_a_reservation_beyond(self) -> None:
        """The message that it waits for never comes."""
        short = rig(stage(microbatches=4, receives_input=True))
        short.contract.shorten_walk(3)
        with refused(short, "ownership.skipped"):
            short.contract.reserve(short.key(3))

    @pytest.mark.parametrize("left", ["F", "dI", "dW"])
    def test_an_action_within_that_is_missing(self, left: str) -> None:
        """Neither the reduction nor the update begins before all of the walk's own."""
        short = rig(stage(microbatches=4, reduces=True))
        short.contract.shorten_walk(3)
        for m in (0, 1):
            short.microbatch(m)
        if left != "F":
            ref = short.forward(2)
        if left == "dW":
            short.dgrad(ref, 2)
        short.contract.wait()
        clause = "arena.incomplete" if left == "dW" else "order.incomplete"
        with refused(short, clause, "counting 1 key that the walk leaves out"):
            short.contract.finalize(0)
        with refused(short, "reduction.incomplete"):
            short.contract.start_reduction(0)
        live = "epoch.not-final" if left == "F" else "ownership.live-tape"
        with refused(short, live):
            short.contract.check_update()

    def test_a_second_declaration(self) -> None:
        """A walk is shortened once."""
        short = rig()
        short.contract.shorten_walk(3)
        with refused(short, "ownership.skipped"):
            short.contract.shorten_walk(2)
        run(short, 3)
        assert short.commit() == 1

    @pytest.mark.parametrize("microbatches", [2, 3])
    def test_in_mid_walk(self, microbatches: int) -> None:
        """What did not run is missing, not left out."""
        short = rig()
        short.contract.shorten_walk(3)
        short.microbatch(0)
        with refused(short, "ownership.walk-begun", "after 1 forward of the walk"):
            short.contract.shorten_walk(microbatches)

    def test_while_the_first_forward_is_in_flight(self) -> None:
        """The walk begins with the check of its first F, on any stage of the process."""
        short = rig(stage(0, microbatches=4), stage(1, microbatches=4))
        short.check_forward(0, 1)
        with refused(short, "ownership.walk-begun"):
            short.contract.shorten_walk(3)

    def test_before_the_walk_to_come(self) -> None:
        """The walk that is over still counts as the walk under way."""
        short = rig()
        run(short, 4)
        with refused(short, "ownership.walk-begun"):
            short.contract.shorten_walk(3)
        short.commit()
        short.contract.shorten_walk(3)

    def test_a_key_that_is_reserved(self) -> None:
        """Its tape would stay live."""
        short = rig(stage(microbatches=4, receives_input=True))
        short.contract.reserve(short.key(3))
        with refused(short, "ownership.key-live", "skip"):
            short.contract.shorten_walk(3)

    def test_a_key_of_another_epoch(self) -> None:
        """A key is left out of the epoch under way."""
        short = rig()
        with refused(short, "version.wrong-epoch"):
            short.contract.skip(short.key(3, epoch=1))

    def test_a_declared_order(self) -> None:
        """The order names all microbatches."""
        cells = [(0, m, 0, 0) for m in range(2)]
        order = {0: [(kind, cell) for cell in cells for kind in ("F", "dI")]}
        short = rig(stage(), declared=order)
        with refused(short, "order.declared"):
            short.contract.shorten_walk(1)

    def test_a_destination_for_each_microbatch(self) -> None:
        """That of a microbatch that is left out keeps the gradients of the epoch before."""
        places = [place for m in (0, 1) for place in apart(m)]
        short = rig(stage(destinations=places))
        with refused(short, "epoch.sole-writer"):
            short.contract.shorten_walk(1)

    def test_the_first_microbatch(self) -> None:
        """A walk of nothing leaves the gradients of the epoch before."""
        short = rig(stage(microbatches=1))
        with refused(short, "epoch.sole-writer"):
            short.contract.skip(short.key(0))

    def test_all_or_nothing(self) -> None:
        """If a stage refuses, none is shortened."""
        order = {"b": [(kind, (1, m, 0, 0)) for m in (0, 1) for kind in ("F", "dI")]}
        short = rig(stage(0), stage(1, domain="b"), declared=order)
        with refused(short, "order.declared"):
            short.contract.shorten_walk(1)
        run(short, 2)
        assert short.commit() == 1

    def test_a_checkpoint_before_the_first_forward(self) -> None:
        """A checkpoint does not keep what a walk leaves out."""
        short = rig()
        short.contract.shorten_walk(3)
        with refused(short, "persistence.mid-epoch"):
            short.contract.checkpoint()


class TestBeside:
    """Short walks beside other parts of a step."""

    def test_the_last_of_several_walks(self) -> None:
        """Gradients of six microbatches accumulate over a walk of four and one of two."""
        short = rig()
        run(short, 4)
        short.contract.next_walk()
        short.contract.shorten_walk(2)
        run(short, 2)
        assert short.commit() == 1

    def test_a_short_walk_before_a_whole_one(self) -> None:
        """The next walk takes what the former left out."""
        short = rig()
        short.contract.shorten_walk(2)
        run(short, 2)
        short.contract.next_walk()
        run(short, 4)
        assert short.commit() == 1

    def test_a_restore_forgets(self) -> None:
        """After a failure the epoch begins again, and is shortened again."""
        short = rig()
        start = short.contract.checkpoint()
        short.contract.shorten_walk(3)
        short.forward(0)
        short.contract.purge(0)
        short.contract.drain()
        short.contract.restore(start)
        short.contract.shorten_walk(2)
        run(short, 2)
        assert short.commit() == 1

    def test_stages_that_feed_each_other(self) -> None:
        """Messages within the process, of the microbatches that are left."""
        short = rig(
            stage(0, microbatches=3, slots=3, feeds=1),
            stage(1, microbatches=3, slots=3),
        )
        short.contract.shorten_walk(2)
        refs = [[short.forward(m, s) for m in (0, 1)] for s in (0, 1)]
        for s in (1, 0):
            for m in (0, 1):
                short.dgrad(refs[s][m], m, s)
                short.wgrad(refs[s][m], m, s)
        for s in (0, 1):
            short.finish(s)
        assert short.commit() == 1

    def test_one_stage_shortened_alone(self) -> None:
        """The stage that feeds it lacks the gradient."""
        short = rig(
            stage(0, microbatches=2, feeds=1),
            stage(1, microbatches=2),
        )
        short.contract.skip(short.key(1, 1))
        ref = short.forward(1, 0)
        short.contract.bind(short.key(1, 0))
        short.contract.wait(short.link(0))
        with refused(short, "ownership.gradient-not-made"):
            short.contract.check_dgrad(short.key(1, 0), ref, link=short.link(0))

    def test_tied_weights(self) -> None:
        """Both stages leave out the same microbatches; one alone leaves the other incomplete."""
        tied = {"microbatches": 2, "tied": ("w0",), "buffers": {"w0": "table"}}
        short = rig(stage(0, **tied), stage(1, **tied))
        short.contract.skip(short.key(1, 1))
        for s, m in ((0, 0), (0, 1), (1, 0)):
            short.microbatch(m, s)
        for s in (0, 1):
            short.finish(s)
        assert short.commit() == 1

    @pytest.mark.parametrize(
        "omit", [(), ("arena",), ("order",), ("version",), ("reduction",), ("completion",)]
    )
    def test_without_a_relation(self, omit: tuple[str, ...]) -> None:
        """What is left still knows which microbatches the walk takes."""
        contract = Contract([stage(microbatches=3)], omit=omit)
        contract.shorten_walk(2)
        with pytest.raises(Refused, match=r"^ownership\.skipped"):
            contract.check_forward(
                Rig.key(_Held(contract), 2),  # type: ignore[arg-type]
                refresh="version" not in omit,
            )

    def test_a_recorded_step(self) -> None:
        """Short steps recur as whole steps do; a short step does not recur as a whole step."""
        short = rig()

        def step(microbatches: int) -> None:
            if microbatches < 4:
                short.contract.shorten_walk(microbatches)
            run(short, microbatches)
            short.commit()

        step(4)
        recording = short.contract.record_step()
        step(3)
        recorded = recording.end()
        assert short.contract.check_step(recorded) is None
        short.contract.commit_step(recorded)
        assert short.contract.epoch == 3
        step(3)
        step(4)
        assert short.contract.check_step(recorded) is None
        short.contract.shorten_walk(3)
        assert short.contract.check_step(recorded) is not None

    def test_evaluations_and_refreshes_come_before(self) -> None:
        """Only an F of the walk is too early; its caches may be filled."""
        short = rig()
        ticket = short.contract.check_refresh(0)
        short.contract.commit(ticket)
        short.contract.shorten_walk(3)
        for m in range(3):
            ref = short.forward(m, refresh=False)
            short.dgrad(ref, m)
            short.wgrad(ref, m)
        short.finish()
        assert short.commit() == 1


class _Held:
    """A contract where a rig keeps it."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
