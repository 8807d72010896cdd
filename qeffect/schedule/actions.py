"""
Actions, entries and schedules: the types that every reader returns and every check takes.

An *entry* is the content of a schedule table for one rank and one step: idle, or one `Action`. An
action is an action of `torch.distributed.pipelining`: a computation on one stage and one
microbatch, a message, a sharding step, a reduction, or an overlapped pair of computations. Tables
of torch 2.15 also say where a rank waits for the end of a send or of a reduction.

The text of an entry must match completely. torch's own pattern is not anchored and reads ``0F0xyz``
as ``0F0``. This module refuses ``0F0xyz``, because a checker must not guess what an entry means.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import attrs

MAX_INDEX_DIGITS = 6


class ScheduleError(ValueError):
    """
    A schedule cannot be read. A readable schedule with wrong actions gets findings instead.

    The message is one line. The attributes also have the place of the error, so that a command can
    print the place as JSON.

    Args:
        message: What was expected, what was found, and what to do.
        rank: The rank (row) with the error; None if the error is in no single row.
        step: The step (column) with the error; None if the error is in no single column.
        entry: The text of the wrong entry; None if no single entry is wrong.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        entry: str | None = None,
    ) -> None:
        place = ""
        if rank is not None:
            place = f"rank {rank}: " if step is None else f"rank {rank}, step {step}: "
        super().__init__(place + message)
        self.rank = rank
        self.step = step
        self.entry = entry


class Kind(enum.StrEnum):
    """The kinds of actions. The values are torch's names, as in a table."""

    FORWARD = "F"
    DGRAD = "I"
    WGRAD = "W"
    BACKWARD = "B"
    OVERLAP_F_B = "OVERLAP_F_B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"


COMPUTE = frozenset({Kind.FORWARD, Kind.DGRAD, Kind.WGRAD, Kind.BACKWARD})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
SHARDING = frozenset({Kind.UNSHARD, Kind.RESHARD})
PER_STAGE = SHARDING | {Kind.REDUCE_GRAD, Kind.WAIT_REDUCE_GRAD}
#: For each kind of wait, the kind of action that it ends.
WAITS: Mapping[Kind, Kind] = MappingProxyType(
    {
        Kind.WAIT_SEND_F: Kind.SEND_F,
        Kind.WAIT_SEND_B: Kind.SEND_B,
        Kind.WAIT_REDUCE_GRAD: Kind.REDUCE_GRAD,
    }
)
SEND_WAITS = frozenset({Kind.WAIT_SEND_F, Kind.WAIT_SEND_B})

_INDEX = rf"(0|[1-9][0-9]{{0,{MAX_INDEX_DIGITS - 1}}})"
_ENTRY = re.compile(
    rf"{_INDEX}(?:"
    rf"(F|I|W|B|SEND_F|RECV_F|SEND_B|RECV_B|WAIT_SEND_F|WAIT_SEND_B){_INDEX}"
    rf"|(UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD))"
)
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_EXPECTED = (
    "expected stage, action and microbatch (0F1, 2I0, 3SEND_F2, 3WAIT_SEND_F2), a stage's UNSHARD, "
    "RESHARD, REDUCE_GRAD or WAIT_REDUCE_GRAD (1UNSHARD), or (0F1;3B0)OVERLAP_F_B"
)


class Atom(NamedTuple):
    """One indivisible part of an action: a `BACKWARD` has two, its dI and its dW."""

    kind: Kind
    stage: int
    microbatch: int
    step: int
    action: Action


