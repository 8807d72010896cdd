"""The loop in the README, run unchanged."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from qeffect import gpu_runtime
from qeffect.gpu_runtime.backends.protocol import matrices
from qeffect.gpu_runtime.backends.te.domain import TransformerEngineDomain
from qeffect.gpu_runtime.backends.te.stage import TransformerEngineStage
from qeffect.gpu_runtime.runtime import RuntimeConfig
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits

TEXT = (Path(gpu_runtime.__file__).parent / "README.md").read_text(encoding="utf-8")


def test_the_documented_loop_trains() -> None:
    """The documented embedding trains: two epochs pass, and every matrix moves."""
    found = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    setting, runtime, loop = found[1].partition("runtime = ")
    names: dict[str, Any] = {}
    exec(setting, names)
    stages = names["stages"]
    before = [m.parameter.detach().clone() for stage in stages for m in matrices(stage)]

    exec(runtime + loop, names)

    assert 2 == names["runtime"].epoch
    after = [m.parameter for stage in stages for m in matrices(stage)]
    moved = [not same_bits(a, b) for a, b in zip(before, after, strict=True)]
    assert all(moved)
    assert len(moved) == 8


def test_the_documented_stages_of_the_library_take_what_is_said() -> None:
    """Names and arguments, without the library; not asked to, a runtime captures nothing."""
    said = re.findall(r"`(TransformerEngine\w+)\(\s*(.*?)\)`", TEXT, re.DOTALL)
    assert ["TransformerEngineDomain", "TransformerEngineStage"] == [name for name, _ in said]
    for kind, (_, arguments) in zip(
        (TransformerEngineDomain, TransformerEngineStage), said, strict=True
    ):
        placed = eval(f"lambda call, index, domain, config: call({arguments})")
        placed(inspect.signature(kind).bind, 0, None, None)
    assert RuntimeConfig().mode == "eager"


def test_readme_loop_is_short() -> None:
    """Embedding takes about ten lines of the user's loop."""
    loop = TEXT.split("optimizer = Optimizer(stages)\n")[1].split("```")[0]

    assert len(loop.strip().splitlines()) <= 12
