"""
The names of the explorer's scopes and their numbers of states; this module does not load the
explorer.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import comb, perm
from typing import Final

__all__ = ["SCOPE_STATES", "UNKNOWN", "pool_states"]


def pool_states(slots: int, keys: int, generations: int, *, symmetry: bool = False) -> int:
    """
    Count the reachable states of a slot pool by a formula, without exploring them.

    Each slot is either free or holds a key. A free slot is in one of ``generations + 1``
    generations, of which the last is exhausted. A slot with a key is in one of ``generations``
    generations, and the key is in one of three phases. No key is in two slots.

    Args:
        slots: Number of slots in the pool.
        keys: Number of keys (microbatches) that compete for the slots.
        generations: Number of tapes (data of one F each) that each slot may hold, one after
            another.
        symmetry: Whether states that differ only in the names of slots or keys count as one.

    >>> pool_states(4, 4, 3), pool_states(4, 4, 3, symmetry=True)
    (540184, 1820)
    """
    held, free = 3 * generations, generations + 1
    return sum(
        comb(live + held - 1, live) * comb(slots - live + free - 1, slots - live)
        if symmetry
        else comb(slots, live) * perm(keys, live) * held**live * free ** (slots - live)
        for live in range(min(slots, keys) + 1)
    )


#: The number of the scope's states is unknown.
UNKNOWN: Final = 0

#: States of every named scope without symmetry. Tests compare them with the explorer's counts.
SCOPE_STATES: Final[Mapping[str, int]] = {
    "pool-2-2-2": pool_states(2, 2, 2),
    "pool-3-3-2": pool_states(3, 3, 2),
    "stage-epochs": 980,
    "stage-faults": 2_324,
    "stage-walks": 1_172,
    "stage-reuse": 3_640,
    "stage-small": 12_632,
    "stage-tickets": 19_436,
    "stage-readers": 3_912,
    "domains-readers": 289,
    "stage-messages": 218,
    "domains-messages": 196,
    "callers-messages": 6_148,
    "callers-copies": 1_684,
    "stages-fed": 406,
    "stages-exchange": 608,
    "stage-buckets": 127,
    "callers-update": 1_684,
    "callers-weights": 4_578,
    "callers-gradients": 1_545,
    "stage-gradients": 94,
    "stage-skips": 10_580,
    "stage-skips-epochs": 857,
    "stage-skips-declared": 71,
    "stage-evaluated": 932,
    "stage-evaluated-reports": 21,
    "domains-evaluated": 320,
    "stages-tied": 1_324,
    "stages-shared": 9_330,
    "stages-shared-streams": 167,
    "domains-buckets": 223,
    "stage-shared-pool": 11_672,
    "stage-declared": 6_080,
    "stages-two": 46_380,
    "stages-refreshed-in-pool": 5_304,
    "stages-declared": 12_232,
    "stage-reports": 1_342,
    "callers-reports": 4_560,
    "stages-draws": 2_260,
    "stage-weights": 352,
    "stages-live": 2_130,
    "stage-epoch-scales": 290,
    "domains-epoch-scales": 2_358,
    "stage-groups": 12_425,
    "stage-groups-scales": 580,
    "stage-groups-apart": 313,
    "stage-groups-faults": 16_583,
    "domains-groups": 47_856,
    "domains-two": 1_836,
    "pool-4-4-2-right": pool_states(4, 4, 2),
    "pool-4-4-3-right": pool_states(4, 4, 3),
    "pool-4-4-3": pool_states(4, 4, 3),
    "pool-4-5-4": pool_states(4, 5, 4),
    "stage-small-right": 12_632,
    "stage-medium": 363_472,
    "stage-large": UNKNOWN,
}
