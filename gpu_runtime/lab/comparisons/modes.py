"""
Choose modes of a framework that cover all pairs of options, and run these modes in processes.

A row (one mode) has a value for each factor, such as the schedule or the way in which messages are
posted. A *cover* is a set of rows with every pair of values that occurs in a legal row. Each row
trains a small model twice, with a learning rate above zero: without a guard, and under a guard that
only reports violations. The reference of a row is the same model in the framework's plainest mode.
Each rank runs `sides/modes.py`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product
from pathlib import Path
from typing import Any

import attrs

import qeffect
from qeffect.report import UnusableError

from ..statistics.modes import numbers_of

__all__ = ["FRAMEWORKS", "Framework", "Place", "Row", "cover", "pairs", "rows_of", "run_rows"]

Row = Mapping[str, Any]
"""One mode: a value for each factor."""

_RANK = "qeffect.gpu_runtime.lab.sides.modes"
#: Number of orders of the rows that `cover` tries.
_ORDERS = 4
#: Seconds for ranks to import the framework and to meet.
_IMPORT_S = 240.0
#: Lines that the progress quotes of each rank of a failed row.
_LINES = 12


def pairs(row: Row) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every pair of values of a row (one value of each factor), each value with the name of its
    factor."""
    return set(combinations(row.items(), 2))


def cover(
    factors: Mapping[str, Sequence[Any]], legal: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """
    Choose rows that together contain every pair of values that occurs in a legal row. A row is one
    value of each factor.

    Each next row is the row that adds the most missing pairs; among equals, the first. Several
    orders of the rows, drawn from fixed seeds, are tried, and the shortest choice is taken. The
    choice of rows is therefore the same in every run.
    """
    names = tuple(factors)
    every = [dict(zip(names, values, strict=True)) for values in product(*factors.values())]
    had = [(row, pairs(row)) for row in every if legal(row)]
    choices = []
    for seed in range(_ORDERS):
        chosen: list[Row] = []
        missing = set[Any]().union(*(own for _, own in had))
        while missing:
            row, own = max(had, key=lambda each: len(each[1] & missing))
            chosen.append(row)
            missing -= own
        choices.append(chosen)
        random.Random(seed).shuffle(had)
    return min(choices, key=len)


@attrs.frozen
class Framework:
    """
    The modes of a framework.

    Args:
        name: Name of the framework.
        factors: The values of each factor, the plainest first.
        legal: Function that tells whether the framework offers a combination of values.
        numbers: Factors that change numbers even in a correct run. A row (one value of each factor)
            and its reference have the same values of these factors.
        beyond: Further rows, each given by its differences from the row of plainest values: rows
            that the framework itself refuses, and rows whose known result depends on more than two
            values.
    """

    name: str
    factors: Mapping[str, Sequence[Any]]
    legal: Callable[[Row], bool]
    numbers: Sequence[str]
    beyond: Sequence[Row] = ()

    def plainest(self, row: Row) -> Row:
        """
        The reference of a row (one value of each factor): the legal combination that is nearest to
        each factor's first, plainest value.
        """
        places = {name: [(0, row[name])] if name in self.numbers else [*enumerate(values)]
                  for name, values in self.factors.items()}  # fmt: skip
        near = sorted(product(*places.values()), key=lambda each: sum(n for n, _ in each))
        found = [dict(zip(places, (value for _, value in each), strict=True)) for each in near]
        return next(filter(self.legal, found))


_SINGLE = ("GPipe", "1F1B")
_LAYOUTS = ("pp2", "pp4", "pp2 dp2")


def _torch(versions: Mapping[str, str], device: str) -> Framework:
    release = tuple(int(part) for part in versions["torch"].split(".")[:2])
    wide = device == "cpu"

    def legal(row: Row) -> bool:
        if row["layout"] == "pp2 dp2" and row["shapes"] == "inferred" and row["schedule"] != "1F1B":
            return False  # DistributedDataParallel ends in an assertion: rows of their own below
        plain = not row["defer_pp_recv"] and row["max_outstanding_sends"] is None
        return plain or row["schedule"] not in _SINGLE

    factors = {
        "schedule": ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble",
                     "ZBVZeroBubble", "DualPipeV"),
        "layout": _LAYOUTS if wide else _LAYOUTS[:1],
        "defer_pp_recv": (False, True) if release >= (2, 13) else (False,),
        "queues": ("pair", *(["edge"] if release >= (2, 15) else
                             ["direction"] if release == (2, 14) else [])),
        "max_outstanding_sends": (None, 2) if release >= (2, 15) else (None,),
        "shapes": ("given", "inferred"),
        "recompute": (False, True),
        "walks": (1, 2),
        "scale_grads": (True, False),
    }  # fmt: skip
    beyond: list[Row] = [
        {"layout": "pp2 dp2", "shapes": "inferred", "schedule": name}
        for name in ("GPipe", "Interleaved1F1B")
        if wide
    ]
    if release >= (2, 13):
        beyond.append({"schedule": "InterleavedZeroBubble", "defer_pp_recv": True})
    return Framework("torch", factors, legal, ("layout", "walks", "scale_grads"), beyond)


