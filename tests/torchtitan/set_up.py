"""The runs of the tests, as TorchTitan's configurations: a small Llama, and data from a seed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from qeffect.gpu_runtime.lab.sides.titan_cpu import on_a_cpu
from tests.torchtitan.faults import STEPS

__all__ = ["configuration"]


def configuration(case: dict[str, Any], folder: str) -> Any:
    """
    Return the configuration of a run.

    Args:
        case: ``schedule``; ``graphs``, for GraphPP; and where they differ from the default
            ``stages`` (ranks of the pipeline), ``shards``, ``microbatches``, ``walks``, ``steps``,
            ``layers``, ``recompute``, ``loss``, ``validate`` and ``save``.
        folder: Where the run may write.
    """
    if case.get("graphs"):
        from torchtitan.experiments.graph_trainer.llama3 import config_registry as graphs

        config = on_a_cpu(graphs.graph_trainer_llama3_debugmodel_sdpa())
        config.compile.enable_passes = False
    else:
        config = on_a_cpu(llama3_debugmodel())
    config.model_spec.model.layers = config.model_spec.model.layers[: case.get("layers", 4)]
    microbatches, shards = case.get("microbatches", 8), case.get("shards", 1)
    config.training = replace(
        config.training,
        local_batch_size=microbatches,
        global_batch_size=microbatches * shards * case.get("walks", 1),
        steps=case.get("steps", STEPS),
    )
    config.parallelism = replace(
        config.parallelism,
        pipeline_parallel_degree=case.get("stages", 2),
        pipeline_parallel_schedule=case["schedule"],
        data_parallel_shard_degree=shards,
    )
    config.dump_folder = folder
    config.checkpoint.enable = bool(case.get("save"))
    config.checkpoint.interval = 1
    config.validator.enable = bool(case.get("validate"))
    config.validator.freq, config.validator.steps = 1, 1
    if case.get("loss") != "chunked":  # under it torch's split backward loses a gradient
        config.loss = config.loss.loss_fn
    if case.get("recompute"):
        config.activation_checkpoint = SelectiveAC.Config()
    return config
