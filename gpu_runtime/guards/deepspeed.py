"""
A contract under DeepSpeed's pipeline engine, for a training script of your own.

`guard(engine)` changes no result and no file: `train_batch` runs as before, and a contract checks
each instruction before it runs and commits it afterwards. The guard names, by clause and on the
rank where it happens, what DeepSpeed does not notice: a microbatch that is forwarded twice or left
out, a backward over another microbatch's output, an update in mid-batch, a reduction that is left
out. It reports by default; with ``manner="refuse"`` it raises.

Where the guard checks: `PipelineEngine._exec_schedule` looks each instruction up in the engine's
`_INSTRUCTION_MAP`. The guard gives the engine a map of its own, which runs the method that the
engine's map has at that moment. The update, the reduction of gradients and a checkpoint are checked
where the engine calls them, so that they are seen outside their instruction too.

What the guard knows: which microbatch a buffer holds, by the instructions and by the tensors in it
(ownership, with buffers as slots); the order of F and dI on the rank, which the engine's own
schedule declares; messages; reductions; the update; checkpoints; that each computation ran, and on
which weights. Weight caches, gradient buffers, graphs and streams are left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from qeffect.contract import Contract
from qeffect.refusals import refused
from qeffect.schedule.actions import ScheduleError
from qeffect.schedule.pairing import Work
from qeffect.stage_config import Bucket, StageConfig
from qeffect.text import shown

from .deepspeed_buffers import Buffers, first_tensor
from .deepspeed_stream import GuardedMap, Stream, stream_of
from .evidence import BackwardPasses, Weights, not_run
from .judging import ContractLogs, Judge
from .releases import check_release
from .reports import Manner, OnViolation, Reports, Violation
from .works import Works

__all__ = ["TESTED", "UNUSED", "GuardedEngine", "Violation", "guard"]

#: Relations that a guard of plain modules leaves out.
UNUSED = ("version", "arena", "capture", "completion")

#: The oldest and the newest release of DeepSpeed that the guard was tested with.
TESTED = ("0.19", "0.19")

#: The attribute of a guarded engine that holds the guard.
_MARK = "_qeffect_guarded"
_MESSAGES = {
    "SendActivation": "SEND_F",
    "RecvActivation": "RECV_F",
    "SendGrad": "SEND_B",
    "RecvGrad": "RECV_B",
}
_CALLS = {"F": "commit_forward", "B": "commit_dgrad"}
_GRADIENTS, _TIED = "gradients", "tied"


def guard(
    engine: Any,
    *,
    manner: Manner = "report",
    on_violation: OnViolation | None = None,
    log: str | os.PathLike[str] | None = None,
    untested: bool = False,
) -> GuardedEngine:
    """
    Put a contract under a pipeline engine: each later `engine.train_batch(...)` is one epoch.

    `engine.eval_batch(...)` runs forwards alone and is not guarded.

    In manner ``report`` a step is never refused. The first violation of each clause is logged by
    ``qeffect.guards`` and given to `on_violation`. The guard then judges nothing until the next
    step, which has a fresh contract.

    Args:
        engine: What `deepspeed.initialize` returned for a `PipelineModule`.
        manner: ``report`` reports a violation, and the run goes on; ``refuse`` raises.
        on_violation: Called with the first violation of each clause, in manner ``report``.
        log: A folder for the event log of each rank, ``rank0.jsonl`` and so on, which `qeffect
            replay` takes; with data parallelism a folder in it for each replica. A fresh contract
            has a file of its own: ``rank0.contract1.jsonl``.
        untested: Guard an engine of a DeepSpeed release that the guard was not tested with, in
            manner ``refuse``. Manner ``report`` warns of such a release.

    Raises:
        UntestedReleaseError: The guard was not tested with the installed DeepSpeed, in manner
            ``refuse`` without `untested`.
        TypeError: Not a pipeline engine.
        ValueError: The engine is guarded already, it has no optimizer, or the manner is unknown.
        ScheduleError: The engine's schedule cannot be read, or, in manner ``refuse``, is wrong; the
            message is that of `qeffect check`.
    """
    if manner not in ("refuse", "report"):
        raise ValueError(f"manner must be 'refuse' or 'report', got {shown(manner)}")
    for name in ("_INSTRUCTION_MAP", "_exec_schedule", "_train_schedule", "pipe_buffers"):
        if not hasattr(engine, name):
            raise TypeError(
                "guard expects a PipelineEngine, which deepspeed.initialize returns for a "
                f"PipelineModule; found {type(engine).__name__} without {name}"
            )
    if hasattr(engine, _MARK):
        raise ValueError("this engine is guarded already; call remove() on its guard first")
    if getattr(engine, "optimizer", None) is None:
        raise ValueError("this engine has no optimizer, so it does not train; give one to it")
    check_release("deepspeed", _release(engine), *TESTED, manner=manner, untested=untested)
    reports = Reports(on_violation) if manner == "report" else None
    return GuardedEngine(engine, reports, None if log is None else Path(log))


def _release(engine: Any) -> str:
    """The release of the package that defines the engine's class, or that of its base class."""
    for base in type(engine).__mro__:
        if base.__name__ == "PipelineEngine":
            package = sys.modules.get(base.__module__.partition(".")[0])
            return str(getattr(package, "__version__", "unknown"))
    return "unknown"


