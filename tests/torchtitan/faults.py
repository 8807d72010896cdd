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

__all__ = ["FAULTS", "FAULTY_STEP", "STEPS", "Fault"]

#: The step in which the fault happens; the guard compares it with a recorded step.
FAULTY_STEP = 3
#: How many steps a faulty run has.
STEPS = FAULTY_STEP + 2


def _now(trainer: Any) -> bool:
    return bool(trainer.step == FAULTY_STEP + 1)  # the trainer counts from 1


def _stage(trainer: Any, index: int) -> Any:
    return next(s for s in trainer.pp_schedule._stages if s.stage_index == index)


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
    schedule = trainer.pp_schedule

    def around(method: Any, *args: Any, **kwargs: Any) -> Any:
        table = schedule.pipeline_order_with_comms
        row = table[schedule.rank]
        last = max(n for n, a in enumerate(row) if a.computation_type.value in ("W", "B"))
        schedule.pipeline_order_with_comms = {
            **table,
            schedule.rank: [*row[:last], *row[last + 1 :]],
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
