"""
The order of a process's actions: F (forward), dI (input gradient) and dW (weight gradient).

An order is one rank's row of a schedule table. Two runs can be compared only if they use the same
order. By default every F and dI updates the FP8 scales that later actions use, so another order may
compute other values.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import attrs

from qeffect.schedule.actions import COMPUTE, Action, Kind, Schedule, ScheduleError
from qeffect.schedule.grouping import group_of, grouped_row, require_group
from qeffect.schedule.slots import assign, own_readers

from ...backends.protocol import BackendError

__all__ = ["ComputeAction", "Kind", "Order"]


_KINDS = (Kind.FORWARD, Kind.DGRAD, Kind.WGRAD)


class ComputeAction(NamedTuple):
    """One F, dI or dW."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


@attrs.frozen
class Order:
    """
    The F, dI and dW of one process in one epoch, in the order in which they run.

    >>> order = Order.parse("0F0 0F1 0I1 0I0 0W0 0W1")
    >>> order.microbatches(0, Kind.DGRAD)
    (1, 0)
    >>> order.peaks
    {0: 2}

    Args:
        steps: The F, dI and dW in their order.
        source: Name of the actions' source, for error messages.
    """

    steps: tuple[ComputeAction, ...]
    source: str = ""

    @classmethod
    def of_rank(cls, schedule: Schedule, rank: int) -> Order:
        """
        Return the actions of one rank in the order of a schedule table. A full backward becomes a
        dI followed by a dW.

        Raises:
            ValueError: The schedule has no rank with this number.
        """
        if not 0 <= rank < schedule.num_ranks:
            raise ValueError(
                f"{schedule.source} has ranks 0 to {schedule.num_ranks - 1}, found rank {rank}"
            )
        steps = (
            ComputeAction(atom.kind, atom.stage, atom.microbatch)
            for atom in schedule.atoms[rank]
            if atom.kind in COMPUTE
        )
        return cls(tuple(steps), f"{schedule.source} rank {rank}")

    @classmethod
    def parse(cls, text: str) -> Order:
        """Parse an order from text such as `0F0 0I0 0W0` (stage, kind, microbatch)."""
        atoms = (atom for entry in text.split() for atom in Action.parse(entry).atoms())
        return cls(tuple(ComputeAction(a.kind, a.stage, a.microbatch) for a in atoms), "given")

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stages that appear in the order, ascending."""
        return tuple(sorted({step.stage for step in self.steps}))

    @cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches in an epoch."""
        return 1 + max(step.microbatch for step in self.steps)

    def microbatches(self, stage: int, kind: Kind) -> tuple[int, ...]:
        """Return a stage's microbatches in the order in which one kind of action runs."""
        return tuple(s.microbatch for s in self.steps if s.stage == stage and s.kind is kind)

    def require_whole(self) -> None:
        """
        Raise an error unless each microbatch has exactly one F, dI and dW per stage, in this order.

        Raises:
            BackendError: An action is missing, repeated, or too early.
        """
        seen: set[ComputeAction] = set()
        for step in self.steps:
            if step.kind not in _KINDS:
                continue
            if step in seen:
                raise BackendError(f"the order repeats {step}; expected each F, dI and dW once")
            for kind in _KINDS[: _KINDS.index(step.kind)]:
                if (before := step._replace(kind=kind)) not in seen:
                    raise BackendError(
                        f"the order has {step} without {before} before it; expected F, then dI, "
                        "then dW of each microbatch"
                    )
            seen.add(step)
        for stage in self.stages:
            for microbatch in range(self.num_microbatches):
                if (step := ComputeAction(Kind.WGRAD, stage, microbatch)) not in seen:
                    raise BackendError(
                        f"the order lacks {step}; expected F, dI and dW of microbatches 0 to "
                        f"{self.num_microbatches - 1} of every stage"
                    )

    def require_groups(self, group: int) -> None:
        """
        Raise an error unless the dW of each group of microbatches run one directly after another,
        in ascending order of microbatches.

        Args:
            group: Number of microbatches in each group. It must divide the number of all
                microbatches.

        Raises:
            BackendError: The group does not divide the number of microbatches, or other actions run
                between the dW of a group.
        """
        try:
            require_group(group, self.num_microbatches)
        except ScheduleError as error:
            raise BackendError(str(error)) from None
        for stage in self.stages:
            found = self.microbatches(stage, Kind.WGRAD)
            steps = [s for s in self.steps if s.kind is Kind.WGRAD or s.stage == stage]
            for first in found[::group]:
                expected = [ComputeAction(Kind.WGRAD, stage, m) for m in group_of(first, group)]
                at = steps.index(expected[0])
                if steps[at : at + group] != expected:
                    raise BackendError(
                        f"{self.source or 'the order'}: expected consecutive dW of microbatches "
                        f"{list(group_of(first, group))} of stage {stage}, "
                        f"found {' '.join(map(str, steps[at : at + group]))}; make the table with "
                        "qeffect.schedule.grouping.group_wgrads, or the order with Order.grouped"
                    )

    def grouped(self, group: int) -> Order:
        """
        Return an order in which the dW of each group follow one another, after the group's last dI.

        >>> print(*Order.parse("0F0 0I0 0W0 0F1 0I1 0W1").grouped(2).steps)
        0F0 0I0 0F1 0I1 0W0 0W1

        Args:
            group: Number of microbatches in each group.

        Raises:
            ScheduleError: The group does not divide the number of microbatches.
        """
        require_group(group, self.num_microbatches)
        row = [Action(step.kind, step.stage, step.microbatch) for step in self.steps]
        steps = (ComputeAction(a.kind, a.stage, a.microbatch) for a in grouped_row(row, group))
        return Order(tuple(steps), self.source)

    @property
    def wgrads_follow_dgrads(self) -> bool:
        """Whether every stage runs its dW in the same order of microbatches as its dI."""
        return all(
            self.microbatches(stage, Kind.WGRAD) == self.microbatches(stage, Kind.DGRAD)
            for stage in self.stages
        )

    @property
    def peaks(self) -> dict[int, int]:
        """
        By stage, the largest number of tapes that exist at the same time. A tape is the data that F
        keeps for dI and dW; it exists from F to dW.
        """
        return dict(assign(self.steps, own_readers(self.steps)).peaks)
