"""
Steps that run twice: bit flips in one of the two runs, and the cost of the second run.

*Flips.* Bits of a rank's memory flip in one of the two runs of a step: in outputs of F and dI, in
outputs of the matrix products inside a stage (qkv, proj, fc1, fc2), in gradient destinations,
scales, amax histories, weight caches and weights. In guarded steps a bit flips after a chosen
action or, in eager steps, after a matrix product. In launches, a kernel on another stream flips a
bit while a launch runs. Bits of scales, histories and weights flip only in the second run of a
launch: a flip before the first run would change both runs alike, so their comparison would miss the
flip. A flip changes nothing if the flipped memory is overwritten before it is read. Each flip
therefore ends in one of three ways. A flip is *stopped* if the two runs differ and training stops.
A flip is *harmless* if the step ends with the bits of an undisturbed run. Any other flip is
*applied*, which must never happen.

*Price.* One process alternates between steps that never run twice, steps of which every N-th runs
twice, and steps that all run twice. Two more kinds of steps are timed in the same way: steps that
take digests of all gradients, and steps with a check of all weights, moments and scales after every
N-th step (`training/look.py`).
"""

from __future__ import annotations

import gc
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from ...backends.protocol import parameters
from ...ranks.causes import StoppedError
from ...ranks.job import Job
from ...ranks.membership import Limits, Member, all_gather
from ...ranks.one_launch import OneLaunch
from ...ranks.worker import Worker
from ...ranks.worker_assembly import build_worker
from ...runtime import Mode
from ...step.memory.digests import digests
from ...step.memory.numerical_state import live_state
from ...training.look import nonfinite

__all__ = [
    "INSIDE",
    "KINDS",
    "LIMITS",
    "digest_price",
    "flips_in_launches",
    "flips_in_replays",
    "look_price",
    "price",
]

KINDS = ("output", "input gradient", "destination", "scale", "amax_history", "cache", "weight")
"""The tensors in which bits flip."""
INSIDE = ("product of qkv", "product of proj", "product of fc1", "product of fc2")
"""
The tensors inside a stage in which bits flip, in eager steps: outputs of matrix products in a
layer's F.
"""
#: For each module, by the last part of its name, the matrix product that its output is. Transformer
#: Engine computes fc1 inside `layernorm_mlp`, where no hook sees its output.
_MODULES = {
    "qkv": INSIDE[0], "layernorm_qkv": INSIDE[0], "proj": INSIDE[1], "fc1": INSIDE[2],
    "fc2": INSIDE[3], "layernorm_mlp": INSIDE[3],
}  # fmt: skip
_ACTIONS = {"output": "forward", "input gradient": "dgrad", "destination": "wgrad"}
#: Tensors that both runs would use, if a bit flipped before the first run.
_KEPT = ("scale", "amax_history", "weight")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LIMITS = Limits(start=60.0, message=30.0, commit=30.0, grace=4.0)
#: Steps before the first flip: the first is guarded, the second captured, and two more run.
_FIRST = 4


def _flip(tensor: Tensor, draw: random.Random) -> None:
    """Flip one bit of one element, on the current stream, hidden from autograd."""
    held = tensor.data.view(_WORDS[tensor.element_size()])
    index = tuple(draw.randrange(n) for n in held.shape)
    bit = draw.randrange(8 * held.element_size() - 1)  # the last bit would overflow a Python int
    held[index].bitwise_xor_(1 << bit)


def _bits(worker: Worker) -> dict[str, str]:
    """Digests of all weights, of the optimizer's state and of the numerical state, by name."""
    named: dict[str, Tensor] = {
        f"{index}.{name}": tensor
        for index, stage in worker.runtime.stages.items()
        for name, tensor in parameters(stage).items()
    }
    named.update(worker.optimizer.state_tensors())
    named.update(live_state(worker.runtime.domain))
    return dict(zip(named, digests(list(named.values())), strict=True))


def _targets(worker: Worker, kind: str) -> list[Tensor]:
    """The tensors of a kind on this rank, for flips while a launch runs."""
    found: list[Tensor] = []
    for memory in worker.runtime.memories.values():
        stage = memory.stage
        if kind in ("scale", "amax_history"):
            found += [t for n, t in stage.numerical_state().items() if n.endswith(kind)]
        elif kind == "cache":
            found += stage.cached_weights().values()
        elif kind == "weight":
            found += parameters(stage).values()
        elif kind == "destination":
            found += (memory.arena.buffers(0) or {}).values()
        else:
            what = "outputs" if kind == "output" else "dgrads"
            for slot in memory.table:
                graphs = getattr(worker.runtime.executor, "slots", {}).get(slot.index)
                held = getattr(graphs, "static", slot)
                found += getattr(held, what)
    return [tensor for tensor in found if tensor.numel()]


