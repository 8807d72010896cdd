"""
The kinds of heads of a language model, by their names in a configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from .dynamic_head import DynamicHead
from .ends import Ends, part_seed
from .layers import LayerConfig
from .split_head import SplitHead

__all__ = ["HEADS", "split_head_of"]

_SPLIT: Final[Mapping[str, type[SplitHead]]] = {"torchao": DynamicHead, "bf16": SplitHead}
HEADS = ("te", *_SPLIT)
"""What computes the head: `te` means the same library as for the layers."""


def split_head_of(
    ends: Ends | None, config: LayerConfig, device: torch.device, seed: int
) -> SplitHead | None:
    """
    Make a stage's head. Return None if the stage has no head, or if the library of the layers
    computes the head.

    Args:
        ends: Which ends of a language model (embedding, head) the stage has.
        config: Dimensions of its layers.
        device: Device of the parameters.
        seed: The model's seed.

    Raises:
        BackendError: The head's library is not installed.
    """
    if ends is None or not ends.head or ends.kind not in _SPLIT:
        return None
    return _SPLIT[ends.kind](config, ends.vocabulary, device, part_seed(seed, 1))
