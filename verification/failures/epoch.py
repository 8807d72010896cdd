"""
Failures of the epoch: an optimizer step that was scaled, ended or counted wrongly.
"""

from __future__ import annotations

from .failure import Rows
from .history import History

ROWS = Rows("epoch")


@ROWS.enacted(
    "torchtitan-1732",
    "pytorch/torchtitan#1732",
    state="fixed 2025-09",
    what="gradient accumulation over several runs of a pipeline schedule",
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


ROWS.untold(
    "deepspeed-8154",
    "deepspeedai/DeepSpeed#8154",
    state="fixed 2026-07",
    what="the scaling of gradients is repeated at every stage",
    cause="A hook divides by the number of accumulation steps on each stage that a gradient "
    "passes.",
    consequence="silent wrong numbers",
    fix="divide on the last stage alone",
    kind="values",
    shown="tests/failures/test_values.py",
    why="Only a factor in the sent gradient is wrong; every message and action is in its place.",
)
ROWS.untold(
    "torchtitan-4194",
    "pytorch/torchtitan#4194",
    state="fixed 2026-08",
    what="the loss of a pipeline is normalised after its backward",
    cause="The schedule had already run backward when the loss was divided.",
    consequence="silent wrong numbers: gradients too large",
    fix="give the count to the loss function",
    kind="values",
    shown="tests/failures/test_values.py",
    why="Only a factor in the loss is wrong; every action is in its place.",
)

ROWS.untold(
    "accelerate-4242",
    "huggingface/accelerate#4242",
    "huggingface/accelerate#4243",
    state="open 2026-09",
    what="a skipped update that counts as made",
    cause="A fused optimizer skips the update on the device after an overflow, and its Python step "
    "is called all the same, so that the learning-rate schedule goes on.",
    consequence="the learning rate leaves its schedule",
    fix="see from the loss scale that the update was skipped",
    kind="state",
    why="The schedule of the learning rate is the caller's; the contract counts epochs, not rates.",
)
