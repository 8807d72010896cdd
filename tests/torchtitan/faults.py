"""
What goes wrong in a run of TorchTitan, one function each, on the ranks where it happens.

A fault takes the trainer of its rank and changes what a mistake in a person's own code would
change: a stage's method, the table, a tensor, the optimizers. None of them raises in TorchTitan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

__all__ = ["FAULTS", "FAULTY_STEP", "GRAPH_FAULTS", "STEPS", "Fault"]

#: The step in which the fault happens; the guard compares it with a recorded step.
FAULTY_STEP = 3
#: How many steps a faulty run has.
STEPS = FAULTY_STEP + 2


def _now(trainer: Any) -> bool:
    return bool(trainer.step == FAULTY_STEP + 1)  # the trainer counts from 1


def _schedule(trainer: Any) -> Any:
    """The schedule, also inside the runtime of GraphPP."""
    return getattr(trainer.pp_schedule, "schedule", trainer.pp_schedule)


def _stage(trainer: Any, index: int) -> Any:
    return next(s for s in _schedule(trainer)._stages if s.stage_index == index)


def _runtime(trainer: Any) -> Any:
    """The runtime of GraphPP, whose methods run the actions."""
    return trainer.pp_schedule


def _around(trainer: Any, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Exchange a method; in the faulty step `around` is called with the method before."""
    method = getattr(owner, name)

    def exchanged(*args: Any, **kwargs: Any) -> Any:
        if not _now(trainer):
            return method(*args, **kwargs)
        return around(method, *args, **kwargs)

    setattr(owner, name, exchanged)


