"""
A causal transformer layer with pre-norm and fused or split QKV, and a head. Both are made of
`ScaledLinear`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..layers import LayerConfig, rotary_angles
from ..norms import norm_of
from ..protocol import NonMatrix, WgradUnit
from .linear import ScaledLinear
from .scaling import ReferenceDomain


class ReferenceLayer(torch.nn.Module):
    """
    Attention and MLP with residual connections: four matrix products, which share the scaling state
    of the layer.
    """

    def __init__(
        self,
        name: str,
        config: LayerConfig,
        domain: ReferenceDomain,
        generator: torch.Generator,
        dropout: float = 0.0,
        number: int = 0,
    ) -> None:
        super().__init__()
        self.domain = domain
        self.dropout = dropout
        self.number = number  # among the model's layers
        hidden, ffn = config.hidden, config.ffn
        self.name = name
        self.config = config
        self.angles = None
        if config.positions == "rotary":
            self.angles = rotary_angles(config, domain.device)
        self.forward_scaling = domain.scaling(forward=True, tensors=8)
        self.backward_scaling = domain.scaling(forward=False, tensors=4)
        scaling = (self.forward_scaling, self.backward_scaling)

        def linear(part: str, sizes: dict[str, int], width: int, index: int) -> ScaledLinear:
            return ScaledLinear(
                f"{name}.{part}",
                sizes,
                width,
                domain,
                scaling,
                index,
                config.dtype,
                generator,
                bias=config.bias,
            )

        qkv = {"": config.qkv_rows}
        if not config.fused_qkv:
            qkv = {"q_": hidden, "k_": config.kv_width, "v_": config.kv_width}
        self.norm1 = norm_of(config, domain.device)
        self.qkv = linear("qkv", qkv, hidden, 0)
        self.proj = linear("proj", {"": hidden}, hidden, 2)
        self.norm2 = norm_of(config, domain.device)
        self.fc1 = linear("fc1", {"": config.fc1_rows}, hidden, 4)
        self.fc2 = linear("fc2", {"": hidden}, ffn, 6)

    @property
    def linears(self) -> tuple[ScaledLinear, ...]:
        """The layer's four products, in the order of F."""
        return self.qkv, self.proj, self.fc1, self.fc2

    @property
    def units(self) -> tuple[WgradUnit, ...]:
        """The layer's units (deferred matrix products), one per product."""
        return tuple(linear.unit for linear in self.linears)

    def non_matrix(self) -> tuple[NonMatrix, ...]:
        """The parameters that are not matrices: norm weights and every bias."""
        return _vectors(self, self.name)

    def forward(self, x: Tensor) -> Tensor:
        """Run F on hidden states of shape `(sequence, batch, hidden)`."""
        drop, p, n = self.domain.drop, self.dropout, self.number
        x = x + drop(self.proj(self.attention(self.qkv(self.norm1(x)))), p, n, 0)
        result: Tensor = x + drop(
            self.fc2(activated(self.fc1(self.norm2(x)), self.config)), p, n, 1
        )
        return result

    def attention(self, qkv: Tensor) -> Tensor:
        """Compute causal attention in the type of the activations, with a deterministic kernel."""
        sequence, batch, _ = qkv.shape
        query, key, value = queries_keys_values(qkv, self.config, self.angles)
        if qkv.is_cuda:
            with sdpa_kernel(SDPBackend.MATH):
                mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.permute(2, 0, 1, 3).reshape(sequence, batch, -1)


def activated(inner: Tensor, config: LayerConfig, gelu: str = "none") -> Tensor:
    """
    Apply the activation between the two matrix products of an MLP, over the last dimension.

    Args:
        inner: The result of the first product.
        config: The dimensions of a layer.
        gelu: ``none`` for the exact GELU, ``tanh`` for its tanh approximation.
    """
    if config.activation == "gelu":
        return functional.gelu(inner, approximate=gelu)
    gate, up = inner.chunk(2, -1)
    return functional.silu(gate) * up


def queries_keys_values(
    qkv: Tensor, config: LayerConfig, angles: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Split the fused product into heads, rotate queries and keys, and repeat shared keys and values.

    Args:
        qkv: The result of the fused product, with shape `(sequence, batch, rows)` or `(sequence,
            rows)`.
        config: The dimensions of a layer.
        angles: The result of `rotary_angles` for these positions, with as many dimensions as the
            split heads; None without rotary positions.

    Returns:
        Queries, keys and values, each of shape `(batch, heads, sequence, head width)`; without the
        first dimension if `qkv` has no batch.
    """
    rows = [config.hidden, config.kv_width, config.kv_width]
    parts = [
        part.view(*part.shape[:-1], -1, config.head_width) for part in torch.split(qkv, rows, -1)
    ]
    if angles is not None:
        parts[:2] = (_rotated(part, angles) for part in parts[:2])
    query, key, value = (part.movedim(0, -2) for part in parts)
    if config.sharing > 1:
        key, value = (part.repeat_interleave(config.sharing, -3) for part in (key, value))
    return query, key, value


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate queries or keys by their positions, in fp32."""
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x.float() * angles.cos() + turned * angles.sin()).to(x.dtype)


class ReferenceHead(torch.nn.Module):
    """
    The final norm, and the matrix product over the vocabulary, which has its own scaling state.
    """

    def __init__(
        self,
        config: LayerConfig,
        vocabulary: int,
        domain: ReferenceDomain,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.name = "head"
        self.forward_scaling = domain.scaling(forward=True, tensors=2)
        self.backward_scaling = domain.scaling(forward=False, tensors=1)
        self.norm = norm_of(config, domain.device)
        self.linear = ScaledLinear(
            "head",
            {"": vocabulary},
            config.hidden,
            domain,
            (self.forward_scaling, self.backward_scaling),
            0,
            config.dtype,
            generator,
            bias=False,
        )

    @property
    def linears(self) -> tuple[ScaledLinear, ...]:
        """The head's only product."""
        return (self.linear,)

    @property
    def units(self) -> tuple[WgradUnit, ...]:
        """The head's only unit (deferred matrix product)."""
        return (self.linear.unit,)

    def non_matrix(self) -> tuple[NonMatrix, ...]:
        """The norm's weight, and its bias if it has one."""
        return _vectors(self, self.name)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits of hidden states."""
        result: Tensor = self.linear(self.norm(x))
        return result


def _vectors(layer: torch.nn.Module, prefix: str) -> tuple[NonMatrix, ...]:
    """Return the parameters that are not matrices, by their names in a layer."""
    return tuple(
        NonMatrix(f"{prefix}.{name}", parameter)
        for name, parameter in layer.named_parameters()
        if parameter.dim() == 1
    )
