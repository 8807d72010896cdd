"""
``qeffect runtime report probes``: check the documentation's statements on this machine.

Each statement about Transformer Engine, or about the cost of checking its graphs, has a probe. The
probes answer four questions. Does the attention backward of short sequences fail? To which dI
(dgrad) do the library's graphs bind a weight gradient (dW)? How long does it take to compare every
memory address that the graphs recorded? Do the library's graphs compute interleaved stages
correctly (`interleaved`)?
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from qeffect.cli.command import Outcome, Progress
from qeffect.report import UnusableError

from ...runtime import Runtime, RuntimeConfig, mode_on
from ..comparisons import interleaved
from ..comparisons.cases import Case
from ..comparisons.sides import fresh_stages, record
from ..reports.report import Report, add_report_options, environment
from ..runner.device import require_device
from ..runner.processes import first_line
from ..statistics.summary import exact_median

__all__ = ["add_probes_arguments", "find_pairing", "run_probes", "sanitizer_findings"]

PROBES = ("attention", "addresses", "interleaved")
TIMEOUT_S = 180.0
LOOKS = 2000

#: Sequence lengths, each with or without cuDNN's fused attention; `docs/limits.md` states the
#: result of all three.
ATTENTION = ((64, True), (64, False), (128, True))

#: The lines that bind dW in the library's `_make_graphed_callables`. The chunk's counter advances
#: with each captured dgrad, and a dW gets the graph just before the counter's position.
PAIRING = (
    "per_callable_bwd_idx -= _num_layers_per_chunk[m_chunk]",
    "bwd_dw_graph = bwd_dw_graphs[per_callable_bwd_idx]",
    "bwd_idx[m_chunk] += 1",
)


def add_probes_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `probes`."""
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device (default cuda); cpu tries out the command with the reference backend, and "
        "checks no statement about Transformer Engine",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PROBES,
        default=list(PROBES),
        metavar="WHAT",
        help=f"probes to run: {', '.join(PROBES)} (default all)",
    )
    add_report_options(parser)


