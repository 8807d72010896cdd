"""
What the ranks run in the tests of one launch per step: launches on GPUs, replays on CPUs.

Every body takes the device as an argument and runs the same steps on both kinds of devices. Without
a GPU, everything except the launch itself is therefore tested.
"""

from __future__ import annotations

import gc
import math
import os
import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from qeffect.gpu_runtime.backends.determinism import DETERMINISTIC
from qeffect.gpu_runtime.backends.devices import generator_of
from qeffect.gpu_runtime.backends.protocol import BackendError, StageBackend
from qeffect.gpu_runtime.ranks.consent import Cause, StoppedError
from qeffect.gpu_runtime.ranks.fallback import fall_back
from qeffect.gpu_runtime.ranks.gate import UpdateGate
from qeffect.gpu_runtime.ranks.job import Batches, Job
from qeffect.gpu_runtime.ranks.membership import Limits, Member, join
from qeffect.gpu_runtime.ranks.one_launch import OneLaunch
from qeffect.gpu_runtime.ranks.worker import Worker
from qeffect.gpu_runtime.runtime import RuntimeConfig, mode_on
from qeffect.gpu_runtime.step.clipping import Clipping, Norm, parts_of, square_sums
from qeffect.gpu_runtime.step.memory.counters import DeviceCounters
from qeffect.gpu_runtime.step.optimizer import Optimizer
from qeffect.gpu_runtime.training.language_model import LanguageJob
from tests.ranks import bodies
from tests.ranks.bodies import bits, copies_of, parameters_of
from tests.ranks.recorded import gate_without_kernels

#: Nothing takes a second but where a rank is gone: then the host asks for as long as this.
LIMITS = Limits(start=90.0, message=15.0, commit=15.0, grace=3.0)
BACKENDS = {"cpu": "reference", "cuda": "transformer-engine"}
BEFORE = 5  # a guarded step, a captured one, two launches that are rehearsed, one as one


def _position(device: torch.device) -> int:
    """The position of the device's random generator; 0 on a CPU, where nothing is captured."""
    return 0 if device.type == "cpu" else int(generator_of(device).get_offset())


