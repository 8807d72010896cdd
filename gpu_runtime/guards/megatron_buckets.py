"""
The buckets of Megatron-core's DistributedDataParallel: which are reduced, and which are gathered.

With `overlap_param_gather`, an update leaves each rank a part of the parameters. Hooks before the
forward of each module gather the parameters of the module's bucket, and wait for them. A bucket
says whether its gather was started since the last reduction, and whether it still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qeffect.refusals import refused
from qeffect.schedule.pairing import Work

from .evidence import Weights, leaves, work_name

__all__ = ["check_gathered", "check_not_early", "reduced_and_gathered"]

#: Cause and remedy if a forward did not gather the parameters that it reads.
_MISSING = (
    "The hooks that gather parameters before a forward were off, as after "
    "`disable_forward_pre_hook(param_sync=False)`, or did not wait.",
    "Call `enable_forward_pre_hook()` before the loop, or switch the hooks off with "
    "`param_sync=True` (the default), which gathers at once.",
)
#: Cause and remedy if parameters were gathered before the update.
_EARLY = (
    "`disable_forward_pre_hook()`, an evaluation or a save gathered the parameters between the "
    "loop and the update, so the hooks do not gather what the update leaves.",
    "Gather, evaluate and save after `optimizer.step()`.",
)


def reduced_and_gathered(chunk: Any) -> tuple[list[Any], list[Any]]:
    """
    Return the buckets of a chunk that are reduced over more than one rank, and those that hooks
    before a forward gather from more than one rank.
    """
    module = chunk
    while module is not None and not hasattr(module, "bucket_groups"):
        module = getattr(module, "module", None)
    if module is None:
        return [], []
    groups = [*module.bucket_groups, *getattr(module, "expert_parallel_bucket_groups", ())]
    reduced = [group for group in groups if _replicas(group) > 1]
    if not getattr(module, "use_forward_hook", False):
        return reduced, []
    own = "intra_distributed_optimizer_instance_group"
    return reduced, [group for group in groups if getattr(group, own).size() > 1]


def _replicas(group: Any) -> int:
    """Return how many ranks reduce a bucket; several optimizer instances use two process groups."""
    inter = getattr(group, "inter_distributed_optimizer_instance_group", None)
    instances = 1 if inter is None else int(inter.size())
    for name in ("intra_distributed_optimizer_instance_group", "data_parallel_group"):
        found = getattr(group, name, None)
        if found is not None:
            return int(found.size()) * instances
    return instances


def check_gathered(groups: Sequence[Any], weights: Weights, work: Work, output: Any) -> None:
    """
    Check that the first forward after an update has gathered the parameters that it read.

    A forward read the parameters in the autograd graph of its output. Parameters that are not in
    this graph, such as those of a module that ran no forward or is recomputed as a whole, are not
    judged; nor are parameters that the program has written since the update, as by loading a
    checkpoint.

    Args:
        groups: The chunk's buckets that hooks gather (`reduced_and_gathered`).
        weights: The chunk's weights, with their versions after the update.
        work: The forward's stage and microbatch.
        output: What the forward returned.

    Raises:
        Refused: ``version.wrong-epoch``.
    """
    ungathered = [
        group
        for group in groups
        if not group.param_gather_dispatched or group.param_gather_handle is not None
    ]
    if not ungathered:
        return  # nearly always
    read = {node.variable for node in leaves(output)} - weights.rewritten()
    found = [group for group in ungathered if not read.isdisjoint(group.params)]
    if found:
        missing = sum(not group.param_gather_dispatched for group in found)
        raise refused(
            "version.wrong-epoch",
            "check_forward",
            f"F of {work_name(work)}, the first of the step: of {len(groups)} buckets of "
            f"parameters, {missing} not gathered since the update, {len(found) - missing} whose "
            "gather was not waited for",
            "every bucket gathered before a forward reads its parameters",
        ).advise(*_MISSING)


def check_not_early(groups: Sequence[Any], stage: int) -> None:
    """
    Check before an update that no bucket was gathered since its reduction: the hooks would not
    gather this bucket again after the update.

    Args:
        groups: The buckets whose reduction has ended.
        stage: The stage.

    Raises:
        Refused: ``version.wrong-epoch``.
    """
    early = sum(group.param_gather_dispatched for group in groups)
    if early:
        raise refused(
            "version.wrong-epoch",
            "check_update",
            f"{early} of {len(groups)} buckets of parameters of stage {stage} gathered between the "
            "reduction of gradients and the update",
            "a gather of what the update leaves",
        ).advise(*_EARLY)
