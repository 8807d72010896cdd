"""What ranks do in the tests of `guard`: a model of ordinary modules under torch's schedules."""

from __future__ import annotations

import datetime
import hashlib
import inspect
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import _utils as torch_utils
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _Action
from torch.nn.parallel import DistributedDataParallel

from qeffect.contract import Contract
from qeffect.guards.pipelining import UNUSED, GuardedSchedule, MeetingError, guard
from qeffect.refusals import Refused
from qeffect.stage_config import StageConfig

MICROBATCHES = 4
WIDTH = 8
SINGLE = ("Schedule1F1B", "ScheduleGPipe")
V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


# Composed once, before ranks are forked.
Contract([StageConfig(0, microbatches=1, slots=1)], omit=UNUSED)


class Block(nn.Module):
    """An ordinary layer (linear, norm, nonlinearity) that counts its forwards."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return torch.tanh(self.norm(self.linear(x)))


class Stage(PipelineStage):
    """torch's pipeline stage, without messages from this rank to itself."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """
        Leave out messages of this rank to itself, which gloo cannot send.

        Before its first step torch 2.11 exchanges a number with the rank of each neighbouring stage
        to open connections. Under a V-shaped schedule a neighbouring stage can be on this rank
        itself, which needs no connection.
        """
        own = self.group_rank
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != own]


def _gradient_shapes(x: Tensor, index: int, total: int) -> dict[str, Any]:
    """Shapes of a stage's gradients, where this release of torch takes them."""
    if "input_grads" not in inspect.signature(PipelineStage).parameters:
        return {}  # torch 2.11 has them from the shapes of inputs and outputs
    return {
        "input_grads": x if index else None,
        "output_grads": None if index == total - 1 else x,
    }


class Run:
    """One rank of a model cut into stages, under a schedule of torch's."""

    def __init__(
        self,
        name: str,
        *,
        ranks: int = 2,
        group: Any = None,
        block: Callable[[int], nn.Module] = Block,
        stage: type[PipelineStage] = Stage,
        microbatches: int = MICROBATCHES,
        rows: int | None = None,
    ) -> None:
        rank = dist.get_rank(group)
        own = [rank, rank + ranks]
        if name in SINGLE:
            own = [rank]
        elif name in V:
            own = [rank, 2 * ranks - 1 - rank]
        total = ranks if name in SINGLE else 2 * ranks
        x = torch.zeros(2, WIDTH)
        self.blocks = [block(index) for index in own]
        self.stages = [
            stage(
                part,
                index,
                total,
                x.device,
                input_args=x.clone().requires_grad_(index > 0),
                output_args=x.clone().requires_grad_(),
                group=group,
                **_gradient_shapes(x, index, total),
            )
            for part, index in zip(self.blocks, own, strict=True)
        ]
        made = getattr(torch_schedules, name)
        self.schedule = made(
            self.stages[0] if name in SINGLE else self.stages,
            microbatches,
            loss_fn=nn.functional.mse_loss,
        )
        self.own, self.microbatches = own, microbatches
        self.rows = 2 * microbatches if rows is None else rows
        parameters = [p for part in self.blocks for p in part.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def alone(self) -> Run:
        """Skip the exchange of shapes between stages if the pipeline has only one rank."""
        modes: Any = getattr(torch_utils, "InferenceMode", None)
        for stage in self.stages:
            if modes is None:  # torch 2.11 asks each stage for its first messages
                stage._get_init_p2p_neighbors_ops = lambda: []  # type: ignore[method-assign]
            else:
                stage._inference_mode = modes.STATIC
        self.schedule._warmup_p2p = lambda *_: None
        return self

    def step(self, number: int, *, update: bool = True, **options: Any) -> list[str]:
        """Run a step; return the bits of losses, outputs, gradients and parameters, as digests."""
        generator = torch.Generator().manual_seed(number)
        x, y = (torch.randn(self.rows, WIDTH, generator=generator) for _ in range(2))
        losses: list[Tensor] = []
        self.optimizer.zero_grad()
        given = (x,) if 0 in self.own else ()
        out = self.schedule.step(*given, target=y, losses=losses, **options)
        gradients = [p.grad for part in self.blocks for p in part.parameters()]
        if update:
            self.optimizer.step()
        kept = [value for part in self.blocks for value in part.state_dict().values()]
        found = [*losses, *([] if out is None else [out]), *gradients, *kept]
        return [_digest(value) for value in found]


def _digest(value: Any) -> str:
    if value is None:
        return "none"
    return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def join(seconds: float = 30) -> None:
    """
    Join the process group of both ranks, with a short timeout for waits for a rank that has ended.
    """
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))


