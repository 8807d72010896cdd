"""
A guard that checks DeepSpeed's pipeline engine. Call `guard` in your own training script.

`guard(engine)` changes no result and no file. `train_batch` runs as before. A contract checks each
instruction before the instruction runs, and records the instruction afterwards. The guard finds
faults that DeepSpeed does not notice, and names the contract's clause and the rank of each fault.
Examples are a microbatch that is forwarded twice or left out, a backward that uses another
microbatch's output, an update in the middle of a batch, and a reduction that is left out. By
default, the guard reports violations; with ``manner="refuse"`` it raises an error.

Where the guard checks: DeepSpeed's `PipelineEngine._exec_schedule` looks up each instruction in the
engine's `_INSTRUCTION_MAP`. The guard replaces this map with its own map, which calls the methods
in the engine's map. The guard checks the update, the reduction of gradients and a checkpoint where
the engine calls them. Therefore it also sees such a call outside of the usual instruction.

What the guard knows: the instructions, and the tensors in a buffer, show which microbatch is in the
buffer. The engine's own schedule declares the order of F (forward) and dI (input gradient) on the
rank. The guard also sees every message, reduction, update and checkpoint. It sees whether each
computation ran, and on which weights. It does not check weight caches, gradient buffers, graphs and
streams.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any

from qeffect.contract import Contract
from qeffect.refusals import refused
from qeffect.schedule.actions import ScheduleError
from qeffect.stage_config import Bucket, StageConfig
from qeffect.text import shown

from .advice import DEEPSPEED_ADVICE
from .deepspeed_step import EngineStep
from .deepspeed_stream import TIED, GuardedMap, Stream, stream_of
from .judging import ContractLogs, Judge
from .recurring import RecurringSteps
from .releases import check_release
from .reports import Manner, OnViolation, Reports, Violation
from .trust import DEEPSPEED

__all__ = ["TESTED", "UNUSED", "GuardedEngine", "Violation", "guard"]

#: Relations of the contract that the guard leaves out: weight caches, gradient buffers, graphs and
#: streams.
UNUSED = ("version", "arena", "capture", "completion")

#: The releases of DeepSpeed that the guard was tested with.
TESTED = ("0.19",)

#: The attribute of a guarded engine that holds the guard.
_MARK = "_qeffect_guarded"


def guard(
    engine: Any,
    *,
    manner: Manner = "report",
    on_violation: OnViolation | None = None,
    log: str | os.PathLike[str] | None = None,
    untested: bool = False,
) -> GuardedEngine:
    """
    Install a guard that checks a pipeline engine against a contract.

    Each later `engine.train_batch(...)` is one epoch, that is, one optimizer step.
    `engine.eval_batch(...)` runs only forwards and is not guarded.

    In manner ``report`` a step is never refused. The first violation of each clause is logged by
    the logger ``qeffect.guards`` and passed to `on_violation`. After a violation the guard checks
    nothing until the next step, which has a fresh contract.

    Args:
        engine: The engine that `deepspeed.initialize` returned for a `PipelineModule`.
        manner: ``report`` reports a violation, and the run continues. ``refuse`` raises an error.
        on_violation: Called with the first violation of each clause, in manner ``report``.
        log: A folder for the event log of each rank (``rank0.jsonl`` and so on), which `qeffect
            replay` reads. With data parallelism, each replica has its own subfolder. Each later
            contract of a rank has its own file, such as ``rank0.contract1.jsonl``.
        untested: Whether manner ``refuse`` accepts a DeepSpeed release that the guard was not
            tested with. Manner ``report`` only warns about such a release.

    Raises:
        UntestedReleaseError: The manner is ``refuse``, `untested` is False, and the guard was not
            tested with the installed DeepSpeed.
        TypeError: `engine` is not a pipeline engine.
        ValueError: The engine is guarded already or has no optimizer, or the manner is unknown.
        ScheduleError: The engine's schedule cannot be read. In manner ``refuse`` also: the schedule
            is wrong. The message is the same as in `qeffect check`.
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
        raise ValueError(
            "this engine has no optimizer, so it does not train; pass one to deepspeed.initialize"
        )
    check_release("deepspeed", _release(engine), *TESTED, manner=manner, untested=untested)
    reports = Reports(on_violation) if manner == "report" else None
    return GuardedEngine(engine, reports, None if log is None else Path(log))


