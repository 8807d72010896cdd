"""
Public failures of ownership: a buffer is reused too early, or an action takes the wrong work.
"""

from __future__ import annotations

from .failure import Rows
from .history import History

ROWS = Rows("ownership")


@ROWS.enacted(
    "megatron-lm-4047",
    "NVIDIA/Megatron-LM#4047",
    state="fixed 2026-04",
    what="an asynchronous send reads an output that was deallocated",
    cause="With interleaved stages and overlapped messages, a forward's output was freed while its "
    "send still read it. The send then sent the memory's next content.",
    consequence="silent wrong numbers on the next stage",
    fix="wait for the send's handle before the output is freed",
    clause="ownership.slot-busy",
    at="check_forward 0F1",
)
def output_freed_under_its_send(h: History) -> None:
    h.process(slots=1, sends_output=True)
    h.refresh()
    h.forward(0)
    h.send(0)
    h.backward(0)
    if h.legal:
        h.sent(0)
    h.forward(1, slot=0)
    h.send(1)
    h.backward(1)
    h.sent(1)
    h.end()


@ROWS.enacted(
    "deepspeed-2800",
    "deepspeedai/DeepSpeed#2800",
    "deepspeedai/DeepSpeed#2862",
    state="fixed 2023-03",
    what="a pipeline schedule is right only with a spare buffer",
    cause="A stage received the activation of a later microbatch into a buffer whose input "
    "gradient had not been sent yet; a spare buffer hid the fault.",
    consequence="silent wrong numbers with the exact number of buffers",
    fix="send before the receive, and allocate the exact number of buffers",
    clause="ownership.slot-busy",
    at="reserve 0RECV_F2",
)
def received_over_a_gradient_to_send(h: History) -> None:
    h.process(microbatches=3, slots=2, sends_gradient=True)
    h.refresh()
    h.forward(0)
    h.forward(1)
    h.backward(0)
    if h.legal:
        h.send(0, gradient=True)
        h.sent(0, gradient=True)
    h.receive(2, slot=0)
    h.forward(2)
    for microbatch in (1, 2):
        h.backward(microbatch)
        h.send(microbatch, gradient=True)
        h.sent(microbatch, gradient=True)
    h.end()


@ROWS.enacted(
    "megatron-lm-5876",
    "NVIDIA/Megatron-LM#5876",
    state="closed pull request 2026-07",
    what="retained inputs of two microbatches share one receive buffer",
    cause="All inputs that 1F1B keeps for backward shared the one preallocated receive buffer.",
    consequence="a crash; where it did not crash, silent wrong numbers",
    fix="copy on receive",
    clause="ownership.slot-busy",
    at="reserve 0RECV_F1",
)
def one_receive_buffer_for_two(h: History) -> None:
    h.process()
    h.refresh()
    h.receive(0, slot=0)
    h.forward(0)
    h.receive(1, slot=0 if h.faulty else 1)
    h.forward(1)
    h.backward(0)
    h.backward(1)
    h.end()


@ROWS.enacted(
    "transformer-engine-2018",
    "NVIDIA/TransformerEngine#2018",
    state="fixed 2025-08",
    what="static gradients of a graph's inputs are reused one backward too early",
    cause="The buffer of a chunk's input gradient went back to the pool of static buffers before "
    "the message that reads it had ended.",
    consequence="silent wrong numbers",
    fix="reserve the buffer for its chunk, and choose buffers by signature",
    clause="ownership.slot-busy",
    at="check_forward 0F1",
)
def dgrad_buffer_reused_early(h: History) -> None:
    h.process(slots=1, sends_gradient=True)
    h.refresh()
    h.forward(0)
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
    "megatron-lm-422",
    "NVIDIA/Megatron-LM#422",
    state="closed as stale 2023",
    what="NaN gradients with per-layer graphs under 1F1B, none with one microbatch in flight",
    cause="Not diagnosed in the thread.",
    guessed="the whole cause: each layer has one static set of buffers, and 1F1B keeps two tapes",
    consequence="NaN",
    fix="none published; the corrected run has a second set of buffers",
    clause="ownership.slot-busy",
    at="check_forward 0F1",
)
def one_static_set_for_two_tapes(h: History) -> None:
    h.process()
    h.refresh()
    h.forward(0, slot=0)
    h.forward(1, slot=0 if h.faulty else 1)
    h.backward(0)
    h.backward(1)
    h.end()


ROWS.untold(
    "megatron-lm-1279",
    "NVIDIA/Megatron-LM#1279",
    state="closed as stale 2024",
    what="NaN gradients with CUDA graphs",
    cause="Not diagnosed in the thread.",
    consequence="NaN",
    fix="none published",
    kind="cause",
    why="Nothing in the thread says which step was wrong.",
)


@ROWS.enacted(
    "zero-bubble-e1de7aed",
    "sail-sg/zero-bubble@e1de7aed",
    state="fixed 2024-09",
    what="split and full backwards in one schedule give wrong gradients",
    cause="For a backward that the schedule splits, no deferred work was stored. So the later dW "
    "took an empty entry, and the right entry leaked.",
    consequence="silent wrong numbers",
    fix="queue work only where the backward is split; assert that the queues are empty at the end",
    clause="ownership.work-not-queued",
    at="commit_dgrad 0I0",
)
def nothing_queued_for_a_split_backward(h: History) -> None:
    h.process()
    h.refresh()
    h.forward(0)
    h.dgrad(0, queued=() if h.faulty else ("fc1", "fc2"))
    h.wgrad(0)
    h.forward(1)
    h.backward(1)
    h.end()


