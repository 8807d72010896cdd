"""
Public failures of completion: a copy between host and device is not ordered with other device work.
"""

from __future__ import annotations

from .failure import Rows
from .history import History

ROWS = Rows("completion")

#: The report by which the contract orders copies to the host.
AS_READS = "each copy to the host as a read of its tape's slot, on the stream that copies"

#: The report by which the contract orders asynchronous saves.
AS_WEIGHTS_READ = "each asynchronous save, as a read of its stage's weights"


@ROWS.enacted(
    "torchtune-1867",
    "meta-pytorch/torchtune#1867",
    "meta-pytorch/torchtune#1936",
    state="fixed 2024-10",
    what="the storage of offloaded activations is reused while it is still copied",
    cause="A saved tensor was freed while the copying stream still read its storage. The copying "
    "stream's use was recorded for only one kind of tensor.",
    guessed="which tensor got the storage: re-enacted with the next microbatch's slot",
    consequence="NaN gradients",
    fix="record the copying stream's use whenever another tensor owns the storage",
    clause="completion.transfer-to-graph",
    at="check_forward 0F1",
    reports=AS_READS,
)
def storage_recycled_under_a_copy_to_the_host(h: History) -> None:
    h.process(slots=1, sends_output=True, callers=("main", "copy"))
    h.refresh()
    for microbatch in (0, 1):
        h.forward(microbatch, slot=0)
        h.await_replays("copy")
        h.send(microbatch, caller="copy")
        h.backward(microbatch)
        h.sent(microbatch, caller="copy")
        if h.legal:
            h.join("copy")
    h.end()


@ROWS.enacted(
    "pytorch-180665",
    "pytorch/pytorch#180665",
    state="closed pull request 2026-04",
    what="hybrid sharded data parallelism copies wrong gradients to the host",
    cause="The output of the reduce-scatter belongs to one stream, and a second stream copies "
    "the output to the host. The host freed the output at once, so the first stream's next output "
    "reused its storage.",
    guessed="that an output is acquired and released with its tape's slot; so the refusal comes at "
    "the next tape's forward",
    consequence="silent wrong gradients, in a third to a half of the runs",
    fix="keep the output until the second stream's copy has ended",
    clause="completion.transfer-to-graph",
    at="check_forward 0F1",
    reports="its reduced gradients as its tapes' slots, and each copy to the host as a read",
)
def reduced_gradient_recycled_under_its_copy(h: History) -> None:
    h.process(slots=1, sends_gradient=True, callers=("main", "copy"))
    h.refresh()
    for microbatch in (0, 1):
        h.forward(microbatch, slot=0)
        h.backward(microbatch)
        h.await_replays("copy")
        h.send(microbatch, gradient=True, caller="copy")
        h.sent(microbatch, gradient=True, caller="copy")
        if h.legal:
            h.join("copy")
    h.end()


@ROWS.enacted(
    "trl-7195",
    "huggingface/trl#7195",
    state="fixed 2026-09",
    what="offloaded activations are copied before they are written",
    cause="The copying stream waited for a stream that was looked up once, at construction, not "
    "for the stream that computes now. Also, a copy of a view was enqueued after the wait.",
    consequence="a rare race; a first attempt at the fix gave wrong gradients",
    fix="look the stream up at each copy, and copy the view before the wait",
    clause="completion.graph-to-caller",
    at="read 0SEND_F1",
    reports=AS_READS,
)
def copied_before_the_forward_ended(h: History) -> None:
    h.process(sends_output=True, callers=("main", "copy"))
    h.refresh()
    for microbatch in (0, 1):
        h.forward(microbatch)
        if h.legal or microbatch == 0:
            h.await_replays("copy")
        h.send(microbatch, caller="copy")
        h.sent(microbatch, caller="copy")
        h.join("copy")
    for microbatch in (0, 1):
        h.backward(microbatch)
    h.end()


