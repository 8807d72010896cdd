"""
A stand-in for CUDA graphs and the device's stream on a CPU, for the tests of a step that is one
launch.

A capture records each operation of torch's dispatcher, each message and each collective, and leaves
the memory as it was, as a capture does. A replay runs the recorded operations again, on the same
memory, in a thread that runs one operation after another, as a stream does. A message that cannot
arrive is skipped, as a device skips a kernel whose communicator was aborted.

A real device holds its own communicators. Here the device's thread takes the communicators from the
host, so the host ends no communicator while a message is being posted. Otherwise torch would not
find the group any more, or would use the group of all ranks instead.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from qeffect.gpu_runtime.backends.protocol import Reports
from qeffect.gpu_runtime.backends.reference import ReferenceDomain
from qeffect.gpu_runtime.backends.reference.stage import ReferenceStage
from qeffect.gpu_runtime.ranks.channels import Channels, LostError
from qeffect.gpu_runtime.ranks.consent import Consent
from qeffect.gpu_runtime.ranks.gate import UpdateGate
from qeffect.gpu_runtime.ranks.launch_stamps import LaunchStamps
from qeffect.gpu_runtime.ranks.replicas import Replicas, _BucketCollectives
from qeffect.gpu_runtime.ranks.staged_feed import StagedFeed
from qeffect.gpu_runtime.runtime import step_mode
from qeffect.gpu_runtime.step import captures, graphs
from qeffect.gpu_runtime.step.eager import EagerExecutor
from qeffect.gpu_runtime.step.optimizer import Optimizer
from qeffect.gpu_runtime.step.streams import HostHandoff
from qeffect.gpu_runtime.training import saturation, step_runner


class _Stream:
    """
    A stream as one thread, which runs queued work in order.

    The thread starts with the first work, because a rank is a fork, and threads do not survive a
    fork.
    """

    def __init__(self) -> None:
        self._given: queue.Queue[Callable[[], None]] = queue.Queue()
        self.problem: BaseException | None = None
        self._thread: threading.Thread | None = None

    def _run(self) -> None:
        while True:
            act = self._given.get()
            try:
                with torch.no_grad():
                    act()
            except BaseException as error:
                self.problem = error
            self._given.task_done()

    @property
    def runs(self) -> bool:
        """Whether this thread is the stream's."""
        return threading.current_thread() is self._thread

    def submit(self, act: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._given.put(act)

    @property
    def idle(self) -> bool:
        """Whether all queued work is done."""
        return not self._given.unfinished_tasks

    def synchronize(self, *_: Any) -> None:
        self._given.join()
        if self.problem is not None:
            raise self.problem


STREAM = _Stream()


class _Event:
    def __init__(self) -> None:
        self._done = threading.Event()

    def record(self) -> None:
        self._done = done = threading.Event()  # what was recorded before is forgotten
        STREAM.submit(done.set)

    def query(self) -> bool:
        return self._done.is_set()


class _Tape(TorchDispatchMode):
    """
    A recording of all operations that run while it is active, with a copy of the memory before.
    """

    current: _Tape | None = None

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[tuple[Any, ...]] = []
        self.before: dict[int, tuple[Any, Any]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map(lambda value: value, (args, kwargs or {}))
        self.keep(given)
        out = func(*args, **(kwargs or {}))
        self._made.update(_place(t) for t in tree_leaves(out) if isinstance(t, Tensor))
        self.nodes.append(("op", func, *given, out))
        return out

    def keep(self, given: Any) -> None:
        """Copy the memory of tensors that are seen for the first time."""
        for tensor in tree_leaves(given):
            if isinstance(tensor, Tensor) and _place(tensor) not in self.before:
                if _place(tensor) not in self._made:
                    storage = tensor.untyped_storage()
                    self.before[_place(tensor)] = storage, storage.clone()

    def restore(self) -> None:
        for storage, copy in self.before.values():
            storage.copy_(copy)
        self.before.clear()


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Graph:
    """As `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.tape = _Tape()

    def capture_begin(self, **_: Any) -> None:
        _Tape.current = self.tape
        self.tape.__enter__()

    def capture_end(self) -> None:
        self.tape.__exit__(None, None, None)
        _Tape.current = None
        self.tape.restore()
        for node in self.tape.nodes:  # what holds a connection open
            if node[0] == "call" and hasattr(node[-1], "work"):
                node[-1].work = None

    def replay(self) -> None:
        nodes = self.tape.nodes
        STREAM.submit(lambda: _again(nodes))

    def reset(self) -> None:
        self.tape = _Tape()


def _again(nodes: list[tuple[Any, ...]]) -> None:
    made: dict[int, Any] = {}
    for kind, act, args, kwargs, out in nodes:
        if kind == "op":
            found = act(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(found), strict=True):
                if isinstance(old, Tensor) and _place(old) != _place(new) and new.numel():
                    old.copy_(new)
            continue
        try:
            found = act(*(made.get(id(a), a) for a in args), **kwargs)
        except LostError:
            found = _LOST
        if out is not None:
            made[id(out)] = found


_LOST = SimpleNamespace(wait=lambda: None)
#: Held while something is posted, and while connections end; nobody waits for a rank under it,
#: but the host for what is under way on a connection that it ends.
_POSTING = threading.RLock()


def _recorded(owner: type, name: str, *, posts: bool = True) -> None:
    """
    Record a method that communicates with other ranks as one node of the recording (`_Tape`); with
    `posts`, the method only posts messages.
    """
    real = getattr(owner, name)

    def act(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is _LOST or _LOST in args:
            return None
        with _POSTING if posts else nullcontext():
            return talk(self, *args, **kwargs)

    def talk(self: Any, *args: Any, **kwargs: Any) -> Any:
        alone = getattr(self, "world", 2) == 1
        if getattr(self, "group", self) is None and not alone:
            raise LostError(name, -1, False, "its connection is closed")
        try:
            return real(self, *args, **kwargs)
        except (AttributeError, RuntimeError) as error:  # what the host closed meanwhile
            raise LostError(name, -1, False, str(error)) from None

    def stands_in(self: Any, *args: Any, **kwargs: Any) -> Any:
        tape = _Tape.current
        if tape is None:
            return real(self, *args, **kwargs)
        tape.keep((args, kwargs))
        with _disable_current_modes():
            found = real(self, *args, **kwargs)
        tape.nodes.append(("call", act, (self, *args), kwargs, found))
        return found

    setattr(owner, name, stands_in)


def _ends_alone(owner: type, name: str) -> None:
    """Let a method that ends connections wait until no message is being posted."""
    real = getattr(owner, name)

    def ends(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _POSTING:
            return real(self, *args, **kwargs)

    setattr(owner, name, ends)


def actions_without_graphs() -> None:
    """
    Let a CPU make the executor of launches, whose recording (`_Tape`) holds the operations of its
    actions; a step that cannot be one launch then runs eagerly.
    """
    stands_in, domain = cast("Any", captures), cast("Any", ReferenceDomain)
    stands_in.GraphStream = HostHandoff
    domain.capture_obstacles = lambda _: ()
    cast("Any", graphs).capture = lambda *_, counters=None, **__: EagerExecutor(counters)


def _compare(
    values: Tensor, wanted: Tensor, factors: Tensor, terms: Tensor, number: Tensor, word: Tensor
) -> None:
    now = wanted * factors + terms
    word.copy_(torch.where((values != now).any(), 0, number + 1))
    wanted.copy_(now)


def _publish(values: Tensor, heard: Tensor, skip: Tensor, ring: Tensor, number: Tensor) -> None:
    no = heard != number + 1
    skip.copy_(no.any())
    row = torch.cat([number[None], values, torch.where(heard < 0, (1 - heard).long(), no.long())])
    ring.index_copy_(0, (number % len(ring))[None], row[None])
    number.add_(1)


def _stamp(ring: Tensor, number: Tensor, place: int) -> None:
    ring[int(number) % len(ring), place] = time.perf_counter_ns()


def gate_without_kernels() -> None:
    """The gate's kernels as operations of torch; the host's clock serves as the device's clock."""
    name = "qeffect.gpu_runtime.ranks.gate_kernel"
    kernels: Any = sys.modules.setdefault(name, ModuleType(name))
    kernels.compare, kernels.publish, kernels.stamp = _compare, _publish, _stamp


def _behind_launches() -> None:
    """The work that a training loop queues after a launch and before the next launch."""
    copy, training, optimizers = step_runner._copy, cast("Any", step_runner), cast("Any", Optimizer)

    def copied(held: Any, groups: Any) -> None:
        STREAM.submit(lambda: copy(held, groups))

    training._copy = copied
    compare = saturation._compare

    def compared(*given: Any) -> None:
        if STREAM.idle:
            compare(*given)  # behind a guarded step, whose results the host reads at once
        else:
            STREAM.submit(lambda: compare(*given))

    cast("Any", saturation)._compare = compared
    set_rate = Optimizer.set_rate

    def rated(self: Any, rate: float) -> None:
        if isinstance(self.adamw.param_groups[0]["lr"], Tensor):
            STREAM.submit(lambda: set_rate(self, rate))
        else:
            set_rate(self, rate)

    optimizers.set_rate = rated


def install() -> None:
    """Let this process capture and replay on its CPU from now on."""
    cuda: Any = torch.cuda
    cuda.CUDAGraph, cuda.Event, cuda.synchronize = _Graph, _Event, STREAM.synchronize
    cuda.graph_pool_handle = lambda: None
    cuda.empty_cache = lambda: None
    cast("Any", step_mode).device_obstacle = lambda _: None
    actions_without_graphs()
    load = StagedFeed.load

    def loaded(self: Any, step: int) -> None:
        STREAM.submit(lambda: load(self, step))

    cast("Any", StagedFeed).load = loaded
    warm = UpdateGate.warm

    def warmed(self: Any) -> None:
        def act() -> None:
            with suppress(LostError):  # passed over
                warm(self)

        STREAM.submit(act)

    cast("Any", UpdateGate).warm = warmed
    _behind_launches()
    reference: Any = ReferenceStage
    reference.reports = property(lambda _: Reports())
    gate_without_kernels()
    for owner, name in (
        (Channels, "send"),
        (Channels, "receive"),
        (Replicas, "__call__"),
        (Replicas, "largest"),
    ):
        _recorded(owner, name)
    _recorded(LaunchStamps, "mark", posts=False)
    for owner in (Channels, _BucketCollectives):
        _recorded(owner, "wait", posts=False)

    post = Channels._post

    def posted(self: Any, begin: Any, transfer: Any, channel: Any, number: int) -> None:
        post(self, begin, transfer, channel, number)
        if STREAM.runs:  # the host does not know what a graph posts
            channel.posted.pop()

    cast("Any", Channels)._post = posted

    def gathered(self: Any, into: Tensor, own: Tensor) -> None:
        into.fill_(0.0)
        if self.world == 1:
            into.copy_(own)
            return
        try:
            with _POSTING:
                group = self.group  # the host may let it go while its work is waited for
                if group is None:
                    raise LostError("commit", -1, False, "its connection is closed")
                work = dist.all_gather_into_tensor(into.view(-1), own, group=group, async_op=True)
            work.wait()
        except RuntimeError as error:
            into.fill_(0.0)
            raise LostError("commit", -1, False, str(error)) from None

    cast("Any", UpdateGate)._gather = gathered
    # An abort of gloo is its last reference.
    cast("Any", UpdateGate).let_go = UpdateGate.close
    _recorded(UpdateGate, "_gather", posts=False)
    for owner in (Consent, UpdateGate):
        _ends_alone(owner, "close")
