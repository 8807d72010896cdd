"""What the ranks run in the tests of launches on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import torch
import torch.distributed as dist

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.ranks import fallback, gate, one_launch
from qeffect.gpu_runtime.ranks.channels import ChannelEnds, Channels, Message
from qeffect.gpu_runtime.ranks.consent import Consent, StoppedError
from qeffect.gpu_runtime.ranks.job import Batches, Job
from qeffect.gpu_runtime.ranks.membership import Limits, join
from qeffect.gpu_runtime.ranks.one_launch import OneLaunch
from qeffect.gpu_runtime.ranks.replicas import Replicas
from qeffect.gpu_runtime.ranks.worker import Worker
from qeffect.gpu_runtime.runtime import Mode, RuntimeConfig
from qeffect.gpu_runtime.step.clipping import Part
from tests.ranks import bodies, recorded
from tests.ranks.bodies import bits, copies_of, parameters_of

LIMITS = Limits(start=60.0, message=15.0, commit=15.0, grace=6.0)


def _made(job: Job, options: dict[str, Any], mode: Mode = "one launch") -> Worker:
    member = join("cpu", LIMITS)
    return Worker(
        member,
        job.table(),
        job.pp,
        lambda indices: job.stages(indices, member.device, "reference"),
        lambda replica: Batches(job.batch(member.device, replica), member.device),
        RuntimeConfig(
            rule=job.rule,
            provisioning=job.provisioning,
            mode=mode,
            counts="next step",
            amax=job.amax,
            weights_sum=(1, job.dp),  # also where a mean divides once more
        ),
        limits=LIMITS,
        ties=job.ties,
        **options,
    )


def replayed(job: Job, steps: int, options: dict[str, Any]) -> dict[str, str]:
    """The final state of guarded steps."""
    worker = _made(job, options, "eager")
    for _ in range(steps):
        worker.step()
    left = bits(worker)
    worker.close()
    return left


def launched(job: Job, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run guarded steps, then the same steps as launches; return what differs, and the norms."""
    recorded.install()
    first = _made(job, options)
    norms = []
    for _ in range(steps):
        first.step()
        norms.append(repr(first.norm))
    left = bits(first)
    first.close()
    worker = _made(job, options)
    runner = OneLaunch(worker)
    found = []
    for _ in range(steps):
        runner.step()
        recorded.STREAM.synchronize()
        found.append(repr(runner.norm))
    runner.leave()
    own = bits(worker)
    captured = runner._gate.number
    runner.close()
    worker.close()
    return {
        "differ": [name for name in left if left[name] != own[name]],
        "of": len(left),
        "copies": copies_of(job, own),
        "launches": int(captured),
        "rehearsed and as one": runner.rehearsal.steps,
        "norms": [norms, found],
    }


def uncaptured(job: Job, steps: int) -> dict[str, Any]:
    """
    Let the library of one rank refuse a capture; return how the run continues, and its final state.

    The last value is the number of gates that were made. A rank may still connect to a gate that
    another rank has closed, so a run without launches must not make a gate.
    """
    recorded.install()
    worker = _made(job, {})
    gates, make = [], one_launch.UpdateGate

    def counted(*given: Any) -> Any:
        gates.append(given)
        return make(*given)

    one_launch.UpdateGate = counted  # type: ignore[assignment,misc]
    runner: OneLaunch | Worker = OneLaunch(worker)
    assert isinstance(runner, OneLaunch)
    if worker.member.rank == job.world - 1:
        capture = runner._gate.capture

        def refuse(gradients: Any, differs: Any = None) -> Any:
            if gradients is not None:
                raise RuntimeError("operation not permitted when stream is capturing")
            return capture(gradients, differs)

        runner._gate.capture = refuse  # type: ignore[method-assign]
    notes: list[str] = []
    while worker.runtime.epoch < steps:
        try:
            runner.step()
        except StoppedError as stopped:
            whole = runner if isinstance(runner, OneLaunch) else None
            if (why := fallback.fall_back(whole, stopped)) is None:
                raise
            notes.append(why)
            runner = worker
    left = bits(worker)
    worker.close()
    return {"notes": notes, "left": left, "gates": len(gates)}


