"""One guarded step of DeepSpeed's pipeline engine. Its instructions become calls of a contract."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from qeffect.refusals import refused
from qeffect.schedule.pairing import Work

from .deepspeed_buffers import Buffers, first_tensor
from .deepspeed_stream import GRADIENTS, TIED, Stream
from .evidence import BackwardPasses, Weights, another_work, not_once, not_run, work_name
from .recurring import RecurringSteps
from .works import Works

__all__ = ["EngineStep"]

_T = TypeVar("_T")
_MESSAGES = {
    "SendActivation": "SEND_F",
    "RecvActivation": "RECV_F",
    "SendGrad": "SEND_B",
    "RecvGrad": "RECV_B",
}


class EngineStep:
    """
    Checks and commits the instructions of one `train_batch`.

    Every method that calls the contract raises `Refused` if an action breaks the contract.

    Args:
        engine: The engine.
        stream: The instructions and the order that the engine's schedule declares.
        steps: The steps of the rank's contract.
    """

    def __init__(self, engine: Any, stream: Stream, steps: RecurringSteps) -> None:
        self._engine, self._stream = engine, stream
        self._works, self._buffers = Works(steps), Buffers()
        self._passes = BackwardPasses()
        self._weights: Weights | None = None
        self._queued: list[tuple[str, int, int]] = []
        self._calls, self._outputs = 0, None
        self._backwards = 0
        self._final = self._updated = self._reduced = False

    def begin(self, name: str, given: dict[str, Any]) -> Callable[[], None]:
        """
        Check an instruction before the engine runs it.

        Args:
            name: DeepSpeed's name of the instruction.
            given: The instruction's arguments, by name.

        Returns:
            A function that commits the instruction. Call it after the instruction has run.
        """
        if name in _MESSAGES:
            return self._message(_MESSAGES[name], *self._place(given))
        if name == "ForwardPass":
            return self._forward(*self._place(given))
        if name == "BackwardPass":
            return self._backward(*self._place(given))
        if name == "LoadMicroBatch":
            return self._load(given["buffer_id"])
        if name == "CommitP2P":
            return self._finish_messages
        if name == "ReduceTiedGrads":
            return self._reduce_tied()
        if name == "ReduceGrads":
            return self._reduce()
        if name == "OptimizerStep":
            return self._update()
        return _nothing

    def forwarded(self, outputs: Any) -> None:
        """Record a call of the engine's module."""
        self._calls += 1
        self._outputs = outputs

    def start_reduction(self) -> None:
        """Check a reduction of the gradients."""
        if GRADIENTS in self._stream.buckets:
            self._works.start_reduction(GRADIENTS)

    def finish_reduction(self) -> None:
        """Record that a reduction of the gradients has run."""
        self._reduced = True
        if GRADIENTS in self._stream.buckets:
            self._works.finish_reduction(GRADIENTS)

    def check_update(self) -> bool:
        """Check the optimizer's update. Return True."""
        if self._weights is not None:
            self._weights.check("check_update", self._stream.stages[0])
        self._works.check_update()
        return True

    def commit_update(self) -> None:
        """Commit an update that ran."""
        self._works.commit_update()
        self._works.end()
        self._weights, self._updated = None, True

    def finish(self) -> None:
        """End the step after its update of the weights."""
        if not self._updated:
            self._finalize()
            raise not_run("commit_update", "OptimizerStep")

    # Instructions

    def _place(self, given: dict[str, Any]) -> tuple[int, int]:
        """Return stage and buffer of an instruction."""
        phase = given.get("phase", 0)
        return self._stream.stages[phase], given["buffer_id"]

    def _held(self, what: str, buffer: int) -> Any:
        return self._engine.pipe_buffers[what][buffer]

    def _load(self, buffer: int) -> Callable[[], None]:
        """Check the load of an input, on the first stage, and of labels, on the last one."""
        folded = len(self._stream.stages) > 1
        labels = buffer + self._stream.microbatches if folded else buffer
        if 0 not in self._stream.stages:
            return partial(self._buffers.labels.add, labels)
        work = self._buffers.next("input", 0)
        self._works.reserve(work, buffer)
        arrived = self._arrival("LoadMicroBatch", work, buffer)

        def end() -> None:
            arrived()
            self._buffers.labels.add(labels)

        return end

    def _arrival(self, name: str, work: Work, buffer: int) -> Callable[[], None]:
        """Return a function that records the input which the instruction has put into its
        buffer."""
        before = first_tensor(self._held("inputs", buffer))

        def arrived() -> None:
            now = first_tensor(self._held("inputs", buffer))
            if now is None or now is before:
                raise not_run("commit_forward", f"{name} into buffer {buffer}, {work_name(work)}")
            other = self._buffers.maker("input", now)
            if other is not None and other != work:
                raise another_work("finish_receive", "input", other, work)
            self._buffers.inputs[buffer] = work
            self._buffers.made("input", work, now)

        return arrived

    def _forward(self, stage: int, buffer: int) -> Callable[[], None]:
        work = self._buffers.maker("input", self._held("inputs", buffer))
        if work is None:
            work = self._buffers.inputs.get(buffer) or self._buffers.next("input", stage)
        self._check_weights("check_forward", stage)
        event = ("F", *work)
        self._works.check(event)
        if self._takes_labels(stage) and buffer not in self._buffers.labels:
            raise refused(
                "ownership.receive-missing",
                "check_forward",
                f"buffer {buffer}, {work_name(work)}, without labels of its own",
                "labels that LoadMicroBatch loaded after the last forward of the buffer",
            )
        self._calls, self._outputs = 0, None

        def end() -> None:
            outputs, self._outputs = self._outputs, None
            if self._calls != 1:
                raise not_once("commit_forward", f"F of {work_name(work)}", self._calls)
            self._works.commit(event)
            self._buffers.labels.discard(buffer)
            self._buffers.tapes[buffer] = work
            self._buffers.made("used", work, self._used(stage, buffer))
            self._buffers.made("output", work, self._held("outputs", buffer))
            self._passes.watch(work, outputs)

        return end

    def _takes_labels(self, stage: int) -> bool:
        """Whether a stage computes the loss from labels."""
        last = stage == self._stream.num_stages - 1
        return last and getattr(self._engine.module, "loss_fn", None) is not None

    def _used(self, stage: int, buffer: int) -> Any:
        """What a backward of a buffer starts from: the output, or the loss on the last stage."""
        if stage < self._stream.num_stages - 1:
            return self._held("outputs", buffer)
        kept = self._engine.pipe_buffers.get("losses")
        return self._engine.loss if kept is None else kept[buffer]

    def _backward(self, stage: int, buffer: int) -> Callable[[], None]:
        work = self._buffers.tapes.get(buffer) or self._buffers.next("backward", stage)
        used = self._buffers.maker("used", self._used(stage, buffer))
        self._check_weights("check_dgrad", stage)
        event = ("B", *work)
        self._works.check(event, used)
        arrived = self._gradient_of(stage, buffer)
        if arrived is not None and arrived != work:
            raise another_work("check_dgrad", "gradient", arrived, work)
        before, total = self._passes.of(work), self._passes.total

        def end() -> None:
            passed = self._passes.of(work)
            if before is not None and passed is not None:
                own = passed - before
                if self._passes.total - total > own:
                    raise another_work("commit_dgrad", "output", self._passes.last, work)
                if own != 1 and (own == 0 or self._passes.nodes(work) == 1):
                    raise not_once("commit_dgrad", f"B of {work_name(work)}", own)
            self._works.commit(event)
            self._buffers.gradients[buffer] = work
            self._backwards += 1

        return end

    def _gradient_of(self, stage: int, buffer: int) -> Work | None:
        """Return the work of the received gradient that a backward uses; None if it is unknown."""
        if stage == self._stream.num_stages - 1 or stage + 1 in self._stream.stages:
            return None
        kept = self._engine.pipe_buffers.get("grads")
        if kept is None:  # all gradients are received into one tensor
            return self._buffers.received
        return self._buffers.maker("gradient", kept[buffer])

    def _message(self, kind: str, stage: int, buffer: int) -> Callable[[], None]:
        buffers = self._buffers
        arrived: Callable[[], None] = _nothing
        used = None
        if kind == "RECV_F":
            work = buffers.next("input", stage)
            arrived = self._arrival("RecvActivation", work, buffer)
        elif kind == "SEND_B":
            work = buffers.gradients.get(buffer) or buffers.next(kind, stage)
            used = buffers.maker("input", self._held("inputs", buffer))
        else:
            work = buffers.tapes.get(buffer) or buffers.next(kind, stage)
            if kind == "SEND_F":
                used = buffers.maker("output", self._held("outputs", buffer))
            else:
                arrived = partial(self._gradient_arrived, work, buffer)
        self._works.post_message((kind, *work), slot=buffer, used=used)
        self._queued.append((kind, *work))

        def end() -> None:
            arrived()
            if "CommitP2P" not in self._stream.names:
                self._finish_messages()

        return end

    def _gradient_arrived(self, work: Work, buffer: int) -> None:
        self._buffers.received = work
        if (kept := self._engine.pipe_buffers.get("grads")) is not None:
            self._buffers.made("gradient", work, kept[buffer])

    def _finish_messages(self) -> None:
        """End the messages that were queued: the engine has waited for them."""
        while self._queued:
            event = self._queued.pop(0)
            if event[0].startswith("RECV"):
                self._works.finish_receive(event)
            else:
                self._works.finish_sends((event,))

    def _check_weights(self, call: str, stage: int) -> None:
        if self._weights is None:
            self._weights = Weights(self._engine.module)
        else:
            self._weights.check(call, stage)

    # Reductions and the update

    def _whole(self) -> bool:
        """Whether every microbatch of the step has run."""
        return self._backwards == self._stream.microbatches * len(self._stream.stages)

    def _finalize(self) -> None:
        if not self._final:
            self._check_weights("finalize", self._stream.stages[0])
            for stage in self._stream.stages:
                self._works.finalize(stage)
            self._final = True

    def _reduce_tied(self) -> Callable[[], None]:
        if TIED not in self._stream.buckets:
            return _nothing
        self._works.start_reduction(TIED)
        return partial(self._works.finish_reduction, TIED)

    def _reduce(self) -> Callable[[], None]:
        if self._final or not self._whole():  # a second one, or one that comes too early
            self.start_reduction()
        self._finalize()
        self._reduced = False

        def end() -> None:
            if self._reduced:
                return
            if getattr(self._engine, "pipeline_enable_backward_allreduce", True):
                raise not_run("finish_reduction", "ReduceGrads")
            self.start_reduction()
            self.finish_reduction()

        return end

    def _update(self) -> Callable[[], None]:
        if self._whole():
            self._finalize()
        before, self._updated = self._updated, False

        def end() -> None:
            if not self._updated:
                self._updated = before
                raise not_run("commit_update", "OptimizerStep")

        return end


def _nothing() -> None: ...
