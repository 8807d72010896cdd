"""
Grouped dW: one product writes the gradients of several tapes, and counts as a dW of each tape.
"""

from __future__ import annotations

from typing import Any

import pytest

from qeffect import Contract, Destination, Refused, StageConfig, TapeKey, TapeRef
from qeffect.relations.constants import GROUP_BIT, WGRAD_BIT

from .helpers import refused

MATRICES = ("w",)


def contract(
    microbatches: int = 3, *, scales: str = "action", seen: list[Any] | None = None, **options: Any
) -> Contract:
    """One stage with a slot for each microbatch and one destination for all."""
    config = StageConfig(0, microbatches, microbatches, matrices=MATRICES, scales=scales)
    observer = None if seen is None else (lambda *event: seen.append(event))
    return Contract([config], observer=observer, **options)


def tapes(of: Contract, *microbatches: int) -> list[tuple[TapeKey, TapeRef]]:
    """F, bind and dI of each microbatch; the tapes then wait for dW."""
    made = []
    for microbatch in microbatches or range(of.stages[0].microbatches):
        key = TapeKey(of.epoch, 0, microbatch)
        stale = of.memory.cache_epoch[0] != of.epoch
        ref = of.commit(of.check_forward(key, refresh=stale))
        assert ref is not None
        made.append((key, ref))
        of.bind(key)
        of.wait()
        of.commit(of.check_dgrad(key, ref), MATRICES)
    return made


def finish(of: Contract) -> None:
    """Finalize the stage and run the update, in which scales move if they move once an epoch."""
    of.wait()
    of.finalize(0)
    with of.update() as block:
        if of.stages[0].scales == "epoch":
            block.move_scales(0)
    of.join()


@pytest.mark.parametrize("size", range(1, 6))
def test_one_product_counts_for_every_tape(size: int) -> None:
    """A group of any size, then one dW for each other tape: the walk is whole, twice."""
    of = contract(5, scales="epoch")
    for epoch in range(2):
        first, *others = tapes(of)
        with of.wgrad(*first, group=others[: size - 1]) as block:
            assert {key for key, _ in [first, *others]} == {*of.live()}
            block.covered = MATRICES
        assert of.memory.wgrads[0] == size
        assert {key for key, _ in others[size - 1 :]} == {*of.live()}
        for key, ref in others[size - 1 :]:
            of.commit(of.check_wgrad(key, ref), MATRICES)
        finish(of)
        assert of.epoch == epoch + 1


def test_it_is_one_write_of_the_buffer() -> None:
    """The first product of an epoch overwrites; a second product adds."""
    of = contract(4, scales="epoch")
    a, b, c, d = tapes(of)
    assert of.first_writer(a[0])
    of.commit(of.check_wgrad(*a, group=[b]), MATRICES)
    assert not of.first_writer(c[0])
    with refused(of, "arena.overwrite"):
        of.check_wgrad(*c, first=True, group=[d])
    of.commit(of.check_wgrad(*c, group=[d]), MATRICES)
    finish(of)


def test_without_scales_any_tapes_go_into_one_product() -> None:
    """A stage without scaling state groups dW too."""
    of = contract(omit=("order", "version"))
    made = []
    for microbatch in range(3):
        key = TapeKey(0, 0, microbatch)
        ref = of.commit(of.check_forward(key))
        assert ref is not None
        of.bind(key)
        of.wait()
        of.commit(of.check_dgrad(key, ref), MATRICES)
        made.append((key, ref))
    of.commit(of.check_wgrad(*made[2], group=made[:2]), MATRICES)
    assert not of.live()


