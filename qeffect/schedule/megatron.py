"""
Make the table of one step of Megatron-core from its algorithm, without importing Megatron-core.

Megatron-core itself makes no table. `forward_backward_pipelining_without_interleaving` and
`forward_backward_pipelining_with_interleaving` in `megatron/core/pipeline_parallel/schedules.py`
run loops over lists of tensors. This module runs the same loops over lists of names, rank by rank:

* Rank r runs `2 * (PP - r - 1) + (VPP - 1) * N` forwards first, or `PP - r - 1` without virtual
  stages. Then it alternates F and B, and runs the remaining B at the end. N is the number of
  consecutive microbatches of a virtual stage (`microbatch_group_size_per_vp_stage`).
* The F run group by group (N microbatches each). Within a group they run virtual stage by virtual
  stage, and within a virtual stage microbatch by microbatch. The B run in the same order, but with
  the virtual stages reversed.
* Virtual stage c of rank r is stage `c * PP + r`.

An *exchange* is a set of messages that a rank posts together (`megatron/core/pipeline_parallel/
p2p_communication.py`). The table lists the sends of an exchange first, since no message waits for
another message of the same exchange. Megatron's options decide which messages form an exchange, and
in which order the messages are posted:

* `batched` (`batch_p2p_comm=True`, the default of Megatron-core): one `batch_isend_irecv` for F and
  B together, with the previous rank's messages before the next rank's.
* `plain` (`batch_p2p_comm=False`): the same exchanges, with messages posted one by one. Even ranks
  first post their send to the next rank; odd ranks first post their receive from the previous rank.
* `overlapped` (`overlap_p2p_comm=True`, `batch_p2p_comm=False`): one exchange after F and one after
  B, with messages posted one by one; in interleaved schedules only.
* `prefetched` (with `overlap_p2p_comm_warmup_flush=True`): like `overlapped`, but before the first
  B and after the last F, ranks receive the next tensor while they compute.

Megatron does not name messages. This module names a send after the F or B that made its tensor, and
a receive after the F or B that later takes its tensor out of Megatron's lists. With two ranks, both
neighbours are the same rank, so the order within an exchange decides which tensor a receive gets.

Tests require that the tables equal recorded runs of Megatron-core 0.16.1 and 0.19.2. The module
does not cover `overlap_moe_expert_parallel_comm` and forward-only runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import attrs

from .actions import Action, Kind, Schedule, ScheduleError
from .infer import MAX_ENTRIES, schedule_of
from .pairing import Work

__all__ = ["MESSAGES", "Messages", "megatron_schedule", "schedule_table"]

Messages = Literal["batched", "overlapped", "prefetched", "plain"]
#: Megatron's ways to exchange messages.
MESSAGES: tuple[str, ...] = get_args(Messages)


def megatron_schedule(
    *,
    pp: int,
    vpp: int | None = None,
    microbatches: int,
    messages: str = "batched",
    group: int | None = None,
) -> Schedule:
    """
    Return the table of one step of Megatron-core, with its messages.

    >>> table = megatron_schedule(pp=2, vpp=1, microbatches=2)
    >>> " ".join(map(str, table.rows[1]))
    '1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1'

    Args:
        pp: Number of pipeline ranks, at least 2.
        vpp: Virtual stages of each rank (model chunks); 1 or `None` for 1F1B without interleaving.
        microbatches: Number of microbatches per step.
        messages: Megatron's options for messages, one of `MESSAGES`.
        group: Megatron's `microbatch_group_size_per_vp_stage`; by default `pp`, as in
            Megatron-core.

    Raises:
        ScheduleError: Megatron-core refuses this combination, or an argument is out of range.
    """
    shape = _Shape(pp, 1 if vpp is None else vpp, microbatches, messages, group)
    rows = [_row(shape, rank) for rank in range(pp)]
    return schedule_of(
        rows,
        source=f"Megatron-core {shape}",
        num_stages=pp * shape.vpp,
        num_microbatches=microbatches,
        stage_to_rank={stage: stage % pp for stage in range(pp * shape.vpp)},
        complete=True,
        notes=_notes(shape),
    )


def _notes(shape: _Shape) -> list[str]:
    notes = [
        "Megatron-core posts the messages of an exchange together and waits afterwards, so no send "
        "blocks its rank"
    ]
    if shape.pp == 2 and shape.vpp > 1 and shape.messages == "batched":
        notes.append(
            "with two ranks, the previous and the next rank are the same rank. A batch then has "
            "two sends to this rank, and the order of the sends decides which receive gets which "
            "tensor. Set overlap_p2p_comm=True and batch_p2p_comm=False (--messages overlapped)"
        )
    return notes


def schedule_table(microbatches: int, vpp: int, group: int) -> list[tuple[int, int]]:
    """
    Return the order of a rank's forwards, as Megatron-core's `get_schedule_table` does.

    >>> schedule_table(5, 2, 3)
    [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]

    Args:
        microbatches: Number of microbatches per step.
        vpp: Virtual stages of each rank.
        group: Number of consecutive microbatches of a virtual stage.

    Returns:
        The forwards in order, each as a pair of microbatch and virtual stage.
    """
    return [
        (microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(vpp)
        for microbatch in range(first, min(first + group, microbatches))
    ]


@attrs.frozen
class _Shape:
    """The checked arguments of `megatron_schedule`."""

    pp: int
    vpp: int
    microbatches: int
    messages: str
    given_group: int | None

    @property
    def group(self) -> int:
        return self.pp if self.given_group is None else self.given_group

    def __str__(self) -> str:
        group = "" if self.given_group is None else f" group={self.given_group}"
        return (
            f"pp={self.pp} vpp={self.vpp} microbatches={self.microbatches}{group} {self.messages}"
        )

    def __attrs_post_init__(self) -> None:
        for name in ("pp", "vpp", "microbatches", "group"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ScheduleError(f"Megatron-core {self}: {name} must be at least 1, not {value}")
        if self.messages not in MESSAGES:
            raise ScheduleError(
                f"unknown messages {self.messages!r}; expected one of {', '.join(MESSAGES)}"
            )
        if self.pp < 2:
            raise ScheduleError(
                f"Megatron-core {self}: one rank exchanges no messages; give a pp of at least 2"
            )
        # F, B and at most two sends and two receives for each stage and microbatch.
        if self.pp * self.vpp * self.microbatches * 6 > MAX_ENTRIES:
            raise ScheduleError(
                f"Megatron-core {self}: more than the limit of {MAX_ENTRIES} entries"
            )
        if self.vpp == 1:
            self._check_plain()
        else:
            self._check_interleaved()

    def _check_plain(self) -> None:
        if self.messages in ("overlapped", "prefetched"):
            raise ScheduleError(
                f"Megatron-core refuses {self}: overlap_p2p_comm needs virtual stages; give a vpp "
                "of at least 2, or messages batched or plain"
            )
        if self.given_group is not None:
            raise ScheduleError(
                f"Megatron-core {self}: a group needs virtual stages; leave out the group, or give "
                "a vpp of at least 2"
            )

    def _check_interleaved(self) -> None:
        if not self.pp <= self.group <= self.microbatches:
            raise ScheduleError(
                f"Megatron-core refuses {self}: microbatch_group_size_per_vp_stage is "
                f"{self.group}; expected at least pp={self.pp} and at most "
                f"microbatches={self.microbatches}"
            )
        rest = self.microbatches % self.group
        if 0 < rest < self.pp:
            raise ScheduleError(
                f"Megatron-core refuses {self}: the last group has {rest} of {self.group} "
                f"microbatches; expected a full last group, or at least pp={self.pp} in it"
            )


@attrs.define(eq=False)
class _Receive:
    """A posted receive; the computation that takes its tensor later gives it its name."""

    kind: Kind
    work: Work | None = None


class _Rank:
    """The common state of both loops: the row so far, and Megatron's lists of tensors."""

    def __init__(self, shape: _Shape, rank: int) -> None:
        self.shape = shape
        self.rank = rank
        self.row: list[Action | _Receive] = []
        #: By virtual stage, as in Megatron-core; None where a stage has no neighbour.
        self.inputs: list[list[_Receive | None]] = [[] for _ in range(shape.vpp)]
        self.outputs: list[list[Work]] = [[] for _ in range(shape.vpp)]
        self.gradients: list[list[_Receive | None]] = [[] for _ in range(shape.vpp)]

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.shape.pp - 1

    def compute(self, kind: Kind, work: Work, taken: _Receive | None) -> Work:
        """Record a computation, and name the receive of its input after the computation."""
        if taken is not None:
            taken.work = work
        self.row.append(Action(kind, *work))
        return work

    def backward(self, chunk: int) -> Work:
        self.inputs[chunk].pop(0)
        return self.compute(Kind.BACKWARD, self.outputs[chunk].pop(0), self.gradients[chunk].pop(0))

    def exchange(
        self,
        *,
        output: Work | None = None,
        gradient: Work | None = None,
        recv_prev: bool = False,
        recv_next: bool = False,
    ) -> tuple[_Receive | None, _Receive | None]:
        """
        Post messages together, as `P2PCommunicator._communicate` does.

        Args:
            output: The F whose output is sent to the next rank; `None` sends no output.
            gradient: The B whose input gradient is sent to the previous rank; `None` sends none.
            recv_prev: Whether an input is received from the previous rank.
            recv_next: Whether a gradient is received from the next rank.

        Returns:
            The receive of an input, and the receive of a gradient; each may be `None`.
        """
        to_next = None if output is None else Action(Kind.SEND_F, *output)
        to_prev = None if gradient is None else Action(Kind.SEND_B, *gradient)
        from_prev = _Receive(Kind.RECV_F) if recv_prev else None
        from_next = _Receive(Kind.RECV_B) if recv_next else None
        batched = self.shape.messages == "batched"
        sends = (to_prev, to_next) if batched else (to_next, to_prev)
        self.row += [message for message in (*sends, from_prev, from_next) if message is not None]
        return from_prev, from_next

    def actions(self) -> Iterator[Action]:
        """Yield the actions of the row, with a name for every receive."""
        for step, entry in enumerate(self.row):
            if isinstance(entry, Action):
                yield entry
                continue
            if entry.work is None:
                raise ScheduleError(
                    f"Megatron-core {self.shape}: no F or B uses the tensor of this {entry.kind}",
                    rank=self.rank,
                    step=step,
                )
            yield Action(entry.kind, *entry.work)


