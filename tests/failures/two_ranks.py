"""
One rank of a plain torch pipeline: each schedule without and with deferred receives.

    python -m tests.failures.two_ranks RANK PORT FOLDER

`test_torch_deferred_receives.py` starts this module twice. The module uses no code of QEffect: the
model is a `torch.nn.Module`, the pipeline is torch's own (`PipelineStage` and a schedule class),
and the ranks are two CPU processes over gloo. The results of a rank go to `FOLDER/rank<RANK>.pt`.
"""

from __future__ import annotations

import datetime
import inspect
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

RANKS, NUM_STAGES, MICROBATCHES = 2, 4, 4
#: The stages of each rank, by schedule class.
STAGES = {
    "ScheduleZBVZeroBubble": ((0, 3), (1, 2)),
    "ScheduleInterleavedZeroBubble": ((0, 2), (1, 3)),
}
#: Rows of one microbatch, and features: of every activation and so of every gradient.
ROWS, WIDTH = 2, 16
#: Seconds that a rank waits for the other one before it raises.
PATIENCE = 30


def module_of(stage: int) -> torch.nn.Module:
    """The module of a stage, the same in every process."""
    torch.manual_seed(stage)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)
    )


class Stage(PipelineStage):
    """torch's pipeline stage, without messages from this rank to itself."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """
        Leave out messages of this rank to itself, which gloo cannot send.

        Before its first step torch 2.11 exchanges a number with the rank of each neighbouring stage
        to open connections. Under ZB-V a neighbouring stage can be on this rank itself, which needs
        no connection.
        """
        own = self.group_rank
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != own]


def batch() -> tuple[Tensor, Tensor]:
    """Input and target of a step, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    shape = MICROBATCHES * ROWS, WIDTH
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The loss of one microbatch."""
    return (output - target).pow(2).mean()


def step(cls: str, rank: int, *, defer: bool) -> dict[str, Any]:
    """
    One step of a schedule on this rank.

    Args:
        cls: The schedule class.
        rank: This rank.
        defer: Value of torch's option `defer_pp_recv`.

    Returns:
        `table` has the rows that torch executed on all ranks, entry by entry. `losses` has the loss
        of each microbatch, on the rank of the last stage. `gradients` has the gradients by stage
        and parameter.
    """
    own = STAGES[cls][rank]
    group = dist.new_group(list(range(RANKS)), timeout=datetime.timedelta(seconds=PATIENCE))
    example = torch.zeros(ROWS, WIDTH)
    stages = [
        Stage(
            module_of(stage),
            stage,
            NUM_STAGES,
            example.device,
            input_args=example.clone().requires_grad_(stage > 0),
            output_args=example.clone().requires_grad_(),
            group=group,
        )
        for stage in own
    ]
    # The option is named only where it is asked for: the other run is torch's default.
    options = {"defer_pp_recv": True} if defer else {}
    schedule = getattr(schedules, cls)(stages, MICROBATCHES, loss_fn=loss_of, **options)
    data, target = batch()
    losses: list[Tensor] = []
    schedule.step(*((data,) if 0 in own else ()), target=target, losses=losses)
    order = schedule.pipeline_order_with_comms
    return {
        "table": [[str(action) for action in order[peer]] for peer in range(RANKS)],
        "losses": [loss.detach() for loss in losses],
        "gradients": {
            stage.stage_index: {n: p.grad for n, p in stage.submod.named_parameters()}
            for stage in stages
        },
    }


def main(rank: int, port: int, folder: Path) -> None:
    """Run every schedule without and with deferred receives, and save the results of this rank."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=PATIENCE)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=patience)
    seen: dict[tuple[str, bool], dict[str, Any]] = {}
    for cls in STAGES:
        known = inspect.signature(getattr(schedules, cls)).parameters
        for defer in (False, True) if "defer_pp_recv" in known else (False,):
            print(f"rank {rank}: {cls} defer_pp_recv={defer}", flush=True)
            seen[cls, defer] = step(cls, rank, defer=defer)
    torch.save(seen, folder / f"rank{rank}.pt")
    dist.destroy_process_group()
    print(f"rank {rank}: done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