def unreplayed(job: Job) -> list[str]:
    """The last rank cannot capture its actions; return what each rank raises."""
    recorded.install()
    worker = _made(job, {})
    if worker.member.rank == job.world - 1:

        def refuse() -> None:
            raise RuntimeError("out of memory")

        worker.runtime.replay_actions = refuse  # type: ignore[method-assign]
    worker.step()
    raised = []
    try:
        worker.replay_actions()
    except BackendError as error:
        raised.append(str(error))
    worker.close()
    return raised


def unwarmed(job: Job, steps: int, behind: bool) -> dict[str, Any]:
    """
    The last rank fails in the warm-up of a capture, and its connections outlive its stop.

    Args:
        job: What to train.
        steps: The epoch at which the run ends.
        behind: Whether the device of the last rank has voted before the failure; otherwise the
            devices of other ranks wait for its vote.
    """
    recorded.install()
    worker = _made(job, {})
    runner = OneLaunch(worker)
    gate, held = runner._gate, []
    if worker.member.rank == job.world - 1:
        warm = gate.warm

        def fail() -> None:
            if behind:
                warm()
                recorded.STREAM.synchronize()
            held.append(gate.group)
            raise RuntimeError("an injected failure")

        gate.warm = fail  # type: ignore[method-assign]
    causes = []
    while worker.runtime.epoch < steps:
        try:
            runner.step()
        except StoppedError as stopped:
            causes.append(attrs.asdict(stopped.cause))
            held.clear()
            runner.rebuild(stopped)
    runner.leave()
    left = bits(worker)
    runner.close()
    worker.close()
    return {"causes": causes, "left": left, "captured": runner._capture.epoch}


def _twice(worker: Worker, action: str) -> Callable[[], None]:
    program = list(worker.pipeline.program)
    bodies.twice(action)(worker)

    def mend() -> None:
        worker.pipeline.program[:] = program

    return mend


def _miscounted(worker: Worker, _: str) -> Callable[[], None]:
    counters = worker.runtime.counters
    assert counters is not None
    recorded.STREAM.submit(lambda: counters.ran("F", 0))
    return lambda: None


def _exchanged(worker: Worker, sends: str) -> Callable[[], None]:
    program = list(worker.pipeline.program)
    bodies.exchanged(*sends.split())(worker)

    def mend() -> None:
        worker.pipeline.program[:] = program

    return mend


def _squares_that_differ(worker: Worker, _: str) -> Callable[[], None]:
    recorded.STREAM.submit(lambda: UNTIL_UNLIKE.zero_())
    return lambda: None


#: How many launches go by until one of them has other gradients than the other replicas.
UNTIL_UNLIKE = torch.full((), 1 << 40, dtype=torch.int64)


def _with_unlike_squares() -> None:
    """Let the sums of squares that a launch reports of its gradients differ once."""
    real = gate.square_sums

    def squares(*given: Any) -> dict[Part, torch.Tensor]:
        found = {part: squares + (UNTIL_UNLIKE == 0) for part, squares in real(*given).items()}
        UNTIL_UNLIKE.sub_(1)
        return found

    gate.square_sums = squares  # type: ignore[attr-defined]


def _slow_to_stop(runner: OneLaunch) -> None:
    """Let the device finish all launched work before the host ends connections."""
    real = runner._stopped

    def stopped() -> None:
        recorded.STREAM.synchronize()
        real()

    runner._stopped = stopped  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[Worker, str], Callable[[], None]]] = {
    "twice": _twice,
    "miscounted": _miscounted,
    "exchanged": _exchanged,
    "unlike": _squares_that_differ,
}


