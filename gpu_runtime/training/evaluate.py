"""
The loss on held-out text between two steps: F alone, and nothing of the training moves.

Every window is run with the scales of the last commit, whatever was run before it, so that the
figure does not depend on how many there are or on which rank has them. Hidden states go from rank
to rank over the host: an evaluation is rare, and needs no connections of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ..backends.protocol import BackendError, StageBackend
from ..ranks.worker import Worker
from ..ranks.world import Member, gathered
from ..step.memory.numerical_state import Snapshot, live_state
from .data import Loader
from .model import Language

__all__ = ["PlacedStages", "evaluate", "mean_loss"]

#: What `torch.nn.functional.cross_entropy` leaves out of its mean.
_NOT_COUNTED = -100


def evaluate(worker: Worker, job: Language, held_out: Loader, windows: int) -> float:
    """
    The mean negative log likelihood a token of held-out windows; every rank calls it.

    Args:
        worker: Between two steps.
        job: What it trains.
        held_out: The text; its first windows in the file's order are taken.
        windows: How many, rounded up to whole microbatches, and no more than there are; each
            counts once, also where those that there are fill no whole microbatch.

    Raises:
        Refused: Something of a step is live.
        BackendError: A message between ranks was lost.
    """
    table = worker.table
    placed = PlacedStages(
        worker.member,
        worker.runtime.stages,
        [worker.ranks[table.stage_to_rank[index]] for index in range(table.num_stages)],
        worker.replica,
    )
    with worker.runtime.apart():
        return mean_loss(placed, job, held_out, windows)


@attrs.frozen
class PlacedStages:
    """
    A rank's stages between two steps, and where those of the others are.

    Args:
        member: This process.
        stages: Its stages by index.
        homes: The rank of each stage of its replica.
        replica: Which replica that is.
        loss: What follows the last stage, where its own F does not end in the loss.
    """

    member: Member
    stages: Mapping[int, StageBackend]
    homes: Sequence[int]
    replica: int
    loss: Callable[[Tensor, Tensor], Tensor] | None = None


def mean_loss(placed: PlacedStages, job: Language, held_out: Loader, windows: int) -> float:
    """The mean over windows, in a context that puts numerical state back."""
    batch = job.config.batch
    there = held_out.tokens.windows(held_out.sequence)
    wanted = min(there, -(-windows // batch) * batch)
    groups = -(-wanted // batch)
    total, count = 0.0, 0
    for index in sorted(placed.stages):
        placed.stages[index].refresh_cache()
    domain = next(iter(placed.stages.values())).domain
    committed = Snapshot(tuple(live_state(domain).values()))
    for group in range(placed.replica, groups, job.dp):
        x, y = held_out.windows(group * batch, batch)
        taken = min(batch, wanted - group * batch)
        y = y.clone()  # it has its memory in common with x
        y[:, taken:] = _NOT_COUNTED  # the first windows again: shapes stay as they are
        try:
            loss = _through(placed, x, y)
        except RuntimeError as error:
            raise BackendError(f"evaluation: a message between ranks was lost: {error}") from None
        committed.restore()
        if loss is not None:
            mean = float(loss) * job.microbatches * job.dp
            total, count = total + mean * taken, count + taken
    sums = gathered(placed.member, (total, count))
    losses, counted = (sum(column) for column in zip(*sums, strict=True))
    return float(losses / counted)


def _through(placed: PlacedStages, tokens: Tensor, targets: Tensor) -> Tensor | None:
    """One microbatch through all stages; the loss on the rank of the last one."""
    rank, device, homes = placed.member.rank, placed.member.device, placed.homes
    hidden: Tensor | None = None
    for index, home in enumerate(homes):
        last = index + 1 == len(homes)
        if home == rank:
            stage = placed.stages[index]
            (hidden,) = stage.native_forward(_inputs(stage, hidden, tokens, targets), first=False)
            hidden = hidden.detach()
            if last and placed.loss is not None:
                hidden = placed.loss(hidden, targets.to(device))
        if last or homes[index + 1] == home:
            continue
        if home == rank:
            assert hidden is not None
            dist.send(hidden.cpu(), homes[index + 1])
        elif homes[index + 1] == rank:
            spec = placed.stages[index + 1].inputs[0]
            arriving = torch.empty(spec.shape, dtype=spec.dtype)
            dist.recv(arriving, home)
            hidden = arriving.to(device)
    return hidden if homes[-1] == rank else None


def _inputs(
    stage: StageBackend, hidden: Tensor | None, tokens: Tensor, targets: Tensor
) -> list[Tensor]:
    """What a stage takes, as its F does: a first stage tokens, a last one targets besides."""
    spec = stage.inputs[0]
    given = [tokens if stage.index == 0 else hidden, targets][: len(stage.inputs)]
    taken = [one.to(spec.device) for one in given if one is not None]
    if spec.differentiable:
        taken[0].requires_grad_()
    return taken
