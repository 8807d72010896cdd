"""
Print a schedule as text: every call in order, and a line for each slot (set of buffers) with its
calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from qeffect import Ticket

from ..calls import Call

__all__ = ["CallRecord", "schedule_text", "timeline_text"]

_KINDS = {
    "forward": "F",
    "dgrad": "I",
    "wgrad": "W",
    "refresh": "R",
    "update": "C",
    "evaluation": "E",
}
_COLUMNS = 24


@frozen
class CallRecord:
    """
    One call of a schedule and its outcome.

    Args:
        call: The call of the contract, with its arguments.
        refused: The clause that refused the call; empty if the call was accepted.
        slot: The slot (set of buffers) that the call was about; None if the call was about no slot.
        result: The result of the call in words.
    """

    call: Call
    refused: str = ""
    slot: int | None = None
    result: str = ""

    @property
    def mark(self) -> str:
        """The call in a few letters: ``F0(`` is a check, ``F0)`` a commit, ``F0x`` an abort."""
        phase, _, kind = self.call.transition.partition("_")
        key = self.call.arguments.get("key")
        ticket = self.call.arguments.get("ticket")
        if isinstance(ticket, Ticket):
            key = ticket.key
        if kind in _KINDS:
            letter = _KINDS[kind]
            end = {"check": "(", "commit": ")", "abort": "x", "group": "+", "ungroup": "-"}[phase]
        else:
            letter, end = _LETTERS.get(self.call.transition, "?"), ""
        number = "" if key is None else str(key.microbatch)
        return f"{letter}{number}{end}{'!' if self.refused else ''}"


_LETTERS = {
    "reserve": "v",
    "bind": "b",
    "read": "r",
    "finish_read": "d",
    "drop": "D",
    "purge": "P",
    "invalidate": "i",
    "submit": "s",
    "join": "j",
    "wait": "w",
    "drain": "h",
    "finalize": "Z",
    "start_reduction": "a(",
    "finish_reduction": "a)",
    "fail_reduction": "ax",
    "start_weights_read": "n(",
    "finish_weights_read": "n)",
    "start_gradients_read": "g(",
    "finish_gradients_read": "g)",
    "move_scales": "M",
    "fail": "E",
    "checkpoint": "K",
    "restore": "R",
}
_LEGEND = (
    "F forward, I dgrad, W wgrad, R refresh, C update, each with ( checked, ) committed, x "
    "aborted; W+ taken into a group, W- out of it; ! refused; v reserve, b bind, r read, d done "
    "reading, D drop, P purge, i invalidate, s submit, j join, w wait, h host drains the device, "
    "Z finalize, a reduction, n read of weights, g read of gradients, M scales move, E late fault, "
    "K checkpoint, R restore"
)


def schedule_text(steps: Sequence[CallRecord]) -> str:
    """Return one line for each call, numbered from zero."""
    lines = []
    for number, step in enumerate(steps):
        how = f"refused: {step.refused}" if step.refused else step.result or "ok"
        lines.append(f"{number:4}  {step.call}  -> {how}")
    return "\n".join(lines)


def timeline_text(steps: Sequence[CallRecord], slots: Sequence[int]) -> str:
    """
    Return the calls as a grid, in which time goes to the right.

    Args:
        steps: The calls of the schedule, each with its outcome.
        slots: The stage of each slot.
    """
    names = ["process", *(f"slot {slot} of stage {stage}" for slot, stage in enumerate(slots))]
    blocks = []
    for start in range(0, len(steps), _COLUMNS):
        part = steps[start : start + _COLUMNS]
        width = max(len(step.mark) for step in part) + 1
        width = max(width, len(str(start + len(part))) + 1)
        rows = [["step", *(str(start + at) for at in range(len(part)))]]
        for row, name in enumerate(names):
            cells = [s.mark if (-1 if s.slot is None else s.slot) == row - 1 else "" for s in part]
            if any(cells):
                rows.append([name, *cells])
        label = max(len(row[0]) for row in rows)
        blocks.append(
            "\n".join(
                f"{row[0]:{label}} |" + "".join(f"{cell:>{width}}" for cell in row[1:])
                for row in rows
            )
        )
    return "\n\n".join([*blocks, _LEGEND])
