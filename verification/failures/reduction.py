"""
Public failures of reductions: a reduction runs too early, never, twice, or in an order that differs
between ranks.
"""

from __future__ import annotations

from qeffect import Bucket

from .failure import Rows
from .history import History

ROWS = Rows("reduction")


@ROWS.enacted(
    "transformer-engine-1976",
    "NVIDIA/TransformerEngine#1976",
    "NVIDIA/Megatron-LM!3941",
    state="fixed 2025-08",
    what="overlapped reductions run before the delayed wgrad",
    cause="The hook that starts the reduction fired in backward, before the deferred wgrad had "
    "made the gradient.",
    consequence="silent wrong numbers: old gradients are reduced",
    fix="fire the hooks when the deferred wgrad runs",
    clause="reduction.incomplete",
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
    what="a captured dW does not run the hook after backward",
    cause="Under graphs, the deferred wgrad is replayed and no hook runs, so no reduction was "
    "started.",
    consequence="silent wrong numbers: each replica keeps its own gradients",
    fix="an interface for hooks under graphs, and a version check",
    clause="reduction.missing",
    at="check_update e0",
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


@ROWS.enacted(
    "megatron-lm-5273",
    "NVIDIA/Megatron-LM#5273",
    state="fixed 2026-06",
    what="with delayed wgrad, fused attention weights are not reduced",
    cause="The hooks of the fused weights did not run, so only these weights were not reduced.",
    guessed="that the fused weights are a bucket of their own",
    consequence="silent wrong numbers",
    fix="run the hooks",
    clause="reduction.missing",
    at="check_update e0",
)
def fused_weights_never_reduced(h: History) -> None:
    h.process(
        microbatches=1,
        matrices=("plain", "fused"),
        reduces=True,
        buckets=(Bucket("plain", ("plain",)), Bucket("fused", ("fused",))),
    )
    h.refresh()
    h.forward(0)
    h.backward(0)
    h.finalize()
    h.reduce("plain")
    h.reduced("plain")
    if h.legal:
        h.reduce("fused")
        h.reduced("fused")
    h.update()


@ROWS.enacted(
    "pytorch-144530",
    "pytorch/pytorch#144530",
    "pytorch/pytorch#144426",
    state="open 2025-01",
    what="with a zero-bubble schedule, data parallelism never reduces gradients",
    cause="The split backward asks autograd for gradients directly, which runs no hooks.",
    consequence="gradients are never reduced",
    fix="not landed",
    clause="reduction.missing",
    at="check_update e0",
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
    what="with a zero-bubble schedule, gradients are synchronised at the wrong backward",
    cause="Gradients are synchronised when the number of backward calls equals the number of "
    "microbatches. But a split backward makes two calls per microbatch.",
    consequence="gradients synchronised at the wrong backward",
    fix="count both calls of a split backward",
    clause="reduction.incomplete",
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
    cause="The scope that suppresses synchronisation had no effect, so every microbatch ended "
    "the accumulation and the next microbatch began it again.",
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
    what="a high-precision gradient is updated twice in a pipeline",
    cause="The update of the high-precision gradient was called twice for one backward.",
    consequence="silent wrong numbers",
    fix="skip the second call",
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


@ROWS.enacted(
    "megatron-lm-4500",
    "NVIDIA/Megatron-LM#4500",
    state="fixed 2026-05",
    what="with partial graphs, an expert router's weight is never reduced",
    cause="The router's weight lost its edge in autograd, so its reduction hook never ran.",
    guessed="that the router's weight is a bucket of its own",
    consequence="silent wrong numbers",
    fix="reconnect the live output to the autograd graph",
    clause="reduction.missing",
    at="check_update e0",
)
def one_weight_whose_hook_never_ran(h: History) -> None:
    h.process(
        microbatches=1,
        matrices=("experts", "router"),
        reduces=True,
        buckets=(Bucket("experts", ("experts",)), Bucket("router", ("router",))),
    )
    h.refresh()
    h.forward(0)
    h.backward(0)
    h.finalize()
    h.reduce("experts")
    h.reduced("experts")
    if h.legal:
        h.reduce("router")
        h.reduced("router")
    h.update()


@ROWS.enacted(
    "megatron-lm-2218",
    "NVIDIA/Megatron-LM#2218",
    state="fixed 2025-11",
    what="reduce-scatters in an order that differs from rank to rank",
    cause="Ranks of one group issue the collectives of their buckets in different orders.",
    consequence="a hang",
    fix="sort the collectives by bucket",
    clause="reduction.out-of-order",
    at="start_reduction bucket second",
)
def buckets_reduced_as_they_come(h: History) -> None:
    # This is one rank of the group; the other ranks keep the declared order.
    h.process(
        microbatches=1,
        matrices=("v", "w"),
        reduces=True,
        buckets=(Bucket("first", ("v",)), Bucket("second", ("w",))),
        reductions=("first", "second"),
    )
    h.refresh()
    h.forward(0)
    h.backward(0)
    h.finalize()
    for bucket in ("first", "second") if h.legal else ("second", "first"):
        h.reduce(bucket)
    for bucket in ("first", "second"):
        h.reduced(bucket)
    h.update()


@ROWS.enacted(
    "megatron-lm-1012",
    "NVIDIA/Megatron-LM#1012",
    state="closed as stale 2024",
    what="the deferred gradient of the embedding comes after the reduction",
    cause="The schedule starts the reduction of gradients, and finishes the embedding's deferred "
    "gradient after it.",
    guessed="that the embedding is a bucket of its own",
    consequence="the embedding's gradient is not the sum of all replicas",
    fix="none published; in the corrected run the deferred gradient comes first",
    clause="reduction.incomplete",
    at="start_reduction bucket embedding",
)
def the_embedding_is_reduced_before_its_dw(h: History) -> None:
    h.process(
        microbatches=1,
        matrices=("layers", "embedding"),
        reduces=True,
        buckets=(Bucket("layers", ("layers",)), Bucket("embedding", ("embedding",))),
    )
    h.refresh()
    h.forward(0)
    h.dgrad(0)
    if h.legal:
        h.wgrad(0)
    h.reduce("embedding")
    if h.faulty:
        h.wgrad(0)
    h.reduce("layers")
    h.finalize()
    for bucket in ("layers", "embedding"):
        h.reduced(bucket)
    h.update()


@ROWS.enacted(
    "open-instruct-1498",
    "allenai/open-instruct#1498",
    state="fixed 2026-02",
    what="gradients that a trainer accumulates itself are lost under ZeRO-2",
    cause="The engine was configured with one microbatch per step. So it ended the accumulation "
    "after every backward, and the next backward began a new one.",
    consequence="silent wrong numbers: only the last microbatch counts",
    fix="mark the last backward of a step",
    clause="order.incomplete",
    at="finalize s0",
)
def every_backward_ends_the_accumulation(h: History) -> None:
    h.process()
    h.refresh()
    h.forward(0)
    h.backward(0)
    if h.faulty:
        h.finalize()
    h.forward(1)
    h.backward(1)
    h.end()


@ROWS.enacted(
    "megatron-bridge-5380",
    "NVIDIA-NeMo/Megatron-Bridge#5380",
    state="fixed 2026-08",
    what="a stage with a copy of the embedding is missing in the embedding's group",
    cause="The group that sums the embedding's gradient had only the first and the last stage. It "
    "lacked the separate stage for multi-token prediction, which also has a copy.",
    consequence="copies diverge; the loss jumps after a resume, which loads equal copies",
    fix="put every stage with a copy into the group",
    clause="reduction.missing",
    at="check_update e0",
)
@ROWS.enacted(
    "piper-13",
    "uw-syfi/piper#13",
    "uw-syfi/piper#25",
    state="open 2026-07",
    what="the gradients of a tied embedding on two pipeline ranks are never summed",
    cause="Both ranks have a copy of the parameters, and no reduction sums the copies' gradients.",
    consequence="copies diverge",
    fix="a reduction over the ranks that share the parameter",
    clause="reduction.missing",
    at="check_update e0",
)
def a_tied_copy_that_is_never_reduced(h: History) -> None:
    h.process(
        microbatches=1,
        matrices=("layers", "embedding"),
        reduces=True,
        buckets=(Bucket("layers", ("layers",)), Bucket("tied", ("embedding",))),
    )
    h.refresh()
    h.forward(0)
    h.backward(0)
    h.finalize()
    h.reduce("layers")
    h.reduced("layers")
    if h.legal:
        h.reduce("tied")
        h.reduced("tied")
    h.update()


ROWS.untold(
    "megatron-lm-844",
    "NVIDIA/Megatron-LM#844",
    state="closed 2024",
    what="a shared embedding gets wrong gradients with a distributed optimizer",
    cause="Gradients are scattered over replicas before the embedding's gradient is summed over "
    "the first and the last stage, so that the sum joins parts of different replicas.",
    consequence="wrong embedding gradients",
    fix="sum over the stages first",
    kind="evidence",
    why="For the contract, a bucket is reduced once; it does not distinguish two sums over "
    "different groups of ranks.",
)
ROWS.untold(
    "megatron-lm-6500",
    "NVIDIA/Megatron-LM#6500",
    state="closed pull request 2026-08",
    what="the shared embedding's gradient, sharded differently on two stages",
    cause="Stages shard the embedding at different offsets, but the sum added the shards "
    "element by element.",
    consequence="silent wrong numbers",
    fix="gather the whole gradient before the sum",
    kind="values",
    why="The reduction runs once and at the right time; the contract does not see which elements "
    "it adds.",
)
