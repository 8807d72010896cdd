"""
What goes wrong in a DeepSpeed run, one function each, on the ranks where it happens.

A fault takes the engine of its rank and changes what a mistake in a person's own code would change:
the stream of instructions, a method, a tensor. None of them raises in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

__all__ = ["FAULTS", "Edited", "Fault", "edit_method", "edit_stream"]

#: The step in which the fault happens; the guard compares it with a recorded step.
FAULTY_STEP = 3
#: How many steps a faulty run has.
STEPS = FAULTY_STEP + 2


class Edited:
    """A schedule whose instructions are edited."""

    def __init__(self, schedule: Any, edit: Callable[[list[Any]], list[Any]]) -> None:
        self._schedule, self._edit = schedule, edit

    def num_pipe_buffers(self) -> int:
        return int(self._schedule.num_pipe_buffers())

    def steps(self) -> Iterator[list[Any]]:
        yield self._edit([each for step in self._schedule.steps() for each in step])

    def __iter__(self) -> Iterator[list[Any]]:
        return self.steps()


def edit_stream(engine: Any, edit: Callable[[list[Any]], list[Any]]) -> None:
    """Edit the instructions of the faulty step."""
    schedule = engine._train_schedule

    def train_schedule() -> Any:
        made = schedule()
        return Edited(made, edit) if engine.global_steps == FAULTY_STEP else made

    engine._train_schedule = train_schedule


def edit_method(engine: Any, name: str, around: Callable[..., Any]) -> None:
    """
    Exchange the method of an instruction.

    Args:
        engine: The engine.
        name: Name of the instruction.
        around: Called with the method, the number of calls in the faulty step before this one, and
            the instruction's arguments. Other steps run the method itself.
    """
    map_ = vars(type(engine)).get("_INSTRUCTION_MAP") or type(engine)._INSTRUCTION_MAP
    (cls,) = (each for each in map_ if each.__name__ == name)
    method, calls = map_[cls], [0]

    def exchanged(self: Any, **given: Any) -> Any:
        if self.global_steps != FAULTY_STEP:
            return method(self, **given)
        calls[0] += 1
        return around(method, calls[0] - 1, self, **given)

    engine._INSTRUCTION_MAP = {**map_, cls: exchanged}


def _places(row: list[Any], name: str) -> list[int]:
    return [n for n, each in enumerate(row) if type(each).__name__ == name]


def doubled_forward(engine: Any) -> None:
    def edit(row: list[Any]) -> list[Any]:
        place = _places(row, "ForwardPass")[1]
        return [*row[: place + 1], row[place], *row[place + 1 :]]

    edit_stream(engine, edit)


def forward_twice_inside(engine: Any) -> None:
    def around(method: Any, call: int, self: Any, **given: Any) -> None:
        method(self, **given)
        if call == 1:
            method(self, **given)

    edit_method(engine, "ForwardPass", around)


def backward_twice_inside(engine: Any) -> None:
    """The last stage runs one backward twice: its microbatch counts twice."""

    def around(method: Any, call: int, self: Any, **given: Any) -> None:
        if call == 1:
            base = next(b for b in type(self).__mro__ if b.__name__ == "DeepSpeedEngine")
            base.backward(self, self.loss, retain_graph=True)  # type: ignore[attr-defined]
        method(self, **given)

    edit_method(engine, "BackwardPass", around)


def left_out_of_the_stream(engine: Any) -> None:
    def edit(row: list[Any]) -> list[Any]:
        del row[_places(row, "BackwardPass")[1]]
        return row

    edit_stream(engine, edit)


def left_out_inside(engine: Any) -> None:
    def around(method: Any, call: int, self: Any, **given: Any) -> None:
        if call != 1:
            method(self, **given)

    edit_method(engine, "BackwardPass", around)


def another_output(engine: Any) -> None:
    """Two backwards start from each other's output, with each other's gradient."""

    def around(method: Any, call: int, self: Any, **given: Any) -> None:
        outputs = self.pipe_buffers["outputs"]
        if call == 0:
            outputs[0], outputs[1] = outputs[1], outputs[0]
        method(self, **given)

    edit_method(engine, "BackwardPass", around)


def another_output_before(engine: Any) -> None:
    """The same, between the instructions: the activation of one is sent as that of the other."""

    def around(method: Any, call: int, self: Any, **given: Any) -> None:
        method(self, **given)
        outputs = self.pipe_buffers["outputs"]
        if call == 0:
            outputs[0], outputs[1] = outputs[1], outputs[0]

    edit_method(engine, "RecvGrad", around)


def another_gradient(engine: Any) -> None:
    """Two gradients are received, one over the other, before the first backward."""

    def edit(row: list[Any]) -> list[Any]:
        later = row.pop(_places(row, "RecvGrad")[1])
        row.insert(_places(row, "BackwardPass")[0], later)
        return row

    edit_stream(engine, edit)


def another_output_of_the_fold(engine: Any) -> None:
    """The first backward of phase 0 starts from the output of the next microbatch."""
    done = []

    def around(method: Any, call: int, self: Any, **given: Any) -> None:
        if given["phase"] == 0 and not done:
            outputs, own = self.pipe_buffers["outputs"], given["buffer_id"]
            outputs[own], outputs[own + 1] = outputs[own + 1], outputs[own]
            done.append(own)
        method(self, **given)

    edit_method(engine, "BackwardPass", around)


def another_input(engine: Any) -> None:
    """A forward reads the input of the microbatch before it."""

    def around(method: Any, call: int, self: Any, **given: Any) -> None:
        method(self, **given)
        if call == 1:
            inputs = self.pipe_buffers["inputs"]
            inputs[given["buffer_id"]] = inputs[1 - given["buffer_id"]]

    edit_method(engine, "LoadMicroBatch", around)


def load_left_out(engine: Any) -> None:
    """A forward runs on what an earlier microbatch left in its buffer."""

    def edit(row: list[Any]) -> list[Any]:
        del row[_places(row, "LoadMicroBatch")[2]]
        return row

    edit_stream(engine, edit)


def labels_left_out(engine: Any) -> None:
    """The same on the last stage, whose load brings labels."""
    load_left_out(engine)


def load_left_out_inside(engine: Any) -> None:
    def around(method: Any, call: int, self: Any, **given: Any) -> None:
        if call != 2:
            method(self, **given)

    edit_method(engine, "LoadMicroBatch", around)


def update_in_the_stream(engine: Any) -> None:
    """No tape is live on the last stage after a backward, so that autograd does not notice."""

    def edit(row: list[Any]) -> list[Any]:
        row.insert(_places(row, "BackwardPass")[1] + 1, row[-1])
        return row

    edit_stream(engine, edit)


def update_by_hand(engine: Any) -> None:
    def around(method: Any, call: int, self: Any, **given: Any) -> None:
        method(self, **given)
        if call == 1:
            self.optimizer.step()

    edit_method(engine, "BackwardPass", around)


def update_left_out(engine: Any) -> None:
    edit_stream(engine, lambda row: row[:-1])


def update_left_out_inside(engine: Any) -> None:
    def around(method: Any, call: int, self: Any, **given: Any) -> None:
        self.zero_grad()
        self.global_steps += 1

    edit_method(engine, "OptimizerStep", around)


def reduction_left_out(engine: Any) -> None:
    def edit(row: list[Any]) -> list[Any]:
        return [each for each in row if type(each).__name__ != "ReduceGrads"]

    edit_stream(engine, edit)


def reduction_left_out_inside(engine: Any) -> None:
    edit_method(engine, "ReduceGrads", lambda *_, **__: None)


def reduction_twice(engine: Any) -> None:
    def edit(row: list[Any]) -> list[Any]:
        place = _places(row, "ReduceGrads")[0]
        return [*row[:place], row[place], *row[place:]]

    edit_stream(engine, edit)


def reduction_early(engine: Any) -> None:
    """The last microbatch's gradients are added after the reduction."""

    def edit(row: list[Any]) -> list[Any]:
        reduce = row.pop(_places(row, "ReduceGrads")[0])
        row.insert(_places(row, "BackwardPass")[-1], reduce)
        return row

    edit_stream(engine, edit)


