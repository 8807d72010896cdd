"""The runs of the tests, as TorchTitan's configurations: a small Llama, and data from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

__all__ = ["configuration", "on_a_cpu"]

TOKENS, LENGTH = 2048, 16


class Words(BaseTokenizer):  # type: ignore[misc]
    """A tokenizer that nothing asks: the data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """No options."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.config = config

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return TOKENS


class Generated(BaseDataLoader):  # type: ignore[misc]
    """Batches of random tokens, other ones on each replica, the same ones in each run."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """What the validator sets; the batches never end."""

        infinite: bool = True

    def __init__(self, config: Any, *, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.config = config
        self._rows, self._generator = local_batch_size, torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            size = (self._rows, LENGTH + 1)
            tokens = torch.randint(0, TOKENS, size, generator=self._generator)
            places = torch.arange(LENGTH).expand(self._rows, LENGTH)
            yield {"input": tokens[:, :-1].contiguous(), "positions": places}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._generator.set_state(state_dict["generator"])


def on_a_cpu(config: Any) -> Any:
    """Return a configuration of Llama's debug model with data and attention that a CPU has."""
    for layer in config.model_spec.model.layers:  # flex attention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training = replace(
        config.training,
        local_batch_size=8,
        seq_len=LENGTH,
        steps=3,
        disable_cuda_graphs=True,
        mixed_precision_param="float32",
    )
    config.tokenizer, config.dataloader = Words.Config(), Generated.Config()
    config.debug = replace(
        config.debug, seed=7, deterministic=True, enable_structured_logging=False
    )
    config.checkpoint.enable = config.validator.enable = False
    config.activation_checkpoint = None
    return config


def configuration(case: dict[str, Any], folder: str) -> Any:
    """
    Return the configuration of a run.

    Args:
        case: ``schedule``, and where they differ from the default ``stages`` (ranks of the
            pipeline), ``shards``, ``microbatches``, ``walks``, ``steps``, ``layers``,
            ``recompute``, ``validate`` and ``save``.
        folder: Where the run may write.
    """
    config = on_a_cpu(llama3_debugmodel())
    config.model_spec.model.layers = config.model_spec.model.layers[: case.get("layers", 4)]
    microbatches, shards = case.get("microbatches", 8), case.get("shards", 1)
    config.training = replace(
        config.training,
        local_batch_size=microbatches,
        global_batch_size=microbatches * shards * case.get("walks", 1),
        steps=case.get("steps", 3),
    )
    config.parallelism = replace(
        config.parallelism,
        pipeline_parallel_degree=case.get("stages", 2),
        pipeline_parallel_schedule=case["schedule"],
        data_parallel_shard_degree=shards,
    )
    config.dump_folder = folder
    config.checkpoint.enable = bool(case.get("save"))
    config.checkpoint.interval = 1
    config.validator.enable = bool(case.get("validate"))
    config.validator.freq, config.validator.steps = 1, 1
    config.validator.dataloader = Generated.Config()
    if case.get("recompute"):
        config.activation_checkpoint = SelectiveAC.Config()
    return config
