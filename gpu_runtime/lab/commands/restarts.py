"""
``qeffect runtime report restarts``: training that stops and resumes, every bit compared.

The command starts ranks with torchrun for each part, so that every part runs in processes of its
own, and compares what they wrote. The first part trains from the beginning and saves on its way.
The second resumes from that checkpoint and has to end in the bits of the first. The third loads the
checkpoint into another mapping and takes one step; beside it a pipeline takes the same step after
its state was copied by hand from a file that torch made of the checkpoint. With `--one-launch` the
first two parts run each step as one launch, and a fourth resumes with guarded replays, in the same
bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from qeffect import cli
from qeffect.checkpoint import Checkpoint
from qeffect.cli.command import Outcome, Progress

from ...backends.deterministic import DETERMINISTIC
from ...backends.layers import LayerConfig
from ...backends.protocol import BackendError, StageBackend, parameters
from ...ranks.job import Batches, Job
from ...ranks.worker import Worker
from ...ranks.world import Limits, Member, join
from ...runtime import Mode, RuntimeConfig
from ...step.memory.digests import digests
from ...step.memory.numerical_state import NumericalState, live_state
from ...step.optimizer import Optimizer
from ...training.checkpoint import Checkpoints, Replicas, sizes
from ...training.launches import StepRunner
from ...training.state import Persistent, by_layer, optimizer_state, shares_amax
from ..reports.report import Report, UnusableError, add_report_options, environment

__all__ = [
    "Trial",
    "add_restarts_arguments",
    "bits",
    "facts_of",
    "gone_on",
    "made",
    "main",
    "remapped",
    "remapped_row",
    "resumed_row",
    "run_restarts",
    "started",
]

SAVED_AT, UNTIL = 3, 8


@attrs.frozen(kw_only=True)
class Trial:
    """
    What is trained, and how.

    Args:
        job: The model, its mapping and its data.
        device: `cpu` or `cuda`.
        mode: How a step runs.
        masters: Accumulate in float32, over master weights of float32.
        limits: How long anything may take.
    """

    job: Job = attrs.field(factory=Job)
    device: str = "cpu"
    mode: Mode = "eager"
    masters: bool = False
    limits: Limits = attrs.field(factory=Limits)

    @property
    def backend(self) -> str:
        """The layers of the device."""
        return "reference" if self.device == "cpu" else "transformer-engine"


def facts_of(job: Job) -> dict[str, Any]:
    """What numbers mean in a job, whatever its mapping: the model, and what a step takes."""
    c = job.config
    return {
        "layers": job.layers * job.num_stages,
        "hidden": c.hidden,
        "ffn": c.ffn,
        "heads": c.heads,
        "sequence": c.sequence,
        "batch": c.batch,
        "microbatches": job.microbatches * job.dp,
        "seed": job.seed,
    }


def made(member: Member, trial: Trial) -> Worker:
    """A worker before its first step; every rank calls it."""
    job = trial.job
    wide = torch.float32 if trial.masters else torch.bfloat16

    def optimizer(stages: list[StageBackend]) -> Optimizer:
        if not trial.masters:
            return Optimizer(stages)
        return Optimizer(stages, master_dtype=wide, capturable=trial.device == "cuda")

    worker = Worker(
        member,
        job.table(),
        job.pp,
        lambda indices: job.stages(
            indices, member.device, trial.backend, fuse=False if trial.masters else None
        ),
        lambda replica: Batches(job.batch(member.device, replica), member.device),
        RuntimeConfig(
            rule=job.rule,
            provisioning=job.provisioning,
            mode=trial.mode,
            dtype=wide,
            amax=job.amax,
        ),
        limits=trial.limits,
        optimizer=optimizer,
    )
    worker.heed_termination()
    return worker


def bits(worker: Worker, job: Job) -> dict[str, str]:
    """A digest of every tensor that persists, by the model's names."""
    worker.runtime.drain()
    place = worker.member.rank % worker.pp
    naming = by_layer(job.layers)
    held = Persistent.of(worker.runtime, worker.optimizer, naming, worker.replica, place).tensors
    return dict(zip(held, (digests([tensor])[0] for tensor in held.values()), strict=True))


def _losses(steps: StepRunner, wanted: Sequence[int]) -> dict[str, list[float]]:
    return {str(step): steps.result(step).losses for step in wanted}


