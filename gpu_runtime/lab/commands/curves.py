"""
``qeffect runtime report curves``: loss curves of guarded and native runs, in one report.

A run is named SIDE:SCHEDULE:SEED, such as ``guarded:zbv:0``, or SIDE:SCHEDULE:SEED:HEAD. A side is
native, guarded (by replays), or launched: guarded, and each step one launch. All runs of a report
have one configuration: the seed is added to those of the parameters and of the order of the text,
so that runs of one seed begin with the same bits and read the same windows. Each run is made new in
the same processes, and written down whole as soon as it has ended. What follows from them is
computed by `qeffect.gpu_runtime.lab.statistics.curves`.

StepRunner are timed in blocks of `log_every`, the device drained at the end of each; making and
capturing, evaluations and the exchange of losses lie between the clocks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch

from qeffect.cli.command import Outcome, Progress, refuse_unused
from qeffect.refusals import Refused
from qeffect.report import UnusableError, finite, program
from qeffect.text import counted

from ...backends.protocol import BackendError, StageBackend, parameters
from ...ranks.assembly import build_worker
from ...ranks.consent import StoppedError
from ...ranks.job import NAMES
from ...ranks.processes import join_ranks, report_once, stopped_outcome
from ...ranks.worker import Worker
from ...ranks.world import Limits, Member, gathered
from ...step.optimizer import Optimizer
from ...training.assembly import TIMES, JobData, backend_of, measure_cut, open_job
from ...training.command import release, require_processes
from ...training.config import Checkpointing, Config
from ...training.config_file import read
from ...training.evaluate import evaluate
from ...training.launches import StepRunner, mode_of
from ...training.model import Language
from ..comparisons.evaluation import evaluate_native
from ..comparisons.ranks import native_pipeline, tensors_of
from ..reports.report import (
    ALIKE,
    Report,
    add_report_options,
    environment,
    read_part,
    require_alike,
    require_place,
)
from ..sides.torch_pipeline import NativePipeline

__all__ = ["Named", "add_curves_arguments", "merged", "run_curves", "trained"]

_SIDES = ("native", "guarded", "launched")
#: What parts of one report have to agree in, of the environment.
_ALIKE = (*ALIKE, "cpu", "cores")
#: What is told of each part by itself, of the environment.
_EACH = ("program", "argv", "date", "load_1min")
#: What parts of one report may differ in, of the configuration.
_OWN = ("runs", "limit_s", "parts")


@attrs.frozen
class Named:
    """
    A run by its name.

    Args:
        side: `native`, `guarded` or `launched`.
        schedule: A short name of torch's classes.
        seed: Added to the seeds of the parameters and of the order of the text.
        head: `[model] head`; None takes the file's.
    """

    side: str
    schedule: str
    seed: int
    head: str | None = None

    @classmethod
    def of(cls, text: str) -> Named:
        """
        Read a name.

        Raises:
            UnusableError: It is none.

        >>> Named.of("guarded:zbv:0")
        Named(side='guarded', schedule='zbv', seed=0, head=None)
        """
        side, schedule, seed, *head = [*text.split(":"), "", ""][: max(3, text.count(":") + 1)]
        known = side in _SIDES and schedule in NAMES and len(head) <= 1 and all(head)
        if not known or not (seed.isascii() and seed.isdigit() and len(seed) < 10):
            raise UnusableError(
                f"--runs {text}: expected SIDE:SCHEDULE:SEED or SIDE:SCHEDULE:SEED:HEAD, with "
                f"{', '.join(_SIDES)}, one of {', '.join(NAMES)}, and a whole number"
            )
        return cls(side, schedule, int(seed), *head)

    def __str__(self) -> str:
        parts = (self.side, self.schedule, str(self.seed), self.head)
        return ":".join(part for part in parts if part is not None)

    def of_file(self, path: Path, device: str | None, steps: int | None) -> Config:
        """
        The configuration of this run.

        Raises:
            UnusableError: The file cannot be used, or has no such head.
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
        seed = config.model.seed + self.seed
        read(path, model={"seed": seed})  # refuses a sum that is none
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


