"""
Capture memory: graphs of one pool are replayed in the order of their capture, or it is refused.
"""

from __future__ import annotations

from itertools import permutations

import pytest

from .helpers import Rig, refused, stage

#: All F, then all dI, then all dW.
BY_KIND = tuple((0, slot, kind) for kind in ("F", "dI", "dW") for slot in range(2))
#: F, dI and dW of slot 0, then those of slot 1.
BY_SLOT = tuple((0, slot, kind) for slot in range(2) for kind in ("F", "dI", "dW"))


def _orders() -> list[tuple[tuple[int, str], ...]]:
    """Every order of two dI and two dW in which each dW follows its own dI."""
    actions = [(0, "dI"), (0, "dW"), (1, "dI"), (1, "dW")]
    return [
        order
        for order in permutations(actions)
        if all(order.index((m, "dI")) < order.index((m, "dW")) for m in (0, 1))
    ]


class TestOwnPools:
    @pytest.mark.parametrize("order", _orders())
    def test_ownership_is_enough(self, order: tuple[tuple[int, str], ...]) -> None:
        """With one pool per slot, every order that ownership allows is in capture order."""
        rig = Rig()
        refs = [rig.forward(0), rig.forward(1)]
        for microbatch, kind in order:
            {"dI": rig.dgrad, "dW": rig.wgrad}[kind](refs[microbatch], microbatch)
        rig.finish()

        assert rig.contract.commit_epoch() == 1


