"""
An update of Transformer Engine moves the histories of the stages that ran, in whatever order they
ran.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.protocol import StageBackend
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits

HISTORY = 3  # shorter than the microbatches, so that entries leave it
JOB = Job(
    schedule="il", pp=1, vpp=2, microbatches=4, history=HISTORY, config=LayerConfig(128, 256, 2, 64)
)


def warm_stages() -> list[StageBackend]:
    """Two stages of one process, and of one state domain."""
    stages = JOB.stages((0, 1), torch.device("cuda", 0), "transformer-engine", loss=False)
    for stage in stages:
        stage.warm()
    return stages


def state_of(stage: StageBackend, way: str = "") -> dict[str, Tensor]:
    """Clones of a stage's histories and scales, of one direction where one is named."""
    torch.cuda.synchronize()
    held = stage.numerical_state()
    return {name: tensor.clone() for name, tensor in held.items() if way in name}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """The tensors of which a bit differs."""
    assert before.keys() == after.keys() != set()
    return {name for name in before if not same_bits(before[name], after[name])}


def hidden(microbatch: int) -> Tensor:
    """An input whose greatest number grows and falls with its microbatch."""
    g = torch.Generator().manual_seed(microbatch)
    c = JOB.config
    drawn = torch.randn(c.sequence, c.batch, c.hidden, generator=g)
    scaled = drawn * (1.0, 8.0, 2.0, 4.0)[microbatch % 4]
    return scaled.to(device="cuda", dtype=torch.bfloat16).requires_grad_()


def run(stages: Sequence[StageBackend], order: Sequence[tuple[int, int]]) -> list[Tensor]:
    """F of stages and microbatches in an order; outputs by stage and microbatch."""
    outputs = {}
    for index, microbatch in order:
        stage = stages[index]
        (outputs[index, microbatch],) = stage.forward(
            stage.new_tape(microbatch), [hidden(microbatch)]
        )
    torch.cuda.synchronize()
    return [outputs[at].detach() for at in sorted(outputs)]


def test_an_update_leaves_the_histories_of_stages_that_did_not_run() -> None:
    """F of one stage moves its forward histories, and nothing of the other stage."""
    stages = warm_stages()
    run(stages, [(0, 0), (1, 0)])
    own, other = state_of(stages[0]), state_of(stages[1])
    run(stages, [(0, 1)])
    changed = moved(own, state_of(stages[0]))
    assert changed
    assert all(".forward." in name for name in changed), changed
    assert moved(other, state_of(stages[1])) == set()


@pytest.mark.parametrize(
    ("order", "same"),
    [
        ([(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)], True),
        ([(1, 0), (1, 1), (0, 0), (0, 1), (0, 2), (1, 2), (1, 3), (0, 3)], True),
        ([(0, 1), (0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)], False),
    ],
    ids=["alternating", "mixed", "two microbatches of a stage exchanged"],
)
def test_only_the_order_within_a_stage_moves_a_bit(
    order: list[tuple[int, int]], same: bool
) -> None:
    """Against one stage after the other, in microbatch order: outputs, histories and scales."""
    plain = [(stage, m) for stage in range(2) for m in range(4)]
    results = []
    for cells in (plain, order):
        stages = warm_stages()
        outputs = run(stages, cells)
        results.append((outputs, [state_of(stage) for stage in stages]))
    (a, state_a), (b, state_b) = results
    differ = sum(not same_bits(x, y) for x, y in zip(a, b, strict=True))
    differ += sum(len(moved(x, y)) for x, y in zip(state_a, state_b, strict=True))
    assert (differ == 0) is same
