"""
Public failures of persistence: a resumed run uses state that was not saved or restored.
"""

from __future__ import annotations

from .failure import Rows
from .history import History

ROWS = Rows("persistence")

ROWS.untold(
    "megatron-bridge-1730",
    "NVIDIA-NeMo/Megatron-Bridge#1730",
    "NVIDIA-NeMo/Megatron-Bridge#1357",
    state="fixed 2026",
    what="delayed scaling does not survive a resume",
    cause="The history of amax values was not restored.",
    consequence="NaN at the first step",
    fix="restore the history",
    kind="state",
    shown="tests/failures/test_values.py",
    why="The caller loads the numerical state; the contract assumes that it is in place.",
)
ROWS.untold(
    "megatron-lm-3062",
    "NVIDIA/Megatron-LM!3062",
    state="fixed 2025-05",
    what="a grouped FP8 layer is resumed with another layer's state",
    cause="The FP8 state was read outside the autocast, where another recipe's state is active.",
    consequence="wrong scales",
    fix="decide by the content of the saved state",
    kind="state",
    shown="tests/failures/test_values.py",
    why="The caller loads the numerical state; the contract assumes that it is in place.",
)


@ROWS.enacted(
    "transformer-engine-982",
    "NVIDIA/TransformerEngine#982",
    state="closed 2024",
    what="the loss explodes after a checkpoint is loaded in FP8",
    cause="The thread names no cause; it suspects state that loading does not restore.",
    guessed="the whole cause: the first forward after loading runs with the old weight caches",
    consequence="divergence",
    fix="calibrate again",
    clause="version.stale-cache",
    at="check_forward 0F0 e1",
)
def old_caches_after_a_restore(h: History) -> None:
    h.process(microbatches=1)
    h.whole_step()
    checkpoint = h.checkpoint()
    h.refresh()
    h.restore(checkpoint)
    if h.legal:
        h.refresh()
    h.forward(0)
    h.backward(0)
    h.end()
