"""
The parts of a language model before its first layer and after its last layer, for every backend.

Tokens enter the first stage as integers. The last stage ends in a final norm, a head over the
vocabulary and a cross entropy. The head is computed like every other product of its backend: with a
deferred weight gradient, a weight cache and scales. The embedding's gradient is a sum of rows, not
a product that could be deferred. Therefore dI computes this gradient, together with the gradients
of norms and biases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .layers import LayerConfig
from .protocol import BackendError, TensorSpec, WgradUnit

__all__ = [
    "EMBEDDED",
    "PROJECTED",
    "Ends",
    "LossShare",
    "TokenEmbedding",
    "cross_entropy",
    "mean_cross_entropy",
    "part_seed",
    "stage_ends",
    "tie_head",
    "weight_of",
]

EMBEDDED, PROJECTED = "embedding.weight", "head.weight"
"""Names of the token embedding's table and of the head's matrix in every backend's stages."""

_SPREAD = 0.02
"""Standard deviation of the initial embedding and of the reference backend's initial matrices."""


@attrs.frozen(kw_only=True)
class Ends:
    """
    Which ends of a language model (the embedding, the head) a stage has.

    Args:
        vocabulary: Number of different tokens.
        embedding: Whether the stage begins with the embedding, and therefore takes tokens.
        head: Whether the final norm and the head follow the stage's last layer.
        first_layer: Number of the model's layers in earlier stages. Each layer has its own seed, so
            a model starts with the same bits however it is divided into stages.
        tied: Whether the head's matrix starts as a copy of the embedding's token table. Both copies
            then get the same summed gradient and the same update, so they stay equal.
        kind: What computes the head, one of `heads.HEADS`. With `te`, the same library as for the
            layers computes it.

    Raises:
        ValueError: The vocabulary is not a multiple of 16, as FP8 products need.
    """

    vocabulary: int
    embedding: bool = False
    head: bool = False
    first_layer: int = 0
    tied: bool = False
    kind: str = "te"

    def __attrs_post_init__(self) -> None:
        if self.vocabulary < 16 or self.vocabulary % 16:
            raise ValueError(f"vocabulary is {self.vocabulary}; FP8 products need a multiple of 16")

    def tokens(self, config: LayerConfig, device: torch.device) -> TensorSpec:
        """
        Specify the tokens of a microbatch. The sequence is the first dimension, as in the hidden
        states.
        """
        return TensorSpec((config.sequence, config.batch), torch.int64, device, False)

    def logits(self, config: LayerConfig, device: torch.device) -> TensorSpec:
        """Specify the output of the head (the logits)."""
        shape = config.sequence, config.batch, self.vocabulary
        return TensorSpec(shape, config.dtype, device)


