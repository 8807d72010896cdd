"""
Ours, torch's own pipeline and Megatron-core beside each other: `python -m ...bench.peers`.

One language model, one layer a stage, over two ranks with two stages each, from the same bits on
every side. Each mode runs in processes of its own under a limit, so that one that hangs or dies
costs its own rows alone; the report is written again after each. Megatron-core is needed by its own
modes only, and imported in `megatron` alone: ``pip install --no-deps megatron-core==0.19.2``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from qeffect.report import write_json

from ...ranks.one_launch import OneLaunch
from ...ranks.world import Member, gathered, join
from ...runtime import RuntimeConfig
from ...step.optimizer import Gradients
from ..comparisons.ranks import held_by
from ..reports.report import (
    Report,
    UnusableError,
    environment,
    require_place,
)
from ..runner.device import require_device
from ..sides.language import (
    PP,
    Asked,
    compared,
    keep,
    named,
    still,
    sums,
)
from ..sides.pipelines import (
    backend_on,
    native_side,
    released,
    timed,
    worker_side,
)
from ..statistics.paper import LARGE, SMALL
from ..statistics.peers import EAGER, combined, owed
from .tables import LAYERS, DrawnLanguage

__all__ = ["Ended", "last_words", "launched", "main", "ours"]

LIMIT_S = 90.0
MEGATRON = "megatron-core==0.19.2"
OURS = "ours"
_TAIL = 16
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")


# Ours and torch's


def ours(
    member: Member, asked: Asked, folder: Path, done: Callable[[dict[str, Any]], None]
) -> None:
    """
    Native, replays and one launch of every cell.

    Args:
        member: This rank.
        asked: What to measure.
        folder: Where native's gradients are kept for the processes that follow.
        done: Takes each row when it is measured.
    """
    for cell in asked.cells:
        with released(member):
            done(_native(member, asked, folder, cell))
        for schedule in ("il", "zbv"):
            with released(member):
                row, state = _replays(member, asked, folder, cell, schedule)
                done(row)
            if asked.device == "cuda":
                with released(member):
                    done(_one_launch(member, asked, cell, schedule, state))
            del state


def _by_model(job: DrawnLanguage, gradients: Gradients) -> dict[str, Tensor]:
    """Clones of a rank's gradients, by the model's names."""
    return {
        job.name_of(stage, name): gradient.detach().clone()
        for stage, named in gradients.items()
        for name, gradient in named.items()
    }


def _native(member: Member, asked: Asked, folder: Path, cell: str) -> dict[str, Any]:
    job = asked.job(cell, "il")
    seen: list[dict[str, Tensor]] = []
    wanted = [False]

    def look(gradients: Gradients) -> None:
        if wanted[0]:
            seen.append(_by_model(job, gradients))

    began = time.perf_counter()
    side = native_side(member, job, backend_on(asked.device), optimizer=still, look=look)
    made = time.perf_counter() - began
    for _ in range(asked.settled - 1):
        side.step()
    wanted[0] = True
    side.step()
    wanted[0] = False
    member.synchronize()
    (own,) = seen
    keep(folder, cell, "native", member.rank, own)
    gradients = compared(member, folder, cell, ["native"], own)
    own.clear()
    losses = gathered(member, side.losses[-1])
    found = timed(member, side.step, asked.turns(graphs=False), made=made, facts={})
    return named(cell, "native", "il", gradients, sum(map(sum, losses)), found)


def _replays(
    member: Member, asked: Asked, folder: Path, cell: str, schedule: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    job = asked.job(cell, schedule)
    began = time.perf_counter()
    config = RuntimeConfig(captured=asked.device == "cuda")
    worker = worker_side(
        member, job, backend_on(asked.device), config, capturable=False, optimizer=still
    )
    made = time.perf_counter() - began
    for _ in range(asked.settled - 1):
        worker.step()
    with worker.stepping():
        gradients = worker.pipeline.step(worker.optimizer)
    worker.runtime.handoff.synchronize()
    own = _by_model(job, gradients)
    against = compared(member, folder, cell, ["native"], own)
    own.clear()
    held = held_by(worker.runtime.stages, worker.optimizer)
    state = {name: tensor.detach().clone() for name, tensor in held.items()}
    turns = asked.turns(graphs=asked.device == "cuda")
    found = timed(member, worker.step, turns, made=made, facts={})
    worker.close()
    return named(cell, "replays", schedule, against, None, found), state


def _one_launch(
    member: Member, asked: Asked, cell: str, schedule: str, state: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Of one launch what it leaves is compared: AdamW's moments are those of its gradients."""
    job = asked.job(cell, schedule)
    began = time.perf_counter()
    config = RuntimeConfig(captured=True, device_counts=True, late_counts=True, nested=True)
    worker = worker_side(
        member, job, backend_on(asked.device), config, capturable=True, optimizer=still
    )
    whole = OneLaunch(worker)
    made = time.perf_counter() - began
    for _ in range(asked.settled):
        whole.step()
    whole.leave()
    worker.runtime.handoff.synchronize()
    left = held_by(worker.runtime.stages, worker.optimizer)
    against = [{"with": "replays", **combined(gathered(member, sums(left, state)))}]
    whole.resume()
    found = timed(member, whole.step, asked.turns(graphs=True), made=made, facts={})
    whole.leave()
    whole.close()
    worker.close()
    return named(cell, "one launch", schedule, against, None, found)


