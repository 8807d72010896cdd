"""The README's loop, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from qeffect import gpu_runtime
from qeffect.gpu_runtime.backends.protocol import matrices
from qeffect.gpu_runtime.memory.state import same_bits
from qeffect.gpu_runtime.plan.order import Order

from .helpers import TINY, reference_stages


def test_the_documented_loop_trains() -> None:
    """The documented embedding trains: two epochs pass, and every matrix moves."""
    text = (Path(gpu_runtime.__file__).parent / "README.md").read_text()
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    order = Order.parse("0F0 0I0 0W0 0F1 0I1 0W1 1F0 1I0 1W0 1F1 1I1 1W1")
    stages = reference_stages(order, 4, TINY)
    before = [m.parameter.detach().clone() for stage in stages for m in matrices(stage)]
    shape = 16, 1, 32
    epoch = [(torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()) for _ in range(2)]
    names: dict[str, Any] = {"stages": stages, "order": order, "data": [epoch, epoch]}

    exec(found[1], names)

    assert 2 == names["runtime"].epoch
    after = [m.parameter for stage in stages for m in matrices(stage)]
    moved = [not same_bits(a, b) for a, b in zip(before, after, strict=True)]
    assert all(moved)


def test_readme_loop_is_short() -> None:
    """Embedding takes about ten lines of the user's loop."""
    text = (Path(gpu_runtime.__file__).parent / "README.md").read_text()
    loop = text.split("optimizer = Optimizer(stages)\n")[1].split("```")[0]

    assert len(loop.strip().splitlines()) <= 12
