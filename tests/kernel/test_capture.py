"""
Capture memory: graphs that share a pool must be replayed in the order of their capture; any other
order is refused.
"""

from __future__ import annotations

from itertools import permutations

import pytest

from qeffect import Contract, StageConfig
from qeffect.configuration import Configuration

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

        with refused(rig, "capture.out-of-order", "after the graph captured at position 1"):
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
            "microbatch 0 of stage 0 in epoch 0 in slot 0, the graph captured at position 2, after",
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

        with refused(rig, "capture.out-of-order", "after the graph captured at position 5"):
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

        with refused(rig, "capture.out-of-order", "after the graph captured at position 3"):
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


def _graphs(*refreshes: tuple[int, int]) -> tuple[tuple[int, str] | tuple[int, int, str], ...]:
    """
    The capture order of two stages of one slot each, F0 F1 dI1 dI0 dW1 dW0.

    Args:
        refreshes: (place, stage) of each refresh, counted without the refreshes after it.
    """
    order: list[tuple[int, str] | tuple[int, int, str]] = [
        *((s, 0, "F") for s in (0, 1)),
        *((s, 0, kind) for kind in ("dI", "dW") for s in (1, 0)),
    ]
    for place, index in refreshes:
        order.insert(place, (index, "refresh"))
    return tuple(order)


def _chunks(*refreshes: tuple[int, int], declared: bool = True) -> Rig:
    """Two chunks in one pool, whose refreshes were captured there too."""
    given = {"pool": "p", "microbatches": 1, "slots": 1}
    given |= {"refresh_pool": "p"} if declared else {}
    order = _graphs(*refreshes if declared else ())
    return Rig(stage(0, **given), stage(1, **given), capture_order=order)


def _refresh(rig: Rig, index: int) -> None:
    rig.contract.commit(rig.contract.check_refresh(index))


class TestRefreshInASharedPool:
    def run(self, rig: Rig) -> int:
        """Refresh each chunk directly before its F, then run dI and dW in the order of capture."""
        refs = []
        for index in (0, 1):
            _refresh(rig, index)
            refs.append(rig.forward(0, index))
        for kind in (rig.dgrad, rig.wgrad):
            for index in (1, 0):
                kind(refs[index], 0, index)
        for index in (0, 1):
            rig.finish(index)
        return rig.contract.commit_epoch()

    def test_a_refresh_that_is_not_declared_is_trusted(self) -> None:
        """Without the declaration the refreshes have pools of their own, as far as is known."""
        assert self.run(_chunks(declared=False)) == 1

    def test_refreshes_captured_first(self) -> None:
        """
        The second refresh would overwrite what F of the first chunk keeps: F took that memory from
        the refresh, which was captured earlier.
        """
        rig = _chunks((0, 0), (1, 1))
        _refresh(rig, 0)
        rig.forward(0, 0)

        with refused(
            rig,
            "capture.out-of-order",
            "refresh of stage 1, the graph captured at position 1, after the graph captured at",
            "replayed in the order of capture",
        ):
            rig.contract.check_refresh(1)

    def test_refreshes_captured_directly_before_their_stages_first_forward(self) -> None:
        """Such refreshes keep the order."""
        assert self.run(_chunks((0, 0), (2, 1))) == 1

    def test_a_later_refresh_keeps_earlier_forwards_out(self) -> None:
        """
        A graph captured last uses memory that the tape's dI and dW freed. The first F of the
        refreshed chunk was captured earlier, and so was every graph of the tape.
        """
        rig = _chunks((0, 0), (7, 1))
        _refresh(rig, 0)
        rig.forward(0, 0)
        _refresh(rig, 1)

        with refused(
            rig, "capture.out-of-order", "captured at position 2, after the graph captured"
        ):
            rig.check_forward(0, 1)

    def test_a_later_refresh_keeps_wgrad_out(self) -> None:
        """dW of a tape that waits for it was captured before the refresh."""
        rig = _chunks((0, 0), (7, 1))
        _refresh(rig, 0)
        ref = rig.forward(0, 0)
        rig.dgrad(ref, 0, 0)
        _refresh(rig, 1)

        with refused(rig, "capture.out-of-order", "after the graph captured at position 7"):
            rig.check_wgrad(ref, 0, 0)

    def test_a_refresh_in_flight_has_moved_the_pool(self) -> None:
        """From its check on the refresh may have been replayed, also if it is aborted."""
        for ends in ("commit", "abort"):
            rig = _chunks((0, 0), (2, 1))
            _refresh(rig, 0)
            rig.forward(0, 0)
            ticket = rig.contract.check_refresh(1)
            assert rig.contract.memory.cursor == [2]
            getattr(rig.contract, ends)(ticket)
            assert rig.contract.memory.cursor == [2]

    @pytest.mark.parametrize("order", [((0, 0), (1, 1)), ((6, 0), (7, 1))])
    def test_an_empty_pool_takes_any_refresh(self, order: tuple[tuple[int, int], ...]) -> None:
        """Without a tape in the pool a refresh overwrites nothing, and F begins again."""
        rig = _chunks(*order)
        for index in (0, 1):
            _refresh(rig, index)
            rig.microbatch(0, index)
        for index in (0, 1):
            rig.finish(index)

        assert rig.contract.commit_epoch() == 1

    def test_a_stage_beside_the_pool(self) -> None:
        """Only the refresh of the second chunk is in the first one's pool."""
        rig = Rig(
            stage(0, pool="p", microbatches=1, slots=1),
            stage(1, refresh_pool="p", microbatches=1, slots=1),
        )
        _refresh(rig, 0)
        rig.forward(0, 0)

        with refused(rig, "capture.out-of-order", "refresh of stage 1, the graph captured at po"):
            rig.contract.check_refresh(1)

    def test_a_refresh_within_its_forward_is_part_of_its_graph(self) -> None:
        """An F that refreshes replays the graph of F, and the graph of the refresh stays unused."""
        rig = _chunks((0, 0), (1, 1))
        rig.forward(0, 0)

        assert rig.forward(0, 1).slot == 1


