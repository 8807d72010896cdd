"""What the rank runs in the test of two trainings in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qeffect.gpu_runtime.ranks.membership import join
from qeffect.gpu_runtime.step.memory.arena import Arena
from qeffect.gpu_runtime.training.config_file import read
from qeffect.gpu_runtime.training.loop import Trainer
from tests.ranks.bodies import LIMITS


def over_one_memory(config: str) -> list[str]:
    """
    Open a trainer, a second trainer over the same gradient destinations, and a third trainer after
    the first has ended.

    Returns:
        For each trainer, why it could not be made; empty if it was made.
    """
    arenas: dict[int, Arena] = {}
    allocate = Arena.for_stage

    def again(stage: Any, *given: Any) -> Arena:
        return arenas.setdefault(stage.index, allocate(stage, *given))

    Arena.for_stage = again  # type: ignore[method-assign]
    member, settings = join("cpu", LIMITS), read(Path(config))
    problems, trainers = [], []
    for n in range(3):
        if n == 2:
            trainers.pop(0).close()
        try:
            trainers.append(Trainer(member, settings))
        except Exception as error:
            problems.append(str(error))
        else:
            problems.append("")
    return problems
