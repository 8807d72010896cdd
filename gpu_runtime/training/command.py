"""
``qeffect runtime train CONFIG.toml``: train a language model with the guarded pipeline.

Start as many processes with torchrun as the training file requires. A run of one process does not
need torchrun.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from qeffect.cli.command import Outcome, Progress, end_line, refuse_unused
from qeffect.cli.interrupts import INTERRUPTED_RUNS
from qeffect.launched import START
from qeffect.refusals import Refused
from qeffect.report import UnusableError, require_place
from qeffect.text import counted, decoded, escaped

from ..backends.protocol import BackendError
from ..ranks.attempt import UnreachableError
from ..ranks.channels import LostError
from ..ranks.consent import Cause, StoppedError
from ..ranks.membership import Member, launcher_ranks
from ..ranks.processes import (
    join_ranks,
    process_count,
    report_once,
    speaker_of,
    stand_alone,
    stopped_outcome,
)
from ..report import Report, environment
from .checkpoint import Checkpoints
from .checkpoint.files import AWAY, checkpoint_name
from .checkpoint.lock import FolderLock
from .checkpoint.status import facts_of_run, next_start, write_status
from .config import Config
from .config_file import read
from .divergence import DivergedError, UpdateWatch
from .figures import derive_train
from .job_assembly import JobData, backend_of, measure_cut, open_job
from .language_model import LanguageJob
from .loop import RESUMABLE, Trainer

__all__ = [
    "JoinedRun",
    "add_train_arguments",
    "carry_out",
    "launch_lines",
    "loss_line",
    "nonfinite_lines",
    "release_memory",
    "require_processes",
    "run_train",
    "skip_lines",
]


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `train`."""
    parser.add_argument("config", type=Path, help="TOML file of the run; every field has a default")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device (default: the file's)")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="number of optimizer steps (default: the file's)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint; without a checkpoint, start at the first step",
    )
    parser.add_argument(
        "--adopt",
        action="store_true",
        help="with --resume: accept another run's checkpoints in the checkpoint folder, and "
        "continue from the newest checkpoint even if another run wrote it",
    )
    parser.add_argument(
        "--digest",
        action="store_true",
        help="print one SHA-256 of parameters, moments and scales at the end; with [model] scales "
        "= 'epoch', every schedule and mapping gives the same hash",
    )
    parser.add_argument("--out", type=Path, metavar="F", help="file of the JSON report")
    parser.add_argument(
        "--commit", metavar="SHA", help="commit that the report names, if not run in a git checkout"
    )


