"""
Arena: each matrix gradient of each microbatch reaches its configured destination exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from qeffect import Destination, StageConfig

from .helpers import MATRICES, Rig, refused, stage

_SIZE = 64


def destination(matrix: str, microbatch: int | None, place: int, **changes: Any) -> Destination:
    """A destination at a place of its own."""
    given = {"address": 4096 + _SIZE * place, "nbytes": _SIZE, **changes}
    return Destination(matrix, microbatch, (4, 4), "float32", "cuda:0", **given)


def accumulating() -> StageConfig:
    """A stage with one destination for each matrix."""
    return stage(destinations=[destination(name, None, at) for at, name in enumerate(MATRICES)])


def apart() -> StageConfig:
    """A stage with a destination for each matrix of each microbatch."""
    return stage(
        destinations=[
            destination(name, m, 2 * m + at) for m in range(2) for at, name in enumerate(MATRICES)
        ]
    )


MODES = pytest.mark.parametrize("config", [accumulating, apart, stage], ids=lambda f: f.__name__)


class TestEpochs:
    @MODES
    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_any_order_of_wgrads(
        self, config: Callable[[], StageConfig], order: tuple[int, int]
    ) -> None:
        """Whatever the order of dW, every microbatch lands once, epoch after epoch."""
        rig = Rig(config())
        for epoch in (1, 2):
            refs = [rig.forward(0), rig.forward(1)]
            for microbatch in (0, 1):
                rig.dgrad(refs[microbatch], microbatch)
            for microbatch in order:
                rig.wgrad(refs[microbatch], microbatch)
            rig.finish()
            assert epoch == rig.commit()

    def test_one_buffer_has_one_first_writer_and_many_have_many(self) -> None:
        """One accumulating buffer has one first writer; microbatches of their own are all first."""
        for config, expected in ((accumulating(), [True, False]), (apart(), [True, True])):
            rig = Rig(config)
            found = []
            for microbatch in (0, 1):
                found.append(rig.contract.first_writer(rig.key(microbatch)))
                rig.microbatch(microbatch)
            assert expected == found


class TestBind:
    def test_dgrad_needs_bound_destinations(self) -> None:
        """dI needs bound destinations: TE reads main_grad there."""
        rig = Rig(accumulating())
        ref = rig.forward(0)
        rig.contract.wait()

        with refused(
            rig, "arena.unbound", "microbatch 0 of stage 0 in epoch 0 with no", "bound before dI"
        ):
            rig.contract.check_dgrad(rig.key(0), ref)

    def test_destinations_are_bound_once_per_walk(self) -> None:
        """A key's destinations are bound once per walk."""
        rig = Rig(accumulating())
        rig.contract.bind(rig.key(0))

        with refused(rig, "arena.duplicate-bind", "microbatch 0 of stage 0 in epoch 0", "one bind"):
            rig.contract.bind(rig.key(0))

    def test_bound_again_in_the_next_epoch(self) -> None:
        """A bind does not outlive its epoch."""
        rig = Rig(accumulating())
        rig.epoch()
        ref = rig.forward(0)
        rig.contract.wait()

        with refused(rig, "arena.unbound"):
            rig.contract.check_dgrad(rig.key(0), ref)

    def test_before_or_after_the_forward(self) -> None:
        """A bind may come any time before its dI."""
        rig = Rig(accumulating())
        rig.contract.bind(rig.key(0))
        ref = rig.forward(0)
        rig.contract.wait()

        assert rig.contract.check_dgrad(rig.key(0), ref).slot == ref.slot


_CHANGES = {
    "matrix": "other",
    "microbatch": 1,
    "shape": (2, 8),
    "dtype": "bfloat16",
    "device": "cuda:1",
    "address": 64,
    "nbytes": 32,
}


class TestMismatch:
    @pytest.mark.parametrize("name", sorted(_CHANGES))
    def test_each_field_that_differs_is_named_on_both_sides(self, name: str) -> None:
        """A binding that differs in one field is refused, and the field is named on both sides."""
        rig = Rig(apart())
        first, second = rig.contract.memory.destination_of[0, 0, 0, 0]
        wrong = (evolve(first, **{name: _CHANGES[name]}), second)
        value = hex(64) if name == "address" else str(_CHANGES[name])

        with refused(rig, "arena.mismatch", f"{name} {value}", f"w0 microbatch 0 {name}"):
            rig.contract.bind(rig.key(0), wrong)

    @pytest.mark.parametrize("name", sorted(_CHANGES))
    def test_at_the_wgrad(self, name: str) -> None:
        """dW is checked against the configuration again: an address may have moved."""
        rig = Rig(apart())
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        first, second = rig.contract.memory.destination_of[0, 0, 0, 0]
        wrong = (first, evolve(second, **{name: _CHANGES[name]}))

        with refused(rig, "arena.mismatch", f"w1 microbatch 0 {name}", f"w1 microbatch 0 {name}"):
            rig.contract.check_wgrad(rig.key(0), ref, destination=wrong)

    @pytest.mark.parametrize("wrong", [(), [1], "w0", 7])
    def test_anything_but_a_tuple_of_destinations_is_refused_in_words(self, wrong: Any) -> None:
        """Anything but a tuple of the configured destinations is refused with a clear message."""
        rig = Rig(apart())

        with refused(rig, "arena.mismatch", "", "2 destinations"):
            rig.contract.bind(rig.key(0), wrong)

    def test_another_microbatch_s(self) -> None:
        """The destinations of another microbatch are not this one's."""
        rig = Rig(apart())
        other = rig.contract.memory.destination_of[0, 1, 0, 0]

        with refused(rig, "arena.mismatch", "microbatch 1", "microbatch 0"):
            rig.contract.bind(rig.key(0), other)

    def test_the_configured_ones(self) -> None:
        """Equal destinations are accepted, even if they are other objects."""
        rig = Rig(apart())
        same = tuple(evolve(d) for d in rig.contract.memory.destination_of[0, 0, 0, 0])
        rig.contract.bind(rig.key(0), same)
        ref = rig.forward(0)
        rig.dgrad(ref, 0)

        assert rig.contract.check_wgrad(rig.key(0), ref, destination=same).slot == ref.slot


