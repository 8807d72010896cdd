"""
What goes wrong in a Megatron-core run, one function each, on the ranks where it happens.

A fault takes the run of its rank and changes what a mistake in a person's own code would change.
None of them raises in Megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

__all__ = ["CASES", "FAULTS", "FAULTY_STEP", "STEPS", "WIDE_FAULTS", "Fault", "Undo"]

#: The step in which the fault happens; the guard compares it with a recorded step.
FAULTY_STEP = 3
#: How many steps a faulty run has.
STEPS = FAULTY_STEP + 2


class Undo:
    """What a fault changed, which `Undo()` puts back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, value)

    def __call__(self) -> None:
        while self._before:
            owner, name, before = self._before.pop()
            setattr(owner, name, before)


def around(run: Any, undo: Undo, owner: Any, name: str, inner: Callable[..., Any]) -> None:
    """
    Exchange a function of Megatron-core.

    Args:
        run: The run.
        undo: Takes what was there.
        owner: Where the function is.
        name: Its name.
        inner: Called with the function, the number of its calls in the faulty step before this
            one, and its arguments. Other steps run the function itself.
    """
    function, calls = getattr(owner, name), [0]

    def exchanged(*args: Any, **kwargs: Any) -> Any:
        if run.number != FAULTY_STEP:
            return function(*args, **kwargs)
        calls[0] += 1
        return inner(function, calls[0] - 1, *args, **kwargs)

    undo.put(owner, name, exchanged)


def doubled_forward(run: Any, undo: Undo) -> None:
    def inner(function: Any, call: int, *args: Any, **kwargs: Any) -> Any:
        if call == 1:
            function(*args, **kwargs)
        return function(*args, **kwargs)

    around(run, undo, run.schedules, "forward_step", inner)


def forward_twice_inside(run: Any, undo: Undo) -> None:
    doubled_forward(run, undo)


def left_out(run: Any, undo: Undo) -> None:
    """A backward is left out: the gradient of its input is zero."""

    def inner(function: Any, call: int, given: Any, *args: Any, **kwargs: Any) -> Any:
        if call != 1:
            return function(given, *args, **kwargs)
        zeros = [None if x is None else torch.zeros_like(x) for x in _listed(given)]
        return zeros if isinstance(given, list) else zeros[0]

    around(run, undo, run.schedules, "backward_step", inner)


