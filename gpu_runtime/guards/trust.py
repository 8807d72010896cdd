"""
What each guard takes on trust (does not check): the sentences of `on_trust`, and when each applies.

The tables of the documentation pages are generated from the same sentences.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

__all__ = ["DEEPSPEED", "MEGATRON", "PIPELINING", "Trust"]


@attrs.frozen
class Trust:
    """
    A sentence of `on_trust`.

    Args:
        text: The sentence; ``{stage}`` and ``{kind}`` stand for a stage and a kind of action.
        when: When the sentence applies, for the table of the documentation page.
    """

    text: str
    when: str = "always"

    def said(self, **values: object) -> str:
        """Return the sentence, with values in place of ``{stage}`` and ``{kind}``."""
        return self.text.format(**values)


#: The guard of torch's pipeline, and of TorchTitan's.
PIPELINING: Mapping[str, Trust] = {
    "methods": Trust("each stage's own method performs its whole action"),
    "counters": Trust(
        "no write to a weight bypasses its version counter, as through `.data` or a fused kernel"
    ),
    "messages": Trust("all posted messages arrive, with the contents that were sent"),
    "function": Trust(
        "the function that is registered for {kind} performs its whole action",
        "a function is registered for a kind of action whose run leaves evidence",
    ),
    "unseen function": Trust(
        "the function that is registered for {kind} runs its action",
        "`UNSHARD`, `RESHARD`, `OVERLAP_F_B`; every kind if all stages have graphs of their own",
    ),
    "graphs": Trust(
        "stage {stage} runs its registered actions, in graphs of its own",
        "the stage has graphs of its own, as under TorchTitan's GraphPP",
    ),
    "sharded": Trust(
        "no weight of stage {stage} is written in mid-step; not checked, as its module is sharded",
        "FSDP, without `follow_optimizer`",
    ),
    "update": Trust(
        "the update uses the gradients that the walks of its epoch have made",
        "after `follow_optimizer`",
    ),
    "walks": Trust(
        "the walks (passes over the schedule) since the last update are all walks of the epoch",
        "after `follow_optimizer` without `walks`",
    ),
}

#: The guard of DeepSpeed's engine.
DEEPSPEED: Mapping[str, Trust] = {
    "data": Trust("the data iterator yields each microbatch once; its contents are not checked"),
    "messages": Trust("all sent messages arrive, with their contents unchanged"),
    "reductions": Trust("each reduction that ran covers every gradient and the right ranks"),
    "counters": Trust("no write to a weight bypasses its version counter, as through `.data`"),
    "methods": Trust("each method of the engine performs its whole instruction"),
    "tied": Trust("ReduceTiedGrads reduces the gradients of tied weights", "tied layers"),
    "optimizer": Trust(
        "the optimizer reduces gradients by itself: ReduceGrads is switched off",
        "`pipeline_enable_backward_allreduce` is off",
    ),
    "partitioned": Trust(
        "a partitioned activation belongs to the microbatch of its buffer",
        "activations partitioned over tensor-parallel ranks",
    ),
}

#: The guard of Megatron-core's loops.
MEGATRON: Mapping[str, Trust] = {
    "data": Trust("the data iterator yields each microbatch once; its contents are not checked"),
    "messages": Trust("all messages arrive, in the order in which the loop sends them"),
    "reductions": Trust("each reduction that ran covers every gradient and the right ranks"),
    "counters": Trust("no write to a weight bypasses its version counter, as through `.data`"),
    "reruns": Trust("if no update comes between two loops, the second loop is a rerun"),
    "function": Trust("the forward step function does the whole forward"),
    "unmatched": Trust(
        "all messages match the schedule; not checked, as an exchange has several tensors or the "
        "order is too long",
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
