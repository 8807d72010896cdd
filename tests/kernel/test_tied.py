"""
Tied weights: two matrices write one gradient destination, in one stage, in two stages, or on two
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from attrs import evolve

from qeffect import Bucket, Contract, Destination, Refused, StageConfig
from qeffect.sharing import require_tied_ranks
from qeffect.spec.constants import ADDS, JOINS, OPENS, OVERWRITES

from .helpers import Rig, refused

_TIED: dict[str, Any] = {"tied": ("w",), "buffers": {"w": "table"}}


def _stage(index: int, **options: Any) -> StageConfig:
    """A stage with a matrix of its own and one that it shares."""
    given = {"microbatches": 2, "slots": 2, "matrices": ("v", "w"), **_TIED, **options}
    return StageConfig(index, **given)


def _apart(index: int, **options: Any) -> StageConfig:
    """The same with a destination for each microbatch, the shared ones at the same addresses."""
    size = 64
    own, shared = 4096 * (index + 1), 1 << 20
    destinations = [
        Destination(name, m, (4, 4), "float32", "cuda:0", at + size * m, size)
        for name, at in (("v", own), ("w", shared))
        for m in (0, 1)
    ]
    return _stage(index, destinations=destinations, **options)


MODES = pytest.mark.parametrize("stage", [_stage, _apart], ids=["accumulate", "per_microbatch"])


def _until_wgrad(rig: Rig) -> dict[tuple[int, int], Any]:
    """Run F and dI of both stages' microbatches."""
    refs = {(s, m): rig.forward(m, s) for s in (0, 1) for m in (0, 1)}
    for (s, m), ref in refs.items():
        rig.dgrad(ref, m, s)
    return refs


