"""
``qeffect runtime report kills``: kill a training run again and again, resume it, and compare every
bit.

The command trains a small language model over two ranks with ``torchrun ... qeffect runtime train
--resume``. A run is started several times, and in each start except the last, one process is killed
(SIGKILL). Usually the killed process is a rank that starts, resumes, steps, evaluates or saves.
Sometimes the killed process is torchrun's agent, while a rank steps, evaluates or saves. Once every
process has ended, the next start resumes from the newest checkpoint. At the end, the last
checkpoint and every loss of the log are compared with an undisturbed run, bit for bit. The
checkpoint holds weights, moments, master weights, FP8 scales, amax histories and random states.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import torch

from qeffect import cli
from qeffect.cli.command import Outcome, Progress
from qeffect.report import UnusableError

from ...backends.protocol import BackendError
from ...step.memory.numerical_state import same_bits
from ...training.checkpoint.files import checkpoint_name, manifest, read_facts
from ...training.data import save
from ...training.export import read_part
from ..reports.report import Report, add_report_options, environment, require_place
from ..runner.killed_rank import ANY_RANK, PLACES, VARIABLE, Kill

__all__ = ["add_kills_arguments", "compare_runs", "drawn_kills", "run_kills"]

_PROGRAM: Final = "qeffect.gpu_runtime.lab.runner.killed_rank"
_KILLS: Final = 20
_RANKS: Final = 2
#: Maximum number of steps of a start before its kill; if the launcher is killed, its ranks may take
#: another step.
_STEPS_A_KILL: Final = 4
#: Seconds for one start, from its first process to the end of its last one, on a busy machine.
_LIMIT_S: Final = 900.0
#: Places in which the launcher is killed.
_LAUNCHER: Final = ("step", "evaluation", "save, after its file")
#: Places that come before the first checkpoint of a run can exist.
_EARLY: Final = ("start", "resume")
_RUN: Final = """[model]
vocabulary = 256
layers = 4
hidden = {hidden}
ffn = {ffn}
heads = 4
sequence = {sequence}
history = 4
[parallel]
pp = 2
schedule = "zbv"
microbatches = 4
mode = "{mode}"
[data]
train = "{folder}/train.npy"
held_out = "{folder}/held_out.npy"
[optimizer]
rate = 0.01
warmup = 2
master = true
clip_norm = 1.0
[run]
steps = {steps}
device = "{device}"
log = "log.jsonl"
evaluate_every = 2
evaluate_windows = 4
[checkpoint]
folder = "kept"
every = 1
keep = 2
asynchronous = {asynchronous}
[limits]
start_s = 90
message_s = 20
commit_s = 20
grace_s = 2
save_s = 60
"""


def add_kills_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `report kills`."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device (default cpu)"
    )
    parser.add_argument(
        "--one-launch", action="store_true", help="run each step as one CUDA graph (only with cuda)"
    )
    parser.add_argument(
        "--kills", type=int, default=_KILLS, metavar="N", help=f"number of kills (default {_KILLS})"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="random seed for the place, rank and step of each kill (default 0)",
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="runs that train at the same time; the kills are divided among them (default 1)",
    )
    add_report_options(parser)


def drawn_kills(count: int, runs: int, seed: int) -> list[list[Kill]]:
    """
    Choose at random, for each run, which processes are killed, and at which places. The field
    `Kill.folder` stays empty.

    Every place (kind of moment at which a process is killed) is chosen once before any place is
    chosen a second time. The first kill of a run comes late enough that the killed start leaves a
    checkpoint.

    Args:
        count: Number of kills, over all runs.
        runs: Number of runs, among which the kills are divided.
        seed: Seed of the random choices.

    >>> {one.place for one in drawn_kills(20, 1, 0)[0]} == set(PLACES)
    True
    """
    draw = random.Random(seed)
    every = [(place, False) for place in PLACES] + [(place, True) for place in _LAUNCHER]
    draw.shuffle(every)
    again = [(place, False) for place in ("step", "evaluation", "step", "step")]
    places = list(itertools.islice(itertools.cycle(every + again), count))
    draw.shuffle(places)
    dealt = [places[n::runs] for n in range(runs)]
    found = []
    for own in dealt:
        first = next((n for n, one in enumerate(own) if not one[0].startswith(_EARLY)), None)
        if first is None:
            own[0] = ("step", False)
        else:
            own.insert(0, own.pop(first))
        found.append([_drawn(draw, place, launcher, n) for n, (place, launcher) in enumerate(own)])
    return found


def _drawn(draw: random.Random, place: str, launcher: bool, number: int) -> Kill:
    rank = draw.randrange(_RANKS) if place in ANY_RANK else PLACES[place] or 0
    steps = 2 if number == 0 else 1 + draw.randrange(2)
    return Kill(place, rank, "", launcher, steps, draw.random())


def run_kills(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Train, kill, resume and compare; the outcome is `refused` if a bit differs.

    Raises:
        UnusableError: The machine has too few devices, a kill did not happen, or a start failed for
            another reason.
    """
    require_place(args.out)
    _require(args)
    kills = drawn_kills(args.kills, args.at_once, args.seed)
    steps = _STEPS_A_KILL * max(map(len, kills)) + 6
    asked = {
        "device": args.device,
        "mode": _mode(args),
        "ranks": _RANKS,
        "steps": steps,
        "kills": sum(map(len, kills)),
        "seed": args.seed,
        "at_once": args.at_once,
    }
    where = environment(args.commit, args.out)
    raw: dict[str, list[dict[str, Any]]] = {"kills": [], "runs": []}
    report, told = Report("kills", args.out, where, asked, raw), threading.Lock()
    with (
        tempfile.TemporaryDirectory(prefix="qeffect-kills-") as place,
        ThreadPoolExecutor(max_workers=args.at_once + 1) as threads,
    ):
        runs = [_Run(Path(place, f"run{n}"), args, steps) for n in range(args.at_once)]
        alone = _Run(Path(place, "undisturbed"), args, steps)

        def disturbed(number: int) -> None:
            for kill in kills[number]:
                row = runs[number].killed(kill)
                with told:
                    raw["kills"].append({"run": number, **row})
                    report.save()
                    progress.note(
                        f"Killed {len(raw['kills'])} of {asked['kills']}: {_said(row)}; all "
                        f"processes ended {row['end_s']:.1f} s later"
                    )
            runs[number].left_alone()

        try:
            whole = threads.submit(alone.left_alone)
            for one in [*(threads.submit(disturbed, n) for n in range(len(runs))), whole]:
                one.result()
        finally:
            for run in [*runs, alone]:
                run.end()
            threads.shutdown(cancel_futures=True)
        try:
            raw["runs"] += [compare_runs(alone.folder, run.folder, steps) for run in runs]
        except BackendError as error:
            raise UnusableError(str(error)) from None
    derived = report.finish()["derived"]
    differ = sum(derived[f"{name}_differ"] for name in ("tensors", "losses", "held_out"))
    verdict = "refused" if differ else "accepted"
    return Outcome(verdict, {"derived": derived}, report.lines())


