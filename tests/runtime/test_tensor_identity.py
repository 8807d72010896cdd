"""
The identity of destinations: when a destination counts as changed, with torch's guards and without.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.step.memory import tensor_identity
from qeffect.gpu_runtime.step.memory.tensor_identity import TensorIdentity


@pytest.fixture(params=["guards", "attributes"])
def identity(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., TensorIdentity]:
    """An identity as torch's guards make it, and as a torch without them does."""
    if request.param == "attributes":
        monkeypatch.setattr(tensor_identity, "_guard", lambda _: None)
    return TensorIdentity


def _moved(tensor: Tensor) -> None:
    tensor.data = tensor.clone()


def _reshaped(tensor: Tensor) -> None:
    tensor.data = tensor.data.view(2, 6)


def _of_another_type(tensor: Tensor) -> None:
    tensor.data = tensor.data.view(torch.float16)


class TestLook:
    def test_nothing_changed(self, identity: Callable[..., TensorIdentity]) -> None:
        """Values may change, and who looks may be in any mode; neither is a change."""
        tensors = [torch.zeros(3, 4, dtype=torch.bfloat16) for _ in range(3)]
        seen = identity(tensors)
        tensors[1].fill_(2)

        assert seen.unchanged()
        with torch.no_grad():
            assert seen.unchanged()
        with torch.inference_mode():
            assert seen.unchanged()

    @pytest.mark.parametrize("change", [_moved, _reshaped, _of_another_type])
    @pytest.mark.parametrize("which", [0, 2])
    def test_one_changed(
        self, change: Callable[[Tensor], None], which: int, identity: Callable[..., TensorIdentity]
    ) -> None:
        """One tensor that moved, or that has another shape or type at its address."""
        tensors = [torch.zeros(3, 4, dtype=torch.bfloat16) for _ in range(3)]
        seen = identity(tensors)
        change(tensors[which])

        assert not seen.unchanged()

    def test_a_change_that_matters_to_a_compiler_alone(
        self, identity: Callable[..., TensorIdentity]
    ) -> None:
        """Whether autograd follows a tensor does not change its identity."""
        tensors = [torch.zeros(3, 4)]
        seen = identity(tensors)
        tensors[0].requires_grad_(True)

        assert seen.unchanged()

    def test_of_nothing(self, identity: Callable[..., TensorIdentity]) -> None:
        """The library's own memory has no destinations, which never change."""
        assert identity([]).unchanged()