def accepted(names: list[str], steps: int) -> dict[str, Any]:
    """
    Run every schedule without and with a guard, with the same model and data; return the bits of
    both.
    """
    join()
    said = {}
    for name in names:
        plain, own = Run(name), Run(name)
        guarded = guard(own.schedule)
        bits = [(plain.step(n), own.step(n)) for n in range(steps)]
        if name not in V:  # torch itself cannot evaluate those: a backward has no gradient
            x = torch.ones(2 * MICROBATCHES, WIDTH)
            own.schedule.eval(*((x,) if 0 in own.own else ()), target=x)
            own.step(steps)  # and a step after it is one
        said[name] = {
            "plain": [a for a, _ in bits],
            "guarded": [b for _, b in bits],
            "epoch": guarded.contract.epoch,
            "tapes": len(guarded.contract.live()),
        }
    return said


def replicas(names: list[str]) -> dict[str, Any]:
    """
    Run a step of each schedule without and with a guard, over two replicas that are pipelines of
    one rank.

    In the run ``armed`` a module is called before the step, as in torch's inference of shapes.
    """
    join()
    rank = dist.get_rank()
    group = [dist.new_group([one]) for one in range(2)][rank]
    said = {}
    for name in (*names, "armed"):
        reductions: list[int] = []

        def reduce(state: Any, bucket: Any, reductions: list[int] = reductions) -> Any:
            reductions.append(bucket.index())
            return allreduce_hook(state, bucket)

        reduce.__annotations__.clear()  # torch wants none, or its own classes

        def run(cls: str, reduce: Any = reduce) -> Run:
            made = Run(cls, ranks=1, group=group, block=lambda n: DistributedDataParallel(Block(n)))
            made.blocks[0].register_comm_hook(None, reduce)  # type: ignore[operator]
            return made

        def step(made: Run, armed: bool) -> list[str]:
            x = torch.randn(made.rows, WIDTH, generator=torch.Generator().manual_seed(rank))
            if armed:
                made.blocks[0](x)
            made.schedule.step(x, target=x)
            return [_digest(p.grad) for block in made.blocks for p in block.parameters()]

        cls = "Schedule1F1B" if name == "armed" else name
        plain = step(run(cls), name == "armed")
        own = run(cls)
        guarded = guard(own.schedule, manner="report")
        reductions.clear()
        gradients = step(own, name == "armed")
        found = [[v.clause, v.step, v.found] for v in guarded.violations]
        guarded.remove()
        hooks = [
            sum(len(p._post_accumulate_grad_hooks or ()) for p in own.blocks[0].parameters()),
            len(own.blocks[0]._forward_hooks),
        ]
        said[name] = {
            "plain": plain,
            "gradients": gradients,
            "violations": found,
            "reductions": len(reductions),
            "hooks": hooks,
        }
    return said