def tied_reduction_twice(engine: Any) -> None:
    """Tied gradients are summed, so that a second sum doubles them."""

    def edit(row: list[Any]) -> list[Any]:
        place = _places(row, "ReduceTiedGrads")[0]
        return [*row[:place], row[place], *row[place:]]

    edit_stream(engine, edit)


def weight_written(engine: Any) -> None:
    """No tape is live, as above."""

    def around(method: Any, call: int, self: Any, **given: Any) -> None:
        method(self, **given)
        if call == 1:
            with torch.no_grad():
                next(self.module.parameters()).mul_(0.5)

    edit_method(engine, "BackwardPass", around)


def saved_in_mid_step(engine: Any) -> None:
    """Every rank saves a checkpoint after its first forward of the step."""

    def around(method: Any, call: int, self: Any, **given: Any) -> None:
        method(self, **given)
        if call == 0:
            self.save_checkpoint(self.folder, tag="mid")

    last = engine.stage_id == engine.num_stages - 1
    edit_method(engine, "ForwardPass" if last else "SendActivation", around)


def gradients_kept(engine: Any) -> None:
    """The step before does not drop its gradients."""
    zero = engine.zero_grad

    def keep() -> None:
        if engine.global_steps != FAULTY_STEP - 1:
            zero()

    engine.zero_grad = keep


