"""
TorchTitan's Llama debug model in one of the trainer's modes, on a CPU, for `report modes`.

TorchTitan's own trainer takes the steps. The initial weights depend only on a parameter's name, not
on the division into stages.
"""

from __future__ import annotations

import copy
import hashlib
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .mode_runs import layout_of

__all__ = ["TitanRun"]

_LAYERS = 8
#: The parts that wrappers of recomputation and compilation add to a parameter's name.
_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")


class TitanRun:
    """A model under TorchTitan's trainer; see `ModeRun`."""

    def __init__(self, row: Mapping[str, Any], device: torch.device) -> None:
        self.row, self.device = row, device
        self.folder = tempfile.TemporaryDirectory(prefix="qeffect-titan-")
        self.config = _configuration(row, self.folder.name)
        self.trainer: Any = None
        self.losses: list[float] = []

    def guard(self) -> Any:
        from qeffect.guards import torchtitan

        self.config.model_spec = torchtitan.guarded(self.config.model_spec)
        self._build()
        return torchtitan.guard_of(self.trainer)

    def step(self) -> list[float]:
        if self.trainer is None:
            self._build()
        trainer = self.trainer
        self.losses.clear()
        trainer.step += 1
        trainer.train_step(self.data)
        if self.row["validate"] and trainer.validator.should_validate(trainer.step):
            trainer.validator.validate(trainer.model_parts, trainer.step)
        return list(self.losses) if trainer.pp_has_last_stage else []

    def gradients(self) -> Mapping[str, Tensor]:
        return {name: _local(p.grad) for name, p in self.named.items() if p.grad is not None}

    def parameters(self) -> Mapping[str, Tensor]:
        return {name: _local(p) for name, p in self.named.items()}

    def close(self) -> None:
        self.trainer.close()
        self.folder.cleanup()

    def _build(self) -> None:
        self.trainer = trainer = self.config.build()
        self.named = {
            _WRAPPERS.sub("", name): parameter
            for part in trainer.model_parts
            for name, parameter in part.named_parameters()
        }
        with torch.no_grad():
            for name, parameter in self.named.items():
                if parameter.dim() > 1:
                    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
                    generator = torch.Generator().manual_seed(number)
                    own = _local(parameter)
                    own.copy_(0.02 * torch.randn(own.shape, generator=generator))
        self.data = trainer.batch_generator(trainer.dataloader)
        once = trainer.forward_backward_step

        def forward_backward_step(**given: Any) -> Tensor:
            loss: Tensor = once(**given)
            self.losses.append(float(loss))
            return loss

        trainer.forward_backward_step = forward_backward_step


def _local(value: Any) -> Tensor:
    found: Tensor = getattr(value, "_local_tensor", value)
    return found


def _configuration(row: Mapping[str, Any], folder: str) -> Any:
    """The trainer's configuration of a row."""
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from .titan_cpu import on_a_cpu

    config = on_a_cpu(llama3_debugmodel())
    layers = config.model_spec.model.layers
    while len(layers) < _LAYERS:
        layers.append(copy.deepcopy(layers[0]))
    del layers[_LAYERS:]
    pp, _ = layout_of(row)
    microbatches = 2 * pp
    config.training = replace(
        config.training,
        local_batch_size=microbatches,
        global_batch_size=microbatches * row["walks"],
        steps=8,  # the rate falls to zero behind the steps that are run
        max_norm=1e9,  # a factor would follow from the order of a sum over the cut
    )
    config.parallelism = replace(
        config.parallelism,
        pipeline_parallel_degree=pp,
        pipeline_parallel_schedule=row["schedule"],
    )
    config.dump_folder = folder
    if row["loss"] == "whole":
        config.loss = config.loss.loss_fn
    config.validator.enable = row["validate"]
    config.validator.freq, config.validator.steps = 1, 1
    kinds = {"selective": SelectiveAC, "full": FullAC}
    if row["recompute"] in kinds:
        config.activation_checkpoint = kinds[row["recompute"]].Config()
    if row["compile"] != "off":
        config.compile = CompileConfig(enable=True, components=["model"], backend=row["compile"])
    return config
