"""
A language model head for every backend, which computes the same as TorchAO's `Float8Linear` with
dynamic scaling, but with dI and dW split.

F and dI cast the operands that they read; each operand's scale comes from the operand's own
amax. Casts and products are TorchAO's own functions in TorchAO's own order. The tests compare the
bits with the full backward of `Float8Linear`.

dI casts the weight again, as TorchAO does, since the cast of F is not kept. dW multiplies F's cast
of the input by dI's cast of the output gradient. TorchAO would cast both operands again, with the
same values.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .layers import LayerConfig
from .protocol import BackendError
from .split_head import Join, SplitHead

__all__ = ["DynamicHead", "library"]


@cache
def library() -> SimpleNamespace:
    """
    Import TorchAO on first use, and return the parts that are used here.

    Raises:
        BackendError: TorchAO is not installed, or lacks a name that is used here.
    """
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole
    except (ImportError, OSError) as error:
        raise BackendError(
            f"TorchAO cannot be imported ({error}); install 'qeffect[torchao]', or use another head"
        ) from error
    return SimpleNamespace(
        Config=Float8LinearConfig,
        Linear=Float8Linear,
        cast=hp_tensor_to_float8_dynamic,
        Role=GemmInputRole,
    )


class DynamicHead(SplitHead):
    """
    The final norm, and the product over the vocabulary with operands in FP8.

    On a CPU TorchAO emulates its products: operands in float8 are multiplied in fp32.

    Args:
        config: Dimensions and type.
        vocabulary: Number of tokens in the vocabulary: the rows of the head's matrix.
        device: Device of the parameters.
        seed: Seed of the initial matrix, which is drawn on the CPU so that all devices get the same
            bits.

    Raises:
        BackendError: TorchAO is not installed.
    """

    def __init__(
        self, config: LayerConfig, vocabulary: int, device: torch.device, seed: int
    ) -> None:
        self._lib = library()
        super().__init__(config, vocabulary, device, seed)
        linear = torch.nn.Linear(config.hidden, vocabulary, bias=False, device="meta")
        # Not a submodule: it shares this module's weight, which must be named only once.
        self._whole = (
            self._lib.Linear.from_float(linear, self._lib.Config(emulate=device.type == "cpu")),
        )

    def whole(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute with TorchAO's own module."""
        logits: Tensor = torch.func.functional_call(self._whole[0], {"weight": weight}, (x,))
        return logits

    def cast(self, tensor: Tensor, dtype: str, role: str) -> Any:
        """Cast one operand to float8, scaled by its own amax, as TorchAO casts it."""
        config = self._whole[0].config
        granted = getattr(config, f"cast_config_{dtype}")
        return self._lib.cast(
            tensor,
            granted.target_dtype,
            self._whole[0].linear_mm_config,
            gemm_input_role=self._lib.Role[role],
            scaling_granularity=granted.scaling_granularity,
            round_scales_to_power_of_2=config.round_scales_to_power_of_2,
        )

    @property
    def join(self) -> Join | None:
        """None, because the casts of each microbatch have separate scales and cannot be joined."""
        return None
