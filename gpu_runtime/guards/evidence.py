"""
Evidence that a stage's computation ran, and on which weights.

A stage's methods can be replaced, so the call of a method proves nothing. The evidence comes from
autograd and from tensors. A backward passes through the graph of its forward, a module calls its
hooks, and every write to a tensor increases the tensor's version counter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cache, partial
from operator import attrgetter
from typing import Any

import attrs

from qeffect.refusals import Refused, refused
from qeffect.schedule.pairing import Work

__all__ = [
    "VERSION",
    "BackwardPasses",
    "ForwardCalls",
    "GradientWrites",
    "ReplicaHooks",
    "Weights",
    "Written",
    "another_work",
    "counters",
    "is_replicated",
    "is_sharded",
    "leaves",
    "not_once",
    "not_run",
    "work_name",
]


#: Gets a tensor's version counter. `map` calls this getter without a Python frame per tensor.
VERSION = attrgetter("_version")


def not_run(call: str, action: str) -> Refused:
    """
    Return the refusal of an action whose computation did not run.

    Args:
        call: The contract's method that would have committed the action.
        action: The action.
    """
    return refused(
        "epoch.device-count",
        call,
        f"{action}: its computation did not run",
        "one run of each action that is committed",
    )


def not_once(call: str, action: str, times: int) -> Refused:
    """Return the refusal of an action whose computation did not run, or ran too often."""
    if times == 0:
        return not_run(call, action)
    return refused(
        "epoch.device-count",
        call,
        f"{action}: its computation ran {times} times",
        "one run of each action that is committed",
    )


def work_name(work: Any) -> str:
    """Return the name of a work (a stage and a microbatch) for messages."""
    stage, microbatch = work
    return f"stage {stage}, microbatch {microbatch}"


def another_work(call: str, what: str, other: Any, work: Work) -> Refused:
    """
    Return the refusal of an action that uses a value of another microbatch.

    Args:
        call: The contract's method that refuses the action.
        what: The kind of the value, such as ``input``.
        other: The work (stage and microbatch) to which the value belongs.
        work: The work of the action.
    """
    found, expected = (f"the {what} of {work_name(each)}" for each in (other, work))
    return refused("ownership.wrong-key", call, found, expected)


def _nodes(value: Any) -> list[Any]:
    """Return the graph node behind each tensor, or gradient edge, of a nested output."""
    if (node := getattr(value, "grad_fn", None)) is not None:
        return [node]
    if hasattr(value, "node") and hasattr(value, "output_nr"):  # a named tuple of torch
        return [value.node]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [node for part in value for node in _nodes(part)]
    return []


def leaves(outputs: Any) -> set[Any]:
    """
    Return the autograd nodes in the graph of nested outputs that accumulate the gradients of leaf
    tensors.
    """
    found: set[Any] = set()
    seen = set(todo := _nodes(outputs))
    while todo:
        node = todo.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            found.add(node)
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                todo.append(behind)
    return found


class BackwardPasses:
    """
    Counts the backward passes through the outputs of each forward.

    Attributes:
        counts: By forward, a list with one number: how many backward passes went through its
            outputs. A forward whose outputs have no graph is left out.
        total: Number of passes through the outputs of all forwards.
        last: Name of the forward through whose outputs the last pass went.
    """

    def __init__(self) -> None:
        self.counts: dict[Hashable, list[int]] = {}
        self._nodes: dict[Hashable, int] = {}
        self.total = 0
        self.last: Hashable = None

    def watch(self, work: Hashable, outputs: Any) -> None:
        """
        Count backward passes through a forward's outputs from now on.

        Args:
            work: Name of the forward.
            outputs: The outputs of the forward: a tensor, or nested tuples, lists and mappings.
        """
        node = getattr(outputs, "grad_fn", None)
        nodes = _nodes(outputs) if node is None else [node]
        if not nodes:
            return
        passes = self.counts[work] = [0]
        self._nodes[work] = len(nodes)
        count = partial(self._passed, work, passes)
        for node in nodes:
            node.register_prehook(count)

    def _passed(self, work: Hashable, passes: list[int], gradients: Any) -> None:
        passes[0] += 1
        self.total += 1
        self.last = work

    def of(self, work: Hashable) -> int | None:
        """
        Return how many backward passes went through a forward's outputs; None if the outputs have
        no graph.
        """
        passes = self.counts.get(work)
        return None if passes is None else passes[0]

    def nodes(self, work: Hashable) -> int:
        """Return how many tensors in a forward's outputs have an autograd graph."""
        return self._nodes.get(work, 0)

    def clear(self) -> None:
        """Forget every forward."""
        self.counts.clear()
        self._nodes.clear()


