"""
A stand-in for Megatron-core: one rank of a pipeline, in one process and without Megatron-core.

`installed` puts modules with Megatron-core's names into `sys.modules`, so that the guard imports
these modules. `stand_in_loops` has the loops, and `stand_in_parts` has everything else.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.megatron import stand_in_loops, stand_in_parts
from tests.megatron.model import (
    ROWS,
    SEQUENCE,
    WIDTH,
    Layer,
    QuantizedLinear,
    Training,
    data,
    fuse,
)

__all__ = ["RELEASE", "StandIn", "installed"]

RELEASE = "0.19.2"
_LOOPS = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


class Chunk(nn.Module):
    """A virtual stage: one layer."""

    def __init__(self, index: int, config: Any, *, first: bool) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.config, self.first = config, first
        self.decoder: Any = nn.Module()
        self.decoder.layers = nn.ModuleList([Layer(bool(config.fp8))])
        self.given: Any = None

    def set_is_first_microbatch(self) -> None:
        for module in self.modules():
            if isinstance(module, QuantizedLinear) and self.config.fp8:
                module.is_first_microbatch = True

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first else self.given
        for layer in self.decoder.layers:
            x = layer(x)
        return x


def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Install the stand-in for a test; return its modules by the last part of their names."""
    made: dict[str, ModuleType] = {}

    def module(name: str, **attributes: Any) -> None:
        made[name.rpartition(".")[2]] = found = ModuleType(name)
        vars(found).update(attributes)
        monkeypatch.setitem(sys.modules, name, found)

    parts, core = vars(stand_in_parts), "megatron.core"

    def save(state: Any, folder: str, *, asynchronous: bool = False) -> Any:
        made["serialization"].saved.append(folder)  # type: ignore[attr-defined]
        return stand_in_parts.AsyncRequest(folder, []) if asynchronous else None

    module("megatron")
    module(core, __version__=RELEASE)
    module(
        f"{core}.parallel_state",
        get_data_parallel_world_size=lambda: 1,
        get_tensor_model_parallel_world_size=lambda: 1,
    )
    for name, *classes in (
        ("pipeline_parallel.p2p_communication", "P2PCommunicator"),
        ("distributed.param_and_grad_buffer", "_ParamAndGradBucketGroup"),
        ("optimizer.optimizer", "MegatronOptimizer"),
        ("transformer.cuda_graphs", "_CudagraphReplayNode"),
        ("dist_checkpointing.strategies.async_utils", "AsyncRequest", "AsyncCallsQueue"),
        ("full_cuda_graph", "FullCudaGraphWrapper"),
    ):
        module(f"{core}.{name}", **{each: parts[each] for each in classes})
    for name in ("dist_checkpointing.serialization", "dist_checkpointing"):
        module(f"{core}.{name}", save=save, saved=[])
    made["schedules"] = stand_in_loops
    monkeypatch.setitem(sys.modules, f"{core}.pipeline_parallel.schedules", stand_in_loops)
    return made


class StandIn(Training):
    """
    A run of the stand-in.

    Args:
        made: The modules of the stand-in.
        case: The set-up; see `tests.megatron.faults.CASES`.
        rank: The rank.
    """

    def __init__(self, made: dict[str, ModuleType], case: dict[str, Any], rank: int) -> None:
        self.schedules, self.buffers = made["schedules"], made["param_and_grad_buffer"]
        self.p2p, self.saves = made["p2p_communication"], made["dist_checkpointing"]
        self.case, self.rank, self.made = case, rank, made
        stages, chunks = case.get("stages", 2), case.get("chunks", 1)
        self.microbatches, self.kind = case.get("microbatches", 4), _LOOPS[0]
        if stages > 1:
            self.kind = _LOOPS[1 + (chunks > 1)]
        group = stand_in_parts.Group(rank % stages, stages)
        made["parallel_state"].get_pipeline_model_parallel_group = (  # type: ignore[attr-defined]
            lambda: group
        )
        self.config = SimpleNamespace(
            fp8="hybrid" if case.get("quantized") else None,
            batch_p2p_comm=case.get("chunks", 1) == 1,
            overlap_p2p_comm=case.get("chunks", 1) > 1,
            finalize_model_grads_func=stand_in_parts.finalize_model_grads,
            no_sync_func=None,
            group=group,
            shape=(SEQUENCE, ROWS, WIDTH),
            arrives=data(11 + rank),
        )
        settings = SimpleNamespace(
            overlap_grad_reduce=case.get("overlap", False),
            overlap_param_gather=case.get("gather", False),
            eager=True,
            replicas=2 // stages,
        )
        self.model = []
        for v in range(chunks):
            stage = v * stages + rank % stages
            chunk = Chunk(stage, self.config, first=stage == 0)
            self.model.append(stand_in_parts.DistributedDataParallel(self.config, settings, chunk))
        if case.get("overlap"):
            self.config.no_sync_func = self.model[0].no_sync
        self.optimizer = stand_in_parts.ChainedOptimizer(
            [stand_in_parts.FP32Optimizer(list(chunk.parameters())) for chunk in self.model]
        )
        if case.get("fused"):
            fuse(p for chunk in self.model for p in chunk.parameters())
        self.data = [data(7 + rank) for _ in self.model]
        self.whole: Any = None

    def replay_loops(self) -> None:
        """Let every loop after the next be a replay of one graph, which computes nothing; call this
        after the guard was put on."""
        wrapper = self.made["full_cuda_graph"].FullCudaGraphWrapper
        self.whole = wrapper(getattr(self.schedules, self.kind))

    def loop(self, *, forward_only: bool = False) -> list[dict[str, Tensor]]:
        several = len(self.model) > 1
        run = self.whole or getattr(self.schedules, self.kind)
        found: list[dict[str, Tensor]] = run(
            forward_step_func=self.forward_step,
            data_iterator=self.data if several else self.data[0],
            model=self.model if several else self.model[0],
            num_microbatches=self.microbatches,
            forward_only=forward_only,
        )
        return found

    def save(self, name: str) -> None:
        self.saves.save({}, name)

    def ask(self, name: str) -> Any:
        return self.saves.save({}, name, asynchronous=True)

    def schedule(self, request: Any) -> None:
        self.made["async_utils"].AsyncCallsQueue().schedule_async_request(request)
