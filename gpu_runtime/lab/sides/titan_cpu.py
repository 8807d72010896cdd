"""
Let TorchTitan run without an accelerator, over gloo, in tests and in `report modes`.

TorchTitan asks torch which accelerator is present, and asks that accelerator's module for names,
memory and number of devices. After the first step, TorchTitan shortens the timeouts of process
groups, which needs a barrier that gloo lacks. Stand-ins answer these calls; they change no
computation. The debug model gets an attention whose backward runs on a CPU, and random tokens as
data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
from torch import Tensor

__all__ = ["install", "on_a_cpu"]

_TOKENS, _LENGTH = 2048, 16


def install() -> None:
    """Install stand-ins for an accelerator. Call this function before TorchTitan is imported."""
    utils: Any = torch._utils
    cpu: Any = torch.cpu
    utils._get_available_device_type = lambda: "cpu"
    utils._get_device_module = lambda name: getattr(torch, name)
    cpu.get_device_name = lambda device=None: "cpu"
    cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 34)
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_, **__: None
    cpu.memory_stats = lambda device=None: {}
    cpu.device_count = lambda: 64

    import torchtitan.distributed.utils as distributed

    distributed.set_pg_timeouts = lambda timeout, parallel_dims: None


def on_a_cpu(config: Any) -> Any:
    """
    Return a configuration of Llama's debug model with data and attention that work on a CPU.

    Args:
        config: A `Trainer.Config` of TorchTitan's `llama3_debugmodel`, which is changed in place.
    """
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models.common.attention import ScaledDotProductAttention

    class Words(BaseTokenizer):  # type: ignore[misc]
        """A tokenizer that is never used, because the data are already tokens."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):  # type: ignore[misc]
            """The tokenizer's options; the tokenizer needs none."""

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()
            self.config = config

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return _TOKENS

    class Generated(BaseDataLoader):  # type: ignore[misc]
        """Batches of random tokens, different on each replica, but the same in each run."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):  # type: ignore[misc]
            """
            The option `infinite`, which TorchTitan's validator sets. The batches never end, so the
            option has no effect.
            """

            infinite: bool = True

        def __init__(self, config: Any, *, dp_rank: int, local_batch_size: int, **_: Any) -> None:
            self.config = config
            self._rows, self._generator = local_batch_size, torch.Generator().manual_seed(dp_rank)

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                size = (self._rows, _LENGTH + 1)
                tokens = torch.randint(0, _TOKENS, size, generator=self._generator)
                places = torch.arange(_LENGTH).expand(self._rows, _LENGTH)
                yield {"input": tokens[:, :-1].contiguous(), "positions": places}, tokens[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {"generator": self._generator.get_state()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self._generator.set_state(state_dict["generator"])

    for layer in config.model_spec.model.layers:  # flex attention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training = replace(
        config.training,
        local_batch_size=8,
        seq_len=_LENGTH,
        steps=3,
        disable_cuda_graphs=True,
        mixed_precision_param="float32",
    )
    config.tokenizer, config.dataloader = Words.Config(), Generated.Config()
    config.debug = replace(
        config.debug, seed=7, deterministic=True, enable_structured_logging=False
    )
    config.checkpoint.enable = config.validator.enable = False
    config.validator.dataloader = Generated.Config()
    config.activation_checkpoint = None
    return config
