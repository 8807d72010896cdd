"""
Public failures of completion: data is read before it is written, or on a stream without a wait.
"""

from __future__ import annotations

from .failure import Rows
from .history import History
from .transcript import stage

ROWS = Rows("completion")


@ROWS.enacted(
    "megatron-lm-2652",
    "NVIDIA/Megatron-LM#2652",
    "NVIDIA-NeMo/Megatron-Bridge#1706",
    state="fixed 2026-01",
    what="data-parallel buffers are filled on a side stream too early",
    cause="Parameters were copied on a side stream before the default stream had filled them.",
    consequence="empty parameters",
    fix="the streams wait for each other, both ways",
    clause="completion.caller-to-graph",
    at="check_refresh s0",
)
def parameters_copied_before_they_were_filled(h: History) -> None:
    h.process(microbatches=1)
    h.refresh(joined=h.legal)
    h.forward(0)
    h.backward(0)
    h.end()


@ROWS.enacted(
    "megatron-lm-3140",
    "NVIDIA/Megatron-LM#3140",
    state="fixed 2026-02",
    what="an offloaded optimizer awaits the event of another stream",
    cause="The event that the forward awaits was recorded on the stream that copies to the "
    "host, not on the stream that copies parameters back to the device.",
    consequence="silent wrong numbers",
    fix="record the event on the stream that copies parameters back",
    clause="completion.caller-to-graph",
    at="check_refresh s0",
    reports="a wait, under the name of the stream on which its event was recorded",
)
def awaited_the_event_of_another_stream(h: History) -> None:
    h.process(microbatches=1, callers=("main", "to host", "to device"))
    h.submit("to host")
    h.submit("to device")
    h.join("to host" if h.faulty else "to device")
    h.refresh(caller="to device", joined=None)
    h.forward(0)
    h.backward(0)
    h.end()


@ROWS.enacted(
    "megatron-lm-3164",
    "NVIDIA/Megatron-LM#3164",
    state="fixed 2026-02",
    what="expert-parallel overlap with graphs of a whole iteration runs wgrad on a wrong stream",
    cause="The wgrad of a node of the overlapped schedule ran on the current stream instead of the "
    "node's stream, and tensors of one stream were freed without waiting for other streams.",
    consequence="a crash, or silent wrong numbers",
    fix="run wgrad on the node's stream",
    clause="completion.wrong-stream",
    at="check_wgrad 0W0",
    reports="the stream on which dW is launched",
)
def wgrad_on_the_ambient_stream(h: History) -> None:
    h.process(stage(0, domain="node", microbatches=1), stage(1, domain="ambient", microbatches=1))
    for index in (0, 1):
        h.refresh(index)
        h.forward(0, stage=index)
    h.backward(0, stage=1)
    h.dgrad(0)
    h.wgrad(0, stream="ambient" if h.faulty else "node")
    h.end()


@ROWS.enacted(
    "transformer-engine-3089",
    "NVIDIA/TransformerEngine#3089",
    state="fixed 2026-06",
    what="a delayed wgrad runs on the stream of its creation",
    cause="The deferred closure kept the stream that was current when dI made it. It was called "
    "under the stream for wgrad but launched its work on the old stream, while its readers "
    "awaited the stream for wgrad.",
    consequence="NaN, corrupted gradients",
    fix="look up the stream when the closure is called",
    clause="completion.wrong-stream",
    at="check_wgrad 0W0",
    reports="the stream on which dW is launched",
)
def wgrad_on_the_stream_of_its_creation(h: History) -> None:
    h.process(stage(0, domain="wgrad", microbatches=1), stage(1, domain="creation", microbatches=1))
    for index in (0, 1):
        h.refresh(index)
        h.forward(0, stage=index)
    h.backward(0, stage=1)
    h.dgrad(0)
    h.wgrad(0, stream="creation" if h.faulty else "wgrad")
    h.end()