def started(
    member: Member,
    trial: Trial,
    folder: str,
    *,
    until: int = UNTIL,
    save_at: Sequence[int] = (SAVED_AT,),
    asynchronous: bool = False,
) -> dict[str, Any]:
    """Train from the beginning, and save after some steps."""
    worker = made(member, trial)
    checkpoints = Checkpoints(folder, asynchronous=asynchronous)
    said = _trained(worker, trial, checkpoints, until, save_at)
    checkpoints.close()
    worker.close()
    return said


def gone_on(
    member: Member,
    trial: Trial,
    folder: str,
    *,
    until: int = UNTIL,
    save_at: Sequence[int] = (),
    replicas: Replicas = "same",
) -> dict[str, Any]:
    """Go on from the latest checkpoint."""
    worker = made(member, trial)
    checkpoints = Checkpoints(folder)
    free = _loaded(worker, trial, checkpoints, replicas)
    said = {**_trained(worker, trial, checkpoints, until, save_at), "free": free}
    said["changed"] = list(checkpoints.changed)
    checkpoints.close()
    worker.close()
    return said


def _loaded(
    worker: Worker, trial: Trial, checkpoints: Checkpoints, replicas: Replicas
) -> dict[str, Any]:
    path = checkpoints.latest()
    assert path is not None, f"{checkpoints.folder} has no checkpoint"
    job = trial.job
    return checkpoints.load(path, worker, by_layer(job.layers), facts_of(job), replicas=replicas)


def _trained(
    worker: Worker, trial: Trial, checkpoints: Checkpoints, until: int, save_at: Sequence[int]
) -> dict[str, Any]:
    job = trial.job
    began, first, saved = worker.runtime.epoch, bits(worker, job), {}
    steps = StepRunner(worker)
    if steps.replays:
        raise BackendError(f"a step cannot be one launch: {steps.replays}")
    while worker.runtime.epoch < until:
        steps.step()
        if (epoch := worker.runtime.epoch) in save_at:
            steps.leave()
            saved[str(epoch)] = bits(worker, job)
            free = {"position": epoch * job.microbatches * job.dp}
            checkpoints.save(worker, by_layer(job.layers), facts_of(job), free)
    steps.leave()
    checkpoints.wait()
    last = bits(worker, job)
    losses = _losses(steps, range(began, until))
    launches = steps.launches
    steps.close()
    return {
        "began": began,
        "epoch": worker.runtime.epoch,
        "launches": launches,
        "losses": losses,
        "first": first,
        "saved": saved,
        "last": last,
    }


def remapped(
    member: Member,
    trial: Trial,
    folder: str,
    *,
    replicas: Replicas = "same",
    save: bool = False,
) -> dict[str, Any]:
    """
    Load the latest checkpoint, take a step; then the same step of a pipeline set up by hand.

    Args:
        member: This process.
        trial: The new mapping.
        folder: Of the checkpoints.
        replicas: Whose scaling state each replica takes.
        save: Whether the state after the step is saved.
    """
    worker = made(member, trial)
    checkpoints = Checkpoints(folder)
    path = checkpoints.latest()
    assert path is not None
    whole = Path(f"{path}-{os.getppid()}.pt")
    if member.rank == 0:
        dcp_to_torch_save(path, whole)
    free = _loaded(worker, trial, checkpoints, replicas)
    epoch = worker.runtime.epoch
    loaded = bits(worker, trial.job)
    said = _trained(worker, trial, checkpoints, epoch + 1, (epoch + 1,) if save else ())
    checkpoints.close()
    worker.close()
    held = torch.load(whole, weights_only=True, map_location="cpu")
    there = json.loads((path / "facts.json").read_text())["mapping"]["replicas"]
    by_hand = made(member, trial)
    whose = 0 if shares_amax(by_hand.runtime) else by_hand.replica % there
    _copy(by_hand, trial.job, held, epoch, whose)
    copied = bits(by_hand, trial.job)
    steps = StepRunner(by_hand)
    steps.step()
    theirs, losses = bits(by_hand, trial.job), _losses(steps, [epoch])
    by_hand.close()
    dist.barrier()
    if member.rank == 0:
        whole.unlink()
    return {
        **said,
        "free": free,
        "changed": list(checkpoints.changed),
        "loaded otherwise": _differing(loaded, copied),
        "differ": _differing(said["last"], theirs),
        "moved": len(_differing(loaded, said["last"])),
        "same losses": losses == said["losses"],
    }


