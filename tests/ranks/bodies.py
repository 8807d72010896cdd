"""The functions that ranks run in tests."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules as torch_schedules

from qeffect.cli import main
from qeffect.engine.stage import TRANSITIONS
from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.protocol import BackendError, parameters
from qeffect.gpu_runtime.lab.comparisons.ranks import CATEGORIES as CATEGORIES
from qeffect.gpu_runtime.lab.comparisons.ranks import compare_pipelines
from qeffect.gpu_runtime.ranks import processes
from qeffect.gpu_runtime.ranks.channels import Message, Transfer, UnansweredError, gloo_group
from qeffect.gpu_runtime.ranks.consent import Cause, StoppedError, action_name
from qeffect.gpu_runtime.ranks.job import Batches, Job
from qeffect.gpu_runtime.ranks.membership import Limits, all_gather, join, leave
from qeffect.gpu_runtime.ranks.pipeline import Passage
from qeffect.gpu_runtime.ranks.rehearsal import Rehearsal
from qeffect.gpu_runtime.ranks.worker import Worker
from qeffect.gpu_runtime.ranks.worker_assembly import build_worker
from qeffect.gpu_runtime.runtime import RuntimeConfig
from qeffect.gpu_runtime.step.graphs import product_of
from qeffect.gpu_runtime.step.memory.digests import digests
from qeffect.gpu_runtime.step.memory.numerical_state import live_state
from qeffect.gpu_runtime.training.checkpoint import agreement
from qeffect.keys import TapeKey, TapeRef
from qeffect.refusals import Refused

Fault = Callable[[Worker], None]
#: Nothing here takes a second where all is well.
LIMITS = Limits(start=60.0, message=20.0, commit=20.0, grace=1.0)


def exact(jobs: list[Job], steps: int) -> list[dict[str, Any]]:
    """Train each job natively under torch's pipeline and guarded, and compare bit for bit."""
    member = join("cpu", LIMITS)
    said = []
    for job in jobs:
        result = compare_pipelines(member, job, steps, limits=LIMITS)
        found = result.comparison
        said.append(
            {
                "compared": {c.category: c.compared for c in found.categories},
                "differ": {c.category: c.mismatched for c in found.categories},
                "first": [c.first for c in found.categories if c.mismatched],
                "losses": result.losses,
                "native losses": result.native_losses,
                "slots": result.slots,
            }
        )
    return said