def recovering(
    job: Job, steps: int, options: dict[str, Any], faults: list[tuple[int, int, str, str]]
) -> dict[str, Any]:
    """
    Run launches, of which some end in a stop; after a stop all ranks run the epoch again.

    Args:
        job: What to train.
        steps: The epoch at which the run ends.
        options: Options of the worker.
        faults: For each fault, the epoch before which it is injected, its rank, its kind, and its
            action.
    """
    recorded.install()
    _with_unlike_squares()
    worker = _made(job, options)
    runner = OneLaunch(worker)
    if any(kind == "unlike" for _, _, kind, _ in faults):
        _slow_to_stop(runner)
    due = {epoch: (victim, kind, action) for epoch, victim, kind, action in faults}
    said: list[dict[str, Any]] = []
    while worker.runtime.epoch < steps:
        epoch = worker.runtime.epoch
        if epoch in due:
            victim, kind, action = due.pop(epoch)
            if worker.member.rank == victim:
                FAULTS[kind](worker, action)
        try:
            runner.step()
            if worker.runtime.epoch == steps:
                runner.leave()
        except StoppedError as stopped:
            recorded.STREAM.synchronize()
            before = parameters_of(worker)
            runner.rebuild(stopped)
            said.append(
                {
                    "cause": attrs.asdict(stopped.cause),
                    "again": worker.runtime.epoch,
                    "moved": [n for n, d in parameters_of(worker).items() if before[n] != d],
                }
            )
    left = bits(worker)
    runner.close()
    worker.close()
    return {"stops": said, "left": left, "epoch": worker.runtime.epoch}


def unconfirmed(job: Job, waits: bool) -> str:
    """
    Run two launches, the first on a slow device; return why the second launch stopped, or an empty
    text if it did not stop.
    """
    recorded.install()
    worker = _made(job, {})
    runner = OneLaunch(worker)
    for _ in range(3):
        runner.step()
    recorded.STREAM.synchronize()
    if not waits:
        runner._waits.wait = lambda done: None  # type: ignore[method-assign]
    held = threading.Event()
    recorded.STREAM.submit(lambda: (held.wait(30.0), None)[1])
    threading.Timer(1.0, held.set).start()
    try:
        for _ in range(2):
            runner.step()
        runner.leave()
    except StoppedError as stopped:
        return stopped.cause.text
    runner.close()
    worker.close()
    return ""


def ended_while_posting() -> list[list[str]]:
    """
    The host ends connections while the device's thread posts on them.

    Returns:
        The group over which each post went (its own group, an ended group, or the group of all
        ranks): first for a message, then for the two calls of a bucket.
    """
    recorded.install()
    return [_posts_of(begin) for begin in (_a_message, _a_bucket)]


def _posts_of(begin: Callable[[Any], tuple[Consent, Callable[[], Any]]]) -> list[str]:
    anywhere: Any = dist
    group: Any = SimpleNamespace(size=lambda: 2, ended=False)
    inside, ended = threading.Event(), threading.Event()
    posts: list[str] = []

    def post(*_: Any, group: Any, **__: Any) -> Any:
        inside.set()
        ended.wait(0.3)  # time for the host to end it
        posts.append("of all ranks" if group is None else "ended" if group.ended else "its own")
        return SimpleNamespace(wait=lambda *_: None)

    def destroy(group: Any) -> None:
        group.ended = True

    anywhere.isend = anywhere.all_reduce = lambda *_, **__: SimpleNamespace()
    anywhere.destroy_process_group = destroy
    consent, action = begin(group)
    graph = recorded._Graph()
    graph.capture_begin()
    action()
    graph.capture_end()
    anywhere.isend = anywhere.all_reduce = post
    graph.replay()
    assert inside.wait(10.0)
    consent.close()
    ended.set()
    recorded.STREAM.synchronize()
    assert group.ended
    return posts


def _a_message(group: Any) -> tuple[Consent, Callable[[], Any]]:
    channels = Channels(0, {ChannelEnds(0, 1): group}, host=True)
    table: Any = None
    consent = Consent(None, None, 0, 1, (), channels, table, (0,))
    return consent, lambda: channels.send(torch.ones(2), 1, Message(0, 0, False))


def _a_bucket(group: Any) -> tuple[Consent, Callable[[], Any]]:
    replicas = Replicas(group, host=True, deadline=1.0, together=False)
    table: Any = None
    channels = Channels(0, {}, host=True)
    consent = Consent(None, None, 0, 1, (), channels, table, (0,), replicas=replicas)
    gradients = {"w": torch.ones(2), "b": torch.ones(2)}
    return consent, lambda: replicas(0, gradients)
