"""
Public failures of gradient accumulation: an accumulated gradient is cleared or overwritten.
"""

from __future__ import annotations

from .arena import IF_OVERWRITTEN
from .failure import Rows
from .history import History

ROWS = Rows("arena")


@ROWS.enacted(
    "torchtitan-3575",
    "pytorch/torchtitan#3575",
    state="fixed 2026-06",
    what="a reinforcement-learning trainer zeroes gradients before each microbatch",
    cause="The call that zeroes gradients was in the method that runs one microbatch, not in the "
    "method that runs the optimizer.",
    consequence="silent wrong numbers: only the last microbatch counts",
    fix="zero the gradients with the optimizer's step",
    clause="arena.overwrite",
    at="check_wgrad 0W1",
    reports=f"{IF_OVERWRITTEN}, or that the buffer was zeroed before it",
)
@ROWS.enacted(
    "fast-llm-551",
    "ServiceNow/Fast-LLM#551",
    "ServiceNow/Fast-LLM#550",
    state="fixed 2026-06",
    what="the flush of a shared gradient buffer overwrites a stage's gradient",
    cause="With one shard, the flush of a shared buffer copied into the stage's gradient where it "
    "should have added, and ignored the scheduler's request to accumulate.",
    guessed="that the flush of a microbatch is part of its dW",
    consequence="silent wrong numbers: only the last microbatch counts",
    fix="add where the scheduler asks to accumulate",
    clause="arena.overwrite",
    at="check_wgrad 0W1",
    reports=IF_OVERWRITTEN,
)
def each_microbatch_replaces_the_gradient(h: History) -> None:
    h.process()
    h.refresh()
    for microbatch in (0, 1):
        h.forward(microbatch)
        h.dgrad(microbatch)
        h.wgrad(microbatch, overwrites=h.faulty or microbatch == 0)
    h.end()


@ROWS.enacted(
    "automodel-3530",
    "NVIDIA-NeMo/Automodel#3530",
    state="fixed 2026-08",
    what="a pipeline's stages are set up again between microbatches",
    cause="When the sequence length changes, torch sets up the pipeline's stages again. The "
    "set-up drops all gradients, even those that earlier microbatches had accumulated.",
    guessed="that the sequence length changes at the last of three microbatches",
    consequence="silent wrong numbers; only the gradient norm showed it",
    fix="keep the gradients if the set-up itself ran no backward",
    clause="arena.overwrite",
    at="check_wgrad 0W2",
    reports=f"{IF_OVERWRITTEN}, or that the buffer was dropped before it",
)
def a_setup_drops_what_was_accumulated(h: History) -> None:
    h.process(microbatches=3)
    h.refresh()
    for microbatch in (0, 1, 2):
        h.forward(microbatch)
        h.dgrad(microbatch)
        h.wgrad(microbatch, overwrites=microbatch == 0 or (h.faulty and microbatch == 2))
    h.end()


@ROWS.enacted(
    "megatron-lm-6965",
    "NVIDIA/Megatron-LM#6965",
    state="fixed in part 2026-09",
    what="one layer serves two prediction depths",
    cause="Only the first use of the layer carries the flag of the first microbatch, which makes "
    "dW overwrite. Backward runs in reverse: the second use adds its gradient, and the first use "
    "then replaces the sum.",
    consequence="silent wrong numbers: the gradient of the deeper use is lost",
    fix="do not pass the flag in code that does not maintain it",
    clause="arena.overwrite",
    at="check_wgrad 0W0",
    reports=f"{IF_OVERWRITTEN}, or that the buffer was zeroed before it",
)
def the_first_use_replaces_what_the_second_added(h: History) -> None:
    # The step zeroes the buffer first, so the sum after the second use is what that use wrote.
    h.process(microbatches=1, invocations=2, matrices=("repeated",))
    h.refresh()
    for invocation in (0, 1):
        h.forward(0, invocation=invocation)
    for invocation in (1, 0):
        h.dgrad(0, invocation=invocation)
        h.wgrad(0, invocation=invocation, overwrites=h.faulty or invocation == 1)
    h.end()


@ROWS.enacted(
    "primus-1046",
    "AMD-AGI/Primus#1046",
    state="fixed 2026-08",
    what="only the first microbatch of a step adds its weight gradient",
    cause="A flag says that main_grad already contains this gradient. The step clears the flag and "
    "the first microbatch sets it. The code then assumed for every later microbatch that its "
    "gradient was already added.",
    consequence="silent wrong numbers: one gradient of 32",
    fix="add at every microbatch",
    clause="ownership.matrix-coverage",
    at="commit_wgrad 0W1",
    reports="the matrices whose gradients dW wrote",
)
def later_microbatches_add_nothing(h: History) -> None:
    h.process()
    h.refresh()
    for microbatch in (0, 1):
        h.forward(microbatch)
        h.dgrad(microbatch)
        h.wgrad(microbatch, covered=() if h.faulty and microbatch else None)
    h.end()


ROWS.untold(
    "megatron-lm-6187",
    "NVIDIA/Megatron-LM#6187",
    state="fixed 2026-08",
    what="the gradient buffer of sharded data parallelism is reused during its reduction",
    cause="The buffer was allocated on the default stream and replaced on the stream that reduces, "
    "so the allocator could hand out its storage while a reduction still used it.",
    consequence="silent wrong numbers",
    fix="allocate the buffer on the stream that reduces",
    kind="memory",
    why="The report does not say which later tensor got the storage, and the contract does not "
    "see allocations.",
)
ROWS.untold(
    "pytorch-170277",
    "pytorch/pytorch#170277",
    state="open 2025-12",
    what="a split backward is wrong at an autograd node with several outputs",
    cause="The gradients of all outputs of one node are summed and passed to its first output.",
    consequence="silent wrong numbers, or a crash where shapes differ",
    fix="no fix known",
    kind="autograd",
    why="The fault is inside one call of autograd. The runtime would still report each matrix as "
    "covered once.",
)
