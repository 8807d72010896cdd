"""
Public failures of capture memory: a replay overwrites memory that another graph still needs.
"""

from __future__ import annotations

from .failure import Rows
from .history import History
from .transcript import stage

ROWS = Rows("capture")

#: The report that shows whether a product replaces a gradient or is added to it.
IF_OVERWRITTEN = "whether dW overwrites"

ROWS.untold(
    "megatron-lm-5975",
    "NVIDIA/Megatron-LM#5975",
    state="fixed 2026-07",
    what="a forward buffer is reused before the capture of backward has recorded its read",
    cause="During capture only weak references held the buffers that backward would read, so "
    "the pool gave their memory to another tensor of the same capture.",
    consequence="silent wrong numbers",
    fix="keep the buffers that other graphs read until every graph is captured",
    kind="memory",
    why="Replays follow the order of capture; the fault is in the captured graph itself.",
)


@ROWS.enacted(
    "transformer-engine-2376",
    "NVIDIA/TransformerEngine#2376",
    state="fixed 2025-11",
    what="graphs of dW are captured in an order that the schedule does not keep",
    cause="Each dW was captured directly after its dI, although the schedule delays dW, and all "
    "graphs of a process share one memory pool.",
    consequence="silent wrong numbers",
    fix="the captured order lists dW separately (`_order` with half entries)",
    clause="capture.out-of-order",
    at="check_wgrad 0W0",
)
def wgrad_captured_after_its_dgrad(h: History) -> None:
    forwards = [(0, 0, "F"), (0, 1, "F")]
    at_once = [(0, 0, "dI"), (0, 0, "dW"), (0, 1, "dI"), (0, 1, "dW")]
    delayed = [(0, 0, "dI"), (0, 1, "dI"), (0, 0, "dW"), (0, 1, "dW")]
    h.process(pool="all", capture_order=forwards + (at_once if h.faulty else delayed))
    h.refresh()
    h.forward(0, slot=0)
    h.forward(1, slot=1)
    h.dgrad(0)
    h.dgrad(1)
    h.wgrad(0)
    h.wgrad(1)
    h.end()


@ROWS.enacted(
    "transformer-engine-2937",
    "NVIDIA/TransformerEngine#2937",
    state="fixed 2026-07",
    what="gradients of parameters are the static buffers of a graph",
    cause="A parameter's gradient was the graph's own buffer, which the next replay overwrites.",
    consequence="silent wrong numbers",
    fix="copy the gradient when the graph returns it",
    clause="arena.overwrite",
    at="check_wgrad 0W1",
    reports=IF_OVERWRITTEN,
)
def gradients_in_a_graphs_own_buffer(h: History) -> None:
    h.process()
    h.refresh()
    h.forward(0)
    h.forward(1)
    h.backward(0)
    h.dgrad(1)
    h.wgrad(1, overwrites=h.faulty)
    h.end()


@ROWS.enacted(
    "megatron-lm-71395182",
    "NVIDIA/Megatron-LM!3824",
    "NVIDIA/Megatron-LM@71395182",
    state="fixed 2025-08",
    what="with virtual pipeline stages, graphs are captured into a wrong memory pool",
    cause="The virtual rank was read from global state, so that a chunk's graphs were captured "
    "into another chunk's memory pool.",
    consequence="silent wrong numbers, or a crash",
    fix="pass the chunk's number",
    clause="capture.out-of-order",
    at="check_dgrad 0I0",
)
def chunks_in_one_memory_pool(h: History) -> None:
    pools = ("chunk 1", "chunk 1") if h.faulty else ("chunk 0", "chunk 1")
    h.process(*(stage(i, microbatches=1, slots=1, pool=pools[i]) for i in (0, 1)))
    for index in (0, 1):
        h.refresh(index)
        h.forward(0, stage=index)
    for index in (1, 0):
        h.backward(0, stage=index)
    h.end()


ROWS.untold(
    "megatron-lm-5966",
    "NVIDIA/Megatron-LM#5966",
    state="open 2026-07",
    what="interleaved stages under Transformer Engine's graphs: NaN after ninety steps",
    cause="Not diagnosed; without graphs the failure disappears.",
    consequence="a gradient norm that jumps, then NaN",
    fix="none published",
    kind="cause",
    why="An event log of such a run would show the broken clause; none was published. On a GPU, "
    "`qeffect runtime report probes --only interleaved` shows what the library's graphs compute "
    "in this shape, used correctly and incorrectly. Nobody knows which misuse this was.",
)
ROWS.untold(
    "megatron-bridge-2096",
    "NVIDIA-NeMo/Megatron-Bridge#2096",
    "NVIDIA-NeMo/Megatron-Bridge#2209",
    state="worked round 2026-02",
    what="interleaved stages in MXFP8 under Transformer Engine's graphs: NaN",
    cause="The issue was closed as an error in the training recipe, which no longer interleaves.",
    consequence="NaN gradient norm",
    fix="interleaving switched off",
    kind="cause",
    why="The thread does not name the wrong step.",
)


@ROWS.enacted(
    "pytorch-169545",
    "pytorch/pytorch#169545",
    "pytorch/pytorch#184003",
    state="message mended 2026-05",
    what="compiled graphs crash under gradient accumulation",
    cause="The gradient is in memory of the previous run of a graph tree, and the next run reuses "
    "this memory.",
    consequence="a crash: torch itself refuses",
    fix="a clearer message",
    clause="arena.overwrite",
    at="check_wgrad 0W1",
    reports=IF_OVERWRITTEN,
)
def gradients_of_the_previous_generation(h: History) -> None:
    h.process(slots=1)
    h.refresh()
    h.forward(0)
    h.backward(0)
    h.forward(1)
    h.dgrad(1)
    h.wgrad(1, overwrites=h.faulty)
    h.end()


@ROWS.enacted(
    "pytorch-148439",
    "pytorch/pytorch#148439",
    state="closed 2025",
    what="outputs of a graph tree overwritten by a later run",
    cause="All microbatches of a pipeline run the same graph tree, while tapes of earlier "
    "microbatches are still live.",
    consequence="a crash: torch itself refuses",
    fix="copy the outputs, or mark the beginning of each step",
    clause="ownership.slot-busy",
    at="check_forward 0F1",
)
def one_graph_tree_for_live_tapes(h: History) -> None:
    h.process()
    h.refresh()
    h.forward(0, slot=0)
    h.forward(1, slot=0 if h.faulty else 1)
    h.backward(0)
    h.backward(1)
    h.end()


ROWS.untold(
    "sglang-29216",
    "sgl-project/sglang#29216",
    "sgl-project/sglang#28569",
    state="closed 2026",
    what="a graph reads a workspace that was freed",
    cause="A tensor that was allocated outside the capture was freed after the capture.",
    consequence="485 of 500 answers corrupted, no crash",
    fix="keep a reference to the tensor",
    kind="memory",
    why="The contract hands out slots and sees no other memory; torch's own check of live inputs "
    "finds this fault.",
)
ROWS.untold(
    "vllm-43909",
    "vllm-project/vllm#43909",
    state="fixed 2026-05",
    what="a temporary weight is freed before its graph is replayed",
    cause="A tensor that was allocated outside the capture was freed after the capture.",
    consequence="an illegal memory access",
    fix="keep a reference to the tensor",
    kind="memory",
    why="The contract hands out slots and sees no other memory; torch's own check of live inputs "
    "finds this fault.",
)
