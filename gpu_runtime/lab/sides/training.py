"""
The native and guarded sides of a configured training run, and their loss on held-out text.
"""

from __future__ import annotations

from ...backends.protocol import BackendError
from ...ranks.membership import Member
from ...ranks.worker_assembly import build_worker
from ...training.config import Config
from ...training.evaluate import evaluate
from ...training.job_assembly import JobData, backend_of
from ...training.step_runner import mode_of
from ..comparisons.evaluation import evaluate_native
from ..comparisons.ranks import native_pipeline
from .pipelines import NativeSide, TrainedSide

__all__ = ["evaluate_side", "guarded_training", "native_training"]


def native_training(member: Member, config: Config, data: JobData) -> NativeSide:
    """Build torch's own pipeline over the library's full backwards."""
    return NativeSide(member, native_pipeline(member, data.job, backend_of(config)))


def guarded_training(member: Member, config: Config, data: JobData) -> TrainedSide:
    """
    Build the guarded pipeline, in the mode of the run's configuration.

    Raises:
        BackendError: The run requests one launch per step, but a step cannot run as one launch.
    """
    mode, why = mode_of(member, data.job, config.parallel.mode)
    if why:
        raise BackendError(
            f"{config.source}: the steps of this run cannot be launched as one graph: {why}"
        )
    worker = build_worker(member, data.job, backend_of(config), mode=mode, limits=config.waits())
    return TrainedSide(worker)


def evaluate_side(side: NativeSide | TrainedSide, data: JobData, windows: int) -> float:
    """
    Compute the loss of a side (native or guarded training) on held-out text, between two steps.

    Args:
        side: The native or guarded training whose weights are evaluated.
        data: The training data of this side, with held-out text.
        windows: Number of windows.
    """
    assert data.held_out is not None
    if isinstance(side, NativeSide):
        return evaluate_native(side.member, side.pipeline, data.job, data.held_out, windows)
    return evaluate(side.worker, data.job, data.held_out, windows)
