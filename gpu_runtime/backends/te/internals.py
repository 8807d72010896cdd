"""
Every name of Transformer Engine that the runtime reaches, and a look for those that are missing.

Most are private: a later version may rename or drop one without a word. Each is looked for where it
first can be (at import, in a new layer, after its first F), so that such a version is refused with
the names that it lacks instead of failing somewhere in a step. The README's table of internals has
the same names. Nothing here imports the library; its modules are loaded by whoever looks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from attrs import frozen

__all__ = [
    "BASELINE",
    "IMPORTED",
    "LAYER",
    "STATE",
    "STORES",
    "Imported",
    "Member",
    "missing_imports",
    "missing_in_head",
    "missing_members",
    "missing_state",
]

STORES = (
    ("self_attention.layernorm_qkv", ("qkv",)),
    ("self_attention.proj", ("proj",)),
    # LayerNormMLP queues FC2 before FC1 in its one store.
    ("layernorm_mlp", ("fc2", "fc1")),
)
"""Submodules of a layer that defer weight gradients, and the products that one dI queues there."""


@frozen
class Imported:
    """
    A name that is looked for when the library is imported.

    Args:
        module: The module that holds it.
        path: The name there, with dots for attributes.
        parameters: Parameters that it is called with.
    """

    module: str
    path: str
    parameters: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name in full."""
        return f"{self.module}.{self.path}"


@frozen
class Member:
    """
    A name that is looked for in the modules of a layer.

    Args:
        name: The attribute.
        paths: The submodules of a layer that have it.
    """

    name: str
    paths: tuple[str, ...]


_PYTORCH = "transformer_engine.pytorch"
_RECIPE = "transformer_engine.common.recipe"
_COMMON = f"{_PYTORCH}.module._common"
_QUANTIZATION = f"{_PYTORCH}.quantization"
_MANAGER = "FP8GlobalStateManager"
_LINEAR = tuple(path for path, _ in STORES[:2])
_ALL = tuple(path for path, _ in STORES)

IMPORTED = (
    Imported(
        _PYTORCH,
        "TransformerLayer",
        (
            "layer_number",
            "self_attn_mask_type",
            "hidden_dropout",
            "attention_dropout",
            "params_dtype",
            "fuse_qkv_params",
            "fuse_wgrad_accumulation",
            "device",
        ),
    ),
    Imported(
        _PYTORCH,
        "LayerNormLinear",
        ("bias", "params_dtype", "fuse_wgrad_accumulation", "device"),
    ),
    Imported(_PYTORCH, "autocast", ("enabled", "recipe")),
    Imported(
        _RECIPE,
        "DelayedScaling",
        ("margin", "fp8_format", "amax_history_len", "amax_compute_algo", "reduce_amax"),
    ),
    Imported(_RECIPE, "Float8CurrentScaling"),
    Imported(_RECIPE, "Float8BlockScaling"),
    Imported(_RECIPE, "Format.HYBRID"),
    Imported(_COMMON, "WeightGradStore", ("delay_wgrad_compute",)),
    Imported(_COMMON, "noop_cat"),
    Imported(_QUANTIZATION, f"{_MANAGER}.reset"),
    Imported(_QUANTIZATION, f"{_MANAGER}.get_buffer_info"),
    Imported(_QUANTIZATION, f"{_MANAGER}.quantization_state.global_amax_buffer"),
    Imported(_QUANTIZATION, f"{_MANAGER}.quantization_state.skip_fp8_weight_update_tensor"),
)
"""What every use of the library needs."""

BASELINE = (
    Imported(
        _PYTORCH,
        "make_graphed_callables",
        (
            "num_warmup_iters",
            "allow_unused_input",
            "enabled",
            "recipe",
            "cache_quantized_params",
            "_order",
            "_num_layers_per_chunk",
        ),
    ),
)
"""What the benchmark's columns of the library's own graphs need besides."""

LAYER = (
    Member("wgrad_store", _ALL),
    Member("fp8_meta", _ALL),
    Member("_fp8_workspaces", _ALL),
    Member("tp_size", _ALL),
    Member("primary_weights_in_fp8", _ALL),
    Member("weight_names", _LINEAR),
    Member("_get_weight_tensors", _LINEAR),
    Member("fc1_weight", _ALL[2:]),
    Member("fc2_weight", _ALL[2:]),
)
"""What the submodules of a new layer have."""

STATE = ("amax_history", "scale")
"""What delayed scaling keeps in `fp8_meta`, forward and backward, from the first F on."""

_CACHES = {_ALL[0]: ("weight",), _ALL[1]: ("weight",), _ALL[2]: ("fc1_weight", "fc2_weight")}
_CACHE_MEMBERS = ("quantize_", "get_metadata")


def missing_imports(
    reached: Sequence[Imported] = IMPORTED, load: Callable[[str], Any] = import_module
) -> list[str]:
    """
    Names that an installed library lacks.

    Args:
        reached: The names to look for.
        load: Imports a module.

    Returns:
        Full names; of one that is there without a parameter, `name(parameter=)`.
    """
    found: list[str] = []
    for one in reached:
        try:
            held = load(one.module)
            for part in one.path.split("."):
                held = getattr(held, part)
        except (ImportError, AttributeError):
            found.append(one.name)
            continue
        found += [f"{one.name}({p}=)" for p in _not_taken(held, one.parameters)]
    return found


def _not_taken(function: Any, parameters: Sequence[str]) -> Iterator[str]:
    if not parameters:
        return
    taken = inspect.signature(function).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        yield from (name for name in parameters if name not in taken)


def missing_members(layer: torch.nn.Module) -> list[str]:
    """Submodules and attributes that a new layer lacks, by path."""
    found: list[str] = []
    held: dict[str, Any] = {}
    for path in _ALL:
        try:
            held[path] = layer.get_submodule(path)
        except AttributeError:
            found.append(path)
    for member in LAYER:
        found += [
            f"{path}.{member.name}"
            for path in member.paths
            if path in held and not hasattr(held[path], member.name)
        ]
    return found


def missing_in_head(head: torch.nn.Module) -> list[str]:
    """Attributes that a new `LayerNormLinear` lacks, which stands alone behind the layers."""
    wanted = [member.name for member in LAYER if _LINEAR[0] in member.paths]
    return [f"LayerNormLinear.{name}" for name in wanted if not hasattr(head, name)]


def missing_state(layer: torch.nn.Module, *, delayed: bool) -> list[str]:
    """
    What a layer lacks after its first F under FP8 with weight caching.

    Args:
        layer: The layer, with every member of `LAYER`.
        delayed: Whether the recipe is delayed scaling, which alone keeps histories.
    """
    found: list[str] = []
    for path, names in _CACHES.items():
        module: Any = layer.get_submodule(path)
        for key in ("scaling_fwd", "scaling_bwd") if delayed else ():
            state = module.fp8_meta.get(key)
            found += [
                f"{path}.fp8_meta[{key!r}].{name}"
                for name in STATE
                if not isinstance(getattr(state, name, None), torch.Tensor)
            ]
        for name in names:
            workspace = module._fp8_workspaces.get(name)
            if workspace is None:
                found.append(f"{path}._fp8_workspaces[{name!r}]")
                continue
            found += [
                f"{path}._fp8_workspaces[{name!r}].{member}"
                for member in _CACHE_MEMBERS
                if not hasattr(workspace, member)
            ]
    return found
