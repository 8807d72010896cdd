"""
Print a schedule as torch does: a row per step, a column per rank, with the refused entry marked.
"""

from __future__ import annotations

from itertools import zip_longest

from ..text import counted
from .actions import Schedule
from .findings import Finding

_ROLE_MARKS = {
    "owner": "+",
    "picked": "!",
    "first": "+",
    "needs": "+",
    "peer": "+",
    "awaited": "+",
    "waits": "!",
}

_LEGEND = {
    ">": "the refused entry, marked >..<",
    "+": "the expected entry, the first of two entries, or a needed entry",
    "!": "the entry that was used instead, or another entry that waits",
}


def grid(schedule: Schedule, finding: Finding | None = None, *, context: int | None = 12) -> str:
    """
    Print a schedule as a grid.

    The refused entry is marked `>..<`. Other entries of the finding are marked `+` (the expected,
    first or needed entry) or `!` (the entry that was used instead, or another entry that waits).

    Args:
        schedule: The schedule.
        finding: The finding whose entries are marked; `None` marks nothing.
        context: Number of steps to show before and after the refused step; `None` shows all steps.

    Returns:
        The rows, followed by the meaning of each mark that occurs.
    """
    marks = _marks(finding)
    digits = len(str(max(schedule.num_steps - 1, 0)))
    columns = [
        [marks.get((rank, step), "{}").format(action or "") for step, action in enumerate(row)]
        for rank, row in enumerate(schedule.rows)
    ]
    heads = [f"Rank {rank}" for rank in range(schedule.num_ranks)]
    widths = [max(map(len, (head, *column))) for head, column in zip(heads, columns, strict=True)]
    lines = [(" " * (len("Step ") + digits + 2) + _join(heads, widths)).rstrip()]
    first, last = _window(schedule.num_steps, finding, context)
    if first > 0:
        lines.append(f"... {counted(first, 'step')}")
    for step, entries in enumerate(zip_longest(*columns, fillvalue="")):
        if first <= step <= last:
            label = f"Step {step:0{digits}d}: "
            tail = ""
            if finding is not None and finding.step == step:
                tail = f" <-- {finding.clause} on rank {finding.rank}"
            lines.append((label + _join(list(entries), widths)).rstrip() + tail)
    if last < schedule.num_steps - 1:
        lines.append(f"... {counted(schedule.num_steps - 1 - last, 'step')}")
    shown = "".join("".join(column[first : last + 1]) for column in columns)
    lines += [""] * any(mark in shown for mark in _LEGEND)
    lines += [f"  {mark}  {meaning}" for mark, meaning in _LEGEND.items() if mark in shown]
    return "\n".join(lines) + "\n"


def _marks(finding: Finding | None) -> dict[tuple[int, int], str]:
    if finding is None:
        return {}
    marks = {
        (other.rank, other.step): _ROLE_MARKS.get(other.role, "+") + "{}"
        for other in finding.related
    }
    if finding.rank is not None and finding.step is not None:
        marks[finding.rank, finding.step] = ">{}<"
    return marks


def _window(steps: int, finding: Finding | None, context: int | None) -> tuple[int, int]:
    if context is None or finding is None or finding.step is None:
        return 0, steps - 1
    return max(0, finding.step - context), min(steps - 1, finding.step + context)


def _join(entries: list[str], widths: list[int]) -> str:
    return " ".join(f"{entry:<{width}}" for entry, width in zip(entries, widths, strict=True))