class _Side(Protocol):
    """One side of the comparison, ready for its first step."""

    captured: bool
    optimizer: Optimizer
    stages: Mapping[int, StageBackend]

    def step(self) -> None:
        """One optimizer step."""

    @property
    def launches(self) -> int:
        """How many of the steps whose losses were asked for were one launch each."""

    def leave(self) -> None:
        """Let every step have come to its end, on every rank."""

    def taken(self, step: int) -> list[float]:
        """The losses of a step by microbatch; asked once."""

    def held_out(self, windows: int) -> float:
        """The loss on held-out text."""

    def end(self) -> None:
        """End connections."""


class _Guarded:
    """
    The guarded pipeline: captured on a GPU, where the file does not say otherwise.

    Raises:
        BackendError: StepRunner are to be launches, and cannot be.
    """

    def __init__(self, member: Member, config: Config, data: JobData) -> None:
        self.data = data
        mode, why = mode_of(member, data.job, config.parallel.mode)
        self.captured = mode != "eager"
        _require_launches(config, why)
        self.worker: Worker = build_worker(
            member,
            data.job,
            backend_of(config),
            mode=mode,
            limits=_limits(config),
        )
        self.steps = StepRunner(self.worker)
        _require_launches(config, self.steps.replays)
        self.optimizer = self.worker.optimizer
        self.stages: Mapping[int, StageBackend] = self.worker.runtime.stages

    def step(self) -> None:
        self.steps.step()

    def leave(self) -> None:
        self.steps.leave()

    def taken(self, step: int) -> list[float]:
        found = self.steps.result(step).losses
        self.steps.forget(step + 1)
        return found

    @property
    def launches(self) -> int:
        return self.steps.launches

    def held_out(self, windows: int) -> float:
        assert self.data.held_out is not None
        return evaluate(self.worker, self.data.job, self.data.held_out, windows)

    def end(self) -> None:
        self.steps.close()
        self.worker.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the handler holds the worker


def _require_launches(config: Config, why: str) -> None:
    if why:
        raise BackendError(f"{config.source}: no step of a launched run can be one launch: {why}")


class _Native:
    """torch's own pipeline over the library's full backwards."""

    captured = False
    launches: int = 0

    def __init__(self, member: Member, config: Config, data: JobData) -> None:
        self.member, self.data = member, data
        self.pipeline: NativePipeline = native_pipeline(member, data.job, backend_of(config))
        self.optimizer = self.pipeline.optimizer
        self.stages: Mapping[int, StageBackend] = {s.index: s for s in self.pipeline.stages}

    def step(self) -> None:
        self.pipeline.step()

    def leave(self) -> None:
        """Nothing is under way."""

    def taken(self, step: int) -> list[float]:
        return self.pipeline.losses_of(step)

    def held_out(self, windows: int) -> float:
        job, text = self.data.job, self.data.held_out
        assert text is not None
        return evaluate_native(self.member, self.pipeline, job, text, windows)

    def end(self) -> None:
        """Its process groups last as long as the process."""


@attrs.frozen(kw_only=True)
class Told:
    """
    What a run is held to, and where it says how far it is.

    Args:
        windows: Held-out windows of an evaluation.
        over: Whether the time that the command has is over.
        note: Shows a line.
    """

    windows: int
    over: Callable[[], bool] = lambda: False
    note: Callable[[str], None] = lambda _: None


