"""
The expected counts of committed actions, compared with the device's counts at a commit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from ..counts import COUNTED, DeviceCounts, fold, located, mark, ways_of, wrap
from ..destinations import Destination
from ..keys import Cell
from ..refusals import refused
from ..relations.constants import OVERWRITES
from ..stage_config import StageConfig
from ..text import shown

__all__ = ["ExpectedCounts", "places_of"]


def places_of(
    stages: Iterable[StageConfig], destination_of: Mapping[Cell, Sequence[Destination]]
) -> dict[Cell, int]:
    """
    Return, for each cell (a key without its epoch), the number of the memory location that its dW
    writes. Device marks contain these numbers.

    Args:
        stages: The contract's stages.
        destination_of: The configured destinations of each key.
    """
    found: dict[Cell, int] = {}
    for config in stages:
        cells = config.cells()
        found.update(zip(cells, located(destination_of[cell] for cell in cells), strict=True))
    return found


class ExpectedCounts:
    """
    Counters of every stage, and a digest of every state domain (stages whose FP8 scales are updated
    together), since construction or the last restore.

    Args:
        domains: Name of the state domain of each stage.
        slot_stage: The stage of each slot (set of buffers for one microbatch).
        destinations: For each cell (a key without its epoch), the number of the memory location
            that its dW writes, from `qeffect.counts.located`. Missing cells have number 0.
        late: If True, the counts of a commit are presented after that commit and before the next
            one. If False, they are presented with the commit itself.

    Attributes:
        awaited: Expected counts of the last commit, until the device's counts are presented; None
            if no commit needs counts.
        writes: For each slot, how and where the slot's last checked dW writes; this determines
            which captured graph must run.
    """

    __slots__ = (
        "_destinations",
        "_digests",
        "_domains",
        "_numbers",
        "_places",
        "awaited",
        "late",
        "writes",
    )

    def __init__(
        self,
        domains: Mapping[int, Hashable],
        slot_stage: Sequence[int],
        destinations: Mapping[Cell, int] | None = None,
        *,
        late: bool = False,
    ) -> None:
        self._destinations = {c: n for c, n in (destinations or {}).items() if n}
        self.late = late
        self.awaited: Mapping[Hashable, DeviceCounts] | None = None
        self._domains = dict(domains)
        # What each action at each place touches, computed once: every commit of an action uses it.
        self._places = {
            (action, place, writes): (
                stage,
                self._domains[stage],
                COUNTED.index(action),
                mark(action, place, writes),
            )
            for action in COUNTED
            for place, stage in (
                ((s, s) for s in self._domains) if action == "refresh" else enumerate(slot_stage)
            )
            for writes in ways_of(action)
        }
        self.writes = [(OVERWRITES, 0)] * len(slot_stage)
        self._numbers: dict[int, list[int]] = {}
        self._digests: dict[Hashable, int] = {}
        self.reset()

    def reset(self) -> None:
        """Set all counts and digests to zero, as after a restore."""
        self._numbers = {stage: [0] * len(COUNTED) for stage in self._domains}
        self._digests = dict.fromkeys(self._domains.values(), 0)
        self.awaited = None

    def checked(self, cell: Cell, slot: int, writes: int) -> None:
        """Record how the dW that was last checked in a slot writes (see `writes`)."""
        self.writes[slot] = writes, self._destinations.get(cell, 0)

    def ran(self, action: str, place: int) -> None:
        """
        Count a committed action; ``place`` is its slot (set of buffers) or, for a refresh, its
        stage.
        """
        writes, where = self.writes[place] if action == "dW" else (OVERWRITES, 0)
        stage, domain, at, number = self._places[action, place, writes]
        if where:
            number = mark(action, place, writes, where)
        self._numbers[stage][at] += 1
        self._digests[domain] = fold(self._digests[domain], number)

    def ran_step(
        self, folds: Mapping[Hashable, tuple[int, int]], counted: Mapping[int, Sequence[int]]
    ) -> None:
        """
        Count all actions of a step that was committed in one call.

        Args:
            folds: For each state domain, the factor and the addend by which the step changes the
                domain's digest.
            counted: For each stage, the number of the step's actions of each kind.
        """
        for domain, (factor, term) in folds.items():
            self._digests[domain] = wrap(self._digests[domain] * factor + term)
        for stage, more in counted.items():
            self._numbers[stage] = [n + m for n, m in zip(self._numbers[stage], more, strict=True)]

    def own(self) -> dict[Hashable, DeviceCounts]:
        """Return the counts of a device that ran exactly the committed actions, in order."""
        return {
            domain: DeviceCounts(
                digest,
                {s: tuple(n) for s, n in self._numbers.items() if self._domains[s] == domain},
            )
            for domain, digest in self._digests.items()
        }

    def require_commit(
        self, counted: Mapping[Hashable, DeviceCounts] | None, *, now: bool = False
    ) -> None:
        """
        Require that a commit with these counts is allowed.

        Args:
            counted: The device's counts; None if the contract was made with ``late=True``.
            now: If True, compare the counts now, even if the contract was made with ``late=True``.
                If False, a contract made with ``late=True`` refuses counts here.

        Raises:
            Refused: The counts are missing or differ, or the counts of the previous commit are
                missing.
            TypeError, ValueError: The counts do not match the contract's domains and stages.
        """
        if not self.late:
            self._require(self.own(), counted)
            return
        if counted is not None and now:
            self._require(self.own(), counted)
        elif counted is not None:
            raise ValueError(
                "counted: the contract was made with late=True; call present_counts after the "
                "commit"
            )
        self.require_compared("check_update")

    def require_compared(self, transition: str) -> None:
        """Require that the counts of every commit were presented and compared."""
        if self.awaited is not None:
            raise refused(
                "epoch.uncounted",
                transition,
                "a commit whose counts were not presented",
                "present_counts first, with the device's counts at that commit",
            )

    def committed(self) -> None:
        """Record a commit; its counts, if presented late, cover the actions up to this commit."""
        if self.late:
            self.awaited = self.own()

    def present(self, counted: Mapping[Hashable, DeviceCounts]) -> None:
        """
        Compare the device's counts at the last commit.

        Raises:
            Refused: The counts differ; the commit then lacks its counts until a restore.
            TypeError, ValueError: The counts do not match the contract's domains and stages, or no
                commit needs counts.
        """
        if self.awaited is None:
            raise ValueError("present_counts: no commit awaits its counts")
        self._require(self.awaited, counted)
        self.awaited = None

    def _require(
        self,
        own: Mapping[Hashable, DeviceCounts],
        counted: Mapping[Hashable, DeviceCounts] | None,
    ) -> None:
        """Require that the counts agree; a refusal names `check_update`, even for late counts."""
        if counted is None:
            raise refused(
                "epoch.uncounted", "check_update", "no counts", "the counts of every state domain"
            )
        if not isinstance(counted, Mapping):
            raise TypeError(f"counted: expected DeviceCounts by state domain, got {shown(counted)}")
        if set(counted) != set(own):
            raise ValueError(f"counted: expected domains {[*own]}, got {[*counted]}")
        for domain, expected in own.items():
            found = counted[domain]
            if not isinstance(found, DeviceCounts):
                raise TypeError(f"counted: expected DeviceCounts, got {shown(found)}")
            if set(found.stages) != set(expected.stages):
                raise ValueError(
                    f"counted: expected stages {[*expected.stages]} of domain {domain!r}, "
                    f"got {[*found.stages]}"
                )
            for stage, numbers in expected.stages.items():
                for action, ran, committed in zip(
                    COUNTED, found.stages[stage], numbers, strict=True
                ):
                    if ran != committed:
                        raise refused(
                            "epoch.device-count",
                            "check_update",
                            f"stage {stage}: the device ran {ran} {action}",
                            f"{committed}, as many as were committed",
                        )
        for domain, expected in own.items():
            if counted[domain].digest != expected.digest:
                raise refused(
                    "epoch.device-order",
                    "check_update",
                    f"digest {counted[domain].digest:x} of the order that ran",
                    f"digest {expected.digest:x} of the committed order",
                )
