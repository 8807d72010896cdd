"""
``python -m qeffect.gpu_runtime.lab.comparisons.look_price FILE.toml``: measure the cost of the
check for values that are not finite, as ratios from one run of one process.

Each round times five things: a step; the check; the sums by which a save compares ranks; the
comparison of gradient scales after a step; and the check for stages with zero gradients. A run
without a gradient norm makes this last check in each step. All five parts are thus timed under the
same conditions. Each ratio divides two medians over all rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...ranks.membership import Member
from ...ranks.processes import join_ranks
from ...ranks.worker_assembly import build_worker
from ...runtime import mode_on, without_launches
from ...step.zero_stages import ZeroStages
from ...training.checkpoint.save import tensors_of
from ...training.command import require_processes
from ...training.config_file import read
from ...training.job_assembly import backend_of, open_job
from ...training.look import nonfinite
from ...training.saturation import GradientScales
from ...training.state import checksums
from ..statistics.summary import exact_median

__all__ = ["main", "ratios"]

_WARM = 3


def ratios(config: Path, *, device: str | None = None, rounds: int = 21) -> dict[str, float]:
    """
    Time a run's check for non-finite values beside its steps.

    Args:
        config: The training file; its run must need only one process.
        device: The device; by default the file's.
        rounds: Number of timed rounds, after three untimed rounds.

    Returns:
        Ratios of times. The time of the check is divided by the times of a step, of a save's sums,
        and of `look_every` steps (0 if the file asks for no check). The times of the comparison of
        scales and of the check for zero gradients are each divided by the time of a step.

    Raises:
        UnusableError: The file cannot be used, or its run needs more than one process.
    """
    run = read(config, run={"device": device})
    data = open_job(run)
    require_processes(run, data.job, f"look_price {config}")
    limits = run.waits()
    member = join_ranks(run.run.device, limits, deterministic=run.run.deterministic)
    mode = mode_on(member.device, without_launches(run.parallel.mode))
    worker = build_worker(member, data.job, backend_of(run), mode=mode, limits=limits)
    naming = data.job.name_of
    scales = GradientScales(worker, naming)
    zeros = ZeroStages(worker.row.stages, member.device)
    held: list[Any] = []

    def step() -> None:
        held[:] = [worker.step()]

    names = "step", "look", "sums", "scales", "zeros"
    spent: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(_WARM + rounds):
        data.job.prepare(turn, worker.optimizer)
        for name, work in (
            ("step", step),
            ("look", lambda: nonfinite(worker, naming)),
            ("sums", lambda: checksums(tensors_of(worker, naming, {}))),
            ("scales", scales.take),
            ("zeros", lambda: zeros.take(held[0])),
        ):
            taken = _time(member, work)
            if turn >= _WARM:
                spent[name].append(taken)
    worker.close()
    taken_step, look, sums, fall, zero = (exact_median(found) for found in spent.values())
    every = run.run.look_every
    return {
        "look / step": look / taken_step,
        "look / sums of a save": look / sums,
        f"look / {every} steps": look / taken_step / every if every else 0.0,
        "scales / step": fall / taken_step,
        "zeros / step": zero / taken_step,
    }


def _time(member: Member, work: Callable[[], object]) -> float:
    member.synchronize()
    began = time.perf_counter()
    work()
    member.synchronize()
    return time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the ratios for a training file, and print them."""
    parser = argparse.ArgumentParser(
        description="measure the cost of the check for values that are not finite"
    )
    parser.add_argument("config", type=Path, help="training file of one process")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device (default: the file's)")
    parser.add_argument("--rounds", type=int, default=21, help="timed rounds (default 21)")
    args = parser.parse_args(argv)
    for name, ratio in ratios(args.config, device=args.device, rounds=args.rounds).items():
        print(f"{name:24} {ratio:.4f}")


if __name__ == "__main__":
    main()