class _Poisoned(Batches):
    """Data whose targets are NaN in one step."""

    poisoned = -1

    def inputs(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        found = super().inputs(stage, step, microbatch)
        if step != self.poisoned or (stage.index == 0 and len(found) == 1):
            return found
        return (*found[:-1], torch.full_like(found[-1], math.nan))


def _made(job: Job, device: str, *, one: bool, rate: float | None = None, **options: Any) -> Worker:
    os.environ.update(DETERMINISTIC)
    member = join(device, LIMITS)
    cuda = device == "cuda"

    def optimizer(stages: Any) -> Optimizer:
        lr = 1e-3 if rate is None else torch.full((), rate, device=member.device)
        decays = job.decays if isinstance(job, LanguageJob) else None
        capturable = cuda and (one or rate is not None)
        return Optimizer(stages, lr=lr, decays=decays, capturable=capturable)

    return Worker(
        member,
        job.table(),
        job.pp,
        lambda indices: job.stages(indices, member.device, BACKENDS[device]),
        lambda replica: _Poisoned(job.batch(member.device, replica), member.device),
        RuntimeConfig(
            rule=job.rule,
            provisioning=job.provisioning,
            mode=mode_on(device, "one launch" if one else "replays"),
            counts="next step" if one else None,
            amax=job.amax,
            weights_sum=(1, job.dp),  # also where a mean divides once more
        ),
        limits=LIMITS,
        optimizer=optimizer,
        ties=job.ties,
        **options,
    )


def _runner(worker: Worker) -> OneLaunch | Worker:
    """Launches on a GPU; on a CPU the replays with which launches are compared."""
    return OneLaunch(worker) if worker.member.device.type == "cuda" else worker


def _quiet(worker: Worker) -> None:
    if worker.member.device.type == "cuda":
        torch.cuda.synchronize(worker.member.device)


def _end(runner: OneLaunch | Worker) -> None:
    if isinstance(runner, OneLaunch):
        runner.leave()


def reserved(job: Job, one: bool) -> int:
    """The device memory that a rank reserves for its training, in bytes, after three steps."""
    worker = _made(job, "cuda", one=one)
    runner = OneLaunch(worker) if one else worker
    for _ in range(3):
        runner.step()
    _quiet(worker)
    torch.cuda.empty_cache()
    found = torch.cuda.memory_reserved()
    if isinstance(runner, OneLaunch):
        runner.close()
    worker.close()
    return int(found)


def uncaptured(job: Job, steps: int, invalid: bool) -> dict[str, Any]:
    """
    Run steps of a worker for launches whose capture fails, then steps of a worker for replays.

    Args:
        job: What to train.
        steps: Optimizer steps.
        invalid: Whether CUDA invalidates the capture, because the host waits for the stream.
    """
    found, executors = [], []
    for one in (True, False):
        gc.collect()
        worker = _made(job, "cuda", one=one)
        if one:
            whole = OneLaunch(worker)
            whole.step()
            assert _fallen(whole, invalid) is not None
        while worker.runtime.epoch < steps:
            worker.step()
        _quiet(worker)
        found.append(bits(worker))
        executors.append(type(worker.runtime.executor).__name__)
        worker.close()
    launches, replays = found
    return {
        "differ": sorted(n for n in replays if launches.get(n) != replays[n]),
        "of": len(replays),
        "executors": executors,
    }


def _fallen(whole: OneLaunch, invalid: bool) -> str | None:
    """Let the capture of a step fail, and continue with replays; return why."""
    real, gates = UpdateGate.capture, cast("Any", UpdateGate)

    def capture(self: UpdateGate, *given: Any) -> Any:
        if invalid:
            torch.cuda.current_stream().synchronize()
        raise RuntimeError("operation not permitted when stream is capturing")

    gates.capture = capture
    try:
        whole.step()
    except StoppedError as stopped:
        return fall_back(whole, stopped)
    finally:
        gates.capture = real
    return None


def launched(
    job: Job,
    device: str,
    steps: int,
    *given: Any,
) -> dict[str, Any]:
    """
    Run steps as replays, then the same steps as launches; return the final states and what differs.

    Args:
        job: What to train.
        device: `cpu` or `cuda`.
        steps: Optimizer steps.
        given: Three values: the learning rate of each step, or None for a rate that is not a
            tensor; the limit of the norm, or None; and the step whose data are poisoned, or -1.
    """
    runs = [_run(job, device, steps, one, *given) for one in (False, True)]
    found, words = [left for left, _ in runs], [word for _, word in runs]
    names = found[0].keys() | found[1].keys()
    return {
        "differ": sorted(n for n in names if found[0].get(n) != found[1].get(n)),
        "of": len(names),
        "copies": copies_of(job, found[1]),
        "replays": words[0],
        "launches": words[1],
    }


def _run(
    job: Job,
    device: str,
    steps: int,
    one: bool,
    rates: Sequence[float] | None,
    limit: float | None,
    poisoned: int,
) -> tuple[dict[str, str], dict[str, Any]]:
    gc.collect()  # one runtime at a time shares the library's state
    rate = None if rates is None else rates[0]
    worker = _made(job, device, one=one, rate=rate, clip_norm=limit, skip_nonfinite=poisoned >= 0)
    assert isinstance(worker.feed, _Poisoned)
    worker.feed.poisoned = poisoned
    runner = _runner(worker) if one else worker
    moved, norms = [], []
    began = _position(worker.member.device)
    for step in range(steps):
        if rates is not None:
            worker.optimizer.set_rate(rates[step])
        _quiet(worker)
        before = parameters_of(worker)
        runner.step()
        _quiet(worker)
        moved.append(sum(before.get(n, d) != d for n, d in parameters_of(worker).items()))
        norms.append(repr(None if runner.norm is None else attrs.astuple(runner.norm)))
    _end(runner)
    _quiet(worker)
    left = bits(worker)
    draws = _position(worker.member.device) - began
    state = worker.optimizer.state_tensors()
    counted = sorted({float(v) for n, v in state.items() if n.endswith(".step")})
    if isinstance(runner, OneLaunch):
        runner.close()
    worker.close()
    return left, {"moved": moved, "norms": norms, "steps": counted, "draws": draws}


def _until_stopped(worker: Worker, runner: OneLaunch | Worker, most: int) -> dict[str, Any]:
    """
    Run steps until all ranks stop; return the cause, the number of steps, and the weights that
    changed meanwhile.
    """
    _quiet(worker)
    before = parameters_of(worker)
    for step in range(most):
        try:
            runner.step()
        except StoppedError as stopped:
            _quiet(worker)
            moved = [n for n, d in parameters_of(worker).items() if before[n] != d]
            return {"cause": attrs.asdict(stopped.cause), "moved": moved, "after": step}
    return {"cause": None, "moved": [], "after": most}


def _begun(job: Job, device: str) -> tuple[Worker, OneLaunch | Worker]:
    worker = _made(job, device, one=True)
    runner = _runner(worker)
    for _ in range(BEFORE):
        runner.step()
    return worker, runner


def differing(job: Job, device: str, victim: int) -> dict[str, Any]:
    """Let one rank's device run an action that was not committed."""
    worker, runner = _begun(job, device)
    if worker.member.rank == victim:
        _miscount(worker)
    return _until_stopped(worker, runner, 3)


def refused(job: Job, device: str, victim: int, action: str) -> dict[str, Any]:
    """Let one rank's program contain an action twice, which the rehearsal refuses."""
    worker, runner = _begun(job, device)
    published = None
    if worker.member.rank == victim:
        bodies.twice(action)(worker)
        _quiet(worker)
        published = _published(runner)
    said = _until_stopped(worker, runner, 3)
    if worker.member.rank == victim:
        said["launched"] = _published(runner) - (published or 0)
    return said


def _published(runner: OneLaunch | Worker) -> int:
    """The number of steps that the device has run as launches, by its own count."""
    return int(runner._gate.number) if isinstance(runner, OneLaunch) else 0


def recovered(job: Job, device: str, steps: int, victim: int, action: str | None) -> dict[str, Any]:
    """
    Run steps without a fault; then run the same steps as launches, of which one is stopped and run
    again.

    Args:
        job: What to train.
        device: `cpu` or `cuda`.
        steps: Optimizer steps.
        victim: The rank of the fault.
        action: The action that the rank's program contains twice; None for a device that counts an
            action that was not committed.
    """
    whole, _ = _run(job, device, steps, False, None, None, -1)
    gc.collect()
    worker, runner = _begun(job, device)
    if worker.member.rank == victim:
        if action is not None:
            bodies.twice(action)(worker)
        else:
            _miscount(worker)
    said = _until_stopped(worker, runner, 3)
    if said["cause"] is not None:
        runner.rebuild(StoppedError(Cause(**said["cause"])))
    said["again"] = worker.runtime.epoch
    while worker.runtime.epoch < steps:
        runner.step()
    _end(runner)
    _quiet(worker)
    left = bits(worker)
    said["differ"] = [name for name in whole if whole[name] != left[name]]
    said["of"] = len(whole)
    if isinstance(runner, OneLaunch):
        said["captured"] = runner.graph is not None
        runner.close()
    worker.close()
    return said


def _miscount(worker: Worker) -> None:
    counters = worker.runtime.counters
    assert counters is not None
    with worker.runtime.caller_scope():
        counters.ran("F", 0)


def killed(job: Job, device: str, victim: int, action: str | None) -> dict[str, Any]:
    """
    End a rank as a crash does.

    Args:
        job: What to train.
        device: `cpu` or `cuda`.
        victim: The rank.
        action: The action during which the rank ends; None for between two launches; `warm-up` for
            the warm-up of a capture, where the devices of other ranks wait for this rank's vote.
    """
    if action == "warm-up":
        worker = _made(job, device, one=True)
        runner = _runner(worker)
        runner.step()
        _die_in_warm_up(worker, runner, victim)
    elif action is None:
        worker, runner = _begun(job, device)
        _quiet(worker)  # no rank's last launch waits for the victim: the next one does
        dist.barrier()
        if worker.member.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        worker = _made(job, device, one=False)
        runner = worker
        for _ in range(BEFORE):
            runner.step()
        if worker.member.rank == victim:
            bodies.killed(action)(worker)
    return _until_stopped(worker, runner, 3)


def _die_in_warm_up(worker: Worker, runner: OneLaunch | Worker, victim: int) -> None:
    if isinstance(runner, OneLaunch):
        runner._gate.warm()  # its communicator begins while all ranks are there
    _quiet(worker)
    dist.barrier()
    if worker.member.rank == victim:
        if not isinstance(runner, OneLaunch):
            os.kill(os.getpid(), signal.SIGKILL)
        gate: Any = runner._gate
        gate.warm = lambda: os.kill(os.getpid(), signal.SIGKILL)


def changed(job: Job, device: str) -> dict[str, Any]:
    """A learning rate that is a Python number changes after a capture."""
    worker, runner = _begun(job, device)
    worker.optimizer.set_rate(5e-4)
    return _until_stopped(worker, runner, 1)


def resumed(job: Job, device: str) -> dict[str, Any]:
    """Leave launches for a checkpoint and resume them; also launch after a guarded step."""
    worker, runner = _begun(job, device)
    _end(runner)
    checkpoint, _ = worker.runtime.checkpoint()
    if isinstance(runner, OneLaunch):
        runner.resume()
    runner.step()
    _end(runner)
    worker.step()
    refusal = ""
    if isinstance(runner, OneLaunch):
        try:
            runner.resume()
        except BackendError as error:
            refusal = str(error)
        runner.close()
    epoch = worker.runtime.epoch
    worker.close()
    return {"checkpoint": checkpoint.epoch, "epoch": epoch, "refusal": refusal}


# The gate of a launch, over ranks, without its kernels


def gated(limit: float | None) -> list[dict[str, Any]]:
    """
    What the gate decides on each rank if all is well, if a value is not finite, and if a device's
    counts differ.

    The host's decision for the same gradients is returned too.
    """
    member, clipping, made = _gates(limit)
    found = []
    for case in ("well", "no number", "differs"):
        gate, every, own = made()
        if case == "no number":
            every[1]["w"][2, 2] = math.inf
        if case == "differs" and member.rank == 0:
            gate.counters.ran("F", 0)
        skip = gate.capture(own)
        parts = [float(part) for part in square_sums(every, clipping.elsewhere).values()]
        assert gate.norm is not None
        found.append(
            {
                "skip": float(skip),
                "scale": None if gate.scale is None else float(gate.scale),
                "norm": repr(gate.norm.read()),
                "host": repr(Norm.of(parts, clipping)),
                "said": gate.ring[0].tolist()[-member.world :],
            }
        )
        gate.close()
    return found


def gated_replicas(limit: float | None) -> list[dict[str, Any]]:
    """
    What the gate decides for two replicas of one rank: equal gradients, a value that is not finite
    in one replica, and gradients that differ.
    """
    member = join("cpu", LIMITS)
    gate_without_kernels()
    parts = tuple(parts_of({0: ["w"], 1: ["w"]}))
    clipping = Clipping(max_norm=limit, skip_nonfinite=True, parts=parts)
    worker: Any = SimpleNamespace(
        member=member,
        clipping=clipping,
        pp=1,
        limits=LIMITS,
        runtime=SimpleNamespace(
            stages={0: None}, domain=SimpleNamespace(stages=(), extra_state=dict)
        ),
    )
    found = []
    for case in ("alike", "no number", "differs"):
        gate = UpdateGate(DeviceCounters([(0, 0)], member.device), worker)
        every = {stage: {"w": torch.full((3,), 1.5 + stage)} for stage in range(2)}
        parts = [float(part) for part in square_sums(every).values()]
        if member.rank == 1 and case != "alike":
            every[1]["w"][1] = math.inf if case == "no number" else 2.75
        skip = gate.capture(every)
        assert gate.norm is not None
        found.append(
            {
                "skip": float(skip),
                "updated": int(gate.updated),
                "norm": repr(gate.norm.read()),
                "host": repr(Norm.of(parts, clipping)),
                "said": gate.ring[0].tolist()[-member.world :],
            }
        )
        gate.close()
    return found


def unheard(limit: float | None) -> list[dict[str, Any]]:
    """
    Run three steps that succeed on each rank; in the second step the rank receives the votes of the
    first step.
    """
    member, _, made = _gates(limit)
    gate, _, own = made()
    found, before, gather = [], torch.empty(0), gate._gather

    def same(into: Tensor, _: Tensor) -> None:
        into.copy_(before)

    for step in range(3):
        gate._gather = same if step == 1 else gather  # type: ignore[method-assign]
        skip = gate.capture(own)
        before = (gate.heard if gate.norm is None else gate.rows).clone()
        said = gate.ring[step].tolist()[-member.world :]
        found.append({"skip": float(skip), "said": said})
    gate.close()
    return found


def _gates(limit: float | None) -> tuple[Member, Clipping, Any]:
    """
    This rank, its limits, and functions that make a gate with the gradients of all stages and with
    the rank's own gradients.
    """
    member = join("cpu", LIMITS)
    gate_without_kernels()
    stages = 2 * member.world
    tied = frozenset({(stages - 1, "w")})  # a copy, which counts where the other one is
    parts = tuple(parts_of(dict.fromkeys(range(stages), ("w", "b")), tied))
    clipping = Clipping(max_norm=limit, skip_nonfinite=True, elsewhere=tied, parts=parts)
    worker: Any = SimpleNamespace(
        member=member,
        clipping=clipping,
        pp=member.world,
        limits=LIMITS,
        runtime=SimpleNamespace(
            stages={0: None}, domain=SimpleNamespace(stages=(), extra_state=dict)
        ),
    )

    def made() -> tuple[UpdateGate, dict[int, dict[str, Tensor]], dict[int, dict[str, Tensor]]]:
        every = {}
        for stage in range(stages):
            g = torch.Generator().manual_seed(stage)
            every[stage] = {"w": torch.randn(7, 5, generator=g), "b": torch.randn(3, generator=g)}
        own = {s: every[s] for s in every if s % member.world == member.rank}
        return UpdateGate(DeviceCounters([(0, 0)], member.device), worker), every, own

    return member, clipping, made
