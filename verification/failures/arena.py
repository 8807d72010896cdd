"""
Public failures of the gradient arena: a gradient is lost, added twice, or overwrites another.
"""

from __future__ import annotations

from .failure import Rows
from .history import History
from .transcript import addresses

ROWS = Rows("arena")

#: The report that shows whether a product replaces a gradient or is added to it.
IF_OVERWRITTEN = "whether dW overwrites"
#: The report by which the contract counts a ring of gradient buffers.
AS_SLOTS = "its gradient buffers as its tapes' slots"


@ROWS.enacted(
    "transformer-engine-2715",
    "NVIDIA/TransformerEngine#2715",
    state="fixed 2026-03",
    what="after a graph's warm-up, every microbatch is treated as the first",
    cause="Warm-up set the flag of the first microbatch again. So the layer's only graph was "
    "captured with a product that overwrites the gradient, and was replayed for every microbatch.",
    consequence="silent wrong numbers: only the last microbatch counts",
    fix="capture the accumulating form",
    clause="arena.overwrite",
    at="check_wgrad 0W1",
    reports=IF_OVERWRITTEN,
)
def every_microbatch_is_the_first(h: History) -> None:
    h.process()
    h.refresh()
    for microbatch in (0, 1):
        h.forward(microbatch)
        h.dgrad(microbatch)
        h.wgrad(microbatch, overwrites=h.faulty or microbatch == 0)
    h.end()


@ROWS.enacted(
    "transformer-engine-2936",
    "NVIDIA/TransformerEngine#2936",
    state="fixed 2026-04",
    what="the request to overwrite main_grad is not honoured in a grouped layer",
    cause="The product went to a fresh tensor, and main_grad kept the last step's value.",
    consequence="silent wrong numbers",
    fix="write into main_grad in grouped layers too",
    clause="arena.mismatch",
    at="check_wgrad 0W0",
    reports="the addresses that dW writes",
)
def wgrad_into_a_fresh_tensor(h: History) -> None:
    main_grad, fresh = addresses("fc1", "fc2"), addresses("fc1", "fc2", first=65536)
    h.process(microbatches=1, destinations=main_grad)
    h.refresh()
    h.forward(0)
    h.dgrad(0)
    h.wgrad(0, into=fresh if h.faulty else main_grad)
    h.end()


@ROWS.enacted(
    "transformer-engine-869",
    "NVIDIA/TransformerEngine#869",
    state="fixed 2024-06",
    what="capturing graphs resets .grad",
    cause="Capture replaced the gradient tensors, so graphs write one buffer and the optimizer "
    "reads another.",
    consequence="silent wrong numbers",
    fix="leave .grad unchanged",
    clause="arena.mismatch",
    at="bind 0I0",
    reports="the addresses that dI binds for dW",
)
def graphs_write_another_buffer(h: History) -> None:
    read, written = addresses("fc1", "fc2"), addresses("fc1", "fc2", first=65536)
    h.process(microbatches=1, destinations=read)
    h.refresh()
    h.forward(0)
    h.dgrad(0, bound=written if h.faulty else read)
    h.wgrad(0)
    h.end()


@ROWS.enacted(
    "transformer-engine-3437",
    "NVIDIA/TransformerEngine#3437",
    state="open 2026-08",
    what="tied weights do not accumulate with delayed wgrad",
    cause="Each deferred wgrad of the weight assigns the gradient instead of adding to it.",
    consequence="silent wrong numbers",
    fix="no fix known; in the corrected run the second wgrad adds",
    clause="arena.overwrite",
    at="check_wgrad 0W0.1",
    reports=IF_OVERWRITTEN,
)
def the_second_use_of_a_tied_weight_assigns(h: History) -> None:
    h.process(microbatches=1, invocations=2, matrices=("tied",))
    h.refresh()
    for invocation in (0, 1):
        h.forward(0, invocation=invocation)
    for invocation in (0, 1):
        h.dgrad(0, invocation=invocation)
        h.wgrad(0, invocation=invocation, overwrites=h.faulty or invocation == 0)
    h.end()