def begun_again(names: list[str], failing: int) -> dict[str, list[list[str]]]:
    """
    The gradients of an undisturbed step, and of a step that follows a step whose loss raised, with
    `rebuild` and without.

    Without `rebuild` there is no guard, so that the result is torch's own.
    """
    join()
    data = [torch.randn(2 * MICROBATCHES, WIDTH) for _ in range(2)]
    said = {}
    for name in names:
        found = []
        for fails, guards in ((False, True), (True, True), (True, False)):
            run = Run(name, ranks=1)
            loss, asked = run.schedule._loss_fn, 0

            def counted(y: Tensor, t: Tensor, loss: Any = loss, fails: bool = fails) -> Any:
                nonlocal asked
                asked += 1
                if fails and asked == failing:
                    raise ArithmeticError("no loss")
                return loss(y, t)

            run.schedule._loss_fn = counted
            guarded = guard(run.schedule) if guards else None
            if fails:
                with suppress(ArithmeticError):
                    run.schedule.step(data[0], target=data[0])
                run.optimizer.zero_grad()
                if guarded is not None:
                    guarded.rebuild()
            run.schedule.step(data[1], target=data[1])
            found.append([_digest(p.grad) for block in run.blocks for p in block.parameters()])
        said[name] = found
    return said


# Faults: what a runtime's table or loop does wrong on one rank


def edit_row(run: Run, edit: Callable[[list[str]], object], rank: int | None = None) -> None:
    """Edit the entries of a rank's line in the schedule table, by default this rank's line, as
    texts."""
    table, rank = run.schedule.pipeline_order_with_comms, rank or run.schedule.rank
    row = [str(action) for action in table[rank]]
    edit(row)
    table[rank] = [_Action.from_str(entry) for entry in row]


def _last_backward(row: list[str], stage: int) -> str:
    return [e for e in row if e[: -len("0")] in (f"{stage}W", f"{stage}B")][-1]


def _doubled(row: list[str]) -> None:
    row.insert(row.index("0F1") + 1, "0F1")


def _missing(row: list[str]) -> None:
    row.remove(_last_backward(row, 0))


def _reordered(row: list[str]) -> None:
    swap = {"0F0": "0F1", "0F1": "0F0", "0SEND_F0": "0SEND_F1", "0SEND_F1": "0SEND_F0"}
    row[:] = [swap.get(entry, entry) for entry in row]


_ROWS = {"doubled": _doubled, "missing": _missing, "reordered": _reordered}


def _loop(run: Run, fault: str) -> None:
    """Let the loop of a single-stage class call its stage wrongly."""
    stage = run.stages[0]
    forward, backward, send = (
        stage.forward_one_chunk,
        stage.backward_one_chunk,
        stage.get_fwd_send_ops,
    )

    def forward_twice(m: int, *args: Any, **kwargs: Any) -> Any:
        if m == 1:
            forward(m, *args, **kwargs)
        return forward(m, *args, **kwargs)

    def backward_but_one(m: int, *args: Any, **kwargs: Any) -> Any:
        return None if m == MICROBATCHES - 1 else backward(m, *args, **kwargs)

    def other(method: Any) -> Any:
        return lambda m, *args, **kwargs: method({0: 1, 1: 0}.get(m, m), *args, **kwargs)

    if fault == "doubled":
        stage.forward_one_chunk = forward_twice
    elif fault == "missing":
        stage.backward_one_chunk = backward_but_one
    else:
        stage.forward_one_chunk, stage.get_fwd_send_ops = other(forward), other(send)


def inject(run: Run, fault: str) -> None:
    """Put a fault on rank 0."""
    if dist.get_rank():
        return
    if hasattr(run.schedule, "pipeline_order_with_comms"):
        edit_row(run, _ROWS[fault])
    else:
        _loop(run, fault)


def faulted(name: str, fault: str) -> list[dict[str, Any]]:
    """
    Run a fault without a guard, and the same fault after a guarded step; return the outcome of
    each.
    """
    join()
    plain = Run(name)
    inject(plain, fault)
    without = outcome(plain, None)
    run = Run(name)
    guarded = guard(run.schedule)
    run.step(0)
    inject(run, fault)
    return [without, outcome(run, guarded)]


def outcome(run: Run, guarded: GuardedSchedule | None) -> dict[str, Any]:
    """The outcome of a step: it passed, was refused, or failed in another way."""
    try:
        run.step(1)
    except Refused as refused:
        assert guarded is not None
        return {
            "refused": refused.clause,
            "at": guarded.at,
            "notes": refused.__notes__,
            "epoch": guarded.contract.epoch,
        }
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    return {"passed": True}