class TestSharedPool:
    def test_in_capture_order(self) -> None:
        """F0 F1 dI0 dI1 dW0 dW1 is the order of capture by kind."""
        rig = Rig(stage(pool="p"), capture_order=BY_KIND)
        refs = [rig.forward(0, slot=0), rig.forward(1, slot=1)]
        for microbatch in (0, 1):
            rig.dgrad(refs[microbatch], microbatch)
        for microbatch in (0, 1):
            rig.wgrad(refs[microbatch], microbatch)
        rig.finish()

        assert rig.contract.commit_epoch() == 1

    def test_an_earlier_forward_waits_while_a_tape_lives_in_the_pool(self) -> None:
        """While a tape lives in the pool an earlier F is not replayed."""
        rig = Rig(stage(pool="p"), capture_order=BY_KIND)
        rig.forward(0, slot=1)

        with refused(rig, "capture.out-of-order", "after the graph captured at place 1"):
            rig.check_forward(1, slot=0)

    def test_an_earlier_dgrad_is_refused_after_a_later_one(self) -> None:
        """F0 F1 dI1 dI0: the earlier dI would scratch on what the later one retains."""
        rig = Rig(stage(pool="p"))
        refs = [rig.forward(0, slot=0), rig.forward(1, slot=1)]
        rig.dgrad(refs[1], 1)
        rig.contract.bind(rig.key(0))
        rig.contract.wait()

        with refused(
            rig,
            "capture.out-of-order",
            "microbatch 0 of stage 0 in epoch 0 in slot 0, the graph captured at place 2, after",
            "replayed in the order of capture",
        ):
            rig.contract.check_dgrad(rig.key(0), refs[0])

    def test_an_earlier_wgrad_is_refused_after_a_later_one(self) -> None:
        """dW of an earlier graph is refused likewise."""
        rig = Rig(stage(pool="p"))
        refs = [rig.forward(0, slot=0), rig.forward(1, slot=1)]
        rig.dgrad(refs[0], 0)
        rig.dgrad(refs[1], 1)
        rig.wgrad(refs[1], 1)

        with refused(rig, "capture.out-of-order", "after the graph captured at place 5"):
            rig.check_wgrad(refs[0], 0)

    def test_slot_reuse_while_another_waits(self) -> None:
        """A slot is not reused while another slot's dW waits: its F was captured earlier."""
        rig = Rig(stage(pool="p", microbatches=3))
        refs = [rig.forward(0, slot=0), rig.forward(1, slot=1)]
        rig.dgrad(refs[0], 0)
        rig.dgrad(refs[1], 1)
        rig.wgrad(refs[0], 0)

        with refused(rig, "capture.out-of-order", "microbatch 2 of stage 0 in epoch 0 in slot 0"):
            rig.check_forward(2, slot=0)

    def test_begins_again_when_empty(self) -> None:
        """When no tape is left in the pool nothing is lost by beginning again."""
        rig = Rig(stage(pool="p"), capture_order=BY_SLOT)
        rig.microbatch(0)

        assert rig.forward(1, slot=0).generation == 1

    def test_captured_by_slot(self) -> None:
        """Captured slot by slot, a second live tape closes the pool to the first one's dI."""
        rig = Rig(stage(pool="p"), capture_order=BY_SLOT)
        refs = [rig.forward(0, slot=0), rig.forward(1, slot=1)]
        rig.contract.bind(rig.key(0))
        rig.contract.wait()

        with refused(rig, "capture.out-of-order", "after the graph captured at place 3"):
            rig.contract.check_dgrad(rig.key(0), refs[0])

    def test_a_reader_keeps_the_pool(self) -> None:
        """A tape that waits for its reader still keeps memory in the pool."""
        rig = Rig(stage(pool="p", sends_output=True), capture_order=BY_SLOT)
        ref = rig.forward(0, slot=0)
        rig.dgrad(ref, 0)
        rig.wgrad(ref, 0)
        assert rig.contract.memory.tenants == [1]

        rig.send(ref)
        assert rig.contract.memory.tenants == [0]

    @pytest.mark.parametrize("how", ["drop", "abort dI", "abort dW"])
    def test_a_reader_of_an_aborted_tape_keeps_the_pool(self, how: str) -> None:
        """What a send still reads is not scratch of another slot's graphs."""
        rig = Rig(stage(pool="p", sends_output=True), capture_order=BY_SLOT)
        ref = rig.forward(0, slot=0)
        rig.contract.wait()
        rig.contract.read(rig.key(0), ref)
        if how == "abort dW":
            rig.dgrad(ref, 0)
            rig.contract.abort(rig.check_wgrad(ref, 0))
        elif how == "abort dI":
            rig.contract.abort(rig.check_dgrad(ref, 0))
        else:
            rig.contract.drop(rig.key(0), ref)
        assert rig.contract.memory.tenants == [1]

        rig.contract.finish_read(rig.key(0), ref)
        assert rig.contract.memory.tenants == [0]

    @pytest.mark.parametrize("how", ["abort F", "abort dI", "abort dW", "drop", "purge", "reserve"])
    def test_failures_leave_the_pool(self, how: str) -> None:
        """A tape that failed or was dropped keeps no memory; a reservation never did."""
        rig = Rig(stage(pool="p"))
        if how == "reserve":
            rig.contract.purge(0 if rig.contract.reserve(rig.key(0)) else 1)
        elif how == "abort F":
            rig.contract.abort(rig.check_forward(0, slot=0))
        else:
            ref = rig.forward(0, slot=0)
            if how == "abort dI":
                rig.contract.abort(rig.check_dgrad(ref, 0))
            elif how == "abort dW":
                rig.dgrad(ref, 0)
                rig.contract.abort(rig.check_wgrad(ref, 0))
            elif how == "drop":
                rig.contract.drop(rig.key(0), ref)
            else:
                rig.contract.purge(0)

        assert rig.contract.memory.tenants == [0]

    def test_a_forward_in_flight_is_a_tenant(self) -> None:
        """Between check and commit F already keeps memory, also where order is left out."""
        rig = Rig(stage(pool="p"), omit={"order"}, capture_order=BY_KIND)
        rig.contract.commit(rig.contract.check_refresh(0))
        rig.check_forward(1, slot=1)

        with refused(rig, "capture.out-of-order"):
            rig.check_forward(0, slot=0)

    def test_pools_are_apart(self) -> None:
        """The order in one pool does not constrain another pool."""
        rig = Rig(stage(0, pool="p"), stage(1, pool="q"))
        rig.forward(0, 1, slot=3)

        assert rig.forward(0, 0, slot=0).slot == 0
