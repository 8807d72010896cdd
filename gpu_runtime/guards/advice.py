"""
The likely cause and the remedy of each refusal, for a user of a guarded framework.

The contract's own clauses also have a cause and a remedy, but these are written for a person who
calls the contract directly. Here the user calls a framework, and the guard calls the contract. Most
texts apply to every framework. Each framework's own words replace the placeholders ``{loop}``,
``{between}``, ``{evaluate}``, ``{update}``, ``{zero}``, ``{recover}`` and ``{failed}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from qeffect.refusals import Refused
from qeffect.spec.clauses import SCHEDULE_CLAUSES

__all__ = [
    "DEEPSPEED_ADVICE",
    "MEGATRON_ADVICE",
    "PIPELINING_ADVICE",
    "Advice",
    "AdviceTable",
    "advised",
]


@attrs.frozen
class Advice:
    """
    The advice that is shown with a refusal.

    Args:
        cause: The likely cause, as text.
        remedy: What to do, as text.
    """

    cause: str
    remedy: str


AdviceTable = Mapping[str, Advice]
"""The advice of one framework, by clause id."""

_Own = Mapping[str, str | tuple[str, str]]
"""A framework's own cause and remedy by clause id; a remedy alone keeps the common cause."""

_UNFINISHED = "The checkpoint was about to be saved while microbatches of the step were unfinished."
_RAISED = "An earlier action of this step raised an exception, but the run continued."
_SAVE = "Save checkpoints {between}."
_CALLED_TWICE = (
    "Look for a loop, a retry or a wrapper that makes this call twice, and remove one call."
)
_UNKNOWN = Advice(
    "The guard lost track of the step: a second thread called the framework, or the guard has a "
    "fault.",
    "Call the framework from one thread. If only one thread calls it, report this message to "
    "QEffect, with the event logs that the guard writes if you pass `log=`.",
)

