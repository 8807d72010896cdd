"""
Convert a backend's reports about its actions to the arguments of the contract's commit.

The backend counts scaling updates from its creation on. The contract's effect token, a count of F
and dI, restarts at zero after each rebuild or restore. Therefore `StageReports` remembers the
backend's count at the last restart.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import attrs

from ..backends.epoch_scales import moves_once
from ..backends.protocol import Reports, StageBackend


class Effects(NamedTuple):
    """
    Effects of an action besides its gradients. An effect is None if the backend does not report it.

    Args:
        filled: Matrices whose weight cache was filled, with one entry per fill.
        updates: How often the domain's scaling state was updated.
        scales: For dI: which scales dI used, as the value of the contract's effect token (a count
            of F and dI) when these scales were computed. Scales are computed at an F, or at their
            update if they are updated once an epoch (an optimizer step).
        draws: Position in the random stream at which F, or its recomputation in dI, began to draw.
        weight: For dI: the factor by which the microbatch's gradient is multiplied, as (numerator,
            denominator).
    """

    filled: tuple[str, ...] | None = None
    updates: int | None = None
    scales: int | None = None
    draws: int | None = None
    weight: tuple[int, int] | None = None


UNREPORTED = Effects()
"""The effects of an action whose backend reports nothing."""


@attrs.define(eq=False)
class StageReports:
    """
    Converts the reports of one stage's backend to the contract's arguments.

    Every F and dI of the domain must go through the contract, so that the backend's count and the
    contract's token agree. An F or dI that bypasses the contract raises only the backend's count;
    the contract then refuses the next dI that reports its scales.

    If scales are updated once an epoch (an optimizer step), the backend counts these updates. The
    contract identifies scales by the value of its token at their update; `moved` records this
    value.

    Args:
        source: What the backend reports about its effects.
        once: Whether scales are updated once an epoch instead of at every F and dI.
    """

    source: Reports = attrs.field(factory=Reports)
    once: bool = False
    _start: int = 0
    _tokens: dict[int, int] = attrs.field(factory=dict)
    _skipped: list[tuple[int, int]] = attrs.field(factory=list)

    @classmethod
    def of(cls, stage: StageBackend, relations: Collection[str], *, captured: bool) -> StageReports:
        """
        Make the converter for a stage's backend. Reports for relations (groups of clauses) that the
        contract does not check are left out.

        Args:
            stage: The stage. Its backend makes the reports.
            relations: The relations that the contract checks.
            captured: Whether graphs are replayed.
        """
        told = stage.reports.captured() if captured else stage.reports
        if "version" not in relations or not stage.units:
            told = attrs.evolve(told, filled=None)
        if "order" not in relations:
            told = told.without_order()
        return cls(told, moves_once(stage.domain))

    def restart(self) -> None:
        """
        Restart the count of scaling updates at zero, as the contract does after a restore, and
        forget earlier cache fills.
        """
        self.take_filled()
        self._start = self.updates()
        self._tokens = {self._start: 0}
        self._skipped.clear()

    def moved(self, token: int) -> None:
        """
        Record the value of the contract's effect token at an update of the scales, if scales are
        updated once an epoch.
        """
        self._tokens = {self.updates(): token}

    def pass_over(self, before: int) -> None:
        """
        Ignore all cache fills and scaling updates since the count was `before`, because other code
        than the contract's actions caused them.
        """
        self.take_filled()
        self._start += self.updates() - before
        if before in self._tokens:
            self._tokens[self.updates()] = self._tokens.pop(before)

    def skip(self, before: int) -> None:
        """Do not count the scaling updates since the count was `before`."""
        if ran := self.updates() - before:
            self._skipped.append((before, ran))

    def take_filled(self) -> tuple[str, ...] | None:
        """Return the matrices whose cache was filled since the last call; None if not reported."""
        return None if self.source.filled is None else tuple(self.source.filled())

    def updates(self) -> int:
        """
        The backend's count of scaling updates, as an argument for a later call of `since`; 0 if not
        reported.
        """
        return 0 if self.source.updates is None else self.source.updates()

    def since(self, before: int) -> int | None:
        """
        Return the number of scaling updates since the count was `before`; None if not reported.
        """
        return None if self.source.updates is None else self.source.updates() - before

    def token(self, scales: int | None) -> int | None:
        """
        Convert `scales`, the backend's count at which the used scales were computed, to the
        contract's token; None if not reported.
        """
        if self.source.tape_scales != "carried" or scales is None:
            return None
        if self.once:
            return self._tokens.get(scales)
        return scales - self._start - sum(ran for at, ran in self._skipped if at < scales)