class TestWrites:
    def test_only_the_first_writer_of_an_epoch_overwrites(self) -> None:
        """Only the first writer of an epoch overwrites."""
        rig = Rig(accumulating())
        rig.microbatch(0)
        ref = rig.forward(1)
        rig.dgrad(ref, 1)

        with refused(
            rig, "arena.overwrite", "microbatch 1 of stage 0 in epoch 0", "accumulating write"
        ):
            rig.check_wgrad(ref, 1, first=True)
        assert rig.check_wgrad(ref, 1, first=False).slot == ref.slot

    def test_the_first_writer_does_not_accumulate(self) -> None:
        """The first writer does not accumulate onto the last epoch's gradient."""
        rig = Rig(accumulating())
        rig.epoch()
        ref = rig.forward(1)
        rig.dgrad(ref, 1)

        with refused(
            rig, "arena.stale-accumulation", "last overwritten in epoch 0", "overwriting first"
        ):
            rig.check_wgrad(ref, 1, first=False)
        assert rig.check_wgrad(ref, 1, first=True).slot == ref.slot

    def test_a_buffer_has_one_write_at_a_time(self) -> None:
        """One write of a buffer at a time."""
        rig = Rig(accumulating())
        refs = [rig.forward(0), rig.forward(1)]
        for microbatch in (0, 1):
            rig.dgrad(refs[microbatch], microbatch)
        rig.check_wgrad(refs[0], 0)

        with refused(rig, "arena.in-flight", "microbatch 1 of stage 0 in epoch 0", "ticket 5 is"):
            rig.check_wgrad(refs[1], 1)

    def test_own_buffers_are_apart(self) -> None:
        """Microbatches with destinations of their own are written side by side."""
        rig = Rig(apart())
        refs = [rig.forward(0), rig.forward(1)]
        for microbatch in (0, 1):
            rig.dgrad(refs[microbatch], microbatch)
        tickets = [rig.check_wgrad(refs[m], m) for m in (0, 1)]
        for ticket in tickets:
            rig.contract.commit(ticket, MATRICES)

        assert rig.contract.live() == {}


class TestUnusable:
    @MODES
    def test_after_an_aborted_write(self, config: Callable[[], StageConfig]) -> None:
        """A half-written destination spoils the stage's epoch until it is rebuilt."""
        rig = Rig(config())
        refs = [rig.forward(0), rig.forward(1)]
        rig.dgrad(refs[0], 0)
        rig.dgrad(refs[1], 1)
        rig.contract.abort(rig.check_wgrad(refs[0], 0))

        with refused(rig, "arena.spoiled", "stage 0, spoiled in epoch 0"):
            rig.check_wgrad(refs[1], 1)
        with refused(rig, "arena.spoiled", "stage 0, spoiled in epoch 0"):
            rig.contract.bind(rig.key(0))

    def test_a_half_written_arena_is_never_final(self) -> None:
        """An arena that a failed action half wrote is never final."""
        rig = Rig(stage(microbatches=1, sends_output=True))
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        rig.wgrad(ref, 0)
        rig.contract.drop(rig.key(0), ref)
        rig.contract.wait()

        with refused(rig, "arena.spoiled", "stage 0, spoiled in epoch 0"):
            rig.contract.finalize(0)

    def test_other_stages_go_on(self) -> None:
        """Another stage's arena stays usable, though the epoch cannot commit."""
        rig = Rig(stage(0), stage(1))
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        rig.contract.abort(rig.check_wgrad(ref, 0))

        rig.microbatch(0, 1)
        assert rig.contract.live() == {}

    def test_rebuilt_by_a_restore(self) -> None:
        """After a restore the arena is empty and usable."""
        rig = Rig(accumulating())
        checkpoint = rig.contract.checkpoint()
        rig.microbatch(0)
        ref = rig.forward(1)
        rig.dgrad(ref, 1)
        rig.contract.abort(rig.check_wgrad(ref, 1))
        rig.contract.drain()
        rig.contract.restore(checkpoint)

        assert rig.contract.first_writer(rig.key(0))
        assert rig.epoch() == 1


class TestIncomplete:
    @MODES
    def test_finalize_wants_every_microbatch_exactly_once(
        self, config: Callable[[], StageConfig]
    ) -> None:
        """Finalize wants every configured microbatch exactly once."""
        rig = Rig(config())
        rig.microbatch(0)
        rig.dgrad(rig.forward(1), 1)

        with refused(rig, "arena.incomplete", "1 weight-gradient writes", "2, one for every"):
            rig.contract.finalize(0)
