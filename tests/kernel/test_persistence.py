"""
Persistence: a checkpoint is possible only when nothing is live; a restore begins a new incarnation.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from attrs import evolve, fields

from qeffect import Checkpoint, Contract, Destination
from qeffect.relations.constants import GENERATION_MAX

from .helpers import MATRICES, Rig, refused, stage

CELL = (0, 0, 0, 0)


def _places(address: int, device: str = "cuda:0") -> list[Destination]:
    """Destinations that lie somewhere."""
    return [
        Destination(name, None, (4, 4), "float32", device, address + 64 * at, 64)
        for at, name in enumerate(MATRICES)
    ]


class TestCheckpoint:
    def test_directly_after_a_commit(self) -> None:
        """With everything drained a checkpoint is taken at the beginning of an epoch."""
        rig = Rig()
        rig.epoch()
        rig.contract.drain()

        checkpoint = rig.contract.checkpoint(state="handle", recipe={"fp8": "HYBRID"})
        assert (1, "handle", {"fp8": "HYBRID"}) == (
            checkpoint.epoch,
            checkpoint.state,
            checkpoint.recipe,
        )

    def test_no_checkpoint_while_a_tape_is_live(self) -> None:
        """Not while a tape is live, a reservation included."""
        rig = Rig()
        rig.contract.reserve(rig.key(0))
        with refused(rig, "persistence.live-tape", "slots [0]", "no live tape"):
            rig.contract.checkpoint()
        rig.forward(0)
        with refused(rig, "persistence.live-tape", "slots [0]"):
            rig.contract.checkpoint()

    def test_no_checkpoint_while_a_refresh_is_in_flight(self) -> None:
        """Not while a refresh is in flight."""
        rig = Rig()
        rig.contract.check_refresh(0)

        with refused(rig, "persistence.action-in-flight", "0: 1", "no action in flight"):
            rig.contract.checkpoint()

    def test_no_checkpoint_once_an_epoch_has_begun(self) -> None:
        """Not once an epoch has begun: a microbatch ran, or a cache was refreshed for one."""
        rig = Rig()
        rig.microbatch(0)
        rig.contract.drain()
        with refused(rig, "persistence.mid-epoch", "1 forward and 1 weight", "after a commit"):
            rig.contract.checkpoint()

        rig = Rig()
        rig.contract.commit(rig.contract.check_refresh(0))
        rig.contract.drain()
        with refused(rig, "persistence.mid-epoch", "not yet forwarded: stage 0"):
            rig.contract.checkpoint()

    def test_no_checkpoint_before_the_device_is_seen_to_finish(self) -> None:
        """Not before the host has seen the device finish."""
        rig = Rig()
        rig.epoch()

        with refused(rig, "persistence.device-work", "finished: 0", "every domain drained"):
            rig.contract.checkpoint()

    def test_a_checkpoint_changes_nothing(self) -> None:
        """A checkpoint reads."""
        rig = Rig()
        before = rig.contract.snapshot()
        rig.contract.checkpoint()

        assert before == rig.contract.snapshot()

    def test_what_never_persists(self) -> None:
        """No token, stream, generation, address, incarnation or cache content is in it."""
        rig = Rig(stage(destinations=_places(0x7F00_0000)))
        rig.epoch()
        rig.contract.drain()
        checkpoint = rig.contract.checkpoint()

        assert ["epoch", "configuration", "state", "recipe", "caches"] == [
            a.name for a in fields(Checkpoint)
        ]
        text = pickle.dumps(checkpoint)
        assert all(d.address == 0 and d.device == "" for d in checkpoint.stages[0].destinations)
        assert rig.contract.incarnation.to_bytes(8, "little") not in text

    def test_a_checkpoint_survives_pickling_and_copying(self) -> None:
        """A checkpoint is a value: it is equal after pickling and copying."""
        checkpoint = Rig(stage(0), stage(1)).contract.checkpoint(state=1)

        assert checkpoint == pickle.loads(pickle.dumps(checkpoint)) == copy.deepcopy(checkpoint)
        assert checkpoint.summary().startswith("stages 0 (M=2, 2 slots), 1 (M=2, 2 slots) under")

    @pytest.mark.parametrize("wrong", [None, 3, ()])
    def test_of_no_configuration(self, wrong: Any) -> None:
        """A value that is not a configuration is named as such."""
        with pytest.raises(TypeError, match=r"^the configuration of a checkpoint must be a Config"):
            Checkpoint(0, wrong)


class TestRestore:
    def test_in_the_same_process(self) -> None:
        """After a restore the process is in the checkpoint's epoch, with nothing live."""
        rig = Rig()
        checkpoint = rig.contract.checkpoint()
        rig.epoch()
        rig.forward(0)
        rig.contract.drain()
        rig.contract.restore(checkpoint)

        assert (0, {}, 0) == (rig.contract.epoch, rig.contract.live(), rig.contract.token(0))
        assert rig.epoch() == 1

    def test_in_a_fresh_process(self) -> None:
        """A fresh process continues from the checkpoint."""
        rig = Rig()
        rig.epoch()
        rig.contract.drain()
        fresh = Rig()
        fresh.contract.restore(rig.contract.checkpoint())

        assert fresh.epoch() == 2

    def test_older_references_are_refused(self) -> None:
        """Generations begin again at zero, so that only the incarnation tells old from new."""
        rig = Rig()
        checkpoint = rig.contract.checkpoint()
        old = rig.forward(0)
        rig.contract.drain()
        rig.contract.restore(checkpoint)
        new = rig.forward(0)

        assert (old.slot, old.generation) == (new.slot, new.generation)
        with refused(rig, "ownership.foreign-incarnation", f"{old.incarnation:016x}"):
            rig.contract.drop(rig.key(0), old)

    def test_one_checkpoint_restored_twice(self) -> None:
        """Two processes restored from one checkpoint refuse each other's references, and its."""
        origin = Rig()
        checkpoint = origin.contract.checkpoint()
        stale = origin.forward(0)
        twins = [Rig(), Rig()]
        refs = []
        for twin in twins:
            twin.contract.restore(checkpoint)
            refs.append(twin.forward(0))

        assert len({ref.incarnation for ref in (stale, *refs)}) == 3
        for twin, other in zip(twins, reversed(refs), strict=True):
            for foreign in (other, stale):
                with refused(twin, "ownership.foreign-incarnation"):
                    twin.contract.drop(twin.key(0), foreign)

    def test_restored_twice_in_one_process(self) -> None:
        """Every restore of one checkpoint is another incarnation."""
        rig = Rig()
        checkpoint = rig.contract.checkpoint()
        seen = {rig.contract.incarnation}
        for _ in range(3):
            rig.contract.restore(checkpoint)
            seen.add(rig.contract.incarnation)

        assert len(seen) == 4

    def test_a_restore_wants_a_new_incarnation(self) -> None:
        """A restore under the current incarnation would revive old references."""
        rig = Rig()
        number = rig.contract.incarnation

        with refused(rig, "persistence.same-incarnation", f"{number:016x}", "new random"):
            rig.contract.restore(rig.contract.checkpoint(), incarnation=number)

    def test_older_tickets_are_refused(self) -> None:
        """A ticket of before the restore is not redeemed after it."""
        rig = Rig()
        checkpoint = rig.contract.checkpoint()
        ticket = rig.check_forward(0)
        rig.contract.abort(ticket)
        rig.contract.drain()
        rig.contract.restore(checkpoint)
        rig.check_forward(0)

        with refused(rig, "ownership.unknown-ticket"):
            rig.contract.commit(ticket)
        with refused(rig, "ownership.unknown-ticket"):
            rig.contract.commit(evolve(ticket, incarnation=rig.contract.incarnation))

    @pytest.mark.parametrize(
        "other",
        [
            [stage(slots=3)],
            [stage(microbatches=3)],
            [stage(matrices=("w0",))],
            [stage(), stage(1)],
            [stage(domain="x")],
            [stage(reduces=True)],
        ],
    )
    def test_a_checkpoint_of_other_stages_is_refused(self, other: list[Any]) -> None:
        """A checkpoint of other stages is refused; the message says what both are."""
        checkpoint = Contract(other).checkpoint()

        with refused(
            Rig(), "persistence.configuration", "a checkpoint of stages 0", "checkpoint of st"
        ):
            Rig().contract.restore(checkpoint)

    def test_a_checkpoint_of_other_relations_is_refused(self) -> None:
        """So is one of a backend that left other relations out."""
        checkpoint = Rig(omit={"arena"}).contract.checkpoint()
        rig = Rig()

        with refused(rig, "persistence.configuration", "under ownership, version, order, capture"):
            rig.contract.restore(checkpoint)

    @pytest.mark.parametrize(
        ("options", "part", "saved", "ours"),
        [
            ({"callers": ("main", "loader")}, "callers", "2 callers", "1 callers"),
            ({"callers": ("loader",)}, "callers", "'loader' at position 0", "'main' at position 0"),
            ({"generation_max": 7}, "generation_max", "7", str(GENERATION_MAX)),
            (
                {"declared": {0: [("F", CELL), ("dI", CELL)]}},
                "declared",
                "1 declared",
                "0 declared",
            ),
            (
                {"capture_order": [(0, 0, "dW"), (0, 0, "dI"), (0, 0, "F")]},
                "capture_order",
                "3 capture_order",
                "0 capture_order",
            ),
        ],
    )
    def test_another_option(
        self, options: dict[str, Any], part: str, saved: str, ours: str
    ) -> None:
        """Callers, orders and the last generation are configuration; the message names them."""
        stages = [stage(microbatches=1, slots=1)]
        checkpoint = Contract(stages, **options).checkpoint()
        contract = Contract(stages)

        with refused(contract, "persistence.configuration", f"with {part}: {saved}"):
            contract.restore(checkpoint)
        with refused(contract, "persistence.configuration", "", f"with {part}: {ours}"):
            contract.restore(checkpoint)
        Contract(stages, **options).restore(checkpoint)

    def test_the_default_capture_order_written_out_is_the_same(self) -> None:
        """Naming the default order does not make another configuration."""
        stages = [stage(microbatches=1, slots=1)]
        order = [(0, 0, "F"), (0, 0, "dI"), (0, 0, "dW")]
        checkpoint = Contract(stages, capture_order=order).checkpoint()
        contract = Contract(stages)
        contract.restore(checkpoint)

        assert contract.configuration == checkpoint.configuration

    def test_another_declared_order(self) -> None:
        """Of two declared orders the message names the first action that differs."""
        stages = [stage(microbatches=2, slots=2)]
        a, b = (0, 0, 0, 0), (0, 1, 0, 0)
        one = [("F", a), ("F", b), ("dI", a), ("dI", b)]
        checkpoint = Contract(stages, declared={0: one}).checkpoint()
        contract = Contract(stages, declared={0: [*one[:2], *one[:1:-1]]})

        with refused(
            contract,
            "persistence.configuration",
            f"declared: {('dI', a)!r} at position 2",
            f"declared: {('dI', b)!r} at position 2",
        ):
            contract.restore(checkpoint)

    def test_other_cache_semantics(self) -> None:
        """A checkpoint says what a restore makes of weight caches, and another is refused."""
        rig, bare = Rig(), Rig(omit={"version"})
        saved, unguarded = rig.contract.checkpoint(), bare.contract.checkpoint()
        assert ("stale", "unguarded") == (saved.caches, unguarded.caches)

        with refused(rig, "persistence.configuration", "caches: 'unguarded'", "caches: 'stale'"):
            rig.contract.restore(evolve(saved, caches="unguarded"))

    def test_destinations_may_have_moved(self) -> None:
        """Addresses are rebuilt: a fresh process has its destinations elsewhere."""
        checkpoint = Rig(stage(destinations=_places(4096))).contract.checkpoint()
        fresh = Rig(stage(destinations=_places(8192, "cuda:1")))
        fresh.contract.restore(checkpoint)

        assert fresh.epoch() == 1

    def test_destinations_of_another_shape_may_not(self) -> None:
        """Their shapes and types are configuration."""
        checkpoint = Rig(stage(destinations=_places(4096))).contract.checkpoint()
        other = [evolve(d, shape=(2, 8)) for d in _places(4096)]
        rig = Rig(stage(destinations=other))

        with refused(rig, "persistence.configuration"):
            rig.contract.restore(checkpoint)

    @pytest.mark.parametrize("wrong", [None, 3, {"epoch": 1}])
    def test_anything_but_a_checkpoint_is_named(self, wrong: Any) -> None:
        """A value that is not a checkpoint is named."""
        with pytest.raises(TypeError, match=r"^restore: expected a Checkpoint, got "):
            Rig().contract.restore(wrong)

    @pytest.mark.parametrize("wrong", ["1", -1, 1 << 64, 1.0])
    def test_anything_but_a_64_bit_number_is_named(self, wrong: Any) -> None:
        """A value that is not a 64-bit int is named."""
        rig = Rig()
        with pytest.raises(
            ValueError, match=r"^restore: incarnation must be an int of 64 bits, got "
        ):
            rig.contract.restore(rig.contract.checkpoint(), incarnation=wrong)
