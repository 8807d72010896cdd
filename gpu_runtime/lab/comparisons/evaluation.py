"""
Compute the loss of native training on held-out text, over the same windows as the guarded side.
"""

from __future__ import annotations

from ...backends.protocol import BackendError
from ...ranks.channels import LostError
from ...ranks.membership import Member
from ...step.memory.numerical_state import preserving
from ...training.data import Loader
from ...training.evaluate import PlacedStages, mean_loss
from ...training.language_model import LanguageJob
from ..sides.torch_pipeline import NativePipeline

__all__ = ["evaluate_native"]


def evaluate_native(
    member: Member, pipeline: NativePipeline, job: LanguageJob, held_out: Loader, windows: int
) -> float:
    """
    The loss of native training on held-out text with current scales, computed as in
    `training.evaluate`.

    Args:
        member: This process.
        pipeline: The native pipeline, between two steps.
        job: The pipeline and its model, as trained.
        held_out: The held-out text.
        windows: Number of windows (sequences of tokens) of the text to evaluate.

    Raises:
        BackendError: A message between ranks was lost.
    """
    replica, table = member.rank // job.pp, job.table()
    ranks = job.ranks(replica)
    placed = PlacedStages(
        member,
        {stage.index: stage for stage in pipeline.stages},
        [ranks[table.stage_to_rank[index]] for index in range(table.num_stages)],
        replica,
        loss=job.loss,  # torch's schedule computes it, not the last stage
    )
    with preserving(pipeline.domain):
        try:
            return mean_loss(placed, job, held_out, windows)
        except LostError as error:
            raise BackendError(str(error)) from None
