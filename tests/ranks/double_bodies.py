"""What the ranks run in the tests of steps that run twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from qeffect.gpu_runtime.ranks.causes import StoppedError
from qeffect.gpu_runtime.ranks.double_run import DoubleRun
from qeffect.gpu_runtime.ranks.job import Batches, Job
from qeffect.gpu_runtime.ranks.membership import Limits, join
from qeffect.gpu_runtime.ranks.one_launch import OneLaunch
from qeffect.gpu_runtime.ranks.worker import Worker
from qeffect.gpu_runtime.runtime import RuntimeConfig
from tests.ranks import recorded
from tests.ranks.bodies import bits, exchanged, parameters_of

LIMITS = Limits(start=60.0, message=15.0, commit=15.0, grace=4.0)


def made(job: Job, every: int, mode: str, **options: Any) -> Worker:
    """A worker of which every `every`-th step runs twice."""
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
            mode=mode,  # type: ignore[arg-type]
            counts=options.pop("counts", None if mode == "eager" else "next step"),
            amax=job.amax,
            walks=job.walks,
            weights_sum=(1, job.dp),  # also where a mean divides once more
        ),
        limits=LIMITS,
        ties=job.ties,
        replay_every=every,
        **options,
    )


def flip(tensor: Tensor, bit: int = 6, place: int = 3) -> None:
    """Flip a bit of an element of the first row, hidden from autograd."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    held = tensor.data.view(words[tensor.element_size()])
    index = (0,) * (held.dim() - 1) + (min(place, held.shape[-1] - 1),) * (held.dim() > 0)
    held[index] ^= 1 << bit


class Flips:
    """
    An executor that flips one bit after one action of one run of one step.

    Args:
        worker: The rank's worker.
        epoch: The step.
        run: 1 or 2.
        kind: `output`, `input gradient`, `destination`, `scale`, `history` or `cache`.
        call: Index, from 0, of the call of the kind's action in the run after which the bit flips.
    """

    ACTIONS = {
        "output": "forward",
        "input gradient": "dgrad",
        "destination": "wgrad",
        "scale": "refresh",
        "history": "forward",
        "cache": "refresh",
    }

    def __init__(self, worker: Worker, epoch: int, run: int, kind: str, call: int) -> None:
        self.worker, self.epoch, self.run, self.kind, self.call = worker, epoch, run, kind, call
        self.now, self.calls, self.done = 1, 0, 0
        executor: Any = worker.runtime.executor
        name = self.ACTIONS[kind]
        self._act: Callable[..., Any] = getattr(type(executor), name).__get__(executor)
        for other in self.ACTIONS.values():  # what an earlier flip has replaced
            vars(executor).pop(other, None)
        setattr(executor, name, self)
        double = worker.double
        if double is not None:
            double.between = self._second

    def _second(self) -> None:
        self.now, self.calls = 2, 0

    def __call__(self, memory: Any, *given: Any) -> Any:
        found = self._act(memory, *given)
        if self.worker.runtime.epoch == self.epoch and self.now == self.run and not self.done:
            if self.calls == self.call and self._flipped(memory, *given):
                self.done += 1
            self.calls += 1
        return found

    def _flipped(self, memory: Any, slot: Any = None, variant: Any = None, _: Any = ()) -> bool:
        stage = memory.stage
        if self.kind == "output":
            flip(slot.outputs[0])
        elif self.kind == "input gradient":
            if not slot.dgrads:
                return False
            flip(slot.dgrads[0])
        elif self.kind == "destination":
            flip(next(iter(memory.arena.buffers(variant.destination).values())))
        elif self.kind == "cache":
            flip(next(iter(stage.cached_weights().values())), bit=5)
        else:
            wanted = "scale" if self.kind == "scale" else "amax_history"
            (name, *_) = [n for n in stage.numerical_state() if n.endswith(f"forward.{wanted}")]
            flip(stage.numerical_state()[name], bit=22, place=0)
        return True