ROWS.untold(
    "pytorch-180952",
    "pytorch/pytorch#180952",
    "pytorch/pytorch#181365",
    state="fixed in torch 2.13",
    what="a split backward counts shared weights twice",
    cause="A weight that is used at two places of one path gets its gradient twice when the "
    "backward is split.",
    consequence="silent wrong numbers",
    fix="hooks that restore the saved gradient",
    kind="autograd",
    why="The fault is inside one call of autograd. The runtime would still report each matrix as "
    "covered once.",
)
ROWS.untold(
    "transformer-engine-545",
    "NVIDIA/TransformerEngine#545",
    state="fixed 2023-11",
    what="the placeholder gradient of a shared weight is summed",
    cause="A placeholder that was never initialised replaced the gradient, and the reduction added "
    "the placeholder.",
    consequence="silent wrong numbers",
    fix="zero it",
    kind="values",
    shown="tests/failures/test_values.py",
    why="The fix zeroes the placeholder and still adds it: only a number changes, no action does.",
)
ROWS.untold(
    "megatron-lm-6565",
    "NVIDIA/Megatron-LM#6565",
    state="fixed 2026-08",
    what="a placeholder for wgrad is not zeroed",
    cause="A reused shared buffer served as the gradient's placeholder. It was not zeroed, and was "
    "added to the gradient.",
    consequence="silent wrong numbers",
    fix="zero it",
    kind="values",
    shown="tests/failures/test_values.py",
    why="The fix zeroes the placeholder and still adds it: only a number changes, no action does.",
)


@ROWS.enacted(
    "megatron-lm-4609",
    "NVIDIA/Megatron-LM#4609",
    state="fixed 2026-05",
    what="gathering parameters layer by layer corrupts gradients",
    cause="Parameters are received in the gradient buffer, which was not zeroed before the first "
    "microbatch added to it.",
    consequence="silent wrong numbers",
    fix="zero the buffer after the parameters were used",
    clause="arena.stale-accumulation",
    at="check_wgrad 0W0",
    reports=f"{IF_OVERWRITTEN}, or that the buffer was zeroed after its last use",
)
def added_to_received_parameters(h: History) -> None:
    h.process(microbatches=1)
    h.refresh()
    h.forward(0)
    h.dgrad(0)
    h.wgrad(0, overwrites=h.legal)
    h.end()


@ROWS.enacted(
    "megatron-lm-2802",
    "NVIDIA/Megatron-LM#2802",
    "NVIDIA/Megatron-LM#4800",
    "NVIDIA/Megatron-LM#5236",
    "NVIDIA-NeMo/Megatron-Bridge#2134",
    "NVIDIA-NeMo/Megatron-Bridge#3980",
    state="fixed in five steps, 2025-09 to 2026-07",
    what="MXFP8 parameters and gradients share one storage, and gradients are added to parameters",
    cause="The copies of parameters into the shared buffer, their gather and the zeroing of the "
    "buffer came in a wrong order, so gradients were added to old parameters.",
    consequence="silent wrong numbers, no convergence",
    fix="a fixed order of the copies, the gather and the zeroing",
    clause="arena.stale-accumulation",
    at="check_wgrad 0W0 e1",
    reports=f"{IF_OVERWRITTEN}, or that the buffer was zeroed after its last use",
)
def added_to_staged_parameters(h: History) -> None:
    h.process(microbatches=1)
    h.whole_step()
    h.refresh()
    h.forward(0)
    h.dgrad(0)
    h.wgrad(0, overwrites=h.legal)
    h.end()


@ROWS.enacted(
    "megatron-lm-6060",
    "NVIDIA/Megatron-LM#6060",
    state="fixed 2026-08",
    what="a reduce-scatter of weight gradients overlaps the next graph, which overwrites them",
    cause="Gradients are in a ring of buffers. The next graph overwrote a buffer that was still "
    "being reduced.",
    guessed="that a buffer is acquired and released with its tape's slot; so the refusal comes at "
    "the next tape's forward, not at the gradient's write",
    consequence="silent wrong numbers",
    fix="an event for each buffer of the ring",
    clause="ownership.slot-busy",
    at="check_forward 0F1",
    reports=f"{AS_SLOTS}, and each reduction as a read of its buffer",
)
def ring_slot_overwritten_under_its_reduction(h: History) -> None:
    # The reduction reads a slot of the ring.
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