def _require(args: argparse.Namespace) -> None:
    """
    Require options that are valid on this machine.

    Raises:
        UnusableError: The machine cannot run the options, or a number is out of range.
    """
    for option, number in (("--kills", args.kills), ("--at-once", args.at_once)):
        if number < 1:
            raise UnusableError(f"{option} must be at least 1, found {number}")
    if args.seed < 0:
        raise UnusableError(f"--seed must be at least 0, found {args.seed}")
    if args.at_once > args.kills:
        raise UnusableError(
            f"--at-once: expected at most the number of kills ({args.kills}), so that each run is "
            f"killed, found {args.at_once}"
        )
    if args.one_launch and args.device == "cpu":
        raise UnusableError("--one-launch makes a step one CUDA graph, so it needs --device cuda")
    if args.device == "cuda" and (there := torch.cuda.device_count()) < _RANKS:
        raise UnusableError(f"expected {_RANKS} GPUs, one per rank, found {there}")


def _mode(args: argparse.Namespace) -> str:
    """How steps run: `eager`, `replays` or `one launch`."""
    return "one launch" if args.one_launch else "eager" if args.device == "cpu" else "replays"


def _said(row: Mapping[str, Any]) -> str:
    who = "the launcher, with rank" if row["launcher"] else "rank"
    return f"{who} {row['rank']} during: {row['place']}"