#: For every framework, by clause id: cause and remedy.
_COMMON: Mapping[str, tuple[str, str]] = {
    # Microbatches and their tensors
    "ownership.key-live": (
        "The forward of this microbatch ran a second time before its backward.",
        "Run one forward per stage and microbatch in a step. " + _CALLED_TWICE + " To evaluate, "
        "{evaluate}: evaluations are not guarded.",
    ),
    "ownership.repeated-forward": (
        "A forward ran for a microbatch that had already finished in this step, or that failed: an "
        "action raised an exception, but the run continued.",
        "Run each microbatch once in a step. {failed}",
    ),
    "ownership.pool-exhausted": (
        "More microbatches are under way than the schedule has room for: a backward was left out, "
        "or forwards run ahead.",
        "Run each backward at its position in the schedule.",
    ),
    "ownership.slot-busy": (
        "The memory for a new microbatch still holds an earlier microbatch: a backward was left "
        "out, or forwards run ahead.",
        "Run each backward at its position in the schedule.",
    ),
    "ownership.stale-reference": (
        "The action belongs to a microbatch that has already finished, or whose forward never ran "
        "in this step.",
        "Run the forward of the microbatch first, and each of its other actions once.",
    ),
    "ownership.wrong-key": (
        "The action was given a tensor of another microbatch: two tensors were swapped, or an "
        "earlier tensor was kept.",
        "Give each action the input, output and gradient of its own microbatch. Look for code that "
        "keeps tensors in a list or a queue.",
    ),
    "ownership.not-forwarded": (
        "A backward began before the forward of its microbatch had run.",
        "Run the forward of the microbatch first.",
    ),
    "ownership.duplicate-dgrad": (
        "The backward of this microbatch ran a second time.",
        "Run one backward per stage and microbatch in a step. " + _CALLED_TWICE,
    ),
    "ownership.wgrad-before-dgrad": (
        "The weight gradient of a microbatch was computed before the gradient of its input.",
        "Compute the gradient of the microbatch's input first.",
    ),
    "ownership.duplicate-wgrad": (
        "The weight gradient of this microbatch was computed a second time, and would be added "
        "twice.",
        "Compute each weight gradient once. " + _CALLED_TWICE,
    ),
    "ownership.work-not-queued": (
        "A backward left out the gradients of these weights.",
        "Let the backward compute the gradient of every weight that the forward has used.",
    ),
    "ownership.read-before-dgrad": (
        "The gradient of a microbatch was about to be sent, but the backward that computes it was "
        "left out or comes later.",
        "Run the backward of the microbatch before its gradient is sent.",
    ),
    "ownership.read-duplicate": (
        "A tensor of this microbatch was sent twice.",
        "Send each output and each gradient once. " + _CALLED_TWICE,
    ),
    "ownership.read-not-begun": (
        "The run waited for a send that was never posted.",
        "Post the send before the run waits for it.",
    ),
    "ownership.transfer-in-flight": (
        "A send or a receive of this microbatch has not finished.",
        "Wait for the message before the next action uses its tensor.",
    ),
    "ownership.receive-missing": (
        "The input or the gradient of this microbatch has not arrived: its receive was left out or "
        "comes later.",
        "Receive the tensor before the action that uses it.",
    ),
    "ownership.receive-duplicate": (
        "A receive was posted twice for one microbatch; the second would take another microbatch's "
        "message.",
        "Post each receive once. " + _CALLED_TWICE,
    ),
    "ownership.receive-not-posted": (
        "The run waited for a receive that was never posted, or waited for it twice.",
        "Post each receive once, and wait for it once.",
    ),
    "ownership.receive-before-read": (
        "A receive ended before its tensor was sent; both stages are on this rank.",
        "Send the tensor before the run waits for it.",
    ),
    "ownership.no-such-reader": (
        "A stage sent a tensor that no other rank receives: the stage is at an end of the "
        "pipeline, or its neighbour is on the same rank.",
        "Send tensors only to a neighbour stage on another rank.",
    ),
    "ownership.no-such-receive": (
        "A stage posted a receive for a tensor that no other rank sends: the stage is at an end of "
        "the pipeline, or its neighbour is on the same rank.",
        "Receive tensors only from a neighbour stage on another rank.",
    ),
    "ownership.live-tape": (
        "The weights were about to be updated while microbatches of the step were unfinished. A "
        "backward or a send was left out or raised an exception, or the update came too early.",
        "Call {update} after {loop} has returned, and nowhere else. {failed}",
    ),
    "ownership.input-not-made": (
        "The forward uses the output of an earlier stage of this rank, but that stage has not run "
        "for this microbatch.",
        "Run the forward of the earlier stage first.",
    ),
    "ownership.gradient-not-made": (
        "The backward uses the gradient of a later stage of this rank, but that stage's backward "
        "has not run for this microbatch.",
        "Run the backward of the later stage first.",
    ),
    "ownership.unknown-key": (
        "The stage or the microbatch does not exist in this step: the loop ran more microbatches "
        "than it was called with.",
        "Run as many microbatches as the step was called with.",
    ),
    "ownership.in-flight": (
        "An action began while another action of the same stage was running.",
        "Run the actions of a stage one after another, from one thread.",
    ),
    # The order of forwards and backwards
    "order.in-flight": (
        "An action began while another action of the same stage was running.",
        "Run the actions of a stage one after another, from one thread.",
    ),
    "order.poisoned": (_RAISED, "{recover}"),
    "order.reordered": (
        "The actions do not come in the order of the schedule: two were swapped, or one was left "
        "out or repeated.",
        "Follow the order of the schedule. Look for code that renumbers microbatches, or that "
        "wraps or replaces {loop}.",
    ),
    "order.incomplete": (
        "The step ended, but a forward or a backward of the schedule has not run.",
        "Run every microbatch of the step. Look for code that ends {loop} early or leaves a call "
        "out.",
    ),
    "order.scaling-updates": (  # only Megatron-core's guard counts these updates
        "Transformer Engine updated its FP8 scaling state more or less often than in the other "
        "actions of this kind: an autocast region was entered twice or left out, or a captured "
        "graph lacks the update.",
        "Enter the FP8 autocast once in each `forward_step`, around the whole model. If the layers "
        "run as CUDA graphs, capture them again.",
    ),
    # The step and its update
    "epoch.incomplete": (
        "The step ended, but a backward has not run: the gradients lack a microbatch.",
        "Run the backward, with its weight gradient, of every microbatch before the step ends.",
    ),
    "epoch.already-final": (
        "The gradients of the stage were reduced or completed a second time in one step.",
        "Reduce the gradients of a stage once per step, after its last backward.",
    ),
    "epoch.not-final": (
        "The update came before the step had ended, for example after an exception. Or a second "
        "update used the same gradients.",
        "Call {update} once per step, after {loop} has returned. {failed}",
    ),
    "epoch.spoiled": (_RAISED, "{recover}"),
    "epoch.half-updated": (
        "An earlier update raised an exception, so some weights may be updated and others not.",
        "Relaunch all ranks from a checkpoint that was saved before this update.",
    ),
    "epoch.in-flight": (
        "An update began while another update was running, or the earlier one never ended.",
        "Run one update per step, from one thread.",
    ),
    "epoch.device-count": (
        "A hook, a wrapper or a replaced method left the action out or ran it twice.",
        "Look for code that wraps or replaces this action. That code must call the framework's own "
        "code exactly once.",
    ),
    # Reductions
    "reduction.incomplete": (
        "The gradients were reduced before every backward of the step had added to them.",
        "Reduce the gradients after the stage's last backward of the step.",
    ),
    "reduction.spoiled": (_RAISED, "{recover}"),
    "reduction.in-flight": (
        "A reduction of gradients was started, but the run has not waited for its end.",
        "Wait for every reduction before {update}.",
    ),
    "reduction.duplicate": (
        "The same gradients were reduced twice in one step; a second sum over the replicas makes "
        "them too large.",
        "Reduce each gradient once per step. " + _CALLED_TWICE,
    ),
    "reduction.out-of-order": (
        "The reductions do not start in the same order on all replicas.",
        "Start the reductions in one order on every replica.",
    ),
    "reduction.not-started": (
        "The run waited for a reduction that was never started, or waited for it twice.",
        "Start each reduction once, and wait for it once.",
    ),
    "reduction.missing": (
        "Gradients were not reduced over the replicas, so the replicas' weights would differ after "
        "the update.",
        "Reduce every gradient once per step, before {update}.",
    ),
    "reduction.begun": (
        "Gradients were reduced, but more passes over the schedule follow before the update.",
        "Reduce the gradients after the last pass over the schedule before {update}.",
    ),
    # Gradients and weights
    "arena.overwrite": (
        "Gradients of this step were dropped, zeroed or overwritten before the update used them.",
        "Clear gradients only {between}.",
    ),
    "arena.stale-accumulation": (
        "Gradients of the last update were not cleared, so this step would add to them.",
        "Call {zero} before each step.",
    ),
    "version.wrong-epoch": (
        "A weight was written in the middle of a step: by an update, a hook, or code that loads or "
        "averages weights.",
        "Write weights only {between}.",
    ),
    "version.stale-cache": (
        "The step began with quantized weights of an earlier step.",
        "Let the first forward of each step quantize the weights.",
    ),
    # Checkpoints
    "persistence.live-tape": (_UNFINISHED, _SAVE),
    "persistence.mid-epoch": (
        "The checkpoint was about to be saved in the middle of a step, or before the update of a "
        "step.",
        _SAVE,
    ),
    "persistence.action-in-flight": (
        "The checkpoint was about to be saved while an action or an update was running.",
        _SAVE,
    ),
    "persistence.device-work": (_UNFINISHED, _SAVE),
    "persistence.reduction-in-flight": (
        "The checkpoint was about to be saved while a reduction of gradients was running.",
        _SAVE,
    ),
    "persistence.half-updated": (
        "The last update raised an exception, so some weights may be updated and others not.",
        "Keep the checkpoint that was saved before this update, and relaunch all ranks from it.",
    ),
    "completion.weights-in-use": (
        "An asynchronous save has not yet copied the weights that the update would write, so the "
        "checkpoint would mix two steps.",
        "Start the save, which copies the weights, before {update}.",
    ),
}