@ROWS.enacted(
    "megatron-lm-5222",
    "NVIDIA/Megatron-LM#5222",
    "NVIDIA/Megatron-LM#4054",
    state="fixed 2026",
    what="double buffers of sharded data parallelism are overwritten during their reduction",
    cause="More units were in flight than there are buffers, and wgrad was written into a buffer "
    "that was being reduced.",
    guessed="that a buffer is acquired and released with its tape's slot; so the refusal comes at "
    "the next tape's forward, not at the gradient's write",
    consequence="silent wrong numbers",
    fix="enforce the limit on units in flight when main_grad is fetched",
    clause="ownership.pool-exhausted",
    at="check_forward 0F2",
    reports=AS_SLOTS,
)
def more_units_than_buffers(h: History) -> None:
    h.process(microbatches=3, slots=2)
    h.refresh()
    h.forward(0)
    h.forward(1)
    if h.legal:
        h.backward(0)
    h.forward(2)
    if h.faulty:
        h.backward(0)
    h.backward(1)
    h.backward(2)
    h.end()


@ROWS.enacted(
    "deepspeed-6550",
    "deepspeedai/DeepSpeed#6550",
    state="fixed 2024-09",
    what="gradient accumulation of ZeRO-2 with offload loses gradients",
    cause="In the first step the counter of micro-steps starts at a different value than in later "
    "steps. So a later microbatch's gradient is copied instead of added.",
    consequence="silent wrong numbers",
    fix="start the counter at the same value in every step",
    clause="arena.overwrite",
    at="check_wgrad 0W1 e1",
    reports=IF_OVERWRITTEN,
)
def a_counter_with_two_origins(h: History) -> None:
    h.process()
    h.whole_step()
    h.refresh()
    for microbatch in (0, 1):
        h.forward(microbatch)
        h.dgrad(microbatch)
        h.wgrad(microbatch, overwrites=microbatch == 0 or h.faulty)
    h.end()


@ROWS.enacted(
    "deepspeed-7805",
    "deepspeedai/DeepSpeed#7805",
    "deepspeedai/DeepSpeed#6993",
    "deepspeedai/DeepSpeed#7371",
    state="fixed 2026-01",
    what="the index of two alternating buffers is reset",
    cause="Clearing a bucket reset the index that selects one of the two buffers, so that the "
    "buffer in flight was filled again.",
    guessed="that a buffer is acquired and released with its tape's slot; so the refusal comes at "
    "the next tape's forward, not at the gradient's write",
    consequence="silent wrong numbers",
    fix="keep the index",
    clause="ownership.slot-busy",
    at="check_forward 0F1",
    reports=f"{AS_SLOTS}, and each reduction as a read of its buffer",
)
def the_bucket_in_flight_is_filled(h: History) -> None:
    # The reduction reads one of the two buffers.
    h.process(slots=2, sends_gradient=True)
    h.refresh()
    h.forward(0, slot=0)
    h.backward(0)
    h.send(0, gradient=True)
    h.forward(1, slot=0 if h.faulty else 1)
    h.backward(1)
    h.send(1, gradient=True)
    h.sent(0, gradient=True)
    h.sent(1, gradient=True)
    h.end()


@ROWS.enacted(
    "deepspeed-7965",
    "deepspeedai/DeepSpeed#7965",
    state="fixed 2026-04",
    what="the storage of a bucket is reused while it is being reduced",
    cause="The allocator did not know that the reduction's stream still used the storage. It gave "
    "the storage to a later tensor of the original stream, which did not wait for the reduction.",
    guessed="which tensor got the storage: re-enacted with the next microbatch's buffer, acquired "
    "and released with its tape's slot; so the refusal comes at that tape's forward",
    consequence="NaN in the third step",
    fix="call record_stream, so that the storage is reused only after the reduction",
    clause="completion.transfer-to-graph",
    at="check_forward 0F1",
    reports=f"{AS_SLOTS}, and each reduction as a read of its buffer, on the stream that reduces",
)
def storage_recycled_under_its_reduction(h: History) -> None:
    # The host drops the storage as soon as the reduction is enqueued, but only the stream knows
    # when it ends. If the storage is recorded on that stream, it is given out after that end.
    h.process(slots=1, sends_gradient=True, callers=("main", "reduce"))
    h.refresh()
    for microbatch in (0, 1):
        h.forward(microbatch, slot=0)
        h.backward(microbatch)
        h.await_replays("reduce")
        h.send(microbatch, gradient=True, caller="reduce")
        h.sent(microbatch, gradient=True, caller="reduce")
        if h.legal:
            h.join("reduce")
    h.end()
