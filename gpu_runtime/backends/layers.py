"""The dimensions of a transformer layer, which all backends use."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from qeffect.text import shown

from .protocol import TensorSpec

__all__ = ["ACTIVATIONS", "NORMS", "POSITIONS", "LayerConfig", "rotary_angles"]

NORMS = ("layernorm", "rmsnorm")
"""The norms, by their names in a configuration."""
ACTIVATIONS = ("gelu", "swiglu")
"""The activations of an MLP, between its two products."""
POSITIONS = ("learned", "rotary")
"""How tokens get their positions: a table that is added to the embedding, or rotations of queries
and keys in each layer."""

_OPTIONS = {"norm": NORMS, "activation": ACTIVATIONS, "positions": POSITIONS}
_BASE = 10_000.0
"""The base of the wavelengths of rotary positions."""


def rotary_angles(config: LayerConfig, device: torch.device) -> Tensor:
    """
    Return the angles of rotary positions: at each position, pairs of elements of a query or key are
    rotated by these angles.

    Args:
        config: The dimensions.
        device: Device of the angles.

    Returns:
        The angles in fp32, with shape `(sequence, 1, 1, head width)`. Elements `i` and `i + width /
        2` are a pair, so the two halves of the last dimension are equal. Transformer Engine expects
        this form.
    """
    width = config.head_width
    waves = _BASE ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(config.sequence, dtype=torch.float64), 1 / waves)
    return torch.cat((angles, angles), -1)[:, None, None].float().to(device)


@attrs.frozen
class LayerConfig:
    """
    Dimensions of a transformer layer and of its activations.

    Args:
        hidden: Width of the residual stream.
        ffn: Width of the MLP.
        heads: Number of attention heads; `hidden` must be a multiple of this number.
        sequence: Number of tokens in a sequence.
        batch: Number of sequences in a microbatch.
        fused_qkv: Whether query, key and value share one matrix. With `layernorm` and biases, a
            layer has 12 parameters (4 of them matrices) if True, and 16 (6 matrices) if False.
        dtype: dtype of parameters and activations.
        kv_heads: Number of key and value heads. If the number is below `heads`, several query heads
            share one key and value head (grouped-query attention). None means as many as `heads`.
        norm: Kind of the norms, one of `NORMS`.
        activation: Activation of the MLP, one of `ACTIVATIONS`. With `swiglu`, the first matrix of
            the MLP (fc1) has twice as many rows.
        positions: Kind of positions, one of `POSITIONS`.
        bias: Whether matrix products have a bias.

    Raises:
        ValueError: A dimension does not fit the number of heads, or is not a multiple of 16, as FP8
            products need.
    """

    hidden: int = 128
    ffn: int = 512
    heads: int = 2
    sequence: int = 64
    batch: int = 1
    fused_qkv: bool = True
    dtype: torch.dtype = torch.bfloat16
    kv_heads: int | None = None
    norm: str = "layernorm"
    activation: str = "gelu"
    positions: str = "learned"
    bias: bool = True

    def __attrs_post_init__(self) -> None:
        for name in ("hidden", "ffn", "heads", "sequence", "batch"):
            size = getattr(self, name)
            if size.__class__ is not int:
                raise TypeError(f"{name} must be an int, got {shown(size)}")
            if size < 1:
                raise ValueError(f"{name} is {size}; expected at least 1")
        if self.hidden % self.heads:
            raise ValueError(
                f"hidden {self.hidden} is not a multiple of heads {self.heads}; "
                "choose heads that divide it"
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}; "
                "choose kv_heads that divide it"
            )
        for name, options in _OPTIONS.items():
            if getattr(self, name) not in options:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {options}")
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(
                f"a head is {self.head_width} wide; rotary positions need an even width"
            )
        rows = self.sequence * self.batch
        sizes = {"hidden": self.hidden, "ffn": self.ffn, "sequence * batch": rows}
        if self.kv_heads is not None:
            sizes["kv_heads * head width"] = self.kv_width
        for name, size in sizes.items():
            if size % 16:
                raise ValueError(f"{name} is {size}; FP8 products need a multiple of 16")

    @property
    def head_width(self) -> int:
        """Number of elements of one head."""
        return self.hidden // self.heads

    @property
    def groups(self) -> int:
        """Number of key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def sharing(self) -> int:
        """Number of query heads that share one key and value head."""
        return self.heads // self.groups

    @property
    def kv_width(self) -> int:
        """Number of elements in all keys of one token, and also in all values of one token."""
        return self.groups * self.head_width

    @property
    def qkv_rows(self) -> int:
        """Number of rows of the fused matrix for queries, keys and values."""
        return self.hidden + 2 * self.kv_width

    @property
    def fc1_rows(self) -> int:
        """Number of rows of the first matrix of an MLP."""
        return self.ffn * (2 if self.activation == "swiglu" else 1)

    @property
    def parameters(self) -> int:
        """Number of parameters of a layer: the elements of all its parameter tensors."""
        rows = self.qkv_rows + self.hidden + self.fc1_rows
        matrices = rows * self.hidden + self.ffn * self.hidden
        norms = 2 * self.hidden * self.norm_vectors
        return matrices + norms + (rows + self.hidden if self.bias else 0)

    @property
    def norm_vectors(self) -> int:
        """
        Number of parameter vectors of a norm: 2 (weight and bias), or 1 (weight) with `rmsnorm`.
        """
        return 1 if self.norm == "rmsnorm" else 2

    def hidden_states(self, device: torch.device, *, differentiable: bool = True) -> TensorSpec:
        """
        Specify the hidden states between stages. The sequence is the first dimension, as in
        Transformer Engine.
        """
        return TensorSpec(
            (self.sequence, self.batch, self.hidden), self.dtype, device, differentiable
        )
