"""
Public failures of version: a quantized weight cache was made from the wrong weights.
"""

from __future__ import annotations

from .failure import Rows
from .history import History

ROWS = Rows("version")

#: The report that shows whether a cache was really filled.
FILLS = "the caches that the device filled, and from which weights"


@ROWS.enacted(
    "megatron-lm-32305103",
    "NVIDIA/Megatron-LM!3880",
    "NVIDIA/Megatron-LM@32305103",
    state="fixed 2025-09",
    what="the flag of the first microbatch is not set under graphs",
    cause="The graph manager never passed the flag on, so captured forwards skipped the "
    "quantization of new weights.",
    consequence="silent wrong numbers: FP8 weights of an earlier step",
    fix="set the flag from the counter of microbatches",
    clause="version.stale-cache",
    at="check_forward 0F0 e1",
)
def no_microbatch_is_the_first(h: History) -> None:
    h.process()
    h.whole_step()
    if h.legal:
        h.refresh()
    for microbatch in (0, 1):
        h.forward(microbatch)
        h.backward(microbatch)
    h.end()


@ROWS.enacted(
    "transformer-engine-1972",
    "NVIDIA/TransformerEngine#1972",
    "NVIDIA/TransformerEngine#2524",
    state="fixed 2025",
    what="a quantized weight workspace lacks the layout that the next call needs",
    cause="A call that needs another layout reused a cached workspace.",
    guessed="that the layout differed because the cache's use changed between two steps",
    consequence="a crash, or the wrong layout",
    fix="drop the cache when its uses change",
    kind="evidence",
    why="The contract knows which weights a cache holds, but not in which layout.",
)
def a_workspace_of_another_layout(h: History) -> None:
    h.process(microbatches=1)
    h.whole_step()
    h.refresh()
    if h.legal:
        h.invalidate()
        h.refresh()
    h.forward(0)
    h.backward(0)
    h.end()


@ROWS.enacted(
    "megatron-bridge-3076",
    "NVIDIA-NeMo/Megatron-Bridge#3076",
    state="fixed 2026-04",
    what="under a graph of the whole iteration, MXFP8 parameters are gathered from old content",
    cause="The graph gathers the parameters, but in its first step the host did not stage them, "
    "so the cache was filled with the buffer's old content.",
    consequence="silent wrong numbers: the loss diverges",
    fix="stage the parameters once the graph exists",
    clause="version.wrong-fill",
    at="commit_refresh s0 e1",
    reports=FILLS,
)
def nothing_staged_for_the_first_graph_step(h: History) -> None:
    h.process(microbatches=1, reports_fills=True)
    h.whole_step()
    h.refresh(weights_of=0 if h.faulty else None)
    h.forward(0)
    h.backward(0)
    h.end()


@ROWS.enacted(
    "megatron-lm-6525",
    "NVIDIA/Megatron-LM#6525",
    "NVIDIA/Megatron-LM#6388",
    state="fixed 2026-08",
    what="sharded parameters are not ready before a graph is replayed",
    cause="A replay, or a prefetch, read the gathered parameters before the gather had finished.",
    consequence="silent wrong numbers",
    fix="make the gathered parameters available before the replay",
    clause="completion.caller-to-graph",
    at="check_forward 0F0",
    reports="the stream that gathered the parameters, as the stream that fills a forward's inputs",
)
def parameters_not_there_before_the_replay(h: History) -> None:
    h.process(microbatches=1, callers=("main", "gather"))
    h.refresh()
    h.forward(0, caller="gather", joined=h.legal)
    h.backward(0)
    h.end()


@ROWS.enacted(
    "transformer-engine-1047",
    "NVIDIA/TransformerEngine#1047",
    "NVIDIA/TransformerEngine#1083",
    state="reported 2024-07, mended 2024-08",
    what="updates of FP8 buffers make training unstable",
    cause="The inverse scale of the cached FP8 weights belongs to the recipe: an update after "
    "microbatch 0 moves it, while the weights stay quantized with the old scale.",
    consequence="silent wrong numbers",
    fix="write the inverse scale only together with the quantized data",
    clause="version.stale-cache",
    at="check_forward 0F1",
    reports="a move of the scales of cached weights, as a loss of the cache",
)
def scales_of_cached_weights_move(h: History) -> None:
    h.process()
    h.refresh()
    h.forward(0)
    h.backward(0)
    if h.faulty:
        h.invalidate()
    h.forward(1)
    h.backward(1)
    h.end()


@ROWS.enacted(
    "transformer-engine-539",
    "NVIDIA/TransformerEngine#539",
    "NVIDIA/TransformerEngine#646",
    "NVIDIA/Megatron-LM#607",
    state="fixed 2024-02",
    what="FP8 with a pipeline and recomputation uses weights that were never written",
    cause="The warm-up forward of microbatch 0 runs without gradients and quantizes the weights "
    "into a new tensor; microbatch 1 uses the cached placeholder that was never written.",
    consequence="NaN",
    fix="quantize in place, also in the first phase of recomputation",
    clause="version.fill-missing",
    at="commit_forward 0F0",
    reports=FILLS,
)
def the_placeholder_is_never_written(h: History) -> None:
    h.process(reports_fills=True)
    h.forward(0, refresh=True, filled=() if h.faulty else None)
    h.forward(1)
    h.backward(0)
    h.backward(1)
    h.end()