#: Clauses that no action of a framework violates: a violation shows that the guard lost track.
_OWN_BOOKS = (
    *("ownership.foreign-incarnation", "ownership.foreign-slot", "ownership.unknown-slot"),
    *("ownership.generation-exhausted", "ownership.matrix-coverage", "ownership.skipped"),
    *("ownership.unknown-ticket", "order.token", "order.scales-moved", "order.scales-not-moved"),
    *("order.wrong-scales", "order.draws-again", "order.wrong-draws", "epoch.wrong-epoch"),
    *("epoch.other-parts", "epoch.wrong-weights", "epoch.unknown-ticket", "version.already-fresh"),
    *("version.fill-missing", "version.fill-unasked", "version.wrong-fill", "version.in-flight"),
    *("version.late-refresh", "version.refresh-interrupted"),
)

_MEGATRON_WORDS = {
    "loop": "the forward-backward loop",
    "between": "after `optimizer.step()` and before the next forward-backward loop",
    "evaluate": "call the loop with `forward_only=True`",
    "update": "`optimizer.step()`",
    "zero": "`zero_grad_buffer()` of each model chunk and `optimizer.zero_grad()`",
    "recover": "Relaunch all ranks from their checkpoint.",
}
_MEGATRON: _Own = {
    "epoch.device-count": (
        "A wrapper of `forward_step` or `backward_step` left the call out or made it twice. If no "
        "`main_grad` was written: a layer set `grad_added_to_main_grad` without adding its "
        "gradient, or the hooks of `DistributedDataParallel` are gone.",
        "Call the wrapped function exactly once. Let every backward of a step add its gradients to "
        "`main_grad`.",
    ),
    "reduction.incomplete": (
        "Leave `start_grad_sync` and `no_sync_func` to Megatron's loop, which reduces a bucket "
        "after the chunk's last backward."
    ),
    "reduction.duplicate": (
        "Reduce each bucket once per step: do not call `start_grad_sync` or `finish_grad_sync` "
        "beside `finalize_model_grads`."
    ),
    "reduction.in-flight": (
        "Set `config.finalize_model_grads_func`, or call `finish_grad_sync()` of each model chunk "
        "before {update}."
    ),
    "reduction.missing": (
        "Set `config.finalize_model_grads_func = finalize_model_grads`, or call "
        "`finish_grad_sync()` of each model chunk before {update}."
    ),
    "arena.overwrite": (
        "Something other than a backward wrote the gradient buffers between two backwards of the "
        "stage, such as `zero_grad_buffer()` inside the loop.",
        "Call `zero_grad_buffer()` only between {update} and the next loop, and leave `main_grad` "
        "to the backwards.",
    ),
    "version.stale-cache": (
        "The first forward of the step did not quantize the weights again: its CUDA graph was "
        'replayed with a flag that skips this, as happens with `cuda_graph_impl="local"` and more '
        "than one pipeline rank, or its modules have `is_first_microbatch=False`.",
        'With graphs, use `cuda_graph_impl="transformer_engine"`. Without graphs, leave '
        "`set_is_first_microbatch()` to Megatron's loop.",
    ),
    "completion.weights-in-use": (
        "Give the request of `dist_checkpointing.save` to `schedule_async_request()` before "
        "{update}."
    ),
    "schedule.message-order": (
        "With these sizes, two ranks post their messages in different orders. Messages between two "
        "ranks are paired by order, so activations and gradients are swapped.",
        "Set `batch_p2p_comm=False` and `overlap_p2p_comm=True`, or use more than two pipeline "
        "ranks.",
    ),
}

