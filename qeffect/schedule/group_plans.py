"""
Compare the cost (live tapes and slots, that is, memory) and the gain (step time) of grouped dW, for
several group sizes. With grouped dW, one matrix product computes the weight gradients of a group of
microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from ..text import aligned
from .actions import Schedule
from .durations import Durations
from .grouping import group_wgrads
from .plan import RankPlan, plan, runtime_slots
from .steptime import StepTime, step_time
from .transport import DEFAULT, Transport

__all__ = ["GroupPlan", "comparison_lines", "fastest"]

#: Up to this many ranks, a row of the comparison lists the number of every rank.
_RANKS = 4


@attrs.frozen
class GroupPlan:
    """
    The resources and the step time of a table with grouped dW.

    Args:
        group: Number of microbatches in each group.
        ranks: The resources that each rank needs.
        slots: The number of slots (sets of buffers) of each stage in QEffect's own runtime; None if
            that runtime cannot run the table.
        timed: The simulated step; None without durations.
        untimed: Stages for which the durations lack the time of the grouped dW product.
    """

    group: int
    ranks: tuple[RankPlan, ...]
    slots: dict[int, int] | None
    timed: StepTime | None
    untimed: tuple[int, ...]

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        group: int,
        durations: Durations | None,
        transport: Transport = DEFAULT,
    ) -> GroupPlan:
        """
        Group the dW of a table, and plan and time the result.

        Args:
            schedule: The table without groups.
            group: Number of microbatches in each group.
            durations: The times of the table's actions and messages; None plans without times.
            transport: How the runtime carries messages.

        Raises:
            ScheduleError: The group size does not divide the number of microbatches, or the
                durations are for another schedule.
        """
        table = group_wgrads(schedule, group)
        timed, untimed = None, []
        if durations is not None:
            timed = step_time(table, durations, transport, group=group)
            if group > 1:
                stages = sorted(table.stage_to_rank)
                untimed = [s for s in stages if durations.product(s, group) is None]
        return cls(group, plan(table).ranks, runtime_slots(table), timed, tuple(untimed))

    @property
    def rank_slots(self) -> tuple[int, ...] | None:
        """Number of slots of each rank in QEffect's own runtime."""
        if self.slots is None:
            return None
        return tuple(sum(self.slots[s.stage] for s in rank.stages) for rank in self.ranks)

    @property
    def bubble(self) -> float:
        """The share of the step in which ranks are idle, over all ranks."""
        ranks = () if self.timed is None else self.timed.ranks
        whole = sum(rank.busy + rank.idle for rank in ranks)
        return float(sum(rank.idle for rank in ranks) / whole) if whole else 0.0

    def over(self, first: GroupPlan) -> float | None:
        """
        Return this step time divided by the step time of another plan; None if a time is unknown or
        the divisor is 0.
        """
        if self.timed is None or first.timed is None or not first.timed.time:
            return None
        return float(self.timed.time / first.timed.time)

    def record(self, first: GroupPlan) -> dict[str, Any]:
        """Return this plan and its comparison with the first plan as plain data, for JSON."""
        totals = self.rank_slots
        ranks = [
            {
                "rank": rank.rank,
                "peak_live": rank.peak_live,
                "peak_deferred": rank.peak_deferred,
                "slots": rank.slots,
                "runtime_slots": None if totals is None else totals[place],
                "stages": [
                    {
                        "stage": stage.stage,
                        "peak_live": stage.peak_live,
                        "peak_deferred": stage.peak_deferred,
                        "runtime_slots": None if self.slots is None else self.slots[stage.stage],
                    }
                    for stage in rank.stages
                ],
            }
            for place, rank in enumerate(self.ranks)
        ]
        found: dict[str, Any] = {"group": self.group, "ranks": ranks}
        if self.timed is not None:
            found["step_time"] = self.timed.record()
            found["bubble"] = self.bubble
            found["over_group_1"] = self.over(first)
            found["stages_without_product_time"] = list(self.untimed)
        return found


