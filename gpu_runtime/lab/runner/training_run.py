"""
One training run of a report of loss curves, from its first step to its record.

Steps are timed in blocks of `log_every`; the device is drained at the end of each block. The timed
blocks contain neither building and capture, nor evaluations, nor the exchange of losses.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

from qeffect.report import UnusableError, finite
from qeffect.text import counted

from ...backends.protocol import parameters
from ...ranks.job import NAMES
from ...ranks.membership import Member, all_gather
from ...runtime import Mode
from ...training.command import release_memory
from ...training.config import Checkpointing, Config
from ...training.config_file import read
from ...training.job_assembly import JobData
from ..comparisons.ranks import tensor_digests
from ..sides.pipelines import NativeSide, TrainedSide
from ..sides.training import evaluate_side, guarded_training, native_training

__all__ = ["RunControl", "RunName", "train_run"]

_SIDES = ("native", "guarded", "launched")


@attrs.frozen
class RunName:
    """
    The name of a run: SIDE:SCHEDULE:SEED, or SIDE:SCHEDULE:SEED:HEAD.

    Args:
        side: `native`, `guarded` or `launched`.
        schedule: Short name of a schedule class of torch, such as `il` or `zbv`.
        seed: Number added to the seeds of the parameters and of the text order.
        head: Value of `[model] head`; None for the value in the file.
    """

    side: str
    schedule: str
    seed: int
    head: str | None = None

    @classmethod
    def of(cls, text: str) -> RunName:
        """
        Read the name of a run.

        Raises:
            UnusableError: The text is not a run's name.

        >>> RunName.of("guarded:zbv:0")
        RunName(side='guarded', schedule='zbv', seed=0, head=None)
        """
        side, schedule, seed, *head = [*text.split(":"), "", ""][: max(3, text.count(":") + 1)]
        known = side in _SIDES and schedule in NAMES and len(head) <= 1 and all(head)
        if not known or not (seed.isascii() and seed.isdigit() and len(seed) < 10):
            raise UnusableError(
                f"--runs {text}: expected SIDE:SCHEDULE:SEED or SIDE:SCHEDULE:SEED:HEAD; SIDE is "
                f"one of {', '.join(_SIDES)}, SCHEDULE one of {', '.join(NAMES)}, SEED a whole "
                "number"
            )
        return cls(side, schedule, int(seed), *head)

    def __str__(self) -> str:
        parts = (self.side, self.schedule, str(self.seed), self.head)
        return ":".join(part for part in parts if part is not None)

    def of_file(self, path: Path, device: str | None, steps: int | None) -> Config:
        """
        The configuration of this run, from a training file.

        Raises:
            UnusableError: The file cannot be used, or the head is unknown.
        """
        config = read(
            path,
            model={"head": self.head} if self.head is not None else {},
            parallel={
                "schedule": self.schedule,
                "mode": "one launch" if self.side == "launched" else None,
            },
            run={"device": device, "steps": steps},
        )
        config.require_drawn("runtime report curves")
        seed = config.model.seed + self.seed
        read(path, model={"seed": seed})  # refuses a seed out of range
        parallel = config.parallel
        if parallel.mode == "one launch" and self.side != "launched":
            parallel = attrs.evolve(parallel, mode="replays")
        return attrs.evolve(
            config,
            parallel=parallel,
            model=attrs.evolve(config.model, seed=seed),
            data=attrs.evolve(config.data, seed=config.data.seed + self.seed),
            checkpoint=Checkpointing(),
        )


@attrs.frozen(kw_only=True)
class RunControl:
    """
    The limits of a run, and the function for its progress.

    Args:
        windows: Held-out windows per evaluation.
        over: Function that tells whether the command's time limit has passed.
        note: Function that shows a line of progress.
    """

    windows: int
    over: Callable[[], bool] = lambda: False
    note: Callable[[str], None] = lambda _: None


def train_run(
    member: Member, named: RunName, config: Config, data: JobData, control: RunControl
) -> dict[str, Any]:
    """
    Train one run from the beginning; every rank calls this function.

    The processes may have trained other runs before.

    Returns:
        The run's record, the same on every rank: losses of all steps, the clock at the end of each
        block, held-out losses, and memory.

    Raises:
        StoppedError: A rank stopped; every rank raises this error.
        BackendError: A stage cannot be built, or a rank was lost during an evaluation.
    """
    release_memory(member)
    held = _memory(member, "memory_reserved")
    if member.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(member.device)
    began = time.perf_counter()
    build = native_training if named.side == "native" else guarded_training
    side: NativeSide | TrainedSide = build(member, config, data)
    member.synchronize()
    all_gather(member, None)
    build_s = time.perf_counter() - began
    course = _course(member, named, side, config, data, control)
    own = {
        "build_s": build_s,
        "evaluate_s": course.evaluate_s,
        "peak": _memory(member, "max_memory_reserved"),
        "held": held,
        "moved": course.moved,
        "tensors": len(course.tensors),
        "state": hashlib.sha256(json.dumps(sorted(course.tensors.items())).encode()).hexdigest(),
        "parameters": sum(p.numel() for s in side.stages.values() for p in parameters(s).values()),
    }
    side.close()
    del side
    release_memory(member)
    ranks = all_gather(member, own)

    def most(name: str) -> Any:
        found = [rank[name] for rank in ranks]
        return None if None in found else max(found)

    return {
        "side": named.side,
        "schedule": named.schedule,
        "seed": named.seed,
        "head": config.model.head,
        "captured": course.mode != "eager",
        "launches": course.launches,
        "cut": list(data.job.cut),
        "parameters": sum(rank["parameters"] for rank in ranks) // data.job.dp,
        "tokens_a_step": data.job.windows_a_step * data.job.config.sequence,
        "losses": course.losses,
        "clock": course.clock,
        "held_out": course.held_out,
        "moved": sum(rank["moved"] for rank in ranks),
        "tensors": sum(rank["tensors"] for rank in ranks),
        "state": [rank["state"] for rank in ranks],
        "build_s": most("build_s"),
        "evaluate_s": most("evaluate_s"),
        "peak_bytes": most("peak"),
        "held_bytes": most("held"),
    }


@attrs.define
class _Progress:
    """The records of a run so far."""

    mode: Mode
    launches: int = 0
    losses: list[float | None] = attrs.field(factory=list)
    clock: list[list[float]] = attrs.field(factory=list)
    held_out: list[list[float | None]] = attrs.field(factory=list)
    evaluate_s: float = 0.0
    moved: int = 0
    tensors: dict[str, str] = attrs.field(factory=dict)


def _course(
    member: Member,
    named: RunName,
    side: NativeSide | TrainedSide,
    config: Config,
    data: JobData,
    control: RunControl,
) -> _Progress:
    """Run all steps in blocks, with the evaluations between them."""
    run, course, first, seconds = config.run, _Progress(side.mode), 0, 0.0
    for last in _blocks(run.steps, run.log_every, run.evaluate_every):
        started = time.perf_counter()
        for step in range(first, last):
            data.job.prepare(step, side.optimizer)
            side.step()
        side.drain()
        member.synchronize()
        own = {
            "seconds": time.perf_counter() - started,
            "losses": [side.losses_of(step) for step in range(first, last)],
            "over": control.over(),
        }
        ranks = all_gather(member, own)
        seconds += max(rank["seconds"] for rank in ranks)
        for n in range(last - first):
            # The last stage's rank of each replica holds the losses of its microbatches.
            loss = math.fsum(share for rank in ranks for share in rank["losses"][n])
            course.losses.append(finite(loss))
        course.clock.append([last, seconds])
        course.launches = side.launches
        over = any(rank["over"] for rank in ranks)
        ends = over or last == run.steps
        if ends or (run.evaluate_every and last % run.evaluate_every == 0):
            _evaluate(side, data, course, last, control, ends=ends)
            now, held = course.losses[-1], course.held_out[-1][1]
            control.note(
                f"{named}: {counted(last, 'step')} in {seconds:.1f} s, loss {_said(now)}, held out "
                f"{_said(held)}" + ", ended by --limit-s" * (over and last < run.steps)
            )
        if ends:
            break
        first = last
    return course


def _blocks(steps: int, every: int, evaluate_every: int) -> list[int]:
    """The steps at which blocks end: at each log line, at each evaluation, and at the last step."""
    ends = {steps, *range(every, steps, every)}
    if evaluate_every:
        ends |= {*range(evaluate_every, steps, evaluate_every)}
    return sorted(ends)


def _evaluate(
    side: NativeSide | TrainedSide,
    data: JobData,
    course: _Progress,
    step: int,
    control: RunControl,
    *,
    ends: bool,
) -> None:
    """
    Evaluate; after the last step, also compute digests of every tensor before and after the
    evaluation.
    """
    before = tensor_digests(side.stages, side.optimizer) if ends else {}
    started = time.perf_counter()
    loss = evaluate_side(side, data, control.windows)
    course.evaluate_s += time.perf_counter() - started
    course.held_out.append([step, finite(loss)])
    if ends:
        course.tensors = tensor_digests(side.stages, side.optimizer)
        course.moved = sum(course.tensors.get(name) != one for name, one in before.items())


def _said(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def _memory(member: Member, what: str) -> int | None:
    """A figure of torch's allocator in bytes; the result is None on a CPU."""
    if member.device.type != "cuda":
        return None
    return int(getattr(torch.cuda, what)(member.device))