class TestTwoStages:
    @MODES
    @pytest.mark.parametrize("order", [*permutations([(0, 0), (0, 1), (1, 0), (1, 1)])])
    def test_any_order_has_one_first_writer(
        self, stage: Callable[[int], StageConfig], order: tuple[tuple[int, int], ...]
    ) -> None:
        """Whatever the order of dW, each shared buffer is overwritten once in an epoch, and every
        dW of both stages lands in it."""
        rig = Rig(stage(0), stage(1))
        for epoch in (1, 2):
            refs = _until_wgrad(rig)
            shared: list[int] = []
            own: list[int] = []
            for s, m in order:
                key = rig.key(m, s)
                shared += [m] if rig.contract.first_of_tied(key) else []
                own += [s] if rig.contract.first_writer(key) else []
                rig.wgrad(refs[s, m], m, s)
            assert sorted(shared) == ([order[0][1]] if stage is _stage else [0, 1])
            assert sorted(own) == ([0, 1] if stage is _stage else [0, 0, 1, 1])
            rig.finish(0)
            rig.finish(1)
            assert rig.commit() == epoch

    def test_a_second_overwrite_is_refused(self) -> None:
        """The second stage's first dW, which overwrites its own, must not erase the shared sum."""
        rig = Rig(_stage(0), _stage(1))
        refs = _until_wgrad(rig)
        rig.wgrad(refs[1, 0], 0, 1)

        with refused(rig, "arena.overwrite", "as the tied buffer's first write"):
            rig.check_wgrad(refs[0, 0], 0, 0, first=True, first_of_tied=True)

        rig.check_wgrad(refs[0, 0], 0, 0, first=True, first_of_tied=False)

    def test_adding_to_an_unopened_shared_buffer_is_refused(self) -> None:
        """The first dW of all must not add to the last epoch's shared gradient."""
        rig = Rig(_stage(0), _stage(1))
        refs = _until_wgrad(rig)

        with refused(rig, "arena.stale-accumulation", "the tied buffer"):
            rig.check_wgrad(refs[0, 0], 0, 0, first=True, first_of_tied=False)

    def test_an_own_buffer_is_told_apart(self) -> None:
        """An open shared buffer does not open the stage's own buffer, nor the reverse."""
        rig = Rig(_stage(0), _stage(1))
        refs = _until_wgrad(rig)
        rig.wgrad(refs[1, 0], 0, 1)

        with refused(rig, "arena.stale-accumulation", "was never overwritten"):
            rig.check_wgrad(refs[0, 0], 0, 0, first=False, first_of_tied=False)
        rig.wgrad(refs[0, 0], 0, 0)
        with refused(rig, "arena.overwrite", "as the buffer's first write"):
            rig.check_wgrad(refs[0, 1], 1, 0, first=True, first_of_tied=False)
        with refused(rig, "arena.overwrite", "as the tied buffer's first write"):
            rig.check_wgrad(refs[0, 1], 1, 0, first=False, first_of_tied=True)

    def test_both_stages_may_not_write_at_once(self) -> None:
        """While one stage's dW is in flight, the other's is refused; aborted or done, it is not."""
        for end in ("commit", "abort"):
            rig = Rig(_stage(0), _stage(1))
            refs = _until_wgrad(rig)
            ticket = rig.check_wgrad(refs[0, 0], 0, 0)

            with refused(rig, "arena.in-flight", "", f"ticket {ticket.serial} is"):
                rig.check_wgrad(refs[1, 0], 0, 1)
            if end == "commit":
                rig.contract.commit(ticket, ("v", "w"))
                rig.wgrad(refs[1, 0], 0, 1)
            else:
                rig.contract.abort(ticket)
                assert rig.contract.first_of_tied(rig.key(0, 1))
                rig.check_wgrad(refs[1, 0], 0, 1)

    @MODES
    def test_a_stage_is_final_after_its_sharer(self, stage: Callable[[int], StageConfig]) -> None:
        """A stage's gradients are not whole while the other's dW into them is to come, or not seen
        by the stream that reads them."""
        rig = Rig(stage(0), stage(1))
        refs = _until_wgrad(rig)
        for m in (0, 1):
            rig.wgrad(refs[0, m], m, 0)
        rig.wgrad(refs[1, 0], 0, 1)
        rig.contract.wait()

        with refused(rig, "arena.incomplete", "1 weight-gradient writes of stage 1", "2, one"):
            rig.contract.finalize(0)
        rig.wgrad(refs[1, 1], 1, 1)
        with refused(rig, "completion.graph-to-caller"):
            rig.contract.finalize(0)
        rig.contract.wait()
        rig.contract.finalize(0)

    def test_a_failed_sharer_spoils_what_is_shared(self) -> None:
        """A dW that failed half wrote the shared gradient: neither stage is final."""
        rig = Rig(_stage(0), _stage(1))
        refs = _until_wgrad(rig)
        rig.contract.abort(rig.check_wgrad(refs[1, 0], 0, 1))
        for m in (0, 1):
            rig.wgrad(refs[0, m], m, 0)
        rig.contract.wait()

        with refused(rig, "arena.spoiled", "stage 1, spoiled in epoch 0"):
            rig.contract.finalize(0)

    def test_without_sharing_a_dw_writes_one_buffer(self) -> None:
        """A stage that shares nothing can only add or overwrite; anything between is refused."""
        rig = Rig()
        ref = rig.forward(0)
        rig.dgrad(ref, 0)
        assert rig.contract.first_of_tied(rig.key(0))

        with refused(rig, "arena.stale-accumulation"):
            rig.check_wgrad(ref, 0, first=True, first_of_tied=False)
        with refused(rig, "arena.stale-accumulation"):
            rig.check_wgrad(ref, 0, first=False, first_of_tied=True)
        rig.check_wgrad(ref, 0, first_of_tied=True)

    def test_how_a_write_is_told(self) -> None:
        """The ways of writing reach the transition as numbers, the common two as ever."""
        told: list[int] = []

        def observe(name: str, arguments: tuple[Any, ...], _: Any) -> None:
            told.extend([arguments[4]] if name == "check_wgrad" else [])

        rig = Rig(_stage(0), _stage(1), observer=observe)
        refs = _until_wgrad(rig)
        for s, m in ((0, 0), (1, 0), (0, 1), (1, 1)):
            rig.wgrad(refs[s, m], m, s)

        assert told == [OVERWRITES, JOINS, ADDS, ADDS]
        assert (ADDS, OVERWRITES, JOINS, OPENS) == (0, 1, 2, 3)

    def test_the_bucket_leaves_after_both(self) -> None:
        """A bucket of a tied weight is reduced once, after the last dW of both stages."""
        buckets = {"reduces": True, "slots": 2}
        rig = Rig(
            *(
                _stage(s, buckets=(Bucket("tied", ("w",)), Bucket(f"own{s}", ("v",))), **buckets)
                for s in (0, 1)
            )
        )
        refs = _until_wgrad(rig)
        for s, m in ((0, 0), (0, 1), (1, 0)):
            rig.wgrad(refs[s, m], m, s)
        rig.contract.wait()

        with refused(rig, "reduction.incomplete"):
            rig.contract.start_reduction("tied")
        rig.wgrad(refs[1, 1], 1, 1)
        rig.contract.wait()
        rig.contract.start_reduction("tied")


class TestOneStage:
    def test_two_matrices_of_one_stage(self) -> None:
        """Two matrices of one stage are written by the same dW, which covers both."""
        place = {"shape": (4, 4), "address": 4096, "nbytes": 64}
        given = [Destination(name, **place) for name in ("v", "w")]
        both = {"tied": ("v", "w"), "buffers": {"v": "table", "w": "table"}}
        rig = Rig(_stage(0, destinations=given, **both))

        assert rig.contract.memory.shared_of == [0]
        assert rig.epoch() == 1

    def test_at_one_address_undeclared(self) -> None:
        """Without the declaration the same stage is refused, as it was before there was one."""
        place = {"shape": (4, 4), "address": 4096, "nbytes": 64}
        given = [Destination(name, **place) for name in ("v", "w")]

        with pytest.raises(Refused, match=r"arena\.overlapping-destinations"):
            Contract([_stage(0, destinations=given, tied=(), buffers={})])