def _copy(worker: Worker, job: Job, held: Mapping[str, Tensor], epoch: int, replica: int) -> None:
    """By hand: layers counted here, tensors copied one after the other."""
    runtime = worker.runtime

    def there(stage: int, local: str) -> str:
        words = local.split(".")
        return ".".join([words[0], str(stage * job.layers + int(words[1])), *words[2:]])

    moments: dict[str, Tensor] = {}
    with torch.no_grad():
        for stage in runtime.stages.values():
            for local, parameter in parameters(stage).items():
                parameter.copy_(held[f"model.{there(stage.index, local)}"])
    for name in optimizer_state(worker.optimizer):
        _, index, local = name.split(".", 2)
        moments[name] = held[f"optim.{there(int(index), local)}"]
    worker.optimizer.load_state(moments)
    scaling = {}
    for name in live_state(runtime.domain):
        _, index, local = name.split(".", 2)
        scaling[name] = held[f"fp8.dp{replica}.{there(int(index), local)}"]
    recipe = dict(runtime.domain.recipe())
    runtime.restore(
        Checkpoint(epoch, runtime.contract.configuration), NumericalState(scaling, recipe)
    )


def _differing(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """Names of which only one side has a value, or another one."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


# The driver


_PARTS: dict[str, Any] = {"started": started, "gone-on": gone_on, "remapped": remapped}


LAYERS = 4
"""Layers of the model, whatever its mapping."""


def _mode(args: argparse.Namespace) -> Mode:
    """The mode that the options ask for."""
    if args.one_launch:
        return "one launch"
    return "eager" if args.device == "cpu" or args.eager else "replays"


def _trial(args: argparse.Namespace, schedule: str, layers: int, vpp: int | None) -> Trial:
    hidden, ffn, heads, sequence = (
        (64, 128, 2, 32) if args.device == "cpu" else (args.hidden, 4 * args.hidden, 8, 512)
    )
    job = Job(
        schedule=schedule,
        pp=args.pp,
        vpp=vpp,
        dp=args.dp,
        microbatches=4,
        layers=layers,
        history=args.history,
        rule="accumulate",
        config=LayerConfig(hidden, ffn, heads, sequence),
    )
    return Trial(
        job=job,
        device=args.device,
        mode=_mode(args),
        masters=args.masters,
    )


def add_restarts_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `report restarts`."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device (default cpu)"
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs (only with cuda)")
    parser.add_argument(
        "--one-launch", action="store_true", help="each step as one CUDA graph (only with cuda)"
    )
    parser.add_argument(
        "--masters", action="store_true", help="float32 gradients and master weights"
    )
    parser.add_argument("--asynchronous", action="store_true", help="save while the next steps run")
    parser.add_argument(
        "--hidden", type=int, default=1024, metavar="N", help="layer width on cuda (default 1024)"
    )
    parser.add_argument(
        "--history", type=int, default=16, metavar="N", help="length of amax histories (default 16)"
    )
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=["il", "zbv"],
        metavar="NAME",
        help="schedules of the run that saves (default il zbv)",
    )
    parser.add_argument("--dp", type=int, default=1, metavar="N", help="replicas (default 1)")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="parts that run at a time (default 1)"
    )
    parser.add_argument("--same", action="store_true", help="resume under the same mapping only")
    add_report_options(parser)


def main(argv: Sequence[str]) -> int:
    """Run one rank of one part, where the words begin with `--part`; else run the command."""
    if argv[:1] != ["--part"]:
        return cli.main(["runtime", "report", "restarts", *argv])
    parser = argparse.ArgumentParser()
    add_restarts_arguments(parser)
    parser.add_argument("--part", choices=[*_PARTS], required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--words", required=True)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--vpp", type=int)
    args = parser.parse_args(argv)
    trial = _trial(args, args.schedules[0], args.layers, args.vpp)
    member = join(args.device, trial.limits)
    if args.device == "cpu":
        torch.set_num_threads(1)
    options = {"asynchronous": True} if args.asynchronous and args.part == "started" else {}
    words = _PARTS[args.part](member, trial, args.folder, **options)
    Path(args.words, f"{member.rank}.json").write_text(json.dumps(words), encoding="utf-8")
    return 0


def _launch(
    args: argparse.Namespace,
    part: str,
    folder: Path,
    *options: str,
    pp: int = 2,
    launched: bool = False,
) -> list[Any]:
    """
    One part, on as many fresh processes as it has ranks; what each says.

    A part that is `launched` takes a step as one launch where that is asked for.
    """
    words = Path(tempfile.mkdtemp(prefix=f"{part}-", dir=folder.parent))
    given = ["--device", args.device, "--hidden", str(args.hidden), "--history", str(args.history)]
    given += ["--pp", str(pp), "--dp", str(args.dp)]
    world = pp * args.dp
    flags = ["--eager", "--masters", "--asynchronous"]
    if launched:
        flags.append("--one-launch")
    given += [flag for flag in flags if getattr(args, flag[2:].replace("-", "_"))]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(world), "-m", "qeffect.gpu_runtime.lab.commands.restarts",
        "--part", part, "--folder", str(folder), "--words", str(words), *given, *options,
    ]  # fmt: skip
    subprocess.run(command, check=True, env={**DETERMINISTIC, **os.environ})
    return [json.loads((words / f"{rank}.json").read_text()) for rank in range(world)]


def _moved(args: argparse.Namespace, folder: Path, other: str, pp: int, vpp: int) -> list[Any]:
    """A checkpoint under another mapping."""
    layers = LAYERS // (pp * vpp)
    options = ["--schedules", other, "--layers", str(layers), "--vpp", str(vpp)]
    return _launch(args, "remapped", folder, *options, pp=pp)


def run_restarts(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Train, save, resume, and compare every bit; refused where a bit differs.

    Raises:
        UnusableError: The machine has too few devices, or a part failed.
    """
    most = _most(args)
    where = environment(args.commit, args.out)
    asked = {
        "device": args.device,
        "backend": "reference" if args.device == "cpu" else "transformer-engine",
        "captured": args.device == "cuda" and not args.eager,
        "one_launch": args.one_launch,
        "masters": args.masters,
        "asynchronous": args.asynchronous,
        "hidden": args.hidden if args.device == "cuda" else 64,
        "history": args.history,
        "schedules": args.schedules,
        "dp": args.dp,
        "saved_at": SAVED_AT,
        "until": UNTIL,
    }
    saving = threading.Lock()
    found: dict[str, list[dict[str, Any]]] = {schedule: [] for schedule in args.schedules}
    rows: list[dict[str, Any]] = []
    report = Report("restarts", args.out, where, asked, {"rows": rows})

    def done(schedule: str, row: dict[str, Any]) -> None:
        with saving:
            found[schedule].append(row)
            rows[:] = [row for of_one in found.values() for row in of_one]
            progress.note(f"Compared. {_said(row)}")
            report.save()

    with (
        tempfile.TemporaryDirectory(prefix="qeffect-restarts-") as place,
        ThreadPoolExecutor(max_workers=args.at_once) as parts,
        ThreadPoolExecutor(max_workers=args.at_once) as schedules,
    ):

        def driven(schedule: str) -> None:
            folder, own = Path(place, schedule), ("--schedules", schedule)
            whole = parts.submit(_launch, args, "started", folder, *own, launched=True).result()
            weighed = sizes(Checkpoints(folder).latest() or folder)
            again = parts.submit(_launch, args, "gone-on", folder, *own, launched=True)
            replayed = (
                parts.submit(_launch, args, "gone-on", folder, *own) if args.one_launch else None
            )
            others = [] if args.same else _others(schedule, most)
            moved = [parts.submit(_moved, args, folder, *other) for other in others]
            done(schedule, resumed_row(schedule, whole, again.result(), weighed))
            if replayed is not None:
                there = f"{schedule}, guarded replays"
                done(schedule, resumed_row(schedule, whole, replayed.result(), weighed, there))
            for (other, pp, vpp), ranks in zip(others, moved, strict=True):
                layers = LAYERS // (pp * vpp)
                there = f"{other}, PP={pp}, {vpp} stages a rank of {layers} layers"
                done(schedule, remapped_row(schedule, there, whole, ranks.result(), weighed))

        try:
            list(schedules.map(driven, found))
        except subprocess.CalledProcessError as error:
            raise UnusableError(f"a part ended with exit code {error.returncode}") from error
        finally:
            # Behind an error nothing more is begun: each part holds all GPUs for minutes.
            parts.shutdown(wait=False, cancel_futures=True)
    derived = report.finish()["derived"]
    good = all(row["differ"] == 0 and row["compared"] > 0 for row in rows)
    return Outcome("accepted" if good else "refused", {"derived": derived}, report.lines())


def _said(row: Mapping[str, Any]) -> str:
    return (
        f"{row['saved_under']}, {row['how']} under {row['loaded_under']}: {row['differ']} of "
        f"{row['compared']} values differ"
    )


def _most(args: argparse.Namespace) -> int:
    """
    Ranks of a pipeline that this machine has room for.

    Raises:
        UnusableError: There are fewer than the two that train, or an option is no number of them.
    """
    for option, number in (("--dp", args.dp), ("--at-once", args.at_once)):
        if number < 1:
            raise UnusableError(f"{option} must be at least 1, found {number}")
    if args.one_launch and (args.device == "cpu" or args.eager):
        raise UnusableError(
            "--one-launch makes a step one CUDA graph, so it needs --device cuda without --eager; "
            "leave it out"
        )
    if args.device == "cpu":
        return LAYERS
    found: int = torch.cuda.device_count() // args.dp
    if found < 2:
        raise UnusableError(
            f"{2 * args.dp} GPUs are needed, one a rank; found {torch.cuda.device_count()}"
        )
    return found


def _others(schedule: str, most: int) -> list[tuple[str, int, int]]:
    """Other mappings of the layers onto at most so many ranks: the table, ranks, stages a rank."""
    others = [
        ("zbv" if schedule == "il" else "il", 2, 2),
        ("1f1b", 2, 1),
        ("il", 1, 4),
        ("1f1b", 4, 1),
    ]
    return [other for other in others if other[1] <= most]


def resumed_row(
    schedule: str,
    whole: list[Any],
    again: list[Any],
    weighed: Mapping[str, int],
    there: str | None = None,
) -> dict[str, Any]:
    """
    What a run that went on has beside the one that never stopped, all ranks together.

    Args:
        schedule: The table of the run that never stopped.
        whole: What its ranks say.
        again: What those of the other say.
        weighed: Bytes of the checkpoint.
        there: How the other run went on, where not in the same way.
    """
    compared, differ = 0, []
    for a, b in zip(whole, again, strict=True):
        if (b["began"], b["epoch"]) != (SAVED_AT, UNTIL):
            differ.append(f"steps {b['began']} to {b['epoch']}")
        compared += len(a["saved"][str(SAVED_AT)]) + len(a["last"])
        differ += _differing(a["saved"][str(SAVED_AT)], b["first"])
        differ += _differing(a["last"], b["last"])
        for step, losses in b["losses"].items():
            compared += len(losses)
            differ += [f"loss of step {step}"] * (losses != a["losses"][step])
    row = _row("resumed", schedule, there or schedule, compared, differ, again, weighed)
    return {**row, "launches": [ranks[0]["launches"] for ranks in (whole, again)]}


def remapped_row(
    schedule: str, there: str, whole: list[Any], moved: list[Any], weighed: Mapping[str, int]
) -> dict[str, Any]:
    """What was loaded beside what was saved, and a step beside that of one set up by hand."""
    saved = {name: bit for rank in whole for name, bit in rank["saved"][str(SAVED_AT)].items()}
    loaded = {name: bit for rank in moved for name, bit in rank["first"].items()}
    compared, differ = len(saved), _differing(saved, loaded)
    for rank in moved:
        compared += len(rank["last"]) + sum(map(len, rank["losses"].values()))
        differ += rank["loaded otherwise"] + rank["differ"]
        differ += ["losses"] * (not rank["same losses"]) + ["no step"] * (not rank["moved"])
    return _row("remapped", schedule, there, compared, differ, moved, weighed)


def _row(
    how: str,
    saved_under: str,
    loaded_under: str,
    compared: int,
    differ: list[str],
    ranks: list[Any],
    weighed: Mapping[str, int],
) -> dict[str, Any]:
    steps = sorted(ranks[0]["losses"], key=int)
    return {
        "how": how,
        "saved_under": saved_under,
        "loaded_under": loaded_under,
        "compared": compared,
        "differ": len(differ),
        "first": differ[:3],
        "changed": list(ranks[0]["changed"]),
        "losses": [sum(sum(rank["losses"][step]) for rank in ranks) for step in steps],
        "bytes": dict(weighed),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
