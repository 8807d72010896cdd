"""
A stand-in for TorchTitan: its specification, its container of optimizers and its training step.

One process is the whole pipeline, with the schedules of the installed torch. The stand-in package
has TorchTitan's name and release, so that the guard accepts its specification as TorchTitan's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.ranks.guard_bodies import WIDTH, Run

__all__ = ["ModelSpec", "Optimizers", "Training", "spec_of"]

PACKAGE = "torchtitan_stand_in"


@dataclass
class ModelSpec:
    """The fields that the guard replaces, and one field that the guard passes on."""

    name: str
    pipelining_fn: Callable[..., Any] | None
    post_optimizer_build_fn: Callable[..., Any] | None


def _as_of(release: str) -> None:
    package = ModuleType(PACKAGE)
    package.__version__ = release  # type: ignore[attr-defined]
    sys.modules[PACKAGE] = package
    ModelSpec.__module__ = f"{PACKAGE}.protocols.model_spec"


class Optimizers(Optimizer):
    """TorchTitan's container: an optimizer per part of the model, updated together."""

    def __init__(self, parts: list[nn.Module], kind: str) -> None:
        make: dict[str, Callable[[Any], Optimizer]] = {
            "fused": lambda own: torch.optim.AdamW(own, lr=0.1, fused=True),
            "foreach": lambda own: torch.optim.AdamW(own, lr=0.1, foreach=True),
            "plain": lambda own: torch.optim.SGD(own, lr=0.1, foreach=False),
            "fused without state": lambda own: torch.optim.SGD(own, lr=0.1, fused=True),
        }
        self.optimizers = [make[kind](list(part.parameters())) for part in parts]
        super().__init__([p for part in parts for p in part.parameters()], {})

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def spec_of(schedule: str, *, release: str = "0.3.0", **options: Any) -> ModelSpec:
    """Return the specification of a model with a pipeline of one rank."""
    _as_of(release)

    def pipelining_fn(_: Any, **__: Any) -> tuple[Any, list[nn.Module], bool, bool]:
        run = Run(schedule, ranks=1, **options)
        return run.schedule, run.blocks, True, True

    return ModelSpec("stand-in", pipelining_fn, None)


class Training:
    """
    What TorchTitan's trainer does with a specification, and a training step.

    Args:
        spec: The specification.
        walks: Number of runs of the schedule per update.
        optimizer: Kind of the optimizers; see `Optimizers`.
        declared: Whether the trainer states the number of runs per update.
    """

    def __init__(
        self, spec: Any, *, walks: int = 1, optimizer: str = "fused", declared: bool = True
    ) -> None:
        local, whole = 8, -1 if walks == 1 else 8 * walks
        training = SimpleNamespace(local_batch_size=local, global_batch_size=whole)
        self.pp_schedule, self.model_parts, *_ = spec.pipelining_fn(
            None,
            training=training if declared else SimpleNamespace(),
            parallel_dims=SimpleNamespace(dp_enabled=False),
        )
        schedule = getattr(self.pp_schedule, "schedule", self.pp_schedule)
        self.stages = getattr(schedule, "_stages", None) or [schedule._stage]
        self.optimizers = Optimizers(self.model_parts, optimizer)
        if spec.post_optimizer_build_fn is not None:
            spec.post_optimizer_build_fn(self.optimizers, self.model_parts, None)
        self.walks, self.rows = walks, 2 * schedule._n_microbatches
        self.between: Callable[[], object] = lambda: None
        self.steps = 0

    def zero_grad(self) -> None:
        self.optimizers.zero_grad()

    def walk(self) -> None:
        """Run the schedule once."""
        x, y = (torch.randn(self.rows, WIDTH, generator=self._data) for _ in range(2))
        self.pp_schedule.step(x, target=y, losses=self.losses)

    def update(self) -> None:
        nn.utils.clip_grad_norm_([p for m in self.model_parts for p in m.parameters()], 1.0)
        self.optimizers.step()

    def train_step(self) -> list[bytes]:
        """Run a step; return the bits of its last losses and of all parameters."""
        self._data = torch.Generator().manual_seed(self.steps)
        self.steps += 1
        self.losses: list[Tensor] = []
        self.zero_grad()
        for number in range(self.walks):
            if number:
                self.between()
            self.walk()
        self.update()
        values = [*self.losses, *(p for m in self.model_parts for p in m.parameters())]
        return [value.detach().numpy().tobytes() for value in values]

    def validate(self) -> None:
        x = torch.ones(self.rows, WIDTH)
        with torch.no_grad():
            self.pp_schedule.eval(x, target=x)