@ROWS.enacted(
    "megatron-lm-6643",
    "NVIDIA/Megatron-LM#6643",
    state="fixed 2026-08",
    what="two graph runners on one stream",
    cause="Streams come from a bounded pool, and two runners got the same stream.",
    consequence="false dependencies, lost overlap",
    fix="a pool of distinct streams",
    kind="harmless",
    why="One stream for two runners adds order and removes none, so the numbers stay right.",
)
def two_runners_on_one_stream(h: History) -> None:
    h.process(
        stage(0, microbatches=1, domain="a"),
        stage(1, microbatches=1, domain="a" if h.faulty else "b"),
    )
    for index in (0, 1):
        h.refresh(index)
        h.forward(0, stage=index)
    for index in (1, 0):
        h.backward(0, stage=index)
    h.end()


@ROWS.enacted(
    "pytorch-144535",
    "pytorch/pytorch#144535",
    state="fixed 2025-01",
    what="under a pipeline, sharded data parallelism misses its last callback",
    cause="The pipeline ran backward by hand and skipped the callback that waits for the "
    "reduce-scatter before gradients are read.",
    consequence="a race on gradients",
    fix="call the callback",
    clause="reduction.in-flight",
    at="check_update e0",
)
def gradients_read_under_their_reduction(h: History) -> None:
    h.process(microbatches=1, reduces=True)
    h.refresh()
    h.forward(0)
    h.backward(0)
    h.finalize()
    h.reduce()
    if h.legal:
        h.reduced()
    h.update()


@ROWS.enacted(
    "megatron-lm-3693",
    "NVIDIA/Megatron-LM#3693",
    state="fixed 2026-03",
    what="with several optimizers, overlapped reductions wait for a wrong stream",
    cause="The communication stream waited for the default stream, not for the stream that "
    "wrote the gradients.",
    consequence="silent wrong numbers",
    fix="wait for the current stream",
    clause="completion.graph-to-caller",
    at="start_reduction s0",
    reports="the stream on which a reduction is enqueued",
)
def the_communication_stream_waited_for_another(h: History) -> None:
    h.process(microbatches=1, reduces=True, callers=("main", "communication"))
    h.refresh()
    h.forward(0)
    h.backward(0)
    if h.legal:
        h.await_replays("communication")
    h.reduce(caller="communication")
    h.finalize()
    h.reduced(caller="main")
    h.update()


@ROWS.enacted(
    "deepspeed-7898",
    "deepspeedai/DeepSpeed#7898",
    state="fixed 2026-03",
    what="ZeRO-3 gives NaN with a newer torch",
    cause="The reduction's stream waited for the default stream, but autograd used another stream.",
    consequence="NaN in a random layer and rank",
    fix="wait for the current stream",
    clause="completion.graph-to-caller",
    at="start_reduction s0",
    reports="the stream on which a reduction is enqueued",
)
def the_reductions_stream_waited_before_the_last_wgrad(h: History) -> None:
    # The reduction's stream waited for the default stream before the last dW: one dW too few.
    h.process(reduces=True, callers=("main", "reduction"))
    h.refresh()
    h.forward(0)
    h.backward(0)
    h.await_replays("reduction")
    h.forward(1)
    h.backward(1)
    if h.legal:
        h.await_replays("reduction")
    h.reduce(caller="reduction")
    h.finalize()
    h.reduced(caller="main")
    h.update()


@ROWS.enacted(
    "deepspeed-5606",
    "deepspeedai/DeepSpeed#5606",
    state="fixed 2024-06",
    what="overlapped communication of ZeRO-1 and ZeRO-2 sends a bucket that is being refilled",
    cause="The reduction waits for the default stream, but the default stream does not wait for "
    "the reduction. If communication takes longer, the bucket is refilled while it is sent.",
    guessed="that a bucket is acquired and released with its tape's slot; so the refusal comes at "
    "the next tape's forward, not at the gradient's write",
    consequence="silent wrong numbers",
    fix="make both streams wait for each other",
    clause="ownership.slot-busy",
    at="check_forward 0F1",
    reports="its buckets as its tapes' slots, and each reduction as a read of its bucket",
)
def the_bucket_is_filled_before_its_reduction_ended(h: History) -> None:
    # The reduction reads the only bucket.
    h.process(slots=1, sends_gradient=True)
    h.refresh()
    h.forward(0, slot=0)
    h.backward(0)
    h.send(0, gradient=True)
    if h.legal:
        h.sent(0, gradient=True)
    h.forward(1, slot=0)
    h.backward(1)
    h.send(1, gradient=True)
    h.sent(1, gradient=True)
    h.end()
