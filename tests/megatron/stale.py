"""
Stand-in graphs that only read a flag, replayed by Megatron-core's own code.

Under ``cuda_graph_impl="local"`` Megatron-core's `CudaGraphManager` chooses a graph for a layer's
forward, and `_CudagraphReplayNode.forward` writes the flag that skips the quantization of weights.
Here both run unchanged. The graph is a stand-in: it reads the flag, and lets the layer quantize its
weights or not.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

__all__ = ["graph_layers"]


class _Manager:
    """The part of Transformer Engine's manager of FP8 state that Megatron-core's replays use."""

    skips: bool | None = None

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        cls.skips = skip

    @staticmethod
    def get_fp8_recipe() -> object:
        return object()


def graph_layers(run: Any) -> list[list[bool | None]]:
    """
    Run each layer as graphs from the second step on.

    Returns:
        For each step from the second step on, the flag's value that each replay read.
    """
    from megatron.core.transformer import cuda_graphs

    cuda_graphs.FP8GlobalStateManager = _Manager
    cuda_graphs.HAVE_TE_GRAPHS = True
    recipe = SimpleNamespace(DelayedScaling=type("DelayedScaling", (), {}))
    cuda_graphs.te = SimpleNamespace(common=SimpleNamespace(recipe=recipe))
    cuda_graphs._CudagraphGlobalRecord.cudagraph_created = True
    seen: list[list[bool | None]] = []
    for chunk in run.model:
        for layer in chunk.module.decoder.layers:
            layer.forward = _graphed(run, layer, layer.forward, cuda_graphs, seen)
    return seen


def _graphed(run: Any, layer: Any, forward: Any, graphs: Any, seen: list[Any]) -> Any:
    class Graph:
        def replay(self) -> None:
            if len(seen) < run.number:
                seen.append([])
            seen[-1].append(_Manager.skips)
            layer.linear.is_first_microbatch = not _Manager.skips

    def runner() -> SimpleNamespace:
        _Manager.skips = False  # as where a runner is made
        return SimpleNamespace(
            fwd_graph=Graph(),
            status=graphs._GraphStatus.FWD_READY,
            fwd_graph_input_surface=[],
            fwd_graph_output_surface=(),
            fp8_enabled=True,
            fp4_enabled=False,
            is_first_layer=True,
            fp8_param_cache_updated=None,
            use_stream=False,
            base_module=layer,
            grad_enabled=True,
            get_mismatch_errors=lambda *_: [],
            fwd_graph_recorded=True,
        )

    runners = [runner() for _ in range(run.microbatches)]
    manager = SimpleNamespace(
        cudagraph_runners=runners, need_backward=True, inference_cudagraphs_lookup_table={}
    )

    def graphed(x: Tensor) -> Tensor:
        if run.number > 0:
            first = bool(layer.linear.is_first_microbatch)
            chosen = graphs.CudaGraphManager.get_cudagraph_runner(
                manager, layer, (), {}, run.stages == 1
            )
            graphs._CudagraphReplayNode.apply(chosen, first)
        found: Tensor = forward(x)
        return found

    return graphed