def trained(
    member: Member, named: Named, config: Config, data: JobData, told: Told
) -> dict[str, Any]:
    """
    One run from its beginning, in processes that may have had others; every rank calls it.

    Returns:
        Its record, the same on every rank: losses of all its steps, the clock at the end of each
        block, held-out losses, and what it held.

    Raises:
        StoppedError: A rank could not go on; every rank raises it.
        BackendError: A stage cannot be built, or a rank was lost in an evaluation.
    """
    release(member)
    held = _memory(member, "memory_reserved")
    if member.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(member.device)
    began = time.perf_counter()
    side: _Side = (_Native if named.side == "native" else _Guarded)(member, config, data)
    member.synchronize()
    gathered(member, None)
    build_s = time.perf_counter() - began
    course = _course(member, named, side, config, data.job, told)
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
    side.end()
    del side
    release(member)
    ranks = gathered(member, own)

    def most(name: str) -> Any:
        found = [rank[name] for rank in ranks]
        return None if None in found else max(found)

    return {
        "side": named.side,
        "schedule": named.schedule,
        "seed": named.seed,
        "head": config.model.head,
        "captured": course.captured,
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
class _Course:
    """What a run has come to so far."""

    captured: bool
    launches: int = 0
    losses: list[float | None] = attrs.field(factory=list)
    clock: list[list[float]] = attrs.field(factory=list)
    held_out: list[list[float | None]] = attrs.field(factory=list)
    evaluate_s: float = 0.0
    moved: int = 0
    tensors: dict[str, str] = attrs.field(factory=dict)


def _course(
    member: Member, named: Named, side: _Side, config: Config, job: Language, told: Told
) -> _Course:
    """All steps in blocks, and the evaluations between them."""
    run, course, first, seconds = config.run, _Course(side.captured), 0, 0.0
    for last in _blocks(run.steps, run.log_every, run.evaluate_every):
        started = time.perf_counter()
        for step in range(first, last):
            job.prepare(step, side.optimizer)
            side.step()
        side.leave()
        member.synchronize()
        own = {
            "seconds": time.perf_counter() - started,
            "losses": [side.taken(step) for step in range(first, last)],
            "over": told.over(),
        }
        ranks = gathered(member, own)
        seconds += max(rank["seconds"] for rank in ranks)
        for n in range(last - first):
            # Of each replica the rank of the last stage has the shares of its microbatches.
            loss = math.fsum(share for rank in ranks for share in rank["losses"][n])
            course.losses.append(finite(loss))
        course.clock.append([last, seconds])
        course.launches = side.launches
        over = any(rank["over"] for rank in ranks)
        ends = over or last == run.steps
        if ends or (run.evaluate_every and last % run.evaluate_every == 0):
            _evaluate(side, course, last, told, ends=ends)
            now, held = course.losses[-1], course.held_out[-1][1]
            told.note(
                f"{named}: {counted(last, 'step')} in {seconds:.1f} s, loss {_said(now)}, held out "
                f"{_said(held)}" + ", ended by --limit-s" * (over and last < run.steps)
            )
        if ends:
            break
        first = last
    return course


def _blocks(steps: int, every: int, evaluate_every: int) -> list[int]:
    """Where blocks of steps end: at every line of a log, at evaluations, and at the end."""
    ends = {steps, *range(every, steps, every)}
    if evaluate_every:
        ends |= {*range(evaluate_every, steps, evaluate_every)}
    return sorted(ends)


def _evaluate(side: _Side, course: _Course, step: int, told: Told, *, ends: bool) -> None:
    """Held-out text; after the last step with every tensor that persists, before and after."""
    before = tensors_of(side.stages, side.optimizer) if ends else {}
    started = time.perf_counter()
    loss = side.held_out(told.windows)
    course.evaluate_s += time.perf_counter() - started
    course.held_out.append([step, finite(loss)])
    if ends:
        course.tensors = tensors_of(side.stages, side.optimizer)
        course.moved = sum(course.tensors.get(name) != one for name, one in before.items())


def _said(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def _memory(member: Member, what: str) -> int | None:
    """A figure of torch's allocator; a CPU has none that ends with a run."""
    if member.device.type != "cuda":
        return None
    return int(getattr(torch.cuda, what)(member.device))


def _limits(config: Config) -> Limits:
    return Limits(start=config.run.start_s, commit=config.run.commit_s)


# The command


def add_curves_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `curves`."""
    parser.add_argument(
        "config", type=Path, nargs="?", help="TOML file of a training run with held-out text"
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        metavar="SIDE:SCHEDULE:SEED[:HEAD]",
        help="runs to train, in this order, such as native:il:0 guarded:zbv:0",
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="steps per run (default: the file's)"
    )
    parser.add_argument(
        "--held-out-steps",
        type=int,
        metavar="N",
        help="evaluation size: the windows of N training steps (default: the file's)",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        metavar="S",
        help="time limit in seconds: a run then ends at its next block, no other run begins, and "
        "the report is incomplete (default: no limit)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device (default: the file's)")
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="F", help="reports to merge into one"
    )
    add_report_options(parser, required=True)


def run_curves(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Train run after run, or merge reports; refused where losses of one order differ.

    Raises:
        UnusableError: The runs cannot be made by these processes, or the reports do not fit.
    """
    require_place(args.out)
    if args.merge is None:
        return report_once(lambda: _run(args, progress))
    others = ["--runs", "--steps", "--held-out-steps", "--limit-s", "--device", "--commit"]
    refuse_unused(args, others, "--merge runs nothing")
    if args.config is not None:
        raise UnusableError(f"{args.config} given, but --merge runs nothing; leave it out")
    report = merged(args.merge)
    report.path = args.out
    report.save()
    what = f"{len(args.merge)} reports in one"
    return _outcome(report, what + ", NOT complete: one of them is not" * (not report.complete))


def _run(args: argparse.Namespace, progress: Progress) -> Outcome:
    began = time.monotonic()
    names = _names(args)
    for name in ("steps", "held_out_steps", "limit_s"):
        if (value := getattr(args, name)) is not None and value <= 0:
            raise UnusableError(f"--{name.replace('_', '-')} {value}: expected a number above 0")
    configs = [named.of_file(args.config, args.device, args.steps) for named in names]
    heads = [config.model.head for config in configs]
    whole = [attrs.evolve(named, head=head) for named, head in zip(names, heads, strict=True)]
    if twice := next((named for n, named in enumerate(whole) if named in whole[:n]), None):
        raise UnusableError(f"--runs {twice}: it is named twice; name each run once")
    data = [open_job(config) for config in configs]  # before any rank waits for another
    first, (job, held_out) = configs[0], data[0]
    if held_out is None:
        raise UnusableError(
            f"{args.config}: [data] held_out: runs are compared by held-out text; name a file"
        )
    where = environment(args.commit, args.out)
    require_processes(first, job, f"curves {args.config} --runs ...")
    windows = first.run.evaluate_windows
    if args.held_out_steps is not None:
        windows = args.held_out_steps * job.windows_a_step
    windows = min(windows, held_out.tokens.windows(held_out.sequence))
    member = join_ranks(first.run.device, _limits(first), deterministic=True)
    if member.rank:
        progress = Progress(enabled=False)
    times: dict[str, Any] = {}
    cut = []
    for config, own in zip(configs, data, strict=True):
        # Measured once for each head: runs of one report are of one cut.
        head = config.model.head
        cut.append(measure_cut(member, config, own, times=times.get(head)))
        found = cut[-1][0].parallel
        if found.cut == "measured":
            times[head] = {name: getattr(found, name) for name in TIMES}
    configs, data = [config for config, _ in cut], [own for _, own in cut]
    assert job.loader is not None
    base = read(args.config, run={"device": args.device, "steps": args.steps})
    asked = {
        **attrs.evolve(base, checkpoint=Checkpointing()).record(),
        "backend": backend_of(first),
        "windows": windows,
        "text": {"train": job.loader.tokens.facts(), "held_out": held_out.tokens.facts()},
        "runs": [str(named) for named in names],
        "limit_s": args.limit_s,
    }
    if times:
        asked["times"] = times
    rows: list[dict[str, Any]] = []
    path = args.out if member.rank == 0 else None
    report = Report("curves", path, where, asked, {"runs": rows})

    def over() -> bool:
        return args.limit_s is not None and time.monotonic() - began > args.limit_s

    told = Told(windows=windows, over=over, note=progress.note)
    left, short = [], []
    try:
        for named, config, own in zip(names, configs, data, strict=True):
            if any(gathered(member, over())):
                left.append(str(named))
                continue
            rows.append(trained(member, named, config, own, told))
            if len(rows[-1]["losses"]) < config.run.steps:
                short.append(str(named))
            report.save()
    except StoppedError as stopped:
        return stopped_outcome(stopped.cause, f"{named} of {args.config.name}")
    except Refused as refused:
        facts = {"clause": refused.clause, "rank": member.rank, "step": None, "action": None}
        return Outcome("refused", facts, [f"{named} of {args.config.name}", str(refused)])
    if not rows:
        raise UnusableError(f"--limit-s {args.limit_s:g}: no run began within it; give it longer")
    count = f"{len(rows)} run{'s' * (len(rows) > 1)}"
    what = f"{args.config.name}: {count}, {backend_of(first)} on {first.run.device}"
    for said, cut_short in (("not ended", short), ("not begun", left)):
        if cut_short:
            what += f"; {said} within --limit-s {args.limit_s:g}: {', '.join(cut_short)}"
    if not short and not left:
        report.finish()
        return _outcome(report, what)
    report.save()
    return _outcome(report, f"{what}; the report is NOT complete")


def _names(args: argparse.Namespace) -> list[Named]:
    if args.config is None or not args.runs:
        raise UnusableError(
            "curves wants a file and --runs, such as: torchrun --nproc-per-node 2 -m qeffect "
            "runtime curves h200.toml --runs native:il:0 guarded:il:0 --out curves.json"
        )
    return [Named.of(text) for text in args.runs]


def _outcome(report: Report, what: str) -> Outcome:
    derived = report.to_json()["derived"]
    same = not any(
        row["losses_differ"] or row["held_out_differ"] or row["state_differs"]
        for row in derived["same_order"]
    )
    return Outcome("accepted" if same else "refused", derived, [what, *report.lines()])


def merged(paths: Sequence[Path]) -> Report:
    """
    One report of the runs of several, complete where all of them are.

    A run that a part had not ended is in none.

    Raises:
        UnusableError: One is no report of this kind; they were made at another commit, elsewhere,
            of other versions or of another configuration; or two have a run of one name.
    """
    parts = [read_part(path, "curves") for path in paths]
    first = parts[0]
    require_alike([(path, _facts(part)) for path, part in zip(paths, parts, strict=True)])
    runs: list[Any] = []
    seen: dict[Any, Path] = {}
    for path, part in zip(paths, parts, strict=True):
        for row in part["raw"]["runs"]:
            key = (row["side"], row["schedule"], row["seed"], row["head"])
            if key in seen:
                raise UnusableError(
                    f"--merge {path}: the run {':'.join(map(str, key))} is in {seen[key]} too; "
                    "leave one of them out"
                )
            seen[key] = path
            runs.append(row)
    if not runs:
        raise UnusableError(f"--merge: no run is in {', '.join(map(str, paths))}")
    asked = {name: value for name, value in first["configuration"].items() if name not in _OWN}
    asked["parts"] = [
        {
            **{
                name: part["environment"].get(name) for name in _EACH if name in part["environment"]
            },
            "runs": len(part["raw"]["runs"]),
        }
        for part in parts
    ]
    typed = {
        "program": program(),
        "argv": ["runtime", "report", "curves", "--merge", *(path.name for path in paths)],
    }
    report = Report("curves", None, {**first["environment"], **typed}, asked, {"runs": runs})
    report.complete = all(part["complete"] for part in parts)
    return report


def _facts(part: Mapping[str, Any]) -> dict[str, Any]:
    """What has to agree, by name."""
    found = {name: part["environment"].get(name) for name in _ALIKE}
    for name, value in part["configuration"].items():
        if isinstance(value, dict):
            found.update({f"[{name}] {field}": one for field, one in value.items()})
        elif name not in _OWN:
            found[name] = value
    return found
