"""
The parts of the stand-in: exchanges, buckets of gradients, optimizers, graphs and checkpoints.

Every message arrives, with random values. A reduction halves the gradients, as a mean over two
replicas does if the second replica's gradients are zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn


class Group:
    """A process group, of which this process is one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class P2PCommunicator:
    """Exchanges messages with the neighbouring ranks, which always answer."""

    def __init__(self, pp_group: Group, config: Any) -> None:
        self.pp_group, self.config = pp_group, config

    def _communicate(self, *, recv_prev: bool, recv_next: bool, **given: Any) -> Any:
        for name in ("tensor_send_next", "tensor_send_prev"):
            assert given[name] is None or tuple(given[name].shape) == self.config.shape
        made = [
            next(self.config.arrives)[0].requires_grad_() if wanted else None
            for wanted in (recv_prev, recv_next)
        ]
        return *made, None


class _ParamAndGradBucketGroup:
    """A bucket of one parameter, reduced over two replicas."""

    def __init__(self, parameter: Any, config: Any) -> None:
        self.params, self.ddp_config = {parameter}, config
        self.data_parallel_group = Group(0, config.replicas)
        self.intra_distributed_optimizer_instance_group = self.data_parallel_group
        self.per_param_grad_ready_counts: dict[Any, int] = {}
        self.golden: dict[Any, int] = {}
        self.is_last_microbatch = self.is_first_batch = True
        self.grad_reduce_handle: Any = None
        self.param_gather_dispatched, self.param_gather_handle = False, None

    def reset(self) -> None:
        if self.is_first_batch and self.per_param_grad_ready_counts:
            self.golden, self.is_first_batch = self.per_param_grad_ready_counts, False
        self.per_param_grad_ready_counts, self.is_last_microbatch = {}, True

    def start_grad_sync(self, force_all_reduce: bool = False) -> None:
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        assert self.grad_reduce_handle is None
        halve = [partial(parameter.main_grad.mul_, 0.5) for parameter in self.params]
        if self.ddp_config.overlap_grad_reduce:
            self.grad_reduce_handle = halve
            if self.ddp_config.eager:  # the reduction has read what was there
                for each in halve:
                    each()
                self.grad_reduce_handle = []
        else:
            for each in halve:
                each()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        if not self.ddp_config.overlap_grad_reduce or self.is_first_batch:
            self.start_grad_sync(force_all_reduce)
        if self.ddp_config.overlap_grad_reduce:
            for each in self.grad_reduce_handle:
                each()
            self.grad_reduce_handle = None
        self.param_gather_dispatched = False

    def register_grad_ready(self, parameter: Any) -> None:
        if self.is_last_microbatch:
            counts = self.per_param_grad_ready_counts
            counts[parameter] = counts.get(parameter, 0) + 1
            if not self.is_first_batch and counts == self.golden:
                self.start_grad_sync()


class Buffer:
    """The gradients of a chunk, in one tensor."""

    def __init__(self, parameters: list[Any]) -> None:
        self.grad_data = torch.zeros(sum(p.numel() for p in parameters))
        start = 0
        for p in parameters:
            p.main_grad = self.grad_data[start : start + p.numel()].view(p.shape)
            start += p.numel()


class DistributedDataParallel(nn.Module):
    """A chunk with buckets of gradients."""

    buffers: Any  # a list, as in Megatron-core, in place of the method of torch's modules

    def __init__(self, config: Any, settings: Any, module: nn.Module) -> None:
        super().__init__()
        self.module, self.config = module, config
        self.use_forward_hook = settings.overlap_param_gather
        self.gathers = self.use_forward_hook
        parameters = list(module.parameters())
        self.buffers, self.expert_parallel_buffers = [Buffer(parameters)], []
        self.bucket_groups = [_ParamAndGradBucketGroup(p, settings) for p in parameters]
        self.expert_parallel_bucket_groups: list[Any] = []
        for parameter, group in zip(parameters, self.bucket_groups, strict=True):
            hook = partial(self._accumulated, group)
            parameter.register_post_accumulate_grad_hook(hook)

    def _accumulated(self, group: Any, parameter: Any) -> None:
        if not getattr(parameter, "grad_added_to_main_grad", False):
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        if group.ddp_config.overlap_grad_reduce:
            group.register_grad_ready(parameter)

    def forward(self, x: Any) -> Any:
        for group in self.bucket_groups:
            group.param_gather_dispatched |= self.gathers
        return self.module(x)

    def set_is_first_microbatch(self) -> None:
        self.module.set_is_first_microbatch()  # type: ignore[operator]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        for group in self.bucket_groups:
            group.is_last_microbatch = False
        try:
            yield
        finally:
            for group in self.bucket_groups:
                group.is_last_microbatch = True

    def start_grad_sync(self) -> None:
        for group in self.bucket_groups:
            group.start_grad_sync()

    def finish_grad_sync(self) -> None:
        for group in self.bucket_groups:
            group.finish_grad_sync()

    def zero_grad_buffer(self) -> None:
        for buffer in self.buffers:
            buffer.grad_data.zero_()
        for group in self.bucket_groups:
            group.reset()


def finalize_model_grads(chunks: list[Any]) -> None:
    for chunk in chunks:
        chunk.finish_grad_sync()


class MegatronOptimizer(ABC):
    """The base of the optimizers."""

    @abstractmethod
    def step(self) -> Any:
        """Update the weights."""


class FP32Optimizer(MegatronOptimizer):
    """An optimizer around torch's."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> Any:
        for parameter in self.parameters:
            parameter.grad = parameter.main_grad
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        return True, None, None


class ChainedOptimizer(MegatronOptimizer):
    """Several optimizers, one after another."""

    def __init__(self, chained: list[Any]) -> None:
        self.chained_optimizers = chained

    def zero_grad(self) -> None:
        for each in self.chained_optimizers:
            each.zero_grad()

    def step(self) -> Any:
        for each in self.chained_optimizers:
            each.step()
        return True, None, None


class _CudagraphReplayNode:
    """Replays a layer's graph."""

    @staticmethod
    def forward(ctx: Any, runner: Any, is_first_microbatch: bool, *inputs: Any) -> Any:
        runner.replay(is_first_microbatch)
        return inputs


class AsyncRequest(NamedTuple):
    """An asynchronous save that was asked for."""

    folder: str
    finalize_fns: list[Any]

    def execute_sync(self) -> None:
        """Save at once."""


class AsyncCallsQueue:
    """Asynchronous saves that are under way."""

    def schedule_async_request(self, request: AsyncRequest) -> int:
        return 1


class FullCudaGraphWrapper:
    """A loop that is replayed as one graph, from the second call on."""

    def __init__(self, loop: Any) -> None:
        self.loop, self.calls = loop, 0

    def __call__(self, **kwargs: Any) -> Any:
        self.calls += 1
        return self.loop(**kwargs) if self.calls == 1 else []