def fastest(plans: Sequence[GroupPlan]) -> GroupPlan | None:
    """
    Return the plan with the shortest step; among equally short plans, the one with the smallest
    group.

    A plan is ignored if the durations lack the time of one of its dW products. The result is None
    if fewer than two plans remain.
    """
    timed = [one for one in plans if one.timed is not None and not one.untimed]
    if len(timed) < 2:
        return None
    return min(timed, key=lambda one: (one.timed.time if one.timed else 0, one.group))


def comparison_lines(found: Sequence[GroupPlan], schedule: Schedule) -> Iterator[str]:
    """
    Yield lines that compare each plan with the plan of group size 1.

    Args:
        found: The plans in ascending order of group size; the first has group size 1.
        schedule: The table without groups.
    """
    first = found[0]
    yield "grouped dW: one product computes the dW of a group of microbatches, after their last dI"
    columns = [
        ["group", *(str(one.group) for one in found)],
        ["live tapes", *(_by_rank(r.peak_live for r in one.ranks) for one in found)],
        ["deferred dW", *(_by_rank(r.peak_deferred for r in one.ranks) for one in found)],
        ["slots", *(_by_rank(r.slots for r in one.ranks) for one in found)],
    ]
    if first.rank_slots is not None:
        columns.append(["runtime slots", *(_by_rank(one.rank_slots or ()) for one in found)])
    if first.timed is not None:
        unit = first.timed.unit
        ratios = [one.over(first) for one in found]
        columns += [
            [
                f"step time {unit}",
                *(f"{float(one.timed.time):.4g}" for one in found if one.timed is not None),
            ],
            ["over group 1", *("-" if r is None else f"{r:.3f}" for r in ratios)],
            ["bubble", *(f"{one.bubble:.1%}" for one in found)],
        ]
    yield from aligned(list(zip(*columns, strict=True)))
    if len(first.ranks) > _RANKS:
        yield (
            "live tapes, deferred dW and slots: lowest to highest number of any rank; "
            "--json has every rank"
        )
    elif len(first.ranks) > 1:
        yield "live tapes, deferred dW and slots: by rank, rank 0 first"
    if first.rank_slots is not None:
        yield (
            "runtime slots: slots in QEffect's own runtime; there a receive already takes the "
            "slot, and other stages of the rank also read the tape"
        )
    elif schedule.complete:
        yield (
            "no runtime slots (slots in QEffect's own runtime): the table names no messages; give "
            "a table with messages (--comms with --torch CLASS)"
        )
    for one in found:
        yield from _untimed(one)
    best = fastest(found)
    if best is not None:
        yield f"fastest: group {best.group}"


def _untimed(one: GroupPlan) -> Iterator[str]:
    """Yield a line that names the dW products without a time in the durations, if there are any."""
    if not one.untimed:
        return
    group, missing = one.group, f"no time for a product of {one.group} microbatches"
    field = f'"grouped_W": {{"{group}": TIME}}'
    if len(one.untimed) == sum(len(rank.stages) for rank in one.ranks):
        yield f"group {group}: {missing}: assumed {group} times W; add {field} to the durations"
    else:
        names = ", ".join(map(str, one.untimed))
        several = len(one.untimed) > 1
        stages = f"{'stages' if several else 'stage'} {names}"
        place = "each stage" if several else "the stage"
        yield (
            f"group {group}: {missing} of {stages}: assumed {group} times W; add {field} to {place}"
        )


def _by_rank(numbers: Iterable[int]) -> str:
    """Return the numbers of all ranks as text; for many ranks the smallest and the largest."""
    every = list(numbers)
    if len(every) > _RANKS:
        least, most = min(every), max(every)
        return str(most) if least == most else f"{least} to {most}"
    return " / ".join(map(str, every))