@ROWS.enacted(
    "zero-bubble-8eb5ae97",
    "sail-sg/zero-bubble@8eb5ae97",
    state="fixed 2024-09",
    what="in ZB-V, a full backward runs as a split backward",
    cause="The flag that splits a backward was set for the whole process, so a backward that the "
    "schedule does not split ran as a split backward.",
    guessed="that no dW ran for the work that this backward deferred",
    consequence="a wrong or missing dW",
    fix="one flag for each backward",
    clause="arena.incomplete",
    at="finalize s0",
)
def a_whole_backward_ran_split(h: History) -> None:
    h.process()
    h.refresh()
    h.forward(0)
    h.backward(0)
    h.forward(1)
    h.dgrad(1)
    if h.legal:
        h.wgrad(1)
    h.end()


@ROWS.enacted(
    "megatron-lm-6145",
    "NVIDIA/Megatron-LM#6145",
    "NVIDIA/Megatron-LM#6020",
    state="fixed 2026-07",
    what="absorbed multi-latent attention with delayed wgrad crashes",
    cause="A linear layer whose weight is read directly never defers its gradient, but was "
    "configured to defer it. Its dW then popped a closure that was never queued.",
    consequence="a crash (pop of an empty queue)",
    fix="configure that layer without delayed wgrad",
    clause="ownership.work-not-queued",
    at="commit_dgrad 0I0",
)
def a_layer_that_never_defers(h: History) -> None:
    h.process(matrices=("absorbed", "down") if h.faulty else ("down",))
    h.refresh()
    for microbatch in (0, 1):
        h.forward(microbatch)
        h.dgrad(microbatch, queued=("down",))
        h.wgrad(microbatch)
    h.end()


ROWS.untold(
    "pytorch-185331",
    "pytorch/pytorch#185331",
    "pytorch/pytorch#185355",
    state="open 2026-05",
    what="hooks on a stage's input fire more often in each step",
    cause="The persistent receive buffer is itself the autograd leaf, so the hooks that a user "
    "registers on it accumulate from step to step.",
    consequence="hooks run twice, four times, six times",
    fix="a copy of the buffer, or a new buffer for each receive",
    kind="autograd",
    why="A hook on a tensor is not an action of the contract, and the buffer's contents are right.",
)


@ROWS.enacted(
    "pytorch-139404",
    "pytorch/pytorch#139404",
    state="closed 2024",
    what="a stage keeps only the result of its latest backward",
    cause="A stage has one variable for input gradients, not one per microbatch. A backward that "
    "runs before the previous gradient is sent replaces that gradient.",
    guessed="that the variable is acquired and released with its tape's slot; so the refusal comes "
    "at the next tape's forward",
    consequence="wrong gradients in any schedule that delays a send",
    fix="one input gradient per microbatch; in the corrected run the send ends first",
    clause="ownership.slot-busy",
    at="check_forward 0F1",
    reports="its single variable for results as the single slot of its tapes",
)
def one_place_for_all_dgrads(h: History) -> None:
    h.process(slots=1, sends_gradient=True)
    h.refresh()
    h.forward(0, slot=0)
    h.backward(0)
    if h.legal:
        h.send(0, gradient=True)
        h.sent(0, gradient=True)
    h.forward(1, slot=0)
    h.backward(1)
    for microbatch in (1,) if h.legal else (0, 1):
        h.send(microbatch, gradient=True)
        h.sent(microbatch, gradient=True)
    h.end()


@ROWS.enacted(
    "elixir-12",
    "hpcaitech/Elixir#12",
    state="fixed 2023-03",
    what="tensors that backward needs are in a memory block that another chunk takes over",
    cause="The tensors that a forward saved for its backward were in a block of parameters, and "
    "the block was given to another chunk before that backward ran.",
    consequence="wrong gradients",
    fix="a buffer that stays with the forward until its backward",
    clause="ownership.slot-busy",
    at="check_forward 0F1",
)
def a_block_given_to_another_chunk(h: History) -> None:
    h.process(slots=2)
    h.refresh()
    h.forward(0, slot=1)
    h.forward(1, slot=1 if h.faulty else 0)
    h.backward(1)
    h.backward(0)
    h.end()


@ROWS.enacted(
    "deepspeed-3900",
    "deepspeedai/DeepSpeed#3900",
    state="open 2023-07",
    what="the last stage keeps one loss for all microbatches",
    cause="Forward stores the loss in one variable, and backward differentiates that variable. "
    "In a schedule that runs all forwards first, the variable holds the last microbatch's loss.",
    consequence="wrong gradients in any schedule but 1F1B",
    fix="no fix known; in the corrected run each backward takes its own loss",
    clause="ownership.wrong-key",
    at="check_dgrad 0I0",
)
def one_loss_for_all_microbatches(h: History) -> None:
    h.process()
    h.refresh()
    h.forward(0)
    h.forward(1)
    h.dgrad(0, tape_of=1 if h.faulty else None)
    h.wgrad(0)
    h.backward(1)
    h.end()