@attrs.frozen
class Action:
    """
    One action of a schedule.

    >>> Action.parse("2I0")
    Action(kind=<Kind.DGRAD: 'I'>, stage=2, microbatch=0, parts=())
    >>> [str(part) for part in Action.parse("(0F3;3B1)OVERLAP_F_B").parts]
    ['0F3', '3B1']

    Args:
        kind: Kind of the action.
        stage: The pipeline stage, counted over all ranks; -1 for an overlap, whose parts have their
            own stages.
        microbatch: The microbatch; -1 for an overlap and for an action of a whole stage.
        parts: The computations of an overlap, in the order in which torch runs them.
    """

    kind: Kind
    stage: int
    microbatch: int = -1
    parts: tuple[Action, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Action:
        """
        Parse a whole entry.

        Args:
            text: The entry; surrounding blanks are allowed.

        Raises:
            ScheduleError: The text is not exactly one action.
        """
        entry = text.strip()
        match = _ENTRY.fullmatch(entry)
        if match is not None:
            stage, kind, microbatch, whole_stage = match.groups()
            if whole_stage is not None:
                return cls(Kind(whole_stage), int(stage))
            return cls(Kind(kind), int(stage), int(microbatch))
        overlap = _OVERLAP.fullmatch(entry)
        if re.search(rf"[0-9]{{{MAX_INDEX_DIGITS + 1},}}", entry):
            raise ScheduleError(
                f"entry {shorten(entry)!r}: expected stages and microbatches of at most "
                f"{MAX_INDEX_DIGITS} digits",
                entry=entry,
            )
        if overlap is None:
            raise ScheduleError(
                f"entry {shorten(entry)!r} is not an action: {_EXPECTED}", entry=entry
            )
        return cls.overlap(*(cls.parse(part) for part in overlap[1].split(";")))

    @classmethod
    def overlap(cls, *parts: Action) -> Action:
        """
        Return an OVERLAP_F_B of the given computations.

        Raises:
            ScheduleError: There are fewer than two parts, or a part is not a computation.
        """
        action = cls(Kind.OVERLAP_F_B, -1, -1, parts)
        if len(parts) < 2 or any(part.kind not in COMPUTE for part in parts):
            raise ScheduleError(
                f"entry {shorten(str(action))!r}: an overlap has two or more of F, I, W and B",
                entry=str(action),
            )
        return action

    @property
    def is_compute(self) -> bool:
        """Whether the action is a computation: F, I, W, B or an overlap of them."""
        return self.kind in COMPUTE or self.kind is Kind.OVERLAP_F_B

    def leaves(self) -> tuple[Action, ...]:
        """The parts of an overlap; for any other action, the action itself."""
        return self.parts or (self,)

    def atoms(self, step: int = 0) -> Iterator[Atom]:
        """The indivisible parts in order: an overlap's computations, and `B` as `I` then `W`."""
        for leaf in self.leaves():
            if leaf.kind is Kind.BACKWARD:
                yield Atom(Kind.DGRAD, leaf.stage, leaf.microbatch, step, self)
                yield Atom(Kind.WGRAD, leaf.stage, leaf.microbatch, step, self)
            else:
                yield Atom(leaf.kind, leaf.stage, leaf.microbatch, step, self)

    def __str__(self) -> str:
        """The entry as torch writes it."""
        if self.kind is Kind.OVERLAP_F_B:
            return f"({';'.join(map(str, self.parts))})OVERLAP_F_B"
        return f"{self.stage}{self.kind.value}{self.microbatch if self.microbatch >= 0 else ''}"


Row = tuple[Action | None, ...]


@attrs.frozen
class Schedule:
    """
    One step of pipeline training as a table: the actions of every rank in order.

    Do not call this constructor: call `qeffect.schedule.infer.schedule_of`, or a function that
    reads a file. These functions infer what a table leaves out, such as the number of stages.

    Args:
        rows: Entries of each rank; the position in a row is the step, `None` is an idle entry.
        stage_to_rank: Rank of each stage.
        num_stages: Number of stages of the whole pipeline.
        num_microbatches: Number of microbatches per step.
        source: Origin of the table, for messages.
        complete: Whether all ranks are present. If not, messages of missing ranks are not checked.
        notes: Facts about the source that a user should know.
        buffers: The slot (set of buffers) of each pair of stage and microbatch, if the source names
            slots. By default each tape (what a forward leaves for its backward) takes a free slot.
    """

    rows: tuple[Row, ...]
    stage_to_rank: Mapping[int, int]
    num_stages: int
    num_microbatches: int
    source: str
    complete: bool = True
    notes: tuple[str, ...] = ()
    buffers: Mapping[tuple[int, int], int] | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the table, including idle ranks."""
        return len(self.rows)

    @property
    def num_steps(self) -> int:
        """The length of the longest row."""
        return max(map(len, self.rows), default=0)

    @cached_property
    def num_actions(self) -> int:
        """Number of entries that are not idle."""
        return sum(action is not None for row in self.rows for action in row)

    @cached_property
    def has_comms(self) -> bool:
        """Whether this is a compute+comms table: it names messages or sharding."""
        return any(
            action is not None and (action.kind in SENDS | RECEIVES | SHARDING)
            for row in self.rows
            for action in row
        )

    @cached_property
    def awaits_sends(self) -> bool:
        """Whether the table says where sends end: it has a WAIT_SEND_F or a WAIT_SEND_B."""
        return any(
            action is not None and action.kind in SEND_WAITS for row in self.rows for action in row
        )

    @cached_property
    def awaits_reductions(self) -> bool:
        """Whether the table says where reductions end: it has a WAIT_REDUCE_GRAD."""
        return any(
            action is not None and action.kind is Kind.WAIT_REDUCE_GRAD
            for row in self.rows
            for action in row
        )

    @property
    def format(self) -> str:
        """torch's name of the table's format."""
        return "compute_comms" if self.has_comms else "compute_only"

    @cached_property
    def atoms(self) -> tuple[tuple[Atom, ...], ...]:
        """For each rank, the indivisible parts of its actions in order."""
        return tuple(
            tuple(
                atom
                for step, action in enumerate(row)
                if action is not None
                for atom in action.atoms(step)
            )
            for row in self.rows
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, ascending."""
        return tuple(sorted(s for s, home in self.stage_to_rank.items() if home == rank))

    def entry(self, rank: int, step: int) -> Action | None:
        """The action of a rank at a step; `None` if the entry is idle or beyond the row's end."""
        row = self.rows[rank]
        return row[step] if 0 <= step < len(row) else None


def shorten(text: str, width: int = 60) -> str:
    """Return the beginning of a long text, for messages about input that may be huge."""
    return text if len(text) <= width else text[: width - 3] + "..."