def stage_ends(
    config: LayerConfig,
    device: torch.device,
    ends: Ends | None,
    *,
    first: bool,
    loss: bool,
    extra: Sequence[TensorSpec],
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """
    Return the specifications of a stage's inputs and outputs.

    Args:
        config: Dimensions of its layers.
        device: Device of the stage.
        ends: Which ends of a language model the stage has; None for a stage of layers alone.
        first: Whether the stage takes data, and therefore has no input gradient.
        loss: Whether the stage ends in the loss.
        extra: Specifications of the stage's further inputs, such as targets.

    Raises:
        ValueError: The stage takes tokens but is not the first stage.
    """
    takes = config.hidden_states(device, differentiable=not first)
    gives = config.hidden_states(device)
    if ends is not None and ends.embedding:
        if not first:
            raise ValueError(
                "an embedding takes tokens, which only the first stage receives: pass first=True"
            )
        takes = ends.tokens(config, device)
    if ends is not None and ends.head:
        gives = ends.logits(config, device)
    if loss:
        gives = TensorSpec((), torch.float32, device)
    return (takes, *extra), (gives,)


def part_seed(seed: int, part: int) -> int:
    """
    Return the seed of one part of a model.

    Args:
        seed: The model's seed.
        part: 0 for the embedding, 1 for the head, 2 and higher for the layers.
    """
    return (seed << 16) + part


def _token_table(config: LayerConfig, rows: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, config.hidden, generator=generator) * _SPREAD


def tie_head(units: Sequence[WgradUnit], ends: Ends | None, config: LayerConfig, seed: int) -> None:
    """
    Copy the initial bits of the token embedding into the head's matrix, if the head is tied to the
    embedding.

    Args:
        units: A stage's matrix products; the last is the head's product.
        ends: Which ends the stage has.
        config: Dimensions of its layers.
        seed: The model's seed.
    """
    if ends is None or not (ends.head and ends.tied):
        return
    generator = torch.Generator().manual_seed(part_seed(seed, 0))
    (matrix,) = units[-1].matrices
    with torch.no_grad():
        matrix.parameter.copy_(_token_table(config, ends.vocabulary, generator).to(config.dtype))


class TokenEmbedding(torch.nn.Module):
    """
    The sum of token and position embeddings. With rotary positions it is only the token embedding.

    Args:
        config: Dimensions of a layer: width, kind of positions and dtype.
        vocabulary: Number of tokens in the vocabulary: the rows of the token embedding.
        device: Device of the parameters.
        seed: Seed of the initial tables, which are drawn on the CPU so that all devices get the
            same bits.
    """

    def __init__(
        self, config: LayerConfig, vocabulary: int, device: torch.device, seed: int
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def table(rows: int) -> torch.nn.Parameter:
            values = _token_table(config, rows, generator)
            return torch.nn.Parameter(values.to(device, config.dtype))

        self.weight = table(vocabulary)
        learned = config.positions == "learned"
        self.position: torch.nn.Parameter | None
        self.register_parameter("position", table(config.sequence) if learned else None)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of tokens of shape `(sequence, batch)`."""
        rows: Tensor = _Rows.apply(self.weight, tokens)  # type: ignore[no-untyped-call]
        return rows if self.position is None else rows + self.position.unsqueeze(1)


class _Rows(torch.autograd.Function):
    """
    Look up rows of a table; the backward sums the gradient in fp32, in a fixed order, without the
    host.

    torch's own backward of an embedding rounds each addition to the table's type, and may add in
    any order or wait for the device. The fp32 sums have one row for each token, not one for each
    row of the table, which may have 30 times as many.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.form = table.shape, table.dtype
        return table[indices]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = output_gradients
        (indices,) = ctx.saved_tensors
        shape, dtype = ctx.form
        flat, rows = indices.reshape(-1), gradient.reshape(-1, shape[1]).float()
        places = torch.arange(flat.numel(), device=flat.device)
        # For each row of the table: the first place that looks it up.
        firsts = places.new_full(shape[:1], flat.numel()).scatter_reduce_(0, flat, places, "amin")
        first = firsts[flat]  # for each place: the first place with the same index
        sums, total = torch.zeros_like(rows), gradient.new_zeros(shape, dtype=dtype)
        if total.is_cuda:
            # Sorts the indices, then adds the terms of each row one after another. "Unsafe" means
            # unchecked: a range check would wait for the device, which no graph can hold. The range
            # is right, because F has read the same rows.
            put = torch.ops.aten._index_put_impl_
            put(sums, [first], rows, True, True)
            put(total, [flat], sums.to(dtype)[first], False, True)  # equal rows for equal indices
        else:
            sums.index_add_(0, first, rows)  # row by row in the order of the indices
            total[flat] = sums.to(dtype)[first]
        return total, None


@attrs.frozen
class LossShare:
    """
    A microbatch's share of a step's loss: the microbatch's mean loss divided by `parts`. `weight`
    is the factor 1/parts as the pair (1, parts) of numerator and denominator.

    Args:
        mean: Function that returns the mean loss of one microbatch from outputs and targets.
        parts: The divisor of the mean. The shares add up to the mean over all microbatches if
            `parts` is the number of all microbatches, in all walks (passes over the schedule) and
            on all replicas.

    >>> share = LossShare(lambda hidden, target: (hidden - target).mean(), 4)
    >>> float(share(torch.ones(2), torch.zeros(2))), share.weight
    (0.25, (1, 4))
    """

    mean: Callable[[Tensor, Tensor], Tensor]
    parts: int

    def __call__(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Return the microbatch's share of the loss."""
        return self.mean(hidden, target) / self.parts

    @property
    def weight(self) -> tuple[int, int]:
        """
        The factor by which the microbatch's gradient is multiplied, in the form that
        `Contract.commit` takes.
        """
        return 1, self.parts


def weight_of(loss: object) -> tuple[int, int] | None:
    """
    Return the factor by which a loss multiplies the mean loss of its microbatch; None if the loss
    is not a `LossShare`.
    """
    return loss.weight if isinstance(loss, LossShare) else None


@cache
def _library_computes_losses() -> bool:
    """Whether Transformer Engine is installed in a version that this runtime accepts."""
    from .te.domain import library

    try:
        library()
    except BackendError:
        return False
    return True


def mean_cross_entropy(logits: Tensor, targets: Tensor, *, overwrite: bool = False) -> Tensor:
    """
    Compute the mean negative log likelihood of the next tokens over a microbatch, in fp32.

    On a GPU, Transformer Engine's kernels compute this mean if the library is installed. They are
    faster, because torch's own kernels read and write fp32 copies of the logits several times.

    Args:
        logits: Logits over the vocabulary for each position.
        targets: The token that follows each position.
        overwrite: Whether the backward may write the logits' gradient over the logits. This saves
            memory, but the logits cannot be read afterwards.
    """
    if logits.is_cuda and _library_computes_losses():
        from .te.loss import mean_cross_entropy as by_the_library

        return by_the_library(logits, targets, overwrite=overwrite)
    flat = logits.reshape(-1, logits.shape[-1]).float()
    return functional.cross_entropy(flat, targets.reshape(-1))


def cross_entropy(logits: Tensor, targets: Tensor, parts: int) -> Tensor:
    """
    Compute a microbatch's share of the mean negative log likelihood, in fp32.

    Args:
        logits: Logits over the vocabulary for each position.
        targets: The token that follows each position.
        parts: Number of microbatches over all replicas. The shares then add up to the mean.
    """
    return mean_cross_entropy(logits, targets) / parts
