"""
One rank's row of a schedule table with messages. `walked` adds waits for sends to a table. `Row.of`
assigns slots (sets of buffers) to the microbatches.

A table says when messages are posted. Up to torch 2.14, torch's tables do not say when a send must
have finished. Every send from a slot must finish before a receive or an F uses the slot again.
Therefore `walked` adds a wait directly before that receive or F. The wait is not added earlier,
because a wait blocks the stream. The wait is an entry of the table, so `qeffect check` sees it. A
slot is in use from the post of its receive until its dW and its messages have finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from qeffect.schedule.actions import (
    SENDS,
    Action,
    Atom,
    Kind,
    Schedule,
    ScheduleError,
)
from qeffect.schedule.check import check
from qeffect.schedule.findings import Finding
from qeffect.schedule.grouping import group_wgrads
from qeffect.schedule.index import Event
from qeffect.schedule.slots import Assignment, Tape, assign_walked
from qeffect.schedule.transport import Transport

from .order import Order
from .slots import Provisioning, SlotPlan

__all__ = ["Row", "ScheduleRefusedError", "feeds_of", "walked"]

#: How messages are carried: each directed pair of ranks has one queue, and a send ends only once
#: its receive is posted, as on NCCL.
TRANSPORT = Transport("edge", rendezvous="queue")

_TAKES = (Kind.RECV_F, Kind.FORWARD)
_WAIT_OF = {Kind.SEND_F: Kind.WAIT_SEND_F, Kind.SEND_B: Kind.WAIT_SEND_B}


class ScheduleRefusedError(ScheduleError):
    """
    Raised if `qeffect check` refuses the table. No rank then starts to run the table.

    Args:
        finding: The first finding of `qeffect check`, which caused the refusal.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(f"{finding.clause}: {finding.message}")
        self.finding = finding


@attrs.frozen
class Row:
    """
    One rank's row of a schedule table: its actions and messages in a step, and the slots (sets of
    buffers) that they use.

    Args:
        table: The whole schedule table, as `walked` returned it.
        rank: The rank of this row.
        atoms: All actions, posts of messages, and waits for sends, in order.
        order: The F, dI and dW among `atoms`.
        slots: The slot of each microbatch.
        feeds: Maps a stage of this rank to the stage of this rank that reads its output without a
            message.
    """

    table: Schedule
    rank: int
    atoms: tuple[Atom, ...]
    order: Order
    slots: SlotPlan
    feeds: Mapping[int, int]

    @classmethod
    def of(
        cls, table: Schedule, rank: int, provisioning: Provisioning = "live", group: int = 1
    ) -> Row:
        """
        Return one rank's row of a table that `walked` returned for the same provisioning and group.

        Raises:
            ScheduleError: The table has no rank with this number, or the rank has no actions.
        """
        if not 0 <= rank < table.num_ranks or not table.stages_of(rank):
            raise ScheduleError(f"{table.source}: rank {rank} has no actions")
        atoms = table.atoms[rank]
        made = _assign(table, _steps(atoms), reuse=provisioning == "live")
        order = Order.of_rank(table, rank)
        slots = SlotPlan(order, provisioning, made.slot_of, dict(made.num_slots), group=group)
        return cls(table, rank, atoms, order, slots, feeds_of(table, rank))

    @property
    def stages(self) -> tuple[int, ...]:
        """The rank's stages, ascending."""
        return self.table.stages_of(self.rank)

    def receives_input(self, stage: int) -> bool:
        """Whether a stage receives its input from another rank in a message."""
        return stage > 0 and stage not in self.feeds.values()

    def receives_gradient(self, stage: int) -> bool:
        """Whether a stage receives the gradient of its output in a message."""
        return stage < self.table.num_stages - 1 and stage not in self.feeds


