"""
``qeffect runtime report streams``: count stale reads of one-way and two-way handoffs.

The handoff between streams has two halves: the graph stream waits for the caller, and then the
caller waits for the graph stream. The table counts stale reads with both halves (two-way) and with
the first half only (one-way).

A producer graph runs on the runtime's own graph stream. The graph begins with a chain of products
that is long enough to keep the host ahead. Then the graph updates an output, a parameter, an amax
history with its scale, and a quantized copy of the parameter. A consumer graph on the caller's
stream copies all of these tensors. Both graphs use `qeffect.gpu_runtime.step.streams` with the
calls of a guarded action, in the same order. The graph stream waits for the caller, replays, and
records an event at its end. The caller waits for that event. The one-way handoff omits the last
wait; only this check and the tests use a one-way handoff. A third kind, `graph-event`, records no
event after the replay; the caller then waits for the event that was captured inside the graph.

A check is *stale* if the consumer's copy differs from the producer's final values, once the device
is idle. A check is *vacuous* if the producer changed nothing, so that a stale read could not be
seen.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qeffect.cli.command import Outcome, Progress, refuse_unused
from qeffect.report import UnusableError

from ...step.memory.numerical_state import same_bits
from ..reports.report import Report, add_report_options, environment
from ..runner.device import require_device
from ..runner.processes import ChildError, ChildProcess, answer

KINDS = ("output", "parameter", "scaling", "cache")
HANDOFFS = ("one-way", "two-way", "graph-event")
TIMEOUT_S = 300.0


class Producer:
    """
    Fixed buffers, and the kernels that change the buffers from one state to the next.

    Args:
        device: The device of the buffers.
        width: Width of the square matrices that are multiplied.
        depth: Number of matrix products in the chain.
    """

    def __init__(self, device: torch.device, width: int, depth: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.depth = depth
        self.token = torch.zeros((), device=device)
        self.weight = (torch.randn(width, width, generator=generator) / width**0.5).to(device)
        self.state: dict[str, Tensor] = {
            "output": torch.zeros(width, width, device=device),
            "parameter": torch.randn(width, width, generator=generator).to(device),
            "scaling": torch.zeros(16, device=device),
            "cache": torch.zeros(width, width, device=device, dtype=torch.float8_e4m3fn),
        }

    def run(self) -> None:
        """Run one step; every value that it writes depends on the whole chain of products."""
        state = self.state
        product = self.weight
        for _ in range(self.depth):
            product = product @ self.weight
        # Trigonometry keeps every buffer bounded, and different after every step.
        state["output"].copy_(product + self.token.sin())
        state["parameter"].add_(3 * state["output"]).cos_()
        state["scaling"].copy_(state["scaling"].roll(1))
        state["scaling"][0] = state["parameter"].abs().mean()
        state["cache"].copy_(state["parameter"] / state["scaling"].amax())


def check_handoff(handoff: str, checks: int, *, width: int, depth: int) -> dict[str, Any]:
    """
    Run both graphs, and compare the consumer's copies with the producer's final values.

    Args:
        handoff: Kind of handoff, one of `HANDOFFS`.
        checks: Number of replays to check.
        width: Width of the producer's matrices.
        depth: Number of the producer's matrix products.

    Returns:
        Counts of stale and vacuous checks, and the producer's duration.
    """
    from ...backends.devices import placed
    from ...step.streams import GraphStream

    device = placed()
    stream = GraphStream(device, two_way=handoff != "one-way")
    producer = Producer(device, width, depth)
    read = {kind: torch.zeros_like(tensor) for kind, tensor in producer.state.items()}
    produce, consume = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with stream.scope():
        producer.run()
        stream.synchronize()
        produce.capture_begin()
        producer.run()
        stream.record_tail()
        produce.capture_end()
    caller = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stale_by_kind = dict.fromkeys(KINDS, 0)
    stale = vacuous = 0
    started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    producer_ms: list[float] = []
    host_ms: list[float] = []
    with torch.cuda.stream(caller):
        consume.capture_begin()
        for kind in KINDS:
            read[kind].copy_(producer.state[kind])
        consume.capture_end()
        torch.cuda.synchronize()
        for number in range(checks):
            before = {kind: tensor.clone() for kind, tensor in producer.state.items()}
            torch.cuda.synchronize()
            at = time.perf_counter()
            producer.token.fill_(float(number + 1))
            stream.wait_for_caller()
            with stream.scope():
                started.record()
                produce.replay()
                ended.record()
                if handoff != "graph-event":
                    stream.record_tail()
            stream.caller_waits()
            consume.replay()
            host_ms.append(1e3 * (time.perf_counter() - at))
            torch.cuda.synchronize()
            producer_ms.append(started.elapsed_time(ended))
            differs = [k for k in KINDS if not same_bits(read[k], producer.state[k])]
            stale += bool(differs)
            for kind in differs:
                stale_by_kind[kind] += 1
            vacuous += any(same_bits(before[k], producer.state[k]) for k in KINDS)
    return {
        "handoff": handoff,
        "checks": checks,
        "stale": stale,
        "stale_by_kind": stale_by_kind,
        "vacuous": vacuous,
        "producer_ms": round(sorted(producer_ms)[checks // 2], 4),
        "host_ms": round(sorted(host_ms)[checks // 2], 4),
    }


def _fresh_check(arguments: dict[str, Any]) -> dict[str, Any]:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("expected a fresh process, found one that already has a device context")
    return check_handoff(**arguments)


def add_streams_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `streams`."""
    parser.add_argument(
        "--processes", type=int, metavar="N", help="processes per kind of handoff (default 3)"
    )
    parser.add_argument("--checks", type=int, metavar="N", help="checks per process (default 200)")
    parser.add_argument(
        "--width",
        type=int,
        default=2048,
        metavar="N",
        help="width of the producer's matrices (default 2048)",
    )
    parser.add_argument(
        "--depth",
        type=int,
        default=32,
        metavar="N",
        help="length of the producer's chain of matrix products (default 32)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="short trial run: 1 process per kind of handoff, with 20 checks",
    )
    add_report_options(parser)