class GuardedEngine:
    """
    A pipeline engine under a contract; `guard` makes it.

    Args:
        engine: The engine.
        reports: Where violations are reported; None refuses them.
        log: As for `guard`.

    Attributes:
        contract: The contract; a step after a violation, and one with another number of
            microbatches, has a new one.
    """

    def __init__(self, engine: Any, reports: Reports | None = None, log: Path | None = None):
        self.engine = engine
        self._judge = Judge(reports, lambda: int(engine.stage_id), self._abort)
        self._logs = ContractLogs(_folder(engine, log))
        self._steps = 0
        self._left = False  # whether the latest step was left unfinished
        self._running = False
        self._inside = ""  # the instruction that runs
        self._known = True
        self._stream = self._declared()
        self.contract = self._contract()
        self._forget_step()
        self._replaced: list[tuple[Any, str, Any]] = []
        before = vars(engine).get("_INSTRUCTION_MAP")
        self._replace(engine, "_INSTRUCTION_MAP", GuardedMap(engine, before, self._run))
        self._replace(engine, "train_batch", self._train_batch(engine.train_batch))
        self._replace(engine, "save_checkpoint", self._saving(engine.save_checkpoint))
        self._replace(engine.optimizer, "step", self._updating(engine.optimizer.step))
        for owner, name in ((engine, "buffered_allreduce_fallback"), *self._own_reduction()):
            if hasattr(owner, name):
                self._replace(owner, name, self._reducing(getattr(owner, name)))
        self._hook = engine.module.register_forward_hook(self._forwarded)
        setattr(engine, _MARK, self)

    @property
    def at(self) -> str:
        """The instruction that was checked last, such as ``BackwardPass(buffer_id=1)``."""
        return self._judge.at

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The first violation of each clause, in manner ``report``."""
        reports = self._judge.reports
        return () if reports is None else tuple(reports.violations.values())

    def on_trust(self) -> tuple[str, ...]:
        """Return what the guard of this engine takes on trust."""
        claims = [
            "the data iterator yields each microbatch once; its contents are not looked at",
            "a message that was sent arrives, and brings what was sent",
            "a reduction that was called reduces every gradient, over the right group",
            "no weight is written past its version counter, as through `.data`",
            "each method computes all of its instruction",
        ]
        if _TIED in self._buckets():
            claims.append("ReduceTiedGrads reduces the gradients of tied weights")
        if not getattr(self.engine, "pipeline_enable_backward_allreduce", True):
            claims.append("the optimizer reduces gradients by itself: ReduceGrads is switched off")
        if getattr(self.engine, "is_pipe_partitioned", False):
            claims.append("a partitioned activation is that of its buffer's microbatch")
        return tuple(claims)

    def remove(self) -> None:
        """Remove the guard; the engine is as it was before it."""
        self._logs.close()
        self._hook.remove()
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is not None:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)
        if hasattr(self.engine, _MARK):
            delattr(self.engine, _MARK)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, value)

    def _own_reduction(self) -> Iterator[tuple[Any, str]]:
        yield self.engine.optimizer, "reduce_gradients"  # ZeRO stage 1

    # The contract

    def _declared(self) -> Stream:
        self._microbatches = self.engine.micro_batches
        stream = stream_of(self.engine)
        self._known = stream.wrong is None
        if stream.wrong is not None:
            clause, said, remedy = stream.wrong
            if self._judge.reports is None:
                raise ScheduleError(f"{stream.source}: {said} ({remedy})")
            self._judge.judges = False
            rank = int(self.engine.stage_id)
            self._judge.reports.add(
                Violation(clause, rank, self._steps, stream.source, said, remedy)
            )
        return stream

    def _buckets(self) -> tuple[str, ...]:
        tied = getattr(self.engine.module, "get_tied_weights_and_groups", tuple)
        names = [_GRADIENTS] if "ReduceGrads" in self._stream.names else []
        if "ReduceTiedGrads" in self._stream.names and tied():
            names.append(_TIED)
        return tuple(names)

    def _contract(self) -> Contract:
        last, local = self._stream.num_stages - 1, self._stream.stages
        buckets = tuple(map(Bucket, self._buckets()))
        configs = []
        for stage in local:
            before = stage > 0 and stage - 1 not in local
            behind = stage < last and stage + 1 not in local
            configs.append(
                StageConfig(
                    stage,
                    microbatches=self._microbatches,
                    slots=self._stream.slots,
                    sends_output=behind,
                    sends_gradient=before,
                    receives_input=before,
                    receives_gradient=behind,
                    feeds=stage + 1 if stage + 1 in local else None,
                    reduces=bool(buckets),
                    buckets=buckets,
                )
            )
        contract = Contract(configs, omit=UNUSED, declared=self._stream.order, epoch=self._steps)
        self._logs.begin(contract, int(self.engine.stage_id))
        return contract

    # A step

    def _train_batch(self, train_batch: Callable[..., Any]) -> Callable[..., Any]:
        def guarded_train_batch(*args: Any, **kwargs: Any) -> Any:
            self._begin_step()
            self._running = True
            try:
                found = train_batch(*args, **kwargs)
                self._judge("the end of train_batch", self._finish)
            except BaseException:
                self._abort()
                raise
            finally:
                self._running = False
            return found

        return guarded_train_batch

    def _begin_step(self) -> None:
        """Drop the records of the last step, also of an unfinished one."""
        changed = self.engine.micro_batches != self._microbatches
        if self._judge.reports is not None and (self._left or not self._judge.judges):
            # A violation, or a step that failed. A table that is wrong stays unjudged.
            self._judge.judges = self._known or changed
            self._judge("the beginning of train_batch", self._restart)
        elif changed:
            self._judge("the beginning of train_batch", self._restart)
        self._left = True
        self._judge.step = self._steps
        self._forget_step()
        self._judge("the beginning of train_batch", self._check_gradients)
        self._steps += 1

    def _restart(self) -> None:
        if self.engine.micro_batches != self._microbatches:
            self._stream = self._declared()
        self.contract = self._contract()

    def _forget_step(self) -> None:
        self._works = Works(self.contract)
        self._buffers = Buffers()
        self._passes = BackwardPasses()
        self._weights: Weights | None = None
        self._queued: list[tuple[str, int, int]] = []
        self._calls, self._outputs = 0, None
        self._backwards = 0
        self._final = self._updated = self._reduced = False

    def _finish(self) -> None:
        if not self._updated:
            self._finalize()
            raise not_run("commit_update", "OptimizerStep")
        self._left = False

    def _abort(self) -> None:
        """Abort the actions that are under way."""
        self._judge.abort(self.contract)

    def _check_gradients(self) -> None:
        """Check that the last step's gradients are gone, where the engine itself drops them."""
        engine = self.engine
        kept = ("fp16_enabled", "bfloat16_enabled", "zero_optimization")
        if self._steps == 0 or any(getattr(engine, name, bool)() for name in kept):
            return
        for name, parameter in engine.module.named_parameters():
            if parameter.grad is not None and bool(parameter.grad.count_nonzero()):
                raise refused(
                    "arena.stale-accumulation",
                    "check_wgrad",
                    f"a gradient of {name} at the beginning of the step",
                    "no gradient of an earlier step",
                )

    # Instructions

    def _run(self, name: str, method: Callable[..., Any], engine: Any, **given: Any) -> Any:
        """Run an instruction of the engine, guarded."""
        if not self._running:  # eval_batch
            return method(engine, **given)
        said = ", ".join(f"{key}={value}" for key, value in given.items())
        end = self._judge(f"{name}({said})", partial(self._begin, name, given))
        self._inside = name
        try:
            found = method(engine, **given)
        except BaseException:
            self._abort()
            raise
        finally:
            self._inside = ""
        if end is not None:
            self._judge(f"{name}({said})", end)
        return found

    def _begin(self, name: str, given: dict[str, Any]) -> Callable[[], None]:
        """Check an instruction; return what commits it once it has run."""
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
        return lambda: None

    def _place(self, given: dict[str, Any]) -> tuple[int, int]:
        """Return stage and buffer of an instruction."""
        phase = given.get("phase", 0)
        return self._stream.stages[phase], given["buffer_id"]

    def _held(self, what: str, buffer: int) -> Any:
        return self.engine.pipe_buffers[what][buffer]

    def _load(self, buffer: int) -> Callable[[], None]:
        """Check the load of an input, on the first stage, and of labels, on the last one."""
        folded = len(self._stream.stages) > 1
        labels = buffer + self._microbatches if folded else buffer
        if 0 not in self._stream.stages:
            return lambda: self._buffers.labels.add(labels)
        work = self._buffers.next("input", 0)
        self._works.reserve(work, buffer)
        arrived = self._arrival("LoadMicroBatch", work, buffer)

        def end() -> None:
            arrived()
            self._buffers.labels.add(labels)

        return end

    def _arrival(self, name: str, work: Work, buffer: int) -> Callable[[], None]:
        """Return what records an input, if the instruction has put one into its buffer."""
        before = first_tensor(self._held("inputs", buffer))

        def arrived() -> None:
            now = first_tensor(self._held("inputs", buffer))
            if now is None or now is before:
                raise not_run("commit_forward", f"{name} into buffer {buffer}, {_named(work)}")
            other = self._buffers.maker("input", now)
            if other is not None and other != work:
                raise refused(
                    "ownership.wrong-key",
                    "finish_receive",
                    f"the input of {_named(other)} in buffer {buffer}",
                    f"the input of {_named(work)}",
                )
            self._buffers.inputs[buffer] = work
            self._buffers.made("input", work, now)

        return arrived

    def _forward(self, stage: int, buffer: int) -> Callable[[], None]:
        work = self._buffers.maker("input", self._held("inputs", buffer))
        if work is None:
            work = self._buffers.inputs.get(buffer) or self._buffers.next("input", stage)
        self._check_weights("check_forward", stage)
        block = self._works.check(("F", *work))
        if self._loses(stage) and buffer not in self._buffers.labels:
            raise refused(
                "ownership.receive-missing",
                "check_forward",
                f"buffer {buffer}, {_named(work)}, without labels of its own",
                "labels that LoadMicroBatch brought after the last forward of the buffer",
            )
        self._calls, self._outputs = 0, None

        def end() -> None:
            if self._calls != 1:
                self._abort()
                times = "twice" if self._calls > 1 else ""
                raise _ran("F", work, times)
            self._works.commit(("F", *work), block)
            self._buffers.labels.discard(buffer)
            self._buffers.tapes[buffer] = work
            self._buffers.made("output", work, self._used(stage, buffer))
            self._buffers.made("sent", work, self._held("outputs", buffer))
            self._passes.watch(work, self._outputs)
            self._outputs = None

        return end

    def _loses(self, stage: int) -> bool:
        """Whether a stage computes the loss, of labels."""
        return (
            stage == self._stream.num_stages - 1
            and getattr(self.engine.module, "loss_fn", None) is not None
        )

    def _forwarded(self, module: Any, inputs: Any, outputs: Any) -> None:
        """Count a call of the engine's module."""
        self._calls += 1
        self._outputs = outputs

    def _used(self, stage: int, buffer: int) -> Any:
        """What a backward of a buffer starts from: the output, or the loss on the last stage."""
        if stage < self._stream.num_stages - 1:
            return self._held("outputs", buffer)
        kept = self.engine.pipe_buffers.get("losses")
        return self.engine.loss if kept is None else kept[buffer]

    def _backward(self, stage: int, buffer: int) -> Callable[[], None]:
        work = self._buffers.tapes.get(buffer) or self._buffers.next("backward", stage)
        used = self._buffers.maker("output", self._used(stage, buffer))
        self._check_weights("check_dgrad", stage)
        block = self._works.check(("B", *work), used)
        own, total = self._passes.of(work), self._passes.total

        def end() -> None:
            now = self._passes.of(work)
            if own is not None and now is not None:
                others = self._passes.total - total - (now - own)
                if others or now == own or (now - own > 1 and self._passes.nodes(work) == 1):
                    self._abort()
                if others:
                    raise refused(
                        "ownership.wrong-key",
                        "commit_dgrad",
                        f"a backward through the output of {_named(self._passes.last)}",
                        f"one through the output of {_named(work)}",
                    )
                if now == own:
                    raise _ran("B", work, "")
                if now - own > 1 and self._passes.nodes(work) == 1:
                    raise _ran("B", work, "twice")
            self._works.commit(("B", *work), block)
            self._buffers.gradients[buffer] = work
            self._backwards += 1

        return end

    def _message(self, kind: str, stage: int, buffer: int) -> Callable[[], None]:
        buffers = self._buffers
        used = None
        if kind == "RECV_F":
            work = buffers.next("input", stage)
            event = (kind, *work)
            arrived = self._arrival("RecvActivation", work, buffer)
            self._works.post_message(event, slot=buffer)
        else:
            made = buffers.gradients if kind == "SEND_B" else buffers.tapes
            work = made.get(buffer) or buffers.next(kind, stage)
            event = (kind, *work)
            if kind == "SEND_F":
                used = buffers.maker("sent", self._held("outputs", buffer))
            elif kind == "SEND_B":
                used = buffers.maker("input", self._held("inputs", buffer))
            arrived = _nothing
            self._works.post_message(event, used=used)
        self._queued.append(event)

        def end() -> None:
            arrived()
            if "CommitP2P" not in self._stream.names:
                self._finish_messages()

        return end

    def _finish_messages(self) -> None:
        """End the messages that were queued: the engine has waited for them."""
        while self._queued:
            event = self._queued.pop(0)
            if event[0].startswith("RECV"):
                self._works.finish_receive(event)
            else:
                self._works.finish_send(event)

    def _check_weights(self, call: str, stage: int) -> None:
        if self._weights is None:
            self._weights = Weights(self.engine.module)
        else:
            self._weights.check(call, stage)

    # Reductions, the update, checkpoints

    def _finalize(self) -> None:
        if not self._final:
            self._check_weights("finalize", self._stream.stages[0])
            for stage in self._stream.stages:
                self.contract.finalize(stage)
            self._final = True

    def _reduce_tied(self) -> Callable[[], None]:
        if _TIED not in self._buckets():
            return _nothing
        self.contract.start_reduction(_TIED)
        return partial(self.contract.finish_reduction, _TIED)

    def _whole(self) -> bool:
        """Whether every microbatch of the step has run."""
        return bool(self._backwards == self._microbatches * len(self._stream.stages))

    def _reduce(self) -> Callable[[], None]:
        if self._final or not self._whole():  # a second one, or one that comes too early
            self.contract.start_reduction(_GRADIENTS)
        self._finalize()
        self._reduced = False

        def end() -> None:
            if self._reduced:
                return
            if getattr(self.engine, "pipeline_enable_backward_allreduce", True):
                raise not_run("finish_reduction", "ReduceGrads")
            self.contract.start_reduction(_GRADIENTS)
            self.contract.finish_reduction(_GRADIENTS)

        return end

    def _reducing(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        def guarded_reduction(*args: Any, **kwargs: Any) -> Any:
            if not self._running or _GRADIENTS not in self._buckets():
                return reduce(*args, **kwargs)
            at = "" if self._inside == "ReduceGrads" else "a reduction"
            self._judge(at, partial(self.contract.start_reduction, _GRADIENTS))
            found = reduce(*args, **kwargs)
            self._reduced = True
            self._judge("", partial(self.contract.finish_reduction, _GRADIENTS))
            return found

        return guarded_reduction

    def _update(self) -> Callable[[], None]:
        if self._whole():
            self._finalize()
        before = self._updated
        self._updated = False

        def end() -> None:
            if not self._updated:
                self._updated = before
                raise not_run("commit_update", "OptimizerStep")

        return end

    def _updating(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def guarded_update(*args: Any, **kwargs: Any) -> Any:
            def check() -> Any:
                if self._weights is not None:
                    self._weights.check("check_update", self._stream.stages[0])
                return self.contract.update().__enter__()

            block = self._judge(
                "" if self._inside == "OptimizerStep" else "optimizer.step()", check
            )
            try:
                found = step(*args, **kwargs)
            except BaseException:
                self._abort()
                raise
            if block is not None:
                self._judge("", lambda: block.__exit__(None, None, None))
                self._weights = None
            self._updated = True
            return found

        return guarded_update

    def _saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def guarded_save(*args: Any, **kwargs: Any) -> Any:
            if self._running or not self._left:
                self._judge("save_checkpoint", self.contract.check_checkpoint)
            return save(*args, **kwargs)

        return guarded_save


def _nothing() -> None: ...


def _named(work: Any) -> str:
    stage, microbatch = work
    return f"stage {stage}, microbatch {microbatch}"


def _ran(kind: str, work: Work, times: str) -> Any:
    action = f"{kind} of {_named(work)}"
    if not times:
        return not_run(_CALLS[kind], action)
    return refused(
        "epoch.device-count",
        _CALLS[kind],
        f"{action}: its computation ran {times}",
        "one run of each action that is committed",
    )


def _folder(engine: Any, log: Path | None) -> Path | None:
    """The folder of this process's logs: pipelines beside each other have one each."""
    if log is None:
        return None
    grid, names = engine.grid, []
    if getattr(engine, "is_data_parallel", False):
        names.append(f"replica{grid.data_parallel_id}")
    if getattr(engine, "is_model_parallel", False):
        names.append(f"slice{grid.get_slice_parallel_rank()}")
    return log.joinpath("-".join(names)) if names else log
