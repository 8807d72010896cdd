"""
Public failures of order: a scaling update is skipped, repeated, or read at the wrong time.
"""

from __future__ import annotations

from .failure import Rows
from .history import History
from .transcript import addresses, stage

ROWS = Rows("order")

#: The report that shows a skipped or doubled scaling update.
UPDATES = "the count of scaling updates that the device keeps"
#: The report that shows whether dI ran with its own tape's scales.
SCALES = "the forward whose scales dI ran with"
#: The report that shows whether scales moved in an update.
MOVED = "each movement, in an update, of scales that move once per epoch"
#: The report that shows whether random numbers were drawn before.
DRAWS = "the position of the random generator at which F began to draw"
#: The report that shows whether dI drew the random numbers of its own forward.
DRAWN = "the position of the random generator at which the recomputation began to draw"


@ROWS.enacted(
    "transformer-engine-3213",
    "NVIDIA/TransformerEngine#3213",
    state="open 2026-07",
    what="duplicate updates of FP8 state in recomputation",
    cause="The flag of the first module is taken from one global queue, but checkpoint frames are "
    "recomputed in another order. So several modules update the scales for one forward.",
    consequence="silent wrong numbers",
    fix="each checkpoint frame owns its flag",
    clause="order.scaling-updates",
    at="commit_dgrad 0I0",
    reports=UPDATES,
)
def a_recomputation_that_updates_again(h: History) -> None:
    # The recomputation is a part of dI; dI itself makes one update.
    h.process(microbatches=1, reports_updates=True)
    h.refresh()
    h.forward(0)
    h.dgrad(0, updates=2 if h.faulty else 1)
    h.wgrad(0)
    h.end()


@ROWS.enacted(
    "transformer-engine-1138",
    "NVIDIA/TransformerEngine#1138",
    state="fixed 2024-08",
    what="captured backward returns gradients in another order of parameters",
    cause="Gradients of one call were assigned to other parameters.",
    consequence="NaN",
    fix="the same order of parameters in both passes",
    clause="arena.mismatch",
    at="check_wgrad 0W0",
    reports="the addresses that dW writes",
)
def gradients_of_other_parameters(h: History) -> None:
    own, exchanged = addresses("fc1", "fc2"), addresses("fc2", "fc1")
    h.process(microbatches=1, destinations=own)
    h.refresh()
    h.forward(0)
    h.dgrad(0)
    h.wgrad(0, into=exchanged if h.faulty else own)
    h.end()


@ROWS.enacted(
    "transformer-engine-1190",
    "NVIDIA/TransformerEngine#1190",
    "NVIDIA/TransformerEngine#1254",
    state="fixed 2024-10",
    what="FP8 with activation checkpointing is unstable",
    cause="The recomputation runs outside the autocast, so that no module owns the update after "
    "backward, and the amax of gradients is never reduced.",
    consequence="silent wrong numbers",
    fix="keep the flag of the first module in a queue",
    clause="order.scaling-updates",
    at="commit_dgrad 0I0",
    reports=UPDATES,
)
@ROWS.enacted(
    "transformer-engine-3456",
    "NVIDIA/TransformerEngine#3456",
    state="open 2026-09",
    what="delayed scaling updates that run in one module's backward",
    cause="The update runs in the first module's backward. Unused branches, checkpointing and "
    "delayed wgrad skip the update or make it early. The re-enactment skips it.",
    consequence="silent wrong numbers",
    fix="a scope that updates once for each backward or schedule",
    clause="order.scaling-updates",
    at="commit_dgrad 0I0",
    reports=UPDATES,
)
@ROWS.enacted(
    "megatron-lm-7538",
    "NVIDIA/Megatron-LM#7538",
    state="open 2026-09",
    what="recomputation leaves the FP8 autocast",
    cause="Recomputation runs inside autograd's backward and so outside the autocast of the "
    "forward: the region silently runs in BF16.",
    guessed="that the backward through the region then makes no scaling update either",
    consequence="silent wrong numbers, or a crash",
    fix="enter the autocast that was recorded",
    clause="order.scaling-updates",
    at="commit_dgrad 0I0",
    reports=f"{UPDATES}, for each module separately",
)
def a_backward_that_never_updates(h: History) -> None:
    h.process(microbatches=1, reports_updates=True)
    h.refresh()
    h.forward(0)
    h.dgrad(0, updates=0 if h.faulty else 1)
    h.wgrad(0)
    h.end()