def run_streams(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Check the handoffs and write the report.

    The outcome is `refused` if the two-way handoff read stale data, or if a check was vacuous.

    Raises:
        UnusableError: This machine cannot run the check, or a process did not answer.
    """
    if args.quick:
        refuse_unused(
            args,
            ["--processes", "--checks"],
            "--quick already sets the number of processes and checks",
        )
    processes, checks = (1, 20) if args.quick else (args.processes or 3, args.checks or 200)
    given = (args.processes, args.checks, args.width, args.depth)
    if any(number is not None and number < 1 for number in given):
        raise UnusableError("--processes, --checks, --width and --depth must be at least 1")
    require_device("stale reads happen only between a device's streams", library=False)
    configuration = {"quick": args.quick, "width": args.width, "depth": args.depth}
    report = Report(
        "streams", args.out, environment(args.commit, args.out), configuration, {"runs": []}
    )
    for handoff in HANDOFFS:
        for number in range(processes):
            progress.note(f"Checking: {handoff} process {number + 1} of {processes}")
            asked = {
                "handoff": handoff,
                "checks": checks,
                "width": args.width,
                "depth": args.depth,
            }
            process = ChildProcess(answer, _fresh_check, asked)
            try:
                report.raw["runs"].append(process.receive(TIMEOUT_S))
            except ChildError as error:
                raise UnusableError(str(error)) from error
            process.end()
            report.save()
    finished = report.finish()
    found = problems(finished["derived"]["handoffs"])
    data = {"derived": finished["derived"], "problems": list(found)}
    return Outcome("refused" if found else "accepted", data, report.lines())


def problems(handoffs: dict[str, Any]) -> Sequence[str]:
    """Return the problems: a stale read after the two-way handoff, or a vacuous check."""
    found = []
    if handoffs.get("two-way", {}).get("stale"):
        found.append("the two-way handoff read stale data")
    if any(entry["vacuous"] for entry in handoffs.values()):
        found.append("a producer changed nothing, so a stale read could not be seen")
    return found
