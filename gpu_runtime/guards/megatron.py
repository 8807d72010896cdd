"""
A contract that checks Megatron-core's forward-backward loops, for your own training script.

`guard()` changes no result, no file and no option: the loops run as before, and a contract checks
each action (forward, backward, exchange, reduction, update, checkpoint) before the action runs, and
commits the action afterwards. The guard finds faults that Megatron-core does not notice, and names
the clause and the rank of each. Examples are a microbatch that is forwarded twice or left out, a
backward over another microbatch's output, quantized weights of an earlier step, and swapped
messages. Other examples are a bucket of gradients that is reduced early, twice or never, and an
update or a checkpoint in mid-step.
The guard reports by default; with ``manner="refuse"`` it raises.

Where the guard checks: the three loops of `megatron.core.pipeline_parallel.schedules` look
`forward_step` and `backward_step` up in their module, and `get_forward_backward_func` looks the
loops up in the same module. The guard replaces these names until `remove()`. It also replaces
methods of `P2PCommunicator`, of the buckets of gradients, of the optimizers and of checkpoints. The
guard sees updates of torch's own optimizers through torch's hooks.

What the guard knows: Megatron-core's own algorithm declares the order of F (forward) and B
(backward). The guard remembers which microbatch F made each tensor for, so the tensors of a B show
the microbatch of that B. A message is identified by the stages that send and receive its tensor.
The guard also sees which F quantized the weights, and every reduction, update and checkpoint.
Gradient buffers, graphs and streams are left out of the contract.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

from qeffect.contract import Contract
from qeffect.refusals import Refused, refused
from qeffect.stage_config import Bucket, StageConfig
from qeffect.text import shown

from .advice import MEGATRON_ADVICE
from .evidence import Weights
from .judging import ContractLogs, Judge
from .megatron_buckets import reduced_and_gathered
from .megatron_cache_values import CacheValues
from .megatron_caches import Caches, is_plain
from .megatron_library import Library, Patches, library
from .megatron_plan import LOOPS, LoopPlan, UnguardedScheduleError, chunks_of, plan_of, unguarded
from .megatron_step import LoopStep, Norm, action_name
from .megatron_updates import Gradients, Saves, Updates, gradient_buffers
from .recurring import RecurringSteps
from .releases import check_release
from .reports import LOGGER, Manner, OnViolation, Reports, Violation
from .trust import MEGATRON
from .works import Event

__all__ = ["TESTED", "UNUSED", "GuardedMegatron", "UnguardedScheduleError", "Violation", "guard"]

#: Relations of the contract that the guard always leaves out. Where no weights are quantized, the
#: guard also leaves out `version`.
UNUSED = ("arena", "capture", "completion")

#: The releases of Megatron-core that the guard was tested with.
TESTED = ("0.16", "0.17", "0.18", "0.19")

#: The first arguments of Megatron-core's backward step.
_BACKWARD = ("input_tensor", "output_tensor", "output_tensor_grad")
_PARTIAL = "num_microbatches_with_partial_activation_checkpoints"

_active: list[GuardedMegatron] = []


def guard(
    *,
    manner: Manner = "report",
    on_violation: OnViolation | None = None,
    log: str | os.PathLike[str] | None = None,
    untested: bool = False,
    compare_caches: int = 0,
) -> GuardedMegatron:
    """
    Check Megatron-core's loops against a contract.

    A loop and the optimizer's update after it are one epoch, that is, one optimizer step. Call
    `guard` before `get_forward_backward_func()`. Loops with ``forward_only=True`` are not
    guarded.

    In manner ``report`` a step is never refused. The first violation of each clause is logged by
    ``qeffect.guards`` and given to `on_violation`. After a violation the guard checks nothing until
    the next step, which has a fresh contract.

    Args:
        manner: ``report`` reports a violation, and the run goes on; ``refuse`` raises.
        on_violation: Called with the first violation of each clause, in manner ``report``.
        log: A folder for the event log of each rank, ``rank0.jsonl`` and so on, which `qeffect
            replay` reads; with data or tensor parallelism, each pipeline has its own subfolder.
            Each later contract of a rank has its own file, such as ``rank0.contract1.jsonl``.
        untested: Whether manner ``refuse`` accepts a release of Megatron-core that the guard was
            not tested with. Manner ``report`` only warns of such a release.
        compare_caches: n compares each cache of FP8 weights with its weight, by value, before every
            n-th update; 0 compares nothing. Manner ``refuse`` waits for the result. Manner
            ``report`` reads the result before a later update.

    Raises:
        ImportError: Megatron-core is not installed.
        UntestedReleaseError: The guard was not tested with the installed release, the
            manner is ``refuse``, and `untested` is false.
        ValueError: Megatron-core is guarded already, the manner is unknown, or `compare_caches` is
            not an integer of at least 0.
    """
    if manner not in ("refuse", "report"):
        raise ValueError(f"manner must be 'refuse' or 'report', got {shown(manner)}")
    if compare_caches.__class__ is not int or compare_caches < 0:
        raise ValueError(
            f"compare_caches must be an integer of at least 0, got {shown(compare_caches)}"
        )
    if _active:
        raise ValueError("Megatron-core is guarded already; call remove() on its guard first")
    lib = library()
    check_release("megatron-core", lib.release, *TESTED, manner=manner, untested=untested)
    reports = Reports(on_violation) if manner == "report" else None
    values = CacheValues(compare_caches, waits=manner == "refuse")
    guarded = GuardedMegatron(lib, reports, None if log is None else Path(log), values)
    _active.append(guarded)
    return guarded


class GuardedMegatron:
    """
    Megatron-core's loops, checked against a contract; `guard` makes this object.

    Args:
        lib: Megatron-core.
        reports: Where violations are reported; with None, a violation raises.
        log: As for `guard`.
        values: Compares caches of FP8 weights with the weights; by default nothing is compared.

    Attributes:
        epochs: How many updates the guard has committed.
        values: The argument of this name.
    """

    def __init__(
        self,
        lib: Library,
        reports: Reports | None = None,
        log: Path | None = None,
        values: CacheValues | None = None,
    ) -> None:
        self._lib, self._log = lib, log
        self.values = values or CacheValues(0, waits=False)
        self._recurring: RecurringSteps | None = None
        self.epochs = 0
        self._rank = 0
        self._judge = Judge(reports, lambda: self._rank, self._abort, MEGATRON_ADVICE)
        self._logs: ContractLogs | None = None
        self._loops = 0
        self._off = self._evaluates = self._left = self._told = False
        self._shape: Any = None
        self._step: LoopStep | None = None
        self._live: LoopStep | None = None  # the step whose loop runs
        self._caches = Caches()
        #: The chunks that quantize their weights, of the loops since the last update.
        self._quantized: dict[int, weakref.ref[Any]] = {}
        self._weights: weakref.WeakKeyDictionary[Any, Weights] = weakref.WeakKeyDictionary()
        self._scaling_updates = 0
        self._norms: dict[Norm, int] = {}
        self._gradients = Gradients()
        self._patches = Patches()
        self._patch()
        self._updates = Updates(
            lib, self._patches, self._compare_caches, self._check_update, self._commit_update
        )
        self._saves = Saves(lib, self._patches, self._check_save)

    # What the user calls

    @property
    def contract(self) -> Contract | None:
        """
        The contract, after every call of the current step so far; None before the first loop.

        A thread that does not run the training may get the contract as it was before the step.

        After a violation, and if the step's sizes change, a new contract replaces this contract.
        """
        return None if self._recurring is None else self._recurring.contract

    @property
    def at(self) -> str:
        """The action that was checked last, such as ``B of stage 2, microbatch 0``."""
        return self._judge.at

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The first violation of each clause, in manner ``report``."""
        return self._judge.violations

    def on_trust(self) -> tuple[str, ...]:
        """Return sentences that say what the guard does not check in the loops that it has seen."""
        names = ["data", "messages", "reductions", "counters", "reruns", "function"]
        if self._step is not None and not self._step.plan.messages and self._step.plan.ranks > 1:
            names.append("unmatched")
        if self._updates.replays:
            names.append("replays")
        if self._updates.unseen:
            names.append("updates")
        return tuple(MEGATRON[name].said() for name in names)

    def remove(self) -> None:
        """
        Remove the guard, and restore every replaced name of Megatron-core.

        If other code has replaced a guarded name, the name stays as it is, but no longer guards.
        """
        if not self._off:
            self._judge("remove", self.values.finish)
        self._off, self._live = True, None
        if self._logs is not None:
            self._logs.close()
        self._updates.remove()
        self._patches.restore()
        if self in _active:
            _active.remove(self)

    def _patch(self) -> None:
        schedules, put = self._lib.schedules, self._patches.put
        for name in LOOPS:
            put(schedules, name, self._loop(name, getattr(schedules, name)))
        put(schedules, "forward_step", self._forward(schedules.forward_step))
        put(schedules, "backward_step", self._backward(schedules.backward_step))
        communicator = self._lib.p2p.P2PCommunicator
        put(communicator, "_communicate", self._exchange(communicator._communicate))
        groups = self._lib.buffers._ParamAndGradBucketGroup
        put(groups, "start_grad_sync", self._starting(groups.start_grad_sync))
        put(groups, "finish_grad_sync", self._finishing(groups.finish_grad_sync))
        self._patch_graphs()

    def _patch_graphs(self) -> None:
        """Note the flag that skips quantization, and replays; see `megatron_caches`."""
        graphs, caches, put = self._lib.graphs, self._caches, self._patches.put
        if (write := getattr(graphs, "_set_skip_fp8_weight_update_tensor", None)) is not None:

            @wraps(write)
            def written(skip: bool) -> Any:
                caches.skips = bool(skip)
                return write(skip)

            put(graphs, "_set_skip_fp8_weight_update_tensor", written)
        scaling = self._lib.scaling
        if (own := getattr(scaling, "set_skip_fp8_weight_update_tensor", None)) is not None:

            @wraps(own)
            def set_(cls: Any, skip: bool) -> Any:
                caches.skips = bool(skip)
                return own(skip)

            put(scaling, "set_skip_fp8_weight_update_tensor", classmethod(set_))
        replay = graphs._CudagraphReplayNode.forward

        @wraps(replay)
        def replayed(ctx: Any, runner: Any, *args: Any) -> Any:
            found = replay(ctx, runner, *args)
            caches.replayed(runner)
            return found

        put(graphs._CudagraphReplayNode, "forward", staticmethod(replayed))
        if (update := getattr(scaling, "reduce_and_update_fp8_tensors", None)) is not None:

            @wraps(update)
            def updated(cls: Any, *args: Any, **kwargs: Any) -> Any:
                self._scaling_updates += 1
                return update(*args, **kwargs)

            put(scaling, "reduce_and_update_fp8_tensors", classmethod(updated))

    # A loop

    def _loop(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def guarded_loop(*args: Any, **kwargs: Any) -> Any:
            if self._off or self._live is not None:
                return run(*args, **kwargs)
            if kwargs.get("forward_only"):
                with self._evaluating():
                    return run(*args, **kwargs)
            if not self._begins(name, kwargs):
                with self._evaluating():
                    return run(*args, **kwargs)
            step = self._step
            assert step is not None
            self._live = step
            try:
                found = run(*args, **kwargs)
                self._judge("the end of the loop", step.finish)
            except BaseException:
                self._abort()
                raise
            finally:
                self._live = None
            self._left = not step.whole
            return found

        return guarded_loop

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Judge nothing within a loop that does not train, or that the guard cannot see."""
        self._evaluates = True
        try:
            yield
        finally:
            self._evaluates = False

    def _begins(self, name: str, given: dict[str, Any]) -> bool:
        """Begin a step; return whether the guard can judge its loop."""
        self._step, before = None, self._step
        try:
            chunks = chunks_of(given)
            config = self._lib.schedules.get_model_config(chunks[0])
            if (reason := unguarded(self._lib, given, config)) is not None:
                raise UnguardedScheduleError(
                    f"the guard of Megatron-core cannot see {reason}; remove the guard, or use "
                    "manner='report', which then checks nothing in this loop"
                )
            plan = plan_of(self._lib, name, given, config)
            self._begin(plan, chunks, config, before)
        except Refused:
            raise
        except Exception as error:
            if self._judge.reports is None:
                raise
            if not self._told:
                LOGGER.warning("%s", error)
                self._told = True
            return False
        return True

    def _begin(
        self, plan: LoopPlan, chunks: list[Any], config: Any, before: LoopStep | None
    ) -> None:
        self._rank, self._judge.step = plan.rank, self._loops
        self._loops += 1
        quantizing = self._caches.quantizing(chunks, config)
        quantizes = [*map(bool, quantizing)]
        if self.values.every:
            self._add_quantized(chunks, quantizes)
        buckets, gathers = zip(*map(reduced_and_gathered, chunks), strict=True)
        numbers = [*map(len, buckets)]
        shape = plan, quantizes, numbers
        fresh = self._recurring is None or shape != self._shape or self._left
        if not self._judge.judges or fresh or not self._follows(before):
            if shape != self._shape:
                self._norms.clear()
            self._shape = shape
            self._recurring = RecurringSteps(self._contract(plan, any(quantizes), numbers))
        assert self._recurring is not None
        self._left = self._judge.judges = True
        buffers = [*map(gradient_buffers, chunks)]
        self._step = LoopStep(
            plan,
            self._recurring,
            self._judge,
            chunks,
            self._caches,
            [self._weights_of(chunk) for chunk in chunks],
            quantizing,
            buckets,
            [own or () for own in buffers],
            gathers,
            # Some microbatches are recomputed, and others are not.
            scales=getattr(config, _PARTIAL, None) is None,
            norms=self._norms,
            # An update before the first loop may be of another model.
            wrote=before is not None and self._updates.wrote,
        )
        self._updates.begin(chunks)
        self._judge("the beginning of the loop", self._check_beginning, plan, chunks, buffers)

    def _add_quantized(self, chunks: list[Any], quantizes: list[bool]) -> None:
        """Add the chunks of a loop that quantize their weights to those that will be compared."""
        if not self._updates.ran:
            self._quantized = {}
        own = zip(chunks, quantizes, strict=True)
        self._quantized |= {id(chunk): weakref.ref(chunk) for chunk, quantized in own if quantized}

    def _check_beginning(
        self, plan: LoopPlan, chunks: list[Any], buffers: list[list[Any] | None]
    ) -> None:
        if plan.wrong is not None:
            found = f"{plan.source}: {plan.wrong}"
            raise refused(plan.wrong.clause, "post_receive", found, plan.wrong.expected)
        self._gradients.check(chunks, buffers)

    def _follows(self, step: LoopStep | None) -> bool:
        """Whether the contract may continue: the last loop was updated, or commits as it is."""
        if step is None or step.updates:
            return step is not None
        try:
            step.commit_epoch()
        except Refused:  # a rerun, or gradients that nobody reduced
            return False
        self._updates.unseen = True
        self.epochs += 1
        return True

    def _weights_of(self, chunk: Any) -> Weights:
        found = self._weights.get(chunk)
        if found is None:
            found = self._weights[chunk] = Weights(chunk, is_plain)
        return found

    def _contract(self, plan: LoopPlan, quantizes: bool, buckets: list[int]) -> Contract:
        configs = []
        for stage, number in zip(plan.stages, buckets, strict=True):
            behind = plan.messages and stage < plan.num_stages - 1
            before = plan.messages and stage > 0
            configs.append(
                StageConfig(
                    stage,
                    microbatches=plan.microbatches,
                    slots=plan.microbatches,
                    sends_output=behind,
                    sends_gradient=before,
                    receives_input=before,
                    receives_gradient=behind,
                    reduces=number > 0,
                    buckets=[Bucket(f"{stage}/{n}") for n in range(number)],
                )
            )
        omit = UNUSED if quantizes else (*UNUSED, "version")
        contract = Contract(configs, omit=omit, declared=plan.declared, epoch=self.epochs)
        if self._logs is None:
            self._logs = ContractLogs(_folder(self._lib, self._log))
        self._logs.begin(contract, plan.rank)
        return contract

    def _abort(self) -> None:
        """Abort the actions that are under way."""
        if self._recurring is not None:
            self._judge.abort(self._recurring)

    # Forward, backward, messages

    def _forward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def guarded_forward_step(*args: Any, **kwargs: Any) -> Any:
            step = self._live
            if step is None:
                self._missed(kwargs)
                return run(*args, **kwargs)
            stage = step.plan.stages[kwargs.get("vp_stage") or 0]
            event: Event = "F", stage, kwargs["current_microbatch"]
            at = action_name(*event)
            given = args[4] if len(args) > 4 else kwargs["input_tensor"]
            checked, judge = False, self._judge
            if judge.judges:
                judge.at = at
                try:
                    step.forward(event, given)
                    checked = True
                except Exception as error:
                    judge.failed(error)
            function = args[0] if args else kwargs["forward_step_func"]

            def entered(*inner: Any, **options: Any) -> Any:
                step.runs += 1
                if step.first:
                    step.entered_first(stage)
                return function(*inner, **options)

            before = self._scaling_updates
            if args:
                args = (entered, *args[1:])
            else:
                kwargs["forward_step_func"] = entered
            found = run(*args, **kwargs)
            output, updates = found[0], self._scaling_updates - before
            if checked and judge.judges:
                judge.at = at
                try:
                    step.commit_forward(event, output, updates)
                except Exception as error:
                    judge.failed(error)
            return found

        return guarded_forward_step

    def _missed(self, kwargs: dict[str, Any]) -> None:
        """Say once that a training loop runs without the guard."""
        if self._off or self._evaluates or self._told:
            return
        self._told = True
        LOGGER.warning(
            "forward_step runs outside of a guarded loop, and is not checked: call guard() before "
            "get_forward_backward_func()"
        )

    def _backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def guarded_backward_step(*args: Any, **kwargs: Any) -> Any:
            step = self._live
            if step is None:
                return run(*args, **kwargs)
            tensors = args[:3]
            if len(tensors) < 3:
                tensors += tuple(kwargs[name] for name in _BACKWARD[len(tensors) :])
            event, judge = None, self._judge
            if judge.judges:
                judge.at = "a backward"
                try:
                    event = step.backward(*tensors)
                except Exception as error:
                    judge.failed(error)
            before, at = self._scaling_updates, judge.at
            try:
                found = run(*args, **kwargs)
            except BaseException:
                step.leave_backward()
                raise
            if event is not None and judge.judges:
                judge.at = at  # a reduction within the backward was judged since
                try:
                    step.commit_backward(event, found, self._scaling_updates - before)
                except Exception as error:
                    judge.failed(error)
            return found

        return guarded_backward_step

    def _exchange(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def guarded_exchange(communicator: Any, *args: Any, **kwargs: Any) -> Any:
            step = self._live
            if step is None:
                return run(communicator, *args, **kwargs)
            get = kwargs.get
            output, gradient = get("tensor_send_next"), get("tensor_send_prev")
            before, behind = get("recv_prev"), get("recv_next")
            at = _exchange_of(output is not None, gradient is not None, before, behind)
            judge = self._judge
            if judge.judges:
                judge.at = at
                try:
                    step.post(output, gradient, before, behind)
                except Exception as error:
                    judge.failed(error)
            found = run(communicator, *args, **kwargs)
            if judge.judges:
                judge.at = at
                try:
                    step.posted(found, get("wait_on_reqs", True))
                except Exception as error:
                    judge.failed(error)
            return found

        return guarded_exchange

    # Reductions, the update, checkpoints

    def _starting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def guarded_start(group: Any, *args: Any, **kwargs: Any) -> Any:
            step = self._step
            if self._off or step is None:
                return run(group, *args, **kwargs)
            if step.inside is None and id(group) not in step.buckets:
                return run(group, *args, **kwargs)  # not reduced, and no backward runs
            if _repeats(group):
                return run(group, *args, **kwargs)
            self._judge("start_grad_sync", step.start_reduction, group)
            found = run(group, *args, **kwargs)
            if not group.ddp_config.overlap_grad_reduce:  # it has waited
                self._judge("start_grad_sync", step.finish_reduction, group)
            return found

        return guarded_start

    def _finishing(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def guarded_finish(group: Any, *args: Any, **kwargs: Any) -> Any:
            found = run(group, *args, **kwargs)
            step = self._step
            if not self._off and step is not None and id(group) in step.buckets:
                self._judge("finish_grad_sync", step.finish_reduction, group)
            return found

        return guarded_finish

    def _compare_caches(self) -> None:
        """Compare the caches of FP8 weights before any update, also after a replayed step."""
        values, judge = self.values, self._judge
        if self._off or not values.every:
            return
        values.updates += 1
        chunks = [chunk for ref in self._quantized.values() if (chunk := ref()) is not None]
        # A replayed step begins no step of the judge, which after a violation judges nothing.
        before, judge.judges = judge.judges, judge.judges or self._updates.replayed
        try:
            used = (own for chunk in chunks for own in self._caches.used(chunk))
            judge("optimizer.step", values.update, used)
        finally:
            judge.judges = before and judge.judges

    def _check_update(self) -> bool | None:
        """Check an update; return None if it is not judged."""
        step = self._step
        if step is None or self._off:
            return None
        if self._saves.open:
            at = "optimizer.step"
            self._judge(at, self._saves.check_update)
        return self._judge("optimizer.step", step.check_update)

    def _commit_update(self, checked: bool | None, *, failed: bool) -> None:
        step = self._step
        if checked is None or step is None:
            return
        if failed:
            self._abort()
            self._left = True
            return
        self._judge("optimizer.step", step.commit_update)
        self.epochs += 1
        self._gradients.left(self._updates.chunks())

    def _check_save(self) -> None:
        """Check that nothing is open while a checkpoint is saved."""
        contract, step = self.contract, self._step
        if self._off or contract is None or step is None or (self._left and self._live is None):
            return
        if self._live is None and not step.updates and not self._updates.ever:
            return  # no update was ever seen, so a missing one shows nothing
        self._judge("dist_checkpointing.save", contract.check_checkpoint)


@cache
def _exchange_of(*posted: bool | None) -> str:
    """Return the name of an exchange, which lists the messages that the exchange posts."""
    names = ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next")
    return f"exchange({', '.join(name for name, each in zip(names, posted, strict=True) if each)})"


def _repeats(group: Any) -> bool:
    """Whether Megatron ignores this start, because the first batch's reduction already runs."""
    return getattr(group, "is_first_batch", False) and group.grad_reduce_handle is not None


def _folder(lib: Library, log: Path | None) -> Path | None:
    """Return the folder of this process's logs; each parallel copy of the pipeline has its own."""
    if log is None:
        return None
    state, names = lib.state, []
    if state.get_data_parallel_world_size() > 1:
        names.append(f"replica{state.get_data_parallel_rank()}")
    if state.get_tensor_model_parallel_world_size() > 1:
        names.append(f"slice{state.get_tensor_model_parallel_rank()}")
    return log.joinpath("-".join(names)) if names else log