def feeds_of(table: Schedule, rank: int) -> dict[int, int]:
    """Return, for each stage of a rank, the stage of the same rank that takes its output."""
    own = set(table.stages_of(rank))
    return {stage: stage + 1 for stage in sorted(own) if stage + 1 in own}


def walked(schedule: Schedule, provisioning: Provisioning = "live", group: int = 1) -> Schedule:
    """
    Return a schedule table in the form that ranks run. `qeffect check` must accept the given table
    and the new table.

    Each full backward becomes a dI and a dW; its sends are posted before the dW. If the table has
    no wait for a send, a wait is added before the send's slot is reused, or at the end of the row.

    >>> from qeffect.schedule.infer import from_actions
    >>> rows = [["0F0", "0SEND_F0", "0RECV_B0", "0B0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]]
    >>> for row in walked(from_actions(rows)).rows:
    ...     print(*row)
    0F0 0SEND_F0 0RECV_B0 0I0 0W0 0WAIT_SEND_F0
    1RECV_F0 1F0 1I0 1SEND_B0 1W0 1WAIT_SEND_B0

    Args:
        schedule: A schedule table of all ranks, with messages if there is more than one rank.
        provisioning: How slots (sets of buffers) are assigned: `live` reuses slots; `static` gives
            each microbatch its own slot. For slots that are not reused, the rank waits for the
            sends at the end of its row.
        group: Number of microbatches whose dW are computed as one product. The dW of a group follow
            one another in the new table.

    Raises:
        ScheduleRefusedError: `qeffect check` refuses the given table or the new table.
        ScheduleError: Ranks or messages are missing, or the group does not divide the number of
            microbatches.
    """
    if not schedule.complete:
        raise ScheduleError(f"{schedule.source}: some ranks are missing; give a table of all ranks")
    if not schedule.has_comms and len(set(schedule.stage_to_rank.values())) > 1:
        raise ScheduleError(
            f"{schedule.source}: the table names no messages; give one with SEND_F, RECV_F, SEND_B "
            "and RECV_B (torch's pipeline_order_with_comms)"
        )
    _require(schedule)
    table = group_wgrads(schedule, group)
    if not table.awaits_sends:
        rows = (_awaited(table, r, provisioning) for r in range(table.num_ranks))
        table = attrs.evolve(table, rows=tuple(rows))
    _require(table)
    return table


def _require(table: Schedule) -> None:
    verdict = check(table, transport=TRANSPORT)
    if verdict.finding is not None:
        raise ScheduleRefusedError(verdict.finding)


def _awaited(table: Schedule, rank: int, provisioning: Provisioning) -> tuple[Action, ...]:
    """
    Return a rank's line with a wait for every send: before the slot (the buffers) of the send is
    reused, or at the end of the line.
    """
    made = _assign(table, _steps(table.atoms[rank]), reuse=provisioning == "live")
    leaving: dict[tuple[int, int], list[Action]] = {}
    taken: set[Tape] = set()
    row: list[Action] = []
    for action in table.rows[rank]:
        assert action is not None  # `_split` leaves no entry idle
        tape = action.stage, action.microbatch
        if action.kind in _TAKES and tape not in taken:
            taken.add(tape)
            row += leaving.pop((action.stage, made.slot_of[tape]), ())
        row.append(action)
        if action.kind in SENDS:
            wait = Action(_WAIT_OF[action.kind], *tape)
            leaving.setdefault((action.stage, made.slot_of[tape]), []).append(wait)
    return (*row, *(wait for waits in leaving.values() for wait in waits))


def _steps(atoms: Sequence[Atom]) -> list[Event]:
    return [(a.kind, a.stage, a.microbatch) for a in atoms]


def _assign(table: Schedule, steps: Sequence[Event], *, reuse: bool) -> Assignment:
    """
    Assign each microbatch a slot (a set of buffers) from its receive on. The slot is free again
    once its dW, its local readers and its messages have finished.
    """
    return assign_walked(steps, awaits_sends=table.awaits_sends, reuse=reuse)
