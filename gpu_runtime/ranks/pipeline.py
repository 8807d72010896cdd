"""
Run one rank's row of a schedule table with messages. The entries run in order, and the contract
checks each action.

A slot is the set of static buffers that a microbatch uses in a stage. A receive reserves a slot,
and fills the slot's input in place. A send reads the result of F or dI in the slot until a wait for
the send has returned. Between two neighbouring stages on the same rank, tensors are passed
directly, without a message. A `Passage` keeps what dI and dW of a microbatch need from its F: the
key (epoch, stage and microbatch) and the reference (the slot). At the end of the step all ranks
consent. Only then does each rank run its update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import attrs
import torch
from torch import Tensor

from qeffect.keys import TapeKey, TapeRef
from qeffect.schedule.actions import Atom, Kind

from ..backends.protocol import BackendError, StageBackend
from ..runtime import Runtime
from ..step.clipping import Clipping, Norm, square_sums
from ..step.memory.gradient_digests import GradientDigests
from ..step.optimizer import Gradients, Optimizer
from ..step.performer import Performer
from ..step.plan.rows import Row
from ..step.zero_stages import ZeroStages
from .channels import Channels, Message, Transfer
from .consent import Consent, StoppedError, wait_for
from .double_run import DoubleRun
from .feed import Feed
from .late_faults import record_fault
from .side_stream_feed import feed_into

__all__ = ["Entry", "Feed", "Messages", "Passage", "Pipeline"]


class Messages(Protocol):
    """The interface of `Channels` that a pipeline's actions use."""

    def send(self, tensor: Tensor, to: int, message: Message) -> Transfer:
        """Post a send of a tensor to a rank."""

    def receive(self, into: Tensor, source: int, message: Message) -> Transfer:
        """Post a receive from a rank into a tensor."""

    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer."""


@attrs.define(eq=False)
class Passage:
    """
    One microbatch in one stage of this rank, from F to dW.

    Args:
        stage: The stage.
        microbatch: The number of the microbatch.
        upstream: The passage of the same microbatch in the previous stage, if that stage is on this
            rank; otherwise None.
        reader: The passage of the same microbatch in the next stage, if that stage is on this rank;
            otherwise None.
        source: The rank that sends the input in a message; None without a message.
        target: The rank that receives the output in a message; None without a message.
        others: The other passages whose dW are computed as one product with this passage's dW.
            Empty if this dW is computed alone, or together with the dW of an earlier passage.
    """

    stage: StageBackend
    microbatch: int
    upstream: Passage | None = None
    reader: Passage | None = None
    source: int | None = None
    target: int | None = None
    others: tuple[Passage, ...] = ()
    opens: bool = False
    last: bool = False
    key: TapeKey = attrs.field(init=False)
    ref: TapeRef = attrs.field(init=False)
    arriving: Transfer | None = None
    arriving_gradient: Transfer | None = None
    leaving: Transfer | None = None
    leaving_gradient: Transfer | None = None

    def forget(self) -> None:
        """Drop the transfers of a failed step, because open transfers keep connections open."""
        self.arriving = self.arriving_gradient = self.leaving = self.leaving_gradient = None


class Entry(NamedTuple):
    """
    One entry of a rank's program: a function, its argument (a `Passage`), and the action or message
    of the schedule table that the function runs.
    """

    act: Callable[[Passage], None]
    passage: Passage
    atom: Atom


class Pipeline:
    """
    Training steps of one rank.

    Args:
        runtime: The guarded runtime of this rank's stages, which must be made with the same `row=`.
        row: This rank's row of the schedule table (its actions and messages in order), with the
            slots (buffers) that they use.
        channels: Posts the rank's messages.
        feed: Supplies the data and receives the losses.
        ranks: Global rank of each rank of the schedule table, in this replica.
        consent: The agreement of all ranks to a commit or a stop. Pass None for a single rank;
            errors are then raised unchanged.
        clipping: How the update uses the norm of all gradients; the same on every rank. If the
            update uses the norm, the host waits for the gradients before the commit, because it
            must send this rank's share of the norm to the other ranks.

    Raises:
        BackendError: The runtime was made for another row of the schedule table, or a stage cannot
            be part of a pipeline.
    """

    def __init__(
        self,
        runtime: Runtime,
        row: Row,
        channels: Channels,
        feed: Feed,
        ranks: Sequence[int],
        consent: Consent | None = None,
        clipping: Clipping | None = None,
    ) -> None:
        if runtime.row is not row:
            raise BackendError(
                "the runtime was not made for this row; pass the same row= to Runtime and Pipeline"
            )
        self.runtime = runtime
        self.row = row
        self.channels = channels
        self.log = channels.log
        self.feed = feed
        self.ranks = tuple(ranks)
        self.consent = consent
        self.clipping = clipping or Clipping()
        self.norm: Norm | None = None  # of the last step, if clipping needs it
        self.digests: GradientDigests | None = None  # if digests of gradients are kept
        self.zeros: ZeroStages | None = None  # if stages of zero gradients are looked for
        self.double: DoubleRun | None = None  # if steps run twice
        self.position = 0
        self.walk = 0  # of the step under way
        self.launched = False  # whether messages are posted by a graph
        self.passages = self._passages()
        self.program = self._program()

    def _passages(self) -> dict[tuple[int, int], Passage]:
        row, table = self.row, self.row.table
        home, last = table.stage_to_rank, table.num_stages - 1
        found: dict[tuple[int, int], Passage] = {}
        for index in row.stages:
            stage = self.runtime.stages[index]
            _require_boundaries(stage, first=index == 0, last=index == last)
            for m in range(table.num_microbatches):
                found[index, m] = Passage(
                    stage,
                    m,
                    source=self.ranks[home[index - 1]] if row.receives_input(index) else None,
                    target=self.ranks[home[index + 1]] if row.receives_gradient(index) else None,
                    last=index == last,
                )
            first = row.order.microbatches(index, Kind.FORWARD)[0]
            found[index, first].opens = True
        for (index, m), passage in found.items():
            passage.others = tuple(found[index, other] for other in row.slots.members(m)[1:])
        for index, fed in row.feeds.items():
            for m in range(table.num_microbatches):
                found[index, m].reader = found[fed, m]
                found[fed, m].upstream = found[index, m]
        return found

    def _program(self) -> list[Entry]:
        acts: dict[Kind, Callable[[Passage], None]] = {
            Kind.RECV_F: self.receive_input,
            Kind.FORWARD: self.forward,
            Kind.SEND_F: self.send_output,
            Kind.WAIT_SEND_F: self.await_output,
            Kind.RECV_B: self.receive_gradient,
            Kind.DGRAD: self.dgrad,
            Kind.SEND_B: self.send_gradient,
            Kind.WAIT_SEND_B: self.await_gradient,
            Kind.WGRAD: self.wgrad,
            Kind.REDUCE_GRAD: self.finalize_stage,
        }
        members = self.row.slots.members
        return [
            Entry(acts[a.kind], self.passages[a.stage, max(a.microbatch, 0)], a)
            for a in self.row.atoms
            if a.kind in acts  # a reduction is awaited at the end of the step
            # The first dW of a group takes the others.
            and (a.kind is not Kind.WGRAD or members(a.microbatch))
        ]

    @contextmanager
    def performed_by(self, performer: Performer, channels: Messages) -> Iterator[None]:
        """A context in which other objects perform the actions and post the messages."""
        before, self.channels = self.channels, cast(Channels, channels)
        try:
            with self.runtime.performed_by(performer):
                yield
        finally:
            self.channels = before

    @contextmanager
    def unlogged_walks(self, run: Runtime) -> Iterator[None]:
        """
        A context for walks (passes over the rank's actions) that are not training steps. Logs and
        subclasses do not record these walks.

        Args:
            run: The object that replaces the runtime in these walks.
        """
        before = self.runtime, self.log, self.channels.log
        self.runtime, self.log, self.channels.log = run, None, None
        try:
            yield
        finally:
            self.runtime, self.log, self.channels.log = before

    # A step

    def step(self, optimizer: Optimizer) -> Gradients:
        """
        Run every action of the row, wait for all ranks' consent, then update.

        If the step must run twice, its device work is repeated before the consent. This rank
        consents only if both runs have the same results.

        Args:
            optimizer: The optimizer over the runtime's stages.

        Returns:
            The gradients that were passed to the optimizer; valid until the next dW.

        Raises:
            StoppedError: A rank could not continue. All ranks stop with the same cause. This rank
                has not updated its weights, but another rank may have done so. If the cause is
                recoverable, no rank has updated its weights, and every rank can call
                `Worker.rebuild`.
        """
        epoch, handoff = self.runtime.epoch, self.runtime.handoff
        log = self.log
        twice = self.double if self.double is not None and self.double.due(epoch) else None
        if log is not None:
            log("begin_step", epoch=epoch)
        # The walk runs on the graph stream, between the caller's earlier and later work.
        handoff.wait_for_caller()
        try:
            with self.runtime.caller_scope():
                if twice is not None:
                    twice.begin()
                self.run_actions()
                gradients = self.finalize()
                if twice is not None:
                    gradients = twice.of_guarded(self, gradients)
                # Compare late counts here too: else one rank's device alone could skip its update.
                self._settle(twice is not None)
                if twice is not None:
                    twice.require_equal()
                    if log is not None:
                        log("second_run", epoch=epoch)
                late = self.runtime.config.counts_late
                counted = self.runtime.counts_now() if late else self.runtime.device_counts()
                self.runtime.contract.check_commit(caller="main", counted=counted)
                if log is not None:
                    log("finish", epoch=epoch)
                norm = self._agree(epoch, gradients)
                self.runtime.update(optimizer, gradients, norm=norm)
                if log is not None:
                    log("commit", epoch=epoch)
                self.norm = norm
        except Exception as error:
            if self.consent is None:
                raise
            raise self._stopped(error, epoch) from None
        handoff.caller_waits()
        return gradients

    def _settle(self, twice: bool) -> None:
        """
        Wait for the device, up to the deadline, before the host reads its results.

        Without this wait, a read of results could block forever: the device may wait for a message
        from a rank that is gone.

        Args:
            twice: Whether the step ran twice: the host then reads whether both runs are equal.
        """
        reads = twice or bool(self.clipping) or self.runtime.counters is not None
        if self.consent is None or not reads or self.runtime.domain.device.type == "cpu":
            return
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        consent = self.consent
        wait_for(done, consent, deadline=consent.deadline, grace=consent.grace)

    def _agree(self, epoch: int, gradients: Gradients) -> Norm | None:
        """
        Exchange the consent of all ranks, and the norm of all gradients if the update uses the
        norm.
        """
        parts = None
        if self.clipping:
            sums = square_sums(gradients, self.clipping.elsewhere)
            parts = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
        if self.log is not None:
            self.log("consent", epoch=epoch)
        if self.consent is not None:
            agreed = self.consent.agree(epoch, parts, self.clipping.parts)
        else:
            self.channels.commit()
            agreed = [parts[part] for part in sorted(parts)] if parts else []
        return None if parts is None else Norm.of(agreed, self.clipping)

    def run_actions(self) -> None:
        """
        Run every action and message of the row in the table's order, once per walk (pass over the
        row).

        Only the last walk reduces gradients.
        """
        key, last = self.runtime.key, self.runtime.config.walks - 1
        for (index, m), passage in self.passages.items():
            passage.key = key(index, m)
        for self.walk in range(last + 1):
            if self.walk:
                self.runtime.next_walk()
            self.position = 0
            for act, passage, atom in self.program:
                if atom.kind is not Kind.REDUCE_GRAD or self.walk == last:
                    act(passage)
                self.position += 1

    def drawn(self, p: Passage) -> int:
        """
        Return the microbatch's number in the step's data. A step's microbatches are distributed
        over its walks (passes over the row): each walk takes as many as the table has.
        """
        return p.microbatch + self.walk * self.row.table.num_microbatches

    def _place(self, p: Passage) -> None:
        """Record in the rank log, if there is a log, which buffer the next message uses."""
        if self.log is not None:
            self.log.place = p.ref.slot, p.ref.generation

    def finalize(self) -> Gradients:
        """
        Return every stage's complete, reduced gradients. Also queue the computation of digests, if
        digests are configured.
        """
        gradients = self.runtime.finalize()
        if self.zeros is not None:
            self.zeros.take(gradients)
        if self.digests is not None:
            self.digests.take(gradients)
        return gradients

    def _stopped(self, error: Exception, epoch: int, *, told: int | None = None) -> StoppedError:
        """
        Publish this rank's error, and return the error with the cause that every rank raises.

        Args:
            error: The error because of which this rank cannot continue.
            epoch: The epoch in which the step began; if this epoch is over, weights may have
                changed.
            told: The epoch of the error, if it is not `epoch`.
        """
        assert self.consent is not None
        for passage in self.passages.values():
            passage.forget()
        at = self.position
        atom = self.program[at].atom if at < len(self.program) else None
        # Frames of a traceback hold transfers, which keep connections open.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        named = epoch if told is None else told
        record_fault(self.runtime, error, named, self.ranks[self.row.rank])
        if self.runtime.epoch != epoch or self.runtime.actions.broken is not None:
            error.unrecoverable = True  # type: ignore[attr-defined]
        passed = len(self.row.atoms) if atom is None else self.row.atoms.index(atom)
        if self.launched or (atom is None and not any(self.channels.posted().values())):
            passed = 0  # posted messages are unknown here, or belong to an earlier step
        stopped = self.consent.stop(error, named, atom, passed)
        self.runtime.abort()
        return stopped

    # Forward

    def receive_input(self, p: Passage) -> None:
        """
        RECV_F: post the receive of the input into the microbatch's slot (its buffers). The slot is
        in use from now on.
        """
        actions, stage = self.runtime.actions, p.stage.index
        p.ref = actions.reserve(p.key)
        into = actions.post_receive(p.key, p.ref)[0]
        assert p.source is not None
        self._place(p)
        p.arriving = self.channels.receive(into, p.source, Message(stage - 1, p.microbatch, False))

    def forward(self, p: Passage) -> None:
        """
        Run F. Before the stage's first F in a step, refresh the stage's weight cache.

        The refresh reads only weights, so it does not wait for the message.
        """
        actions, key, stage = self.runtime.actions, p.key, p.stage
        if p.opens and not self.walk:
            actions.refresh(stage.index)
        if p.arriving is not None:
            self.channels.wait(p.arriving)
            p.arriving = None
            actions.finish_receive(key, p.ref)
        upstream = p.upstream
        if upstream is not None:
            (handed,) = actions.outputs(upstream.key, upstream.ref)
            p.ref = actions.forward(key, (handed, *self._further(p)))
            actions.finish_outputs(upstream.key, upstream.ref)
        elif p.source is not None:
            if len(stage.inputs) > 1:
                actions.performer.fill(actions.input_buffers(key)[1:], self._further(p))
            p.ref = actions.forward(key)
        elif self.runtime.config.feeder is not None:
            self._copy_data(p)
            p.ref = actions.forward(key)
        else:
            p.ref = actions.forward(key, self.feed.inputs(stage, key.epoch, self.drawn(p)))
        if p.last:
            outputs = actions.outputs(key, p.ref)
            self.feed.outputs(stage, key.epoch, self.drawn(p), outputs)
            actions.finish_outputs(key, p.ref)

    def _copy_data(self, p: Passage) -> None:
        """Copy a microbatch's data into its slot (its buffers), on the feed's stream."""
        actions, key, feeder = self.runtime.actions, p.key, self.runtime.config.feeder
        assert feeder is not None
        actions.await_graph(feeder)
        p.ref = actions.reserve(key, caller=feeder)
        put = partial(actions.fill_inputs, key)
        feed_into(self.feed, put, p.stage, key.epoch, self.drawn(p))
        actions.join(feeder)

    def _further(self, p: Passage) -> Sequence[Tensor]:
        """Return a stage's inputs other than the output of the previous stage."""
        if len(p.stage.inputs) == 1:
            return ()
        return self.feed.inputs(p.stage, p.key.epoch, self.drawn(p))

    def send_output(self, p: Passage) -> None:
        """SEND_F: post the send. It reads the output until `await_output` returns."""
        (output,) = self.runtime.actions.outputs(p.key, p.ref)
        assert p.target is not None
        self._place(p)
        p.leaving = self.channels.send(
            output, p.target, Message(p.stage.index, p.microbatch, False)
        )

    def await_output(self, p: Passage) -> None:
        """WAIT_SEND_F: wait until the output has been sent."""
        assert p.leaving is not None
        self.channels.wait(p.leaving)
        p.leaving = None
        self.runtime.actions.finish_outputs(p.key, p.ref)

    # Backward

    def receive_gradient(self, p: Passage) -> None:
        """RECV_B: post the receive into the buffer from which dI reads."""
        into = self.runtime.actions.post_receive(p.key, p.ref, gradient=True)[0]
        assert p.target is not None
        self._place(p)
        p.arriving_gradient = self.channels.receive(
            into, p.target, Message(p.stage.index + 1, p.microbatch, True)
        )

    def dgrad(self, p: Passage) -> None:
        """Run dI."""
        actions, key, ref, reader = self.runtime.actions, p.key, p.ref, p.reader
        if p.arriving_gradient is not None:
            self.channels.wait(p.arriving_gradient)
            p.arriving_gradient = None
            actions.finish_receive(key, ref, gradient=True)
        actions.bind(key)
        if reader is not None:
            actions.dgrad(key, ref, actions.dgrads(reader.key, reader.ref))
            actions.finish_dgrads(reader.key, reader.ref)
        elif p.last:
            actions.dgrad(key, ref, self.feed.output_gradients(p.stage, key.epoch, self.drawn(p)))
        else:
            actions.dgrad(key, ref)

    def send_gradient(self, p: Passage) -> None:
        """SEND_B: post the send. It reads the input gradient until `await_gradient` returns."""
        (gradient,) = self.runtime.actions.dgrads(p.key, p.ref)
        assert p.source is not None
        self._place(p)
        p.leaving_gradient = self.channels.send(
            gradient, p.source, Message(p.stage.index, p.microbatch, True)
        )

    def await_gradient(self, p: Passage) -> None:
        """WAIT_SEND_B: wait until the input gradient has been sent."""
        assert p.leaving_gradient is not None
        self.channels.wait(p.leaving_gradient)
        p.leaving_gradient = None
        self.runtime.actions.finish_dgrads(p.key, p.ref)

    def wgrad(self, p: Passage) -> None:
        """
        Run dW. If the configuration groups microbatches, run the dW of the whole group as one
        product.
        """
        group = [(other.key, other.ref) for other in p.others]
        self.runtime.actions.wgrad(p.key, p.ref, group=group)

    # The end of a stage

    def finalize_stage(self, p: Passage) -> None:
        """
        REDUCE_GRAD: declare the stage's gradients complete, and reduce them while other stages run.
        """
        self.runtime.finalize_stage(p.stage.index)


def _require_boundaries(stage: StageBackend, *, first: bool, last: bool) -> None:
    """Raise an error unless a stage passes exactly one tensor in each direction."""
    where = f"stage {stage.index}"
    if not last and len(stage.outputs) != 1:
        raise BackendError(
            f"{where} has {len(stage.outputs)} outputs; expected 1, as a message carries one tensor"
        )
    flows = [n for n, spec in enumerate(stage.inputs) if spec.differentiable]
    if not first and flows != [0]:
        raise BackendError(
            f"{where} computes gradients of its inputs {flows}; expected input 0 only, which is "
            "the output of the stage before"
        )
    if first and flows:
        raise BackendError(
            f"{where} is the first stage, but computes input gradients, which nothing reads; make "
            "this stage with first=True, or with the equivalent option of its backend"
        )