class TestTheDeclaration:
    def test_refreshes_come_first_by_default(self) -> None:
        """Then all F, dI and dW, as without a refresh."""
        rig = Rig(stage(pool="p", refresh_pool="p"))
        memory = rig.contract.memory

        assert memory.refresh_rank == [0]
        assert [memory.forward_rank, memory.dgrad_rank, memory.wgrad_rank] == [
            [1, 2],
            [3, 4],
            [5, 6],
        ]

    def test_a_stage_that_declares_nothing(self) -> None:
        """Its refresh has no rank, and the ranks of its slots are what they were."""
        memory = Rig(stage(pool="p")).contract.memory

        assert (memory.refresh_rank, memory.forward_rank) == ([-1], [0, 1])

    @pytest.mark.parametrize("order", [(), _graphs((0, 0), (7, 1)), _graphs((2, 1), (0, 0))])
    def test_plain_data_hold_it(self, order: tuple[tuple[int, str], ...]) -> None:
        """What is written and read again is the same configuration."""
        given = {"pool": "p", "refresh_pool": "p", "microbatches": 1, "slots": 1}
        rig = Rig(stage(0, **given), stage(1, **given), capture_order=order)
        plain = rig.contract.configuration.plain()

        assert ["refresh_pool" in one for one in plain["stages"]] == [True, True]
        assert [0, "refresh"] in plain["capture_order"]
        again = Configuration.read(plain)
        assert again.plain() == plain
        made = Contract(again.stages, capture_order=again.capture_order).configuration
        assert made == rig.contract.configuration

    def test_plain_data_leave_out_what_is_not_declared(self) -> None:
        """So that older logs and checkpoints stay valid."""
        plain = Rig(stage(pool="p")).contract.configuration.plain()

        assert "refresh_pool" not in plain["stages"][0]
        assert {len(graph) for graph in plain["capture_order"]} == {3}

    @pytest.mark.parametrize(
        ("stages", "options", "message"),
        [
            ([{"refresh_pool": "q", "pool": "p"}], {}, "no stage has that pool; name a stage's"),
            ([{"refresh_pool": "q"}], {}, "stage 0 names refresh_pool 'q', but no stage"),
            (
                [{"pool": "p"}, {"refresh_pool": "p", "domain": 1}],
                {},
                "pool 'p' is shared by the state domains 0 and 1",
            ),
            (
                [{"pool": "p", "refresh_pool": "p"}],
                {"capture_order": BY_KIND},
                r"all 2 slots once, and the refresh of stages \[0\], got 6 graphs",
            ),
            (
                [{"pool": "p", "refresh_pool": "p"}],
                {"capture_order": (*BY_KIND, (0, 1, "refresh"))},
                r"capture_order has \(0, 1, 'refresh'\); .* or \(stage, 'refresh'\) of a stage",
            ),
            (
                [{"pool": "p"}],
                {"capture_order": (*BY_KIND, (0, "refresh"))},
                r"capture_order has \(0, 'refresh'\); expected \(stage, local slot, F | dI | dW\)$",
            ),
            (
                [{"pool": "p", "refresh_pool": "p"}],
                {"omit": ("version",)},
                "refresh_pool needs the relation 'version'",
            ),
            (
                [{"pool": "p", "refresh_pool": "p"}],
                {"omit": ("capture",)},
                "a shared pool needs the relation 'capture'",
            ),
        ],
    )
    def test_what_cannot_be_meant_is_refused(
        self, stages: list[dict[str, object]], options: dict[str, object], message: str
    ) -> None:
        """When the contract is made."""
        configs = [stage(index, **given) for index, given in enumerate(stages)]
        with pytest.raises(ValueError, match=message):
            Contract(configs, **options)  # type: ignore[arg-type]

    def test_a_name_that_cannot_be_compared(self) -> None:
        """Names of pools are hashable."""
        with pytest.raises(TypeError, match="refresh_pool must be a hashable name"):
            StageConfig(0, 1, 1, refresh_pool=[])  # type: ignore[arg-type]