def _release(engine: Any) -> str:
    """Return the release of the package that defines the engine's class or its base class."""
    for base in type(engine).__mro__:
        if base.__name__ == "PipelineEngine":
            package = sys.modules.get(base.__module__.partition(".")[0])
            return str(getattr(package, "__version__", "unknown"))
    return "unknown"


class GuardedEngine:
    """
    A pipeline engine that is checked against a contract. `guard` returns this object.

    Args:
        engine: The engine.
        reports: The object that collects violations. With None, a violation raises an error.
        log: The folder for event logs; None writes no log.
    """

    def __init__(self, engine: Any, reports: Reports | None = None, log: Path | None = None):
        self.engine = engine
        self._judge = Judge(reports, lambda: int(engine.stage_id), self._abort, DEEPSPEED_ADVICE)
        self._logs = ContractLogs(_folder(engine, log))
        self._steps = 0
        self._left = False  # whether the latest step was left unfinished
        self._off = self._running = False
        self._inside = ""  # the instruction that runs
        self._known = True
        self._stream = self._declared()
        self._recurring = RecurringSteps(self._contract())
        self._step = EngineStep(engine, self._stream, self._recurring)
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        before = vars(engine).get("_INSTRUCTION_MAP")
        self._replace(engine, "_INSTRUCTION_MAP", GuardedMap(engine, before, self._run))
        self._replace(engine, "train_batch", self._train_batch(engine.train_batch))
        self._replace(engine, "save_checkpoint", self._saving(engine.save_checkpoint))
        optimizer = engine.optimizer  # bound: a scheduler of torch wraps the function of the method
        self._replace(optimizer, "step", MethodType(self._updating(optimizer.step), optimizer))
        for owner, name in (
            (engine, "buffered_allreduce_fallback"),
            (optimizer, "reduce_gradients"),  # of ZeRO stage 1
        ):
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
        return self._judge.violations

    def on_trust(self) -> tuple[str, ...]:
        """Return sentences that say what the guard does not check for this engine."""
        names = ["data", "messages", "reductions", "counters", "methods"]
        if TIED in self._stream.buckets:
            names.append("tied")
        if not getattr(self.engine, "pipeline_enable_backward_allreduce", True):
            names.append("optimizer")
        if getattr(self.engine, "is_pipe_partitioned", False):
            names.append("partitioned")
        return tuple(DEEPSPEED[name].said() for name in names)

    def remove(self) -> None:
        """
        Remove the guard, and restore the engine's own methods.

        If other code has wrapped a guarded method, the wrapper stays, but the method is no longer
        checked.
        """
        self._off = True
        self._logs.close()
        self._hook.remove()
        while self._replaced:
            owner, name, before, value = self._replaced.pop()
            if vars(owner).get(name) is not value:
                continue
            if before is not None:
                setattr(owner, name, before)
            else:
                delattr(owner, name)
        if hasattr(self.engine, _MARK):
            delattr(self.engine, _MARK)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, vars(owner).get(name), value))
        setattr(owner, name, value)

    # The contract

    @property
    def contract(self) -> Contract:
        """
        The current contract, which contains every call of the current step so far.

        After a violation, and after a change of the number of microbatches, a new contract is made.
        """
        return self._recurring.contract

    def _declared(self) -> Stream:
        stream = stream_of(self.engine)
        self._known = stream.wrong is None
        if stream.wrong is not None:
            reports = self._judge.reports
            if reports is None:
                raise ScheduleError(f"{stream.source}: {stream.wrong} ({stream.wrong.remedy})")
            self._judge.report_schedule(reports, stream.wrong, stream.source, self._steps)
        return stream

    def _contract(self) -> Contract:
        last, local = self._stream.num_stages - 1, self._stream.stages
        buckets = tuple(map(Bucket, self._stream.buckets))
        configs = []
        for stage in local:
            before = stage > 0 and stage - 1 not in local
            behind = stage < last and stage + 1 not in local
            configs.append(
                StageConfig(
                    stage,
                    microbatches=self._stream.microbatches,
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
            if self._off:
                return train_batch(*args, **kwargs)
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
        """Drop the records of the last step, even if that step is unfinished."""
        changed = self.engine.micro_batches != self._stream.microbatches
        if self._judge.reports is not None and (self._left or not self._judge.judges):
            # After a violation or a failed step. A wrong table is never judged.
            self._judge.judges = self._known or changed
            self._judge("the beginning of train_batch", self._restart)
        elif changed:
            self._judge("the beginning of train_batch", self._restart)
        self._left = True
        self._judge.step = self._steps
        self._step = EngineStep(self.engine, self._stream, self._recurring)
        self._judge("the beginning of train_batch", self._check_gradients)
        self._steps += 1

    def _restart(self) -> None:
        if self.engine.micro_batches != self._stream.microbatches:
            self._stream = self._declared()
        self._recurring = RecurringSteps(self._contract())

    def _finish(self) -> None:
        self._step.finish()
        self._left = False

    def _abort(self) -> None:
        """Abort the actions that have begun and not ended."""
        self._judge.abort(self._recurring)

    def _check_gradients(self) -> None:
        """Check that no gradients of the last step remain, if the engine itself must drop them."""
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
        action = f"{name}({', '.join(f'{key}={value}' for key, value in given.items())})"
        end = self._judge(action, partial(self._step.begin, name, given))
        self._inside = name
        try:
            found = method(engine, **given)
        except BaseException:
            self._abort()
            raise
        finally:
            self._inside = ""
        if end is not None:
            self._judge(action, end)
        return found

    def _forwarded(self, module: Any, inputs: Any, outputs: Any) -> None:
        """Record a call of the engine's module."""
        if self._inside == "ForwardPass":
            self._step.forwarded(outputs)

    # Reductions, the update, checkpoints

    def _reducing(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        def guarded_reduction(*args: Any, **kwargs: Any) -> Any:
            if not self._running:
                return reduce(*args, **kwargs)
            at = "" if self._inside == "ReduceGrads" else "a reduction"
            self._judge(at, self._step.start_reduction)
            found = reduce(*args, **kwargs)
            self._judge("", self._step.finish_reduction)
            return found

        return guarded_reduction

    def _updating(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def guarded_update(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._off:
                return step(*args, **kwargs)
            at = "" if self._inside == "OptimizerStep" else "optimizer.step()"
            checked = self._judge(at, self._step.check_update)
            try:
                found = step(*args, **kwargs)
            except BaseException:
                self._abort()
                raise
            if checked is not None:
                self._judge("", self._step.commit_update)
            return found

        return guarded_update

    def _saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def guarded_save(*args: Any, **kwargs: Any) -> Any:
            if not self._off and (self._running or not self._left):
                self._judge("save_checkpoint", self.contract.check_checkpoint)
            return save(*args, **kwargs)

        return guarded_save


def _folder(engine: Any, log: Path | None) -> Path | None:
    """Return the folder of this process's logs; each parallel copy of the pipeline has its own
    folder.
    """
    if log is None:
        return None
    grid, names = engine.grid, []
    if getattr(engine, "is_data_parallel", False):
        names.append(f"replica{grid.data_parallel_id}")
    if getattr(engine, "is_model_parallel", False):
        names.append(f"slice{grid.get_slice_parallel_rank()}")
    return log.joinpath("-".join(names)) if names else log