def run_probes(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Run the probes and write the report; no result of a probe counts as a failure.

    Raises:
        UnusableError: This machine cannot run the probes.
    """
    if args.device == "cuda":
        require_device("--device cpu runs the probes over the reference backend")
    elif args.only == ["interleaved"]:
        raise UnusableError(
            "--only interleaved needs --device cuda, because it probes the library's graphs; add "
            "another probe, or use a GPU"
        )
    report = Report(
        "probes",
        args.out,
        environment(args.commit, args.out),
        {"device": args.device, "only": args.only},
        {"attention": [], "pairing": find_pairing(), "addresses": None, "interleaved": []},
    )
    report.save()
    for sequence, fused in ATTENTION if "attention" in args.only else ():
        progress(f"Probing: attention of {sequence} tokens")
        report.raw["attention"].append(_attention(sequence, fused, args.device, None))
        report.save()
    tool = _sanitizer()
    if args.device == "cuda" and tool is not None and "attention" in args.only:
        report.raw["attention"].append(_attention(64, True, args.device, tool))
    if "addresses" in args.only:
        report.raw["addresses"] = _ask_process(["addresses", args.device])
    if args.device == "cuda" and "interleaved" in args.only:
        progress("Probing: interleaved stages under the library's graphs")
        report.save()
        report.raw["interleaved"] = _sides()
    finished = report.finish()
    return Outcome("accepted", {"derived": finished["derived"]}, report.lines())


def find_pairing(source: str | None = None) -> dict[str, Any]:
    """
    Read how the installed Transformer Engine binds a weight gradient (dW) in its graphs, without
    importing the library.

    Args:
        source: The source text to read instead of the installed file.

    Returns:
        The version, the digest of the file, and the line number of each statement of `PAIRING`. The
        line number is None for a missing statement.
    """
    found: dict[str, Any] = {"version": None, "sha256": None, "lines": dict.fromkeys(PAIRING)}
    spec = importlib.util.find_spec("transformer_engine") if source is None else None
    if spec is not None and spec.submodule_search_locations:
        path = Path(next(iter(spec.submodule_search_locations))) / "pytorch" / "graph.py"
        if path.exists():
            source = path.read_text(encoding="utf-8")
            found["version"] = version("transformer_engine")
    if source is not None:
        found["sha256"] = hashlib.sha256(source.encode()).hexdigest()
        lines = [line.strip() for line in source.splitlines()]
        for statement in PAIRING:
            if statement in lines:
                found["lines"][statement] = lines.index(statement) + 1
    return found


def sanitizer_findings(text: str) -> dict[str, Any]:
    """The findings of compute-sanitizer: the number of invalid writes, and their kernels."""
    found = re.findall(r"Invalid __global__ write of size (\d+) bytes?\s*\n=+\s+at (\S+)", text)
    kernels = sorted({re.split(r"[+(]", kernel)[0] for _, kernel in found})
    return {
        "invalid_writes": len(found),
        "write_bytes": sorted({int(size) for size, _ in found}),
        "kernels": kernels,
    }


def _sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )


def _attention(sequence: int, fused: bool, device: str, tool: str | None) -> dict[str, Any]:
    """Run a few steps at one sequence length, in a process that may crash."""
    words = ["attention", device, str(sequence), "eager" if tool else "captured"]
    answer = _ask_process(words, fused=fused, tool=tool)
    return {
        "sequence": sequence,
        "fused_attention": fused,
        "how": "eager, compute-sanitizer" if tool else words[-1] if device == "cuda" else "eager",
        **answer,
    }


def _ask_process(
    words: Sequence[str], *, fused: bool = True, tool: str | None = None
) -> dict[str, Any]:
    """Run a probe in a fresh process; a crash of that process counts as a result too."""
    command = [sys.executable, "-m", "qeffect.gpu_runtime.lab.commands.probes", *words]
    if tool is not None:
        command = [tool, "--tool", "memcheck", "--print-limit", "1000", *command]
    surroundings = {**os.environ} if fused else {**os.environ, "NVTE_FUSED_ATTN": "0"}
    if words[0] == "side":
        surroundings["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, env=surroundings
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {TIMEOUT_S:g} s"}
    answer: dict[str, Any] = {"error": None}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if lines:
        answer = json.loads(lines[-1])
    else:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        answer["error"] = said[:300]
    if tool is not None:
        answer.update(sanitizer_findings(done.stdout + done.stderr))
    return answer


def _sides() -> list[dict[str, Any]]:
    """
    Run all sides at once, each in its own process, and compare the later sides with the first side.
    """
    with ThreadPoolExecutor(len(interleaved.GRAPH_USES)) as pool:
        answers = list(
            pool.map(lambda side: _ask_process(["side", side.name]), interleaved.GRAPH_USES)
        )
    reference = answers[0].get("digests", {})
    return [
        {
            "name": side.name,
            "what": side.what,
            "breaks": side.breaks,
            "error": answer["error"],
            "not_finite": answer.get("not_finite"),
            **interleaved.differences(reference, answer.get("digests", {})),
        }
        for side, answer in zip(interleaved.GRAPH_USES, answers, strict=True)
    ]


def _case(sequence: int) -> Case:
    return Case(
        f"sequence {sequence}",
        "ScheduleZBVZeroBubble",
        1,
        4,
        "accumulate",
        hidden=128,
        ffn=256,
        heads=2,
        sequence=sequence,
        steps=3,
    )


def _answer(words: Sequence[str]) -> dict[str, Any]:
    """Run a probe in the child process, and return its result."""
    torch.set_num_threads(1)
    if words[0] == "side":
        (chosen,) = (side for side in interleaved.GRAPH_USES if side.name == words[1])
        try:
            return {"error": None, **interleaved.record_side(chosen)}
        except Exception as error:
            return {"error": first_line(error)}
    what, device, *rest = words
    backend = "transformer-engine" if device == "cuda" else "reference"
    if what == "attention":
        try:
            side = rest[1] if device == "cuda" else "eager"
            record(_case(int(rest[0])), side, backend, device)
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            # An illegal memory access is what the probe looks for.
            return {"error": first_line(error)}
        return {"error": None}
    return {"error": None, **_time_addresses(backend, device)}


def _time_addresses(backend: str, device: str) -> dict[str, Any]:
    """Host time, in microseconds, to compare every memory address recorded in a stage's graphs."""
    case = _case(128)
    stages = fresh_stages(case, backend, device=device)
    runtime = Runtime(stages, case.order(), RuntimeConfig(mode=mode_on(device), readers=True))
    memory = next(iter(runtime.memories.values()))
    look = memory.address_probe()
    spent = []
    for _ in range(LOOKS):
        started = time.perf_counter()
        look()
        spent.append(1e6 * (time.perf_counter() - started))
    return {
        "looks": LOOKS,
        "addresses": len(memory.addresses()),
        "median_us": round(exact_median(spent), 3),
        "min_us": round(min(spent), 3),
    }


if __name__ == "__main__":
    print(json.dumps(_answer(sys.argv[1:])), flush=True)
