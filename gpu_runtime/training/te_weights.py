"""
Convert the weights of Transformer Engine's layers to the names and row order of the reference
backend.

The layers of both backends compute the same function, with two exceptions. First, Transformer
Engine's fused matrix for queries, keys and values is ordered by heads (`qkv_weight_interleaved`,
the default). The reference backend has all queries, then all keys, then all values. If query heads
share keys and values, the library's rows are in the order of groups: the queries of a group, then
its key, then its value. Second, the library's GELU is the tanh approximation
(`common/util/math.h`), while the reference backend's GELU is exact. Norms (epsilon 1e-5),
residuals, biases, masks and the scale of the scores are the same. These facts come from the
library's source code. Groups, the gates of SwiGLU (the first half of the rows) and rotary positions
were also tested on a GPU: `tests/gpu/test_language.py` compares losses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from ..backends.layers import LayerConfig
from ..backends.protocol import BackendError

__all__ = ["as_reference"]

#: By the name within a layer; the queries, keys and values of either form have a rule of their own.
_LAYER: Final[Mapping[str, str]] = {
    "self_attention.layernorm_qkv.layer_norm_weight": "norm1.weight",
    "self_attention.layernorm_qkv.layer_norm_bias": "norm1.bias",
    "self_attention.proj.weight": "proj.weight",
    "self_attention.proj.bias": "proj.bias",
    "layernorm_mlp.layer_norm_weight": "norm2.weight",
    "layernorm_mlp.layer_norm_bias": "norm2.bias",
    "layernorm_mlp.fc1_weight": "fc1.weight",
    "layernorm_mlp.fc1_bias": "fc1.bias",
    "layernorm_mlp.fc2_weight": "fc2.weight",
    "layernorm_mlp.fc2_bias": "fc2.bias",
}
_ENDS: Final[Mapping[str, str]] = {
    "embedding.weight": "embedding.weight",
    "embedding.position": "embedding.position",
    "head.layer_norm_weight": "head.norm.weight",
    "head.layer_norm_bias": "head.norm.bias",
    "head.norm.weight": "head.norm.weight",  # TorchAO's head
    "head.norm.bias": "head.norm.bias",
    "head.weight": "head.weight",
}
_IN_LAYER: Final = re.compile(r"(layers\.\d+\.)(.+)")
_QKV: Final = "self_attention.layernorm_qkv."
_SPLIT: Final = ("query", "key", "value")


def as_reference(weights: Mapping[str, Tensor], config: LayerConfig) -> dict[str, Tensor]:
    """
    Return a model's weights with the reference backend's names and order of rows.

    Args:
        weights: The weights of a checkpoint of Transformer Engine's backend.
        config: The dimensions of a layer.

    Returns:
        The weights, with names and shapes of the reference backend. Fused matrices have all queries
        first, then all keys, then all values.

    Raises:
        BackendError: A name is unknown, or a layer lacks its queries, keys or values.
    """
    found: dict[str, Tensor] = {}
    split: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        if (end := _ENDS.get(name)) is not None:
            found[end] = tensor
            continue
        place = _IN_LAYER.fullmatch(name)
        layer, rest = (place[1], place[2]) if place is not None else ("", name)
        kind = rest.removeprefix(_QKV)
        if rest in _LAYER and layer:
            found[layer + _LAYER[rest]] = tensor
        elif layer and rest.startswith(_QKV) and kind in ("weight", "bias"):
            found[f"{layer}qkv.{kind}"] = _parts_first(name, tensor, config)
        elif layer and rest.startswith(_QKV) and kind.partition("_")[0] in _SPLIT:
            part, _, of = kind.partition("_")
            split.setdefault(f"{layer}qkv.{of}", {})[part] = tensor
        else:
            raise BackendError(
                f"{name}: expected a weight of Transformer Engine's layers, found this name; use "
                "the version of qeffect that wrote the checkpoint"
            )
    for name, parts in split.items():
        if lacking := [part for part in _SPLIT if part not in parts]:
            raise BackendError(
                f"{name}: expected queries, keys and values in this layer, found no {lacking[0]}"
            )
        found[name] = torch.cat([parts[part] for part in _SPLIT])
    return found


def _parts_first(name: str, tensor: Tensor, config: LayerConfig) -> Tensor:
    """Reorder the rows of a weight matrix from (group, part, element) to (part, group, element);
    the parts are query, key and value."""
    rows, groups, width = tensor.shape[0], config.groups, config.head_width
    if rows != config.qkv_rows:
        raise BackendError(
            f"{name}: expected {config.qkv_rows} rows ({config.heads} heads of queries, {groups} "
            f"of keys and values), found {rows}"
        )
    by_group = tensor.view(groups, config.sharing + 2, width, *tensor.shape[1:])
    parts = torch.split(by_group, [config.sharing, 1, 1], 1)
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])
