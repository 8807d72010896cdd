"""Watch Megatron-core's updates, gradients and their buffers, and checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from qeffect.refusals import refused
from qeffect.schedule.pairing import Work

from .evidence import VERSION, work_name
from .megatron_library import Library, Patches

__all__ = ["BufferWrites", "Gradients", "Saves", "Updates", "gradient_buffers"]


class Updates:
    """
    Watches Megatron-core's optimizers, and torch's own optimizers if they update a guarded model.

    Args:
        lib: Megatron-core.
        patches: Replaces attributes until the guard is removed.
        before: Called before the first update after a loop or a replayed step, also if the update
            is not judged.
        check: Called before an update; returns None if the update is not judged.
        commit: Called after the update, with what `check` returned, and with `failed`: whether the
            update raised an error.

    Attributes:
        ever: Whether an update was ever seen.
        unseen: Whether two steps followed each other without an update in between.
        replays: Whether a whole step was replayed as one graph.
        replayed: Whether the last step was replayed as one graph.
        ran: Whether a loop has run, or was replayed, since the last update.
        wrote: Whether an update since the last loop wrote weights; Megatron-core skips an update if
            a gradient overflows.
    """

    def __init__(
        self,
        lib: Library,
        patches: Patches,
        before: Callable[[], None],
        check: Callable[[], Any],
        commit: Callable[..., None],
    ) -> None:
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self._begins, self._check, self._commit = before, check, commit
        self.ever = self.unseen = self.replays = self.replayed = self.ran = self.wrote = False
        self._chunks: list[weakref.ref[Any]] = []
        self._parameters: set[int] = set()
        self._inside = 0
        self._trained = False  # whether a loop has run since the last update
        self._stepped: weakref.ref[Any] | None = None
        self._open: list[Any] = []
        for cls in list(lib.optimizers()):
            patches.put(cls, "step", self._stepping(vars(cls)["step"]))
        self._hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        if lib.iteration is not None:
            whole = lib.iteration.FullCudaGraphWrapper
            patches.put(whole, "__call__", self._replaying(whole.__call__))

    def remove(self) -> None:
        """Stop watching torch's optimizers."""
        while self._hooks:
            self._hooks.pop().remove()

    def begin(self, chunks: Sequence[Any]) -> None:
        """Record that a loop trains these chunks."""
        while self._open:  # torch calls no hook after a step that raised
            self._leave(*self._open.pop(), failed=True)
        self._inside = 0
        if [ref() for ref in self._chunks] != list(chunks):
            self._chunks = [weakref.ref(chunk) for chunk in chunks]
            self._parameters = {id(p) for chunk in chunks for p in chunk.parameters()}
        self._trained = self.ran = True
        self.replayed = self.wrote = False

    def chunks(self) -> list[Any]:
        """Return the chunks that the last loop trained."""
        return [chunk for ref in self._chunks if (chunk := ref()) is not None]

    def _enter(self, optimizer: Any) -> Any:
        """Check an update that follows a loop, or a second update by the last optimizer."""
        again = self._stepped is not None and self._stepped() is optimizer
        self._inside += 1
        if self.ran:
            self._begins()
        if not self._trained and not again:
            return None
        return self._check()

    def _leave(
        self, optimizer: Any, checked: Any, *, failed: bool = False, skipped: bool = False
    ) -> None:
        self._inside -= 1
        self._commit(checked, failed=failed)
        self.ran = False
        if not failed:
            self.wrote |= not skipped
            self.ever = True
            self._trained = False
            self._stepped = weakref.ref(optimizer)

    def _stepping(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def guarded_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return run(optimizer, *args, **kwargs)
            checked = self._entered(optimizer)
            try:
                found = run(optimizer, *args, **kwargs)
            except BaseException:
                self._leave(optimizer, checked, failed=True)
                raise
            skipped = isinstance(found, tuple) and found[:1] == (False,)
            self._leave(optimizer, checked, skipped=skipped)
            return found

        return guarded_step

    def _entered(self, optimizer: Any) -> Any:
        try:
            return self._enter(optimizer)
        except BaseException:  # refused
            self._inside -= 1
            raise

    def _before(self, optimizer: Any, *_: Any) -> None:
        """Torch calls this before the step of every optimizer."""
        if self._inside or not self._parameters:
            return
        own = (id(p) for group in optimizer.param_groups for p in group["params"])
        if self._parameters.isdisjoint(own):
            return
        self._open.append((optimizer, self._entered(optimizer)))

    def _after(self, optimizer: Any, *_: Any) -> None:
        if self._open and self._open[-1][0] is optimizer:
            self._leave(*self._open.pop())

    def _replaying(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def guarded_iteration(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            before, self._trained = self._trained, False
            found = run(wrapper, *args, **kwargs)
            if not self._trained and not kwargs.get("forward_only"):
                self.replays, self._stepped = True, None  # the next update is not a second one
                self.ran = self.replayed = True
            self._trained |= before
            return found

        return guarded_iteration


class Gradients:
    """Finds gradients of the last step that were not dropped, by their version counters."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[weakref.ref[Any], int]] = {}

    def left(self, chunks: Sequence[Any]) -> None:
        """Record the gradients of chunks after the update."""
        self._left = {
            id(tensor): (weakref.ref(tensor), tensor._version)
            for chunk in chunks
            for tensor in _gradients(chunk, gradient_buffers(chunk))
        }

    def check(self, chunks: Sequence[Any], buffers: Sequence[Sequence[Any] | None]) -> None:
        """
        Check that the gradients of the last step are gone.

        Args:
            chunks: The chunks.
            buffers: For each chunk, what `gradient_buffers` returned.

        Raises:
            Refused: ``arena.stale-accumulation``.
        """
        if not self._left:
            return
        for chunk, own in zip(chunks, buffers, strict=True):
            for tensor in _gradients(chunk, own):
                ref, version = self._left.get(id(tensor), (None, -1))
                if ref is not None and tensor._version == version and ref() is tensor:
                    raise refused(
                        "arena.stale-accumulation",
                        "check_wgrad",
                        f"{_name(tensor, chunk, own)} still holds the gradient of the last update",
                        "zero_grad_buffer() or zero_grad() before the step",
                    )


class BufferWrites:
    """
    Watches when the gradient buffers of a chunk are written in a step, by their version counters.

    The `main_grad` of all parameters are views of a few buffers, and a view shares the version
    counter of its buffer. Replayed graphs raise no counter, and neither do layers that accumulate
    into `main_grad` in a kernel of their own. A reduction that overlaps with the last backward may
    raise the counter at any time. After it starts, writes during this backward are not judged.

    Args:
        buffers: The buffers; a chunk without `DistributedDataParallel` has none.
    """

    def __init__(self, buffers: Sequence[Any]) -> None:
        self._buffers = buffers
        self._expected: list[int] | None = None
        self._before: list[int] = []
        self._reduced = False  # whether a reduction began during the backward that runs
        self._writes = False  # whether any backward of the step wrote
        self._silent: Work | None = None

    def before(self, work: Work) -> None:
        """
        Check before a backward that nothing was written since the chunk's last backward.

        Raises:
            Refused: ``arena.overwrite``.
        """
        self._before, self._reduced = [*map(VERSION, self._buffers)], False
        if self._expected is not None and self._before != self._expected:
            raise refused(
                "arena.overwrite",
                "check_wgrad",
                f"B of {work_name(work)}: the gradient buffer was written since the stage's last "
                "backward",
                "no other write to main_grad between two backwards of the stage",
            )

    def reducing(self) -> None:
        """Record that a reduction starts during the backward."""
        if not self._reduced:
            self._writes |= [*map(VERSION, self._buffers)] != self._before
            self._reduced = True

    def after(self, work: Work) -> None:
        """
        Check that a backward wrote gradients if the chunk's other backwards of the step did.

        Raises:
            Refused: ``epoch.device-count``.
        """
        self._expected = [*map(VERSION, self._buffers)]
        if not self._reduced:
            wrote = self._expected != self._before
            self._writes |= wrote
            self._silent = self._silent or (None if wrote else work)
        if self._writes and self._silent is not None:
            raise refused(
                "epoch.device-count",
                "commit_wgrad",
                f"B of {work_name(self._silent)} wrote no main_grad",
                "a write in each backward, as in the stage's other backwards of the step",
            )


def gradient_buffers(chunk: Any) -> list[Any] | None:
    """Return the gradient buffers of a chunk; None if its gradients are not in buffers."""
    module = chunk
    while module is not None:
        buffers = getattr(module, "buffers", None)
        if isinstance(buffers, list):  # otherwise a method of torch's modules
            return [each.grad_data for each in (*buffers, *module.expert_parallel_buffers)]
        module = getattr(module, "module", None)
    return None


def _gradients(chunk: Any, buffers: Sequence[Any] | None) -> Sequence[Any]:
    """Return the buffers of gradients of a chunk, or the gradients of its parameters."""
    if buffers is not None:
        return buffers
    return [parameter.grad for parameter in chunk.parameters() if parameter.grad is not None]


def _name(tensor: Any, chunk: Any, buffers: Sequence[Any] | None) -> str:
    """Return the name of one of a chunk's `_gradients`."""
    for n, buffer in enumerate(buffers or ()):
        if buffer is tensor:
            return f"gradient buffer {n}"
    return next(
        f"the gradient of {name}"
        for name, parameter in chunk.named_parameters()
        if parameter.grad is tensor
    )


class Saves:
    """
    Watches checkpoints, and asynchronous saves that have not yet copied the weights.

    Args:
        lib: Megatron-core.
        patches: Replaces attributes until the guard is removed.
        check: Called before a save.

    The request for a save is a tuple, which Megatron may copy. The guard recognizes a request by
    its list of finalizing functions, which every copy shares.

    Attributes:
        open: The asynchronous saves that were requested but not yet scheduled, by identity.
    """

    def __init__(self, lib: Library, patches: Patches, check: Callable[[], None]) -> None:
        self._check = check
        self.open: dict[int, Any] = {}
        request = getattr(lib.queue, "AsyncRequest", None)
        replaced: dict[int, Any] = {}
        for owner in lib.saves:
            run = owner.save
            guarded = replaced.setdefault(id(run), self._saving(run, request))
            patches.put(owner, "save", guarded)
        if request is not None:
            if (execute := vars(request).get("execute_sync")) is not None:
                patches.put(request, "execute_sync", self._executing(execute))
            queue = lib.queue.AsyncCallsQueue
            patches.put(
                queue, "schedule_async_request", self._scheduling(queue.schedule_async_request)
            )

    def check_update(self) -> None:
        """
        Refuse an update while an asynchronous save still reads the weights.

        Raises:
            Refused: ``completion.weights-in-use``.
        """
        raise refused(
            "completion.weights-in-use",
            "check_update",
            f"an update while {len(self.open)} asynchronous saves were not scheduled",
            "schedule_async_request, which copies the weights, before the update",
        )

    def _saving(self, run: Callable[..., Any], request: Any) -> Callable[..., Any]:
        @wraps(run)
        def guarded_save(*args: Any, **kwargs: Any) -> Any:
            self._check()
            found = run(*args, **kwargs)
            if request is not None and isinstance(found, request):
                kept = _kept_by(found)
                self.open[id(kept)] = kept
            return found

        return guarded_save

    def _scheduling(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def guarded_schedule(queue: Any, *args: Any, **kwargs: Any) -> Any:
            found = run(queue, *args, **kwargs)
            self._close(next(iter([*args, *kwargs.values()]), None))
            return found

        return guarded_schedule

    def _executing(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def guarded_execute(request: Any, *args: Any, **kwargs: Any) -> Any:
            found = run(request, *args, **kwargs)
            self._close(request)
            return found

        return guarded_execute

    def _close(self, request: Any) -> None:
        self.open.pop(id(_kept_by(request)), None)


def _kept_by(request: Any) -> Any:
    """Return what every copy of a request keeps."""
    return getattr(request, "finalize_fns", request)
