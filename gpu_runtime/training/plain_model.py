"""
A language model in fp32 without FP8: the layers of either backend, on the CPU, for a text.

A checkpoint of Transformer Engine's backend holds scales of the library's own casts and products,
which no CPU has. So a CPU evaluates its weights without casts. Logits then differ from the run's
own evaluation by what FP8 rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..backends.protocol import BackendError
from .config import Model

__all__ = ["PlainModel"]


class PlainModel:
    """
    A model's weights, and what it computes of a text.

    Args:
        model: The dimensions.
        weights: The weights, by the reference backend's names, of any type; a tied weight under
            both names. Shapes are those of the reference backend.
        gelu: ``none`` for the exact GELU, ``tanh`` for the approximate one.

    Raises:
        BackendError: A weight is missing, left over, or of another shape.
    """

    def __init__(self, model: Model, weights: Mapping[str, Tensor], *, gelu: str) -> None:
        self.model, self.gelu = model, gelu
        shapes = _shapes(model)
        if odd := sorted(weights.keys() ^ shapes.keys()):
            raise BackendError(
                f"the weights and their model disagree on {len(odd)} tensors, first {odd[0]}; load "
                "them with the version that wrote them"
            )
        for name, shape in shapes.items():
            if (found := tuple(weights[name].shape)) != shape:
                raise BackendError(f"{name}: expected shape {shape}, found {found}")
        self.weights = {name: tensor.float() for name, tensor in weights.items()}

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """
        Compute the logits of the token that follows.

        Args:
            ids: At least one token, and at most a window.

        Returns:
            The logits over the vocabulary, fp32.
        """
        w = self.weights
        x = w["embedding.weight"][torch.tensor(list(ids))] + w["embedding.position"][: len(ids)]
        for n in range(self.model.layers):
            x = x + self._attended(f"layers.{n}.", self._normed(x, f"layers.{n}.norm1"))
            hidden = self._product(self._normed(x, f"layers.{n}.norm2"), f"layers.{n}.fc1")
            hidden = functional.gelu(hidden, approximate=self.gelu)
            x = x + self._product(hidden, f"layers.{n}.fc2")
        row: Tensor = functional.linear(self._normed(x[-1:], "head.norm"), w["head.weight"])[0]
        return row

    def _normed(self, x: Tensor, name: str) -> Tensor:
        w = self.weights
        return functional.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    def _product(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _attended(self, layer: str, x: Tensor) -> Tensor:
        """Causal attention over `(tokens, hidden)`."""
        query, key, value = (
            part.view(len(x), self.model.heads, -1).transpose(0, 1)
            for part in self._product(x, f"{layer}qkv").chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self._product(mixed.transpose(0, 1).reshape(x.shape), f"{layer}proj")


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The shape of each weight."""
    hidden, ffn = model.hidden, model.ffn
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (model.vocabulary, hidden),
        "embedding.position": (model.sequence, hidden),
        "head.norm.weight": (hidden,),
        "head.norm.bias": (hidden,),
        "head.weight": (model.vocabulary, hidden),
    }
    products = {"qkv": (3 * hidden, hidden), "proj": (hidden, hidden)}
    products |= {"fc1": (ffn, hidden), "fc2": (hidden, ffn)}
    for n in range(model.layers):
        for name, (rows, width) in products.items():
            shapes[f"layers.{n}.{name}.weight"] = rows, width
            shapes[f"layers.{n}.{name}.bias"] = (rows,)
        for name in ("norm1", "norm2"):
            shapes[f"layers.{n}.{name}.weight"] = shapes[f"layers.{n}.{name}.bias"] = (hidden,)
    return shapes
