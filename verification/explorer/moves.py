"""
Moves: the calls that the explorer tries in a state, with right and with wrong arguments.

Moves are made only from the parameters of the transitions. A *frame* gives the possible arguments
for one slot (set of buffers), cell (stage and microbatch) or stage: the right value of each
argument, read from the state; the values that the caller may choose; and the wrong values. A frame
expands into one move for every combination of choices, and into one more move for each wrong value
of an argument. No move is written for a particular clause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attrs import frozen

__all__ = ["ACTIONS", "EVIDENCE", "Move", "Rel", "Value", "Where"]

#: Actions: the transitions that reserve, redeem and abort each action.
ACTIONS: Final[Mapping[str, tuple[str, str, str]]] = {
    name: (f"check_{name}", f"commit_{name}", f"abort_{name}")
    for name in ("refresh", "forward", "evaluation", "dgrad", "wgrad", "update")
}

#: Arguments that report an action's success.
EVIDENCE: Final = (
    "queued",
    "covered",
    "filled",
    "fill_epoch",
    "updates",
    "scales",
    "draws",
    "weight",
    "parts",
)


@frozen
class Rel:
    """A value that is read from the state: an entry of a column (an array of the state), plus an
    offset."""

    column: str
    index: int
    offset: int = 0


@frozen
class Where:
    """A condition on the state: an entry of a column (an array of the state) equals, or differs
    from, a value."""

    column: str
    index: int
    value: int
    equal: bool = True


Value = int | Rel


@frozen(eq=False)
class Move:
    """
    One move: transitions to run one after another, and the arguments to present.

    Args:
        label: The move's name in reports: a transition, or an action that is checked and committed
            (``forward``) or checked and aborted (``forward fails``).
        steps: The transitions, in order; later transitions take the ticket of the first.
        arguments: Arguments by flat name, such as ``key.cell``.
        where: Conditions on the state under which the move is tried.
        right: Whether every argument is right; if so, a step that redeems a ticket must not refuse.
        twin: Whether this move aborts the action that the previous move in the list commits. Both
            moves begin with the same check, so this move is tried only where that check accepts.
    """

    label: str
    steps: tuple[str, ...]
    arguments: Mapping[str, Value]
    where: tuple[Where, ...] = ()
    right: bool = True
    twin: bool = False

    @property
    def reads(self) -> set[tuple[str, int]]:
        """The entries of the state that the move's arguments and conditions depend on."""
        found = {(w.column, w.index) for w in self.where}
        return found | {(v.column, v.index) for v in self.arguments.values() if isinstance(v, Rel)}
