"""
Several passes (walks) over all microbatches in one epoch: gradients accumulate until the update
after the last pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qeffect import Destination, StageConfig, TapeRef

from .helpers import Rig, refused, stage


def walked(*configs: StageConfig, **options: Any) -> Rig:
    """The first walk of an epoch, every stage final."""
    rig = Rig(*(configs or (stage(),)), **options)
    walk(rig)
    return rig


def walk(rig: Rig) -> dict[tuple[int, int], TapeRef]:
    """Run one walk over every stage, and finalize each; return the references by cell."""
    refs = {}
    for config in rig.contract.stages:
        for microbatch in range(config.microbatches):
            refs[config.stage, microbatch] = rig.microbatch(microbatch, config.stage)
    for config in rig.contract.stages:
        rig.contract.wait(rig.link(config.stage))
        rig.contract.finalize(config.stage, rig.link(config.stage))
    return refs


class TestAccumulation:
    """The same keys run again in one epoch."""

    def test_two_walks_are_one_step(self) -> None:
        """The second walk's dW add to the gradients of the first; one update ends both."""
        rig = walked()
        firsts: list[int] = []

        assert rig.contract.next_walk() == 1
        rig.contract.observer = lambda name, given, _: (
            firsts.append(given[-1]) if name == "check_wgrad" else None
        )
        walk(rig)

        assert rig.contract.epoch == 0
        assert [1, 1] == [int(first == 0) for first in firsts]  # ADDS is 0
        assert rig.commit() == 1

    def test_without_it_the_second_walk_is_refused(self) -> None:
        """The keys of an epoch are forwarded once in each walk."""
        rig = walked()
        with refused(rig, "ownership.repeated-forward"):
            rig.contract.check_forward(rig.key(0))

    def test_the_first_dw_of_a_later_walk_must_not_overwrite(self) -> None:
        """An overwriting graph would lose the gradients of every walk before."""
        rig = walked()
        rig.contract.next_walk()
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        with refused(rig, "arena.overwrite"):
            rig.contract.check_wgrad(rig.key(0), ref, first=True)

    def test_a_reference_of_an_earlier_walk_is_stale(self) -> None:
        """The key is the same; the generation of its slot is not."""
        rig = Rig(stage(microbatches=1, slots=1))
        (old,) = walk(rig).values()
        rig.contract.next_walk()
        new = rig.forward(0)

        rig.contract.bind(rig.key(0))
        rig.contract.wait()
        assert (old.slot, old.generation + 1) == (new.slot, new.generation)
        with refused(rig, "ownership.stale-reference"):
            rig.contract.check_dgrad(rig.key(0), old)

    def test_each_walk_binds_its_destinations(self) -> None:
        """A key that was bound for the first walk is bound again for the second."""
        rig = walked()
        rig.contract.next_walk()
        ref = rig.forward(0)
        rig.contract.wait()
        with refused(rig, "arena.unbound"):
            rig.contract.check_dgrad(rig.key(0), ref)

    def test_each_walk_keeps_the_declared_order(self) -> None:
        """The place in the order begins again with the walk; the token goes on."""
        cells = [(0, m, 0, 0) for m in (0, 1)]
        order = {0: [(kind, cell) for cell in cells for kind in ("F", "dI")]}
        rig = walked(declared=order)
        rig.contract.next_walk()

        assert rig.contract.token(0) == 4
        with refused(rig, "order.reordered"):
            rig.contract.check_forward(rig.key(1))
        walk(rig)
        assert rig.commit() == 1

    def test_scales_and_caches_stay(self) -> None:
        """A later walk reads the caches of the first; the epoch's weights have not changed."""
        rig = walked()
        rig.contract.next_walk()
        with refused(rig, "version.already-fresh"):
            rig.contract.check_refresh(0)

    def test_a_cache_lost_between_walks_spoils_the_epoch(self) -> None:
        """The walks of an epoch read one fill of the cache."""
        rig = walked()
        rig.contract.next_walk()
        rig.contract.invalidate(0)

        with refused(rig, "version.late-refresh"):
            rig.contract.check_refresh(0)
        with refused(rig, "order.incomplete"):
            rig.contract.finalize(0)
        assert rig.contract.memory.spoiled[0] == 0

    def test_each_walk_is_whole(self) -> None:
        """A walk that lacks a microbatch is neither followed by another nor committed."""
        rig = walked()
        rig.contract.next_walk()
        rig.microbatch(0)
        rig.contract.wait()
        with refused(rig, "order.incomplete"):
            rig.contract.finalize(0)
        with refused(rig, "epoch.not-final"):
            rig.contract.next_walk()
        with refused(rig, "epoch.not-final"):
            rig.contract.commit_epoch()

    def test_reductions_come_after_the_last_walk(self) -> None:
        """A reduction of the first walk's gradients would be added to by the second."""
        rig = walked(stage(reduces=True))
        rig.contract.start_reduction(0)
        with refused(rig, "reduction.begun", found="1 reduction", expected="no reduction"):
            rig.contract.next_walk()
        rig.contract.finish_reduction(0)
        with refused(rig, "reduction.begun"):
            rig.contract.next_walk()

        other = walked(stage(reduces=True))
        other.contract.next_walk()
        walk(other)
        other.contract.start_reduction(0)
        other.contract.finish_reduction(0)
        assert other.commit() == 1

    def test_an_epoch_after_one_of_walks_begins_anew(self) -> None:
        """Its first dW overwrites, and a checkpoint may be taken before it."""
        rig = walked()
        rig.contract.next_walk()
        walk(rig)
        rig.commit()
        rig.contract.drain()
        assert rig.contract.checkpoint().epoch == 1
        assert rig.epoch() == 2


