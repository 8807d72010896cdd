"""
Transformer Engine as its users run it today. Benchmark tables call these columns native.

This module is part of the backend, because only this package may import Transformer Engine.
`qeffect.gpu_runtime.backends.te.internals` lists the library's names that this module uses. The
module uses no slots, tapes or guards of the runtime, so the columns stay native.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

from ..layers import LayerConfig
from .domain import library, refuse_missing, reset_process
from .internals import BASELINE, missing_imports

Chunking = Literal["chunks", "layers", "model"]


def delayed_scaling(history: int) -> Any:
    """
    Return the recipe of every native column: delayed scaling in the HYBRID format, with amax
    histories of this length.
    """
    recipe = library().recipe
    return recipe.DelayedScaling(
        margin=0,
        fp8_format=recipe.Format.HYBRID,
        amax_history_len=history,
        amax_compute_algo="max",
        reduce_amax=False,
    )


def autocast(recipe: Any) -> AbstractContextManager[None]:
    """A context with FP8. Its exit rolls (shifts by one entry) the forward amax histories."""
    region: AbstractContextManager[None] = library().te.autocast(enabled=True, recipe=recipe)
    return region


def layer(config: LayerConfig, *, fused: bool, seed: int) -> torch.nn.Module:
    """
    Make one `TransformerLayer`. With `fused`, its weight gradients are added to `main_grad`.
    """
    torch.manual_seed(seed)
    made: torch.nn.Module = library().te.TransformerLayer(
        config.hidden,
        config.ffn,
        config.heads,
        layer_number=1,
        self_attn_mask_type="causal",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=config.dtype,
        fuse_qkv_params=config.fused_qkv,
        fuse_wgrad_accumulation=fused,
        device="cuda",
    )
    return made


def matrices(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters whose gradient the library can add to `main_grad`."""
    return [p for name, p in module.named_parameters() if name.endswith("weight") and p.dim() == 2]


class Chain(torch.nn.Module):
    """Consecutive layers as one callable, so that one graph contains all of them."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, hidden: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Run the layers one after another."""
        for one in self.layers:
            hidden = one(hidden, is_first_microbatch=is_first_microbatch)
        return hidden


def graphed(
    layers: Sequence[torch.nn.Module],
    sample: Tensor,
    microbatches: int,
    order: Sequence[int],
    chunking: Chunking,
    recipe: Any,
    *,
    reuse: bool = False,
) -> tuple[Any, ...]:
    """
    Make the library's own CUDA graphs, with weight caching.

    Args:
        layers: The layers, one per chunk.
        sample: A tensor with the shape of the activations between layers.
        microbatches: Number of microbatches per step.
        order: The library's argument `_order`, the order of forwards and backwards. For `layers`
            and `model`, forward and backward of one chunk alternate.
        chunking: How layers are grouped. `chunks`: one chunk per layer. `layers`: one chunk with
            one callable per layer. `model`: one chunk with one callable.
        recipe: The FP8 recipe.
        reuse: Whether the library may reuse buffers of inputs, outputs and their gradients for
            microbatches that do not overlap.

    Returns:
        The graphed forwards, sorted by chunk and microbatch for `chunks`, by microbatch and layer
        for `layers`, and by microbatch for `model`.

    Raises:
        BackendError: The library's function lacks a parameter.
    """
    lib = library()
    refuse_missing(lib.version, missing_imports(BASELINE))
    callables = (Chain(layers),) if chunking == "model" else tuple(layers)
    per_chunk = [len(layers)] if chunking == "layers" else [1] * (len(callables))
    samples = tuple(
        (torch.randn_like(sample).requires_grad_(),) for _ in range(len(callables) * microbatches)
    )
    make = lib.te.make_graphed_callables
    made: tuple[Any, ...] = make(
        callables,
        samples,
        num_warmup_iters=3,
        allow_unused_input=True,
        enabled=True,
        recipe=recipe,
        cache_quantized_params=True,
        _order=list(order),
        _num_layers_per_chunk=per_chunk,
        **({"_reuse_graph_input_output_buffers": True} if reuse else {}),
        **_without_clones(make),
    )
    return made


def _without_clones(make: Any) -> dict[str, bool]:
    """
    Return the library's option, if it exists, that lets graphs return gradients as before 2.19.

    From 2.19 on, a replay clones every parameter gradient that it returns. A native column reads a
    graph's gradients before the graph is replayed again, so it does not need clones. Without
    clones, the columns are comparable across versions, and the library is timed at its fastest.
    """
    option = "clone_param_grads_on_return"
    return {option: False} if option in inspect.signature(make).parameters else {}


def load_libraries(config: LayerConfig) -> None:
    """
    Load every kernel that a step with these dimensions uses. This has no other lasting effect.

    The first step of a process needs several seconds for handles, plans and lazily loaded kernels.
    Without this function, the time of the first column would include these seconds.
    """
    recipe = delayed_scaling(16)
    shape = (config.sequence, config.batch, config.hidden)
    for fused in (False, True):
        one = layer(config, fused=fused, seed=0)
        for parameter in matrices(one):
            if fused:
                parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-4, fused=True)
        for first in (True, False):
            x = torch.randn(shape, device="cuda", dtype=config.dtype, requires_grad=True)
            with autocast(recipe):
                y = one(x, is_first_microbatch=first)
            y.backward(torch.randn_like(y))
            del x, y
        for parameter in matrices(one):
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        del one, optimizer, parameter
        reset_process()
    counter = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    del graph, counter
    gc.collect()
    torch.cuda.empty_cache()