class TestRefusals:
    def test_scales_that_move_with_every_forward(self) -> None:
        """Tapes of other scales are refused, and nothing is reserved."""
        of = contract()
        first, *others = tapes(of)
        with refused(of, "order.unequal-scales", "at token"):
            of.check_wgrad(*first, group=others)
        assert not of.outstanding()
        of.commit(of.check_wgrad(*first), MATRICES)

    def test_a_tape_twice(self) -> None:
        """The dW's own tape, and a tape that another entry names, are refused."""
        of = contract(scales="epoch")
        first, second, _ = tapes(of)
        with refused(of, "ownership.in-flight"):
            of.check_wgrad(*first, group=[first])
        with refused(of, "ownership.duplicate-wgrad"):
            of.check_wgrad(*first, group=[second, second])

    def test_a_tape_before_its_dgrad(self) -> None:
        """A tape whose dI has not run has no work for dW."""
        of = contract(scales="epoch")
        (first,) = tapes(of, 0)
        key = TapeKey(0, 0, 1)
        ref = of.commit(of.check_forward(key))
        assert ref is not None
        with refused(of, "ownership.wgrad-before-dgrad"):
            of.check_wgrad(*first, group=[(key, ref)])

    def test_destinations_of_their_own(self) -> None:
        """One product cannot write a buffer of each microbatch."""
        own = tuple(Destination("w", m, (2,), "bf16", "cpu", 64 * (m + 1), 4) for m in range(2))
        config = StageConfig(0, 2, 2, matrices=MATRICES, scales="epoch", destinations=own)
        of = Contract([config])
        first, second = tapes(of)
        with refused(of, "arena.other-destination", "group of ticket", "no dW in flight"):
            of.check_wgrad(*first, group=[second])

    def test_without_an_arena(self) -> None:
        """A stage that copies its gradients groups no dW."""
        of = contract(scales="epoch", omit=("arena",))
        first, second = [], []
        for microbatch, made in ((0, first), (1, second)):
            key = TapeKey(0, 0, microbatch)
            ref = of.commit(of.check_forward(key, refresh=microbatch == 0))
            of.wait()
            of.commit(of.check_dgrad(key, ref), MATRICES)
            made += [key, ref]
        with refused(of, "arena.left-out"):
            of.check_wgrad(*first, group=[tuple(second)])

    def test_a_grouped_tape_is_not_taken_again(self) -> None:
        """While a dW runs, no other dW takes the tapes of its group."""
        of = contract(scales="epoch")
        first, second, third = tapes(of)
        ticket = of.check_wgrad(*first, group=[second])
        with refused(of, "ownership.duplicate-wgrad"):
            of.check_wgrad(*second)
        with refused(of, "arena.in-flight"):
            of.check_wgrad(*third)
        of.commit(ticket, MATRICES)
        with refused(of, "ownership.stale-reference"):
            of.check_wgrad(*second)

    def test_a_part_ends_once(self) -> None:
        """A tape that no dW has taken has no part to end."""
        of = contract(scales="epoch")
        key, ref = tapes(of)[0]
        with pytest.raises(Refused, match=r"ownership\.not-grouped"):
            of.transitions.ungroup_wgrad(of.memory, key, ref, MATRICES)

    @pytest.mark.parametrize("group", [3, 0, None, "", "ab", [1], [(1, 2)], [("a", "b", "c")]])
    def test_a_group_that_is_none(self, group: Any) -> None:
        """The message says what a member is."""
        of = contract(scales="epoch")
        first, *_ = tapes(of)
        with pytest.raises(TypeError, match=r"check_wgrad: .*group"):
            of.check_wgrad(*first, group=group)
        assert not of.outstanding()


class TestFailures:
    def test_an_abort_loses_every_tape(self) -> None:
        """If the product fails, its tapes are gone, their slots free and the epoch spoiled."""
        of = contract(scales="epoch")
        first, *others = tapes(of)
        of.abort(of.check_wgrad(*first, group=others))
        assert not of.live()
        assert of.memory.moving == [0, 0, 0]
        assert of.memory.wgrads[0] == 0
        assert 3 == len(of._free[0])
        with refused(of, "arena.spoiled"):
            of.finalize(0)

    def test_wrong_evidence_loses_every_tape(self) -> None:
        """A product that did not write every matrix has failed."""
        of = contract(scales="epoch")
        first, *others = tapes(of)
        ticket = of.check_wgrad(*first, group=others)
        with pytest.raises(Refused, match=r"ownership\.matrix-coverage"):
            of.commit(ticket, ())
        assert not of.live()
        assert not of.outstanding()

    def test_a_spoiled_epoch_counts_no_member(self) -> None:
        """If another tape is lost while the product runs, its members are dropped."""
        of = contract(scales="epoch")
        first, second, third = tapes(of)
        ticket = of.check_wgrad(*first, group=[second])
        of.drop(*third)
        of.commit(ticket, MATRICES)
        assert not of.live()
        assert of.memory.wgrads[0] == 1

    def test_a_member_that_is_dropped_keeps_its_slot(self) -> None:
        """The slot of a dropped member stays reserved until the product has ended."""
        of = contract(scales="epoch")
        first, second, _ = tapes(of)
        ticket = of.check_wgrad(*first, group=[second])
        of.drop(*second)
        assert of.memory.moving[second[1].slot] == GROUP_BIT
        assert second[1].slot not in of._free[0]
        of.abort(ticket)
        assert second[1].slot in of._free[0]


def test_the_observer_hears_each_part() -> None:
    """The product's tapes come after its check and after its commit, in the order given."""
    seen: list[Any] = []
    of = contract(scales="epoch", seen=seen)
    first, second, third = tapes(of)
    seen.clear()
    ticket = of.check_wgrad(*first, group=[third, second])
    of.commit(ticket, MATRICES)
    names = [name for name, _, _ in seen]
    assert names == [
        "check_wgrad",
        *["group_wgrad"] * 2,
        "commit_wgrad",
        *["ungroup_wgrad"] * 2,
    ]
    assert [arguments[0] for name, arguments, _ in seen if "group" in name] == [
        *(third[0], second[0]),
        *(third[0], second[0]),
    ]
    leader, serial = first[1].slot, ticket.serial
    assert (leader, serial) == seen[1][1][2:4]


def test_readers_keep_a_tape_after_its_product() -> None:
    """A member that a reader still holds stays live, without its dW."""
    config = StageConfig(0, 2, 2, matrices=MATRICES, scales="epoch", sends_output=True)
    of = Contract([config])
    first, second = tapes(of)
    of.commit(of.check_wgrad(*first, group=[second]), MATRICES)
    assert [of.memory.consumers[s] & WGRAD_BIT for s in range(2)] == [0, 0]
    assert 2 == len(of.live())
    with refused(of, "ownership.duplicate-wgrad"):
        of.check_wgrad(*second)
