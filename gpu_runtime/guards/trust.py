"""
Sentences that say what each guard does not check (takes on trust), and when each sentence applies.
`on_trust` returns these sentences.

The tables in the documentation pages are generated from these sentences.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

__all__ = ["DEEPSPEED", "MEGATRON", "PIPELINING", "Trust"]


@attrs.frozen
class Trust:
    """
    A sentence that `on_trust` returns.

    Args:
        text: The sentence. ``{stage}`` and ``{kind}`` are placeholders for a stage and a kind of
            action.
        when: When the sentence applies, for the table of the documentation page.
    """

    text: str
    when: str = "always"

    def said(self, **values: object) -> str:
        """Return the sentence with values for the placeholders ``{stage}`` and ``{kind}``."""
        return self.text.format(**values)


#: The guard of torch's pipeline, and of TorchTitan's.
PIPELINING: Mapping[str, Trust] = {
    "methods": Trust("each stage's own method runs its whole action"),
    "counters": Trust(
        "during a step, no weight is written through `.data` or by fused kernels, which leave "
        "version counters unchanged"
    ),
    "messages": Trust("all posted messages arrive, with the contents that were sent"),
    "function": Trust(
        "the function that is registered for {kind} runs its whole action",
        "a function is registered for a kind of action whose run leaves evidence",
    ),
    "unseen function": Trust(
        "the function that is registered for {kind} runs its action",
        "`UNSHARD`, `RESHARD`; `OVERLAP_F_B`, except under TorchTitan's GraphPP; every kind if all "
        "stages have their own graphs, which leave no record",
    ),
    "graphs": Trust(
        "stage {stage} runs its registered actions in its own graphs",
        "the stage has its own graphs, which leave no record; those of TorchTitan's GraphPP do",
    ),
    "sharded": Trust(
        "no weight of stage {stage} is written in the middle of a step; not checked, because its "
        "module is sharded",
        "FSDP, without `follow_optimizer`",
    ),
    "update": Trust(
        "the update uses the gradients of all walks (passes over the schedule) of its epoch",
        "after `follow_optimizer`",
    ),
    "walks": Trust(
        "no walk (pass over the schedule) of an epoch is left out before its update",
        "after `follow_optimizer` without `walks`",
    ),
}

#: The guard of DeepSpeed's engine.
DEEPSPEED: Mapping[str, Trust] = {
    "data": Trust(
        "the data iterator yields each microbatch once; the contents of microbatches are not "
        "checked"
    ),
    "messages": Trust("all sent messages arrive, with their contents unchanged"),
    "reductions": Trust("each reduction that ran covers every gradient and the right ranks"),
    "counters": Trust(
        "during a step, no weight is written through `.data`, which leaves version counters "
        "unchanged"
    ),
    "methods": Trust("each method of the engine runs its whole instruction"),
    "tied": Trust("ReduceTiedGrads reduces the gradients of tied weights", "tied layers"),
    "optimizer": Trust(
        "the optimizer reduces the gradients, because ReduceGrads is switched off",
        "`pipeline_enable_backward_allreduce` is off",
    ),
    "partitioned": Trust(
        "a partitioned activation belongs to the microbatch of its buffer",
        "activations partitioned over tensor-parallel ranks",
    ),
}

#: The guard of Megatron-core's loops.
MEGATRON: Mapping[str, Trust] = {
    "data": Trust(
        "the data iterator yields each microbatch once; the contents of microbatches are not "
        "checked"
    ),
    "messages": Trust("all messages arrive, in the order in which the loop sends them"),
    "reductions": Trust("each reduction that ran covers every gradient and the right ranks"),
    "counters": Trust(
        "during a step, no weight is written through `.data`, which leaves version counters "
        "unchanged"
    ),
    "reruns": Trust("if no update comes between two loops, the second loop is a rerun"),
    "function": Trust("the forward step function does the whole forward"),
    "unmatched": Trust(
        "all messages match the schedule; not checked, because an exchange has several tensors or "
        "the order is too long",
        "`adjust_tensor_shapes_fn`, or an order above the limit of `qeffect check`",
    ),
    "replays": Trust(
        "a step that is replayed as one graph equals the captured step",
        "full-iteration CUDA graphs",
    ),
    "updates": Trust(
        "updates by optimizers that the guard does not see",
        "a loop followed another loop, and the guard saw no update between the two",
    ),
}