def _megatron(versions: Mapping[str, str], device: str) -> Framework:
    return _MEGATRON_GPU if device == "cuda" else _MEGATRON_CPU


def _interleaved(row: Row) -> bool:
    return row["vpp"] == 2 or (row["messages"] in ("plain", "batched") and row["group"] == 1)


_MEGATRON_CPU = Framework(
    "megatron",
    {
        "layout": _LAYOUTS,
        "vpp": (1, 2),
        "messages": ("plain", "batched", "overlapped", "overlapped, flushed"),
        "group": (1, 2),
        "variable_seq_lengths": (False, True),
        "deallocate": (False, True),
        "reduction": ("at the end", "overlapped", "aligned"),
        "optimizer": ("adam", "distributed", "distributed, gathered"),
    },
    _interleaved,
    ("layout",),
    (
        {"messages": "overlapped"},
        {"vpp": 2, "delay_wgrad_compute": True},
        {"vpp": 2, "messages": "batched"},
        {"vpp": 2, "messages": "batched", "variable_seq_lengths": True},
    ),
)
_MEGATRON_GPU = Framework(
    "megatron",
    {
        "graphs": ("none", "local", "transformer_engine", "full_iteration"),
        "vpp": (1, 2),
        "messages": ("plain", "batched", "overlapped"),
        "scaling": ("delayed", "current", "block"),
        "fp8_param": (False, True),
        "reduction": ("at the end", "overlapped"),
        "optimizer": ("adam", "distributed", "distributed, gathered"),
        "layout": ("pp2",),
        "group": (1,),
    },
    lambda row: (
        _interleaved(row)
        and (row["optimizer"] != "distributed, gathered" or row["reduction"] != "at the end")
        and (not row["fp8_param"] or row["optimizer"] != "adam")
    ),
    ("scaling", "fp8_param", "layout"),
)


#: Schedules that split backwards, which compiled layers do not allow.
_SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_TORCHTITAN = Framework(
    "torchtitan",
    {
        "schedule": ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble",
                     "ZBVZeroBubble", "DualPipeV"),
        "layout": _LAYOUTS[:2],
        "recompute": ("none", "selective", "full"),
        "compile": ("off", "aot_eager", "inductor"),
        "walks": (1, 2),
        "validate": (False, True),
        "loss": ("whole", "chunked"),
    },
    lambda row: (
        (row["compile"] == "off" or row["schedule"] not in _SPLIT)
        and (not row["validate"] or row["schedule"] != "DualPipeV")
    ),
    ("layout", "compile", "walks", "loss"),
    (
        {"schedule": "ZBVZeroBubble", "compile": "inductor"},
        {"schedule": "DualPipeV", "validate": True},
    ),
)  # fmt: skip


def _torchtitan(versions: Mapping[str, str], device: str) -> Framework:
    return _TORCHTITAN


FRAMEWORKS: Mapping[str, Callable[[Mapping[str, str], str], Framework]] = {
    "torch": _torch,
    "megatron": _megatron,
    "torchtitan": _torchtitan,
}
"""
For each framework, by name: a function that returns the framework's modes, from the installed
versions and the device.
"""