class ForwardCalls:
    """
    Watches whether a module is called, until `seen` is called.

    Args:
        module: The module. None counts as a module that is never called.

    Attributes:
        output: The result of the last call; None before the first call.
    """

    def __init__(self, module: Any) -> None:
        self._calls = 0
        self.output: Any = None
        self._hook: Any = None
        if module is not None:
            self._hook = module.register_forward_hook(self._count)

    def _count(self, module: Any, given: Any, output: Any) -> None:
        self._calls += 1
        self.output = output

    def seen(self) -> bool:
        """Whether the module was called. Also stops watching."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        return self._calls > 0


class GradientWrites:
    """
    Watches whether a gradient of a module's parameters is written, in `.grad` or in `main_grad`.

    Args:
        module: The module. None counts as a module without parameters.
    """

    def __init__(self, module: Any) -> None:
        self._parameters = [p for p in _parameters(module) if p.requires_grad]
        self._before = self._now()

    def _now(self) -> list[tuple[Any, int]]:
        grads = [parameter.grad for parameter in self._parameters]
        grads += [getattr(parameter, "main_grad", None) for parameter in self._parameters]
        return [(grad, -1 if grad is None else grad._version) for grad in grads]

    def seen(self) -> bool:
        """Whether a gradient was written since the start; True if no parameter is trained."""
        if not self._parameters:
            return True
        return any(
            before[0] is not now[0] or before[1] != now[1]
            for before, now in zip(self._before, self._now(), strict=True)
        )


class ReplicaHooks:
    """
    Watches when torch's DistributedDataParallel reduces gradients. It also watches whether
    DistributedDataParallel is *armed*, that is, whether its next backward will reduce gradients.

    DistributedDataParallel reduces gradients in the next backward after a forward outside of
    `no_sync`, in the graph nodes that accumulate gradients. `torch.autograd.grad` does not pass
    these nodes. Therefore gradients are not reduced if a program computes them with this function
    and writes them itself.

    Args:
        module: The `DistributedDataParallel` module.

    Attributes:
        armed: Whether the next backward will reduce gradients: a forward has armed the reduction,
            and no backward has passed one of the nodes since.
    """

    def __init__(self, module: Any) -> None:
        self.armed = self._passed = False
        self._hooks = [module.register_forward_hook(self._forward)]
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(self._pass)
            for parameter in _parameters(module)
            if parameter.requires_grad
        ]

    def _forward(self, module: Any, given: Any, output: Any) -> None:
        requires = any(node is not None for node in _nodes(output))
        self.armed = self.armed or (module.require_backward_grad_sync and requires)

    def _pass(self, parameter: Any) -> None:
        self._passed = True

    def passed(self) -> bool:
        """Whether a backward has passed one of the nodes since the last call."""
        found, self._passed = self._passed, False
        return found

    def remove(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()


@attrs.frozen
class Written:
    """
    A weight that was written.

    Args:
        name: Name of the parameter in its module.
        found: The parameter's current version.
        expected: The parameter's version when the weights were first read.
    """

    name: str
    found: int
    expected: int


class Weights:
    """
    The version counters of a module's weights.

    The guard watches the trained parameters, with two exceptions. Some modules write a parameter in
    their own forward, such as `torch.nn.Embedding` with ``max_norm``. In a module that FSDP shards,
    FSDP replaces all parameters with gathered parameters.

    To save time, a guard may compare the versions of `counters` (read by `VERSION`) with `expected`
    directly, and call `check` only if the versions differ.

    Args:
        module: The module. None counts as a module without weights.
        watched: Function that says whether a parameter is watched. By default every trained
            parameter is watched.
        shards: For a module that FSDP shards: the sharded parameters that the optimizer updates,
            by name.

    Attributes:
        counters: The tensors whose version counters are watched.
        expected: The versions of `counters` when they were recorded.
    """

    def __init__(
        self,
        module: Any,
        watched: Callable[[Any], bool] | None = None,
        shards: Mapping[str, Any] | None = None,
    ) -> None:
        self._module, self._shards = module, shards or {}
        self.counters: list[Any] = []
        self.expected: list[int] = []
        own: list[Any] = []
        sharded = is_sharded(module)
        for part in () if sharded else module.modules():
            listed = own if vars(part).get("max_norm") is not None else self.counters
            listed += [p for p in part._parameters.values() if p is not None and p.requires_grad]
        if own:
            left_out = set(map(id, own))
            self.counters = [p for p in self.counters if id(p) not in left_out]
        if watched is not None:
            self.counters = list(filter(watched, self.counters))
        if sharded:
            self.counters = [each for shard in self._shards.values() for each in counters(shard)]
        self.renew()

    def renew(self) -> None:
        """Record the weights' current versions. Later checks compare with these versions."""
        self.expected = [*map(VERSION, self.counters)]

    def written(self) -> Written | None:
        """
        Return the first weight that was written since the versions were recorded; None if no weight
        was written.
        """
        first = next(self._changed(), None)
        return None if first is None else Written(self._name(first[0]), first[1], first[2])

    def rewritten(self) -> set[Any]:
        """Return the weights that were written since the versions were recorded."""
        return {counter for counter, _, _ in self._changed()}

    def _changed(self) -> Iterator[tuple[Any, int, int]]:
        """Yield each weight that was written, with its version now and its recorded version."""
        versions = zip(self.counters, map(VERSION, self.counters), self.expected, strict=True)
        return (three for three in versions if three[1] != three[2])

    def _name(self, counter: Any) -> str:
        named = [*self._shards.items(), *self._module.named_parameters()]
        return next((n for n, p in named if any(c is counter for c in counters(p))), "unnamed")

    def check(self, call: str, stage: int) -> None:
        """
        Check that no weight was written since the versions were recorded.

        Args:
            call: The contract's method that is named in a refusal.
            stage: Index of the stage that is about to act.

        Raises:
            Refused: ``version.wrong-epoch``.
        """
        if [*map(VERSION, self.counters)] == self.expected:
            return  # nearly always: each action comes here
        if (written := self.written()) is not None:
            raise refused(
                "version.wrong-epoch",
                call,
                f"weight {written.name} of stage {stage} at version {written.found}, written in "
                "mid-step",
                f"version {written.expected}, as at the stage's first forward of the step",
            )


def counters(parameter: Any) -> list[Any]:
    """Return the tensors whose version counters increase if a parameter or its shard is written."""
    local = getattr(parameter, "_local_tensor", None)
    return [parameter] if local is None else [parameter, local]


def is_sharded(module: Any) -> bool:
    """Whether FSDP shards a module or a part of it; also True if the module is None."""
    if module is None:
        return True
    return any(map(_shards, set(map(type, module.modules()))))


def is_replicated(module: Any) -> bool:
    """Whether DistributedDataParallel wraps a module, with more than one replica."""
    names = {base.__name__ for base in type(module).__mro__}
    return "DistributedDataParallel" in names and module.process_group.size() > 1


def _parameters(module: Any) -> list[Any]:
    parameters: Callable[[], Any] | None = getattr(module, "parameters", None)
    return [] if parameters is None else list(parameters())


@cache
def _shards(kind: type) -> bool:
    return any(base.__name__ == "FSDPModule" for base in kind.__mro__)
