"""
Read DeepSpeed's instruction streams as tables, from its schedule classes and without its engine.

`deepspeed.runtime.pipe.schedule.PipeSchedule.steps()` yields the instructions of one rank, and each
instruction names a buffer, not a microbatch. So this reader tracks the content of the buffers:

* A receive, or a load on the first stage, puts the stage's next microbatch into the named buffer.
* ForwardPass takes the oldest input of its buffer, and leaves a tape (what a forward leaves for its
  backward) in the buffer.
* BackwardPass takes the oldest tape of its buffer; RecvGrad receives the gradient of that tape.
* SendActivation and SendGrad send what the last ForwardPass or BackwardPass left in the buffer.

A buffer counts as a slot of its stage. `qeffect.schedule.check` gives every tape the slot of its
buffer, so a write into a buffer that still holds a tape is refused as `ownership.slot-busy`.

An instruction with `phase=1` belongs to the second stage of a rank (DualPipeV): stage
`2 * stages - 1 - rank`. A schedule class with CommitP2P first queues its sends and receives. The
table lists them at the CommitP2P that launches them, sends first, since no message of such a batch
waits for another message of the batch. Messages that are never launched are not in the table.

The reader recognizes an instruction by the name of its class or of a base class, so it also reads
subclasses. ReduceGrads reduces the gradients of all stages of the rank. ReduceTiedGrads is not in
the table.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import Any

from ..text import counted
from .actions import RECEIVES, Action, Kind, Schedule, ScheduleError, shorten
from .infer import MAX_ENTRIES, schedule_of
from .own_class import import_class
from .pairing import Work

__all__ = ["INSTRUCTIONS", "deepspeed_schedule"]

#: Module of DeepSpeed's own schedule classes; a user may name these classes without the module.
MODULE = "deepspeed.runtime.pipe.schedule"
_MESSAGES = {
    "SendActivation": Kind.SEND_F,
    "RecvActivation": Kind.RECV_F,
    "SendGrad": Kind.SEND_B,
    "RecvGrad": Kind.RECV_B,
}
_BATCHES = "CommitP2P launches its messages together, so no send of a batch blocks its rank"
_BUFFERED = {*_MESSAGES, "LoadMicroBatch", "ForwardPass", "BackwardPass"}
#: Names of the instructions that the reader knows.
INSTRUCTIONS = {*_BUFFERED, "CommitP2P", "ReduceGrads", "ReduceTiedGrads", "OptimizerStep"}


def deepspeed_schedule(name: str | type, *, stages: int, microbatches: int) -> Schedule:
    """
    Return the table of a DeepSpeed schedule class.

    Args:
        name: `module:Class`, the plain name of a class in `deepspeed.runtime.pipe.schedule`, or
            the class itself.
        stages: Number of pipeline ranks; DeepSpeed calls it `stages` too.
        microbatches: Number of microbatches per step.

    Raises:
        ScheduleError: DeepSpeed is missing; the class is unknown, refuses these numbers, or has no
            backward passes; or one of its instructions cannot be read.
    """
    for what, number in (("stages", stages), ("microbatches", microbatches)):
        if type(number) is not int or number < 1:
            raise ScheduleError(f"DeepSpeed: {what} must be at least 1, not {number}")
    if stages * microbatches * 2 > MAX_ENTRIES:
        raise ScheduleError(f"DeepSpeed: more than the limit of {MAX_ENTRIES} entries")
    if isinstance(name, str):
        cls = import_class(
            name if ":" in name else f"{MODULE}:{name}",
            "pip install deepspeed, or name your own class as module:Class",
        )
    else:
        cls = name
    if not callable(getattr(cls, "steps", None)):
        raise ScheduleError(
            f"{cls.__module__}:{cls.__name__} is not a schedule class; expected a class with "
            f"steps(), such as a subclass of {MODULE}.PipeSchedule"
        )
    source = f"DeepSpeed {cls.__name__} stages={stages} microbatches={microbatches}"
    ranks = [_Stream(cls, source, rank, stages, microbatches) for rank in range(stages)]
    queued = any(stream.commits for stream in ranks)
    rows = [stream.read(queued) for stream in ranks]
    folded = any(stream.folded for stream in ranks)
    num_stages = 2 * stages if folded else stages
    if not any(action.kind is Kind.BACKWARD for row in rows for action in row):
        raise ScheduleError(
            f"{source}: no BackwardPass on any rank; only schedules that train are checked"
        )
    return schedule_of(
        rows,
        source=source,
        num_stages=num_stages,
        num_microbatches=microbatches,
        stage_to_rank={
            stage: stage if stage < stages else num_stages - 1 - stage
            for stage in range(num_stages)
        },
        complete=True,
        notes=[_BATCHES] if queued else [],
        buffers={work: slot for stream in ranks for work, slot in stream.slots.items()},
    )


class _Stream:
    """Reads the instructions of one rank, and tracks the content of the rank's buffers."""

    def __init__(
        self, cls: type[Any], source: str, rank: int, stages: int, microbatches: int
    ) -> None:
        self.source, self.rank, self.stages = source, rank, stages
        self.steps, self.buffers = self._instructions(cls, microbatches)
        named = [name for step in self.steps for name, _ in step]
        self.commits = "CommitP2P" in named
        self.folded = any(given.get("phase", 0) for step in self.steps for _, given in step)
        #: The buffer of each tape.
        self.slots: dict[Work, int] = {}
        self._at: tuple[int, str] = (0, "")
        self._counts: Counter[tuple[str, int]] = Counter()
        self._inputs: defaultdict[int, deque[Work]] = defaultdict(deque)
        self._late: defaultdict[int, deque[Work]] = defaultdict(deque)
        self._tapes: defaultdict[int, deque[Work]] = defaultdict(deque)
        self._awaiting: defaultdict[int, deque[Work]] = defaultdict(deque)
        self._left: dict[tuple[str, int], Work] = {}

    def _instructions(
        self, cls: type[Any], microbatches: int
    ) -> tuple[list[list[tuple[str, dict[str, Any]]]], int]:
        """Return the instructions of each step, and the number of buffers that the class needs."""
        read: list[list[tuple[str, dict[str, Any]]]] = []
        total = 0
        try:
            made = cls(microbatches, self.stages, self.rank)
            for number, step in enumerate(made.steps()):
                total += len(step) + 1
                if total > MAX_ENTRIES:
                    raise ScheduleError(
                        f"{self.source}: more than the limit of {MAX_ENTRIES} entries"
                    )
                read.append([self._known(number, instruction) for instruction in step])
            buffers = int(made.num_pipe_buffers())
        except (ScheduleError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit too: a user's class may raise anything
            said = " ".join(str(error).split()) or "no message"
            raise ScheduleError(
                f"{self.source}: the class refuses rank {self.rank}: {type(error).__name__}: {said}"
            ) from error
        return read, buffers

    def _known(self, number: int, instruction: Any) -> tuple[str, dict[str, Any]]:
        for base in type(instruction).__mro__:
            if base.__name__ in INSTRUCTIONS:
                given = dict(getattr(instruction, "kwargs", {}))
                break
        else:
            raise self._error(
                number,
                type(instruction).__name__,
                f"unknown instruction; expected one of {', '.join(sorted(INSTRUCTIONS))}",
            )
        buffer, phase = given.get("buffer_id"), given.get("phase", 0)
        if base.__name__ in _BUFFERED and (type(buffer) is not int or buffer < 0):
            raise self._error(
                number, base.__name__, f"expected a buffer_id of at least 0, found {buffer!r}"
            )
        if phase not in (0, 1):
            raise self._error(number, base.__name__, f"expected a phase of 0 or 1, found {phase!r}")
        return base.__name__, given

    def _error(self, step: int, name: str, message: str) -> ScheduleError:
        return ScheduleError(
            f"{self.source}, instruction {shorten(name)}: {message}",
            rank=self.rank,
            step=step,
            entry=name,
        )

    def read(self, queued: bool) -> list[Action]:
        """
        Read the rank's row.

        Args:
            queued: Whether the class queues messages until a CommitP2P.

        Raises:
            ScheduleError: A buffer does not exist or is used by two stages at once, or an
                instruction follows OptimizerStep.
        """
        row: list[Action] = []
        batch: list[Action] = []
        updated = False
        for number, step in enumerate(self.steps):
            for name, given in step:
                self._at = (number, name)
                if updated and name in _BUFFERED:
                    raise self._error(
                        number, name, "expected no instruction of the step after OptimizerStep"
                    )
                if name in _MESSAGES:
                    (batch if queued else row).append(self._message(name, given))
                elif name == "CommitP2P":
                    row += sorted(batch, key=lambda action: action.kind in RECEIVES)
                    batch.clear()
                elif name == "ReduceGrads":
                    row += [Action(Kind.REDUCE_GRAD, stage) for stage in self._own()]
                elif name == "OptimizerStep":
                    updated = True
                elif name == "LoadMicroBatch":
                    self._load(given)
                elif name != "ReduceTiedGrads":
                    row.append(self._compute(name, given))
        return row

    def _own(self) -> Iterator[int]:
        yield self.rank
        if self.folded:
            yield 2 * self.stages - 1 - self.rank

    def _place(self, given: dict[str, Any]) -> tuple[int, int]:
        """Return the stage and the buffer of an instruction."""
        buffer = given["buffer_id"]
        if buffer >= self.buffers:
            raise self._error(
                *self._at,
                f"buffer {buffer} does not exist; num_pipe_buffers() of this rank is "
                f"{counted(self.buffers, 'buffer')}",
            )
        stage = self.rank if given.get("phase", 0) == 0 else 2 * self.stages - 1 - self.rank
        for held in (*self._inputs[buffer], *self._tapes[buffer]):
            if held[0] != stage:
                raise self._error(
                    *self._at,
                    f"stages {held[0]} and {stage} use buffer {buffer} at once, but slots are "
                    "checked per stage; give each of the two phases its own buffers",
                )
        return stage, buffer

    def _next(self, what: str, stage: int) -> Work:
        self._counts[what, stage] += 1
        return stage, self._counts[what, stage] - 1

    def _load(self, given: dict[str, Any]) -> None:
        # The last stage loads labels; its input is received.
        stage, buffer = self._place(given)
        if stage == 0:
            self._put(buffer, self._next("input", stage))

    def _put(self, buffer: int, work: Work) -> Work:
        self._inputs[buffer].append(work)
        self.slots[work] = buffer
        return work

    def _message(self, name: str, given: dict[str, Any]) -> Action:
        stage, buffer = self._place(given)
        if name == "RecvActivation":
            late = self._late[buffer]
            work = late.popleft() if late else self._put(buffer, self._next("input", stage))
        elif name == "RecvGrad":
            awaiting = self._awaiting[buffer]
            work = awaiting.popleft() if awaiting else self._next(name, stage)
        else:
            made = "ForwardPass" if name == "SendActivation" else "BackwardPass"
            work = self._left.get((made, buffer)) or self._next(name, stage)
        return Action(_MESSAGES[name], *work)

    def _compute(self, name: str, given: dict[str, Any]) -> Action:
        stage, buffer = self._place(given)
        if name == "ForwardPass":
            inputs = self._inputs[buffer]
            if inputs:
                work = inputs.popleft()
            else:  # its receive comes too late, or never
                work = self._next("input", stage)
                self._late[buffer].append(work)
            self.slots.setdefault(work, buffer)
            self._tapes[buffer].append(work)
            self._awaiting[buffer].append(work)
        else:
            tapes = self._tapes[buffer]
            work = tapes.popleft() if tapes else self._next(name, stage)
            if work in self._awaiting[buffer]:
                self._awaiting[buffer].remove(work)
        self._left[name, buffer] = work
        return Action(Kind.FORWARD if name == "ForwardPass" else Kind.BACKWARD, *work)
