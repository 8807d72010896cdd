"""A small model made of Megatron-core's modules, for a CPU."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["WIDTH", "Layer", "QuantizedLinear", "Training", "Workspace", "data", "digest", "fuse"]

WIDTH, ROWS, SEQUENCE = 8, 2, 2


class Workspace:
    """
    A weight in FP8 with one scale, with the names that Transformer Engine uses.

    Args:
        weight: The weight.
        dtype: The FP8 type.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        most = torch.finfo(dtype).max
        scale = most / weight.abs().amax().float()
        self._scale_inv = scale.reciprocal().reshape(1)
        self._data = (weight.float() * scale).clamp(-most, most).to(dtype).view(torch.uint8)
        self._fp8_dtype = f"DType.k{'Float8E4M3' if dtype == torch.float8_e4m3fn else 'Float8E5M2'}"


class QuantizedLinear(nn.Linear):
    """
    A linear layer with quantized weights, which it caches in the same way as Transformer Engine's
    layers.

    The first microbatch of a step quantizes the weights again; later microbatches use the cached
    weights.
    """

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.is_first_microbatch = True
        self.cache = torch.empty(0)
        self._fp8_workspaces: dict[str, Workspace] = {}

    def quantize(self) -> None:
        """Fill the cache, and the workspace, which the guard may compare with the weight."""
        self.cache = (self.weight.detach() * 64).round() / 64
        self._fp8_workspaces["weight"] = Workspace(self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first_microbatch:
            self.quantize()
        self.is_first_microbatch = False
        weight = self.weight - self.weight.detach() + self.cache
        return nn.functional.linear(x, weight, self.bias)


class Layer(nn.Module):
    """
    A layer that draws random numbers, so that one forward too many changes the run.

    The output depends on the number of the microbatch, as if each microbatch had its own graph.
    """

    def __init__(self, quantized: bool) -> None:
        super().__init__()
        self.linear = QuantizedLinear() if quantized else nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.current_microbatch = 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dropout(self.linear(x)) + 0.1 * self.current_microbatch)


def fuse(parameters: Iterable[nn.Parameter]) -> None:
    """
    Let each backward add to the parameters' `main_grad` without moving its version counter.

    Fused kernels that multiply and add, and replayed graphs, do the same.
    """

    def added(parameter: Any, gradient: Tensor) -> Tensor:
        parameter.main_grad.data.add_(gradient)
        parameter.grad_added_to_main_grad = True
        return torch.zeros_like(gradient)

    for parameter in parameters:
        parameter.register_hook(partial(added, parameter))


def data(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets, `[sequence, microbatch, width]` each."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x, y = (torch.randn(SEQUENCE, ROWS, WIDTH, generator=generator) for _ in range(2))
        yield x, y


def loss_of(target: Tensor, *, counts: bool = False) -> Any:
    """Return the loss function of a microbatch, as a forward step returns it."""

    def loss(output: Tensor) -> tuple[Any, ...]:
        found = nn.functional.mse_loss(output, target)
        said = {"loss": found.detach().clone()}
        return (found, torch.tensor(ROWS, dtype=torch.int), said) if counts else (found, said)

    return loss


def digest(value: Tensor) -> str:
    return hashlib.sha256(value.detach().float().numpy().tobytes()).hexdigest()[:12]


class Training:
    """
    A training run on this rank.

    Attributes:
        schedules, p2p, buffers, saves: Megatron-core's modules, which a fault may change.
        model: The chunks, in the form that the loop takes.
        config: The configuration of the chunks.
        optimizer: The optimizer.
        microbatches: Number of microbatches of a step.
        data: An iterator for each chunk.
        number: Number of the step.
    """

    schedules: Any
    p2p: Any
    buffers: Any
    saves: Any
    config: Any
    model: list[Any]
    optimizer: Any
    microbatches: int
    data: list[Iterator[tuple[Tensor, Tensor]]]
    number = 0

    def forward_step(self, batches: Any, model: Any) -> tuple[Tensor, Any]:
        x, y = next(batches)
        counts = getattr(self.config, "calculate_per_token_loss", False)
        return model(x), loss_of(y, counts=counts)

    def zero(self) -> None:
        for chunk in self.model:
            if hasattr(chunk, "zero_grad_buffer"):
                chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def loop(self, *, forward_only: bool = False) -> list[dict[str, Tensor]]:
        several = len(self.model) > 1
        run = self.schedules.get_forward_backward_func()
        found: list[dict[str, Tensor]] = run(
            forward_step_func=self.forward_step,
            data_iterator=self.data if several else self.data[0],
            model=self.model if several else self.model[0],
            num_microbatches=self.microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=ROWS,
            forward_only=forward_only,
        )
        return found

    def step(self) -> list[str]:
        """Train one step; return the bits of its losses and of the weights after the step."""
        self.zero()
        losses = self.loop()
        self.update()
        self.number += 1
        return [
            *(float(each["loss"]).hex() for each in losses),
            *(digest(p) for chunk in self.model for p in chunk.parameters()),
        ]

    def update(self) -> None:
        self.optimizer.step()