def _row(shape: _Shape, rank: int) -> list[Action]:
    ran = _Plain(shape, rank) if shape.vpp == 1 else _Interleaved(shape, rank)
    ran.run()
    return list(ran.actions())


class _Plain(_Rank):
    """`forward_backward_pipelining_without_interleaving`."""

    def run(self) -> None:
        total = self.shape.microbatches
        warmup = min(self.shape.pp - self.rank - 1, total)
        for microbatch in range(warmup):
            self._input(self._recv_forward())
            self._send_forward(self._forward(microbatch))
        given = self._recv_forward() if warmup < total else None
        for microbatch in range(warmup, total):
            self._input(given)
            output = self._forward(microbatch)
            if self.last:
                self.gradients[0].append(None)
            else:
                self.gradients[0].append(self.exchange(output=output, recv_next=True)[1])
            gradient = self.backward(0)
            more = microbatch < total - 1
            given = None if self.first else self.exchange(gradient=gradient, recv_prev=more)[0]
        for _ in range(warmup):
            self.gradients[0].append(None if self.last else self.exchange(recv_next=True)[1])
            gradient = self.backward(0)
            if not self.first:
                self.exchange(gradient=gradient)

    def _recv_forward(self) -> _Receive | None:
        return None if self.first else self.exchange(recv_prev=True)[0]

    def _input(self, given: _Receive | None) -> None:
        self.inputs[0].append(given)

    def _forward(self, microbatch: int) -> Work:
        work = self.compute(Kind.FORWARD, (self.rank, microbatch), self.inputs[0][-1])
        self.outputs[0].append(work)
        return work

    def _send_forward(self, output: Work) -> None:
        if not self.last:
            self.exchange(output=output)