@attrs.frozen
class Fault:
    """
    A fault of a run.

    Args:
        put: Function that injects the fault into an engine.
        ranks: The ranks on which the fault happens.
        clause: The clause that the guard names.
        at: The instruction at which the guard reports the fault.
        step: The step in which the guard reports the fault.
        model: The set-up: see `tests.deepspeed.rank`.
        where: The ranks on which the guard reports the fault; by default the ranks on which it
            happens.
        harmless: Whether the run keeps the right bits.
    """

    put: Callable[[Any], None]
    ranks: tuple[int, ...]
    clause: str
    at: str
    step: int = FAULTY_STEP
    model: str = "pipeline"
    harmless: bool = False


FAULTS: dict[str, Fault] = {
    fault.put.__name__: fault
    for fault in (
        Fault(doubled_forward, (1,), "ownership.key-live", "ForwardPass"),
        Fault(forward_twice_inside, (1,), "epoch.device-count", "ForwardPass"),
        Fault(backward_twice_inside, (1,), "epoch.device-count", "BackwardPass"),
        Fault(left_out_of_the_stream, (0,), "ownership.slot-busy", "LoadMicroBatch"),
        Fault(left_out_inside, (0,), "epoch.device-count", "BackwardPass"),
        Fault(another_output, (0,), "ownership.wrong-key", "BackwardPass"),
        Fault(another_output_before, (0,), "ownership.wrong-key", "SendActivation"),
        Fault(another_gradient, (0,), "ownership.wrong-key", "BackwardPass"),
        Fault(
            another_output_of_the_fold, (0,), "ownership.wrong-key", "BackwardPass", model="folded"
        ),
        Fault(another_input, (0,), "ownership.wrong-key", "LoadMicroBatch"),
        Fault(load_left_out, (0,), "ownership.repeated-forward", "ForwardPass"),
        Fault(labels_left_out, (1,), "ownership.receive-missing", "ForwardPass"),
        Fault(load_left_out_inside, (0,), "epoch.device-count", "LoadMicroBatch"),
        Fault(update_in_the_stream, (1,), "ownership.live-tape", "OptimizerStep"),
        Fault(update_by_hand, (1,), "ownership.live-tape", "optimizer.step()"),
        Fault(update_left_out, (0,), "epoch.device-count", "the end of train_batch"),
        Fault(update_left_out_inside, (0,), "epoch.device-count", "OptimizerStep"),
        Fault(reduction_left_out, (0, 1), "reduction.missing", "OptimizerStep", model="replicas"),
        Fault(
            reduction_left_out_inside,
            (0, 1),
            "epoch.device-count",
            "ReduceGrads",
            model="replicas",
        ),
        Fault(
            reduction_twice,
            (0, 1),
            "reduction.duplicate",
            "ReduceGrads",
            model="replicas",
            harmless=True,
        ),
        Fault(reduction_early, (0, 1), "reduction.incomplete", "ReduceGrads", model="replicas"),
        Fault(tied_reduction_twice, (0, 1), "reduction.duplicate", "ReduceTiedGrads", model="tied"),
        Fault(weight_written, (1,), "version.wrong-epoch", "ForwardPass"),
        Fault(saved_in_mid_step, (0, 1), "persistence.live-tape", "save_checkpoint", harmless=True),
        Fault(gradients_kept, (0,), "arena.stale-accumulation", "the beginning of train_batch"),
    )
}
