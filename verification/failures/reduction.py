"""
Failures of reductions: too early, never, twice, or in another order on another rank.
"""

from __future__ import annotations

from .history import History
from .model import Rows

ROWS = Rows("reduction")


@ROWS.enacted(
    "transformer-engine-1976",
    "NVIDIA/TransformerEngine#1976",
    "NVIDIA/Megatron-LM!3941",
    state="fixed 2025-08",
    what="delayed wgrad with overlapped reductions",
    cause="The hook that starts the reduction fired in backward, before the deferred wgrad had "
    "made the gradient.",
    consequence="silent wrong numbers: old gradients are reduced",
    fix="fire the hooks when the deferred wgrad runs",
    clause="reduction.before-final",
    at="start_reduction s0",
)
def reduced_before_the_deferred_wgrad(h: History) -> None:
    h.process(microbatches=1, reduces=True)
    h.refresh()
    h.forward(0)
    h.dgrad(0)
    if h.faulty:
        h.reduce()
    h.wgrad(0)
    h.end()


@ROWS.enacted(
    "transformer-engine-2614",
    "NVIDIA/TransformerEngine#2614",
    "NVIDIA/Megatron-LM#2999",
    "NVIDIA/Megatron-LM#3074",
    state="fixed 2026-02",
    what="a captured dW skips the hook after backward",
    cause="Under graphs the deferred wgrad is replayed and no hook runs, so that no reduction "
    "was started.",
    consequence="silent wrong numbers: gradients of one replica",
    fix="an interface for hooks of graphs, and a check of versions",
    clause="reduction.missing",
    at="commit_epoch e0",
)
def never_reduced_under_graphs(h: History) -> None:
    h.process(microbatches=1, reduces=True)
    h.refresh()
    h.forward(0)
    h.backward(0)
    h.finalize()
    if h.legal:
        h.reduce()
        h.reduced()
    h.update()


ROWS.untold(
    "megatron-lm-5273",
    "NVIDIA/Megatron-LM#5273",
    state="fixed 2026-06",
    what="hooks of fused attention weights with delayed wgrad",
    cause="The hooks of the fused weights were not run, so that these alone were not reduced.",
    consequence="silent wrong numbers",
    fix="run them",
    kind="evidence",
    why="Some parameters of a stage; reductions are of whole stages.",
)


@ROWS.enacted(
    "pytorch-144530",
    "pytorch/pytorch#144530",
    "pytorch/pytorch#144426",
    state="open 2025-01",
    what="pipeline and data parallelism together with zero bubble",
    cause="The split backward asks autograd for gradients directly, which runs no hooks.",
    consequence="gradients are never reduced",
    fix="not landed",
    clause="reduction.missing",
    at="commit_epoch e0",
)
def hooks_that_a_split_backward_never_runs(h: History) -> None:
    h.process(reduces=True)
    h.refresh()
    for microbatch in (0, 1):
        h.forward(microbatch)
        h.dgrad(microbatch)
    for microbatch in (0, 1):
        h.wgrad(microbatch)
    h.finalize()
    if h.legal:
        h.reduce()
        h.reduced()
    h.update()


@ROWS.enacted(
    "pytorch-134052",
    "pytorch/pytorch#134052",
    state="fixed 2024-09",
    what="zero bubble with data parallelism",
    cause="The backward at which gradients are synchronised is found by counting calls up to the "
    "number of microbatches; a split backward makes two calls for each.",
    consequence="gradients synchronised at the wrong backward",
    fix="count both halves",
    clause="reduction.before-final",
    at="start_reduction s0",
)
def a_half_taken_for_the_last_backward(h: History) -> None:
    h.process(reduces=True)
    h.refresh()
    h.forward(0)
    h.forward(1)
    h.dgrad(0)
    h.dgrad(1)
    if h.faulty:
        h.reduce()
    h.wgrad(0)
    h.wgrad(1)
    h.end()


@ROWS.enacted(
    "megatron-lm-7186",
    "NVIDIA/Megatron-LM#7186",
    state="fixed 2026-09",
    what="sharded data parallelism drops accumulated gradients",
    cause="The scope that suppresses synchronisation did nothing, so that every microbatch ended "
    "the accumulation and the next one began it again.",
    consequence="silent wrong numbers: only the last microbatch counts",
    fix="mark the microbatches that are not the last",
    clause="order.incomplete",
    at="finalize s0",
)
def every_microbatch_ends_the_step(h: History) -> None:
    h.process(reduces=True)
    h.refresh()
    h.forward(0)
    h.backward(0)
    if h.faulty:
        h.finalize()
    h.forward(1)
    h.backward(1)
    h.end()


@ROWS.enacted(
    "deepspeed-5605",
    "deepspeedai/DeepSpeed#5605",
    state="fixed 2024-06",
    what="a pipeline with gradients that are updated at once",
    cause="The update of the high-precision gradient was called twice for one backward.",
    consequence="silent wrong numbers",
    fix="skip the second",
    clause="ownership.duplicate-wgrad",
    at="check_wgrad 0W0",
)
def one_gradient_added_twice(h: History) -> None:
    h.process(microbatches=1, sends_gradient=True)
    h.refresh()
    h.forward(0)
    h.dgrad(0)
    h.send(0, gradient=True)
    h.wgrad(0)
    if h.faulty:
        h.wgrad(0)
    h.sent(0, gradient=True)
    h.end()


ROWS.untold(
    "megatron-lm-4500",
    "NVIDIA/Megatron-LM#4500",
    state="fixed 2026-05",
    what="partial graphs with an expert router",
    cause="The router's weight lost its edge in autograd, so that its reduction hook never ran.",
    consequence="silent wrong numbers",
    fix="bind the live output again",
    kind="evidence",
    why="One parameter of a stage; reductions are of whole stages.",
)
ROWS.untold(
    "megatron-lm-2218",
    "NVIDIA/Megatron-LM#2218",
    state="fixed 2025-11",
    what="reduce-scatters in an order that differs from rank to rank",
    cause="Ranks of one group issue the collectives of their buckets in different orders.",
    consequence="a hang",
    fix="sort them by bucket",
    kind="evidence",
    why="No order of reductions is declared that a rank could be held to.",
)