@ROWS.enacted(
    "transformer-engine-814",
    "NVIDIA/TransformerEngine#814",
    "NVIDIA/TransformerEngine#825",
    state="fixed 2024-04",
    what="amax histories of modules that did not run are rolled",
    cause="A zero enters the amax history of a module that did not run. So the module's scale "
    "grows, while its FP8 data keeps the old scale.",
    consequence="silent wrong numbers",
    fix="roll the history only if the module recorded an amax",
    clause="order.token",
    at="check_forward 1F0",
    reports=f"{UPDATES}, for each module separately",
)
def the_history_of_an_idle_module_is_rolled(h: History) -> None:
    h.process(stage(0, microbatches=1, domain="ran"), stage(1, microbatches=1, domain="idle"))
    h.refresh(0)
    h.forward(0, token=0)
    h.refresh(1)
    h.forward(0, stage=1, token=1 if h.faulty else 0)
    for index in (1, 0):
        h.backward(0, stage=index)
    h.end()


@ROWS.enacted(
    "transformer-engine-657",
    "NVIDIA/TransformerEngine#657",
    "NVIDIA/TransformerEngine#659",
    state="fixed 2024-02",
    what="F and dI of a microbatch use different scales under a pipeline",
    cause="dI reads the inverse scale of the module, which the forward of a later microbatch has "
    "replaced.",
    consequence="silent wrong numbers",
    fix="the tape keeps a copy",
    clause="order.scales-moved",
    at="check_dgrad 0I0",
    reports="that its tapes use live scales (in its configuration)",
)
def a_later_forward_moves_the_scales(h: History) -> None:
    h.process(tape_scales="live" if h.faulty else "carried")
    h.refresh()
    h.forward(0)
    h.forward(1)
    h.backward(0)
    h.backward(1)
    h.end()


@ROWS.enacted(
    "transformer-engine-1723",
    "NVIDIA/TransformerEngine#1723",
    state="fixed 2025-04",
    what="FP8 recomputation keeps references to scales instead of copies",
    cause="For the recomputation, references to the live scale tensors are saved instead of "
    "copies, so the recomputation runs with newer scales.",
    consequence="silent wrong numbers",
    fix="stash copies",
    clause="order.wrong-scales",
    at="commit_dgrad 0I0",
    reports=SCALES,
)
@ROWS.enacted(
    "transformer-engine-3284",
    "NVIDIA/TransformerEngine#3284",
    "NVIDIA/TransformerEngine#3394",
    state="fixed 2026-08",
    what="state for recomputation is lost for inner autocasts and modules in evaluation mode",
    cause="One condition decides whether the state is saved, and a different condition decides "
    "whether it is restored.",
    guessed="that the latest forward's scales are used if the missing state does not raise",
    consequence="a missing key; silent wrong numbers, or a leak",
    fix="the same condition for saving and restoring",
    clause="order.wrong-scales",
    at="commit_dgrad 0I0",
    reports=SCALES,
)
def recomputed_with_the_latest_scales(h: History) -> None:
    h.process(tape_scales="carried")
    h.refresh()
    h.forward(0)
    h.forward(1)
    h.dgrad(0, scales_of=1 if h.faulty else None)
    h.wgrad(0)
    h.backward(1)
    h.end()


@ROWS.enacted(
    "transformer-engine-1326",
    "NVIDIA/TransformerEngine#1326",
    state="fixed 2024-11",
    what="scaling updates of FP8 parameters at unexpected times",
    cause="A callback recognised parameters by their Python id. A later object can have the id of "
    "a deleted object, so that another model's parameters triggered the update.",
    consequence="corrupted communication buffers, hangs",
    fix="no special updates for FP8 parameters",
    clause="order.scaling-updates",
    at="commit_dgrad 0I0",
    reports=UPDATES,
)
def an_update_that_another_model_triggers(h: History) -> None:
    h.process(microbatches=1, reports_updates=True)
    h.refresh()
    h.forward(0)
    h.dgrad(0, updates=2 if h.faulty else 1)
    h.wgrad(0)
    h.end()


