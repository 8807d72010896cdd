"""
Public failures of the epoch: gradients of an optimizer step are scaled wrongly, or the step is
ended or counted wrongly.
"""

from __future__ import annotations

from .failure import Rows
from .history import History
from .transcript import stage

ROWS = Rows("epoch")

#: The report that shows how gradients are scaled.
WEIGHTS = "the factor by which each microbatch's gradient is weighted"


@ROWS.enacted(
    "torchtitan-1732",
    "pytorch/torchtitan#1732",
    state="fixed 2025-09",
    what="gradients that accumulate over several runs of a pipeline schedule are scaled repeatedly",
    cause="Each run of the schedule ends by scaling all gradients, including those that earlier "
    "runs of the same optimizer step had accumulated and scaled.",
    consequence="silent wrong numbers: a moving average instead of a sum",
    fix="scale the loss",
    clause="epoch.already-final",
    at="finalize s0",
    reports="the scaling of gradients, as the end of a stage's accumulation",
)
def gradients_scaled_by_every_run(h: History) -> None:
    h.process()
    h.refresh()
    for microbatch in (0, 1):
        h.forward(microbatch)
        h.backward(microbatch)
    h.finalize()
    if h.faulty:
        h.finalize()
    h.update()


@ROWS.enacted(
    "deepspeed-8154",
    "deepspeedai/DeepSpeed#8154",
    "deepspeedai/DeepSpeed#8152",
    state="fixed 2026-07",
    what="the scaling of gradients is repeated at every stage",
    cause="On each stage that a gradient passes, a hook divides the gradient by the number of "
    "accumulation steps.",
    consequence="silent wrong numbers",
    fix="divide on the last stage only",
    clause="epoch.wrong-weights",
    at="check_update e0",
    reports=WEIGHTS,
    shown="tests/failures/test_values.py",
)
def divided_again_on_every_stage(h: History) -> None:
    h.process(*(stage(s, weights_sum=(1, 1)) for s in (0, 1)))
    h.refresh(0)
    for microbatch in (0, 1):
        h.forward(microbatch)
    h.refresh(1)
    for microbatch in (0, 1):
        h.forward(microbatch, stage=1)
    for index in (1, 0):
        for microbatch in (0, 1):
            again = h.faulty and index == 0
            h.dgrad(microbatch, stage=index, weight=(1, 4) if again else (1, 2))
            h.wgrad(microbatch, stage=index)
    h.end()


@ROWS.enacted(
    "torchtitan-4194",
    "pytorch/torchtitan#4194",
    state="fixed 2026-08",
    what="the loss of a pipeline is normalised after its backward",
    cause="The schedule had already run backward when the loss was divided.",
    consequence="silent wrong numbers: gradients too large",
    fix="pass the divisor to the loss function",
    clause="epoch.wrong-weights",
    at="check_update e0",
    reports=WEIGHTS,
    guessed="the number of valid tokens in each of two microbatches",
    shown="tests/failures/test_values.py",
)
@ROWS.enacted(
    "torchtitan-2972",
    "pytorch/torchtitan#2972",
    "pytorch/torchtitan#2984",
    state="open 2026-05",
    what="gradients with and without a pipeline differ in scale",
    cause="Without a pipeline, the summed loss is divided by the number of valid tokens before "
    "backward. The pipeline's schedule runs backward on the undivided sum.",
    consequence="silent wrong numbers: gradients too large by the number of tokens",
    fix="scale the loss inside the loss function",
    clause="epoch.wrong-weights",
    at="check_update e0",
    reports=WEIGHTS,
    guessed="the number of valid tokens in each of two microbatches",
)
def backward_of_a_sum_over_tokens(h: History) -> None:
    tokens = (3, 5)
    h.process(weights_sum=(1, 1))
    h.refresh()
    for microbatch, own in enumerate(tokens):
        h.forward(microbatch)
        h.dgrad(microbatch, weight=(own, 1 if h.faulty else sum(tokens)))
        h.wgrad(microbatch)
    h.end()


ROWS.untold(
    "accelerate-4242",
    "huggingface/accelerate#4242",
    "huggingface/accelerate#4243",
    state="open 2026-09",
    what="a skipped update is counted as made",
    cause="A fused optimizer skips the update on the device after an overflow, but its Python "
    "step is still called, so the learning-rate schedule advances.",
    consequence="the learning rate leaves its schedule",
    fix="detect the skipped update from the loss scale",
    kind="state",
    why="The schedule of the learning rate is the caller's; the contract counts epochs, not rates.",
)