def undisturbed(job: Job, steps: int, every: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run the same steps once each, then twice each; return the final state of both."""
    found = []
    for each in (0, every):
        worker = made(job, each, "eager", **options)
        norms = []
        for _ in range(steps):
            worker.step()
            norms.append(repr(worker.norm))
        losses = [worker.feed.losses_of(n) for n in range(steps)]  # type: ignore[attr-defined]
        found.append({"left": bits(worker), "losses": losses, "norms": norms})
        worker.close()
    return {"same": found[0] == found[1], "of": len(found[0]["left"]), "losses": found[0]["losses"]}


def _removed() -> Callable[[], None]:
    """Remove the comparisons of two runs, so that no comparison refuses a step."""
    real = DoubleRun.require_equal
    DoubleRun.require_equal = lambda _: None  # type: ignore[method-assign]

    def put_back() -> None:
        DoubleRun.require_equal = real  # type: ignore[method-assign]

    return put_back


def flipped(
    job: Job, flips: list[dict[str, Any]], options: dict[str, Any], removed: bool = False
) -> list[dict[str, Any]]:
    """
    Run guarded steps that all run twice, with a bit that flips in one run of each step.

    Args:
        job: What to train.
        flips: For each step, arguments of `Flips`, and the rank.
        options: Options of the worker.
        removed: Whether the comparisons of the two runs are removed.

    Returns:
        For each step: whether a bit flipped on this rank, what stopped the ranks, the parameters
        that a stopped step moved, and what differs from undisturbed steps in the end of the step.
    """
    plain, clean = made(job, 0, "eager", **options), []
    for _ in flips:
        plain.step()
        clean.append(bits(plain))
    plain.close()
    put_back = _removed() if removed else lambda: None
    worker = made(job, 1, "eager", **options)
    said = []
    for epoch, case in enumerate(flips):
        own = worker.member.rank == case.pop("rank")
        flip = Flips(worker, epoch, **case) if own else None
        causes, moved = [], []
        while worker.runtime.epoch == epoch:
            before = parameters_of(worker)
            try:
                worker.step()
            except StoppedError as stopped:
                after = parameters_of(worker)
                moved += [name for name in before if before[name] != after[name]]
                causes.append(attrs.asdict(stopped.cause))
                worker.rebuild(stopped)
        left = bits(worker)
        said.append(
            {
                "done": 0 if flip is None else flip.done,
                "causes": causes,
                "moved": moved,
                "differ": [name for name in left if clean[epoch][name] != left[name]],
            }
        )
    worker.close()
    put_back()
    return said


# Launches


def launched(job: Job, steps: int, every: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run launches once, then launches twice; return the final state of both."""
    recorded.install()
    found = []
    for each in (0, every):
        worker = made(job, each, "one launch", **options)
        runner = OneLaunch(worker)
        norms, launches = [], []
        for _ in range(steps):
            runner.step()
            recorded.STREAM.synchronize()
            norms.append(repr(runner.norm))
            launches.append(len(runner.twice))
        runner.leave()
        losses = {str(m): float(one) for m, one in runner.feed.losses.items()}
        found.append({"left": bits(worker), "losses": losses, "norms": norms})
        runner.close()
        worker.close()
    return {"same": found[0] == found[1], "of": len(found[0]["left"]), "twice": launches}


def zero_stages(job: Job, steps: int, every: int) -> list[list[float]]:
    """Whether each launched step found stages of zero gradients; 9 if it did not look for them."""
    recorded.install()
    worker = made(job, every, "one launch", zero_stages=True)
    runner, found = OneLaunch(worker), []
    assert worker.zero_stages is not None
    for _ in range(steps):
        recorded.STREAM.synchronize()
        worker.zero_stages.values.fill_(9.0)
        runner.step()
        recorded.STREAM.synchronize()
        found.append(worker.zero_stages.values.tolist())
    runner.leave()
    runner.close()
    worker.close()
    return found


def exchanged_again(job: Job, first: str, second: str) -> str:
    """The second runs on rank 0 post two messages in the other order; return why all ranks stop."""
    recorded.install()
    worker = made(job, 2, "one launch")
    runner = OneLaunch(worker)
    runner.step()
    if worker.member.rank == 0:
        double = worker.double
        assert double is not None
        again = double.again

        def other(pipeline: Any) -> Any:
            program = list(pipeline.program)
            exchanged(first, second)(worker)
            try:
                return again(pipeline)
            finally:
                pipeline.program[:] = program

        double.again = other  # type: ignore[method-assign]
    try:
        runner.step()
    except StoppedError as stopped:
        return stopped.cause.text
    return ""


def _inside(runner: OneLaunch, launch: int, ends: list[int], draw: random.Random) -> list[int]:
    """
    Flip a bit in the output of one operation in one of the two launches, once.

    Args:
        runner: The launches; both are captured.
        launch: Which of the two launches.
        ends: Number of operations of the second launch before its comparison.
        draw: Chooses the operation and the bit.

    Returns:
        A list that gets an entry once the bit has flipped.
    """
    nodes = runner.twice[launch].tape.nodes  # type: ignore[attr-defined]
    last = ends[-1] if launch else len(nodes)
    places = [
        n
        for n, (kind, *_, out) in enumerate(nodes[:last])
        if kind == "op"
        and isinstance(out, Tensor)
        and out.numel()
        and (out.is_floating_point() or out.dtype == torch.uint8)
        and out.is_contiguous()
    ]
    at = draw.choice(places)
    out, bit = nodes[at][-1], draw.randrange(8 * nodes[at][-1].element_size())
    place, done = draw.randrange(out.numel()), []

    def act() -> None:
        if not done:
            done.append(at)
            words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
            flat = out.data.view(-1).view(words[out.element_size()])
            flat[place] ^= torch.ones((), dtype=flat.dtype) << bit

    nodes.insert(at + 1, ("call", act, (), {}, None))
    return done


def launches_flipped_inside(job: Job, steps: int, seed: int) -> dict[str, Any]:
    """
    Run launches that all run twice; in one of the two runs of each, a bit of an operation's output
    flips.

    Returns:
        How many flips there were, the causes of those that stopped the ranks, which parameters a
        stopped step moved, and what differs from undisturbed steps at the end.
    """
    recorded.install()
    plain = made(job, 0, "eager", counts="next step")
    for _ in range(steps):
        plain.step()
    clean = bits(plain)
    plain.close()
    ends: list[int] = []
    compare = DoubleRun.compare

    def noting(self: DoubleRun, gradients: Any) -> None:
        tape = recorded._Tape.current
        if tape is not None:
            ends.append(len(tape.nodes))
        compare(self, gradients)

    DoubleRun.compare = noting  # type: ignore[method-assign]
    draw = random.Random(seed)
    worker = made(job, 1, "one launch")
    runner = OneLaunch(worker)
    flips, causes, moved = 0, [], []
    while worker.runtime.epoch < steps:
        victim, launch = draw.randrange(job.world), draw.randrange(2)
        done: list[int] = []
        if runner.twice and worker.member.rank == victim:
            done = _inside(runner, launch, ends, random.Random(draw.random()))
        else:
            draw.random()
        before = parameters_of(worker)
        try:
            runner.step()
            recorded.STREAM.synchronize()
            flips += len(done)
            runner.leave()  # reads the verdict of this step, before the next one's flip
        except StoppedError as stopped:
            recorded.STREAM.synchronize()
            after = parameters_of(worker)
            moved += [name for name in before if before[name] != after[name]]
            causes.append(attrs.asdict(stopped.cause))
            runner.rebuild(stopped)
        else:
            if worker.runtime.epoch < steps:
                runner.resume()
    left = bits(worker)
    runner.close()
    worker.close()
    return {
        "flips": flips,
        "causes": causes,
        "moved": moved,
        "differ": [name for name in clean if clean[name] != left[name]],
    }


def _place(worker: Worker, kind: str) -> Tensor:
    """The tensor of the last stage of this rank whose bit flips between two launches."""
    memory = worker.runtime.memories[max(worker.runtime.memories)]
    stage = memory.stage
    if kind == "destination":
        return next(iter(memory.arena.buffers(0).values()))  # type: ignore[union-attr]
    if kind == "cache":
        return next(iter(stage.cached_weights().values()))
    if kind == "weight":
        return next(m.parameter for unit in stage.units for m in unit.matrices)
    state: Any = stage.numerical_state()
    return next(t for n, t in state.items() if n.endswith(f"forward.{kind}"))


def launches_flipped(job: Job, kinds: dict[str, int], rank: int) -> dict[str, Any]:
    """
    Run launches that all run twice; a bit flips between the two launches of some steps.

    Args:
        job: What to train.
        kinds: What flips, as for `_place`, before which step; `digest` is the first run's digest,
            as if that run had computed another gradient. A `weight` flips in the last step.
        rank: The rank where it flips.

    Returns:
        The causes; what differs from undisturbed steps before the last step; and which parameters
        the last step moved.
    """
    recorded.install()
    steps = kinds["weight"]
    plain = made(job, 0, "eager", counts="next step")
    for _ in range(steps):
        plain.step()
    clean = bits(plain)
    plain.close()
    worker = made(job, 1, "one launch")
    runner = OneLaunch(worker)
    due = {epoch: kind for kind, epoch in kinds.items()}
    flips = 0

    def between() -> None:
        nonlocal flips
        kind = due.pop(worker.runtime.epoch, "")
        if kind and worker.member.rank == rank:
            flips += 1
            double = worker.double
            own = double.first.values if double and kind == "digest" else _place(worker, kind)
            recorded.STREAM.submit(lambda: flip(own, bit=5, place=0))

    causes, moved = [], []
    left = before = {}
    while True:
        runner.between = between
        epoch = worker.runtime.epoch
        if epoch == steps and not left:
            runner.leave()
            left, before = bits(worker), parameters_of(worker)
            runner.resume()
        try:
            runner.step()
            if epoch == steps:
                runner.leave()
                break
        except StoppedError as stopped:
            recorded.STREAM.synchronize()
            causes.append(attrs.asdict(stopped.cause))
            if not stopped.cause.recoverable:
                after = parameters_of(worker)
                moved = [name for name in before if before[name] != after[name]]
                break
            runner.rebuild(stopped)
    runner.close()
    worker.close()
    return {
        "flips": flips,
        "causes": causes,
        "moved": moved,
        "differ": [name for name in clean if clean[name] != left[name]],
    }
