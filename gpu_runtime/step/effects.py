"""
What a stage's backend reports of its actions, in the terms of the kernel's commit.

The backend counts for as long as it lives; the kernel's token begins at zero in every incarnation.
`StageReports` lies between: it remembers where an incarnation began.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import attrs

from ..backends.protocol import Reports, StageBackend


class Effects(NamedTuple):
    """
    What an action did beside its gradients; None where the backend does not report it.

    Args:
        filled: Matrices whose cache was filled, each as often as it was.
        updates: How often the domain's scaling state was updated.
        scales: For dI the kernel's token at which the F ran whose scales it used.
    """

    filled: tuple[str, ...] | None = None
    updates: int | None = None
    scales: int | None = None


UNREPORTED = Effects()
"""Of an action whose backend reports nothing."""


@attrs.define(eq=False)
class StageReports:
    """
    What one stage reports.

    Every F and dI of the domain must pass the kernel for positions to agree: one that was run
    behind it moves the backend's count and not the token, and the next dI that reports its
    position is refused.

    Args:
        source: What the backend reports here.
    """

    source: Reports = attrs.field(factory=Reports)
    _start: int = 0

    @classmethod
    def of(cls, stage: StageBackend, relations: Collection[str], *, captured: bool) -> StageReports:
        """
        What a stage reports that someone asks for.

        Args:
            stage: The stage.
            relations: The relations in force; a report of one that is left out is not taken.
            captured: Whether graphs are replayed.
        """
        told = stage.reports.captured() if captured else stage.reports
        if "version" not in relations or not stage.units:
            told = attrs.evolve(told, filled=None)
        if "order" not in relations:
            told = attrs.evolve(told, updates=None, tape_scales=None)
        return cls(told)

    def restart(self) -> None:
        """Count from here, as the kernel does after a restore; what was filled is forgotten."""
        self.take_filled()
        self._start = self.updates()

    def pass_over(self, before: int) -> None:
        """Forget what was done since the count was `before`, which no action of the kernel was."""
        self.take_filled()
        self._start += self.updates() - before

    def take_filled(self) -> tuple[str, ...] | None:
        """The matrices whose cache was filled since the last call; None without report."""
        return None if self.source.filled is None else tuple(self.source.filled())

    def updates(self) -> int:
        """The backend's count of scaling updates, for `since`; 0 without report."""
        return 0 if self.source.updates is None else self.source.updates()

    def since(self, before: int) -> int | None:
        """Scaling updates since the count was `before`; None without report."""
        return None if self.source.updates is None else self.source.updates() - before

    def token(self, scales: int | None) -> int | None:
        """The kernel's token at the F whose scales were used; None without report."""
        if self.source.tape_scales != "carried" or scales is None:
            return None
        return scales - self._start
