"""
A language model head that computes as TorchAO's `Float8Linear` with dynamic scaling, with dI and dW
split, for every backend.

Each action casts the operands that it reads, each with a scale from its own amax. Casts and
products are the library's own functions in the library's own order, and its full backward
(`Float8Linear`) is the oracle.

dI casts the weight again, as the library does, since the cast of F is not kept. dW multiplies F's
cast of the input by dI's cast of the output gradient. The library would cast both again, with the
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
    The parts of TorchAO that are used, imported on first use.

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
    Final norm and the product over the vocabulary, of operands in FP8.

    On a CPU the library emulates its products: operands in float8, multiplied in fp32.

    Args:
        config: Dimensions and type.
        vocabulary: Rows of the product.
        device: Device of the parameters.
        seed: Seed of the matrix, which is drawn on the CPU so that devices agree.

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
        """The library's own module."""
        logits: Tensor = torch.func.functional_call(self._whole[0], {"weight": weight}, (x,))
        return logits

    def cast(self, tensor: Tensor, dtype: str, role: str) -> Any:
        """One operand in float8, scaled by its own amax, as the library casts it."""
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
        """None: each microbatch's casts have scales of their own."""
        return None