@ROWS.enacted(
    "transformer-engine-3051",
    "NVIDIA/TransformerEngine#3051",
    "NVIDIA/TransformerEngine#3065",
    state="fixed 2026-06",
    what="a grouped layer drops the tensor that skips the weight update during capture",
    cause="The tensor was replaced by a constant, so the decision whether to quantize was made "
    "at capture and replayed for every microbatch.",
    guessed="which decision was captured: the re-enacted graph never quantizes",
    consequence="silent wrong numbers: stale weights, or weights quantized again",
    fix="pass the tensor through",
    clause="version.fill-missing",
    at="commit_refresh s0 e1",
    reports=FILLS,
)
def the_graph_never_quantizes(h: History) -> None:
    h.process(reports_fills=True)
    h.whole_step()
    h.refresh(filled=() if h.faulty else None)
    for microbatch in (0, 1):
        h.forward(microbatch)
        h.backward(microbatch)
    h.end()


@ROWS.enacted(
    "transformer-engine-2119",
    "NVIDIA/TransformerEngine#2119",
    state="fixed 2025-09",
    what="under graphs, the FP8 weight cache is filled again at every replay",
    cause="The quantization kernels ignored the flag that should have stopped them.",
    consequence="weights are quantized at every replay",
    fix="pass the flag to every kernel",
    clause="version.fill-unasked",
    at="commit_forward 0F1",
    reports=FILLS,
)
def every_replay_quantizes(h: History) -> None:
    h.process(reports_fills=True)
    h.refresh()
    h.forward(0)
    h.forward(1, filled=("fc1", "fc2") if h.faulty else None)
    h.backward(0)
    h.backward(1)
    h.end()


@ROWS.enacted(
    "megatron-lm-2572",
    "NVIDIA/Megatron-LM#2572",
    "NVIDIA/Megatron-LM#3056",
    state="open; found by running releases 0.16.1 to 0.19.2, no report known",
    what="local graphs with a pipeline never quantize a weight again after the second step",
    cause="A graph's runner writes the device's flag only when the runner's own copy of it "
    "changes. With a pipeline each microbatch has a runner, so the first runner never clears "
    "a flag that the others set.",
    consequence="silent wrong numbers: the loss falls, from weights of an earlier step",
    fix="none known; in the corrected run the first microbatch quantizes",
    clause="version.stale-cache",
    at="check_forward 0F0 e1",
)
@ROWS.enacted(
    "automodel-3606",
    "NVIDIA-NeMo/Automodel#3606",
    state="found in the review of a merged pull request, 2026-08",
    what="no update invalidates a cache of quantized expert weights",
    cause="The cache is keyed by address, shape and version counter of the weight, but an "
    "update of sharded expert weights changes none of the three.",
    consequence="experts compute with the weights that training began with",
    fix="key the cache by the update",
    clause="version.stale-cache",
    at="check_forward 0F0 e1",
)
def nothing_fills_the_cache_after_an_update(h: History) -> None:
    h.process()
    h.whole_step()
    if h.legal:
        h.refresh()
    for microbatch in (0, 1):
        h.forward(microbatch)
        h.backward(microbatch)
    h.end()


@ROWS.enacted(
    "megatron-lm-950",
    "NVIDIA/Megatron-LM#950",
    state="open 2024-07",
    what="overlapped gathers of parameters come too late for layers that run before their bucket",
    cause="Buckets are gathered in the order of storage. A layer that runs before its bucket's "
    "gather has nothing to wait for, and computes with the previous step's weights.",
    guessed="that the layer's weight cache is filled from the bucket's current content",
    consequence="silent wrong numbers",
    fix="no fix known; in the corrected run the gather comes first",
    clause="version.wrong-fill",
    at="commit_refresh s0 e1",
    reports=FILLS,
)
@ROWS.enacted(
    "nemo-rl-561",
    "NVIDIA-NeMo/RL#561",
    state="fixed 2025-06",
    what="overlapped gathers of parameters gather the reference model's weights",
    cause="After an update there is only one gather, before the next forward. That forward was the "
    "reference model's, so the reference weights were gathered instead of the updated weights.",
    guessed="that the reference weights are those of the first step",
    consequence="silent wrong numbers",
    fix="no overlap while the reference model runs",
    clause="version.wrong-fill",
    at="commit_refresh s0 e1",
    reports=FILLS,
)
def filled_from_weights_of_another_step(h: History) -> None:
    h.process(microbatches=1, reports_fills=True)
    h.whole_step()
    h.refresh(weights_of=0 if h.faulty else None)
    h.forward(0)
    h.backward(0)
    h.end()