class TestRefused:
    """Where the next walk must not begin, and what must not come between walks."""

    @pytest.mark.parametrize(
        ("clause", "before"),
        [
            ("epoch.not-final", lambda rig: rig.contract.next_walk()),
            ("epoch.in-flight", lambda rig: rig.contract.check_update()),
            ("epoch.half-updated", lambda rig: rig.contract.abort(rig.contract.check_update())),
        ],
    )
    def test_where_no_walk_may_begin(self, clause: str, before: Callable[[Rig], Any]) -> None:
        """Directly after another one, during an update, and after one that failed."""
        rig = walked()
        before(rig)
        with refused(rig, clause):
            rig.contract.next_walk()

    def test_a_reader_of_the_walk_ends_first(self) -> None:
        """A tape whose output is still to be read belongs to the walk that made it."""
        rig = Rig(stage(microbatches=1, sends_output=True))
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        rig.wgrad(ref, 0)
        rig.contract.wait()
        rig.contract.finalize(0)
        with refused(rig, "ownership.live-tape"):
            rig.contract.next_walk()
        rig.send(ref)
        assert rig.contract.next_walk() == 1

    def test_it_names_the_epoch(self) -> None:
        """A loop whose step counter differs from the epoch is refused."""
        rig = walked()
        with refused(rig, "epoch.wrong-epoch"):
            rig.contract.next_walk(1)
        with pytest.raises(TypeError, match="epoch"):
            rig.contract.next_walk("0")  # type: ignore[arg-type]

    @pytest.mark.parametrize("omit", [(), ("order",), ("version", "order", "arena")])
    def test_no_checkpoint_between_walks(self, omit: tuple[str, ...]) -> None:
        """The gradients of the first walk are not saved, whichever relations are left out."""
        rig = Rig(stage(microbatches=1), omit=set(omit))
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        rig.wgrad(ref, 0)
        rig.contract.wait()
        rig.contract.finalize(0)
        rig.contract.next_walk()
        rig.contract.drain()
        with refused(rig, "persistence.mid-epoch", found="1 earlier walk"):
            rig.contract.checkpoint()

    def test_a_restore_forgets_the_walks(self) -> None:
        """The epoch begins again with its first walk."""
        rig = walked()
        start = Rig(stage()).contract.checkpoint()
        rig.contract.next_walk()
        rig.contract.drain()
        rig.contract.restore(start)
        rig.contract.drain()
        assert rig.contract.checkpoint().epoch == 0
        assert rig.epoch() == 1


class TestAcross:
    """Walks beside the other parts of the contract."""

    def test_each_microbatch_has_its_own_destination(self) -> None:
        """Its second dW adds to its first."""
        apart = tuple(Destination("fc", m, address=1024 * m, nbytes=1024) for m in (0, 1))
        rig = walked(stage(matrices=("fc",), destinations=apart))
        rig.contract.next_walk()
        ref = rig.forward(1)
        rig.dgrad(ref, 1)
        with refused(rig, "arena.overwrite"):
            rig.contract.check_wgrad(rig.key(1), ref, first=True)
        rig.wgrad(ref, 1)

    def test_a_recorded_step_of_two_walks_recurs(self) -> None:
        """It is committed as one, and differs from a step of one walk."""
        rig = Rig(stage())

        def step() -> None:
            walk(rig)
            rig.contract.next_walk()
            walk(rig)
            rig.commit()

        step()
        recording = rig.contract.record_step()
        step()
        recorded = recording.end()
        tokens = rig.contract.token(0)

        rig.contract.commit_step(recorded)

        assert (3, tokens + 8) == (rig.contract.epoch, rig.contract.token(0))
        walk(rig)
        rig.contract.next_walk()
        with pytest.raises(ValueError, match=r"^commit_step: .* the recorded step expects 0"):
            rig.contract.commit_step(recorded)
