"""
``qeffect runtime report guards``: measure the host time that the guard of torch's pipeline takes.

One process runs a whole pipeline of two small stages on the CPU. Steps with and without the guard
alternate, so that all figures come from one run. The thread's processor time is measured, not wall
time, and each figure is a median. Other processes on the machine still raise the figures, because
they use the same caches. On a busy machine, rely only on the ratios.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import distributed

from qeffect import cli
from qeffect.cli.command import Outcome, Progress
from qeffect.contract import Contract
from qeffect.guards.pipelining import UNUSED, guard
from qeffect.keys import TapeKey
from qeffect.report import UnusableError
from qeffect.stage_config import StageConfig

from ..statistics.summary import exact_median

__all__ = ["SCHEDULES", "Price", "add_guards_arguments", "measure", "run_guards"]

#: The measured schedules: three execute a table of actions, and GPipe has its own loop.
SCHEDULES = (
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleGPipe",
)
_MICROBATCHES, _WIDTH = 8, 8


@attrs.frozen
class Price:
    """
    The cost of the guard under one schedule.

    Args:
        schedule: Name of torch's schedule class.
        actions: Number of actions per step: the entries of the rank's row in the schedule table, or
            the F and B actions of GPipe's loop.
        torch_us: Host time of torch's loop with tiny stages, in microseconds per action.
        guard_us: Host time that the guard adds, in microseconds per action.
        update_us: Host time that the guard adds with `follow_optimizer` and two runs of the
            schedule per update, in microseconds per action.
        kernel_us: Host time, in microseconds, that the contract alone takes to check and commit a
            forward action (F).
    """

    schedule: str
    actions: int
    torch_us: float
    guard_us: float
    update_us: float
    kernel_us: float

    def __str__(self) -> str:
        return (
            f"{self.schedule:30} {self.actions:3} actions; us per action: torch "
            f"{self.torch_us:5.1f}, guard {self.guard_us:5.1f} "
            f"({self.guard_us / self.torch_us:.2f} times torch's, "
            f"{self.guard_us / self.kernel_us:.1f} times the contract's check and commit of an "
            f"F), guard with updates {self.update_us:5.1f}"
        )


def add_guards_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `guards`."""
    parser.add_argument(
        "--rounds",
        type=int,
        default=60,
        metavar="N",
        help="number of measured steps of each kind; the kinds are: without guard, with guard, "
        "with guard and updates (default 60)",
    )


def run_guards(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Measure in a process group with this process as its only rank, and print a line per schedule.

    Raises:
        UnusableError: The number of rounds is not positive.
    """
    if args.rounds < 1:
        raise UnusableError(f"--rounds must be at least 1, found {args.rounds}")
    with _alone():
        prices = measure(args.rounds)
    data = {"rounds": args.rounds, "prices": [attrs.asdict(price) for price in prices]}
    return Outcome("accepted", data, [str(price) for price in prices])


def measure(rounds: int = 60) -> list[Price]:
    """
    Measure each schedule; a process group of one rank must exist.

    Args:
        rounds: Number of rounds, each of which times steps without and with the guard; each figure
            is the median over the rounds.
    """
    collects = gc.isenabled()
    gc.disable()  # as trainers do, which collect at steps of their own
    try:
        kernel = _kernel(rounds)
        return [_price(name, rounds, kernel) for name in SCHEDULES]
    finally:
        if collects:
            gc.enable()


def _price(name: str, rounds: int, kernel_us: float) -> Price:
    runs = [_Run(name) for _ in range(3)]
    guard(runs[1].schedule)
    guard(runs[2].schedule).follow_optimizer(runs[2].optimizer, walks=2)
    for run in runs:
        run.epoch()
    times: list[list[float]] = [[], [], []]
    gc.collect()
    for _ in range(rounds):
        for run, own in zip(runs, times, strict=True):
            own.append(_seconds(run.epoch))
    actions = 2 * runs[0].actions  # an epoch of two steps
    plain, guarded, updated = (exact_median(own) / actions * 1e6 for own in times)
    return Price(name, actions // 2, plain, guarded - plain, updated - plain, kernel_us)


class _Run:
    """
    A pipeline of two small stages (of one stage under GPipe), with an optimizer update after every
    two steps.
    """

    def __init__(self, name: str) -> None:
        from torch.distributed.pipelining import PipelineStage, schedules

        count = 1 if name == "ScheduleGPipe" else 2
        x = torch.zeros(1, _WIDTH)
        parts = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(count)]
        stages = [PipelineStage(part, n, count, x.device) for n, part in enumerate(parts)]
        self.schedule: Any = getattr(schedules, name)(
            stages if count > 1 else stages[0],
            _MICROBATCHES,
            loss_fn=torch.nn.functional.mse_loss,
        )
        self.optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
        self._x = torch.zeros(_MICROBATCHES, _WIDTH)
        rows = getattr(self.schedule, "pipeline_order_with_comms", None)
        self.actions = 2 * _MICROBATCHES if rows is None else len(rows[0])

    def epoch(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(2):
            self.schedule.step(self._x, target=self._x)
        self.optimizer.step()


def _kernel(rounds: int) -> float:
    """
    Measure how long a contract with the guard's relations takes to check and commit a forward
    action (F).
    """
    contract = Contract([StageConfig(0, microbatches=8, slots=8)], omit=UNUSED)
    times = []
    for epoch in range(max(rounds, 20)):
        keys, refs = [TapeKey(epoch, 0, m) for m in range(8)], []
        began = time.thread_time()
        for key in keys:
            refs.append(contract.commit(contract.check_forward(key)))
        times.append((time.thread_time() - began) / 8 * 1e6)
        for key, ref in zip(keys, refs, strict=True):
            contract.commit(contract.check_dgrad(key, ref))  # type: ignore[arg-type]
            contract.commit(contract.check_wgrad(key, ref))  # type: ignore[arg-type]
        contract.finalize(0)
        contract.commit_epoch()
    return exact_median(times)


def _seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


@contextmanager
def _alone() -> Iterator[None]:
    """
    A context with a single-rank process group and a single torch thread; both are undone
    afterwards.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store: Any = getattr(distributed, "HashStore")()  # noqa: B009  (torch does not export it)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()
        torch.set_num_threads(threads)


if __name__ == "__main__":
    raise SystemExit(cli.main(["runtime", "report", "guards", *sys.argv[1:]]))
