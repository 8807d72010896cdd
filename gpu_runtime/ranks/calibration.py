"""
Calibrate a pipeline's FP8 scales before epoch 0 (the first optimizer step). Each rank runs several
walks (passes over its row of the schedule), which the contract does not check.

The walks send messages, write device memory and change the scales, as a step does. In the contract,
epoch 0 has not begun during these walks. Neither the event log nor the rank log records these
walks.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from ..runtime import Runtime
from ..step.calibration import Calibration, calibrate
from .consent import wait_for
from .pipeline import Pipeline
from .second_run import SecondRun

__all__ = ["calibrate_pipeline"]


class _CalibratingRun(SecondRun):
    """A walk (a pass over the rank's actions) that drops its gradients: nothing is summed or
    reduced."""

    def finalize_stage(self, stage: int) -> None:
        """Drop the stage's gradients."""


def calibrate_pipeline(pipeline: Pipeline) -> Calibration:
    """
    Calibrate scales that are updated once an epoch (an optimizer step). In a new run, every rank
    calls this function before its first step.

    Raises:
        StoppedError: A rank could not continue; all ranks stop with the same cause.
    """
    runtime = pipeline.runtime
    run = _CalibratingRun(runtime)

    def walk() -> None:
        run.begin()
        pipeline.run_actions()
        scaling = runtime.reductions.scaling
        if scaling is not None:
            replicas: Any = runtime.reducer
            scaling.start(replicas.largest).wait()
        _settle(pipeline, runtime)

    def agree(converged: bool) -> bool:
        if pipeline.consent is None:
            pipeline.channels.commit()
            return converged
        pipeline.consent.agree(runtime.epoch)
        return bool(pipeline.consent.all_gather(torch.tensor([int(converged)])).min())

    runtime.handoff.wait_for_caller()
    try:
        with runtime.caller_scope(), pipeline.unlogged_walks(cast(Runtime, run)):
            found = calibrate(runtime.domain, walk, agree)
            runtime.take_snapshot()
    except Exception as error:
        if pipeline.consent is None:
            raise
        raise pipeline._stopped(error, runtime.epoch) from None
    finally:
        runtime.forget_gradients()
    runtime.restart_counts()
    runtime.handoff.caller_waits()
    return found


def _settle(pipeline: Pipeline, runtime: Runtime) -> None:
    """Wait for the device, up to the deadline, before the host reads the scales."""
    if pipeline.consent is None or runtime.domain.device.type == "cpu":
        return
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    consent = pipeline.consent
    wait_for(done, consent, deadline=consent.deadline, grace=consent.grace)