_DEEPSPEED_WORDS = {
    "loop": "`train_batch`",
    "between": "between two calls of `train_batch`",
    "evaluate": "call `engine.eval_batch`",
    "update": "`OptimizerStep`",
    "zero": "`engine.zero_grad()`",
    "recover": "Relaunch all ranks from their checkpoint.",
}
_BUFFER_IN_USE = (
    "The buffer still holds a microbatch without its backward: a `BackwardPass` was left out, or "
    "the schedule has too few buffers.",
    "Run the `BackwardPass` of the buffer before the buffer is filled again. In a schedule of your "
    "own, let `num_pipe_buffers()` return a larger number.",
)
_DEEPSPEED: _Own = {
    "epoch.device-count": (
        "A method of the engine, its module or its optimizer was replaced, and the replacement "
        "left its work out or ran it twice.",
        "Look for code that wraps or replaces this method, and call the original in it exactly "
        "once. A schedule of your own must end with `OptimizerStep`.",
    ),
    "epoch.not-final": (
        "Leave the update to the `OptimizerStep` of `train_batch`: remove other calls of "
        "`optimizer.step()`. {failed}"
    ),
    "ownership.live-tape": (
        "Run every backward before the `OptimizerStep` at the end of `train_batch`, and remove "
        "other calls of `optimizer.step()`. {failed}"
    ),
    "ownership.repeated-forward": (
        "The buffer still held the input of a microbatch that had already finished, because "
        "`LoadMicroBatch` or `RecvActivation` was left out. Or an action of the step raised an "
        "exception, but the run continued.",
        "Put the input of a new microbatch into the buffer before each `ForwardPass`. {failed}",
    ),
    "ownership.slot-busy": _BUFFER_IN_USE,
    "ownership.pool-exhausted": _BUFFER_IN_USE,
    "ownership.receive-missing": (
        "The input, the labels or the gradient of this microbatch did not arrive: "
        "`LoadMicroBatch`, `RecvActivation` or `RecvGrad` was left out or comes later.",
        "Put the instruction that loads or receives the tensor before the instruction that uses "
        "it.",
    ),
    "reduction.incomplete": (
        "Put `ReduceGrads` after the last `BackwardPass`, and call no reduction of the engine by "
        "hand."
    ),
    "reduction.duplicate": (
        "Keep one `ReduceGrads` and one `ReduceTiedGrads` per batch, and call no reduction of the "
        "engine by hand."
    ),
    "reduction.missing": (
        "Put `ReduceGrads`, and with tied layers `ReduceTiedGrads`, before `OptimizerStep`."
    ),
    "arena.stale-accumulation": (
        "Leave {zero} to the engine, which calls it after each update. If your code adds "
        "gradients between batches, call {zero} before `train_batch`."
    ),
}