def connected_as_by_torch_2_11(jobs: list[Job], steps: int) -> list[dict[str, Any]]:
    """
    Do the same as `exact`, after torch 2.11's first messages: a number to the rank of each next
    stage.
    """
    from torch.distributed.pipelining._utils import InferenceMode  # in newer torch alone

    def exchange(_: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        if not p2p_done:
            ops = [op for stage in stages for op in stage._get_init_p2p_neighbors_ops()]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    torch_schedules._PipelineSchedule._warmup_p2p = exchange
    return exact(jobs, steps)


# Faults


def _at(worker: Worker, action: str) -> int:
    """The place of an action in this rank's program."""
    return next(n for n, e in enumerate(worker.pipeline.program) if action_name(e.atom) == action)


def twice(action: str) -> Fault:
    """Fault: an action runs a second time, directly after the first time."""

    def inject(worker: Worker) -> None:
        place = _at(worker, action)
        worker.pipeline.program.insert(place, worker.pipeline.program[place])

    return inject


def raising(action: str) -> Fault:
    """Fault: an action raises after the contract accepted its check."""

    def inject(worker: Worker) -> None:
        place = _at(worker, action)
        entry = worker.pipeline.program[place]
        executor: Any = worker.runtime.executor

        def fail(*_: Any) -> None:
            raise ArithmeticError("an injected failure")

        def act(passage: Passage) -> None:
            executor.wgrad = fail
            try:
                entry.act(passage)
            finally:
                del executor.wgrad

        worker.pipeline.program[place] = entry._replace(act=act)

    return inject


class _Gone:
    """A stand-in for the work object of a message that was never posted."""

    def wait(self, *_: Any) -> None:
        return None


def dropped(action: str) -> Fault:
    """Fault: a send is accepted, but no message is sent."""

    def inject(worker: Worker) -> None:
        channels = worker.pipeline.channels
        send, wait = channels.send, channels.wait

        def drop(tensor: Tensor, to: int, message: Message) -> Transfer:
            if message.sent == action:
                return Transfer(_Gone(), tensor, action, to)
            return send(tensor, to, message)

        def pass_by(transfer: Transfer) -> None:
            if not isinstance(transfer.work, _Gone):  # nothing was sent, and no log says so
                wait(transfer)

        channels.send = drop  # type: ignore[method-assign]
        channels.wait = pass_by  # type: ignore[method-assign]

    return inject


def doubled(action: str) -> Fault:
    """Fault: a message is sent twice."""

    def inject(worker: Worker) -> None:
        channels = worker.pipeline.channels
        send = channels.send

        def double(tensor: Tensor, to: int, message: Message) -> Transfer:
            if message.sent == action:
                send(tensor, to, message)
            return send(tensor, to, message)

        channels.send = double  # type: ignore[method-assign]

    return inject


def exchanged(first: str, second: str) -> Fault:
    """Fault: a message is sent only after a later message."""

    def inject(worker: Worker) -> None:
        program = worker.pipeline.program
        held = program.pop(_at(worker, first))
        program.insert(_at(worker, second) + 1, held)

    return inject


def late(action: str, seconds: float) -> Fault:
    """Fault: the process does nothing for a while."""

    def inject(worker: Worker) -> None:
        place = _at(worker, action)
        entry = worker.pipeline.program[place]

        def act(passage: Passage) -> None:
            time.sleep(seconds)
            entry.act(passage)

        worker.pipeline.program[place] = entry._replace(act=act)

    return inject


def killed(action: str) -> Fault:
    """Fault: the process ends as in a crash; Python flushes and closes nothing."""

    def inject(worker: Worker) -> None:
        place = _at(worker, action)

        def act(_: Passage) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        worker.pipeline.program[place] = worker.pipeline.program[place]._replace(act=act)

    return inject


def killed_in_sum(weight: str) -> Fault:
    """
    Fault: the process ends when the gradients of a tied weight's copies are about to be added.
    """

    def inject(worker: Worker) -> None:
        reducers: Any = worker.runtime.reducer

        def end(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        assert weight in reducers.pairs
        reducers.pairs[weight] = end

    return inject


def terminated(action: str) -> Fault:
    """Fault: the process receives SIGTERM, as from its launcher, during an action."""

    def inject(worker: Worker) -> None:
        place = _at(worker, action)

        def act(_: Passage) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        worker.pipeline.program[place] = worker.pipeline.program[place]._replace(act=act)

    return inject


def bits(worker: Worker) -> dict[str, str]:
    """Digests of the raw bits of every tensor that a step changes."""
    named = {
        f"{index}.{name}": tensor
        for index, stage in worker.runtime.stages.items()
        for name, tensor in parameters(stage).items()
    }
    named.update(live_state(worker.runtime.domain))
    named.update(worker.optimizer.state_tensors())
    return dict(zip(named, digests(list(named.values())), strict=True))


def copies_of(job: Job, held: Mapping[str, str]) -> list[list[str]]:
    """Digests of this rank's copies of tied weights, and of AdamW's state of each copy."""
    places = [f"{stage}.{name}" for tie in job.ties for stage, name in tie.copies]
    kinds = ("exp_avg", "exp_avg_sq", "step")
    return [
        [held[place], *(held[f"stages.{place}.{kind}"] for kind in kinds)]
        for place in places
        if place in held
    ]


def _step(worker: Worker) -> dict[str, Any]:
    """Run one step; if it was stopped, report the cause and whether any tensor changed."""
    before = bits(worker)
    try:
        worker.step()
    except StoppedError as stopped:
        # Numerical state is of the failed attempt until the rebuild; nothing else may move.
        held = parameters_of(worker)
        moved = [name for name in held if held[name] != before[name]]
        return {"cause": attrs.asdict(stopped.cause), "moved": moved, "epoch": worker.runtime.epoch}
    return {"cause": None, "moved": [], "epoch": worker.runtime.epoch}


def parameters_of(worker: Worker) -> dict[str, str]:
    """The entries of `bits` that only an update changes."""
    state = live_state(worker.runtime.domain)
    return {name: value for name, value in bits(worker).items() if name not in state}


def once_more(worker: Worker, mend: Callable[[], None]) -> dict[str, Any]:
    """
    Run a step that a fault stops, and report it as `_step` does; then run the step again without
    the fault.
    """
    said = _step(worker)
    if said["cause"] is not None:
        mend()
        worker.rebuild(StoppedError(Cause(**said["cause"])))
        worker.step()
    return said


def recovering(job: Job, faults: list[tuple[int, Any]], limits: Limits) -> dict[str, Any]:
    """
    Inject a fault in each step, rebuild and run the step again; then run the same steps
    undisturbed.

    Args:
        job: What to train.
        faults: For each step, the rank of the fault, and the fault as a name and arguments.
        limits: Timeouts in seconds.
    """
    member = join("cpu", LIMITS)
    worker = build_worker(member, job, "reference", limits=limits)
    stops = []
    for victim, (name, *given) in faults:
        program = list(worker.pipeline.program)
        if member.rank == victim:
            globals()[name](*given)(worker)
        stops.append(_step(worker))
        worker.pipeline.program[:] = program
        cause = stops[-1]["cause"]
        if cause is not None:
            worker.rebuild(StoppedError(Cause(**cause)))
            stops[-1]["again"] = _step(worker)
    disturbed = bits(worker)
    losses = [worker.feed.losses_of(n) for n in range(len(faults))]
    worker.close()
    plain = build_worker(member, job, "reference", limits=limits)
    for _ in faults:
        plain.step()
    clean = bits(plain)
    differ = [name for name in clean if clean[name] != disturbed[name]]
    same = losses == [plain.feed.losses_of(n) for n in range(len(faults))]
    plain.close()
    return {"stops": stops, "differ": differ, "of": len(clean), "same losses": same}


def hanging_device(job: Job, victim: int, limits: Limits) -> dict[str, Any]:
    """Run a step; then all ranks agree on a checkpoint, but one rank's device never finishes."""
    member = join("cpu", LIMITS)
    worker = build_worker(member, job, "reference", limits=limits)
    worker.step()
    if member.rank == victim:
        worker.limits = attrs.evolve(limits, commit=1.0)
        worker.runtime._empty_device = Event().wait  # type: ignore[method-assign,assignment]
    try:
        agreement.consent(worker)
    except Exception as error:
        return {"cause": str(agreement.stop(worker, error, None))}
    return {"cause": ""}


def stopping(job: Job, victim: int, fault: tuple[Any, ...], limits: Limits) -> dict[str, Any]:
    """
    Run a step without a fault, and a step with a fault on one rank; report what a rebuild says
    afterwards.
    """
    member = join("cpu", LIMITS)
    worker = build_worker(member, job, "reference", limits=limits)
    worker.step()
    name, *given = fault
    if member.rank == victim:
        globals()[name](*given)(worker)
    said = _step(worker)
    if said["cause"] is not None:
        try:
            worker.rebuild(StoppedError(Cause(**said["cause"])))
        except StoppedError as again:
            said["rebuild"] = str(again)
    return said


def updating(job: Job, limits: Limits) -> dict[str, Any]:
    """
    Run steps until all ranks stop, because the optimizer of one rank fails after all ranks have
    agreed to commit.
    """
    member = join("cpu", LIMITS)
    worker = build_worker(member, job, "reference", limits=limits)
    worker.step()
    if member.rank == 1:
        optimizer: Any = worker.optimizer

        def fail(*_: Any) -> None:
            raise ArithmeticError("an injected failure")

        optimizer.step = fail
    said: dict[str, Any] = {"cause": None}
    while said["cause"] is None:
        said = _step(worker)
    return said


def alike(job: Job, tables: list[str], steps: int) -> list[dict[str, Any]]:
    """Train a job under its own table, then under tables from files."""
    member = join("cpu", LIMITS)
    found = []
    for schedule in (job.schedule, *tables):
        again = attrs.evolve(job, schedule=schedule)
        worker = build_worker(member, again, "reference", limits=LIMITS)
        for _ in range(steps):
            worker.step()
        slots = sum(config.slots for config in worker.runtime.contract.stages)
        found.append({"bits": bits(worker), "slots": slots})
        worker.close()
    return [
        {
            "differ": [n for n in found[0]["bits"] if found[0]["bits"][n] != f["bits"][n]],
            "of": len(f["bits"]),
            "slots": f["slots"],
        }
        for f in found
    ]


def behind(job: Job, limits: Limits) -> dict[str, Any]:
    """The last rank loads an older checkpoint; all other ranks do not."""
    member = join("cpu", LIMITS)
    worker = build_worker(member, job, "reference", limits=limits)
    worker.step()
    held = worker.runtime.checkpoint()
    worker.step()
    if member.rank == member.world - 1:
        worker.runtime.restore(*held)
    return _step(worker)


def exchange(job: Job, first: str, second: str, digested: bool) -> dict[str, Any]:
    """Exchange two sends of rank 0 where no tag identifies messages, with digests and without."""
    member = join("cpu", LIMITS)
    found = []
    for disturb in (True, False):
        worker = build_worker(member, job, "reference", limits=LIMITS, tagged=False)
        if disturb and member.rank == 0:
            exchanged(first, second)(worker)
        if not digested:
            worker.consent.every = ()
        said = _step(worker)
        found.append(bits(worker))
        if disturb:
            outcome = said
        worker.close()
    differ = [name for name in found[0] if found[0][name] != found[1][name]]
    return {**outcome, "differ": differ}


# What is typed, and what cannot run


def typed(cases: list[tuple[list[str], int | None]]) -> list[tuple[int, str, str]]:
    """
    Run `qeffect runtime pipeline` once for each case.

    Args:
        cases: For each case, the arguments, and the number of GPUs that this host pretends to have;
            None for a torch without NCCL.
    """
    join("cpu", LIMITS)
    processes._LAST_WORD_S = 0.0
    torch.cuda.is_available = lambda: True
    torch.cuda.set_device = lambda _: None
    said = []
    for argv, gpus in cases:
        dist.is_nccl_available = lambda gpus=gpus: gpus is not None
        torch.cuda.device_count = lambda gpus=gpus: gpus or 0
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(["runtime", "pipeline", *argv])
        said.append((code, out.getvalue().strip(), err.getvalue().strip()))
    return said


def unmet() -> str:
    """Let the two ranks build their stages with different dimensions."""
    member = join("cpu", LIMITS)
    hidden = 32 * (1 + member.rank)
    job = Job(pp=2, config=LayerConfig(hidden, 64, 2, 16))
    try:
        build_worker(member, job, "reference", limits=LIMITS)
    except BackendError as error:
        return str(error)
    return "accepted"


def unbuilt() -> tuple[str, str]:
    """
    Let rank 1 make an error when it builds its stages; report the error of each rank and its class.
    """
    member = join("cpu", LIMITS)
    job = Job(pp=2)

    def build(_: tuple[int, ...]) -> Any:
        return [] if member.rank == 0 else {}["no\nsuch layer"]

    try:
        Worker(member, job.table(), 2, build, lambda _: Batches(None, member.device), limits=LIMITS)  # type: ignore[arg-type]
    except BackendError as error:
        return str(error), type(error.__cause__).__name__
    return "accepted", ""


# The end of a process


def leaving() -> dict[str, Any]:
    """
    Count the threads of process groups before and after a rank leaves, while a reference cycle
    holds one of the groups.
    """
    member = join("cpu", LIMITS)
    held: dict[str, Any] = {"group": dist.new_group([0, 1])}
    held["itself"] = held
    dist.all_reduce(torch.ones(2), group=held["group"])
    all_gather(member, "a word")
    before = _threads_of_groups()
    del held
    leave()
    leave()
    return {
        "threads before": before,
        "threads after": _threads_of_groups(),
        "initialized": dist.is_initialized(),
    }


def frozen() -> dict[str, Any]:
    """
    Report whether the server imported the modules of this rank, and froze the imported objects.
    """
    return {"imported": "tests.ranks.preloaded" in sys.modules, "frozen": gc.get_freeze_count()}


def _threads_of_groups() -> int:
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum("gloo" in name for name in names)


# A step without its device work


class _Kept:
    """
    The reports of the actions in a slot (the buffers of one microbatch); one report for each dI,
    because each dI used the scales of another F.
    """

    def __init__(self) -> None:
        self.ran: Any = None
        self.queue: list[Any] = []

    @property
    def queued(self) -> Any:
        return self.queue.pop(0)


class _Noting:
    """
    An eager executor that keeps the report of every action, as graphs keep the reports of their
    captures.
    """

    marks_tail = False

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.slots: dict[int, Any] = {}
        self.wgrads: dict[Any, Any] = {}
        self.refreshed: dict[int, Any] = {}

    def _of(self, slot: Any) -> Any:
        return self.slots.setdefault(slot.index, _Kept())

    def refresh(self, memory: Any) -> Any:
        found = self.refreshed[memory.stage.index] = self.inner.refresh(memory)
        return found

    def forward(self, memory: Any, slot: Any) -> Any:
        found = self._of(slot).ran = self.inner.forward(memory, slot)
        return found

    def dgrad(self, memory: Any, slot: Any, variant: Any) -> Any:
        found = self.inner.dgrad(memory, slot, variant)
        self._of(slot).queue.append(found)
        return found

    def wgrad(self, memory: Any, slot: Any, variant: Any, others: Any = ()) -> Any:
        found = self.inner.wgrad(memory, slot, variant, others)
        self.wgrads[product_of(slot, variant, others)] = SimpleNamespace(covered=found)
        return found

    def check_addresses(self, memory: Any) -> None:
        """An eager executor bakes nothing in."""


def rehearsed(job: Job, spoil: str | None) -> dict[str, Any]:
    """
    Record the contract's transitions in two guarded steps, and in a third step that is rehearsed.

    Args:
        job: What to train.
        spoil: The action that the rehearsed program leaves out; None for a correct program.
    """
    member = join("cpu", LIMITS)
    worker = build_worker(member, job, "reference", limits=LIMITS)
    runtime = worker.runtime
    told: list[list[str]] = []

    def hear(transition: str, given: tuple[Any, ...], result: Any) -> None:
        named = zip(TRANSITIONS[transition], given, strict=True)
        held = {name: _same(value) for name, value in named if name not in _MOVES}
        told[-1].append(f"{transition} {held}")

    runtime.contract.observer = hear
    noting = runtime.performer.executor = _Noting(runtime.executor)
    tokens = []
    for _ in range(2):
        told.append([])
        for kept in noting.slots.values():
            kept.queue.clear()
        worker.step()
        tokens.append(runtime.contract.token(runtime.order.stages[0]))
    for kept in noting.slots.values():  # an eager dI reports whose scales it used; a graph's cannot
        kept.queue[:] = [
            (names, effects._replace(scales=effects.scales + tokens[1] - tokens[0]))
            for names, effects in kept.queue
        ]
    told.append([])
    before = bits(worker)
    if spoil is not None:
        places = [n for n, e in enumerate(worker.pipeline.program) if action_name(e.atom) == spoil]
        for place in places:
            del worker.pipeline.program[place]
    refusal, where = None, "rehearsal"
    try:
        rehearsal = Rehearsal(worker.pipeline, noting)
        rehearsal.run()
        where = "guards of the commit"
        runtime.contract.check_commit(caller="main", guards_alone=True)
        where = "commit"
        rehearsal.commit()
    except Refused as refused:
        refusal = refused.clause
    return {
        "guarded": [told[0], told[1]],
        "rehearsed": told[2],
        "moved": [name for name, digest in bits(worker).items() if before[name] != digest],
        "refusal": refusal,
        "where": where,
        "posted": sum(map(len, worker.pipeline.channels.posted().values())),
    }


#: What differs from step to step by itself.
_MOVES = ("token", "ticket", "epoch", "scales", "fill_epoch")


def _same(given: Any) -> Any:
    """
    Reduce keys and references to the fields that recur in each step: a key without its epoch, a
    reference without its generation.
    """
    if isinstance(given, TapeKey):
        return given.cell
    if isinstance(given, TapeRef):
        return given.slot
    return given


def example(source: str) -> str:
    """Run a program of the README unchanged; return its output."""
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(source, "README", "exec"), {})
    return out.getvalue()


def late_counts(job: Job) -> dict[str, Any]:
    """
    Let a device that compares counts run a graph twice: report the step, its end, and the step that
    is run again.
    """
    member = join("cpu", LIMITS)
    worker = Worker(
        member,
        job.table(),
        job.pp,
        lambda indices: job.stages(indices, member.device, "reference"),
        lambda replica: Batches(job.batch(member.device, replica), member.device),
        RuntimeConfig(counts="next step"),
        limits=LIMITS,
    )
    worker.step()
    counters = worker.runtime.counters
    assert counters is not None
    if member.rank == 0:
        counters.ran("F", 0)
    said = _step(worker)
    if said["cause"] is not None:
        worker.rebuild(StoppedError(Cause(**said["cause"])))
        said["again"] = _step(worker)
    return said


def connected_alone(seconds: float) -> str:
    """Rank 0 makes a process group with rank 1, which never joins."""
    member = join("cpu", LIMITS)
    if member.rank == 1:
        member.store.wait(["over"])
        return "did not come"
    try:
        gloo_group([0, 1], seconds)
    except UnansweredError as error:
        return str(error)
    finally:
        member.store.set("over", b"1")
    return "came"


def asleep(seconds: float) -> None:
    """A rank that hangs."""
    time.sleep(seconds)
