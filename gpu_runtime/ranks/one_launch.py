"""
A rank's whole step as one CUDA graph, under the same contract.

The slots' graphs, the messages between ranks, the sums and the update are nodes of one graph, so
that no host stands between two actions. What is checked, and when:

* *Once, when the step is captured*: everything that guarded replays check, since the capture is a
  guarded step; and that the two ends of each channel posted the same messages in the same order.
* *At the two launches behind the captured step's, before them*: every transition of the step, one
  after another, by the same guarded actions over the same contract, with an executor that runs
  nothing (`Rehearsal`). Both are recorded, and have to be the same step.
* *At each later launch, before it*: that all which those transitions read is what it was, but for
  counters that moved alike (`qeffect.steps` says why every guard then says what it said), and that
  the row's program and the gradient destinations are. What differs is rehearsed. Behind the launch
  the whole step is committed as one.
* *At each launch*: that nothing that a graph bakes in has moved.
* *In each launch, by the device*: whether it ran every action as often and in the order that the
  contract says (`qeffect.counts`), whoever launched it. Each rank's word goes to all ranks; the
  update is skipped on every rank where one rank's differs, or where a rank's word did not come,
  and so is that of every launch behind it. Where a rank dies while words are under way, some ranks
  may have heard all and updated: then all begin again from a checkpoint.
* *A step later, by the host*: the device's counts are presented to the contract, and what a rank
  said of itself ends the training on all ranks with one cause. No weights have moved since.

`OneLaunch.rebuild` then begins the epoch again where all ranks are still there: from the weights
and scales behind the last update that all devices ran, which the device has kept by itself. Slots'
graphs stay. A step's graph holds connections that are gone, and is captured again. Where a rank is
gone, the ranks begin again from a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qeffect.counts import DeviceCounts, advance

from ..backends.protocol import BackendError, StageBackend, parameters
from ..step.clipping import DeviceNorm, Norm, square_sums
from ..step.graphs import GraphExecutor, no_collection
from ..step.memory.counters import DeviceCounters
from ..step.memory.state import GatedSnapshot, live_state
from ..step.optimizer import Gradients
from .baked_optimizer import BakedOptimizer
from .channels import Abort, LostError, end_group, transport_of
from .consent import DisagreementError, StoppedError, wait_for
from .executor import Feed, Passage
from .feeds import made
from .obstacles import obstacles
from .rehearsal import Rehearsal
from .worker import Worker

__all__ = ["OneLaunch", "obstacles"]

UNLIKE = 2
"""What is published of a rank whose replica has other reduced gradients than the first."""
ROWS = 4
"""Steps that the device may be ahead of what the host has read, and more than it ever is."""
PARTS = ("data", "guards", "launch", "step before", "commit")
"""What the host does in a launch: `step before` is its wait for that step, and its verdict."""
_form = attrgetter("shape", "dtype", "device")
_form_and_graph = attrgetter("shape", "dtype", "device", "requires_grad")


class OneLaunch:
    """
    Training steps of one rank, each one launch; the first two are a guarded and a captured one.

    Every rank of the world makes one, and takes each step.

    Args:
        worker: The rank's worker, in mode ``one launch``.

    Attributes:
        host_ms: What the host's parts of the latest launch took, by the names of `PARTS`.
        rehearsal: Its guards; it says how many steps were rehearsed, how many checked as one, and
            why the latest of the former could not be.

    Raises:
        BackendError: The step cannot be one launch; every obstacle is named.
    """

    def __init__(self, worker: Worker) -> None:
        if problems := obstacles(worker):
            raise BackendError(f"the step cannot be one launch: {'; '.join(problems)}")
        self.worker, self.runtime = worker, worker.runtime
        self.capture_seconds = 0.0
        self.steps = 0
        self._begin()

    def _begin(self) -> None:
        """Over the worker's connections as they are now; nothing is captured."""
        self.pipeline = self.worker.pipeline
        self.feed = _Staged(self.pipeline.feed)
        self.graph: torch.cuda.CUDAGraph | None = None
        assert self.runtime.counters is not None
        self._gate = _Gate(self.runtime.counters, self.worker)
        self._launched: list[Any] = []
        self._spare: list[Any] = []  # events of launches that have ended
        self._left: int | None = None
        self._asking = 0  # 1 while the step before is asked about
        self._captured: BakedOptimizer | None = None
        self._guarded = False  # whether a guarded step was taken over these connections
        self._base: int | None = None  # the epoch of the step that was captured
        self.host_ms: dict[str, float] = {}
        assert isinstance(self.runtime.executor, GraphExecutor)
        self.rehearsal = Rehearsal(self.pipeline, self.runtime.executor)

    def step(self) -> None:
        """
        One optimizer step.

        Raises:
            StoppedError: It, or the one before, ended on every rank, for one cause.
        """
        if self._left is not None:
            raise BackendError("launches were left; call resume() first, or step the worker")
        if not self._guarded:
            self._first()
        else:
            epoch, handoff = self.runtime.epoch, self.runtime.handoff
            try:
                with self.worker.stepping():
                    # The launch runs on the graph stream: behind what the caller's has now.
                    back = handoff.cross()
                    try:
                        self._launch()
                    finally:
                        handoff.cross_back(back)
            except Exception as error:
                raise self._ended(error, epoch) from None
        self.steps += 1

    def _first(self) -> None:
        """A guarded step, in which connections that a capture needs come into being."""
        try:
            self.worker.step()
        except StoppedError:
            self._gate.close(abort=True)
            raise
        self._guarded = True

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """What is raised inside ends the training on every rank, for one cause."""
        epoch = self.runtime.epoch
        try:
            with self.worker.stepping(), self.runtime.caller_scope():
                yield
        except Exception as error:
            raise self._ended(error, epoch) from None

    def _ended(self, error: Exception, epoch: int) -> StoppedError:
        """What was raised in a step ends the training on every rank, for one cause."""
        self._stopped()
        stopped = self.pipeline._stopped(error, epoch, told=epoch - self._asking)
        self._gate.close(abort=True)
        return stopped

    def _stopped(self) -> None:
        self.feed.rehearsing = True
        try:
            self.rehearsal.stopped()
        finally:
            self.feed.rehearsing = False

    def _launch(self) -> None:
        runtime, contract = self.runtime, self.runtime.contract
        at = [time.perf_counter()]
        if self.graph is None:
            self.feed.prepare(self.pipeline.passages.values(), runtime.epoch)
            self._capture()
            at.append(time.perf_counter())
        else:
            try:
                self.feed.load(runtime.epoch)
                at.append(time.perf_counter())
                self._rehearse()
                self._require_unmoved()
            except Exception:
                # What the step before came to is told first, and nobody aborts it under way.
                if contract.counts_awaited:
                    self._confirm(self._launched.pop(0))
                raise
        assert self.graph is not None
        at.append(time.perf_counter())
        self.graph.replay()
        runtime.handoff.record_tail()
        done = self._spare.pop() if self._spare else _event()
        runtime.handoff.record(done)
        at.append(time.perf_counter())
        self._launched.append(done)
        if contract.counts_awaited:
            self._confirm(self._launched.pop(0))
        at.append(time.perf_counter())
        self.rehearsal.commit()
        at.append(time.perf_counter())
        spent = (1e3 * (end - begin) for begin, end in pairwise(at))
        self.host_ms = dict(zip(PARTS, spent, strict=True))

    def _rehearse(self) -> None:
        self.feed.rehearsing = True
        try:
            self.rehearsal.run()
        finally:
            self.feed.rehearsing = False

    def _require_unmoved(self) -> None:
        """
        Require that the optimizer is what was captured.

        Raises:
            BackendError: Its state was replaced, or a learning rate or another number changed.
        """
        assert self._captured is not None
        if not self._captured.unmoved():
            raise BackendError(
                "the optimizer's state has moved, or one of its numbers has changed, since the "
                "step was captured; make a new OneLaunch"
            )

    def _capture(self) -> None:
        """Capture this step, guards and all; what it launches, it launches like every other."""
        runtime, pipeline, contract = self.runtime, self.pipeline, self.runtime.contract
        self._quiet()
        runtime.confirm()
        domain = runtime.domain_name
        before = contract.committed_counts()[domain]
        pipeline.feed = self.feed
        if pipeline.consent is not None:
            # The host waits for the gate's first collective, which only a rank that came joins.
            pipeline.consent.agree(runtime.epoch)
            pipeline.consent.release = self._release
        self._gate.warm()
        self._quiet()
        if pipeline.consent is not None:
            # All capture at once, or none; on a connection that a stop ends.
            pipeline.consent.agree(runtime.epoch)
        self._base = runtime.epoch  # what all ranks begin again from, or none
        began = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with no_collection():
            graph.capture_begin(
                pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local"
            )
            try:
                pipeline.actions()
                gradients = pipeline.finalize()
                skip = self._gate.capture(gradients)
                self.worker.optimizer.step(gradients, skip=skip, scale=self._gate.scale)
            except BaseException:
                with suppress(RuntimeError):  # what ended the capture is to be told, not this
                    graph.capture_end()
                raise
            graph.capture_end()
        self.capture_seconds = time.perf_counter() - began
        contract.check_commit(caller="main")
        if pipeline.consent is not None:
            pipeline.consent.agree(runtime.epoch)
        self._gate.begin(before, contract.committed_counts()[domain])
        self._quiet()
        self._captured = BakedOptimizer(self.worker.optimizer)
        pipeline.launched = True
        self.graph = graph

    def _release(self) -> None:
        """After a stop: let the gate's kernels go, and drop the graph, which channels wait for."""
        self._gate.let_go()
        self._drop()

    def _drop(self) -> None:
        graph, self.graph = self.graph, None
        if graph is not None:
            graph.reset()  # one that still runs is destroyed when it has ended

    def _confirm(self, done: Any) -> None:
        """Learn what the device said of the step before the one that was just launched."""
        self._asking = 1
        self._await(done)
        self._spare.append(done)
        counted, said = self._gate.read()
        self.runtime.contract.present_counts({self.runtime.domain_name: counted})
        if odd := [rank for rank, word in enumerate(said) if word == 1]:
            raise DisagreementError(
                f"the device of rank {odd[0]} did not run what was committed, or its word did not "
                "come"
            )
        if unlike := [rank for rank, word in enumerate(said) if word == UNLIKE]:
            raise DisagreementError(
                f"the reduced gradients of the replica of rank {unlike[0]} have other squares than "
                "those of the first replica"
            )
        self._asking = 0

    def _quiet(self) -> None:
        """Wait for the device as for a launched step: it may be in what a rank that died owes."""
        done = _event()
        self.runtime.handoff.record(done)
        self._await(done)
        torch.cuda.synchronize()  # what other streams have is this rank's alone

    def _await(self, done: Any) -> None:
        """Wait for what was launched, but not for what another rank has given up."""
        limits = self.worker.limits
        wait_for(done, self.pipeline.consent, deadline=limits.commit, grace=limits.grace)

    @property
    def norm(self) -> Norm | None:
        """
        The norm of the last step's gradients, where it is clipped or looked at.

        Waits for the device.
        """
        if self._gate.norm is None or self.graph is None:
            return self.worker.norm
        return self._gate.norm.read()

    @property
    def device_norm(self) -> DeviceNorm | None:
        """Where each launch leaves the norm on the device; None where nobody looks at it."""
        return self._gate.norm

    @property
    def ahead(self) -> int:
        """How many steps were launched of which the host has not learned what they came to."""
        return len(self._launched)

    def gathered(self, own: Tensor) -> Tensor:
        """
        What every rank brings between two steps, the last of which may be under way.

        Args:
            own: On the CPU, of one form on all ranks; every rank calls it.

        Returns:
            Those of all ranks, by rank.

        Raises:
            StoppedError: A rank has stopped, for one cause, in the step that is under way.
        """
        with self._ending():
            self._asking = self.ahead
            found = self.worker.consent.gathered(own)
            self._asking = 0
        return found

    def leave(self) -> None:
        """
        Wait for the last step and its verdict; guarded replays, or a checkpoint, may follow.

        Raises:
            StoppedError: It ended on every rank, for one cause.
        """
        with self._ending():
            if self.runtime.contract.counts_awaited and self._launched:
                self._confirm(self._launched.pop(0))
            self.runtime.drain()
        self._left, self.pipeline.launched = self.runtime.epoch, False
        self._weights_moved()
        self.pipeline.feed = self.feed.inner
        with self.runtime.caller_scope():
            self.runtime.take_snapshot()

    def _weights_moved(self) -> None:
        """Launches move weights, and not the version counters by which caches are told stale."""
        weights = [p for s in self.runtime.stages.values() for p in parameters(s).values()]
        torch.autograd.graph.increment_version(weights)

    def rebuild(self, stopped: StoppedError) -> None:
        """
        Begin the epoch again after a stop that all ranks survived; every rank calls it.

        The next step is a guarded one, the second from here is captured.

        Raises:
            StoppedError: The cause is not recoverable, or the ranks' devices have updated different
                numbers of steps: relaunch, and resume from a checkpoint.
            BackendError: A rank did not come back, or its device came to no end.
        """
        if self._base is None or not stopped.cause.recoverable:
            self.worker.rebuild(stopped)
        else:
            self.worker.settle()
            kept, epoch = self._gate.kept, self._base + int(self._gate.updated)
            self.worker.rebuild(
                stopped, epoch=epoch, restore=lambda: self.runtime.rebuild_from(epoch, kept)
            )
            self._weights_moved()
        self._begin()

    def resume(self) -> None:
        """
        Go on with launches after `leave`, where no step was taken since.

        Raises:
            BackendError: One was: make a new OneLaunch.
        """
        rebuilt = self.pipeline is not self.worker.pipeline
        if rebuilt or self._left not in (None, self.runtime.epoch):
            raise BackendError("steps were taken since launches were left; make a new OneLaunch")
        self._left = None
        if self.graph is not None:
            self.pipeline.feed, self.pipeline.launched = self.feed, True

    def close(self) -> None:
        """Drop the graph: it holds connections, which cannot end before it."""
        if self._gate.open:  # after a stop a device may wait for a rank that is gone
            torch.cuda.synchronize()
        self._drop()
        if self.pipeline.consent is not None:
            self.pipeline.consent.release = None
        self.pipeline.feed = self.feed.inner
        self._gate.close()


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class _Staged:
    """A feed whose tensors stay where they are, so that a graph can read them."""

    def __init__(self, inner: Feed) -> None:
        self.inner = inner
        self.losses: dict[int, Tensor] = {}
        self._held: dict[tuple[str, int, int], tuple[StageBackend, tuple[Tensor, ...]]] = {}
        self._places: list[tuple[str, StageBackend, int]] = []
        self._many: list[int] = []
        self._forms: list[Any] = []
        self._alike: list[tuple[list[Tensor], list[int]]] = []
        self.rehearsing = False

    def inputs(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """What the inner feed gives, held."""
        return self._held["inputs", stage.index, microbatch][1]

    def output_gradients(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """Likewise."""
        return self._held["output_gradients", stage.index, microbatch][1]

    def outputs(
        self, stage: StageBackend, step: int, microbatch: int, outputs: Sequence[Tensor]
    ) -> None:
        """Keep the last stage's first output; in a rehearsal there is none."""
        if not self.rehearsing:
            held = self.losses.setdefault(microbatch, torch.empty_like(outputs[0]))
            held.copy_(outputs[0])

    def prepare(self, passages: Iterable[Passage], step: int) -> None:
        """Hold places of all that a step takes, in memory that no graph owns."""
        for p in passages:
            if p.stage.index == 0 or len(p.stage.inputs) > 1:
                self._place("inputs", p, step)
            if p.last:
                self._place("output_gradients", p, step)
        self._places = [(what, own, m) for (what, _, m), (own, _) in self._held.items()]
        tensors = [held for _, held in self._held.values()]
        every = [*chain.from_iterable(tensors)]
        self._many, self._forms = [*map(len, tensors)], [*map(_form_and_graph, every)]
        # What has one type comes in one copy.
        alike: dict[torch.dtype, list[int]] = {}
        for n, tensor in enumerate(every):
            alike.setdefault(tensor.dtype, []).append(n)
        self._alike = [([every[n] for n in own], own) for own in alike.values()]

    def _place(self, what: str, p: Passage, step: int) -> None:
        given = getattr(self.inner, what)(p.stage, step, p.microbatch)
        held = tuple(tensor.detach().clone() for tensor in given)
        self._held[what, p.stage.index, p.microbatch] = p.stage, held

    def load(self, step: int) -> None:
        """
        Bring a step's data to their places, on the current stream: a copy for each type.

        Raises:
            BackendError: They have another form than the captured step's; nothing was copied.
        """
        given = made(self.inner, step, self._places)
        values = [*chain.from_iterable(given)]
        if [*map(_form_and_graph, values)] != self._forms or [*map(len, given)] != self._many:
            self._require_forms(step, given)
            # What is left is a graph, of which their places would become part.
            values = [value.detach() for value in values]
        for places, own in self._alike:
            torch._foreach_copy_(places, [values[n] for n in own])

    def _require_forms(self, step: int, given: Sequence[Sequence[Tensor]]) -> None:
        for (what, index, m), found in zip(self._held, given, strict=True):
            held = self._held[what, index, m][1]
            if [*map(_form, found)] != [*map(_form, held)]:
                raise BackendError(
                    f"stage {index}, {what} of microbatch {m} in step {step}: expected "
                    f"{_described(held)}, found {_described(found)}; a launch takes what "
                    "the captured step took"
                )


def _described(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{t.dtype} of {tuple(t.shape)} on {t.device}" for t in tensors) or "nothing"


class _Gate:
    """What the device compares in each step, and tells all ranks and the host."""

    def __init__(self, counters: DeviceCounters, worker: Worker) -> None:
        from . import gate_kernel

        self.kernels = gate_kernel
        self.counters, self.world = counters, worker.member.world
        self.replicas = self.world // worker.pp
        values = self.values = counters.values
        device = values.device
        self.group: Any = None
        if self.world > 1:
            ranks = list(range(self.world))
            self.group = dist.new_group(ranks, backend=transport_of(device))
        self.wanted, self.factors, self.terms = (torch.zeros_like(values) for _ in range(3))
        self.own = torch.zeros(1, dtype=torch.float64, device=device)
        self.heard = torch.zeros(self.world, dtype=torch.float64, device=device)
        self.norm: DeviceNorm | None = None
        if worker.clipping:
            self.norm = DeviceNorm.on(device, worker.clipping)
            # A rank's word, then what each stage of the model adds to the squares; 0 where it is
            # another rank's.
            width = 1 + worker.table.num_stages
            self.row = torch.zeros(width, dtype=torch.float64, device=device)
            self.rows = torch.zeros(self.world, width, dtype=torch.float64, device=device)
        self.skip = torch.ones((), device=device)
        self.updated = torch.zeros((), dtype=torch.int64, device=device)
        self.kept = GatedSnapshot(list(live_state(worker.runtime.domain).values()))
        self.number = torch.zeros((), dtype=torch.int64, device=device)
        row = 1 + values.numel() + self.world
        pinned = device.type == "cuda"
        self.ring = torch.full((ROWS, row), -1, dtype=torch.int64, pin_memory=pinned)
        self.read_steps = 0
        self.ending: Abort | None = None
        self.open = True

    @property
    def scale(self) -> Tensor | None:
        """What the gradients are multiplied by; None where they are not clipped."""
        if self.norm is None or self.norm.clipping.max_norm is None:
            return None
        return self.norm.factor

    def capture(self, gradients: Gradients | None) -> Tensor:
        """
        The comparison, every rank's word, and whether the update is skipped.

        Args:
            gradients: Of this rank's stages, whose norm is looked at; None where there are none.
        """
        self.kernels.compare(
            self.values, self.wanted, self.factors, self.terms, self.number, self.own
        )
        # Behind a step that was skipped none is run: the host learns of it a step later.
        self.own.mul_(self.updated == self.number)
        if self.norm is None:
            self._gather(self.heard, self.own)
        else:
            elsewhere = self.norm.clipping.elsewhere  # copies of a weight that counts once
            self.row[:1].copy_(self.own)
            for stage, part in square_sums(gradients or {}, elsewhere).items():
                self.row[1 + stage].copy_(part)
            self._gather(self.rows, self.row)
            self.heard.copy_(self.rows[:, 0])
            # One rank of a replica has a stage, the others have 0 there: this sum is exact.
            width = self.rows.shape[1] - 1
            parts = self.rows[:, 1:].reshape(self.replicas, -1, width).sum(1)
            if self.replicas > 1:
                finite = parts.isfinite() & parts[:1].isfinite()
                unlike = ((parts != parts[:1]) & finite).any(1, keepdim=True)
                yes = self.heard.view(self.replicas, -1) == self.number + 1
                self.heard.view(self.replicas, -1).masked_fill_(yes & unlike, -1.0)
            # All have the same, but for what is not finite in one of them alone.
            self.norm.take(parts.amax(0))
        self.kernels.publish(self.values, self.heard, self.skip, self.ring, self.number)
        self.updated.add_(self.skip == 0)
        self.kept.take(self.skip)
        if self.norm is not None:
            self.skip.copy_(torch.maximum(self.skip, self.norm.skip))
        return self.skip

    def _gather(self, into: Tensor, own: Tensor) -> None:
        # A word that does not come is no yes: what is gathered stands where a no stood before, and
        # what an aborted group leaves there of a step before has the number of that step.
        into.fill_(0.0)
        if self.world > 1 and self.group is None:  # one rank's word would stand for all
            raise LostError("commit", -1, False, "the connections of this rank are closed")
        if self.group is None:
            into.copy_(own)
        else:
            dist.all_gather_into_tensor(into.view(-1), own, group=self.group)

    def warm(self) -> None:
        """
        Once outside of a capture, which can load no kernel and begin no communicator.

        It does not wait for the device, which waits for every rank.
        """
        self.capture(None)
        self.kept.take()
        self.updated.zero_()

    def begin(self, before: DeviceCounts, after: DeviceCounts) -> None:
        """Learn from one step what each adds: counters a number, the digest an affine map."""
        first, then = self.counters.numbers_of(before), self.counters.numbers_of(after)
        factors, terms = advance(first, then)
        for tensor, numbers in ((self.wanted, first), (self.factors, factors), (self.terms, terms)):
            tensor.copy_(torch.tensor(numbers, dtype=torch.int64))
        self.number.zero_()
        self.ring.fill_(-1)
        self.read_steps = 0

    def read(self) -> tuple[DeviceCounts, list[int]]:
        """
        What the next step that was not read yet has published; the device has finished it.

        Raises:
            LostError: It has not been written.
        """
        row = self.ring[self.read_steps % ROWS].tolist()
        if row[0] != self.read_steps:
            raise LostError("commit", -1, False, f"step {self.read_steps} was not published")
        self.read_steps += 1
        size = self.values.numel()
        return self.counters.counts_of(row[1 : 1 + size]), row[1 + size :]

    def let_go(self) -> None:
        """Begin to abort the group, and do not wait: a graph that holds its kernels is to end."""
        group, self.group = self.group, None
        if group is not None:
            self.ending = Abort(group)

    def close(self, *, abort: bool = False) -> None:
        """End the group; aborted, whoever waits in it wakes up."""
        self.open = False
        ending, self.ending = self.ending, None
        if ending is not None:
            ending.join()
        if self.group is not None:
            group, self.group = self.group, None
            end_group(group, abort=abort)
