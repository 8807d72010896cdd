"""
All names of Transformer Engine that the runtime uses, and functions that check for missing names.

Most names are private: a later version may rename or drop a name without notice. Each name is
checked as early as possible: at import, in a new layer, or after the layer's first F. A version
that lacks names is then refused with a list of these names, instead of failing in the middle of a
step. A table in `gpu_runtime/README.md` lists the same names. Importing this module does not import
the library; only the checks do.
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
    "EPOCH",
    "IMPORTED",
    "LAYER",
    "STATE",
    "STORES",
    "ImportedName",
    "MemberName",
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
"""Submodules of a layer that defer weight gradients, with the products that dI queues in each."""


@frozen
class ImportedName:
    """
    A name of the library that is checked at its import.

    Args:
        module: The module that contains the name.
        path: The name within the module, with dots for attributes.
        parameters: If the name is a function: the parameters that the runtime passes.
    """

    module: str
    path: str
    parameters: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The full name: the module and the path."""
        return f"{self.module}.{self.path}"


@frozen
class MemberName:
    """
    An attribute that is checked in a new layer or its submodules.

    Args:
        name: Name of the attribute.
        paths: The submodules of a layer that must have the attribute; empty for the layer itself.
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
_WHOLE = ""
"""The path of the layer itself."""

IMPORTED = (
    ImportedName(
        _PYTORCH,
        "TransformerLayer",
        (
            "num_gqa_groups",
            "layer_number",
            "normalization",
            "activation",
            "bias",
            "self_attn_mask_type",
            "hidden_dropout",
            "attention_dropout",
            "params_dtype",
            "fuse_qkv_params",
            "fuse_wgrad_accumulation",
            "device",
        ),
    ),
    ImportedName(
        _PYTORCH,
        "LayerNormLinear",
        ("normalization", "bias", "params_dtype", "fuse_wgrad_accumulation", "device"),
    ),
    ImportedName(_PYTORCH, "autocast", ("enabled", "recipe")),
    ImportedName(_PYTORCH, "parallel_cross_entropy", ("reduce_loss",)),
    ImportedName(f"{_PYTORCH}.triton.cross_entropy", "cross_entropy_forward"),
    ImportedName(f"{_PYTORCH}.optimizers", "multi_tensor_scale_tensor"),
    ImportedName(
        _RECIPE,
        "DelayedScaling",
        ("margin", "fp8_format", "amax_history_len", "amax_compute_algo", "reduce_amax"),
    ),
    ImportedName(_RECIPE, "Float8CurrentScaling"),
    ImportedName(_RECIPE, "Float8BlockScaling"),
    ImportedName(_RECIPE, "Format.HYBRID"),
    ImportedName(_COMMON, "WeightGradStore", ("delay_wgrad_compute",)),
    ImportedName(_COMMON, "noop_cat"),
    ImportedName(_QUANTIZATION, f"{_MANAGER}.reset"),
    ImportedName(_QUANTIZATION, f"{_MANAGER}.get_buffer_info"),
    ImportedName(_QUANTIZATION, f"{_MANAGER}.quantization_state.global_amax_buffer"),
    ImportedName(_QUANTIZATION, f"{_MANAGER}.quantization_state.skip_fp8_weight_update_tensor"),
)
"""Names that every use of the library needs."""

BASELINE = (
    ImportedName(
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
"""Additional names for the benchmark's columns of the library's own graphs."""

EPOCH = (
    ImportedName(_PYTORCH, "autocast", ("_graph",)),
    ImportedName(_QUANTIZATION, f"{_MANAGER}.reduce_and_update_fp8_tensors", ("forward",)),
    ImportedName(_QUANTIZATION, f"{_MANAGER}.quantization_state.is_first_fp8_module"),
)
"""Additional names for scales that move once an epoch, and for stages that recompute."""

LAYER = (
    MemberName("hidden_dropout", (_WHOLE,)),
    MemberName("wgrad_store", _ALL),
    MemberName("fp8_meta", _ALL),
    MemberName("_fp8_workspaces", _ALL),
    MemberName("tp_size", _ALL),
    MemberName("primary_weights_in_fp8", _ALL),
    MemberName("weight_names", _LINEAR),
    MemberName("_get_weight_tensors", _LINEAR),
    MemberName("fc1_weight", _ALL[2:]),
    MemberName("fc2_weight", _ALL[2:]),
)
"""Attributes of a new layer and its submodules."""

STATE = ("amax_history", "scale")
"""Entries of `fp8_meta` under delayed scaling, forward and backward, from the first F on."""

_CACHES = {_ALL[0]: ("weight",), _ALL[1]: ("weight",), _ALL[2]: ("fc1_weight", "fc2_weight")}
_CACHE_MEMBERS = ("quantize_", "get_metadata")


def missing_imports(
    reached: Sequence[ImportedName] = IMPORTED, load: Callable[[str], Any] = import_module
) -> list[str]:
    """
    Return the names that the installed library lacks.

    Args:
        reached: The names to check.
        load: Function that imports a module.

    Returns:
        The missing full names; `name(parameter=)` for a function that exists but lacks a parameter.
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
    """Return the submodules and attributes that a new layer lacks, by path."""
    found: list[str] = []
    held: dict[str, Any] = {_WHOLE: layer}
    for path in _ALL:
        try:
            held[path] = layer.get_submodule(path)
        except AttributeError:
            found.append(path)
    for member in LAYER:
        found += [
            f"{path}.{member.name}".lstrip(".")
            for path in member.paths
            if path in held and not hasattr(held[path], member.name)
        ]
    return found


def missing_in_head(head: torch.nn.Module) -> list[str]:
    """Return the attributes that a new `LayerNormLinear` (the head after all layers) lacks."""
    wanted = [member.name for member in LAYER if _LINEAR[0] in member.paths]
    return [f"LayerNormLinear.{name}" for name in wanted if not hasattr(head, name)]


def missing_state(layer: torch.nn.Module, *, delayed: bool) -> list[str]:
    """
    Return the names that a layer lacks after its first F in FP8 with weight caching.

    Args:
        layer: The layer, which has every member in `LAYER`.
        delayed: Whether the recipe is delayed scaling, the only recipe with histories.
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
