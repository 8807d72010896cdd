"""
The generator of random schedules: a seed identifies a schedule, legal schedules are legal and far
from LIFO, and bounds hold.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from qeffect.schedule.actions import Kind
from qeffect.schedule.plan import plan
from qeffect.schedule.ranks import check_ranks

from .faults import FAULTS, inject, random_illegal
from .random_schedules import Shape, random_schedule, random_shape


def test_a_seed_names_a_schedule() -> None:
    """The same seed gives the same schedule, another seed another one."""
    assert random_schedule(11) == random_schedule(11)
    assert random_schedule(11).rows != random_schedule(12).rows
    assert random_illegal(11) == random_illegal(11)


def test_a_random_object_does() -> None:
    """A `random.Random` may stand for a seed."""
    assert random_schedule(Random(5)).rows == random_schedule(5).rows
    assert random_illegal(Random(5)).schedule.rows == random_illegal(5).schedule.rows


def test_a_few_hundred_seeds_have_everything() -> None:
    """Over a few hundred seeds everything that a schedule may have occurs."""
    seen: set[str] = set()
    for seed in range(300):
        schedule = random_schedule(seed)
        seen.add(f"ranks {schedule.num_ranks}")
        seen.add(schedule.format)
        seen.update(a.kind.value if a else "idle" for row in schedule.rows for a in row)
        homes = [schedule.stage_to_rank[s] for s in range(schedule.num_stages)]
        seen.add("adjacent" if any(a == b for a, b in pairwise(homes)) else "")
        for rank in plan(schedule).ranks:
            seen.add("many deferred" if rank.peak_deferred > 3 else "")
            seen.add("tight" if rank.slots == len(rank.stages) else "")

    expected = {kind.value for kind in Kind} | {"idle", "compute_only", "compute_comms"}
    expected |= {"ranks 1", "ranks 2", "ranks 3", "ranks 4", "adjacent", "many deferred", "tight"}
    assert expected <= seen


def test_delay_is_the_wait_of_wgrads() -> None:
    """With delay 1 weight gradients come last, with delay 0 they are deferred for less long."""
    prompt, late = (
        sum(
            plan(random_schedule(s, Shape((0, 0), 6, (6, 6), delay=d, full=0.0, overlap=0.0)))
            .ranks[0]
            .peak_deferred
            for s in range(20)
        )
        for d in (0.0, 1.0)
    )

    assert 20 * 12 == late
    assert prompt < late / 2


def test_one_slot_forces_lifo() -> None:
    """With one slot a stage runs one microbatch at a time."""
    schedule = random_schedule(3, Shape((0,), 5, (1,), full=0.0, overlap=0.0))

    kinds = "".join(a.kind.value for a in schedule.rows[0] if a)
    assert "FIW" * 5 == kinds


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tight_slots_never_get_stuck(ranks: int) -> None:
    """The generator ends even with a single slot everywhere and stages anywhere."""
    for seed in range(30):
        rng = Random(seed)
        homes = [rng.randrange(ranks) for _ in range(5)] + list(range(ranks))
        shape = Shape(tuple(homes), 4, (1,) * len(homes), comms=seed % 2 == 0, delay=1.0)

        assert () == check_ranks(random_schedule(rng, shape))


def test_shapes_stay_within_limits() -> None:
    """A random shape keeps the limits that it is given."""
    for seed in range(100):
        shape = random_shape(Random(seed), max_ranks=2, max_chunks=2, max_microbatches=3)

        assert max(shape.homes) <= 1
        assert len(shape.homes) <= 4
        assert 1 <= shape.microbatches <= 3
        assert all(1 <= slots <= 3 for slots in shape.slots)


class TestFaults:
    @pytest.mark.parametrize("fault", sorted(FAULTS))
    def test_a_fault_changes_at_most_one_place(self, fault: str) -> None:
        """A fault changes at most one entry's place or text and nothing that is declared."""
        for seed in range(20):
            illegal = random_illegal(seed, fault)
            before = [str(a) for row in illegal.original.rows for a in row]
            after = [str(a) for row in illegal.schedule.rows for a in row]

            assert illegal.schedule.rows != illegal.original.rows
            assert illegal.original.stage_to_rank == illegal.schedule.stage_to_rank
            assert abs(len(before) - len(after)) <= 1
            assert len(_difference(before, after)) <= 1
            assert len(_difference(after, before)) <= 1

    def test_an_unknown_fault_is_refused_with_the_known_ones(self) -> None:
        """An unknown fault is refused with the list of known ones."""
        with pytest.raises(ValueError, match="unknown fault 'nope'; expected one of wrong-stage"):
            random_illegal(0, "nope")

    def test_no_place_for_it(self) -> None:
        """A schedule that offers no place for a fault is left alone."""
        schedule = random_schedule(0, Shape((0,), 1, (1,)))

        for fault in ("wrong-rank", "drop-receive", "swap-receives", "unshard-late", "send-early"):
            assert inject(Random(0), schedule, fault) is None


def _difference(left: list[str], right: list[str]) -> list[str]:
    """What the left list has more often than the right one."""
    rest = list(right)
    more = []
    for entry in left:
        if entry in rest:
            rest.remove(entry)
        else:
            more.append(entry)
    return more
