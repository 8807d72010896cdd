"""
The small models of `report modes`: toy layers, and a model of such layers under a schedule of
torch's pipeline.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["LAYERS", "RATE", "ROWS", "WIDTH", "Block", "ModeRun", "TorchRun", "layout_of"]

ROWS, WIDTH, RATE = 2, 8, 0.05
#: Layers per pipeline rank, one for each of two virtual stages.
LAYERS = 2
_SINGLE, _V = ("GPipe", "1F1B"), ("ZBVZeroBubble", "DualPipeV")


class ModeRun(Protocol):
    """A small model in one mode of a framework, on this rank."""

    def guard(self) -> Any:
        """
        Attach a guard that reports violations without raising errors; called before the first step.
        """

    def step(self) -> list[float]:
        """Train a step; return the losses of the microbatches on the rank that has losses."""

    def gradients(self) -> Mapping[str, Tensor]:
        """
        The gradients of the last step by the model's names; empty if no rank has whole gradients.
        """

    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters after the last step, by the model's names."""

    def close(self) -> None:
        """Restore the process to its state before the run."""


def layout_of(row: Mapping[str, Any]) -> tuple[int, int]:
    """Number of pipeline ranks and of replicas: `pp2 dp2` gives 2 and 2."""
    sizes = [int(part.lstrip("pd")) for part in row["layout"].split()]
    return sizes[0], sizes[1] if len(sizes) > 1 else 1


class Block(nn.Module):
    """A layer whose backward has more than one matrix product."""

    def __init__(self, index: int, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear, self.norm, self.recompute = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), False
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            from torch.utils.checkpoint import checkpoint

            found: Tensor = checkpoint(self._forward, x, use_reentrant=False)
            return found
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.norm(self.linear(x)))
        return found


class TorchRun:
    """A model under a schedule of `torch.distributed.pipelining`; see `ModeRun`."""

    def __init__(self, row: Mapping[str, Any], device: torch.device) -> None:
        from torch.distributed import config
        from torch.distributed.pipelining import PipelineStage, schedules

        self.row, self.device, self.number = row, device, 0
        pp, replicas = layout_of(row)
        rank = dist.get_rank()
        self.replica, place = divmod(rank, pp)
        pipelines = [dist.new_group([r * pp + p for p in range(pp)]) for r in range(replicas)]
        across = [dist.new_group([r * pp + p for r in range(replicas)]) for p in range(pp)]
        single = row["schedule"] in _SINGLE
        total = pp if single else 2 * pp
        own = (
            [place]
            if single
            else [place, total - 1 - place if row["schedule"] in _V else place + pp]
        )
        each = LAYERS * pp // total
        self.microbatches = 2 * pp
        self.ends = 0 in own, total - 1 in own
        self.named: dict[str, nn.Parameter] = {}
        flag = {"edge": "pipeline_per_edge_p2p", "direction": "pipeline_per_direction_p2p"}.get(
            row["queues"]
        )
        if flag is not None:
            setattr(config, flag, True)
        stages = []
        for index in own:
            blocks = [Block(index * each + n, row["recompute"]) for n in range(each)]
            for n, block in enumerate(blocks):
                prefix = f"{self.replica}/{index * each + n}"
                self.named |= {f"{prefix}.{k}": p for k, p in block.named_parameters()}
            part: nn.Module = nn.Sequential(*blocks).to(device)
            if replicas > 1:
                part = nn.parallel.DistributedDataParallel(part, process_group=across[place])
            x = torch.zeros(ROWS, WIDTH, device=device)
            shapes: dict[str, Any] = {}
            if row["shapes"] == "given":
                shapes = {"input_args": x.clone().requires_grad_(index > 0),
                          "output_args": x.clone().requires_grad_()}  # fmt: skip
                if "input_grads" in inspect.signature(PipelineStage).parameters:
                    shapes |= {"input_grads": x if index else None,
                               "output_grads": x if index < total - 1 else None}  # fmt: skip
            stages.append(
                PipelineStage(part, index, total, device, group=pipelines[self.replica], **shapes)
            )
        options = {
            name: row[name] for name in ("defer_pp_recv", "max_outstanding_sends") if row[name]
        }
        self.schedule = getattr(schedules, f"Schedule{row['schedule']}")(
            stages[0] if single else stages,
            self.microbatches,
            loss_fn=nn.functional.mse_loss,
            scale_grads=row["scale_grads"],
            **options,
        )
        if flag is not None:
            setattr(config, flag, False)
        self.optimizer = torch.optim.SGD(self.named.values(), lr=RATE, momentum=0.9)

    def guard(self) -> Any:
        from qeffect.guards import pipelining

        guarded = pipelining.guard(self.schedule, manner="report")
        if self.row["walks"] > 1:
            guarded.follow_optimizer(self.optimizer, walks=self.row["walks"])
        return guarded

    def step(self) -> list[float]:
        found: list[float] = []
        self.optimizer.zero_grad()
        for walk in range(self.row["walks"]):
            generator = torch.Generator().manual_seed(self.number * 100 + walk * 10 + self.replica)
            size = self.microbatches * ROWS, WIDTH
            x, y = (torch.randn(*size, generator=generator).to(self.device) for _ in range(2))
            losses: list[Tensor] = []
            self.schedule.step(*((x,) if self.ends[0] else ()), target=y, losses=losses)
            found += [float(loss) for loss in losses] if self.ends[1] else []
        self.optimizer.step()
        self.number += 1
        return found

    def gradients(self) -> Mapping[str, Tensor]:
        return {name: p.grad for name, p in self.named.items() if p.grad is not None}

    def parameters(self) -> Mapping[str, Tensor]:
        return self.named

    def close(self) -> None:
        """Do nothing: the next run makes its own stages."""