@ROWS.enacted(
    "torchtitan-698",
    "pytorch/torchtitan#698",
    state="fixed 2024-11",
    what="scales that should move once per iteration never move",
    cause="A setting of an enumeration type was compared with a string. So the call between "
    "backward and optimizer that makes scales from amax histories never ran.",
    consequence="delayed scaling keeps its initial scales",
    fix="compare with the enumeration's value",
    clause="order.scales-not-moved",
    at="commit_update e0",
    reports=MOVED,
)
def an_update_that_moves_no_scales(h: History) -> None:
    h.process(scales="epoch")
    h.refresh()
    for microbatch in (0, 1):
        h.forward(microbatch)
    for microbatch in (0, 1):
        h.backward(microbatch)
    h.end(moves=h.legal)


ROWS.untold(
    "marin-7659",
    "marin-community/marin#7659",
    state="closed 2026",
    what="gradient accumulation keeps only the last microbatch's amax",
    cause="Amax histories are passed along with the gradients. Gradients are summed over "
    "microbatches, but histories are replaced.",
    consequence="scales too large, clipped activations, a worse model without an error",
    fix="keep the largest amax of all microbatches",
    kind="values",
    why="The scaling update runs once for each microbatch, as it should, but writes a wrong value "
    "into the history.",
)


@ROWS.enacted(
    "megatron-lm-6992",
    "NVIDIA/Megatron-LM#6992",
    state="open 2026-08",
    what="validation replays the graph that was captured for training",
    cause="Validation replayed a graph that was captured for training, with all its writes. For "
    "example, a router continued to count tokens.",
    guessed="that the replayed forward updates the scales, as a forward of training does",
    consequence="validation changes training state",
    fix="capture a separate graph for validation",
    clause="order.scaling-updates",
    at="commit_evaluation s0 e1",
    reports="the scaling updates that the device made in an evaluation",
)
def validated_by_the_graph_of_training(h: History) -> None:
    h.process(microbatches=1, reports_updates=True)
    h.whole_step()
    h.evaluation(cached=False, updates=1 if h.faulty else 0)
    h.whole_step()


@ROWS.enacted(
    "pytorch-84614",
    "pytorch/pytorch#84614",
    "pytorch/pytorch#84967",
    state="fixed 2022-09",
    what="replays of a captured forward drop the same elements",
    cause="A graph kept the seed of its capture. A new seed reset only the offset, so later "
    "replays drew the same numbers as earlier replays.",
    consequence="the same dropout mask in each iteration",
    fix="each replay also reads the generator's seed",
    clause="order.draws-again",
    at="commit_forward 0F0 e1",
    reports=DRAWS,
    guessed="that the caller sets a new seed between two steps",
)
def a_graph_with_the_seed_of_its_capture(h: History) -> None:
    h.process(microbatches=1, reports_draws=True)
    for step in range(2):
        h.refresh()
        h.forward(0, draws=0 if h.faulty else step)
        h.backward(0)
        h.end()


@ROWS.enacted(
    "olmo-core-828",
    "allenai/OLMo-core#828",
    state="fixed 2026-08",
    what="recomputation draws fresh dropout masks",
    cause="Activation checkpointing was configured not to keep the generator's state. So the "
    "recomputed forward dropped different elements than the first forward.",
    consequence="a cross entropy of 2.495 instead of 2.195 after 150 steps",
    fix="keep the state if dropout is active",
    clause="order.wrong-draws",
    at="commit_dgrad 0I0",
    reports=DRAWN,
)
@ROWS.enacted(
    "guided-diffusion-167",
    "openai/guided-diffusion#167",
    state="open 2025-12",
    what="a checkpoint helper runs the forward again with different dropout masks",
    cause="The helper repeats the forward in backward without restoring the generator's state.",
    consequence="the loss diverges",
    fix="restore the state before the forward is repeated",
    clause="order.wrong-draws",
    at="commit_dgrad 0I0",
    reports=DRAWN,
)
@ROWS.enacted(
    "pytorch-190758",
    "pytorch/pytorch#190758",
    "pytorch/pytorch#190717",
    state="open 2026-07",
    what="a compiled backward recomputes dropout with fresh random numbers",
    cause="Under a memory budget, the partitioner recomputes random operations in the backward "
    "graph, where they draw new numbers.",
    consequence="silent wrong gradients",
    fix="none yet",
    clause="order.wrong-draws",
    at="commit_dgrad 0I0",
    reports=DRAWN,
)
def recomputed_with_fresh_random_numbers(h: History) -> None:
    h.process(microbatches=1, reports_draws=True, recomputes_draws=True)
    h.refresh()
    h.forward(0)
    h.dgrad(0, draws_of=0 if h.faulty else None)
    h.wgrad(0)
    h.end()