# Processes


def last_words(text: str, lines: int = _TAIL) -> list[str]:
    """
    The last lines of what a process wrote, without the folders of the machine.

    An error that others hid comes before them, since it is what went wrong first.

    >>> last_words("a\\n\\n  File \\"/usr/lib/x.py\\", line 3\\n")
    ['a', 'File "x.py", line 3']
    >>> last_words("OSError: full\\nduring this:\\nb\\nValueError: c", lines=2)
    ['OSError: full', 'b', 'ValueError: c']
    """
    said = [line.strip() for line in text.splitlines() if line.strip()]
    hidden = list(dict.fromkeys(filter(_ERROR.match, said[:-lines])))
    kept = hidden[:_TAIL] + said[-lines:]
    return [re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", line)[:300] for line in kept]


@attrs.frozen
class Ended:
    """
    How processes ended.

    Args:
        codes: Exit code of each; None for one that had to be killed.
        words: The last lines of the first that failed, or of the first.
        seconds: How long all took.
    """

    codes: list[int | None]
    words: list[str]
    seconds: float

    @property
    def error(self) -> str | None:
        """What went wrong in a line; None where nothing did."""
        if all(code == 0 for code in self.codes):
            return None
        if None in self.codes:
            return f"did not end within {self.seconds:.0f} s"
        # What a traceback ends with is the error, and what it began with may be its cause; torch
        # warns behind it.
        errors = list(filter(_ERROR.match, self.words))
        said = errors or self.words or ["said nothing"]
        same = not errors or errors[0] == errors[-1]
        return said[-1] if same else f"{said[-1]} (first: {errors[0]})"


def launched(command: Sequence[str], world: int, limit: float, folder: Path, name: str) -> Ended:
    """
    Run a command once for each rank, under torchrun's environment, and wait for all or the limit.

    A rank that fails takes the others with it after a moment; only what was started here is ended.

    Args:
        command: What to run.
        world: How many ranks.
        limit: Seconds.
        folder: Where each rank's words go.
        name: What their files are called.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.monotonic()
    ranks: list[subprocess.Popen[bytes]] = []
    paths = [folder / f"{name}.{rank}.txt" for rank in range(world)]
    for rank, path in enumerate(paths):
        place = {
            "OMP_NUM_THREADS": "1",  # as torchrun has it
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        with path.open("wb") as out:
            ranks.append(
                subprocess.Popen(
                    [*command],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=place,
                    start_new_session=True,
                )
            )
    until = began + limit
    while time.monotonic() < until and any(rank.poll() is None for rank in ranks):
        if any(rank.poll() not in (None, 0) for rank in ranks):
            until = min(until, time.monotonic() + 3.0)
        time.sleep(0.05)
    failed = [n for n, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
    codes: list[int | None] = []
    for process in ranks:
        code = process.poll()
        if code is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # One that was ended because another had failed is not what failed.
        codes.append(code if code is not None else (None if not failed else -signal.SIGKILL))
    told = paths[failed[0] if failed else 0].read_text(encoding="utf-8", errors="replace")
    return Ended(codes, last_words(told), time.monotonic() - began)


# The run


def _runs(modes: Sequence[str], cells: Sequence[str]) -> list[tuple[str, list[str]]]:
    """
    Mode and cells of each start of all ranks.

    Megatron's local and full-iteration graphs are made once in a process, so each cell has one of
    its own.
    """
    runs: list[tuple[str, list[str]]] = []
    for mode in modes:
        if mode in ("local", "full_iteration"):
            runs += [(mode, [cell]) for cell in cells]
        else:
            runs.append((mode, list(cells)))
    return runs


MODES = (OURS, "none", "transformer_engine", "local", "full_iteration")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m qeffect.gpu_runtime.lab.commands.peers")
    parser.add_argument("--cells", nargs="+", default=[SMALL, LARGE], metavar="CELL")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES, metavar="MODE")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="S", help="of each mode; twice for ours"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--steps", type=int, default=10, metavar="N")
    parser.add_argument("--native-steps", type=int, default=3, metavar="N")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, metavar="F")
    parser.add_argument("--commit", metavar="SHA")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def _asked(args: argparse.Namespace) -> Asked:
    for cell in args.cells:
        layers, _, microbatches = cell.rpartition("-m")
        if layers not in LAYERS or not microbatches.isdecimal() or not int(microbatches):
            raise UnusableError(
                f"--cells: expected one of {', '.join(LAYERS)} and microbatches, as in {SMALL}; "
                f"found {cell!r}"
            )
    if min(args.rounds, args.steps, args.native_steps) < 1 or args.limit <= 0:
        raise UnusableError("--rounds, --steps, --native-steps and --limit must be positive")
    return Asked(
        cells=args.cells,
        rounds=args.rounds,
        steps=args.steps,
        native_steps=args.native_steps,
        device=args.device,
        profile=not args.no_profile,
    )


def _require(args: argparse.Namespace) -> None:
    """
    Refuse what cannot run here, before anything is started.

    Raises:
        UnusableError: Megatron-core, a GPU or Transformer Engine is missing.
    """
    theirs = [mode for mode in args.modes if mode != OURS]
    if theirs and args.device == "cpu":
        raise UnusableError(f"--modes {theirs[0]} needs --device cuda; on a CPU take --modes ours")
    if theirs and importlib.util.find_spec("megatron") is None:
        raise UnusableError(
            f"--modes {theirs[0]} needs Megatron-core, which is not installed: pip install "
            f"--no-deps {MEGATRON}; or take --modes ours"
        )
    if args.device == "cuda":
        require_device("--device cpu --modes ours runs without one")
        if torch.cuda.device_count() < PP:
            raise UnusableError(
                f"{PP} GPUs are needed, one a rank; found {torch.cuda.device_count()}"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """
    Start every mode in turn, or, inside one, measure it.

    Returns:
        0 where every row of ours has the bits that it owes, and gradients close to native's where
        its schedule is another; 1 where one has not, or none was measured; 2 where nothing can be
        run.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        asked = _asked(args)
        if args.mode is not None:
            _child(args, asked)
            return 0
        require_place(args.out)
        _require(args)
        place = environment(args.commit)
    except UnusableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    raw: dict[str, Any] = {"rows": rows, "refusals": {}, "processes": []}
    configuration = {**attrs.asdict(asked), "modes": args.modes, "limit": args.limit}
    report = Report("peers", args.out, place, configuration, raw)
    with tempfile.TemporaryDirectory(prefix="qeffect-peers-") as folder:
        for mode, cells in _runs(args.modes, asked.cells):
            print(f"{mode}: {', '.join(cells)}", file=sys.stderr, flush=True)
            _start(args, mode, cells, Path(folder), raw)
            report.save()
    derived = report.finish()["derived"]
    print("\n".join(report.lines()))
    own = [row for row in derived["rows"] if row["side"] in ("native", "replays", "one launch")]
    return 0 if own and all(map(owed, own)) else 1


def _start(
    args: argparse.Namespace, mode: str, cells: Sequence[str], folder: Path, raw: dict[str, Any]
) -> None:
    """Run one mode, and take up the rows that it has written, however it ended."""
    result = folder / "rows.json"
    result.unlink(missing_ok=True)
    numbers = ["--rounds", args.rounds, "--steps", args.steps, "--native-steps", args.native_steps]
    command = [sys.executable, "-m", "qeffect.gpu_runtime.lab.commands.peers", "--mode", mode]
    command += ["--cells", *cells, "--folder", str(folder), "--device", args.device]
    command += [str(word) for word in numbers] + ["--no-profile"] * args.no_profile
    limit = args.limit * (2 if mode == OURS else 1)
    ended = launched(command, PP, limit, folder, "words")
    found: dict[str, Any] = {"rows": [], "refusals": {}}
    if result.exists():
        found = json.loads(result.read_text(encoding="utf-8"))
    raw["rows"] += found["rows"]
    raw["refusals"].update(found["refusals"])
    if ended.error is not None:
        seen = {(row["cell"], row["side"], row["schedule"]) for row in found["rows"]}
        missing = [row for row in _wanted(mode, cells, args.device) if row not in seen]
        # The first that is missing failed; what would have followed it was not run.
        raw["rows"] += [_failed(*row, ended.error) for row in missing[:1]]
    raw["processes"].append(
        {
            "mode": mode,
            "cells": list(cells),
            "codes": ended.codes,
            "seconds": round(ended.seconds, 2),
            "words": ended.words if ended.error is not None else [],
        }
    )


def _wanted(mode: str, cells: Sequence[str], device: str) -> list[tuple[str, str, str]]:
    """Cell, side and schedule of each row of a mode, in the order in which they are measured."""
    if mode != OURS:
        side = EAGER if mode == "none" else f"megatron {mode}"
        return [(cell, side, "il") for cell in cells]
    sides = ("replays", "one launch") if device == "cuda" else ("replays",)
    return [
        row
        for cell in cells
        for row in [
            (cell, "native", "il"),
            *((cell, side, schedule) for schedule in ("il", "zbv") for side in sides),
        ]
    ]


def _failed(cell: str, side: str, schedule: str, error: str) -> dict[str, Any]:
    return {"cell": cell, "side": side, "schedule": schedule, "error": error}


def _child(args: argparse.Namespace, asked: Asked) -> None:
    """One rank of one mode; ends the process, since groups make an orderly end hang."""
    code = 1
    try:
        _measure(args, asked)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _measure(args: argparse.Namespace, asked: Asked) -> None:
    """Every row of a mode; rank 0 writes them down one by one."""
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    found: dict[str, Any] = {"rows": [], "refusals": {}}
    rank = int(os.environ["RANK"])

    def done(row: dict[str, Any]) -> None:
        found["rows"].append(row)
        save()

    def save() -> None:
        if rank == 0:
            write_json(args.folder / "rows.json", found)

    if args.mode == OURS:
        ours(join(args.device), asked, args.folder, done)
    else:
        from ..sides import megatron

        if args.mode == "none":
            found["refusals"].update(megatron.delayed())
            save()
        megatron.measure(args.mode, asked, args.folder, done)


if __name__ == "__main__":
    raise SystemExit(main())