@attrs.define(eq=False)
class _InnerFlip:
    """
    A flip in the output of a matrix product inside a stage, in one run of an eager step.

    Args:
        worker: The rank's worker, whose steps are eager.
        kind: The product whose output flips, one of `INSIDE`.
        run: The run of the step, 1 or 2.
        draw: Random generator that chooses the product and the bit.
    """

    worker: Worker
    kind: str
    run: int
    draw: random.Random
    now: int = 1
    calls: int = 0
    done: int = 0

    def arm(self) -> Callable[[], None]:
        """Begin to watch the products; return a function that ends the watch."""
        double = self.worker.double
        assert double is not None
        modules = [
            module
            for stage in self.worker.runtime.stages.values()
            for name, module in getattr(stage, "layers", torch.nn.ModuleList()).named_modules()
            if _MODULES.get(name.rpartition(".")[2]) == self.kind
        ]
        forwards = len([a for a in self.worker.row.atoms if a.kind.name == "FORWARD"])
        stages = max(len(self.worker.runtime.stages), 1)
        at = self.draw.randrange(max(len(modules) * forwards // stages, 1))

        def hook(_: Any, __: Any, output: Any) -> None:
            if self.now == self.run and not self.done:
                if self.calls >= at:
                    with torch.no_grad():
                        _flip(output[0] if isinstance(output, tuple) else output, self.draw)
                    self.done = 1
                self.calls += 1

        def second() -> None:
            self.now, self.calls = 2, 0

        hooks = [module.register_forward_hook(hook) for module in modules]
        double.between = second

        def end() -> None:
            for one in hooks:
                one.remove()
            double.between = lambda: None

        return end


@attrs.define(eq=False)
class _Flip:
    """
    A flip after an action, in one run of a guarded step.

    Args:
        worker: The rank's worker.
        kind: The tensor in which a bit flips.
        run: The run of the step, 1 or 2.
        draw: Random generator that chooses the action, the tensor and the bit.
    """

    worker: Worker
    kind: str
    run: int
    draw: random.Random
    now: int = 1
    calls: int = 0
    done: int = 0

    def arm(self) -> Callable[[], None]:
        """Begin to watch the executor's actions; return a function that ends the watch."""
        executor: Any = self.worker.runtime.executor
        name = _ACTIONS.get(self.kind, "forward")
        real, double = getattr(executor, name), self.worker.double
        assert double is not None
        many = len([a for a in self.worker.row.atoms if a.kind.name == name.upper()])
        at = self.draw.randrange(max(many, 1))

        def act(memory: Any, *given: Any) -> Any:
            found = real(memory, *given)
            if self.now == self.run and not self.done:
                if self.calls >= at and (held := self._held(memory, *given)):
                    _flip(self.draw.choice(held), self.draw)
                    self.done = 1
                self.calls += 1
            return found

        def second() -> None:
            self.now, self.calls = 2, 0

        setattr(executor, name, act)
        double.between = second

        def end() -> None:
            with suppress(AttributeError):
                delattr(executor, name)
            double.between = lambda: None

        return end

    def _held(self, memory: Any, slot: Any, variant: Any = None) -> list[Tensor]:
        if self.kind == "output":
            return list(slot.outputs)
        if self.kind == "input gradient":
            return list(slot.dgrads)
        if self.kind == "destination":
            return list((memory.arena.buffers(variant.destination) or {}).values())
        return _targets(self.worker, self.kind)


def _undisturbed(member: Member, job: Job, backend: str, mode: Mode, steps: int) -> list[Any]:
    """The bits of this rank after each step of an undisturbed run without second runs."""
    worker = build_worker(member, job, backend, mode=mode, limits=LIMITS)
    found = []
    for _ in range(steps):
        worker.step()
        found.append(_bits(worker))
    _close(worker)
    return found


def _close(worker: Worker) -> None:
    """
    Close a worker, and drop the references that the signal handler and cycles have to it, because
    only one runtime at a time can use the library's state.
    """
    worker.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the handler holds the worker
    gc.collect()


def _end_of(member: Member, kind: str, stopped: StoppedError | None, same: bool) -> str:
    """How a flip ended, on all ranks: `stopped`, `harmless`, or `applied`."""
    if stopped is not None:
        return "stopped" if stopped.cause.kind == "differs" else f"ended: {stopped.cause.text}"
    return "harmless" if all(all_gather(member, same)) else "applied"


def flips_in_replays(
    member: Member,
    job: Job,
    backend: str,
    mode: Mode,
    count: int,
    seed: int = 0,
    kinds: Sequence[str] = KINDS[:-1],
) -> list[dict[str, Any]]:
    """
    Flip a bit in one run of some guarded steps, one flip per step; every rank calls this function.

    Args:
        member: This process.
        job: The pipeline and its model, whose steps run twice.
        backend: Implementation of the layers.
        mode: `eager` or `replays`.
        count: Number of flips; the kinds take turns.
        seed: Seed of the random choices.
        kinds: Some of `KINDS` except `weight`, or of `INSIDE` for eager steps.

    Returns:
        For each flip its kind, run, rank and end; for a stopped flip also the cause.
    """
    clean = _undisturbed(member, job, backend, mode, count)
    worker = build_worker(member, job, backend, mode=mode, limits=LIMITS, replay_every=1)
    found = []
    for n in range(count):
        draw = random.Random(f"{seed} {n}")
        kind, run = kinds[n % len(kinds)], 1 + n // len(kinds) % 2
        victim = draw.randrange(member.world)
        flip = (_InnerFlip if kind in INSIDE else _Flip)(worker, kind, run, draw)
        end = flip.arm() if member.rank == victim else lambda: None
        stopped = None
        try:
            worker.step()
        except StoppedError as error:
            stopped = error
        end()
        if stopped is not None:
            moved = _bits_of_weights(worker) != (_weights(clean[n - 1]) if n else None)
            worker.rebuild(stopped)
            worker.step()
        same = _bits(worker) == clean[n]
        done = all_gather(member, flip.done)
        one = {"kind": kind, "run": run, "rank": victim, "flipped": max(done)}
        one["end"] = _end_of(member, kind, stopped, same)
        if stopped is not None:
            one["cause"] = stopped.cause.text
            one["updated"] = any(all_gather(member, bool(n and moved)))
            one["undisturbed"] = all(all_gather(member, same))
        found.append(one)
    _close(worker)
    return found


def _weights(bits: dict[str, str]) -> dict[str, str]:
    """The entries of `_bits` that belong to weights."""
    return {name: one for name, one in bits.items() if name.split(".", 1)[0].isdigit()}


def _bits_of_weights(worker: Worker) -> dict[str, str]:
    return _weights(_bits(worker))


def flips_in_launches(
    member: Member,
    job: Job,
    backend: str,
    count: int,
    *,
    seed: int = 0,
    disturb: Callable[[Callable[[], None], float], None] | None = None,
) -> list[dict[str, Any]]:
    """
    Flip a bit while one of the two launches of a step runs; every rank calls this function.

    Args:
        member: This process.
        job: The pipeline and its model, whose steps run twice.
        backend: Implementation of the layers.
        count: Number of flips; the last flip is in a weight.
        seed: Seed of the random choices.
        disturb: Function that takes an action and a share of a launch's time, and runs the action
            that long after the next launch starts. The default function queues a waiting kernel and
            then the action, on another stream.

    Returns:
        For each flip its kind, run, rank and end; for a stopped flip also the cause. After a flip
        in a weight, the weights kept from that step are not compared.
    """
    plain = build_worker(member, job, backend, mode="replays", limits=LIMITS)
    clean = []
    for _ in range(_FIRST + 5 + 3 * count):
        plain.step()
        clean.append(_bits(plain))
    _close(plain)
    del plain
    worker = build_worker(member, job, backend, mode="one launch", limits=LIMITS, replay_every=1)
    runner = OneLaunch(worker)
    for _ in range(_FIRST):
        runner.step()
    spent = _launch_ms(member, runner)
    beside = disturb or _Beside(member, spent)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        while not runner.twice:
            runner.step()
        n = len(found)
        draw = random.Random(f"{seed} {n}")
        last = n == count - 1
        kind = KINDS[-1] if last else KINDS[n % (len(KINDS) - 1)]
        run, victim, when = 1 + draw.randrange(2), draw.randrange(member.world), draw.random()
        if kind in _KEPT:
            run = 2
        held = _targets(worker, kind)
        flipped = all_gather(member, bool(held))[victim]
        target = draw.choice(held) if held else None

        def flip(tensor: Tensor | None = target, draw: random.Random = draw) -> None:
            if tensor is not None:
                _flip(tensor, draw)

        act: Callable[[], None] = lambda: None  # noqa: E731
        if member.rank == victim:
            act = partial(beside, flip, when)
        first, second = runner.twice
        graphs: Any = (first, _Before(second, act)) if run == 2 else (_Before(first, act), second)
        runner.twice = graphs
        epoch, stopped = worker.runtime.epoch, None
        try:
            runner.step()
            runner.leave()
        except StoppedError as error:
            stopped = error
        if runner.twice:
            runner.twice = first, second
        member.synchronize()
        one: dict[str, Any] = {"kind": kind, "run": run, "rank": victim, "flipped": flipped}
        if stopped is None:
            same = epoch >= len(clean) or _bits(worker) == clean[epoch]
            one["end"] = _end_of(member, kind, None, same)
            found.append(one)
            runner.resume()
            continue
        one["end"], one["cause"] = _end_of(member, kind, stopped, False), stopped.cause.text
        found.append(one)
        if kind != KINDS[-1]:
            moved = _bits_of_weights(worker) != _weights(clean[epoch - 1])
            one["updated"] = any(all_gather(member, moved))
        if not stopped.cause.recoverable:
            break
        epoch = stopped.cause.step or 0
        runner.rebuild(stopped)
        runner.step()
        same = epoch >= len(clean) or _bits(worker) == clean[epoch]
        one["undisturbed"] = all(all_gather(member, same))
    runner.close()
    with suppress(RuntimeError):
        _close(worker)
    return found


class _Before:
    """A graph that runs another action right before its first replay."""

    def __init__(self, graph: Any, act: Callable[[], None]) -> None:
        self.graph, self._act = graph, act

    def replay(self) -> None:
        """Run the action before the first replay, then replay the graph."""
        act, self._act = self._act, lambda: None
        act()
        self.graph.replay()

    def reset(self) -> None:
        """Reset the graph."""
        self.graph.reset()


class _Beside:
    """
    Queue an action on a separate stream, after a kernel that waits for a share of a launch's time.
    The stream starts together with the work that is queued next on the current stream.
    """

    def __init__(self, member: Member, launch_ms: float) -> None:
        self.stream: Any = torch.cuda.Stream(member.device)  # type: ignore[no-untyped-call]
        tried = 20_000_000
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            torch.cuda._sleep(tried)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            spent = (time.perf_counter() - began) * 1e3
        #: Clock cycles after which a launch has done most of its work.
        self.cycles = tried / spent * launch_ms * 0.6

    def __call__(self, action: Callable[[], None], when: float) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(1 + int(when * self.cycles))  # type: ignore[no-untyped-call]
            action()


def _launch_ms(member: Member, runner: OneLaunch) -> float:
    """Approximate time in milliseconds of one of a step's two launches."""
    many = 5
    member.synchronize()
    began = time.perf_counter()
    for _ in range(many):
        runner.step()
    runner.leave()
    spent = (time.perf_counter() - began) * 1e3 / many / 2
    runner.resume()
    return spent


def price(
    member: Member,
    job: Job,
    backend: str,
    *,
    every: int = 100,
    rounds: int = 9,
    seconds: float = 40.0,
) -> dict[str, Any]:
    """
    Time three kinds of training alternately: no step runs twice, every N-th step runs twice, or
    every step runs twice.

    Args:
        member: This process.
        job: The pipeline and its model, whose steps are timed.
        backend: Implementation of the layers.
        every: N, the number of steps that the first two kinds train before the next kind follows.
            With the second kind, exactly one of these steps runs twice.
        rounds: Maximum number of rounds.
        seconds: Seconds after which no further round begins.

    Returns:
        Milliseconds per step of the slowest rank, by kind of training and round.
    """
    launches = member.device.type == "cuda"
    mode: Mode = "one launch" if launches else "eager"
    worker = build_worker(
        member, job, backend, mode=mode, limits=LIMITS, replay_every=every, repeat=True
    )
    runner: Any = OneLaunch(worker) if launches else worker
    double = worker.double
    assert double is not None
    kernel = double.first.obstacle
    double.every = 0
    for _ in range(8):
        runner.step()

    def turn(name: str) -> int:
        double.every = {"off": 0, "every 1": 1}.get(name, every)
        return every if name != "every 1" else max(1, every // 5)

    names = ["off", f"every {every}", "every 1"]
    found = _in_turns(member, runner.step, dict.fromkeys(names, turn), rounds, seconds)
    double.every = 0
    if launches:
        runner.leave()
        runner.close()
    _close(worker)
    return {"what": "replay_every", "mode": mode, "kernel_obstacle": kernel, "rounds": found}


def digest_price(
    member: Member, job: Job, backend: str, *, rounds: int = 9, seconds: float = 20.0
) -> dict[str, Any]:
    """
    Time guarded steps without digests and with digests of all gradients, alternately.

    Args:
        member: This process.
        job: The pipeline and its model, whose steps are timed.
        backend: Implementation of the layers.
        rounds: Maximum number of rounds.
        seconds: Seconds after which no further round begins.

    Returns:
        Milliseconds per step of the slowest rank, by kind of steps and round.
    """
    mode: Mode = "replays" if member.device.type == "cuda" else "eager"
    worker = build_worker(
        member, job, backend, mode=mode, limits=LIMITS, gradient_digests=True, repeat=True
    )
    kept = worker.gradient_digests
    assert kept is not None
    for _ in range(4):
        worker.step()

    def turn(name: str) -> int:
        worker.pipeline.digests = None if name == "off" else kept
        return 20

    found = _in_turns(member, worker.step, dict.fromkeys(("off", "digests"), turn), rounds, seconds)
    _close(worker)
    return {"what": "digests", "mode": mode, "kernel_obstacle": kept.obstacle, "rounds": found}


def look_price(
    member: Member,
    job: Job,
    backend: str,
    *,
    every: int = 100,
    rounds: int = 9,
    seconds: float = 20.0,
) -> dict[str, Any]:
    """
    Time guarded steps without checks of the weights and with a check after every N-th step,
    alternately.

    Args:
        member: This process.
        job: The pipeline and its model, whose steps are timed.
        backend: Implementation of the layers.
        every: N, which is also the number of steps before the other kind follows.
        rounds: Maximum number of rounds.
        seconds: Seconds after which no further round begins.

    Returns:
        Milliseconds per step of the slowest rank, by kind of steps and round.
    """
    mode: Mode = "replays" if member.device.type == "cuda" else "eager"
    worker = build_worker(member, job, backend, mode=mode, limits=LIMITS, repeat=True)
    looking, taken = False, 0

    def step() -> None:
        nonlocal taken
        worker.step()
        taken += 1
        if looking and taken % every == 0:
            worker.runtime.drain()
            found = nonfinite(worker, lambda stage, local: f"{stage}.{local}")
            assert not found, found[0]

    def turn(name: str) -> int:
        nonlocal looking, taken
        looking, taken = name != "off", 0
        return every

    for _ in range(4):
        worker.step()
    names = ["off", f"every {every}"]
    found = _in_turns(member, step, dict.fromkeys(names, turn), rounds, seconds)
    _close(worker)
    return {"what": "look", "mode": mode, "kernel_obstacle": "", "rounds": found}


def _in_turns(
    member: Member,
    step: Callable[[], object],
    turns: Mapping[str, Callable[[str], int]],
    rounds: int,
    seconds: float,
) -> dict[str, list[float]]:
    """
    Time several kinds of steps alternately, in one order and then in the reverse order.

    Args:
        member: This process.
        step: Function that runs a step.
        turns: For each kind of steps, by name: a function that switches to this kind and returns
            the number of steps to time.
        rounds: Maximum number of rounds.
        seconds: Seconds after which no further round begins.

    Returns:
        Milliseconds per step of the slowest rank, by name and round.
    """
    spent: dict[str, list[float]] = {name: [] for name in turns}
    began = time.perf_counter()
    for number in range(rounds):
        going = time.perf_counter() - began < seconds
        if number and not all(all_gather(member, going)):
            break
        for name in list(turns) if number % 2 else reversed(list(turns)):
            many = turns[name](name)
            member.synchronize()
            started = time.perf_counter()
            for _ in range(many):
                step()
            member.synchronize()
            spent[name].append((time.perf_counter() - started) / many * 1e3)
    return {
        name: [max(one) for one in zip(*all_gather(member, each), strict=True)]
        for name, each in spent.items()
    }
