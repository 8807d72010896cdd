"""
The loss on held-out text between two steps: F alone, and nothing of the training moves.

Every window is run with the scales of the last commit, whatever was run before it, so that the
figure does not depend on how many there are or on which rank has them. Hidden states go from rank
to rank over the host: an evaluation is rare, and needs no connections of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from qeffect.gpu_runtime.backends.protocol import BackendError, StageBackend
from qeffect.gpu_runtime.memory.state import Snapshot, live_state
from qeffect.gpu_runtime.parallel.world import Worker, gathered
from qeffect.gpu_runtime.training.data import Loader
from qeffect.gpu_runtime.training.model import Language

__all__ = ["evaluate"]

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
    batch = job.config.batch
    there = held_out.tokens.windows(held_out.sequence)
    wanted = min(there, -(-windows // batch) * batch)
    groups = -(-wanted // batch)
    total, count = 0.0, 0
    runtime = worker.runtime
    with runtime.apart():
        for index in sorted(runtime.stages):
            runtime.stages[index].refresh_cache()
        committed = Snapshot(tuple(live_state(runtime.domain).values()))
        for group in range(worker.replica, groups, job.dp):
            x, y = held_out.windows(group * batch, batch)
            taken = min(batch, wanted - group * batch)
            y = y.clone()  # it has its memory in common with x
            y[:, taken:] = _NOT_COUNTED  # the first windows again: shapes stay as they are
            try:
                loss = _through(worker, x, y)
            except RuntimeError as error:
                raise BackendError(
                    f"evaluation: a message between ranks was lost: {error}"
                ) from None
            committed.restore()
            if loss is not None:
                mean = float(loss) * job.microbatches * job.dp
                total, count = total + mean * taken, count + taken
    sums = gathered(worker.member, (total, count))
    losses, counted = (sum(column) for column in zip(*sums, strict=True))
    return float(losses / counted)


def _through(worker: Worker, tokens: Tensor, targets: Tensor) -> Tensor | None:
    """One microbatch through all stages; the loss on the rank of the last one."""
    rank, device = worker.member.rank, worker.member.device
    homes = [worker.ranks[place] for place in _homes(worker)]
    hidden: Tensor | None = None
    for index, home in enumerate(homes):
        if home == rank:
            stage = worker.runtime.stages[index]
            (hidden,) = stage.native_forward(_inputs(stage, hidden, tokens, targets), first=False)
            hidden = hidden.detach()
        if index + 1 == len(homes) or homes[index + 1] == home:
            continue
        if home == rank:
            assert hidden is not None
            dist.send(hidden.cpu(), homes[index + 1])
        elif homes[index + 1] == rank:
            spec = worker.runtime.stages[index + 1].inputs[0]
            arriving = torch.empty(spec.shape, dtype=spec.dtype)
            dist.recv(arriving, home)
            hidden = arriving.to(device)
    return hidden if homes[-1] == rank else None


def _homes(worker: Worker) -> Sequence[int]:
    table = worker.table
    return [table.stage_to_rank[index] for index in range(table.num_stages)]


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
