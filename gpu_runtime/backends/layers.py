"""The dimensions of a transformer layer, common to every backend."""

from __future__ import annotations

import attrs
import torch

from qeffect.text import shown

from .protocol import TensorSpec


@attrs.frozen
class LayerConfig:
    """
    Dimensions of a transformer layer and of its activations.

    Args:
        hidden: Width of the residual stream.
        ffn: Width of the MLP.
        heads: Attention heads; hidden must be a multiple.
        sequence: Tokens in a microbatch.
        batch: Sequences in a microbatch.
        fused_qkv: One parameter for query, key and value (12 parameters, 4 of them matrices);
            otherwise three (16 parameters, 6 matrices).
        dtype: Type of parameters and activations.

    Raises:
        ValueError: A dimension does not fit the heads, or FP8's blocks of 16.
    """

    hidden: int = 128
    ffn: int = 512
    heads: int = 2
    sequence: int = 64
    batch: int = 1
    fused_qkv: bool = True
    dtype: torch.dtype = torch.bfloat16

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
        rows = self.sequence * self.batch
        for name, size in (("hidden", self.hidden), ("ffn", self.ffn), ("sequence * batch", rows)):
            if size % 16:
                raise ValueError(f"{name} is {size}; FP8 products need a multiple of 16")

    def activation(self, device: torch.device, *, differentiable: bool = True) -> TensorSpec:
        """The hidden states between stages: sequence first, as Transformer Engine has them."""
        return TensorSpec(
            (self.sequence, self.batch, self.hidden), self.dtype, device, differentiable
        )