class _Run:
    """
    One training run, and the starts of its processes.

    Args:
        folder: A new folder for the run.
        args: The options of the command.
        steps: Number of training steps of the run.
    """

    def __init__(self, folder: Path, args: argparse.Namespace, steps: int) -> None:
        self.folder, self._starts, self._over = folder, 0, False
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()
        draw = np.random.default_rng(3)
        for name, count in (("train", 60_000), ("held_out", 4_000)):
            save(folder / f"{name}.npy", draw.integers(0, 64, count))
        small = args.device == "cpu"
        given = {
            "hidden": 64 if small else 512,
            "ffn": 128 if small else 1024,
            "sequence": 32 if small else 128,
            "mode": _mode(args),
            "device": args.device,
            "steps": steps,
            "folder": folder,
        }
        for name, value in (("synchronous", "false"), ("asynchronous", "true")):
            (folder / f"{name}.toml").write_text(_RUN.format(**given, asynchronous=value))

    def killed(self, kill: Kill) -> dict[str, Any]:
        """
        Start the run, and wait until a process was killed and all processes have ended.

        Raises:
            UnusableError: The kill did not happen, or a process did not end.
        """
        # Both kinds of saves are killed; the first start leaves a checkpoint for certain.
        asynchronous = self._starts % 2 == 1
        before = self._newest()
        place = self._start("asynchronous" if asynchronous else "synchronous", kill)
        marker = place / "killed"
        code, end_s = self._ended(place, marker)
        if not marker.exists():
            raise UnusableError(
                f"expected a kill during {kill.place!r}, but no process was killed; torchrun "
                f"ended with code {code}: {self._last_words(place)}"
            )
        told = json.loads(marker.read_text())
        return {
            "place": kill.place,
            "rank": kill.rank,
            "launcher": kill.launcher,
            "asynchronous": asynchronous,
            "resumed_from": before,
            "steps": told["taken"],
            "newest": self._newest(),
            "code": code,
            "end_s": round(end_s, 3),
            "cause": _cause(place / "out.txt"),
        }

    def left_alone(self) -> None:
        """
        Start the run without a kill, and wait for its last step.

        Raises:
            UnusableError: The run did not end with exit code 0.
        """
        place = self._start("synchronous", None)
        code, _ = self._ended(place, None)
        if code != 0:
            raise UnusableError(
                f"expected exit code 0 of a start without a kill, found {code}: "
                f"{self._last_words(place)}"
            )

    def _start(self, name: str, kill: Kill | None) -> Path:
        if self._over:
            raise UnusableError("the command has ended")
        place = self.folder / f"start{self._starts}"
        place.mkdir()
        made = None if kill is None else attrs.asdict(attrs.evolve(kill, folder=str(place)))
        given = {"folder": str(place), "seed": self._starts, "kill": made}
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(_RANKS), "-m", _PROGRAM, "runtime", "train", str(self.folder / f"{name}.toml"),
            "--resume", "--quiet",
        ]  # fmt: skip
        environ = {
            **os.environ,
            VARIABLE: json.dumps(given),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        with (place / "out.txt").open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=environ)
        self._starts += 1
        return place

    def _ended(self, place: Path, marker: Path | None) -> tuple[int, float]:
        """
        Wait for torchrun and for its ranks, which may outlive torchrun.

        Returns:
            torchrun's exit code, and the seconds from the kill to the end of the last process.

        Raises:
            UnusableError: A process did not end in time, and was killed.
        """
        assert self._process is not None
        until = time.monotonic() + _LIMIT_S
        killed_at: float | None = None
        while True:
            if killed_at is None and marker is not None and marker.exists():
                killed_at = time.monotonic()
            code = self._process.poll()
            running = [] if code is None else [*_running(place)]
            if code is not None and not running:
                now = time.monotonic()
                return code, 0.0 if killed_at is None else now - killed_at
            if time.monotonic() > until:
                self.end()
                raise UnusableError(
                    f"a process did not end within {_LIMIT_S:g} s; its last lines: "
                    f"{self._last_words(place)}"
                )
            time.sleep(0.02)

    def end(self) -> None:
        """Kill this run's remaining processes; no further start begins."""
        self._over = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for place in self.folder.glob("start*"):
            for process in _running(place):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def _newest(self) -> str | None:
        found = sorted((self.folder / "kept").glob("step-*"))
        return found[-1].name if found else None

    def _last_words(self, place: Path) -> str:
        lines = (place / "out.txt").read_text(errors="replace").splitlines()
        said = [line for line in lines if line.startswith("qeffect: ")] or lines[-3:]
        return " | ".join(said)[-600:] or "no output"