class TestUndeclared:
    @pytest.mark.parametrize("tied", [(), ("w",)], ids=["neither", "one"])
    def test_two_stages_that_name_one_destination(self, tied: tuple[str, ...]) -> None:
        """Sharing that is not declared by both is refused by name, without any address."""
        with pytest.raises(
            Refused, match=r"'w' of stage 1, not declared tied, in 'table'"
        ) as caught:
            Contract([_stage(1, tied=()), _stage(0, tied=tied)])

        assert caught.value.clause == "arena.overlapping-destinations"

    def test_two_matrices_of_a_stage_that_name_one_destination(self) -> None:
        """In one stage as well."""
        with pytest.raises(Refused, match=r"arena\.overlapping-destinations"):
            Contract([_stage(0, tied=(), buffers={"v": "table", "w": "table"})])

    def test_a_name_of_its_own_is_no_sharing(self) -> None:
        """A destination may have a name that nobody else has."""
        assert Contract([_stage(0, tied=()), _stage(1, tied=(), buffers={"w": "other"})]).epoch == 0


class TestConfiguration:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"domain": 1}, "differ in domain"),
            ({"microbatches": 3}, "differ in microbatches"),
            ({"buffers": {}}, "must name matrices that are in buffers"),
            ({"buffers": {"u": "table"}}, "are not among"),
            ({"reduces": True}, "must be reduced in one bucket"),
        ],
    )
    def test_what_cannot_be_shared(self, changes: dict[str, Any], message: str) -> None:
        """What two stages cannot share is said when the contract is made."""
        with pytest.raises(ValueError, match=message):
            Contract([_stage(0), _stage(1, **changes)])

    def test_destinations_must_be_the_same(self) -> None:
        """Two descriptions of one destination must agree, address and microbatches included."""
        other = _apart(1)
        moved = [evolve(d, address=d.address + 4096) for d in other.destinations]

        for destinations in (moved, ()):
            with pytest.raises(ValueError, match="destinations differ; they must"):
                Contract([_apart(0), evolve(other, destinations=destinations)])

    def test_three_stages_do_not_share(self) -> None:
        """A destination has two sharers at most, and a stage one partner."""
        with pytest.raises(ValueError, match="expected at most one"):
            Contract([_stage(s) for s in range(3)])
        both = _stage(0, tied=("v", "w"), buffers={"v": "a", "w": "b"})
        others = [_stage(s, buffers={"w": name}) for s, name in ((1, "a"), (2, "b"))]
        with pytest.raises(ValueError, match="expected at most one"):
            Contract([both, *others])

    def test_what_is_left_out_cannot_be_asked_for(self) -> None:
        """Tied weights need the arena's ledger."""
        with pytest.raises(ValueError, match="tied needs the relation 'arena'"):
            Contract([_stage(0), _stage(1)], omit=("arena",))

    @pytest.mark.parametrize("buffers", ["table", [("w", 1)], 3, [("w", "a", "b")]])
    def test_names_are_names(self, buffers: Any) -> None:
        """Names are given by matrix."""
        with pytest.raises(TypeError, match="buffers must map matrices to names"):
            _stage(0, buffers=buffers)


class TestRanks:
    def _rank(self, stage: int, bucket: str = "tied", **options: Any) -> list[StageConfig]:
        buckets = (Bucket(bucket, ("w",)), Bucket(f"own{stage}", ("v",)))
        return [_stage(stage, reduces=True, buckets=buckets, **options)]

    def test_a_copy_on_each_rank(self) -> None:
        """A weight that is tied across ranks leaves each of them in the bucket of one name."""
        ranks = [self._rank(0), [StageConfig(1, microbatches=1, slots=1)], self._rank(2)]

        assert require_tied_ranks(ranks) == {"table": (0, 2)}
        for stages in ranks:
            assert Contract(stages).epoch == 0

    def test_no_way_to_the_other_rank(self) -> None:
        """A tied weight that is alone in its process needs a bucket that is named."""
        for options in ({}, {"reduces": True}):
            with pytest.raises(ValueError, match="be reduced in a bucket that both ranks name"):
                Contract([_stage(0, **options)])

    def test_two_buckets(self) -> None:
        """Two names of buckets are two reductions, and neither is over both copies."""
        with pytest.raises(ValueError, match=r"must be reduced in one bucket.*'other'"):
            require_tied_ranks([self._rank(0), self._rank(2, bucket="other")])

    def test_undeclared_on_one_rank(self) -> None:
        """A copy that its rank does not declare would miss the other's half of the gradient."""
        with pytest.raises(Refused, match=r"arena\.overlapping-destinations.*'w' of stage 2"):
            require_tied_ranks([self._rank(0), self._rank(2, tied=())])

    def test_tied_to_nothing(self) -> None:
        """A tied weight has a second matrix somewhere."""
        with pytest.raises(ValueError, match="no other matrix of any rank is"):
            require_tied_ranks([self._rank(0), self._rank(2, tied=(), buffers={})])