class _Interleaved(_Rank):
    """`forward_backward_pipelining_with_interleaving`."""

    def __init__(self, shape: _Shape, rank: int) -> None:
        super().__init__(shape, rank)
        self.table = schedule_table(shape.microbatches, shape.vpp, shape.group)
        self.total = len(self.table)
        wanted = 2 * (shape.pp - rank - 1) + (shape.vpp - 1) * shape.group
        self.warmup = min(wanted, self.total)
        self.prefetched = shape.messages == "prefetched"
        self.overlapped = self.prefetched or shape.messages == "overlapped"

    def run(self) -> None:
        # Stage 0 has no input to receive.
        self.inputs[0].append(None if self.first else self.exchange(recv_prev=True)[0])
        for k in range(self.warmup):
            self._warm_up(k)
        for k in range(self.total - self.warmup):
            self._alternate(k)
        if self.warmup == self.total:
            given = None if self.last else self.exchange(recv_next=True)[1]
            self.gradients[-1].append(given)
        for k in range(self.total - self.warmup, self.total):
            self._cool_down(k)

    def _cool_down(self, k: int) -> None:
        wanted, chunk = self._expects(k, forward=False)
        wanted = wanted and k < self.total - 1
        early = self.prefetched and not self.last
        ahead = self.exchange(recv_next=wanted)[1] if early else None
        gradient = self._backward(k)
        _, given = self.exchange(gradient=gradient, recv_next=wanted and not early)
        if wanted:
            self.gradients[chunk].append(ahead if early else given)

    def _warm_up(self, k: int) -> None:
        wanted, chunk = self._expects(k, forward=True)
        wanted = wanted and k < self.total - 1
        early = self.prefetched and not self.first
        ahead = self.exchange(recv_prev=wanted)[0] if early else None
        output = self._forward(k)
        # The last exchange before the first B also receives its gradient.
        ends = k == self.warmup - 1 and self.warmup < self.total
        recv_next = ends and not self.last
        if ends and not self.overlapped:
            given, gradient = self.exchange(output=output, recv_prev=wanted, recv_next=recv_next)
        else:
            given, gradient = self.exchange(output=output, recv_prev=wanted and not early)
        if wanted:
            self.inputs[chunk].append(ahead if early else given)
        if ends and self.overlapped:
            _, gradient = self.exchange(recv_next=recv_next)
        if ends and (recv_next or not self.overlapped):
            self.gradients[-1].append(gradient)

    def _alternate(self, k: int) -> None:
        f = k + self.warmup
        wanted_input, next_chunk = self._expects(f, forward=True)
        wanted_input = wanted_input and k < self.total - self.warmup - 1
        wanted_gradient, next_back = self._expects(k, forward=False)
        output = self._forward(f)
        if self.overlapped:
            given, _ = self.exchange(output=output, recv_prev=wanted_input)
            # Megatron-core appends the input here, before B.
            if wanted_input:
                self.inputs[next_chunk].append(given)
            _, taken = self.exchange(gradient=self._backward(k), recv_next=wanted_gradient)
        else:
            given, taken = self.exchange(
                gradient=self._backward(k),
                output=output,
                recv_prev=wanted_input,
                recv_next=wanted_gradient,
            )
            if wanted_input:
                self.inputs[next_chunk].append(given)
        if wanted_gradient:
            self.gradients[next_back].append(taken)

    def _chunk(self, k: int, *, forward: bool) -> int:
        chunk = self.table[k % self.total][1]
        return chunk if forward else self.shape.vpp - chunk - 1

    def _released(self, k: int, chunk: int) -> int:
        """Return how many inputs of a virtual stage were released by its B before the k-th F."""
        before = self.table[: max(k - self.warmup, 0)]
        return sum(self.shape.vpp - other - 1 == chunk for _, other in before)

    def _expects(self, k: int, *, forward: bool) -> tuple[bool, int]:
        """Return whether a tensor is received after the k-th F or B, and its virtual stage."""
        leading = self.first if forward else self.last
        step = 1 if forward else -1
        if not leading:
            return True, self._chunk(k + 1, forward=forward)
        ahead = self.shape.pp - 1
        behind = k - ahead if k >= ahead else k + 1
        chunk = self._chunk(behind, forward=forward)
        final = self.shape.vpp - 1 if forward else 0
        return k >= ahead and chunk != final, chunk + step

    def _forward(self, k: int) -> Work | None:
        """Run the k-th F; return it if its output is sent to the next stage, else `None`."""
        microbatch, chunk = self.table[k]
        work = (chunk * self.shape.pp + self.rank, microbatch)
        if work[0] == 0 and len(self.inputs[0]) == len(self.outputs[0]):
            self.inputs[0].append(None)
        given = self.inputs[chunk][microbatch - self._released(k, chunk)]
        self.outputs[chunk].append(self.compute(Kind.FORWARD, work, given))
        return None if work[0] == self.shape.pp * self.shape.vpp - 1 else work

    def _backward(self, k: int) -> Work | None:
        """Run the k-th B; return it if its gradient is sent to the previous stage, else `None`."""
        chunk = self._chunk(k, forward=False)
        if self.last and chunk == self.shape.vpp - 1 and not self.gradients[chunk]:
            self.gradients[chunk].append(None)
        work = self.backward(chunk)
        return None if work[0] == 0 else work