def _between_walks(trainer: Any, change: Callable[[], object]) -> None:
    calls = [0]

    def around(method: Any, **given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            change()
        return method(**given)

    _around(trainer, trainer, "forward_backward_step", around)


def doubled_forward(trainer: Any) -> None:
    """One forward runs twice, with the same result."""

    def around(method: Any, m: int, *args: Any, **kwargs: Any) -> Any:
        if m == 2:
            method(m, *args, **kwargs)
        return method(m, *args, **kwargs)

    _around(trainer, _stage(trainer, 0), "forward_one_chunk", around)


def left_out_backward(trainer: Any) -> None:
    """
    The first stage takes one gradient and computes nothing of it: its own gradient is short.

    Without taking it, torch 2.15 would complain in the next step of a buffer that is in use.
    """
    stage = _stage(trainer, 0)

    def around(method: Any, m: int, *args: Any, **kwargs: Any) -> Any:
        if m != 2:
            return method(m, *args, **kwargs)
        stage._retrieve_recv_grads(m)
        stage._forward_chunk_states.pop(m)
        return None

    _around(trainer, stage, "backward_one_chunk", around)


def left_out_of_the_table(trainer: Any) -> None:
    """The table lacks its last weight gradient."""

    def shorter(row: list[Any]) -> list[Any]:
        last = max(n for n, a in enumerate(row) if a.computation_type.value in ("W", "B"))
        return [*row[:last], *row[last + 1 :]]

    _with_row(trainer, shorter)


def _with_row(trainer: Any, edit: Callable[[list[Any]], list[Any]]) -> None:
    """Let the faulty step run an edited row of the table."""
    schedule = _schedule(trainer)

    def around(method: Any, *args: Any, **kwargs: Any) -> Any:
        table = schedule.pipeline_order_with_comms
        schedule.pipeline_order_with_comms = {
            **table,
            schedule.rank: edit(list(table[schedule.rank])),
        }
        try:
            return method(*args, **kwargs)
        finally:
            schedule.pipeline_order_with_comms = table

    _around(trainer, schedule, "step", around)


def weight_written(trainer: Any) -> None:
    """A weight is scaled between two walks (passes over the pipeline), as by a constraint that
    comes too early."""
    weight = next(trainer.model_parts[-1].parameters())

    def write() -> None:
        with torch.no_grad():
            weight.mul_(0.5)

    _between_walks(trainer, write)


def update_early(trainer: Any) -> None:
    _between_walks(trainer, trainer.optimizers.step)


def part_early(trainer: Any) -> None:
    """One of the optimizers updates its weights after the first walk (pass over the pipeline)."""
    _between_walks(trainer, trainer.optimizers.optimizers[0].step)


def update_left_out(trainer: Any) -> None:
    _around(trainer, trainer.optimizers, "step", lambda *_: None)


def part_left_out(trainer: Any) -> None:
    """The weights of one stage are not updated."""
    _around(trainer, trainer.optimizers.optimizers[0], "step", lambda *_: None)


def update_twice(trainer: Any) -> None:
    _around(trainer, trainer.optimizers, "step", lambda method: (method(), method()))


def gradients_dropped(trainer: Any) -> None:
    """The gradients of the first walk (pass over the pipeline) are dropped before the second."""
    _between_walks(trainer, trainer.optimizers.zero_grad)


def gradients_kept(trainer: Any) -> None:
    """The gradients of the step before are not dropped."""
    _around(trainer, trainer.optimizers, "zero_grad", lambda *_, **__: None)


# Faults under GraphPP, whose functions run the actions in the place of the stages' methods


def _of_graphs(trainer: Any, kind: str, around: Callable[[Any, Any, Any], object]) -> None:
    """
    Exchange the function that runs a kind of action.

    In the faulty step `around` is called with GraphPP's function, the action and its context.
    """
    functions = _schedule(trainer)._comp_type_to_function_map
    for key, function in list(functions.items()):
        if key.name == kind:

            def exchanged(action: Any, context: Any, function: Any = function) -> None:
                if _now(trainer):
                    around(function, action, context)
                else:
                    function(action, context)

            functions[key] = exchanged


def _is(action: Any, stage: int, microbatch: int) -> bool:
    return (action.stage_index, action.microbatch_index) == (stage, microbatch)


def _take_gradient(trainer: Any, action: Any) -> None:
    """Do what comes before a backward of GraphPP, and nothing else."""
    from torchtitan.experiments.graph_trainer.graph_pp import runner

    _, stage, microbatch, _ = runner._prepare_backward_common(_schedule(trainer), action)
    runner._prepare_backward_values(stage, microbatch)


def graph_backward_left_out(trainer: Any) -> None:
    """The first stage takes one gradient, and its graph does not run."""

    def around(function: Any, action: Any, context: Any) -> None:
        if _is(action, 0, 2):
            _take_gradient(trainer, action)
        else:
            function(action, context)

    _of_graphs(trainer, "FULL_BACKWARD", around)


def graph_wgrad_left_out(trainer: Any) -> None:
    """The graph of one weight gradient does not run."""

    def around(function: Any, action: Any, context: Any) -> None:
        if _is(action, 3, 2):
            deferred = _stage(trainer, 3).saved_values_for_backward_weight_cache
            deferred.pop(action.microbatch_index)
        else:
            function(action, context)

    _of_graphs(trainer, "BACKWARD_WEIGHT", around)


def graph_overlap_left_out(trainer: Any) -> None:
    """An overlapped action runs its forward, and not its backward."""

    def around(function: Any, action: Any, context: Any) -> None:
        forward, backward = action.sub_actions
        if _is(backward, 0, 2):
            _runtime(trainer)._handle_forward(forward, context)
            _take_gradient(trainer, backward)
        else:
            function(action, context)

    _of_graphs(trainer, "OVERLAP_F_B", around)


def graph_forward_twice(trainer: Any) -> None:
    """GraphPP's function runs one forward twice, with the same result."""

    def around(function: Any, action: Any, context: Any) -> None:
        if _is(action, 0, 2):
            function(action, context)
        function(action, context)

    _of_graphs(trainer, "FORWARD", around)


def graph_doubled_in_the_table(trainer: Any) -> None:
    """The table has one forward twice."""

    def twice(row: list[Any]) -> list[Any]:
        return [a for action in row for a in [action] * (1 + (str(action) == "0F2"))]

    _with_row(trainer, twice)


@attrs.frozen
class Fault:
    """
    A fault of a run.

    Args:
        put: Function that injects the fault into a trainer.
        ranks: The ranks on which the fault happens.
        clause: The clause that the guard names.
        at: The action at which the guard reports the fault.
        schedule: The schedule of the run.
        walks: Number of walks (passes over the pipeline) per update.
        step: The step in which the guard reports the fault.
        harmless: Whether the run keeps the right bits.
    """

    put: Callable[[Any], None]
    ranks: tuple[int, ...]
    clause: str
    at: str
    schedule: str = "Interleaved1F1B"
    walks: int = 1
    step: int = FAULTY_STEP
    harmless: bool = False


_UPDATE, _BEGINNING = "the optimizer's update", "the beginning of the step"
FAULTS: dict[str, Fault] = {
    fault.put.__name__: fault
    for fault in (
        Fault(doubled_forward, (0,), "ownership.key-live", "0F2", harmless=True),
        Fault(left_out_backward, (0,), "epoch.device-count", "0B2"),
        Fault(
            left_out_of_the_table,
            (0,),
            "epoch.incomplete",
            "0REDUCE_GRAD",
            schedule="ZBVZeroBubble",
        ),
        Fault(weight_written, (1,), "version.wrong-epoch", "3F0", walks=2),
        Fault(update_early, (0, 1), "epoch.not-final", _UPDATE, walks=2),
        Fault(part_early, (1,), "version.wrong-epoch", "the update of one optimizer", walks=2),
        Fault(update_left_out, (0,), "epoch.device-count", _BEGINNING),
        Fault(part_left_out, (1,), "epoch.device-count", _UPDATE),
        Fault(update_twice, (0,), "epoch.not-final", _UPDATE),
        Fault(gradients_dropped, (0, 1), "arena.overwrite", _BEGINNING, walks=2),
        Fault(gradients_kept, (1,), "arena.stale-accumulation", _BEGINNING),
    )
}
#: Faults of runs under GraphPP.
GRAPH_FAULTS: dict[str, Fault] = {
    fault.put.__name__: fault
    for fault in (
        Fault(graph_backward_left_out, (0,), "epoch.device-count", "0B2"),
        Fault(
            graph_wgrad_left_out,
            (0,),
            "epoch.device-count",
            "3W2",
            schedule="ZBVZeroBubble",
        ),
        Fault(
            graph_overlap_left_out,
            (0,),
            "epoch.device-count",
            "(3F4;0B2)OVERLAP_F_B",
            schedule="DualPipeV",
        ),
        Fault(graph_forward_twice, (0,), "", "", harmless=True),
        Fault(graph_doubled_in_the_table, (0,), "ownership.key-live", "0F2", harmless=True),
        FAULTS["left_out_of_the_table"],
        FAULTS["weight_written"],
        FAULTS["gradients_dropped"],
    )
}