_PIPELINING_WORDS = {
    "loop": "`schedule.step`",
    "between": "after the update and before the next `schedule.step`",
    "evaluate": "call `schedule.eval`",
    "update": "`optimizer.step()`",
    "zero": "`optimizer.zero_grad()`",
    "recover": "Call the guard's `rebuild()` and the optimizer's `zero_grad()` on every rank, or "
    "relaunch all ranks from their checkpoint.",
}
_PIPELINING: _Own = {
    "epoch.device-count": (
        "A method of a stage, a registered function or the optimizer's `step` was replaced, and "
        "the replacement left its work out. Or the update itself was left out.",
        "Look for code that wraps or replaces this action, and call the original in it exactly "
        "once. To skip an update on purpose, call the guard's `rebuild(alone=True)` and the "
        "optimizer's `zero_grad()` on every rank.",
    ),
    "epoch.not-final": (
        "Call {update} once, after all steps of the schedule whose gradients it uses. {failed}"
    ),
    "ownership.work-not-queued": (
        "A split backward leaves out the gradients of these weights, because the weights were "
        "replaced after the forward. FSDP replaces weights when it reshards a part of the model "
        "before the part's backward.",
        "Use a schedule that does not split backwards, such as `ScheduleInterleaved1F1B`. Or, "
        "under FSDP, reshard these weights only after the backward of the whole stage.",
    ),
    "reduction.incomplete": (
        "`DistributedDataParallel` reduced the gradients before every backward of the step had "
        "added to them: a forward outside `no_sync`, such as torch's inference of shapes, prepared "
        "this reduction. Or the table reduces too early.",
        "Give each `PipelineStage` its shapes (`input_args` and `output_args`), run your own "
        "forwards under `no_sync`, and place REDUCE_GRAD after the stage's last backward.",
    ),
    "reduction.missing": (
        "Gradients were not reduced over the replicas. Under `DistributedDataParallel`, no "
        "schedule that splits backwards reduces them.",
        "With replicas, use a schedule that does not split backwards, such as "
        "`ScheduleInterleaved1F1B`. In a table of your own, reduce every stage.",
    ),
    "arena.overwrite": (
        "Gradients of an earlier step were dropped before the update that uses them, such as by "
        "`zero_grad()` between two steps of one update.",
        "Call {zero} only after {update}. To skip an update on purpose, call the guard's "
        "`rebuild(alone=True)` and the optimizer's `zero_grad()` on every rank.",
    ),
    "arena.stale-accumulation": ("Call {zero} after each update."),
    "version.wrong-epoch": (
        "A weight was written in the middle of a step, or between two steps of one update: by an "
        "early update, by one optimizer of a container, by a hook, or by code that loads or "
        "averages weights.",
        "Write weights only between an update and the next step. Call the container's `step()`, "
        "not the `step()` of one of its optimizers.",
    ),
}


def _table(words: Mapping[str, str], own: _Own) -> MappingProxyType[str, Advice]:
    """
    Return a framework's advice by clause: the framework's own text if it has one, else the common
    text.
    """
    recover = words["recover"]
    words = {**words, "failed": f"After an exception, {recover[0].lower()}{recover[1:]}"}
    found = {clause.id: Advice(clause.cause, clause.remedy) for clause in SCHEDULE_CLAUSES.values()}
    found |= dict.fromkeys(_OWN_BOOKS, _UNKNOWN)
    for clause, texts in {**_COMMON, **own}.items():
        cause, remedy = (_COMMON[clause][0], texts) if isinstance(texts, str) else texts
        found[clause] = Advice(cause.format(**words), remedy.format(**words))
    return MappingProxyType(found)


#: For the guard of Megatron-core.
MEGATRON_ADVICE: AdviceTable = _table(_MEGATRON_WORDS, _MEGATRON)

#: For the guard of DeepSpeed's engine.
DEEPSPEED_ADVICE: AdviceTable = _table(_DEEPSPEED_WORDS, _DEEPSPEED)

#: For the guard of torch's pipeline, and of TorchTitan's.
PIPELINING_ADVICE: AdviceTable = _table(_PIPELINING_WORDS, _PIPELINING)


def advised(refused: Refused, table: AdviceTable) -> Refused:
    """
    Add a framework's advice to a refusal. If the refusal already has advice, leave it unchanged.

    Args:
        refused: The refusal.
        table: The advice of the framework.
    """
    if refused.advice is None:
        advice = table.get(refused.clause, _UNKNOWN)
        refused.advise(advice.cause, advice.remedy)
    return refused
