"""
Compute the loss on held-out text between two steps, without changing the training state.

Every window (token sequence) runs with the FP8 scales after the last optimizer step. Therefore a
window's loss does not depend on the number of windows or on the rank that runs the window. Hidden
states are sent between ranks through host memory, because evaluations are rare and do not justify
separate connections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ..backends.protocol import StageBackend
from ..ranks.channels import LostError
from ..ranks.membership import Member, all_gather
from ..ranks.worker import Worker
from ..step.memory.numerical_state import Snapshot, live_state
from .checkpoint.agreement import lost, stop
from .data import Loader
from .language_model import LanguageJob

__all__ = ["PlacedStages", "evaluate", "mean_loss"]

#: The target that `torch.nn.functional.cross_entropy` leaves out of its mean.
_NOT_COUNTED = -100


def evaluate(worker: Worker, job: LanguageJob, held_out: Loader, windows: int) -> float:
    """
    Return the mean negative log likelihood per token of held-out windows. Every rank must call this
    function.

    Args:
        worker: The rank's worker, between two steps.
        job: The model that the worker trains.
        held_out: The held-out text. The evaluation uses its first windows, in the file's order.
        windows: Number of windows, rounded up to whole microbatches and limited to the windows of
            the text. Each window counts once, even if the last microbatch is not full.

    Raises:
        Refused: A step is in progress.
        StoppedError: A rank is gone, or did not answer in time. All ranks stop with the same cause.
    """
    table = worker.table
    placed = PlacedStages(
        worker.member,
        worker.runtime.stages,
        [worker.ranks[table.stage_to_rank[index]] for index in range(table.num_stages)],
        worker.replica,
    )
    try:
        with worker.runtime.evaluation_scope():
            return mean_loss(placed, job, held_out, windows)
    except LostError as error:
        raise stop(worker, error, None, at="evaluation") from None


@attrs.frozen
class PlacedStages:
    """
    A rank's stages between two steps, and the ranks that have the other stages of the same replica.

    Args:
        member: This process.
        stages: The process's stages, by index.
        homes: For each stage of this replica, the rank that has the stage.
        replica: The index of this rank's replica.
        loss: The loss function to apply to the last stage's output; None if the last stage's F
            computes the loss.
    """

    member: Member
    stages: Mapping[int, StageBackend]
    homes: Sequence[int]
    replica: int
    loss: Callable[[Tensor, Tensor], Tensor] | None = None


def mean_loss(placed: PlacedStages, job: LanguageJob, held_out: Loader, windows: int) -> float:
    """
    Return the mean loss over windows, as `evaluate` does, but without restoring the numerical state
    (FP8 scales and amax histories).

    The caller must use a context that restores the numerical state, as `evaluate` does.

    Args:
        placed: The rank's stages, and the ranks that have the other stages of the replica.
        job: The job whose model is evaluated.
        held_out: The text that was held out from training, as tokens.
        windows: Number of windows, rounded up to whole microbatches and limited to the windows of
            the text.

    Raises:
        LostError: A message between ranks was lost.
    """
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
        y = y.clone()  # y may share memory with x
        y[:, taken:] = _NOT_COUNTED  # windows of the next pass fill the batch and do not count
        try:
            with getattr(domain, "without_dropout", nullcontext)():
                loss = _through(placed, x, y)
        except RuntimeError as error:
            raise lost(error, "evaluation") from None
        committed.restore()
        if loss is not None:
            mean = float(loss) * job.microbatches * job.dp
            total, count = total + mean * taken, count + taken
    try:
        sums = all_gather(placed.member, (total, count))
    except RuntimeError as error:
        raise lost(error, "evaluation") from None
    losses, counted = (sum(column) for column in zip(*sums, strict=True))
    return float(losses / counted)


def _through(placed: PlacedStages, tokens: Tensor, targets: Tensor) -> Tensor | None:
    """Run one microbatch through all stages; return its loss on the rank with the last stage."""
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
    """Return a stage's inputs: the first stage takes tokens, the last stage also takes targets."""
    spec = stage.inputs[0]
    given = [tokens if stage.index == 0 else hidden, targets][: len(stage.inputs)]
    taken = [one.to(spec.device) for one in given if one is not None]
    if spec.differentiable:
        taken[0].requires_grad_()
    return taken