def rows_of(framework: Framework) -> list[dict[str, Any]]:
    """The rows to run: references, the cover, and the rows beyond the cover."""
    chosen = cover(framework.factors, framework.legal)
    plain = {name: values[0] for name, values in framework.factors.items()}
    probes = [{**plain, **row} for row in framework.beyond]
    references: list[Row] = []
    for row in [*chosen, *probes]:
        if (own := framework.plainest(row)) not in references:
            references.append(own)
    return [
        {"kind": kind, "row": dict(row), "numbers": numbers_of(row, framework.numbers)}
        for kind, rows in (("reference", references), ("cover", chosen), ("probe", probes))
        for row in rows
    ]


@attrs.frozen
class Place:
    """
    Where and how ranks run.

    Args:
        python: The Python interpreter that runs the ranks.
        packages: A folder of packages that the ranks import before others; None for no folder.
        device: ``cpu`` or ``cuda``.
        limit_s: Time limit in seconds per row (one combination of values); the first row of a
            process has 60 s more.
    """

    python: str = sys.executable
    packages: Path | None = None
    device: str = "cpu"
    limit_s: float = 60.0

    def environment(self, rank: int, world: int) -> dict[str, str]:
        """The environment variables of a rank."""
        folders = [str(Path(qeffect.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        if self.packages is not None:
            folders.insert(0, str(self.packages.resolve()))
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "OMP_NUM_THREADS": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "HF_HUB_OFFLINE": "1",
        }

    def versions(self, framework: str) -> dict[str, str]:
        """
        The versions of the packages that the ranks import.

        Raises:
            UnusableError: The Python interpreter of the ranks cannot import the framework.
        """
        command = [self.python, "-m", _RANK, "versions", framework, self.device]
        done = subprocess.run(
            command, env=self.environment(0, 1), capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UnusableError(f"{self.python} cannot import {framework}: {said}")
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return found


def run_rows(
    place: Place,
    framework: str,
    rows: Sequence[Row],
    note: Callable[[str], None] = lambda text: None,
    take: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
    *,
    at_once: int = 1,
) -> list[dict[str, Any]]:
    """
    Run rows (each one value of every factor), grouped by number of ranks; return each row with its
    ranks' results.

    If a row fails or does not end in time, the ranks of that row end, and fresh ranks run the next
    rows. On GPUs each row has its own ranks, because Megatron-core keeps graphs and FP8 state in
    classes.

    Args:
        place: Where the ranks run.
        framework: Name of the framework.
        rows: The rows to run, in the form that `rows_of` returns.
        note: Function that is called with each progress line, and with the last lines of ranks that
            failed.
        take: Function that is called with the results so far, in the order of the rows, whenever a
            group of ranks has ended.
        at_once: Number of groups of ranks that run side by side.
    """
    said: dict[int, dict[str, Any]] = {}
    told = threading.Lock()

    def run_part(world: int, todo: Sequence[int]) -> None:
        while todo:
            own = todo[:1] if place.device == "cuda" else todo
            found, last = _launch(place, framework, [rows[index] for index in own], world)
            with told:
                for index, one in zip(todo, found, strict=False):
                    said[index] = {**rows[index], "ranks": world, **one}
                take([said[index] for index in sorted(said)])
                note(f"{framework}, {world} ranks: {len(said)} of {len(rows)} rows{last}")
            todo = todo[len(found) :]

    worlds: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        worlds.setdefault(_ranks(row["row"]), []).append(index)
    parts = [(world, own[n::at_once]) for world, own in sorted(worlds.items())
             for n in range(at_once)]  # fmt: skip
    with ThreadPoolExecutor(at_once) as threads:
        for part in [threads.submit(run_part, *part) for part in parts]:
            part.result()
    return [said[index] for index in range(len(rows))]


def _ranks(row: Row) -> int:
    sizes = [int(part.lstrip("pd")) for part in row["layout"].split()]
    return sizes[0] * (sizes[1] if len(sizes) > 1 else 1)


def _launch(
    place: Place, framework: str, rows: Sequence[Row], world: int
) -> tuple[list[dict[str, Any]], str]:
    """
    Run rows in order on fresh ranks, until all are done or a row fails. Return the results of these
    rows, and the last lines that the ranks printed if a row failed.
    """
    with tempfile.TemporaryDirectory(prefix="qeffect-modes-") as name:
        folder = Path(name)
        asked = {"framework": framework, "device": place.device, "rows": list(rows)}
        (folder / "rows.json").write_text(json.dumps(asked))
        texts = [folder / f"rank{rank}.txt" for rank in range(world)]
        outs = [folder / f"rank{rank}.jsonl" for rank in range(world)]
        ranks = []
        for rank in range(world):
            with texts[rank].open("w") as out:
                command = [place.python, "-m", _RANK, "run", str(rank), str(world), name]
                environment = place.environment(rank, world)
                ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
        try:
            answers = _await(ranks, outs, len(rows), place.limit_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        done = [_merged(each) for each in zip(*answers, strict=False)]
        if len(done) < len(rows) and not (done and "failed" in done[-1]):
            last = next((each[len(done)] for each in answers if len(each) > len(done)), {})
            codes = [process.returncode for process in ranks]
            text = last.get("failed") or f"no answer within {place.limit_s:g} s: {codes}"
            done.append({"failed": text, "guarded": bool(last.get("guarded"))})
        return done, _last_lines(texts) if "failed" in done[-1] else ""


def _last_lines(texts: Sequence[Path]) -> str:
    """The last lines that each rank printed, indented."""
    found = ""
    for rank, text in enumerate(texts):
        last = text.read_text(errors="replace").splitlines()[-_LINES:]
        found += "".join(f"\n  rank {rank}: {line}" for line in last)
    return found


def _await(
    ranks: Sequence[subprocess.Popen[bytes]], outs: Sequence[Path], many: int, limit_s: float
) -> list[list[dict[str, Any]]]:
    """
    Wait until every rank has answered for every row, a rank has ended, or a row exceeds its time
    limit.
    """
    last, seen = time.monotonic(), -1
    grace: float | None = None
    while True:
        answers = [
            [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]
            if out.exists()
            else []
            for out in outs
        ]
        if (count := sum(map(len, answers))) != seen:
            seen, last = count, time.monotonic()
        allowed = limit_s if all(answers) else _IMPORT_S
        answers = [said[1:] for said in answers]  # without the line of a rank that is ready
        ended = any(process.poll() is not None for process in ranks)
        if ended and grace is None:  # the others may still say what they saw
            grace = time.monotonic() + 5.0
        late = time.monotonic() - last > allowed
        over = grace is not None and time.monotonic() > grace
        if late or over or all(process.poll() is not None for process in ranks):
            return answers
        if min(map(len, answers)) == many:
            return answers
        time.sleep(0.05)


def _merged(each: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge all ranks' results of a row (one combination of values)."""
    said = list(each)
    if failed := [one for one in said if "failed" in one]:
        first = min(failed, key=lambda one: one["at"])
        return {"failed": first["failed"], "guarded": first["guarded"]}
    found: dict[str, Any] = {"seconds": max(one["seconds"] for one in said)}
    for side in ("plain", "guarded"):
        parts = [one[side] for one in said]
        losses = [part["losses"] for part in parts if any(part["losses"])]
        found[side] = {
            "losses": [sum(map(sum, step)) / len(losses) for step in zip(*losses, strict=True)],
            "bits": {
                what: [
                    _digest(step) for step in zip(*(p["bits"][what] for p in parts), strict=True)
                ]
                for what in parts[0]["bits"]
            },
        }
    found["violations"] = sorted(v for one in said for v in one["guarded"]["violations"])
    return found


def _digest(parts: Iterable[Mapping[str, str]]) -> str:
    """One digest of the digests of all tensors, regardless of which rank has them."""
    from hashlib import sha256

    named = {name: value for part in parts for name, value in part.items()}
    return sha256(json.dumps(sorted(named.items())).encode()).hexdigest()[:12]