def _running(place: Path) -> Iterator[int]:
    """The process ids of a start's ranks that are still running."""
    for path in place.glob("rank*.pid"):
        with contextlib.suppress(OSError, ValueError):
            process = int(path.read_text())
            words = Path(f"/proc/{process}/cmdline").read_bytes()
            if _PROGRAM.encode() in words:
                yield process


def _cause(path: Path) -> str | None:
    """
    The cause of the end as the ranks reported it, in a line; None if no rank survived to report.
    """
    lines = path.read_text(errors="replace").splitlines()
    for mark in ("Every rank stopped: ", "qeffect: "):
        for line in lines:
            if mark in line:
                return line[line.index(mark) :].strip()[:300]
    return None


def compare_runs(whole: Path, other: Path, steps: int) -> dict[str, Any]:
    """
    Compare the last checkpoints and the logs of two runs.

    Args:
        whole: The folder of the undisturbed run, with ``kept`` and ``log.jsonl``.
        other: The folder of the other run.
        steps: Number of steps of each run.

    Returns:
        The numbers of distinct tensors, losses and held-out losses; the names of values that differ
        or are missing in one run; and the number of comparisons. A step that was restarted has
        several losses.

    Raises:
        BackendError: The last checkpoint of a run is missing or incomplete.
    """
    first, second = (
        _tensors(folder / "kept" / checkpoint_name(steps)) for folder in (whole, other)
    )
    names = sorted(first.keys() | second.keys())
    odd = [
        name
        for name in names
        if name not in first or name not in second or not same_bits(first[name], second[name])
    ]
    found: dict[str, Any] = {"tensors": len(names), "tensors_differ": odd, "compared": len(names)}
    for name, key in (("losses", "loss"), ("held_out", "held_out_loss")):
        expected, there = _logged(whole / "log.jsonl", key), _logged(other / "log.jsonl", key)
        every = sorted(expected.keys() | there.keys())
        found[name] = len(every)
        found[f"{name}_differ"] = [
            n for n in every if set(expected.get(n, ())) != set(there.get(n, ()))
        ]
        found["compared"] += sum(map(len, there.values()))
    if found["losses"] != steps:
        raise BackendError(
            f"{other / 'log.jsonl'}: expected the losses of {steps} steps, found {found['losses']}"
        )
    return found


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by its full name."""
    facts = read_facts(path, manifest(path))
    parts = sorted({name.partition(".")[0] for name in facts["tensors"]})
    found = {}
    for part in parts:
        tensors, _ = read_part(path, part)
        found.update({f"{part}.{name}": tensor for name, tensor in tensors.items()})
    return found


def _logged(path: Path, key: str) -> dict[int, list[float]]:
    """
    The values that a log (one JSON object per line) has under a name, by step; a step that was
    restarted has several values.
    """
    found: dict[int, list[float]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if key in line:
            found.setdefault(line["step"], []).append(line[key])
    return found


if __name__ == "__main__":
    raise SystemExit(cli.main(["runtime", "report", "kills", *sys.argv[1:]]))
