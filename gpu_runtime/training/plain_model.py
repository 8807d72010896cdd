"""
Compute a language model on the CPU in fp32, without FP8, from a checkpoint of either backend.

A checkpoint of Transformer Engine's backend contains scales for the library's own casts and
products, which do not run on a CPU. Therefore this module computes the model without FP8 casts. Its
logits differ from the logits of the run's own evaluation by FP8 rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..backends.layers import rotary_angles
from ..backends.norms import EPSILON
from ..backends.protocol import BackendError
from ..backends.reference.layer import activated, queries_keys_values
from .config import Model

__all__ = ["PlainModel"]


class PlainModel:
    """
    A model's weights, and the computation of its logits.

    Args:
        model: The dimensions.
        weights: The weights, of any dtype, with the names and shapes of the reference backend. A
            tied weight is listed under both of its names.
        gelu: ``none`` for the exact GELU, ``tanh`` for its tanh approximation.

    Raises:
        BackendError: A weight is missing, unexpected, or of another shape.
    """

    def __init__(self, model: Model, weights: Mapping[str, Tensor], *, gelu: str) -> None:
        self.model, self.gelu = model, gelu
        self.layer = layer = model.layer()
        self.angles = None
        if layer.positions == "rotary":
            self.angles = rotary_angles(layer, torch.device("cpu"))[:, 0]
        shapes = _shapes(model)
        if odd := sorted(weights.keys() ^ shapes.keys()):
            raise BackendError(
                f"expected the same tensors in the weights and the model, found {len(odd)} in "
                f"only one of them, such as {odd[0]}; load the weights with the version that "
                "wrote them"
            )
        for name, shape in shapes.items():
            if (found := tuple(weights[name].shape)) != shape:
                raise BackendError(f"{name}: expected shape {shape}, found {found}")
        self.weights = {name: tensor.float() for name, tensor in weights.items()}

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """
        Compute the logits of the next token.

        Args:
            ids: The tokens so far: at least one token, and at most as many as a window has.

        Returns:
            The logits over the vocabulary, fp32.
        """
        w = self.weights
        x = w["embedding.weight"][torch.tensor(list(ids))]
        if self.model.positions == "learned":
            x = x + w["embedding.position"][: len(ids)]
        for n in range(self.model.layers):
            x = x + self._attended(f"layers.{n}.", self._normed(x, f"layers.{n}.norm1"))
            hidden = self._product(self._normed(x, f"layers.{n}.norm2"), f"layers.{n}.fc1")
            x = x + self._product(activated(hidden, self.layer, self.gelu), f"layers.{n}.fc2")
        row: Tensor = functional.linear(self._normed(x[-1:], "head.norm"), w["head.weight"])[0]
        return row

    def _normed(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        if self.model.norm == "rmsnorm":
            return functional.rms_norm(x, x.shape[-1:], weight, EPSILON)
        bias = self.weights[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias, EPSILON)

    def _product(self, x: Tensor, name: str) -> Tensor:
        weights = self.weights
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def _attended(self, layer: str, x: Tensor) -> Tensor:
        """Compute causal attention on hidden states of shape `(tokens, hidden)`."""
        angles = None if self.angles is None else self.angles[: len(x)]
        qkv = self._product(x, f"{layer}qkv")
        query, key, value = queries_keys_values(qkv, self.layer, angles)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self._product(mixed.transpose(0, 1).reshape(x.shape), f"{layer}proj")


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight."""
    hidden, layer = model.hidden, model.layer()
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (model.vocabulary, hidden),
        "head.weight": (model.vocabulary, hidden),
    }
    if model.positions == "learned":
        shapes["embedding.position"] = model.sequence, hidden
    products = {"qkv": (layer.qkv_rows, hidden), "proj": (hidden, hidden)}
    products |= {"fc1": (layer.fc1_rows, hidden), "fc2": (hidden, model.ffn)}
    norms = ["head.norm"]
    for n in range(model.layers):
        for name, (rows, width) in products.items():
            shapes[f"layers.{n}.{name}.weight"] = rows, width
            if model.bias:
                shapes[f"layers.{n}.{name}.bias"] = (rows,)
        norms += f"layers.{n}.norm1", f"layers.{n}.norm2"
    for name in norms:
        shapes[f"{name}.weight"] = (hidden,)
        if model.norm == "layernorm":
            shapes[f"{name}.bias"] = (hidden,)
    return shapes