def example(text: str) -> dict[str, Any]:
    """Run the text of an example, as a script on each rank."""
    scope: dict[str, Any] = {}
    exec(compile(text, "example", "exec"), scope)
    return {"epoch": scope["guarded"].contract.epoch}


# Computations that are left out, after the guard was put on

#: The schedules, and what each calls of its stages.
LEFT_OUT = {
    "forward_one_chunk": ("F", lambda stage, m: _forward_faked(stage, m)),
    "backward_one_chunk": ("BI", lambda stage, m: _backward_faked(stage, m)),
    "backward_weight_one_chunk": ("W", lambda stage, m: stage.backward_state.pop(m)),
}


def retained(stage: Any) -> dict[int, Any]:
    """
    What forwards stored in their stage, by microbatch; torch 2.15 stores it under another name.
    """
    states: Any = getattr(stage, "_forward_chunk_states", None)
    found: dict[int, Any] = stage.fwd_cache if states is None else states
    return found


def _forward_faked(stage: Any, m: int) -> Tensor:
    """Store what a forward stores, for a tensor that never passed through the module."""
    given = torch.ones(2, WIDTH, requires_grad=True)
    made = given * 1
    if hasattr(stage, "_make_forward_chunk_state"):  # torch 2.15
        retained(stage)[m] = stage._make_forward_chunk_state((made,), [given])
    else:
        retained(stage)[m] = (made,), [given]
    return made


def _backward_faked(stage: Any, m: int) -> None:
    """Consume what a backward consumes, and store what a backward stores."""
    retained(stage).pop(m)
    if not stage.is_last and hasattr(stage, "_forward_chunk_states"):
        stage._retrieve_recv_grads(m)  # torch 2.15 looks after what it received
    stage.bwd_cache[m] = (torch.zeros(2, WIDTH),)
    stage.backward_state[m] = ((), [], None, None)
    stage.dw_runner[m] = lambda: None


def leave_out(run: Run, method: str, microbatch: int = 2) -> None:
    """Replace a method of this rank's last stage by a method that skips a microbatch."""
    stage = run.stages[-1]
    found, (_, fake) = getattr(stage, method), LEFT_OUT[method]

    def replaced(m: int, *args: Any, **kwargs: Any) -> Any:
        return fake(stage, m) if m == microbatch else found(m, *args, **kwargs)

    setattr(stage, method, replaced)


def left_out_over_ranks(name: str, method: str) -> list[Any]:
    """
    Skip a computation on rank 1, without a guard and with a guard; return the outcome of each.
    """
    join()
    own, plain = Run(name), Run(name)
    whole = own.step(0)
    if dist.get_rank() == 1:
        leave_out(plain, method)
    without = plain.step(0)
    run = Run(name)
    guarded = guard(run.schedule)
    run.step(0)
    if dist.get_rank() == 1:
        leave_out(run, method)
    return [whole == without, outcome(run, guarded)]


def reported(name: str, folder: str) -> dict[str, Any]:
    """Run three steps, of which two skip a backward of rank 1, under a guard that reports."""
    join()
    plain, run = Run(name), Run(name)
    seen: list[list[Any]] = []
    guarded = guard(
        run.schedule,
        manner="report",
        on_violation=lambda v: seen.append([v.clause, v.rank, v.step, v.action]),
        log=folder,
    )
    bits = [(plain.step(0), run.step(0))]
    if dist.get_rank() == 1:
        leave_out(plain, "backward_one_chunk")
        leave_out(run, "backward_one_chunk")
    bits += [(plain.step(n), run.step(n)) for n in (1, 2)]
    guarded.remove()
    return {"same": [a == b for a, b in bits], "seen": seen, "epoch": guarded.contract.epoch}