@ROWS.enacted(
    "megatron-lm-7398",
    "NVIDIA/Megatron-LM#7398",
    state="open 2026-09",
    what="an offloaded activation is copied back before it has arrived on the host",
    cause="If backward comes before the prefetch, the copy back is enqueued without a wait for "
    "the copy to the host. It reads the old content of the staging buffer.",
    guessed="that the copy back and backward run on one stream, which the copy to the host feeds",
    consequence="silent wrong gradients in the first iteration",
    fix="no fix known; in the corrected run the copy back waits",
    clause="completion.caller-to-graph",
    at="check_dgrad 0I0",
    reports="the stream that copies to the host, as the stream that fills the inputs of dI",
)
def copied_back_before_it_had_arrived(h: History) -> None:
    h.process(microbatches=1, callers=("main", "to host"))
    h.refresh()
    h.forward(0)
    h.await_replays("to host")
    h.dgrad(0, caller="to host", joined=h.legal)
    h.wgrad(0)
    h.end()


@ROWS.enacted(
    "verl-7083",
    "verl-project/verl#7083",
    state="fixed 2026-07",
    what="broadcast weights are used as soon as the broadcast is enqueued",
    cause="The operation that waits for a broadcast of weights returned once the broadcast was "
    "enqueued; nothing made the loader's stream wait for the broadcast to end.",
    guessed="that the loader is a refresh of the weight cache",
    consequence="partly written weights are loaded",
    fix="wait for the stream of the broadcast",
    clause="completion.caller-to-graph",
    at="check_refresh s0",
    reports="the stream of the broadcast, as the stream that made the weights",
)
def weights_used_under_their_broadcast(h: History) -> None:
    h.process(microbatches=1, callers=("main", "broadcast"))
    h.refresh(caller="broadcast", joined=h.legal)
    h.forward(0)
    h.backward(0)
    h.end()


@ROWS.enacted(
    "pytorch-tutorials-3688",
    "pytorch/tutorials#3688",
    "pytorch/tutorials#3584",
    state="closed pull request 2025-12",
    what="the recipe for asynchronous checkpoints lets the optimizer overwrite what a save reads",
    cause="The recipe waited for the previous save only after the optimizer's step. So the update "
    "overwrote the weights while the save could still read them.",
    consequence="a checkpoint may hold weights of two steps",
    fix="wait for the previous save before the optimizer's step",
    clause="completion.weights-in-use",
    at="check_update e1",
    reports=AS_WEIGHTS_READ,
)
def updated_while_a_save_reads(h: History) -> None:
    h.process(microbatches=1)
    h.whole_step()
    h.start_weights_read()
    h.refresh()
    h.forward(0)
    h.backward(0)
    h.finalize()
    if h.legal:
        h.finish_weights_read()
    h.update()
    if h.faulty:
        h.finish_weights_read()


@ROWS.enacted(
    "nemo-rl-4183",
    "NVIDIA-NeMo/RL#4183",
    state="open 2026-09",
    what="optimizer state is moved to the host while a persistent writer still saves it",
    cause="The writer of asynchronous saves keeps handles of the optimizer's state on the device. "
    "The state was moved to the host and back, to other memory; the writer kept the old handles.",
    guessed="that the runtime reports the move as an update, and the handles as an unfinished "
    "read: the contract knows weights, not optimizer state",
    consequence="every later checkpoint holds the same bytes of optimizer state",
    fix="finish the save and release the handles before the move",
    clause="completion.weights-in-use",
    at="check_update e0",
    reports=AS_WEIGHTS_READ + ", and the move of the saved state as the update",
)
def moved_while_a_writer_holds_handles(h: History) -> None:
    h.process(microbatches=1)
    h.refresh()
    h.forward(0)
    h.backward(0)
    h.finalize()
    h.start_weights_read()
    if h.legal:
        h.finish_weights_read()
    h.update()
    if h.faulty:
        h.finish_weights_read()
