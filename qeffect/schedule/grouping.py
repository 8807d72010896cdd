"""
Grouped dW: one product computes the weight gradients of several microbatches of a stage.

Groups are blocks of consecutive microbatches, so they do not depend on the order of a table. The
dW of a group wait for the group's last dI. So a rank keeps more tapes live, and has fewer dW to
fill its bubbles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from .actions import SENDS, SHARDING, Action, Kind, Schedule, ScheduleError

__all__ = ["group_of", "group_wgrads", "grouped_row", "require_group"]

_SOURCE_OF = {Kind.SEND_F: Kind.FORWARD, Kind.SEND_B: Kind.DGRAD}


def require_group(group: int, microbatches: int) -> None:
    """
    Refuse a group size that does not divide the number of microbatches.

    Args:
        group: Number of microbatches in each group.
        microbatches: Number of microbatches of the table.

    Raises:
        ScheduleError: The group size is not a positive divisor of the number of microbatches.
    """
    if type(group) is not int or group < 1 or microbatches % group:
        raise ScheduleError(
            f"group: expected a divisor of the {microbatches} microbatches of the schedule, found "
            f"{group!r}; 1 computes the weight gradient of each microbatch by itself"
        )


def group_of(microbatch: int, group: int) -> tuple[int, ...]:
    """
    Return the microbatches in the group of `microbatch`, in ascending order.

    >>> group_of(5, 4)
    (4, 5, 6, 7)
    """
    first = microbatch - microbatch % group
    return tuple(range(first, first + group))


def group_wgrads(schedule: Schedule, group: int) -> Schedule:
    """
    Return a table in which the dW of each group run one after another, after the group's last dI.

    The dW of a group run in ascending order of microbatches, at the place of the group's last dW in
    the table. One matrix product can then replace these dW, at the place of the first of these dW.

    Each full backward is split into its dI, its sends and its dW, in this order. Each send directly
    follows the action that computes the sent tensor. Idle entries and sharding actions are removed.

    >>> from .infer import from_actions
    >>> table = from_actions([["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]])
    >>> print(*group_wgrads(table, 2).rows[0])
    0F0 0F1 0I0 0I1 0W0 0W1

    Args:
        schedule: The table.
        group: Number of microbatches in each group; 1 only splits the full backwards.

    Raises:
        ScheduleError: The group size does not divide the number of microbatches.
    """
    require_group(group, schedule.num_microbatches)
    rows = tuple(tuple(grouped_row(_split(row), group)) for row in schedule.rows)
    return attrs.evolve(schedule, rows=rows)


def _split(row: Iterable[Action | None]) -> Iterator[Action]:
    """Split full backwards; move each send directly behind the action that computes its tensor."""
    done: list[Action] = []
    latest: list[Action] = []  # the latest computation, and its sends so far
    for action in row:
        if action is None or action.kind in SHARDING:
            continue
        if action.kind in SENDS:
            source = Action(_SOURCE_OF[action.kind], action.stage, action.microbatch)
            place = latest.index(source) + 1 if source in latest else len(latest)
            while place < len(latest) and latest[place].kind in SENDS:
                place += 1
            latest.insert(place, action)
            continue
        done += latest
        latest = [Action(a.kind, a.stage, a.microbatch) for a in action.atoms()]
    return iter((*done, *latest))


def grouped_row(row: Iterable[Action], group: int) -> Iterator[Action]:
    """
    Yield a row in which each dW is delayed until the last dW of its group.

    Args:
        row: The row, without full backwards.
        group: Number of microbatches in each group.
    """
    held: dict[tuple[int, int], list[Action]] = {}
    for action in row:
        if action.kind is not Kind.WGRAD:
            yield action
            continue
        block = held.setdefault((action.stage, action.microbatch // group), [])
        block.append(action)
        if len(block) == group:
            yield from sorted(block, key=lambda one: one.microbatch)