def run_train(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Train a model. The outcome is `refused` if the contract was violated, ranks disagree, two runs
    of a step differ, or the run diverged.

    Rank 0 prints. All ranks end with the same exit code. It is 1 after a violation or if the run
    diverged (`divergence`); 2 if the run could not start or was stopped for another reason
    (`stopped_outcome`); otherwise 0. The exit code is also 0 if the checkpoint already contains all
    steps of the run.

    Raises:
        UnusableError: The run cannot start; every rank raises this error.
    """
    return report_once(lambda: _run(args, progress))


def _run(args: argparse.Namespace, progress: Progress) -> Outcome:
    if not args.resume:
        refuse_unused(args, ["--adopt"], "only a resumed run adopts checkpoints", wants="--resume")
    config = read(args.config, run={"device": args.device, "steps": args.steps})

    def train(run: JoinedRun) -> Outcome:
        how = {"resume": args.resume, "adopt": args.adopt, "digest": args.digest}
        return _trained(run, progress, **how)

    return carry_out(args, config, train, resume=args.resume)


@attrs.frozen
class JoinedRun:
    """
    A training run whose ranks are all connected, before its first step.

    Args:
        config: The configuration of the run. With `cut = "measured"`, the configuration contains
            the measured times.
        data: The model and its data.
        member: This process.
        what: Description of the run in one line.
        lock: The lock of the folder of checkpoints, on rank 0; None without a folder or on other
            ranks.
    """

    config: Config
    data: JobData
    member: Member
    what: str
    lock: FolderLock | None = None


def carry_out(
    args: argparse.Namespace,
    config: Config,
    train: Callable[[JoinedRun], Outcome],
    *,
    how: str = "train",
    deterministic: bool = False,
    resume: bool = False,
) -> Outcome:
    """
    Connect to the other ranks, train, and write the report.

    Args:
        args: The command's arguments: the training file, `--out` and `--commit`.
        config: The configuration of the run, from its training file.
        train: Function that trains. It is called once all ranks are connected.
        how: The kind of run, for the report: `train`, or the value of `--compare` (`all` or `ends`)
            for a comparison.
        deterministic: Whether to use deterministic kernels even if the training file does not
            request them.
        resume: Whether the run continues from a checkpoint.

    Raises:
        UnusableError: The run cannot start; every rank raises this error.
    """
    data = open_job(config)  # before any rank waits for another
    if args.out is not None:
        environment(args.commit, args.out)  # refuses now what it would refuse after the run
        require_place(args.out)
    require_processes(config, data.job, f"train {args.config}")
    lock = _lock(config)
    INTERRUPTED_RUNS[:] = [partial(_interrupted, config)]
    try:
        return _carry_out(args, config, data, train, lock, how, deterministic, resume)
    except KeyboardInterrupt:
        _tell_start(config, lock, "interrupted", "SIGINT")
        raise
    except LostError as error:
        cause = _gone()
        if cause is None:
            raise _lost(config, lock, error) from error
        return _stopped(config, lock, cause, str(args.config))
    except UnreachableError as error:
        raise _lost(config, lock, error) from error
    except Exception as error:
        _tell_start(config, lock, str(error), "error", resume=False)
        raise
    finally:
        if lock is not None:
            lock.release()


def _gone() -> Cause | None:
    """Return why a connection broke before the first step, if a rank on this host has ended."""
    found = START.gone()
    return None if found is None else Cause("gone", found[0], None, "start", None, found[1], False)


def _folder(config: Config) -> Path | None:
    folder = config.checkpoint.folder
    return config.path(folder) if folder else None


def _stands(config: Config, text: str, kind: str, *, resume: bool = True) -> dict[str, Any]:
    """Return the status, for the status file, of a run that ended before its first step."""
    run, steps = config.checkpoint.run or None, config.run.steps
    return facts_of_run(
        _folder(config), "ended", run=run, steps=steps, by=kind, cause=text, resume=resume
    )


def _tell_start(
    config: Config, lock: FolderLock | None, text: str, kind: str, *, resume: bool = True
) -> str:
    """
    Write into the status file that the run ended before its first step; only the process with the
    lock writes.

    Once the training has begun, the trainer writes the status instead.

    Returns:
        One line that says whether the run may be resumed.
    """
    facts, folder = _stands(config, text, kind, resume=resume), _folder(config)
    if lock is not None and folder is not None and not lock.began and not lock.lost():
        write_status(folder, facts)
    return next_start(facts, folder)


def _lost(config: Config, lock: FolderLock | None, error: Exception) -> UnreachableError:
    """
    Return the error for a connection that was lost before the first step; the text says whether the
    run may be resumed.
    """
    return UnreachableError(f"{error}. {_tell_start(config, lock, str(error), 'lost')}")


def _stopped(config: Config, lock: FolderLock | None, cause: Cause, what: str) -> Outcome:
    """
    Return the outcome of a run that every rank stopped; the last line says whether to resume the
    run.
    """
    resume = cause.kind in RESUMABLE
    line = _tell_start(config, lock, cause.text, cause.kind, resume=resume)
    return _with_next_start(stopped_outcome(cause, what), line, resume=resume)


def _with_next_start(outcome: Outcome, line: str, *, resume: bool) -> Outcome:
    return attrs.evolve(
        outcome, data={**outcome.data, "resume": resume}, text=[*outcome.text, line]
    )


def _interrupted(config: Config) -> str:
    """Say in one line whether a run that was ended by Ctrl-C may be resumed."""
    return next_start(_stands(config, "interrupted", "SIGINT"), _folder(config))


def _say_aside(config: Config, what: str, cause: Cause, stands: Mapping[str, Any]) -> bool:
    """
    Print the cause of a stop from a thread other than the main thread, on the rank that prints.
    """
    outcome = _with_next_start(
        stopped_outcome(cause, what),
        next_start(stands, _folder(config)),
        resume=stands["resume"],
    )
    if launcher_ranks()[0] != speaker_of(outcome):
        return False
    end_line()
    words = "\n".join(escaped(decoded(line)) for line in outcome.text)
    said = json.dumps(outcome.record()) if "--json" in sys.argv else words
    os.write(1, f"{said}\n".encode())
    return True


def _lock(config: Config) -> FolderLock | None:
    """Lock the folder of checkpoints, before this process waits for any other process."""
    folder = config.checkpoint.folder
    if not folder or launcher_ranks()[0] != 0:
        return None
    try:
        return FolderLock(config.path(folder))
    except BackendError as error:
        raise UnusableError(f"{config.source}: [checkpoint] folder: {error}") from None


def _carry_out(
    args: argparse.Namespace,
    config: Config,
    data: JobData,
    train: Callable[[JoinedRun], Outcome],
    lock: FolderLock | None,
    how: str,
    deterministic: bool,
    resume: bool,
) -> Outcome:
    deterministic = deterministic or config.run.deterministic
    START.place, START.tell = "meeting the other ranks", partial(_tell_start, config, lock)
    member = join_ranks(config.run.device, config.waits(), deterministic=deterministic)
    START.place = "building the model"
    config, data = measure_cut(member, config, data, resume=resume)
    job = data.job
    what = (
        f"{config.source.name}: {config.model.layers} layers as {list(job.cut)}, "
        f"{_count(config):,} parameters, {config.parallel.schedule}, PP={job.pp}, DP={job.dp}, "
        f"{counted(job.microbatches, 'microbatch')}, {backend_of(config)} on {config.run.device}"
    )
    try:
        outcome = train(JoinedRun(config, data, member, what, lock))
    except (StoppedError, DivergedError) as stopped:
        outcome = _stopped(config, lock, stopped.cause, what)
    except Refused as refused:
        _tell_start(config, lock, str(refused), "refused", resume=False)
        facts = {"clause": refused.clause, "rank": member.rank, "step": None, "action": None}
        outcome = Outcome("refused", facts, [what, str(refused)])
    if args.out is not None and member.rank == 0 and "losses" in outcome.data:
        _write(args.out, args.commit, how, config, job, outcome)
    return outcome


def require_processes(config: Config, job: LanguageJob, how: str) -> None:
    """
    Raise an error unless as many processes were started as the job needs. A job of one process does
    not need torchrun.

    Args:
        config: The configuration of the run, from its training file.
        job: The run's model and its mapping onto ranks.
        how: The command and its file, as a user types them, for the error message.

    Raises:
        UnusableError: Another number of processes was started than the job needs.
    """
    started, source = process_count(), config.source
    if started is None and job.world > 1:
        raise UnusableError(
            f"{source}: [parallel] pp = {job.pp} and dp = {job.dp} take {job.world} processes; "
            f"start them: torchrun --nproc-per-node {job.world} -m qeffect runtime {how}"
        )
    if started is None:
        stand_alone()
    elif started != job.world:
        raise UnusableError(
            f"{source}: [parallel] pp = {job.pp} and dp = {job.dp} take {job.world} processes, "
            f"{started} were started; start torchrun with --nproc-per-node {job.world}"
        )


def _trained(
    run: JoinedRun, progress: Progress, *, resume: bool, adopt: bool, digest: bool
) -> Outcome:
    config, member, what = run.config, run.member, run.what
    trainer = Trainer(
        member,
        config,
        progress.stay,
        data=run.data,
        note=progress.note,
        resume=resume,
        adopt=adopt,
        lock=run.lock,
    )
    if trainer.began:
        what += f", from step {trainer.began} on"
    if member.rank == 0:
        progress.note(what)
    trainer.tell = partial(_say_aside, config, what)
    end: DivergedError | None = None
    try:
        trainer.run()
    except DivergedError as error:
        end = error
    record = dict(trainer.record())
    if digest and end is None:
        record["digest"] = trainer.digest()
    trainer.close()
    losses = trainer.losses
    lines = [what, *launch_lines(record)]
    if losses:
        lines.append(loss_line(losses))
        lines += nonfinite_lines(trainer.began, losses)
    elif end is None:
        lines.append(
            f"  nothing to train: the checkpoint already has {counted(trainer.began, 'step')}, "
            f"[run] steps is {config.run.steps}"
        )
    lines += [
        f"  held out, after {counted(n, 'step')}: {loss:.4f}"
        for n, loss in trainer.evaluations.items()
    ]
    if "digest" in record:
        lines.append(f"  digest of parameters, moments and scales: {record['digest']}")
    if trainer.log is not None and trainer.log.ended is not None:
        lines.append(f"  the log is incomplete: {trainer.log.ended}")
    lines += skip_lines(trainer.watch)
    if trainer.mismatches:
        lines.append(
            f"  MISMATCH: two runs of one step differed {counted(trainer.mismatches, 'time')}; the "
            "step was restarted each time"
        )
    if end is None:
        lines += _ended_early(trainer)
        return Outcome("accepted", record, lines)
    stopped = stopped_outcome(end.cause, what)
    lines += [stopped.text[-1], _way_on(trainer.checkpoints, end.cause)]
    return Outcome(stopped.verdict, {**record, **stopped.data, "step": end.step}, lines)


def _ended_early(trainer: Trainer) -> list[str]:
    """
    Return a line if a request ended the run before its last step: the request, and how to continue.
    """
    if trainer.ended_by in ("", "steps"):
        return []
    steps, taken = trainer.config.run.steps, trainer.worker.runtime.epoch
    said = f"Ended by {trainer.ended_by} after {counted(taken, 'step')} of {steps}; "
    if trainer.checkpoints is None:
        return [f"{said}nothing was saved, because [checkpoint] folder is empty"]
    return [f"{said}saved {checkpoint_name(taken)}: continue with --resume"]


def skip_lines(watch: UpdateWatch) -> list[str]:
    """
    Return a line with the number of skipped updates and the first skipped step; an empty list if no
    update was skipped.
    """
    if not watch.skipped:
        return []
    return [
        f"  SKIPPED: {counted(watch.skipped, 'update')}, because the norm of the gradients was "
        f"not finite; first in step {watch.first}"
    ]


def _way_on(checkpoints: Checkpoints | None, cause: Cause) -> str:
    """Say how a run that diverged can be continued."""
    try:
        path = None if checkpoints is None else checkpoints.latest()
    except BackendError as error:
        return f"The newest checkpoint is not usable: {error}"
    if path is None:
        return "There is no checkpoint to continue from"
    if cause.action == "load":
        return f"{path} already holds this non-finite state; {AWAY}"
    return (
        f"The newest checkpoint is {path}; change what made the run diverge, and continue with "
        "--resume"
    )


def launch_lines(record: Mapping[str, Any]) -> list[str]:
    """
    Return a line with the number of launched steps, or the reason why no step was launched. Return
    an empty list if the mode is not ``one launch``.
    """
    if record["guarded_replays"]:
        return [f"  guarded replays, not one launch per step: {record['guarded_replays']}"]
    return [f"  steps run as one launch each: {record['launches']}"] if record["launches"] else []


def loss_line(losses: Sequence[float]) -> str:
    return f"  loss {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last"


def nonfinite_lines(began: int, losses: Sequence[float]) -> list[str]:
    """
    Return a line with the number of losses that are not finite; an empty list if all are finite. A
    report contains null for such losses.
    """
    odd = [began + n for n, loss in enumerate(losses) if not math.isfinite(loss)]
    return (
        [f"  NOT FINITE: the loss of {counted(len(odd), 'step')}; first in step {odd[0]}"]
        if odd
        else []
    )


def release_memory(member: Member) -> None:
    """Free the memory of the previous run of a comparison."""
    gc.collect()
    if member.device.type == "cuda":
        torch.cuda.empty_cache()


def _count(config: Config) -> int:
    """Return the number of parameters of the model, with norms and biases."""
    m, layer = config.model, config.layer()
    rows = (2 - m.tied) * m.vocabulary + layer.norm_vectors
    if m.positions == "learned":
        rows += m.sequence
    return m.layers * layer.parameters + rows * m.hidden


def _write(
    path: Path, commit: str | None, how: str, config: Config, job: LanguageJob, outcome: Outcome
) -> None:
    """Write the report of a run that reached its end, with or without violations."""
    data = outcome.data
    run = {
        "how": how,
        "schedule": job.schedule,
        "pp": job.pp,
        "dp": job.dp,
        "cut": list(job.cut),
        "microbatches": job.microbatches,
        "captured": data["captured"],
        "launches": data.get("launches", 0),
        "guarded_replays": data.get("guarded_replays", ""),
        "parameters": _count(config),
        "tokens_a_step": job.windows_a_step * job.config.sequence,
        "losses": data["losses"],
        "native_losses": data.get("native_losses"),
        "held_out": [[int(step), loss] for step, loss in data.get("held_out", {}).items()],
        "seconds": data.get("seconds"),
        "native_seconds": data.get("native_seconds"),
        "compared": data.get("compared"),
        "differ": data.get("differ"),
        "first": data.get("first", []),
    }
    try:
        Report(
            "train",
            path,
            environment(commit),
            config.record(),
            {"runs": [run]},
            derive=derive_train,
        ).finish()
    except OSError as error:
        raise UnusableError(f"--out {path}: {error.strerror or error}") from None
