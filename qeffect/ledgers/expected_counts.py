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
    Return, by cell, the number of the memory that its dW writes; device marks use these numbers.

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
    Counters of every stage and a digest of every state domain, over one incarnation.

    Args:
        domains: Name of the state domain of each stage.
        slot_stage: The stage of each slot (set of buffers for one microbatch).
        destinations: By cell, the number of the memory that its dW writes, from
            `qeffect.counts.located`; cells that are left out have number 0.
        late: Whether the counts of a commit are presented after that commit, before the next one.
            If not, they are presented with the commit itself.

    Attributes:
        awaited: Expected counts of the last commit, until they are presented; None if no commit
            awaits counts.
        writes: For each slot, how and where the slot's last checked dW writes; both determine which
            captured graph has to run.
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
        """Set all counts and digests to zero, for a new incarnation."""
        self._numbers = {stage: [0] * len(COUNTED) for stage in self._domains}
        self._digests = dict.fromkeys(self._domains.values(), 0)
        self.awaited = None

    def checked(self, cell: Cell, slot: int, writes: int) -> None:
        """Note which dW was checked last in a slot, and thereby which graph has to run."""
        self.writes[slot] = writes, self._destinations.get(cell, 0)

    def ran(self, action: str, place: int) -> None:
        """Count a committed action; ``place`` is its slot or, for a refresh, its stage."""
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
        Count all actions of a recurring step.

        Args:
            folds: By state domain, the step's factor and addend of the domain's digest.
            counted: By stage, the number of the step's actions of each kind.
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
            Refused: The counts are missing or differ, or the previous commit awaits its counts.
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
        """Record a commit; counts that are presented late cover the actions up to this commit."""
        if self.late:
            self.awaited = self.own()

    def present(self, counted: Mapping[Hashable, DeviceCounts]) -> None:
        """
        Compare the device's counts at the last commit.

        Raises:
            Refused: The counts differ; the commit awaits its counts until a restore.
            TypeError, ValueError: The counts do not match the contract's domains and stages, or no
                commit awaits counts.
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
