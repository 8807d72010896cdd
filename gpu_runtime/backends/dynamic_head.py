"""
A language model head for every backend. It computes the same as TorchAO's `Float8Linear` with
dynamic scaling, but dI (input gradient) and dW (weight gradient) are separate.

F and dI cast the operands that they read. The scale of an operand is computed from the operand's
own amax (largest absolute value). Casts and products are TorchAO's own functions in TorchAO's own
order. The tests compare the bits of the results with the full backward of `Float8Linear`.

F's cast of the weight is not kept, so dI casts the weight again, as TorchAO does. dW multiplies F's
cast of the input by dI's cast of the output gradient. TorchAO would cast both operands again, with
the same result.
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
    Import TorchAO on first use, and return the functions and types that this module uses.

    Raises:
        BackendError: TorchAO is not installed, or lacks a name that this module uses.
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

    On a CPU, TorchAO emulates its matrix products: float8 operands are multiplied in fp32.

    Args:
        config: Dimensions and dtype of the layers.
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
        """
        None, because the casts of different microbatches have different scales and cannot be
        joined.
        """
        return None
