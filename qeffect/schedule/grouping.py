"""
Grouped dW: one product computes the weight gradients of several microbatches of a stage.

Groups are blocks of consecutive microbatches, so they do not depend on the order of a table. The
dW of a group waits for the group's last dI, so a rank keeps more tapes live and has less dW to fill
its bubbles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from .actions import SENDS, SHARDING, Action, Kind, Schedule, ScheduleError

__all__ = ["group_of", "group_wgrads", "grouped_row", "require_group"]

_SOURCE_OF = {Kind.SEND_F: Kind.FORWARD, Kind.SEND_B: Kind.DGRAD}


def require_group(group: int, microbatches: int) -> None:
    """
    Require a number of microbatches that can be divided into groups.

    Args:
        group: Microbatches in each group.
        microbatches: Number of microbatches of the table.

    Raises:
        ScheduleError: The group is not a positive divisor of the number of microbatches.
    """
    if type(group) is not int or group < 1 or microbatches % group:
        raise ScheduleError(
            f"group: expected a divisor of the {microbatches} microbatches of a walk, found "
            f"{group!r}; 1 computes the weight gradient of each microbatch by itself"
        )


def group_of(microbatch: int, group: int) -> tuple[int, ...]:
    """
    Return all microbatches whose weight gradient is computed with that of `microbatch`, ascending.

    >>> group_of(5, 4)
    (4, 5, 6, 7)
    """
    first = microbatch - microbatch % group
    return tuple(range(first, first + group))


def group_wgrads(schedule: Schedule, group: int) -> Schedule:
    """
    Return a table in which the dW of each group run one after another, behind the group's last dI.

    The dW of a group run in ascending order of microbatches, at the place of the group's last dW in
    the table. One product can then replace these dW: the product takes the place of the first.

    Each full backward becomes its dI, its sends and then its dW, and each send follows the action
    that produces what it sends. Idle entries and the sharding of parameters are left out.

    >>> from .infer import from_actions
    >>> table = from_actions([["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]])
    >>> print(*group_wgrads(table, 2).rows[0])
    0F0 0F1 0I0 0I1 0W0 0W1

    Args:
        schedule: The table.
        group: Microbatches in each group; 1 only splits the full backwards.

    Raises:
        ScheduleError: The group does not divide the number of microbatches.
    """
    require_group(group, schedule.num_microbatches)
    rows = tuple(tuple(grouped_row(_split(row), group)) for row in schedule.rows)
    return attrs.evolve(schedule, rows=rows)


def _split(row: Iterable[Action | None]) -> Iterator[Action]:
    """Split full backwards, and move each send directly behind the action that produces it."""
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
    Hold back each dW of a row until all dW of its group have come.

    Args:
        row: The row, without full backwards.
        group: Microbatches in each group.
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