def left_out_inside(run: Any, undo: Undo) -> None:
    left_out(run, undo)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def another_output(run: Any, undo: Undo) -> None:
    """The backward of a microbatch starts from the output of another one, and that from its own."""
    made: list[Any] = []
    forward = run.schedules.forward_step

    def remember(*args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        if run.number == FAULTY_STEP:
            made.append(found[0])
        return found

    def inner(function: Any, call: int, given: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        if call < 2:
            output = made[1 - call]
        return function(given, output, *args, **kwargs)

    undo.put(run.schedules, "forward_step", remember)
    around(run, undo, run.schedules, "backward_step", inner)


def another_input(run: Any, undo: Undo) -> None:
    """A backward takes the input of the microbatch before it, and sends the gradient of that."""
    kept: list[Any] = []

    def inner(function: Any, call: int, given: Any, *args: Any, **kwargs: Any) -> Any:
        kept.append(given)
        return function(kept[0] if call == 1 else given, *args, **kwargs)

    around(run, undo, run.schedules, "backward_step", inner)


def exchanged_microbatches(run: Any, undo: Undo) -> None:
    """Two forwards are taken for each other: each runs as the other's number."""

    def inner(function: Any, call: int, *args: Any, **kwargs: Any) -> Any:
        number = kwargs["current_microbatch"]
        if number < 2:
            kwargs["current_microbatch"] = 1 - number
        return function(*args, **kwargs)

    around(run, undo, run.schedules, "forward_step", inner)


def skipped_refresh(run: Any, undo: Undo) -> None:
    """No module learns that the first microbatch of the step runs."""
    for chunk in run.model:
        own = chunk.module
        tell = own.set_is_first_microbatch

        def told(tell: Any = tell) -> None:
            if run.number != FAULTY_STEP:
                tell()

        chunk.set_is_first_microbatch = told
        own.set_is_first_microbatch = told


def another_message(run: Any, undo: Undo) -> None:
    """A stage sends the output of the microbatch before."""
    kept: list[Any] = []

    def inner(function: Any, call: int, *args: Any, **kwargs: Any) -> Any:
        if (tensor := kwargs["tensor_send_next"]) is not None:
            kept.append(tensor)
            if len(kept) == 2:
                kwargs["tensor_send_next"] = kept[0]
        return function(*args, **kwargs)

    around(run, undo, run.p2p.P2PCommunicator, "_communicate", inner)


def exchanged_messages(run: Any, undo: Undo) -> None:
    """Messages are batched: with two ranks, each rank receives a wrong message."""
    if run.number == 0:
        run.config.overlap_p2p_comm, run.config.batch_p2p_comm = False, True


def weight_written(run: Any, undo: Undo) -> None:
    def inner(function: Any, call: int, *args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        if call == 1:
            with torch.no_grad():
                list(run.model[0].parameters())[-1].mul_(0.5)  # a bias, of which no graph reads
        return found

    around(run, undo, run.schedules, "backward_step", inner)


def update_in_mid_step(run: Any, undo: Undo) -> None:
    def inner(function: Any, call: int, *args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        if call == 1:
            run.optimizer.step()
        return found

    around(run, undo, run.schedules, "backward_step", inner)


def updated_twice(run: Any, undo: Undo) -> None:
    update = run.update

    def twice() -> None:
        update()
        if run.number == FAULTY_STEP:
            update()

    run.update = twice


def bucket_early(run: Any, undo: Undo) -> None:
    """`no_sync` is lost, so that the first backward reduces every bucket."""
    from contextlib import nullcontext

    kept = run.config.no_sync_func

    def no_sync() -> Any:
        return nullcontext() if run.number == FAULTY_STEP else kept()

    run.config.no_sync_func = no_sync


def bucket_twice(run: Any, undo: Undo) -> None:
    finalize = run.config.finalize_model_grads_func

    def twice(*args: Any, **kwargs: Any) -> None:
        if run.number == FAULTY_STEP:
            run.model[0].start_grad_sync()
        finalize(*args, **kwargs)

    run.config.finalize_model_grads_func = twice


def bucket_never(run: Any, undo: Undo) -> None:
    finalize = run.config.finalize_model_grads_func

    def never(*args: Any, **kwargs: Any) -> None:
        if run.number != FAULTY_STEP:
            finalize(*args, **kwargs)

    run.config.finalize_model_grads_func = never


def update_before_the_reduction(run: Any, undo: Undo) -> None:
    """The update comes before the wait for the reductions, which overlap with the backward."""
    finalize, update, kept = run.config.finalize_model_grads_func, run.update, []

    def later(*args: Any, **kwargs: Any) -> None:
        if run.number != FAULTY_STEP:
            finalize(*args, **kwargs)
        else:
            kept.append((args, kwargs))

    def early() -> None:
        update()
        while kept:
            args, kwargs = kept.pop()
            finalize(*args, **kwargs)

    run.config.finalize_model_grads_func, run.update = later, early


def saved_in_mid_step(run: Any, undo: Undo) -> None:
    """Every rank saves a checkpoint after its first forward of the step."""

    def inner(function: Any, call: int, *args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        if call == 0:
            run.save("mid")
        return found

    around(run, undo, run.schedules, "forward_step", inner)


def saved_before_the_update(run: Any, undo: Undo) -> None:
    update = run.update

    def saved() -> None:
        if run.number == FAULTY_STEP:
            run.save("mid")
        update()

    run.update = saved


def updated_before_the_copy(run: Any, undo: Undo) -> None:
    """An asynchronous save is scheduled, and copies the weights, only after the next update."""
    update, asked = run.update, []

    def late() -> None:
        update()
        if run.number == FAULTY_STEP - 1:
            asked.append(run.ask("late"))
        while asked and run.number == FAULTY_STEP:
            run.schedule(asked.pop())

    run.update = late


def saved_before_the_gather(run: Any, undo: Undo) -> None:
    """A checkpoint is saved after the loop, before the update that gathers the parameters."""
    saved_before_the_update(run, undo)


def gather_left_out(run: Any, undo: Undo) -> None:
    """The hooks that gather parameters are taken off before a step, and put on after it."""
    update, chunk = run.update, run.model[0]

    def off() -> None:
        update()
        if run.number == FAULTY_STEP - 1:
            chunk.disable_forward_pre_hook(param_sync=False)
        if run.number == FAULTY_STEP:
            chunk.enable_forward_pre_hook()

    run.update = off


def gathered_early(run: Any, undo: Undo) -> None:
    """The parameters are gathered between the loop and the update, as for an evaluation there."""
    update, chunk = run.update, run.model[0]

    def early() -> None:
        if run.number == FAULTY_STEP:
            chunk.disable_forward_pre_hook()
            chunk.enable_forward_pre_hook()
        update()

    run.update = early


def gather_not_awaited(run: Any, undo: Undo) -> None:
    """The hooks start each gather, but the forward does not wait for it; the update waits."""
    group, update = run.buffers._ParamAndGradBucketGroup, run.update

    def unawaited(own: Any, *args: Any, **kwargs: Any) -> None:
        if run.number != FAULTY_STEP:
            finish(own, *args, **kwargs)
        elif not own.param_gather_dispatched:
            own.start_param_sync()

    def waited() -> None:
        for own in run.model[0].bucket_groups:
            if own.param_gather_handle is not None:
                own.param_gather_handle.wait()
                own.param_gather_handle = None
        update()

    finish = group.finish_param_sync
    undo.put(group, "finish_param_sync", unawaited)
    run.update = waited


def bucket_twice_sharded(run: Any, undo: Undo) -> None:
    bucket_twice(run, undo)


def bucket_never_sharded(run: Any, undo: Undo) -> None:
    bucket_never(run, undo)


def bucket_never_between_optimizers(run: Any, undo: Undo) -> None:
    """Each rank has an optimizer of its own, so that only the reduction between them is there."""
    bucket_never(run, undo)


def bucket_early_sharded(run: Any, undo: Undo) -> None:
    bucket_early(run, undo)


def another_save_is_scheduled(run: Any, undo: Undo) -> None:
    """Two asynchronous saves are asked for, and one is scheduled before the next update."""
    update, asked = run.update, []

    def one() -> None:
        update()
        if run.number == FAULTY_STEP - 1:
            asked.extend([run.ask("first"), run.ask("second")])
            run.schedule(asked.pop())
        while asked and run.number == FAULTY_STEP:
            run.schedule(asked.pop())

    run.update = one


def gradients_zeroed(run: Any, undo: Undo) -> None:
    """The gradients are zeroed between two backwards of a step."""

    def inner(function: Any, call: int, *args: Any, **kwargs: Any) -> Any:
        if call == 1:
            run.model[0].zero_grad_buffer()
        return function(*args, **kwargs)

    around(run, undo, run.schedules, "forward_step", inner)


def gradients_not_added(run: Any, undo: Undo) -> None:
    """In a backward, parameters say that a kernel added their gradients already."""

    def inner(function: Any, call: int, *args: Any, **kwargs: Any) -> Any:
        parameters = [p for chunk in run.model for p in chunk.parameters()]
        for parameter in parameters:
            parameter.grad_added_to_main_grad = call == 1
        found = function(*args, **kwargs)
        for parameter in parameters:
            parameter.grad_added_to_main_grad = False
        return found

    around(run, undo, run.schedules, "backward_step", inner)


def gradients_kept(run: Any, undo: Undo) -> None:
    zero = run.zero

    def kept() -> None:
        if run.number != FAULTY_STEP:
            zero()

    run.zero = kept


@attrs.frozen
class Fault:
    """
    A fault of a run.

    Args:
        put: Function that injects the fault into a run.
        ranks: The ranks on which the fault happens.
        clause: The clause that the guard names.
        at: The action at which the guard reports the fault.
        case: The set-up; see `tests.megatron.rank`.
        above: Whether the fault replaces the guard's own wrapper of a function, instead of the
            function below the wrapper.
        step: The step in which the guard reports the fault.
        harmless: Whether the run keeps the right bits; None if that depends on what comes first.
        racing: Whether the wrong bits differ from run to run.
        stand_in: Whether it changes the bits of the stand-in too.
    """

    put: Callable[[Any, Undo], None]
    ranks: tuple[int, ...]
    clause: str
    at: str
    case: str = "1F1B"
    above: bool = False
    step: int = FAULTY_STEP
    harmless: bool | None = False
    racing: bool = False
    stand_in: bool = True


#: Set-ups of faulty runs, by name.
CASES: dict[str, dict[str, Any]] = {
    "1F1B": {},
    "interleaved": {"chunks": 2},
    "kept outputs": {"deallocate": False},
    "quantized": {"quantized": True},
    "replicas": {"stages": 1},
    "sums": {"stages": 1, "config": {"calculate_per_token_loss": True}},
    "overlapped": {"stages": 1, "overlap": True},
    "plain": {"plain": True},
    "sharded": {"stages": 2, "distributed": True},
    "four optimizers": {"stages": 1, "distributed": True, "instances": 4},
    "sharded sums": {
        "stages": 2,
        "distributed": True,
        "config": {"calculate_per_token_loss": True},
    },
    "sharded, overlapped": {"stages": 2, "distributed": True, "overlap": True, "gather": True},
}

FAULTS: dict[str, Fault] = {
    fault.put.__name__: fault
    for fault in (
        Fault(doubled_forward, (1,), "ownership.key-live", "F of stage 1", above=True),
        Fault(forward_twice_inside, (1,), "epoch.device-count", "F of stage 1"),
        Fault(left_out, (1,), "ownership.read-before-dgrad", "exchange", above=True),
        Fault(left_out_inside, (0,), "epoch.device-count", "B of stage 0"),
        Fault(another_output, (0,), "ownership.wrong-key", "B of stage 0"),
        Fault(
            another_input, (1,), "ownership.wrong-key", "B of stage 1", above=True, stand_in=False
        ),
        Fault(exchanged_microbatches, (0,), "order.reordered", "F of stage 0", above=True),
        Fault(skipped_refresh, (0, 1), "version.stale-cache", "F of stage", case="quantized"),
        Fault(
            another_message,
            (0,),
            "ownership.wrong-key",
            "exchange",
            case="kept outputs",
            above=True,
            stand_in=False,
        ),
        Fault(
            exchanged_messages,
            (0, 1),
            "schedule.message-order",
            "the beginning of the loop",
            case="interleaved",
            step=0,
            stand_in=False,
        ),
        Fault(weight_written, (1,), "version.wrong-epoch", "F of stage 1"),
        Fault(update_in_mid_step, (0, 1), "ownership.live-tape", "optimizer.step", case="replicas"),
        Fault(updated_twice, (0, 1), "epoch.not-final", "optimizer.step"),
        Fault(
            bucket_early,
            (0, 1),
            "reduction.incomplete",
            "start_grad_sync",
            case="overlapped",
            racing=True,
        ),
        Fault(bucket_twice, (0, 1), "reduction.duplicate", "start_grad_sync", case="sums"),
        Fault(bucket_never, (0, 1), "reduction.missing", "optimizer.step", case="replicas"),
        Fault(
            update_before_the_reduction,
            (0, 1),
            "reduction.in-flight",
            "optimizer.step",
            case="overlapped",
            racing=True,
            harmless=None,
            stand_in=False,
        ),
        Fault(
            saved_in_mid_step,
            (0, 1),
            "persistence.live-tape",
            "dist_checkpointing.save",
            case="replicas",
            harmless=True,
        ),
        Fault(
            saved_before_the_update,
            (0, 1),
            "persistence.mid-epoch",
            "dist_checkpointing.save",
            harmless=True,
        ),
        Fault(
            updated_before_the_copy,
            (0, 1),
            "completion.weights-in-use",
            "optimizer.step",
            harmless=True,
        ),
        Fault(
            another_save_is_scheduled,
            (0, 1),
            "completion.weights-in-use",
            "optimizer.step",
            harmless=True,
        ),
        Fault(gradients_zeroed, (1,), "arena.overwrite", "B of stage 1"),
        Fault(gradients_not_added, (1,), "epoch.device-count", "B of stage 1"),
        Fault(gradients_kept, (0, 1), "arena.stale-accumulation", "the beginning of the loop"),
    )
}

ALL = (0, 1, 2, 3)
#: Faults over four ranks: two stages of two replicas, under the distributed optimizer.
WIDE_FAULTS: dict[str, Fault] = {
    fault.put.__name__: fault
    for fault in (
        Fault(bucket_twice_sharded, ALL, "reduction.duplicate", "start_grad_sync", "sharded sums"),
        Fault(bucket_never_sharded, ALL, "reduction.missing", "optimizer.step", "sharded"),
        Fault(
            bucket_never_between_optimizers,
            ALL,
            "reduction.missing",
            "optimizer.step",
            "four optimizers",
        ),
        Fault(
            bucket_early_sharded,
            ALL,
            "reduction.incomplete",
            "start_grad_sync",
            "sharded, overlapped",
            racing=True,
        ),
        Fault(
            saved_before_the_gather,
            ALL,
            "persistence.mid-epoch",
            "dist_checkpointing.save",
            "sharded, overlapped",
            harmless=True,
        ),
        Fault(gather_left_out, ALL, "version.wrong-epoch", "F of stage", "sharded, overlapped"),
        Fault(gathered_early, ALL, "version.wrong-epoch", "optimizer.step", "sharded, overlapped"),
        Fault(
            gather_not_awaited,
            ALL,
            "version.wrong-epoch",
            "F of stage",
            "sharded, overlapped",
            racing=True,
            harmless=None,
        ),
    )
}