def logged(name: str, folder: str) -> int:
    """Three guarded steps with an event log."""
    join()
    run = Run(name)
    guarded = guard(run.schedule, log=folder)
    for number in range(3):
        run.step(number)
    guarded.remove()
    return guarded.contract.epoch


# Rebuilding over ranks


def rebuilt(name: str) -> dict[str, Any]:
    """
    Run a step that rank 0 refuses after its messages; then all ranks rebuild and run the step
    again.

    Before the common rebuild, rank 0 rebuilds alone, and rank 1 comes too late.
    """
    join()
    plain, run = Run(name), Run(name)
    guarded = guard(run.schedule)
    bits = [(plain.step(0), run.step(0))]
    kept = inject_missing(run)
    try:
        run.step(1, update=False)
        ended = "passed"
    except Refused as refused:
        ended = refused.clause
    epochs, errors = [guarded.contract.epoch], []
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["alone"])
    began = time.monotonic()
    try:
        guarded.rebuild(timeout_s=1.0)
    except MeetingError as error:
        errors.append(str(error))
    store.set("alone", "over")
    seconds = time.monotonic() - began
    guarded.rebuild(timeout_s=20)
    epochs.append(guarded.contract.epoch)
    if kept is not None:
        run.schedule.pipeline_order_with_comms[0] = kept
    bits += [(plain.step(n), run.step(n)) for n in (1, 2)]
    return {
        "ended": ended,
        "epochs": [*epochs, guarded.contract.epoch],
        "errors": errors,
        "seconds": seconds,
        "same": [a == b for a, b in bits],
    }


def inject_missing(run: Run) -> Any:
    """
    Remove the last dW, which follows the last message, from rank 0's line of the schedule table;
    return the complete line.
    """
    if dist.get_rank():
        return None
    kept = run.schedule.pipeline_order_with_comms[0]
    edit_row(run, lambda row: row.remove(_last_backward(row, 0)))
    return kept


def cut_between_messages(name: str) -> dict[str, Any]:
    """
    Rank 0 refuses in the middle of a step, and rank 1 waits for rank 0 until the group's timeout;
    both rebuild.
    """
    join(3)
    run = Run(name)
    guarded = guard(run.schedule)
    run.step(0)
    inject(run, "doubled")
    try:
        run.step(1, update=False)
        ended = "passed"
    except Refused as refused:
        ended = refused.clause
    except RuntimeError as error:
        ended = type(error).__name__
    try:
        guarded.rebuild(timeout_s=20)
    except MeetingError as error:
        return {"ended": ended, "error": str(error)}
    return {"ended": ended, "error": ""}


def uneven(names: list[str], microbatches: int) -> dict[str, Any]:
    """Run schedules with a number of microbatches, if torch accepts it; return bits and epochs."""
    join()
    said = {}
    for name in names:
        try:
            plain, run = (Run(name, microbatches=microbatches) for _ in range(2))
        except ValueError:  # torch wants another number
            continue
        guarded = guard(run.schedule)
        bits = [(plain.step(n), run.step(n)) for n in range(2)]
        said[name] = [all(a == b for a, b in bits), guarded.contract.epoch]
    return said


def evaluated(names: list[str], manner: Any) -> dict[str, Any]:
    """
    Run steps with evaluations between them; return whether bits are the same, epochs, and
    violations.
    """
    join()
    said = {}
    for name in names:
        plain, run = Run(name), Run(name)
        guarded = guard(run.schedule, manner=manner)
        found = []
        for own in (plain, run):
            bits: list[Any] = [_evaluation(own), own.step(0)]
            with torch.no_grad():
                bits.append(_evaluation(own))
            found.append([*bits, own.step(1), _evaluation(own), own.step(2)])
        said[name] = [found[0] == found[1], guarded.contract.epoch, len(guarded.violations)]
    return said


def _evaluation(run: Run) -> str:
    x = torch.ones(run.rows, WIDTH)
    return _digest(run.schedule.eval(*((x,) if 0 in run.own else ()), target=x))
