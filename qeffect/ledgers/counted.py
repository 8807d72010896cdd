"""
Committed actions as the device counts them, and the comparison of the two at a commit.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from ..counts import COUNTED, DeviceCounts, fold, mark
from ..refusals import Refused, refused

__all__ = ["Counted"]


class Counted:
    """
    Counters of every stage and a digest of every state domain, over one incarnation.

    Args:
        domains: Name of the state domain of each stage.
        slot_stage: Stage of each slot.
    """

    __slots__ = ("_digests", "_domains", "_numbers", "_places")

    def __init__(self, domains: Mapping[int, Hashable], slot_stage: Sequence[int]) -> None:
        self._domains = dict(domains)
        # What each action at each place touches, looked up at once: it stands in every commit.
        self._places = {
            (action, place): (
                stage,
                self._domains[stage],
                COUNTED.index(action),
                mark(action, place),
            )
            for action in COUNTED
            for place, stage in (
                ((s, s) for s in self._domains) if action == "refresh" else enumerate(slot_stage)
            )
        }
        self._numbers: dict[int, list[int]] = {}
        self._digests: dict[Hashable, int] = {}
        self.reset()

    def reset(self) -> None:
        """Begin at zero, with a new incarnation."""
        self._numbers = {stage: [0] * len(COUNTED) for stage in self._domains}
        self._digests = dict.fromkeys(self._domains.values(), 0)

    def ran(self, action: str, place: int) -> None:
        """Note a committed action; its place is a slot, or the stage of a refresh."""
        stage, domain, at, number = self._places[action, place]
        self._numbers[stage][at] += 1
        self._digests[domain] = fold(self._digests[domain], number)

    def own(self) -> dict[Hashable, DeviceCounts]:
        """What a device that ran exactly the committed actions, in their order, has counted."""
        return {
            domain: DeviceCounts(
                digest,
                {s: tuple(n) for s, n in self._numbers.items() if self._domains[s] == domain},
            )
            for domain, digest in self._digests.items()
        }

    def difference(self, counted: Mapping[Hashable, DeviceCounts] | None) -> Refused | None:
        """
        Return the refusal of a commit that brings these counts; None where they agree.

        Raises:
            TypeError, ValueError: They are no counts of the contract's domains and stages.
        """
        own = self.own()
        if counted is None:
            return _refused("epoch.uncounted", "no counts", "those of every state domain")
        if not isinstance(counted, Mapping):
            raise TypeError(f"counted: expected DeviceCounts by state domain, got {counted!r}")
        if set(counted) != set(own):
            raise ValueError(f"counted: domains {[*counted]}; the contract has {[*own]}")
        for domain, expected in own.items():
            found = counted[domain]
            if not isinstance(found, DeviceCounts):
                raise TypeError(f"counted: expected DeviceCounts, got {found!r}")
            if set(found.stages) != set(expected.stages):
                raise ValueError(
                    f"counted: stages {[*found.stages]} of domain {domain!r}; "
                    f"the contract has {[*expected.stages]}"
                )
            for stage, numbers in expected.stages.items():
                for action, ran, committed in zip(
                    COUNTED, found.stages[stage], numbers, strict=True
                ):
                    if ran != committed:
                        return _refused(
                            "epoch.device-count",
                            f"stage {stage}: the device ran {ran} {action}",
                            f"{committed}, as were committed",
                        )
        for domain, expected in own.items():
            if counted[domain].digest != expected.digest:
                return _refused(
                    "epoch.device-order",
                    f"digest {counted[domain].digest:x} of the order that ran",
                    f"{expected.digest:x}, of the order that was committed",
                )
        return None


def _refused(clause: str, found: str, expected: str) -> Refused:
    return refused(clause, "commit_epoch", found, expected)
